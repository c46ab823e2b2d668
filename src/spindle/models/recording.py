"""Record a module's forward as a list of statements, by running it once on fake tensors.

What is recorded
    A call of a block, or of a submodule that contains no block, is one statement; that submodule's own forward runs
    unchanged when the statement runs. Modules that contain blocks are inlined: the torch operations of their forward
    (masks, position ids, residual sums) are recorded one by one, as the dispatcher sees them, that is below autograd,
    autocast and vmap.

How sizes stay dynamic
    Tensor sizes are SymInts of a `ShapeEnv`. A statement that needs the batch size or the sequence length reads it
    from a tensor when it runs. When the Python code branches on a size, the ShapeEnv notes a guard. Guards become
    "check" statements, which raise `GuardError` for a batch that would have taken the other branch.

Two fake tensors for each tensor
    Inlined code sees *symbolic* fake tensors, whose sizes are SymInts. Submodules run on *concrete* ones, with plain
    sizes, while recording is paused: their code may do anything with sizes, and a block's sizes never enter the
    ShapeEnv. The sizes of what a submodule returns are new symbols, read from its output.

Two things cannot be recorded and raise `UnsupportedForwardError`: control flow that depends on tensor values, and
objects other than nests of tensors (a KV cache) that pass between statements.
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
from spindle.models.fake import FakeWeights, as_when_compiling, device_of, fake_like, run_on_fakes, without_caches

Context = tuple[Any, ...]  # whether gradients are enabled, and the state of autocast for each device type
Attribute = tuple[nn.Module, str]  # a tensor of a module, by owner and attribute name


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


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def argument_normalizer(module: nn.Module) -> Callable[[Any, Any], Arguments]:
    """A function that makes arguments positional where the signature of the module's forward allows it."""
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return lambda args, kwargs: (args, kwargs)

    def normalize(args: Any, kwargs: Any) -> Arguments:
        try:
            arguments = signature.bind(*args, **kwargs)
        except TypeError:  # a wrapper accepts more than the signature it shows
            return args, kwargs
        return arguments.args, arguments.kwargs

    return normalize


def record_forward(module: nn.Module, args: Any, kwargs: Any, blocks: Iterable[nn.Module]) -> Recording:
    """Record a forward on arguments with these shapes and dtypes. Whatever the forward raises is raised here."""
    recorder = _Recorder(module, blocks)
    return recorder.record(*argument_normalizer(module)(args, kwargs))


def _context() -> Context:
    return (
        torch.is_grad_enabled(),
        *((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
    )


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
class _TensorInfo:
    """How the recorded code refers to a tensor, and the operation that produced it: (operator, args, kwargs)."""

    text: str
    uses: frozenset[str]
    attributes: tuple[Attribute, ...] = ()
    producer: tuple[Any, Any, Any] | None = None
    is_constant: bool = False


@dataclass(slots=True)
class _References:
    """The variables and module tensors that a piece of generated text refers to."""

    uses: set[str] = field(default_factory=set)
    attributes: list[Attribute] = field(default_factory=list)


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LITERALS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_NAMED_CONSTANTS = (torch.memory_format, torch.Generator, enum.Enum, type(Ellipsis))
# A view in the recording may need a copy at run time, where strides can differ.
_REPLACED_OPERATORS = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}


_CALL = "_compiled_call_impl"  # the attribute that nn.Module.__call__ calls instead of the module's forward
_recording_lock = threading.RLock()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The state of one recording. `record` runs the forward; three hooks turn what it does into statements:
    intercepted calls of modules and of autograd functions, and `__torch_dispatch__` for torch operations."""

    def __init__(self, module: nn.Module, blocks: Iterable[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module = module
        self._blocks = {id(block) for block in blocks}
        self._paths = {id(submodule): path for path, submodule in module.named_modules()}
        # Modules that contain a block are inlined; every other submodule is a leaf, one statement for each call.
        self._inlined = {
            id(submodule)
            for submodule in module.modules()
            if any(id(descendant) in self._blocks for descendant in submodule.modules())
        } - self._blocks

        self._shape_env = _ShapeEnv()
        self._symbolic_mode = FakeTensorMode(shape_env=self._shape_env, allow_non_fake_inputs=True)
        self._symbolic_mode.cache_enabled = False  # with symbolic sizes, hardly any operation is a cache hit
        self._concrete_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._concrete_of: dict[int, torch.Tensor] = {}  # by the id of the symbolic tensor
        self._symbolic_of: dict[int, torch.Tensor] = {}  # by the id of the concrete tensor
        self._alive: list[Any] = []  # objects whose ids are keys: while they live, no id is reused

        self._statements: list[Statement] = []
        self._variables: set[str] = set()
        self._tensors: dict[int, _TensorInfo] = {}
        self._storages: dict[str, int] = {}
        self._namespace: dict[str, Any] = {}
        self._namespace_names: dict[int, str] = {}
        self._num_recorded_guards = 0
        # Entries of an unbound tensor that no statement stands for yet: (tensor, axis, index).
        self._entries: dict[int, tuple[torch.Tensor, int, int]] = {}

        self._depends_on_sizes = False  # set by `_evaluate`
        self._is_paused = self._is_in_vmap = False
        self._outer_context: Context = ()

    def record(self, args: Any, kwargs: Any) -> Recording:
        leaves, spec = tree_flatten((args, kwargs))
        self._outer_context = _context()
        self._weights = FakeWeights(self._module, self._concrete_mode, device_of(leaves))

        # Tensors and ints become symbolic inputs; any other argument is a constant of the recording.
        inputs: list[str | None] = []
        values: list[Any] = []
        for number, leaf in enumerate(leaves):
            name = f"a{number}"
            is_input = isinstance(leaf, torch.Tensor) or type(leaf) is int
            inputs.append(name if is_input else None)
            values.append(self._make_symbolic(leaf, name) if is_input else leaf)

        rng_state = _host_rng_state()
        try:
            with self._weights, without_caches(self._module), self._intercepted_calls(), ExitStack() as stack:
                stack.enter_context(as_when_compiling())
                stack.enter_context(self._symbolic_mode)
                stack.enter_context(self)
                stack.enter_context(torch._C._AutoDispatchBelowAutograd())
                args, kwargs = tree_unflatten(values, spec)
                result = self._module(*args, **kwargs)
        finally:
            # Raised even while another error is on its way, because that error is usually a consequence.
            if _host_rng_state() != rng_state:
                raise UnsupportedForwardError(
                    "its forward draws random numbers with Python or numpy between its blocks, and the recording would "
                    "repeat one draw forever; switch that off (layerdrop, apply_spec_augment) or draw them with torch"
                )
        self._record_guards()
        references = _References()
        output = self._text(result, references, "it returns")
        return Recording(
            statements=tuple(self._statements),
            spec=spec,
            inputs=tuple(inputs),
            constants=tuple(None if name else leaf for name, leaf in zip(inputs, leaves, strict=True)),
            output=output,
            output_uses=frozenset(references.uses),
            output_attributes=tuple(references.attributes),
            namespace=self._namespace,
            outer_context=self._outer_context,
            storages=self._storages,
            result=tree_map(self._to_concrete, result),
        )

    # Hooks into the running forward.

    @contextmanager
    def _intercepted_calls(self) -> Iterator[None]:
        """Route calls of leaf modules and of custom autograd functions through the recorder.

        A module is intercepted by its own `_compiled_call_impl`, which `nn.Module.__call__` calls where there is one
        (`nn.Module.compile` sets it), so no other module is touched. `torch.autograd.Function.apply` and
        `torch.Tensor.__len__` have no such hook and are replaced; calls of other threads pass through. One thread
        records at a time; a recording inside a recording is fine.
        """
        apply, length = torch.autograd.Function.__dict__["apply"], torch.Tensor.__len__
        thread = threading.get_ident()

        def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_paused or self._is_in_vmap or threading.get_ident() != thread:
                return apply.__func__(cls, *args, **kwargs)
            if torch._C._are_functorch_transforms_active():
                # The arguments are vmap's wrappers, which have no variables: the operations inside are recorded.
                self._is_in_vmap = True
                try:
                    return apply.__func__(cls, *args, **kwargs)
                finally:
                    self._is_in_vmap = False
            if cls is CheckpointFunction:  # the statements inside are recorded; recomputation is up to the run
                return args[0](*args[2:])
            return self._record_call(cls, lambda a, k: apply.__func__(cls, *a, **k), args, kwargs)

        def tensor_length(tensor: torch.Tensor) -> int:
            if threading.get_ident() == thread and _is_length_hint(sys._getframe(1)):
                raise TypeError("a list of unknown length")  # `list` ignores it and appends entry by entry
            return length(tensor)  # type: ignore[no-any-return, no-untyped-call]

        with _recording_lock, ExitStack() as stack:
            for submodule in self._module.modules():
                if id(submodule) not in self._inlined:
                    stack.enter_context(self._intercepted(submodule, thread))
            torch.Tensor.__len__ = tensor_length  # type: ignore[method-assign]
            torch.autograd.Function.apply = classmethod(apply_function)  # type: ignore[method-assign, assignment]
            try:
                yield
            finally:
                torch.Tensor.__len__ = length  # type: ignore[method-assign]
                torch.autograd.Function.apply = apply  # type: ignore[method-assign]

    @contextmanager
    def _intercepted(self, module: nn.Module, thread: int) -> Iterator[None]:
        """Route calls of one module, in this thread, through the recorder."""
        attributes = vars(module)
        compiled = attributes.get(_CALL)
        run = module._call_impl if compiled is None else compiled

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_paused or threading.get_ident() != thread:
                return run(*args, **kwargs)
            return self._record_call(module, lambda a, k: run(*a, **k), args, kwargs)

        attributes[_CALL] = call
        try:
            yield
        finally:
            if compiled is None:
                del attributes[_CALL]
            else:
                attributes[_CALL] = compiled

    def _record_call(self, target: Any, run: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
        """Record a call of a leaf module or an autograd function as one statement, and run it on concrete tensors."""
        self._record_guards()  # guards of the code before the call come before it
        module = target if isinstance(target, nn.Module) else None
        label = repr(self._paths[id(module)]) if module is not None else target.__name__
        callee = self._name_of(target, "m") if module is not None else f"{self._name_of(target, 'c')}.apply"
        arguments, references = self._call_text(args, kwargs, f"it passes {label}")

        # What the module does inside is its own business: it is neither recorded nor symbolic.
        concrete = tree_map(self._to_concrete, (tuple(args), dict(kwargs)))
        self._is_paused = True
        try:
            result = run_on_fakes(run, concrete, self._concrete_mode, self._weights)
        finally:
            self._is_paused = False

        name = f"t{len(self._statements)}"
        self._add(
            Statement(
                name=name,
                text=f"{callee}({arguments})",
                uses=frozenset(references.uses),
                kind=signature_of(module) if module is not None else str(target),
                module=module,
                is_block=id(module) in self._blocks,
                attributes=tuple(references.attributes),
                has_effect=True,
                context=_context(),
            )
        )
        return self._register_output(result, name, f"it gets from {label}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or func.namespace == "prim":
            return func(*args, **kwargs)
        # Parameters, outputs of leaf modules and constants may arrive in other forms.
        args, kwargs = tree_map(self._to_symbolic, (args, kwargs))
        is_handled, result = self._dispatch_special(func, args)
        if is_handled:
            return result
        with enable_python_dispatcher():  # decompositions that propagate symbolic shapes need it
            result = func(*args, **kwargs)
        self._record_guards()
        self._record_operation(func, args, kwargs, result)
        return result

    def _dispatch_special(self, func: Any, args: Any) -> tuple[bool, Any]:
        """Run operators that would need a tensor's values, or would fix the number of entries of an axis. Returns
        whether the operator was one of them, and its result."""
        aten = torch.ops.aten
        if func in (aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default):
            value = self._constant_value(func, args[0])
            return value is not None, value
        if func is aten.unbind.int:
            axis = (*args[1:], 0)[0]
            if isinstance(args[0].shape[axis], torch.SymInt):
                return True, self._unbind(args[0], axis)
        if func in (aten.cat.default, aten.stack.default):
            joined = self._rejoin(func is aten.cat.default, args[0], (*args[1:], 0)[0])
            return joined is not None, joined
        return False, None

    def _record_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record one torch operation that has run on symbolic tensors."""
        aten = torch.ops.aten
        arguments, references = self._call_text(args, kwargs, f"it passes {func}")
        if func is aten.detach_.default:
            # Recorded as a detach into a new variable: other uses of the old variable keep their gradient.
            func = aten.detach.default
            self._tensors.pop(id(result), None)
        writes = tuple(
            self._tensors[id(arg)].text
            for schema, arg in zip(func._schema.arguments, args, strict=False)
            if schema.alias_info is not None and schema.alias_info.is_write and id(arg) in self._tensors
        )
        for arg in args if writes else ():
            if id(arg) in self._tensors:
                self._tensors[id(arg)].producer = None  # its value is no longer what the producer gave
        if func is aten.lift_fresh.default:  # the recorded constant itself must never be written to
            func = aten.clone.default

        name = f"t{len(self._statements)}"
        text = f"{self._name_of(_REPLACED_OPERATORS.get(func, func), 'o')}({arguments})"
        numbers = [leaf for leaf in tree_leaves(result) if isinstance(leaf, _SYMBOLIC)]
        if numbers and not isinstance(result, tuple | list):
            # A number read from a tensor: its symbol is the variable. A bool is recorded as an int.
            (symbol,) = numbers[0].node.expr.free_symbols
            name, text = str(symbol), f"int({text})" if isinstance(result, torch.SymBool) else text
        self._add(
            Statement(
                name=name,
                text=text,
                uses=frozenset(references.uses),
                kind=str(func),
                attributes=tuple(references.attributes),
                writes=writes,
                has_effect=bool(writes) or result is None,
                context=_context(),
            )
        )
        if isinstance(result, torch.Tensor):
            self._register(result, name, (func, args, kwargs))
        elif isinstance(result, tuple | list):
            for number, leaf in enumerate(result):
                if isinstance(leaf, torch.Tensor):
                    self._register(leaf, self._add_pick(f"{name}[{number}]", name))

    # Loops over a tensor's entries: `for row in x` unbinds x, which fixes the number of rows. As long as all entries
    # are only put together again, that number stays a symbol.

    def _unbind(self, tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
        """The entries of a tensor, with no statements for them yet."""
        num_entries = self._to_concrete(tensor.shape[axis])
        entries = [torch.ops.aten.select.int(tensor, axis, 0) for _ in range(num_entries)]
        self._alive.append(entries)
        self._entries.update((id(entry), (tensor, axis, index)) for index, entry in enumerate(entries))
        return entries

    def _rejoin(self, is_cat: bool, tensors: Sequence[torch.Tensor], axis: int) -> torch.Tensor | None:
        """The concatenation or stack of all entries of one tensor, in order, as a reshape of it; None for others."""
        origins = [self._entries.get(id(tensor)) for tensor in tensors]
        if not origins or origins[0] is None:
            return None
        source, source_axis, _ = origins[0]
        num_entries = self._to_concrete(source.shape[source_axis])
        if [(id(origin[0]), *origin[1:]) for origin in origins if origin is not None] != [
            (id(source), source_axis, index) for index in range(num_entries)
        ]:
            return None
        with self:
            axis %= source.dim() - is_cat
            moved = source.movedim(source_axis, axis)
            return moved.flatten(axis, axis + 1) if is_cat else moved

    def _select_entry(self, entry: torch.Tensor) -> None:
        """Record the selection of an entry that is used on its own. From here on the number of entries is fixed."""
        tensor, axis, index = self._entries[id(entry)]
        bool(tensor.shape[axis] == self._to_concrete(tensor.shape[axis]))  # adds a guard
        self._record_guards()
        with self:
            self._tensors[id(entry)] = self._tensors[id(tensor.select(axis, index))]

    # Statements, and the tensors that they produce.

    def _add(self, statement: Statement) -> None:
        self._statements.append(statement)
        self._variables.add(statement.name)

    def _add_check(self, text: str, uses: frozenset[str]) -> None:
        self._add(Statement(name="", text=text, uses=uses, kind="check", has_effect=True))

    def _add_pick(self, text: str, source: str) -> str:
        name = f"t{len(self._statements)}"
        self._add(Statement(name=name, text=text, uses=frozenset((source,)), kind="pick"))
        return name

    def _add_size(self, symbol: str, text: str, source: str) -> None:
        self._add(Statement(name=symbol, text=text, uses=frozenset((source,)), kind="size"))

    def _record_guards(self) -> None:
        """Record the guards that the ShapeEnv has added since the last call."""
        guards = self._shape_env.guards
        for guard in guards[self._num_recorded_guards :]:
            references = _References()
            text = self._expression(guard.expr, references)
            self._add_check(text, frozenset(references.uses))
        self._num_recorded_guards = len(guards)

    def _register(self, tensor: torch.Tensor, name: str, producer: Any = None) -> None:
        """Assign a variable to a tensor. Sizes that depend on values (of `nonzero`) are read from it."""
        self._alive.append(tensor)
        if id(tensor) in self._tensors:
            return
        self._tensors[id(tensor)] = _TensorInfo(text=name, uses=frozenset((name,)), producer=producer)
        self._storages[name] = tensor.untyped_storage()._cdata
        # Symbols that are not bound yet are sizes that this operation made: they depend on values.
        size: Any
        for axis, size in enumerate(tensor.shape):
            if not isinstance(size, int) and str(size.node.expr) not in self._variables and size.node.expr.is_symbol:
                self._add_size(str(size.node.expr), f"{name}.shape[{axis}]", name)

    def _register_output(self, result: Any, name: str, where: str) -> Any:
        """The output of a leaf module as symbolic values, with a pick statement for each part of a nest."""
        if isinstance(result, torch.Tensor):
            if id(result) in self._symbolic_of:  # the module returned one of its inputs
                return self._symbolic_of[id(result)]
            return self._make_symbolic(result, name)
        if type(result) is torch.Size:
            result = tuple(result)
        if type(result) in (tuple, list):
            return type(result)(
                self._register_part(part, f"{name}[{index}]", name, where) for index, part in enumerate(result)
            )
        if type(result) is dict:
            return {key: self._register_part(part, f"{name}[{key!r}]", name, where) for key, part in result.items()}
        leaves, spec = tree_flatten(result)
        if len(leaves) == 1 and leaves[0] is result:
            if type(result) is int:
                return self._make_symbol(result, name, name)
            if isinstance(result, _LITERALS):
                return result
            raise UnsupportedForwardError(f"{where} a {type(result).__name__}, which is not a nest of tensors")
        # A registered pytree (a Hugging Face ModelOutput): its leaves by position.
        flat = self._add_pick(f"_leaves({name})", name)
        parts = [self._register_part(part, f"{flat}[{index}]", flat, where) for index, part in enumerate(leaves)]
        return tree_unflatten(parts, spec)

    def _register_part(self, part: Any, text: str, source: str, where: str) -> Any:
        if part is None:
            return None
        if id(part) in self._symbolic_of:
            return self._symbolic_of[id(part)]
        return self._register_output(part, self._add_pick(text, source), where)

    # Between symbolic and concrete fake tensors.

    def _make_symbolic(self, leaf: Any, name: str) -> Any:
        """A tensor or int in symbolic form; its sizes are read from the variable `name`."""
        if not isinstance(leaf, torch.Tensor):
            return self._make_symbol(leaf, name, name)
        sizes = [self._make_symbol(int(size), f"{name}.shape[{axis}]", name) for axis, size in enumerate(leaf.shape)]
        with _disable_current_modes(), self._symbolic_mode:
            symbolic = torch.empty(sizes, dtype=leaf.dtype, device=leaf.device)
        self._register(symbolic, name)
        is_concrete = isinstance(leaf, FakeTensor) and leaf.fake_mode is self._concrete_mode
        self._pair(symbolic, leaf if is_concrete else fake_like(self._concrete_mode, leaf))
        return symbolic

    def _make_symbol(self, value: int, text: str, source: str) -> Any:
        """A symbol for an int that the code reads as `text`.

        As in torch.compile, 0 and 1 are specialized: they broadcast, so code for them is no code for other sizes.
        """
        if value in (0, 1) or value < 0:
            self._add_check(f"{text} == {value}", frozenset((source,)))
            return value
        origin = ConstantSource(f"{source}_{len(self._statements)}")
        symbol = self._shape_env.create_symbol(value, origin, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        self._shape_env.values[symbol] = value
        self._add_size(str(symbol), text, source)
        return self._shape_env.create_symintnode(symbol, hint=value, source=origin)

    def _pair(self, symbolic: torch.Tensor, concrete: torch.Tensor) -> None:
        self._concrete_of[id(symbolic)], self._symbolic_of[id(concrete)] = concrete, symbolic
        self._alive += [symbolic, concrete]

    def _to_symbolic(self, leaf: Any) -> Any:
        """The symbolic tensor for a concrete one, a parameter or a buffer. Real tensors become constants."""
        if not isinstance(leaf, torch.Tensor) or id(leaf) in self._tensors:
            return leaf
        if id(leaf) in self._symbolic_of:
            return self._symbolic_of[id(leaf)]
        owner = self._weights.owners.get(id(leaf))
        if owner is not None:
            # Referred to by attribute, not by value: moving a module to a device replaces its buffers.
            with _disable_current_modes(), self._symbolic_mode:
                symbolic = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
            text = f"{self._name_of(owner[0], 'm')}.{owner[1]}"
            self._pair(symbolic, leaf)
            self._tensors[id(symbolic)] = _TensorInfo(text=text, uses=frozenset(), attributes=(owner,))
            return symbolic
        if id(leaf) in self._entries:
            return leaf
        if isinstance(leaf, FakeTensor):
            raise UnsupportedForwardError(
                "it uses a tensor from inside one of its blocks; ask for less (output_attentions=False)"
            )
        if torch._C._functorch.is_functorch_wrapped_tensor(leaf):
            raise UnsupportedForwardError("it uses a tensor inside vmap in a way that cannot be recorded")
        self._alive.append(leaf)
        self._tensors[id(leaf)] = _TensorInfo(text=self._name_of(leaf, "c"), uses=frozenset(), is_constant=True)
        return leaf

    def _to_concrete(self, leaf: Any) -> Any:
        """The concrete counterpart of a symbolic tensor or size."""
        if isinstance(leaf, _SYMBOLIC):
            if leaf.node.hint is None:
                raise UnsupportedForwardError("a size between its blocks depends on values of tensors")
            return leaf.node.hint
        if type(leaf) is torch.Size:
            return tuple(map(self._to_concrete, leaf))
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in self._symbolic_of or id(leaf) in self._weights.owners:
            return leaf
        if id(leaf) not in self._concrete_of:
            sizes = tuple(map(self._to_concrete, leaf.shape))
            with _disable_current_modes(), self._concrete_mode:
                concrete = torch.empty(sizes, dtype=leaf.dtype, device=leaf.device)
            self._pair(leaf, concrete)
        return self._concrete_of[id(leaf)]

    # Values as Python source text.

    def _name_of(self, value: Any, letter: str) -> str:
        """The name under which the text finds an object in its namespace."""
        if id(value) not in self._namespace_names:
            name = f"{letter}{len(self._namespace_names)}_"
            self._namespace_names[id(value)] = name
            self._namespace[name] = value
        return self._namespace_names[id(value)]

    def _call_text(self, args: Any, kwargs: Any, where: str) -> tuple[str, _References]:
        references = _References()
        texts = [self._text(arg, references, where) for arg in args]
        texts += [f"{name}={self._text(arg, references, where)}" for name, arg in kwargs.items()]
        return ", ".join(texts), references

    def _text(self, value: Any, references: _References, where: str) -> str:
        """The source text of a value. `where` begins the error message for a value that has none."""
        value = self._to_symbolic(value)
        if isinstance(value, torch.Tensor):
            if id(value) in self._entries and id(value) not in self._tensors:
                self._select_entry(value)
            if id(value) not in self._tensors:
                raise UnsupportedForwardError("it uses a tensor that was made where it could not be recorded")
            info = self._tensors[id(value)]
            references.uses |= info.uses
            references.attributes += info.attributes
            return info.text
        if isinstance(value, _SYMBOLIC):
            return self._expression(value.node.expr, references)
        if type(value) in (list, tuple, torch.Size):
            parts = [self._text(part, references, where) for part in value]
            if type(value) is list:
                return f"[{', '.join(parts)}]"
            return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
        if type(value) is dict and all(isinstance(key, str | int) for key in value):
            items = (f"{key!r}: {self._text(item, references, where)}" for key, item in value.items())
            return "{" + ", ".join(items) + "}"
        if isinstance(value, slice):
            limits = (self._text(limit, references, where) for limit in (value.start, value.stop, value.step))
            return f"slice({', '.join(limits)})"
        if isinstance(value, bool | int | str | type(None)) and type(value).__module__ == "builtins":
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        if isinstance(value, torch.dtype):
            return str(value)
        if isinstance(value, (*_LITERALS, *_NAMED_CONSTANTS)) or callable(value):
            return self._name_of(value, "c")
        # Any other registered pytree is rebuilt from its leaves; what pytree does not know is a leaf itself.
        leaves, spec = tree_flatten(value)
        if not (len(leaves) == 1 and leaves[0] is value):
            parts = [self._text(part, references, where) for part in leaves]
            return f"_unflatten([{', '.join(parts)}], {self._name_of(spec, 'c')})"
        hint = "; pass use_cache=False" if "Cache" in type(value).__name__ else ""
        raise UnsupportedForwardError(f"{where} a {type(value).__name__}, which is not a nest of tensors{hint}")

    def _expression(self, expression: Any, references: _References) -> str:
        names = {str(symbol) for symbol in expression.free_symbols}
        if names - self._variables:
            raise UnsupportedForwardError("a size between its blocks depends on values of tensors")
        references.uses |= names
        return f"({PythonPrinter().doprint(expression)})"

    # `if tensor:` and `tensor.item()`, where the value is the same for every batch.

    def _constant_value(self, func: Any, tensor: torch.Tensor) -> Any:
        """The value of a one-element tensor that no input contributes to; None if one does.

        A random number is replaced by the smallest and by the largest that can be drawn. If both give the same value
        (`torch.rand(1) < 0.0`, layerdrop that is off), it does not depend on the draw. A value that depends on sizes is
        checked at run time.
        """
        self._depends_on_sizes = False
        lowest, highest = (self._evaluate(tensor, draw) for draw in (0.0, 1.0 - 2.0**-24))
        if lowest is None or highest is None:
            return None
        with _disable_current_modes():
            if not torch.equal(lowest, highest):
                raise UnsupportedForwardError(
                    "it decides by chance which blocks run (layerdrop); set that probability to 0"
                )
            value = func(lowest)
        if self._depends_on_sizes:
            references = _References()
            text = self._text(tensor, references, "")
            self._add_check(f"{self._name_of(func, 'o')}({text}) == {value!r}", frozenset(references.uses))
        return value

    def _evaluate(self, tensor: Any, draw: float) -> torch.Tensor | None:
        """Compute a tensor from constants and sizes by running its producers, with `draw` for every `torch.rand`."""
        info = self._tensors.get(id(tensor))
        if info is not None and info.is_constant:
            return tensor  # type: ignore[no-any-return]
        if info is None or info.producer is None:
            return None
        func, args, kwargs = info.producer
        leaves, spec = tree_flatten((args, kwargs))
        values: list[Any] = []
        for leaf in leaves:
            value = self._evaluate(leaf, draw) if isinstance(leaf, torch.Tensor) else self._to_concrete(leaf)
            if value is None and leaf is not None:  # it depends on an input
                return None
            self._depends_on_sizes |= value is not leaf and not isinstance(leaf, torch.Tensor)
            values.append(value)
        args, kwargs = tree_unflatten(values, spec)
        with _disable_current_modes():
            if func is torch.ops.aten.rand.default:
                return torch.full(args[0], draw, dtype=kwargs.get("dtype"))
            if torch.Tag.nondeterministic_seeded in func.tags:
                return None
            result = func(*args, **kwargs)
        return result if isinstance(result, torch.Tensor) else None


def _host_rng_state() -> bytes:
    """The states of Python's and numpy's generators, which recorded torch operations do not draw from."""
    return pickle.dumps((random.getstate(), numpy.random.get_state()))


def _is_length_hint(frame: types.FrameType) -> bool:
    """Whether this frame runs `list(x)` or `tuple(x)`, which ask for a length only to allocate: answering would fix the
    number of entries for nothing."""
    line, last_line, begin, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if line is None or line != last_line:
        return False
    text = linecache.getline(frame.f_code.co_filename, line).encode()[begin:end]
    return text.startswith((b"list(", b"tuple("))


def signature_of(module: nn.Module) -> str:
    """A string that is equal for modules of the same type, settings and parameter shapes."""
    shapes = ",".join(f"{name}{tuple(parameter.shape)}" for name, parameter in module.named_parameters())
    return f"{type(module).__name__}|{module!r}|{shapes}"


def failure_reason(error: BaseException) -> str:
    """Why a forward could not be recorded, with the user's line of code where that helps."""
    if isinstance(error, UnsupportedForwardError):
        return str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    line = f" ({frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    if isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException):
        return (
            f"its forward branches on values of tensors between its blocks{line}; leave out what the branch is about "
            "(labels), or move it into a submodule"
        )
    text = (str(error).splitlines() or [""])[0][:200]
    return f"its forward cannot be recorded ({type(error).__name__}: {text}){line}"


def _is_library(file: str) -> bool:
    return "/torch/" in file or "/spindle/" in file


def guard_error(module: nn.Module, text: str) -> GuardError:
    return GuardError(
        module,
        f"{type(module).__name__} was recorded for sizes with {text}, which does not hold for this batch: its forward "
        "may take another branch. Pad batches to the same sizes, or register the module with "
        "spindle.module(..., split=False)",
    )
