"""What was recorded of a task, as values that can be compared: has anything changed that its code reads from outside?

A task is recorded once, so a number that its code takes from a global variable or an attribute stays what it was then.
Plain PyTorch would read it in every step. So the task is recorded again after some steps, and must be the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from spindle.errors import TrainingError
from spindle.run import fingerprint_of, pytree_meta
from spindle.train.task import ModuleHandle
from spindle.train.task_errors import line_of_node


class TensorConstant:
    """A tensor from outside the task, compared as it is now: if it is changed in place, training sees that."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorConstant):
            return False
        recorded, now = self._tensor, other._tensor
        if recorded is now:
            return True
        if pytree_meta(recorded, 0) != pytree_meta(now, 0):
            return False
        return fingerprint_of(_values_of(recorded)) == fingerprint_of(_values_of(now))

    __hash__ = None  # type: ignore[assignment]


def _values_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The values of a tensor, and the places of those of a sparse one."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return []
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), *_values_of(tensor.values())]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), *_values_of(tensor.values())]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), *_values_of(tensor.values())]
    return [tensor.detach().resolve_conj().resolve_neg()]


@dataclass(frozen=True, slots=True)
class RecordedLine:
    """One operation of a task: what it is, the constants that it is given, and the line of the task's code."""

    operation: str
    constants: tuple[Any, ...]
    line: str


RecordedLines = tuple[RecordedLine, ...]


def recorded_lines(graph: fx.Graph, root: nn.Module) -> RecordedLines:
    """The operations of a recorded task, in order. `root` has its constants."""
    positions = {node: position for position, node in enumerate(graph.nodes)}

    def constant(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return f"%{positions[value]}"
        if isinstance(value, ModuleHandle):
            return value.name
        if isinstance(value, torch.Tensor):
            return TensorConstant(value)
        if isinstance(value, slice):
            return tuple(constant(bound) for bound in (value.start, value.stop, value.step))
        if isinstance(value, float) and math.isnan(value):
            return "nan"  # which is equal to itself
        if value is None or isinstance(value, int | float | complex | str | torch.dtype | torch.device):
            return value
        return type(value).__name__  # objects have no comparison that can be relied on

    lines = []
    for node in graph.nodes:
        target: Any = node.target
        given: list[Any] = [node.args, node.kwargs]
        if node.op == "get_attr":
            target, given = "constant", [_attribute(root, str(node.target))]
        name = target if isinstance(target, str) else getattr(target, "__qualname__", type(target).__name__)
        constants = tuple(constant(leaf) for leaf in tree_leaves(given, is_leaf=_is_leaf))
        lines.append(RecordedLine(f"{node.op} {name}", constants, line_of_node(node)))
    return tuple(lines)


def _attribute(root: nn.Module, path: str) -> Any:
    value: Any = root
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _is_leaf(value: Any) -> bool:
    return value is None or isinstance(value, slice)


def check_lines(task: str, first: RecordedLines, now: RecordedLines) -> None:
    """Raise an error that names the line if a task, recorded again, is not what it was."""
    if [(line.operation, line.constants) for line in first] == [(line.operation, line.constants) for line in now]:
        return
    for before, after in zip(first, now, strict=False):
        if before.operation != after.operation or len(before.constants) != len(after.constants):
            _refuse(task, after.line, "its code takes another path than when the task was recorded")
        for old, new in zip(before.constants, after.constants, strict=True):
            if old != new:
                is_plain = isinstance(old, int | float | str) and isinstance(new, int | float | str)
                what = f"{old!r} has become {new!r}" if is_plain else "a constant has changed"
                _refuse(task, after.line, f"{what} since the task was recorded")
    _refuse(task, "", "its code takes another path than when the task was recorded")


def _refuse(task: str, line: str, what: str) -> None:
    raise TrainingError(
        f"task {task!r}{f', {line}' if line else ''}: {what}, and training does not see the change. A task is recorded "
        "once: put what changes from step to step into the batch, or into spindle.task(weight=lambda step: ...) if it "
        "weights the loss; after a change between fits, make a new Trainer"
    )
