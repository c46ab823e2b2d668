"""MetaGraphs: a workload contracted to MetaOps, with edges and levels. Knows no time."""

from spindle.graph.contract import Operator, contract, metagraph_of
from spindle.graph.metagraph import MetaGraph, MetaOp, microbatch_name

__all__ = ["MetaGraph", "MetaOp", "Operator", "contract", "metagraph_of", "microbatch_name"]
