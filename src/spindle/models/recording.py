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

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from spindle.models.constants import constant_value
from spindle.models.effects import Effects, host_random_state, recording_effects, written_tensors
from spindle.models.fake import as_when_compiling, device_of, run_on_fakes, without_caches
from spindle.models.inner_outputs import InnerOutput, Reference, inner_outputs
from spindle.models.intercept import Interception
from spindle.models.statements import (
    Code,
    Recording,
    References,
    Statement,
    UnsupportedForwardError,
    current_context,
    has_number,
    signature_of,
)
from spindle.models.symbolic_values import LITERALS, SYMBOLIC, SymbolicValues

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def argument_normalizer(module: nn.Module) -> Callable[[Any, Any], Arguments]:
    """A function that makes arguments positional where the signature of the module's forward allows it. Where forward
    is wrapped they stay as they are: the wrapper may look for some of them by name."""
    if hasattr(module.forward, "__wrapped__"):
        return lambda args, kwargs: (args, kwargs)
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


def record_forward(
    module: nn.Module, args: Any, kwargs: Any, blocks: Iterable[nn.Module], *, allows_inner_outputs: bool = False
) -> Recording:
    """Record a forward on arguments with these shapes and dtypes. Whatever the forward raises is raised here. With
    `allows_inner_outputs`, tensors that a submodule makes inside and does not return may be used (`inner_outputs`)."""
    leaves, spec = tree_flatten(argument_normalizer(module)(args, kwargs))
    blocks = list(blocks)
    value_readers: frozenset[int] = frozenset()
    has_symbolic_ints = True
    while True:
        recorder = _Recorder(module, blocks, device_of(leaves), allows_inner_outputs, value_readers, has_symbolic_ints)
        try:
            recording = recorder.record(leaves, spec)
            if recorder.value_readers == value_readers or not recorder.uses_inner_outputs:
                return recording
        except Exception as error:
            is_key = has_symbolic_ints and isinstance(error, TypeError) and "unhashable type" in str(error)
            if is_key and any(type(leaf) is int for leaf in leaves):
                has_symbolic_ints = False  # the code uses an int as a key, so it is not a size
            elif recorder.value_readers == value_readers or not allows_inner_outputs:
                raise
        # Modules that read values have run on fake tensors and on zeros, and both runs may have left tensors behind.
        # Record again, running them on zeros only.
        value_readers = recorder.value_readers


# A view in the recording may need a copy at run time, where strides can differ.
_REPLACED_OPERATORS = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The state of one recording. `record` runs the forward; three hooks turn what it does into statements:
    intercepted calls of modules and of autograd functions, and `__torch_dispatch__` for torch operations."""

    def __init__(
        self,
        module: nn.Module,
        blocks: Iterable[nn.Module],
        device: torch.device,
        allows_inner_outputs: bool,
        value_readers: frozenset[int],
        has_symbolic_ints: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module = module
        self._allows_inner_outputs, self._has_symbolic_ints = allows_inner_outputs, has_symbolic_ints
        self.value_readers = value_readers  # ids of modules that read values
        self.uses_inner_outputs = False  # whether tensors made inside called modules are used
        # These tensors by id, with the variable of the call and their place in it.
        self._inner: dict[int, tuple[Reference, str, InnerOutput]] = {}
        self._real: dict[int, tuple[Reference, torch.Tensor]] = {}  # of modules that read values, and their fakes
        self._called: dict[str, _CallWithInner] = {}  # by variable
        self._blocks = {id(block) for block in blocks}
        self._paths = {id(submodule): path for path, submodule in module.named_modules()}
        # Modules that contain a block are inlined; every other submodule is a leaf, one statement for each call.
        self._inlined = [
            submodule
            for submodule in module.modules()
            if id(submodule) not in self._blocks
            and any(id(descendant) in self._blocks for descendant in submodule.modules())
        ]
        inlined = {id(submodule) for submodule in self._inlined}
        leaves = [submodule for submodule in module.modules() if id(submodule) not in inlined]
        self._calls = Interception(module, leaves, self._record_call)
        self._code = Code()
        self._values = SymbolicValues(self._code, module, device)
        self._values.select_entry = self._select_entry
        self._values.find_inner = self._find_inner
        self._num_recorded_guards = 0

    def record(self, leaves: list[Any], spec: Any) -> Recording:
        outer_context = current_context()
        # Tensors and ints become symbolic inputs; any other argument is a constant of the recording.
        inputs: list[str | None] = []
        values: list[Any] = []
        for number, leaf in enumerate(leaves):
            name = f"a{number}"
            is_input = isinstance(leaf, torch.Tensor) or (type(leaf) is int and self._has_symbolic_ints)
            inputs.append(name if is_input else None)
            values.append(self._values.make_symbolic(leaf, name) if is_input else leaf)

        rng_state = host_random_state()
        try:
            with self._values.weights, without_caches(self._module), self._calls.active(), ExitStack() as stack:
                # Modes stack: an operation reaches the mode entered last first. The recorder is above the fake mode, so
                # it sees each operation with its symbolic arguments, calls it, and gets the fake mode's result. Below
                # autograd, because the run builds its own autograd graph, from the recorded statements.
                stack.enter_context(as_when_compiling())
                stack.enter_context(self._values.symbolic_mode)
                stack.enter_context(self)
                stack.enter_context(torch._C._AutoDispatchBelowAutograd())
                args, kwargs = tree_unflatten(values, spec)
                result = self._module(*args, **kwargs)
                for submodule in self._inlined:
                    for name in self._values.weights.replaced_in(submodule):
                        raise UnsupportedForwardError(changed_tensor(submodule, name))
        finally:
            # Raised even while another error is on its way, because that error is usually a consequence.
            if host_random_state() != rng_state:
                raise UnsupportedForwardError(
                    "its forward draws random numbers with Python or numpy between its blocks, and the recording would "
                    "repeat one draw forever; switch that off (layerdrop, apply_spec_augment) or draw them with torch"
                )
        self._record_guards()
        references = References()
        output = self._values.text(result, references, "it returns")
        returned = [(leaf, References()) for leaf in tree_leaves(result)]
        return Recording(
            statements=tuple(self._code.statements),
            spec=spec,
            inputs=tuple(inputs),
            constants=tuple(None if name else leaf for name, leaf in zip(inputs, leaves, strict=True)),
            output=output,
            output_uses=frozenset(references.uses),
            output_attributes=tuple(references.attributes),
            namespace=self._code.namespace,
            outer_context=outer_context,
            storages=self._values.storages,
            result=tree_map(self._values.to_concrete, result),
            ran_on_zeros=bool(self.value_readers),
            leaves=tuple((self._values.text(leaf, uses, "it returns"), uses) for leaf, uses in returned),
        )

    # Hooks into the running forward.

    def _record_call(self, target: Any, run: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
        """Record a call of a leaf module or an autograd function as one statement, and run it on concrete tensors."""
        self._record_guards()  # guards of the code before the call come before it
        module = target if isinstance(target, nn.Module) else None
        label = repr(self._paths[id(module)]) if module is not None else target.__name__
        callee = self._code.name_of(target, "m") if module is not None else f"{self._code.name_of(target, 'c')}.apply"
        arguments, references = self._values.call_text(args, kwargs, f"it passes {label}")

        # What happens inside the module is neither recorded nor symbolic.
        concrete = tree_map(self._values.to_concrete, (tuple(args), dict(kwargs)))
        made: dict[int, tuple[Reference, InnerOutput]] = {}
        mode, weights = self._values.concrete_mode, self._values.weights
        effects = Effects()
        if module is not None and not any(True for _ in module.parameters()):
            run = recording_effects(module, run, effects)
        with self._calls.paused(), ExitStack() as stack:
            if module is not None and self._allows_inner_outputs:
                made = stack.enter_context(inner_outputs(module))
            result, real = run_on_fakes(run, concrete, mode, weights, reads_values=id(target) in self.value_readers)
        if real:
            self.value_readers |= {id(target)}
            self._real |= {id(leaf): (ref(leaf), fake) for leaf, fake in real}

        name = self._code.new_variable()
        self._inner |= {number: (reference, name, place) for number, (reference, place) in made.items()}
        self._called[name] = _CallWithInner(callee=callee, arguments=arguments, name=name)
        self._code.add(
            Statement(
                name=name,
                text=f"{callee}({arguments})",
                uses=frozenset(references.uses),
                kind=signature_of(module) if module is not None else str(target),
                module=module,
                is_block=id(module) in self._blocks,
                attributes=tuple(references.attributes),
                has_effect=True,
                context=current_context(),
                draws_random_numbers=effects.draws_random_numbers,
                changes_module=effects.changes_module,
                returns_number=has_number(tree_leaves(result)),
            )
        )
        if effects.changes_module:  # a tensor that it returns unchanged now may be another one in the next call
            with mode:
                result = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, result)
        return self._register_output(result, name, f"it gets from {label}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._calls.is_paused or func.namespace == "prim":
            return func(*args, **kwargs)
        # Parameters, outputs of leaf modules and constants may arrive in other forms.
        args, kwargs = tree_map(self._values.to_symbolic, (args, kwargs))
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
            value, depends_on_sizes = constant_value(self._values, func, args[0])
            if depends_on_sizes:  # other sizes may give another value
                arguments, references = self._values.call_text(args[:1], {}, "")
                text = f"{self._code.name_of(func, 'o')}({arguments}) == {value!r}"
                self._code.add_check(text, frozenset(references.uses))
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
        arguments, references = self._values.call_text(args, kwargs, f"it passes {func}")
        if func is aten.detach_.default:
            # Recorded as a detach into a new variable: other uses of the old variable keep their gradient.
            func = aten.detach.default
            self._values.tensors.pop(id(result), None)
        written = written_tensors(func, args, kwargs)
        for tensor in written:
            attribute = self._values.attribute_storages.get(tensor.untyped_storage()._cdata)
            if attribute is not None:
                raise UnsupportedForwardError(changed_tensor(*attribute))
        writes = tuple(
            self._values.tensors[id(tensor)].text for tensor in written if id(tensor) in self._values.tensors
        )
        self._values.forget_producers(written)
        if func is aten.lift_fresh.default:  # the recorded constant itself must never be written to
            func = aten.clone.default

        name = self._code.new_variable()
        text = f"{self._code.name_of(_REPLACED_OPERATORS.get(func, func), 'o')}({arguments})"
        numbers = [leaf for leaf in tree_leaves(result) if isinstance(leaf, SYMBOLIC)]
        if numbers and not isinstance(result, tuple | list):
            # A number read from a tensor: its symbol is the variable. A bool is recorded as an int.
            (symbol,) = numbers[0].node.expr.free_symbols
            name, text = str(symbol), f"int({text})" if isinstance(result, torch.SymBool) else text
        self._code.add(
            Statement(
                name=name,
                text=text,
                uses=frozenset(references.uses),
                kind=str(func),
                attributes=tuple(references.attributes),
                writes=writes,
                has_effect=bool(writes) or result is None,
                context=current_context(),
            )
        )
        if isinstance(result, torch.Tensor):
            self._values.register(result, name, (func, args, kwargs))
        elif isinstance(result, tuple | list):
            for number, leaf in enumerate(result):
                if isinstance(leaf, torch.Tensor):
                    self._values.register(leaf, self._code.add_pick(f"{name}[{number}]", name))

    # Loops over a tensor's entries: `for row in x` unbinds x, which fixes the number of rows. As long as all entries
    # are only put together again, that number stays a symbol.

    def _unbind(self, tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
        """The entries of a tensor, with no statements for them yet."""
        num_entries = self._values.to_concrete(tensor.shape[axis])
        entries = [torch.ops.aten.select.int(tensor, axis, 0) for _ in range(num_entries)]
        self._values.keep_alive(entries)
        self._values.entries.update((id(entry), (tensor, axis, index)) for index, entry in enumerate(entries))
        return entries

    def _rejoin(self, is_cat: bool, tensors: Sequence[torch.Tensor], axis: int) -> torch.Tensor | None:
        """The concatenation or stack of all entries of one tensor, in order, as a reshape of it; None for others."""
        origins = [self._values.entries.get(id(tensor)) for tensor in tensors]
        if not origins or origins[0] is None:
            return None
        source, source_axis, _ = origins[0]
        num_entries = self._values.to_concrete(source.shape[source_axis])
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
        tensor, axis, index = self._values.entries[id(entry)]
        bool(tensor.shape[axis] == self._values.to_concrete(tensor.shape[axis]))  # adds a guard
        self._record_guards()
        with self:
            self._values.tensors[id(entry)] = self._values.tensors[id(tensor.select(axis, index))]

    # Statements, and the tensors that they produce.

    def _find_inner(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The symbolic form of a tensor that a called module got or made inside: a further output of its call."""
        reference, fake = self._real.get(id(tensor), (None, None))
        if reference is not None and reference() is tensor:
            assert fake is not None
            self.uses_inner_outputs = True
            return self._values.symbolic_of.get(id(fake))
        if id(tensor) not in self._inner or self._inner[id(tensor)][0]() is not tensor:
            return None
        self.uses_inner_outputs = True
        _, name, place = self._inner[id(tensor)]
        call = self._called[name]
        statements = self._code.statements
        position = next(index for index, statement in enumerate(statements) if statement.name == call.name)
        statement = statements[position]
        if not call.wanted:  # its variable becomes the first entry of what it returns now
            call.name = self._code.new_variable()
            self._code.insert(position + 1, _pick(name, call.name, 0))
        call.wanted.append(place)
        statements[position] = replace(
            statement,
            name=call.name,
            text=f"_call_with_inner_outputs({call.callee}, {call.wanted}, {call.arguments})",
            kind=f"{statement.kind} and {place}",
        )
        variable = self._code.new_variable()
        self._code.insert(position + 1 + len(call.wanted), _pick(variable, call.name, len(call.wanted)))
        symbolic: torch.Tensor = self._values.make_symbolic(tensor, variable)
        self._values.symbolic_of[id(tensor)] = symbolic
        self._values.keep_alive(tensor)
        return symbolic

    def _record_guards(self) -> None:
        """Record the guards that the ShapeEnv has added since the last call."""
        # In program order, right before the statement that depends on them: a batch that would take another branch
        # fails before code for this branch runs on it.
        guards = self._values.shape_env.guards
        for guard in guards[self._num_recorded_guards :]:
            references = References()
            text = self._values.expression(guard.expr, references)
            self._code.add_check(text, frozenset(references.uses))
        self._num_recorded_guards = len(guards)

    def _register_output(self, result: Any, name: str, where: str) -> Any:
        """The output of a leaf module as symbolic values, with a pick statement for each part of a nest."""
        if isinstance(result, torch.Tensor):
            if id(result) in self._values.symbolic_of:  # the module returned one of its inputs
                return self._values.symbolic_of[id(result)]
            return self._values.make_symbolic(result, name)
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
                return self._values.make_symbol(result, name, name)
            if isinstance(result, LITERALS):
                return result
            raise UnsupportedForwardError(f"{where} a {type(result).__name__}, which is not a nest of tensors")
        # The run gets a real instance from the module, the inlined code a symbolic one with the same spec.
        # A registered pytree (a Hugging Face ModelOutput): its leaves by position.
        flat = self._code.add_pick(f"_leaves({name})", name)
        parts = [self._register_part(part, f"{flat}[{index}]", flat, where) for index, part in enumerate(leaves)]
        return tree_unflatten(parts, spec)

    def _register_part(self, part: Any, text: str, source: str, where: str) -> Any:
        if part is None:
            return None
        if id(part) in self._values.symbolic_of:
            return self._values.symbolic_of[id(part)]
        return self._register_output(part, self._code.add_pick(text, source), where)


@dataclass(slots=True)
class _CallWithInner:
    """The text of a recorded call, and the tensors inside it that were asked for; `name` is what it assigns."""

    callee: str
    arguments: str
    name: str
    wanted: list[InnerOutput] = field(default_factory=list)


def _pick(name: str, source: str, entry: int) -> Statement:
    return Statement(name=name, text=f"{source}[{entry}]", uses=frozenset((source,)), kind="pick")


def changed_tensor(owner: nn.Module, name: str) -> str:
    """The reason why a forward that changes a tensor of a module is not recorded: ranks would have different values."""
    return f"its forward changes {name!r}, a tensor of its {type(owner).__name__}, between its blocks"
