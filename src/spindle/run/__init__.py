"""Do it: a Program on `torch.distributed`. Knows instructions and code, not how tasks were written."""

from spindle.run.compute import seed_of
from spindle.run.executor import Executor
from spindle.run.op_code import LayerCode, LayersCode, LossCode, OpCode
from spindle.run.rank_program import held_parameters
from spindle.run.shape_inference import ShapeInference
from spindle.run.step import Losses, MicroStep, Spans, Watch
from spindle.run.world import World, join_world

__all__ = [
    "Executor",
    "LayerCode",
    "LayersCode",
    "LossCode",
    "Losses",
    "MicroStep",
    "OpCode",
    "ShapeInference",
    "Spans",
    "Watch",
    "World",
    "held_parameters",
    "join_world",
    "seed_of",
]
