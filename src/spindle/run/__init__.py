"""Do it: a Program on `torch.distributed`. Knows instructions and code, not how tasks were written."""

from spindle.run.code import LayerCode, LayersCode, LossCode, OpCode
from spindle.run.compute import seed_of
from spindle.run.executor import Executor
from spindle.run.forms import Forms
from spindle.run.side import held_parameters
from spindle.run.step import Losses, Spans, Turn, Watch
from spindle.run.world import World, join_world

__all__ = [
    "Executor",
    "Forms",
    "LayerCode",
    "LayersCode",
    "LossCode",
    "Losses",
    "OpCode",
    "Spans",
    "Turn",
    "Watch",
    "World",
    "held_parameters",
    "join_world",
    "seed_of",
]
