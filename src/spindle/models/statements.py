"""Statements: a recorded forward as data, and the code that a recording is adding them to.

A `Recording` is what `record_forward` returns and `chain` cuts into layers. `Code` is the same while it grows: the
statements so far, their variables, and the namespace in which their text will run.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from spindle.errors import GuardError

Context = tuple[Any, ...]  # whether gradients are enabled, and the state of autocast for each device type
Attribute = tuple[nn.Module, str]  # a tensor of a module, by owner and attribute name

_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))

INNER_TENSOR = (
    "it uses a tensor that one of its blocks made and did not return, or that an earlier call left behind; where its "
    "caller asks for such tensors (output_attentions, output_router_logits), leave that out"
)


class UnsupportedForwardError(Exception):
    """A forward that cannot be recorded. The message is the end of a sentence that starts with the module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One line of the recorded code: `name = text`, or `text` alone where the statement runs for its side effect.

    `kind` is "pick" (takes an output apart), "size" (reads a size), "check" (tests a guard), or else equal for
    statements that do the same work. `uses` are the variables that it reads, `attributes` the module tensors that it
    reads, `writes` the variables whose tensors it modifies in place.
    """

    name: str
    text: str
    uses: frozenset[str]
    kind: str = ""
    module: nn.Module | None = None
    is_block: bool = False
    attributes: tuple[Attribute, ...] = ()
    writes: tuple[str, ...] = ()
    has_effect: bool = False
    context: Context = ()
    # Side effects of a module without parameters; see `effects`.
    draws_random_numbers: bool = False
    changes_module: bool = False
    returns_number: bool = False  # a tensor without dimensions among what a module returns: a loss


def has_number(output: Iterable[Any]) -> bool:
    """Whether a leaf is a tensor with one floating-point number, and no dimensions."""
    return any(isinstance(leaf, torch.Tensor) and not leaf.dim() and leaf.is_floating_point() for leaf in output)


@dataclass(slots=True)
class References:
    """The variables and module tensors that a piece of generated text refers to."""

    uses: set[str] = field(default_factory=set)
    attributes: list[Attribute] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A forward as statements.

    `inputs` has the variable of each leaf of the arguments, or None for a leaf that is neither a tensor nor an int:
    such a leaf must equal its entry in `constants` in every later call. `namespace` maps the other names in the text to
    their values, except `math`, `torch`, and pytree's `_leaves` and `_unflatten`.
    """

    statements: tuple[Statement, ...]
    spec: Any  # pytree spec of (args, kwargs)
    inputs: tuple[str | None, ...]
    constants: tuple[Any, ...]
    output: str  # text of the returned value
    output_uses: frozenset[str]
    output_attributes: tuple[Attribute, ...]
    namespace: Mapping[str, Any]
    outer_context: Context
    storages: Mapping[str, int]  # by variable; views of one another have the same storage
    result: Any  # the output, as concrete fake tensors
    ran_on_zeros: bool = False  # whether a module read values, so that sizes in `result` may be others than its own
    leaves: tuple[tuple[str, References], ...] = ()  # the text of each leaf of the output, and what it refers to
    # Leaves of the output that are losses over tokens, where statements do not show it: "mean" with the text of total
    # and count, or "sum" with the inputs that it is divided by.
    losses: Mapping[int, tuple[str, str, References]] = field(default_factory=dict)


def current_context() -> Context:
    return (
        torch.is_grad_enabled(),
        *((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
    )


class Code:
    """The statements of a recording in progress. Variables are single-assignment, so a name stands for one value."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.variables: set[str] = set()
        self.namespace: dict[str, Any] = {}
        self._namespace_names: dict[int, str] = {}

    def new_variable(self) -> str:
        return f"t{len(self.statements)}"

    def add(self, statement: Statement) -> None:
        self.statements.append(statement)
        self.variables.add(statement.name)

    def insert(self, position: int, statement: Statement) -> None:
        """Add a statement before one that is there."""
        self.statements.insert(position, statement)
        self.variables.add(statement.name)

    def add_check(self, text: str, uses: frozenset[str]) -> None:
        self.add(Statement(name="", text=text, uses=uses, kind="check", has_effect=True))

    def add_pick(self, text: str, source: str) -> str:
        name = self.new_variable()
        self.add(Statement(name=name, text=text, uses=frozenset((source,)), kind="pick"))
        return name

    def add_size(self, symbol: str, text: str, source: str) -> None:
        self.add(Statement(name=symbol, text=text, uses=frozenset((source,)), kind="size"))

    def name_of(self, value: Any, letter: str) -> str:
        """The name under which the text finds an object in its namespace."""
        if id(value) not in self._namespace_names:
            name = f"{letter}{len(self._namespace_names)}_"
            self._namespace_names[id(value)] = name
            self.namespace[name] = value
        return self._namespace_names[id(value)]


def signature_of(module: nn.Module) -> str:
    """A string that is equal for modules of the same type, settings and parameter shapes."""
    shapes = ",".join(f"{name}{tuple(parameter.shape)}" for name, parameter in module.named_parameters())
    return f"{type(module).__name__}|{module!r}|{shapes}"


class ValueDependenceError(UnsupportedForwardError):
    """A forward that branches on values of tensors between its blocks."""


def needs_values(error: BaseException) -> bool:
    """Whether a forward that could not be recorded may run on real tensors."""
    return isinstance(error, ValueDependenceError) or not isinstance(error, UnsupportedForwardError)


def failure_reason(error: BaseException) -> str:
    """Why a forward could not be recorded, with the line of the user's code if that helps."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    line = f" ({frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    if isinstance(error, UnsupportedForwardError):
        return f"{error}{line}"
    if isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException):
        return (
            f"its forward branches on values of tensors between its blocks{line}; leave out what the branch is about "
            "(labels), or move it into a submodule"
        )
    text = (str(error).splitlines() or [""])[0][:200]
    return f"its forward cannot be recorded ({type(error).__name__}: {text}){line}"


def _is_library(file: str) -> bool:
    """Whether a file belongs to torch or Spindle; a script in a folder of such a name does not."""
    return file.startswith(_LIBRARIES)


def guard_error(module: nn.Module, text: str) -> GuardError:
    return GuardError(
        module,
        f"{type(module).__name__} was recorded for sizes with {text}, which does not hold for this batch: its forward "
        "may take a different branch. Pad batches to the same sizes, or register the module with "
        "spindle.module(..., split=False)",
    )
