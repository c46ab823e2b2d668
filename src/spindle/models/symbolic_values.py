"""Each tensor of a recording in its two forms, and as Python source text.

Inlined code runs on *symbolic* fake tensors, whose sizes are SymInts, so that code which reads a size gives a text that
is right for every batch. Blocks and other leaf modules run on *concrete* ones, with plain sizes: a block may loop over
its sequence length without unrolling that loop into the recording. A tensor changes form where it enters or leaves a
leaf module; the two forms are paired by id, so that a tensor which a module passes through unchanged is recognised.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn
from torch._guards import GuardSource, Source
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten
from torch.utils._sympy.functions import Mod, PythonMod
from torch.utils._sympy.printers import PythonPrinter

from spindle.models.fake import FakeWeights, fake_like, fake_mode
from spindle.models.statements import (
    INNER_TENSOR,
    Attribute,
    Code,
    References,
    UnsupportedForwardError,
    ValueDependenceError,
)

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
LITERALS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_NAMED_CONSTANTS = (torch.memory_format, torch.Generator, enum.Enum, type(Ellipsis))


@dataclass(frozen=True)
class SizeSource(Source):
    """Where a size comes from, by name. torch._dynamo has such a class, and takes a second to import."""

    text: str

    @property
    def guard_source(self) -> GuardSource:
        return GuardSource.CONSTANT

    @property
    def _name_template(self) -> str:
        return self.text


class _ShapeEnv(ShapeEnv):
    """A ShapeEnv that knows the example value of each of its symbols.

    It does not look up the user's stack frame for each symbol: torch would import its compiler for that.
    """

    def __init__(self) -> None:
        super().__init__(duck_shape=False)  # equal sizes get different symbols: they may be equal by coincidence
        self.values: dict[sympy.Symbol, int] = {}

    def _get_user_frame(self) -> None:
        return None

    def evaluate_expr(self, orig_expr: Any, hint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Specialize sizes in remainders of floats (`height % 0.5`), which torch cannot evaluate symbolically."""
        if hint is None or all(remainder.args[1].is_integer for remainder in orig_expr.atoms(Mod, PythonMod)):
            return super().evaluate_expr(orig_expr, hint, *args, **kwargs)
        for symbol in orig_expr.free_symbols & self.values.keys():
            super().evaluate_expr(sympy.Eq(symbol, self.values[symbol]))
        return sympy.sympify(hint)


@dataclass(slots=True)
class TensorInfo:
    """How the recorded code refers to a tensor, and the operation that produced it: (operator, args, kwargs)."""

    text: str
    uses: frozenset[str]
    attributes: tuple[Attribute, ...] = ()
    producer: tuple[Any, Any, Any] | None = None
    is_constant: bool = False


class SymbolicValues:
    """The tensors of a recording. `select_entry` records the selection of an entry of an unbound tensor that has no
    statement yet, `find_inner` the use of a tensor that a leaf module made inside and did not return."""

    def __init__(self, code: Code, module: nn.Module, device: torch.device) -> None:
        self._code = code
        self.shape_env = _ShapeEnv()
        self.symbolic_mode = fake_mode(self.shape_env)
        self.symbolic_mode.cache_enabled = False  # with symbolic sizes, hardly any operation is a cache hit
        self.concrete_mode = fake_mode()
        self.weights = FakeWeights(module, self.concrete_mode, device)
        self.tensors: dict[int, TensorInfo] = {}  # by the id of the symbolic tensor
        self.storages: dict[str, int] = {}  # by variable
        self.attribute_storages: dict[int, Attribute] = {}
        # Entries of an unbound tensor that no statement stands for yet: (tensor, axis, index).
        self.entries: dict[int, tuple[torch.Tensor, int, int]] = {}
        self.select_entry: Callable[[torch.Tensor], None] | None = None
        self.find_inner: Callable[[torch.Tensor], torch.Tensor | None] | None = None
        self.symbolic_of: dict[int, torch.Tensor] = {}  # by the id of the concrete tensor
        self._concrete_of: dict[int, torch.Tensor] = {}  # by the id of the symbolic tensor
        self._alive: list[Any] = []  # objects whose ids are keys: while they live, no id is reused

    def keep_alive(self, value: Any) -> None:
        self._alive.append(value)

    def make_symbolic(self, leaf: Any, name: str) -> Any:
        """A tensor or int in symbolic form; its sizes are read from the variable `name`."""
        if not isinstance(leaf, torch.Tensor):
            return self.make_symbol(leaf, name, name)
        # A symbol for each size, even where two sizes are equal in this example: a mask's length and a hidden size may
        # be.
        sizes = [self.make_symbol(int(size), f"{name}.shape[{axis}]", name) for axis, size in enumerate(leaf.shape)]
        with _disable_current_modes(), self.symbolic_mode:
            symbolic = torch.empty(sizes, dtype=leaf.dtype, device=leaf.device)
        self.register(symbolic, name)
        is_concrete = isinstance(leaf, FakeTensor) and leaf.fake_mode is self.concrete_mode
        self._pair(symbolic, leaf if is_concrete else fake_like(self.concrete_mode, leaf))
        return symbolic

    def make_symbol(self, value: int, text: str, source: str) -> Any:
        """A symbol for an int that the code reads as `text`.

        As in torch.compile, 0 and 1 are specialized: they broadcast, so code for them does not hold for other sizes.
        """
        if value in (0, 1) or value < 0:
            self._code.add_check(f"{text} == {value}", frozenset((source,)))
            return value
        origin = SizeSource(f"{source}_{len(self._code.statements)}")
        symbol = self.shape_env.create_symbol(value, origin, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        self.shape_env.values[symbol] = value
        self._code.add_size(str(symbol), text, source)
        return self.shape_env.create_symintnode(symbol, hint=value, source=origin)

    def _pair(self, symbolic: torch.Tensor, concrete: torch.Tensor) -> None:
        self._concrete_of[id(symbolic)], self.symbolic_of[id(concrete)] = concrete, symbolic
        self._alive += [symbolic, concrete]

    def to_symbolic(self, leaf: Any) -> Any:
        """The symbolic tensor for a concrete one, a parameter or a buffer. Real tensors become constants."""
        if not isinstance(leaf, torch.Tensor) or id(leaf) in self.tensors:
            return leaf
        if id(leaf) in self.symbolic_of:
            return self.symbolic_of[id(leaf)]
        owner = self.weights.owners.get(id(leaf))
        if owner is not None:
            # Referred to by attribute, not by value: moving a module to a device replaces its buffers.
            with _disable_current_modes(), self.symbolic_mode:
                symbolic = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
            text = f"{self._code.name_of(owner[0], 'm')}.{owner[1]}"
            self._pair(symbolic, leaf)
            self.tensors[id(symbolic)] = TensorInfo(text=text, uses=frozenset(), attributes=(owner,))
            self.attribute_storages[symbolic.untyped_storage()._cdata] = owner
            return symbolic
        if id(leaf) in self.entries:
            return leaf
        # A fake tensor that no statement returned has leaked out of a leaf module, through an attribute or a list that
        # the inlined code shares with it.
        inner = None if self.find_inner is None else self.find_inner(leaf)
        if inner is not None:
            return inner
        if isinstance(leaf, FakeTensor):
            raise UnsupportedForwardError(INNER_TENSOR)
        if torch._C._functorch.is_functorch_wrapped_tensor(leaf):
            raise UnsupportedForwardError("it uses a tensor inside vmap in a way that cannot be recorded")
        self._alive.append(leaf)
        self.tensors[id(leaf)] = TensorInfo(text=self._code.name_of(leaf, "c"), uses=frozenset(), is_constant=True)
        return leaf

    def to_concrete(self, leaf: Any) -> Any:
        """The concrete counterpart of a symbolic tensor or size."""
        if isinstance(leaf, SYMBOLIC):
            if leaf.node.hint is None:
                raise ValueDependenceError("a size between its blocks depends on values of tensors")
            return leaf.node.hint
        if type(leaf) is torch.Size:
            return tuple(map(self.to_concrete, leaf))
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in self.symbolic_of or id(leaf) in self.weights.owners:
            return leaf
        if id(leaf) not in self._concrete_of:
            sizes = tuple(map(self.to_concrete, leaf.shape))
            with _disable_current_modes(), self.concrete_mode:
                concrete = torch.empty(sizes, dtype=leaf.dtype, device=leaf.device)
            self._pair(leaf, concrete)
        return self._concrete_of[id(leaf)]

    def register(self, tensor: torch.Tensor, name: str, producer: Any = None) -> None:
        """Assign a variable to a tensor. Sizes that depend on values (of `nonzero`) are read from it."""
        self._alive.append(tensor)
        if id(tensor) in self.tensors:
            return
        self.tensors[id(tensor)] = TensorInfo(text=name, uses=frozenset((name,)), producer=producer)
        # Storages tell `chain` which variables are views of one another: a cut copies what crosses it, which would
        # separate a view from its base.
        self.storages[name] = tensor.untyped_storage()._cdata
        # Symbols that are not bound yet are sizes that this operation made: they depend on values.
        size: Any
        for axis, size in enumerate(tensor.shape):
            if (
                not isinstance(size, int)
                and str(size.node.expr) not in self._code.variables
                and size.node.expr.is_symbol
            ):
                self._code.add_size(str(size.node.expr), f"{name}.shape[{axis}]", name)

    def forget_producers(self, written: Iterable[torch.Tensor]) -> None:
        """Forget how tensors were computed that are written to, and views of the same memory: `constant_value` runs
        producers again, and would miss the write."""
        storages = {tensor.untyped_storage()._cdata for tensor in written}
        for info in self.tensors.values() if storages else ():
            if self.storages.get(info.text) in storages:
                info.producer = None

    # Values as Python source text.

    def call_text(self, args: Any, kwargs: Any, where: str) -> tuple[str, References]:
        references = References()
        texts = [self.text(arg, references, where) for arg in args]
        texts += [f"{name}={self.text(arg, references, where)}" for name, arg in kwargs.items()]
        return ", ".join(texts), references

    def text(self, value: Any, references: References, where: str) -> str:
        """The source text of a value. `where` begins the error message for a value that has none."""
        value = self.to_symbolic(value)
        if isinstance(value, torch.Tensor):
            if id(value) in self.entries and id(value) not in self.tensors:
                assert self.select_entry is not None
                self.select_entry(value)
            if id(value) not in self.tensors:
                raise UnsupportedForwardError("it uses a tensor that was made where it could not be recorded")
            info = self.tensors[id(value)]
            references.uses |= info.uses
            references.attributes += info.attributes
            return info.text
        if isinstance(value, SYMBOLIC):
            return self.expression(value.node.expr, references)
        if type(value) in (list, tuple, torch.Size):
            parts = [self.text(part, references, where) for part in value]
            if type(value) is list:
                return f"[{', '.join(parts)}]"
            return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
        if type(value) is dict and all(isinstance(key, str | int) for key in value):
            items = (f"{key!r}: {self.text(item, references, where)}" for key, item in value.items())
            return "{" + ", ".join(items) + "}"
        if isinstance(value, slice):
            limits = (self.text(limit, references, where) for limit in (value.start, value.stop, value.step))
            return f"slice({', '.join(limits)})"
        if isinstance(value, bool | int | str | type(None)) and type(value).__module__ == "builtins":
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        if isinstance(value, torch.dtype):
            return str(value)
        if isinstance(value, (*LITERALS, *_NAMED_CONSTANTS)) or callable(value):
            return self._code.name_of(value, "c")
        # Any other registered pytree is rebuilt from its leaves; what pytree does not know is a leaf itself.
        leaves, spec = tree_flatten(value)
        if not (len(leaves) == 1 and leaves[0] is value):
            parts = [self.text(part, references, where) for part in leaves]
            return f"_unflatten([{', '.join(parts)}], {self._code.name_of(spec, 'c')})"
        hint = "; pass use_cache=False" if "Cache" in type(value).__name__ else ""
        raise UnsupportedForwardError(f"{where} a {type(value).__name__}, which is not a nest of tensors{hint}")

    def expression(self, expression: Any, references: References) -> str:
        """The source text of a size. Symbols without a variable are sizes that no statement can read."""
        names = {str(symbol) for symbol in expression.free_symbols}
        if names - self._code.variables:
            raise ValueDependenceError("a size between its blocks depends on values of tensors")
        references.uses |= names
        return f"({PythonPrinter().doprint(expression)})"
