"""What does a module's forward do around its blocks? Its own Python runs once, on tensors without values.

Noted are the calls of blocks and of modules that hold none, each as one step whose own forward runs later, unchanged;
and the torch operations in between (masks, positions, residual sums), as the dispatcher sees them, below autograd,
autocast and vmap. Sizes are symbols: a step that needs a batch's rows or a sentence's length computes it when it runs.
Where the code branches on sizes, the way it took holds for some of them; those conditions are steps too, and raise
where a later batch does not meet them. What a module gives is opaque: its sizes are read when it has run.

Left out: code that decides by values of tensors, and objects that are no nests of tensors (a cache). Both are refused
with a sentence.
"""

from __future__ import annotations

import enum
import inspect
import linecache
import math
import pickle
import random
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import sympy
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils._sympy.functions import Mod, PythonMod
from torch.utils._sympy.printers import PythonPrinter
from torch.utils.checkpoint import CheckpointFunction

from spindle.errors import GuardError
from spindle.models.valueless import Swapped, as_when_compiling, device_of, run_opaque, stand_in, without_caches

Context = tuple[Any, ...]  # whether gradients are noted, and how autocast stands


class Refusal(Exception):
    """A forward cannot be recorded; says why, as the end of a sentence about the module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of a forward: a variable `name` gets the value of `text`. Without a name, it is done for its effect.

    `kind` is equal for steps that do alike. `fetched` are tensors that it reads from modules, by owner and attribute;
    `writes` are variables whose tensors it changes.
    """

    name: str
    text: str
    uses: frozenset[str]
    kind: str = ""
    module: nn.Module | None = None
    is_block: bool = False
    fetched: tuple[tuple[nn.Module, str], ...] = ()
    writes: tuple[str, ...] = ()
    has_effect: bool = False
    context: Context = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A forward as steps over `inputs`, the variables of the arguments' leaves; None stands for one that is no tensor
    and no number, which must be as it was. `bound` has what the text names beside variables, `math`, `torch`, and
    pytree's `_leaves` and `_unflatten`."""

    steps: tuple[Step, ...]
    spec: Any  # of the arguments
    inputs: tuple[str | None, ...]
    constants: tuple[Any, ...]
    output: str  # text
    output_uses: frozenset[str]
    output_fetched: tuple[tuple[nn.Module, str], ...]
    bound: Mapping[str, Any]
    outside: Context
    aliases: Mapping[str, int]  # variables of one memory have one number
    result: Any  # the output, as tensors without values


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def normaliser(module: nn.Module) -> Callable[[Any, Any], Arguments]:
    """A function that brings a call's arguments into one form, by place as far as that goes."""
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return lambda args, kwargs: (args, kwargs)

    def normalised(args: Any, kwargs: Any) -> Arguments:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:  # a wrapper takes more than the signature says
            return args, kwargs
        return given.args, given.kwargs

    return normalised


def record_forward(module: nn.Module, args: Any, kwargs: Any, blocks: Iterable[nn.Module]) -> Recording:
    """Records a forward over arguments like these, of which shapes and types count. Raises what the forward raises."""
    recorder = _Recorder(module, blocks)
    return recorder.record(*normaliser(module)(args, kwargs))


def _context() -> Context:
    return (
        torch.is_grad_enabled(),
        *((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
    )


class _Sizes(ShapeEnv):
    """Does not note from which line of code a symbol came: for that, torch would import its compiler. `values` has the
    value of each symbol."""

    def __init__(self) -> None:
        super().__init__(duck_shape=False)
        self.values: dict[sympy.Symbol, int] = {}

    def _get_user_frame(self) -> None:
        return None

    def evaluate_expr(self, orig_expr: Any, hint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """torch cannot decide about remainders of floats (`height % 0.5`): the sizes in them are fixed instead."""
        if hint is None or all(remainder.args[1].is_integer for remainder in orig_expr.atoms(Mod, PythonMod)):
            return super().evaluate_expr(orig_expr, hint, *args, **kwargs)
        for symbol in orig_expr.free_symbols & self.values.keys():
            super().evaluate_expr(sympy.Eq(symbol, self.values[symbol]))
        return sympy.sympify(hint)


@dataclass(slots=True)
class _Known:
    """A tensor of the forward: its text, and what made it where that was a torch operation."""

    text: str
    uses: frozenset[str]
    fetched: tuple[tuple[nn.Module, str], ...] = ()
    made_by: tuple[Any, Any, Any] | None = None
    is_constant: bool = False


@dataclass(slots=True)
class _Phrase:
    """Text under construction, with what it names."""

    uses: set[str] = field(default_factory=set)
    fetched: list[tuple[nn.Module, str]] = field(default_factory=list)


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_IN_SIGHT = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_BY_NAME = (torch.memory_format, torch.Generator, enum.Enum, type(Ellipsis))
_VIEWS = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}  # strides may be others when it runs


_CALL = "_compiled_call_impl"  # what nn.Module.__call__ runs instead of a module's own forward
_recording_lock = threading.RLock()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes steps while a forward runs. Two worlds: tensors of the forward have symbols for sizes; modules run on
    twins of them with plain sizes, out of sight."""

    def __init__(self, module: nn.Module, blocks: Iterable[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module = module
        self._blocks = {id(block) for block in blocks}
        inner = list(module.modules())
        # What holds a block is opened; all else that belongs to the module is a step.
        self._opened = {id(one) for one in inner if any(id(each) in self._blocks for each in one.modules())}
        self._opened -= self._blocks
        self._inside = {id(one): path for path, one in module.named_modules()}
        self._sizes = _Sizes()
        self._mode = FakeTensorMode(shape_env=self._sizes, allow_non_fake_inputs=True)
        self._mode.cache_enabled = False  # no two operations are alike where sizes are symbols
        self._plain = FakeTensorMode(allow_non_fake_inputs=True)
        self._steps: list[Step] = []
        self._bound: dict[str, Any] = {}
        self._bound_names: dict[int, str] = {}
        self._known: dict[int, _Known] = {}
        self._twins: dict[int, torch.Tensor] = {}
        self._originals: dict[int, torch.Tensor] = {}
        self._alive: list[Any] = []  # so that no id is used twice
        self._aliases: dict[str, int] = {}
        self._pieces: dict[int, tuple[torch.Tensor, int, int]] = {}  # entries of tensors, with axis and number
        self._named: set[str] = set()
        self._num_guards = 0
        self._asked_sizes = False
        self._is_out_of_sight = self._is_vmapped = False
        self._outside: Context = ()

    # The run.

    def record(self, args: Any, kwargs: Any) -> Recording:
        leaves, spec = tree_flatten((args, kwargs))
        device = device_of(leaves)
        self._outside = _context()
        self._swapped = Swapped(self._module, self._plain, device)
        inputs: list[str | None] = []
        values: list[Any] = []
        for number, leaf in enumerate(leaves):
            name = f"a{number}"
            is_named = isinstance(leaf, torch.Tensor) or type(leaf) is int
            inputs.append(name if is_named else None)
            values.append(self._symbolic(leaf, name, "argument") if is_named else leaf)
        before = _chance()
        try:
            with self._swapped, without_caches(self._module), self._watching(), ExitStack() as stack:
                stack.enter_context(as_when_compiling())
                stack.enter_context(self._mode)
                stack.enter_context(self)
                stack.enter_context(torch._C._AutoDispatchBelowAutograd())
                args, kwargs = tree_unflatten(values, spec)
                result = self._module(*args, **kwargs)
        finally:
            # Whatever else went wrong went wrong because of it.
            if _chance() != before:
                raise Refusal(
                    "its forward draws random numbers of Python or numpy between its blocks, which would be drawn once "
                    "for all; switch that off (layerdrop, apply_spec_augment) or draw them with torch"
                )
        self._note_guards()
        phrase = _Phrase()
        output = self._text(result, phrase, "it returns")
        return Recording(
            steps=tuple(self._steps),
            spec=spec,
            inputs=tuple(inputs),
            constants=tuple(None if name else leaf for name, leaf in zip(inputs, leaves, strict=True)),
            output=output,
            output_uses=frozenset(phrase.uses),
            output_fetched=tuple(phrase.fetched),
            bound=self._bound,
            outside=self._outside,
            aliases=self._aliases,
            result=tree_map(self._twin, result),
        )

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Have calls of the module's parts and of custom autograd functions come here.

        A part is intercepted by its own `_compiled_call_impl`, which `nn.Module.__call__` calls where there is one
        (`nn.Module.compile` sets it), so no other module is touched. `torch.autograd.Function.apply` and
        `torch.Tensor.__len__` have no such hook and are replaced: calls of other threads pass through. One thread
        records at a time; a recording inside a recording is fine.
        """
        apply, length = torch.autograd.Function.__dict__["apply"], torch.Tensor.__len__
        thread = threading.get_ident()

        def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_out_of_sight or self._is_vmapped or threading.get_ident() != thread:
                return apply.__func__(cls, *args, **kwargs)
            if torch._C._are_functorch_transforms_active():
                # Arguments are no tensors of the forward: what the function does with them is noted instead.
                self._is_vmapped = True
                try:
                    return apply.__func__(cls, *args, **kwargs)
                finally:
                    self._is_vmapped = False
            if cls is CheckpointFunction:  # what is recomputed in backward is seen when it runs
                return args[0](*args[2:])
            return self._opaque(cls, lambda a, k: apply.__func__(cls, *a, **k), args, kwargs)

        def measured(tensor: torch.Tensor) -> int:
            if threading.get_ident() == thread and _is_hint(sys._getframe(1)):
                raise TypeError("a list of unknown length")  # which is caught by who asked
            return length(tensor)  # type: ignore[no-any-return, no-untyped-call]

        with _recording_lock, ExitStack() as stack:
            for part in self._module.modules():
                if id(part) not in self._opened:
                    stack.enter_context(self._intercepted(part, thread))
            torch.Tensor.__len__ = measured  # type: ignore[method-assign]
            torch.autograd.Function.apply = classmethod(applied)  # type: ignore[method-assign, assignment]
            try:
                yield
            finally:
                torch.Tensor.__len__ = length  # type: ignore[method-assign]
                torch.autograd.Function.apply = apply  # type: ignore[method-assign]

    @contextmanager
    def _intercepted(self, part: nn.Module, thread: int) -> Iterator[None]:
        """Have calls of one module, in this thread, come here."""
        attributes = vars(part)
        compiled = attributes.get(_CALL)
        run = part._call_impl if compiled is None else compiled

        def called(*args: Any, **kwargs: Any) -> Any:
            if self._is_out_of_sight or threading.get_ident() != thread:
                return run(*args, **kwargs)
            return self._opaque(part, lambda a, k: run(*a, **k), args, kwargs)

        attributes[_CALL] = called
        try:
            yield
        finally:
            if compiled is None:
                del attributes[_CALL]
            else:
                attributes[_CALL] = compiled

    def _opaque(self, target: Any, run: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
        """Notes a call as one step; it runs on twins."""
        self._note_guards()
        module = target if isinstance(target, nn.Module) else None
        where = f"it gives {self._inside[id(module)]!r}" if module is not None else f"it gives {target.__name__}"
        phrase = _Phrase()
        callee = self._name_of(target, "m") if module is not None else f"{self._name_of(target, 'c')}.apply"
        given = [self._text(arg, phrase, where) for arg in args]
        given += [f"{name}={self._text(arg, phrase, where)}" for name, arg in kwargs.items()]
        twins = tree_map(self._twin, (tuple(args), dict(kwargs)))
        self._is_out_of_sight = True
        try:
            result = run_opaque(run, twins, self._plain, self._swapped)
        finally:
            self._is_out_of_sight = False
        name = f"t{len(self._steps)}"
        self._add(
            Step(
                name=name,
                text=f"{callee}({', '.join(given)})",
                uses=frozenset(phrase.uses),
                kind=signature_of(module) if module is not None else str(target),
                module=module,
                is_block=id(module) in self._blocks,
                fetched=tuple(phrase.fetched),
                has_effect=True,
                context=_context(),
            )
        )
        return self._picked(result, name, where.replace("it gives", "it gets from"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_out_of_sight or func.namespace == "prim":
            return func(*args, **kwargs)
        aten = torch.ops.aten
        args, kwargs = tree_map(self._original, (args, kwargs))
        if func in (aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default):
            answer = self._answer(func, args[0])
            if answer is not None:
                return answer
        if func is aten.unbind.int and isinstance(args[0].shape[(*args[1:], 0)[0]], torch.SymInt):
            return self._taken_apart(args[0], (*args[1:], 0)[0])
        if func in (aten.cat.default, aten.stack.default):
            joined = self._put_together(func is aten.cat.default, args[0], (*args[1:], 0)[0])
            if joined is not None:
                return joined
        with enable_python_dispatcher():  # code that finds shapes from symbols needs it
            result = func(*args, **kwargs)
        self._note_guards()
        phrase = _Phrase()
        where = f"it gives {func}"
        given = [self._text(arg, phrase, where) for arg in args]
        given += [f"{name}={self._text(arg, phrase, where)}" for name, arg in kwargs.items()]
        if func is aten.detach_.default:  # a new variable: others keep theirs
            func = aten.detach.default
            self._known.pop(id(result), None)
        writes = tuple(
            self._known[id(arg)].text
            for schema, arg in zip(func._schema.arguments, args, strict=False)
            if schema.alias_info is not None and schema.alias_info.is_write and id(arg) in self._known
        )
        for arg in args if writes else ():
            if id(arg) in self._known:
                self._known[id(arg)].made_by = None
        if func is aten.lift_fresh.default:  # the constant itself must stay as it is
            func = aten.clone.default
        text = f"{self._name_of(_VIEWS.get(func, func), 'o')}({', '.join(given)})"
        name = f"t{len(self._steps)}"
        numbers = [leaf for leaf in tree_leaves(result) if isinstance(leaf, _SYMBOLIC)]
        if numbers and not isinstance(result, tuple | list):
            # A number from a tensor: its symbol is the variable. A flag is noted as the number that it is.
            (symbol,) = numbers[0].node.expr.free_symbols
            name, text = str(symbol), f"int({text})" if isinstance(result, torch.SymBool) else text
        self._add(
            Step(
                name=name,
                text=text,
                uses=frozenset(phrase.uses),
                kind=str(func),
                fetched=tuple(phrase.fetched),
                writes=writes,
                has_effect=bool(writes) or result is None,
                context=_context(),
            )
        )
        made_by = (func, args, kwargs)
        if isinstance(result, torch.Tensor):
            self._know(result, name, made_by)
        elif isinstance(result, tuple | list):
            for number, leaf in enumerate(result):
                if isinstance(leaf, torch.Tensor):
                    self._know(leaf, self._pick(f"{name}[{number}]", name))
        return result

    def _taken_apart(self, tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
        """The entries of a tensor one by one, as loops over it want them. How many there are is not fixed yet: they may
        all be put together again."""
        size = tensor.shape[axis]
        pieces = [torch.ops.aten.select.int(tensor, axis, 0) for _ in range(self._twin(size))]
        self._alive.append(pieces)
        self._pieces.update((id(piece), (tensor, axis, number)) for number, piece in enumerate(pieces))
        return pieces

    def _put_together(self, is_cat: bool, parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor | None:
        """All entries of a tensor, in order, joined: the tensor in another shape, whatever their number."""
        found = [self._pieces.get(id(part)) for part in parts]
        if not found or found[0] is None:
            return None
        tensor, taken_from, _ = found[0]
        every = [(id(tensor), taken_from, number) for number in range(self._twin(tensor.shape[taken_from]))]
        if [(id(one[0]), *one[1:]) for one in found if one is not None] != every:
            return None
        with self:
            axis %= tensor.dim() - is_cat
            moved = tensor.movedim(taken_from, axis)
            return moved.flatten(axis, axis + 1) if is_cat else moved

    def _piece(self, piece: torch.Tensor) -> None:
        """An entry that is used by itself: the number of entries is fixed from here on."""
        tensor, axis, number = self._pieces[id(piece)]
        bool(tensor.shape[axis] == self._twin(tensor.shape[axis]))  # which becomes a condition
        self._note_guards()
        with self:
            self._known[id(piece)] = self._known[id(tensor.select(axis, number))]

    # What is known.

    def _add(self, step: Step) -> None:
        self._steps.append(step)
        self._named.add(step.name)

    def _check(self, text: str, uses: frozenset[str]) -> None:
        self._add(Step(name="", text=text, uses=uses, kind="check", has_effect=True))

    def _know(self, tensor: torch.Tensor, name: str, made_by: Any = None) -> None:
        """A tensor under its variable; sizes that depend on values are read from it."""
        self._alive.append(tensor)
        if id(tensor) in self._known:
            return
        self._known[id(tensor)] = _Known(text=name, uses=frozenset((name,)), made_by=made_by)
        self._aliases[name] = tensor.untyped_storage()._cdata
        size: Any
        for axis, size in enumerate(tensor.shape):
            if not isinstance(size, int) and str(size.node.expr) not in self._named and size.node.expr.is_symbol:
                self._add(_size(str(size.node.expr), f"{name}.shape[{axis}]", name))

    def _pick(self, text: str, source: str) -> str:
        name = f"t{len(self._steps)}"
        self._add(Step(name=name, text=text, uses=frozenset((source,)), kind="pick"))
        return name

    def _symbolic(self, leaf: Any, name: str, where: str) -> Any:
        """A tensor or number with symbols for its sizes, which are read from the variable `name`."""
        if not isinstance(leaf, torch.Tensor):
            return self._symbol(leaf, name, name)
        sizes = [self._symbol(int(size), f"{name}.shape[{axis}]", name) for axis, size in enumerate(leaf.shape)]
        with _disable_current_modes(), self._mode:
            tensor = torch.empty(sizes, dtype=leaf.dtype, device=leaf.device)
        self._know(tensor, name)
        twin = leaf if isinstance(leaf, FakeTensor) and leaf.fake_mode is self._plain else stand_in(self._plain, leaf)
        self._twins[id(tensor)], self._originals[id(twin)] = twin, tensor
        self._alive.append(twin)
        return tensor

    def _symbol(self, value: int, text: str, source: str) -> Any:
        """A symbol for a number that a variable has; one and nought stand for themselves, and are checked."""
        uses = frozenset((source,))
        if value in (0, 1) or value < 0:
            self._check(f"{text} == {value}", uses)
            return value
        origin = ConstantSource(f"{source}_{len(self._steps)}")
        symbol = self._sizes.create_symbol(value, origin, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        self._sizes.values[symbol] = value
        self._add(_size(str(symbol), text, source))
        return self._sizes.create_symintnode(symbol, hint=value, source=origin)

    def _picked(self, result: Any, name: str, where: str) -> Any:
        """What a step gave, part by part, as the forward goes on with it."""
        if isinstance(result, torch.Tensor):
            if id(result) in self._originals:  # it passed on what it was given
                return self._originals[id(result)]
            return self._symbolic(result, name, where)
        if type(result) is torch.Size:
            result = tuple(result)
        if type(result) in (tuple, list):
            return type(result)(self._part(part, f"{name}[{place}]", name, where) for place, part in enumerate(result))
        if type(result) is dict:
            return {key: self._part(part, f"{name}[{key!r}]", name, where) for key, part in result.items()}
        leaves, spec = tree_flatten(result)
        if len(leaves) == 1 and leaves[0] is result:
            if type(result) is int:
                return self._symbol(result, name, name)
            if isinstance(result, _IN_SIGHT):
                return result
            raise Refusal(f"{where} a {type(result).__name__}, which is no nest of tensors")
        listed = self._pick(f"_leaves({name})", name)
        parts = [self._part(part, f"{listed}[{place}]", listed, where) for place, part in enumerate(leaves)]
        return tree_unflatten(parts, spec)

    def _part(self, part: Any, text: str, source: str, where: str) -> Any:
        if part is None:
            return None
        if id(part) in self._originals:
            return self._originals[id(part)]
        return self._picked(part, self._pick(text, source), where)

    def _original(self, leaf: Any) -> Any:
        """The tensor of the forward that a twin or a parameter stands for."""
        if not isinstance(leaf, torch.Tensor) or id(leaf) in self._known:
            return leaf
        if id(leaf) in self._originals:
            return self._originals[id(leaf)]
        owner = self._swapped.owners.get(id(leaf))
        if owner is not None:
            # Fetched when it runs: moving a module to a device replaces its buffers.
            with _disable_current_modes(), self._mode:
                tensor = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
            name = self._name_of(owner[0], "m")
            self._alive += [leaf, tensor]
            self._originals[id(leaf)], self._twins[id(tensor)] = tensor, leaf
            self._known[id(tensor)] = _Known(text=f"{name}.{owner[1]}", uses=frozenset(), fetched=(owner,))
            return tensor
        if id(leaf) in self._pieces:
            return leaf
        if isinstance(leaf, FakeTensor):
            raise Refusal("it uses a tensor from inside one of its blocks; ask for less (output_attentions=False)")
        if torch._C._functorch.is_functorch_wrapped_tensor(leaf):
            raise Refusal("it uses a tensor inside vmap in a way that cannot be followed")
        self._alive.append(leaf)
        self._known[id(leaf)] = _Known(text=self._name_of(leaf, "c"), uses=frozenset(), is_constant=True)
        return leaf

    def _twin(self, leaf: Any) -> Any:
        """What stands for a tensor or a number of the forward out of sight."""
        if isinstance(leaf, _SYMBOLIC):
            if leaf.node.hint is None:
                raise Refusal("a size between its blocks depends on values of tensors")
            return leaf.node.hint
        if type(leaf) is torch.Size:
            return tuple(map(self._twin, leaf))
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in self._originals or id(leaf) in self._swapped.owners:
            return leaf
        if id(leaf) not in self._twins:
            sizes = tuple(map(self._twin, leaf.shape))
            with _disable_current_modes(), self._plain:
                twin = torch.empty(sizes, dtype=leaf.dtype, device=leaf.device)
            self._twins[id(leaf)], self._originals[id(twin)] = twin, leaf
            self._alive += [leaf, twin]
        return self._twins[id(leaf)]

    # As text.

    def _name_of(self, value: Any, letter: str) -> str:
        if id(value) not in self._bound_names:
            name = f"{letter}{len(self._bound_names)}_"
            self._bound_names[id(value)] = name
            self._bound[name] = value
        return self._bound_names[id(value)]

    def _text(self, value: Any, phrase: _Phrase, where: str) -> str:
        value = self._original(value)
        if isinstance(value, torch.Tensor):
            if id(value) in self._pieces and id(value) not in self._known:
                self._piece(value)
            if id(value) not in self._known:
                raise Refusal("it uses a tensor that was made out of sight")
            known = self._known[id(value)]
            phrase.uses |= known.uses
            phrase.fetched += known.fetched
            return known.text
        if isinstance(value, _SYMBOLIC):
            return self._expression(value.node.expr, phrase)
        if type(value) in (list, tuple, torch.Size):
            parts = [self._text(part, phrase, where) for part in value]
            if type(value) is list:
                return f"[{', '.join(parts)}]"
            return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
        if type(value) is dict and all(isinstance(key, str | int) for key in value):
            return "{" + ", ".join(f"{key!r}: {self._text(part, phrase, where)}" for key, part in value.items()) + "}"
        if isinstance(value, slice):
            return (
                f"slice({', '.join(self._text(one, phrase, where) for one in (value.start, value.stop, value.step))})"
            )
        if isinstance(value, bool | int | str | type(None)) and type(value).__module__ == "builtins":
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        if isinstance(value, torch.dtype):
            return str(value)
        if isinstance(value, (*_IN_SIGHT, *_BY_NAME)) or callable(value):
            return self._name_of(value, "c")
        leaves, spec = tree_flatten(value)
        if not (len(leaves) == 1 and leaves[0] is value):
            parts = [self._text(part, phrase, where) for part in leaves]
            return f"_unflatten([{', '.join(parts)}], {self._name_of(spec, 'c')})"
        hint = "; pass use_cache=False" if "Cache" in type(value).__name__ else ""
        raise Refusal(f"{where} a {type(value).__name__}, which is no nest of tensors{hint}")

    def _expression(self, expression: Any, phrase: _Phrase) -> str:
        names = {str(symbol) for symbol in expression.free_symbols}
        if names - self._named:
            raise Refusal("a size between its blocks depends on values of tensors")
        phrase.uses |= names
        return f"({PythonPrinter().doprint(expression)})"

    def _note_guards(self) -> None:
        """Conditions on sizes under which the forward went this way."""
        guards = self._sizes.guards
        for guard in guards[self._num_guards :]:
            phrase = _Phrase()
            text = self._expression(guard.expr, phrase)
            self._check(text, frozenset(phrase.uses))
        self._num_guards = len(guards)

    def _answer(self, func: Any, tensor: torch.Tensor) -> Any:
        """The value of a tensor of one element that no input has a part in, where chance has no say in it. One that
        depends on sizes is looked at again whenever it runs."""
        self._asked_sizes = False
        least, most = (self._evaluated(tensor, drawn) for drawn in (0.0, 1.0 - 2.0**-24))
        if least is None or most is None:
            return None
        with _disable_current_modes():
            if not torch.equal(least, most):
                raise Refusal("it decides by chance which blocks run (layerdrop); set that chance to 0")
            answer = func(least)
        if self._asked_sizes:
            phrase = _Phrase()
            given = self._text(tensor, phrase, "")
            self._check(f"{self._name_of(func, 'o')}({given}) == {answer!r}", frozenset(phrase.uses))
        return answer

    def _evaluated(self, tensor: Any, drawn: float) -> torch.Tensor | None:
        known = self._known.get(id(tensor))
        if known is not None and known.is_constant:
            return tensor  # type: ignore[no-any-return]
        if known is None or known.made_by is None:
            return None
        func, args, kwargs = known.made_by
        leaves, spec = tree_flatten((args, kwargs))
        values: list[Any] = []
        for leaf in leaves:
            value = self._evaluated(leaf, drawn) if isinstance(leaf, torch.Tensor) else self._twin(leaf)
            if value is None and leaf is not None:
                return None
            self._asked_sizes |= value is not leaf and not isinstance(leaf, torch.Tensor)
            values.append(value)
        args, kwargs = tree_unflatten(values, spec)
        with _disable_current_modes():
            if func is torch.ops.aten.rand.default:
                return torch.full(args[0], drawn, dtype=kwargs.get("dtype"))
            if torch.Tag.nondeterministic_seeded in func.tags:
                return None
            result = func(*args, **kwargs)
        return result if isinstance(result, torch.Tensor) else None


def _chance() -> bytes:
    """The states of the generators that torch does not know of."""
    return pickle.dumps((random.getstate(), numpy.random.get_state()))


def _size(symbol: str, text: str, source: str) -> Step:
    return Step(name=symbol, text=text, uses=frozenset((source,)), kind="size")


def _is_hint(frame: types.FrameType) -> bool:
    """Whether a length is asked for by `list(x)`, which would fix the number of entries, and does well without."""
    line, last_line, begin, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if line is None or line != last_line:
        return False
    text = linecache.getline(frame.f_code.co_filename, line).encode()[begin:end]
    return text.startswith((b"list(", b"tuple("))


def signature_of(module: nn.Module) -> str:
    """Equal for modules of the same type, settings and parameter shapes."""
    shapes = ",".join(f"{name}{tuple(parameter.shape)}" for name, parameter in module.named_parameters())
    return f"{type(module).__name__}|{module!r}|{shapes}"


def reason_of(error: BaseException, module: nn.Module) -> str:
    """Why a forward could not be recorded, with its line where that helps."""
    if isinstance(error, Refusal):
        return str(error)
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not _is_ours(one.filename)]
    line = f" ({frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    if isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException):
        return (
            f"its forward decides by values of tensors between its blocks{line}; leave out what it decides about "
            "(labels), or let a module inside it decide"
        )
    text = (str(error).splitlines() or [""])[0][:200]
    return f"its forward cannot be recorded ({type(error).__name__}: {text}){line}"


def _is_ours(file: str) -> bool:
    return "/torch/" in file or "/spindle/" in file


def other_way(module: nn.Module, text: str) -> GuardError:
    return GuardError(
        module,
        f"{type(module).__name__} was recorded on sizes for which {text}, which does not hold for this batch: its "
        "forward may take another way. Pad batches alike, or register it with spindle.module(..., split=False)",
    )
