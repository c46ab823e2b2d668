"""A module as a chain of layers.

    module, arguments ── record_forward ─▶ Recording ── cut ─▶ ChainSource ── build_chain ─▶ Chain

1. The module's forward is recorded on its first arguments (`recording`), as a list of statements.
2. The list is cut before each block, and after the last block of each list of blocks. Each segment is a layer. What
   crosses a cut is whatever later layers still need: tensors, and ints that are sizes.
3. Each layer becomes a Python function, compiled from the text of its statements, so running it interprets nothing.

A module that has no blocks, or whose forward cannot be recorded, is one layer; `Chain.reason` says why.

A recording holds for one branch of the code. Arguments other than tensors (a flag, a mask that is left out) select the
branch, so a call with other such arguments needs a chain of its own.

`ChainSource` is the part that can be sent to another process (`serialize`), where `build_chain` makes the runnable
`Chain` from it and that process's own module.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from spindle.errors import GuardError, WorkloadError
from spindle.models.blocks import BlockLists, block_lists, is_plain_sequence
from spindle.models.fake import call_without_cache, configs_with_caches, fake_output
from spindle.models.inner_outputs import call_with_inner_outputs
from spindle.models.recording import argument_normalizer, record_forward
from spindle.models.replay import Replay, after, has_replay, shape_of
from spindle.models.replay_learning import replay_forward
from spindle.models.state import ModuleSnapshot
from spindle.models.statements import (
    Attribute,
    Context,
    Recording,
    Statement,
    UnsupportedForwardError,
    failure_reason,
    guard_error,
    needs_values,
    signature_of,
)
from spindle.models.zeros import parts_of, zero_output


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLayer:
    """One layer. `run(*values)` returns a tuple of the values that cross the cut after it.

    Layers of the same `kind` differ in their weights only. If two layers have the same non-empty `settings`, they also
    have the same attributes throughout, so what was traced for one holds for the other.
    """

    kind: str
    run: Callable[..., tuple[Any, ...]]
    parameters: tuple[nn.Parameter, ...]
    find_buffers: Callable[[], Iterable[torch.Tensor]] = tuple
    settings: str = ""
    modules: tuple[nn.Module, ...] = ()  # that it calls

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers that it may update. Looked up each time: moving a module to a device replaces its buffers."""
        return list(dict.fromkeys(self.find_buffers()))


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModule:
    """A module that stays one layer, with the reason."""

    reason: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildModules:
    """An `nn.Sequential` whose children are its layers; `kinds` has one entry per child."""

    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSource:
    """One layer of a recorded forward: the text of its function `run`, the modules that it calls, and the module
    tensors that it reads."""

    text: str
    kind: str
    settings: str
    modules: tuple[nn.Module, ...]
    attributes: tuple[Attribute, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedForward:
    """A recorded forward as the text of its layers. The other fields are those of `Recording`."""

    layers: tuple[LayerSource, ...]
    namespace: Mapping[str, Any]
    spec: Any
    inputs: tuple[str | None, ...]
    constants: tuple[Any, ...]


ChainSource = WholeModule | ChildModules | RecordedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The layers of a module in order. The first takes the arguments of the call, the last returns `(output,)`."""

    module: nn.Module
    source: ChainSource
    layers: tuple[ChainLayer, ...]

    @property
    def is_recorded(self) -> bool:
        """Whether the layers run recorded code, not only modules."""
        return isinstance(self.source, RecordedForward)

    @property
    def constants(self) -> tuple[Any, ...]:
        """The leaves of its arguments that must be the same in every call; None for others."""
        return self.source.constants if isinstance(self.source, RecordedForward) else ()

    @property
    def reads_values(self) -> bool:
        """Whether the code between its blocks is replayed instead of recorded, because it reads values of tensors."""
        return isinstance(self.source, RecordedForward) and has_replay(self.source.namespace)

    @property
    def parts(self) -> list[nn.Module]:
        """The submodules that its layers call."""
        if not isinstance(self.source, RecordedForward):
            return parts_of(self.module)
        replays = [value for value in self.source.namespace.values() if isinstance(value, Replay)]
        replayed = [replay.module.get_submodule(path) for replay in replays for path in replay.targets]
        return list(dict.fromkeys([*replayed, *(module for layer in self.source.layers for module in layer.modules)]))

    @property
    def reason(self) -> str:
        """Why the module is one layer; empty if it is not."""
        return self.source.reason if isinstance(self.source, WholeModule) else ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all layers; equal to calling the module."""
        values = self.layers[0].run(*args, **kwargs)
        for layer in self.layers[1:]:
            values = layer.run(*values)
        return values[0]


def whole_chain(module: nn.Module, reason: str) -> Chain:
    """A module as one layer."""
    return build_chain(module, WholeModule(reason=reason, kind=signature_of(module)))


def build_chain(module: nn.Module, source: ChainSource) -> Chain:
    """Build the runnable chain of a module from its recorded source, which may come from another process."""
    match source:
        case WholeModule(kind=kind):
            layers: tuple[ChainLayer, ...] = (_module_layer(module, kind),)
        case ChildModules(kinds=kinds):
            assert isinstance(module, nn.Sequential)  # iterated, not `children()`: a module may be in it twice
            layers = tuple(_module_layer(child, kind) for child, kind in zip(module, kinds, strict=True))
        case RecordedForward():
            layers = tuple(_recorded_layer(module, source, number) for number in range(len(source.layers)))
        case _:
            assert_never(source)
    return Chain(module=module, source=source, layers=layers)


def chain_of(module: nn.Module, *args: Any, **kwargs: Any) -> Chain:
    """Split a module into layers, for calls with arguments like these."""
    return chain_and_output(module, args, kwargs)[0]


def chain_and_output(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    split: bool = True,
    values: Callable[[], tuple[Any, Any]] | None = None,
) -> tuple[Chain, Callable[[], Any]]:
    """The chain of a module for arguments like these, and a function that returns the output without values.

    With `split=False` the chain is one layer. `values` returns the arguments as real tensors, for code between blocks
    that reads them. The output is computed lazily, because a recording already contains it.
    """

    def run_on_fake_tensors() -> Any:
        snapshot = ModuleSnapshot([module])
        try:
            return fake_output(module, args, kwargs) if values is None else zero_output(module, *values())
        finally:
            snapshot.restore()

    def whole(reason: str) -> tuple[Chain, Callable[[], Any]]:
        return whole_chain(module, reason), run_on_fake_tensors

    # From cheap to expensive: reasons to stay whole, children that are layers already, and a recording.
    if not split:
        return whole("")
    if has_hooks(module):
        return whole("it has hooks, which run around all of it")
    if is_plain_sequence(module):
        return build_chain(module, ChildModules(kinds=tuple(map(signature_of, module)))), run_on_fake_tensors
    lists = block_lists(module)
    if not lists:
        return whole("it has no list of two or more equal blocks")
    try:
        recording = record_pure(module, args, kwargs, lists, takes_inner=True)
        chain = build_chain(module, _cut(module, recording, lists))
        if recording.ran_on_zeros and values is not None:
            return chain, run_on_fake_tensors
        return chain, lambda: recording.result
    except Exception as error:  # recording runs the user's code, which may raise anything
        reason = failure_reason(error)
        if values is None or not needs_values(error):
            return whole(reason)
    before = ModuleSnapshot([module])
    try:
        blocks = {id(block): block for items in lists for block in items}
        replayed = replay_forward(module, *values(), blocks.values(), runs_ahead=True)
        return build_chain(module, _cut(module, replayed, lists)), lambda: replayed.result
    except Exception as error:
        return whole(f"{reason}; and on real tensors, {failure_reason(error)}")
    finally:
        before.restore()


def record_pure(
    module: nn.Module, args: Any, kwargs: Any, lists: BlockLists, *, takes_inner: bool = False
) -> Recording:
    """Record a forward whose inlined code leaves no state on modules: recorded code would not update that state.

    State that is set up by the first call only is fine, so a forward that changed something is recorded once more, and
    that second recording must change nothing.
    """
    blocks = {id(block): block for items in lists for block in items}
    inlined = {
        id(submodule)
        for submodule in module.modules()
        if any(id(descendant) in blocks for descendant in submodule.modules())
    } - blocks.keys()
    for submodule in module.modules():
        if id(submodule) in inlined and has_hooks(submodule):
            raise UnsupportedForwardError(f"its {type(submodule).__name__} has hooks, which run around several blocks")
    before = ModuleSnapshot([module])
    try:
        recording = record_forward(module, args, kwargs, blocks.values(), takes_inner=takes_inner)
        after_first = ModuleSnapshot([module])
        if _ids(before.changed_modules()) & inlined:
            recording = record_forward(module, args, kwargs, blocks.values(), takes_inner=takes_inner)
            if _ids(after_first.changed_modules()) & inlined:
                raise UnsupportedForwardError("its forward changes attributes of the module itself")
        return recording
    finally:
        before.restore()


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    return {id(module) for module in modules}


def _module_layer(module: nn.Module, kind: str) -> ChainLayer:
    configs = configs_with_caches(module)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (call_without_cache(module, configs, args, kwargs) if configs else module(*args, **kwargs),)

    return ChainLayer(
        kind=kind,
        run=run,
        parameters=tuple(module.parameters()),
        find_buffers=module.buffers,
        modules=(module,),
    )


# From a recording to the text of layers.

_BOOKKEEPING = ("pick", "size", "check")  # kinds of statements that compute nothing


def _cut(module: nn.Module, recording: Recording, lists: BlockLists) -> RecordedForward:
    """Cut a recording into layers."""
    # A layer is a function of what crosses the cut before it. Besides the hidden states these are side inputs (masks,
    # position ids, encoder states): whatever later statements use is handed on from layer to layer, so that a rank that
    # runs the last blocks needs no code of the first. Liveness decides what crosses, not the order of arguments.
    segments = _segments(_live_statements(recording), lists)
    # On the meta device, blocks that differ only in their stored index count as equal, so that one is traced for all.
    index_in_list: dict[int, int] = {}
    if any(parameter.is_meta for parameter in module.parameters()):
        index_in_list = {id(block): index for items in lists for index, block in enumerate(items)}

    layers = []
    available = [name for name in recording.inputs if name is not None]  # the variables that cross the last cut
    for number, segment in enumerate(segments):
        used_later = recording.output_uses.union(
            *(statement.uses for later in segments[number + 1 :] for statement in later)
        )
        assigned = [statement.name for statement in segment if statement.name]
        crossing = [name for name in dict.fromkeys([*available, *assigned]) if name in used_later]
        is_last = number == len(segments) - 1
        _refuse_shared_writes(recording, segment, available, used_later)
        layers.append(_layer_source(recording, segment, available, None if is_last else crossing, index_in_list))
        available = crossing
    # Eliminated code may have bound large constants: keep only names that the remaining text uses.
    words = frozenset(word for layer in layers for word in re.findall(r"\w+", layer.text))
    return RecordedForward(
        layers=tuple(layers),
        namespace={name: value for name, value in recording.namespace.items() if name in words},
        spec=recording.spec,
        inputs=recording.inputs,
        constants=recording.constants,
    )


def _live_statements(recording: Recording) -> list[Statement]:
    """Dead code elimination: the statements that the output depends on, or that have an effect."""
    needed = set(recording.output_uses)
    live = []
    # Backwards: a statement is live if a live one after it uses its variable.
    for statement in reversed(recording.statements):
        if statement.has_effect or statement.name in needed:
            needed |= statement.uses
            live.append(statement)
    return live[::-1]


def _segments(statements: list[Statement], lists: BlockLists) -> list[list[Statement]]:
    """Statements grouped by layer."""
    calls = [position for position, statement in enumerate(statements) if statement.is_block]
    if len(calls) < 2:
        raise UnsupportedForwardError("its forward calls fewer than two of its blocks one by one")
    # Cut before each block, and after the last block of each list together with the statements that unpack its output.
    starts = {0, *calls}
    for items in lists:
        calls_of_list = [position for position in calls if id(statements[position].module) in _ids(items)]
        if calls_of_list:
            end = calls_of_list[-1] + 1
            while end < len(statements) and statements[end].kind in _BOOKKEEPING:
                end += 1
            starts.add(end)
    # Statements before the first block that compute nothing do not make a layer: they join that block.
    if all(statement.kind in _BOOKKEEPING for statement in statements[: calls[0]]):
        starts = (starts - {calls[0]}) | {0}
    cuts = sorted(start for start in starts if start < len(statements))
    return [statements[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(statements)], strict=True)]


def _refuse_shared_writes(
    recording: Recording, segment: list[Statement], available: list[str], used_later: Iterable[str]
) -> None:
    """Refuse an in-place write that another variable would see, if both cross the cut before this segment: a tensor
    that crosses a cut is a copy, so views that shared memory no longer do."""
    read = set(used_later).union(*(statement.uses for statement in segment))
    for name in {name for statement in segment for name in statement.writes}:
        storage = recording.storages.get(name)
        shared = [
            variable
            for variable in available
            if variable in read and recording.storages.get(variable) == storage is not None
        ]
        if len(shared) > 1 or (shared and shared != [name]):
            raise UnsupportedForwardError("its forward changes a tensor in place that it used a view of before a block")


def _layer_source(
    recording: Recording,
    segment: list[Statement],
    inputs: list[str],
    outputs: list[str] | None,
    index_in_list: Mapping[int, int],
) -> LayerSource:
    """The source of one layer. `outputs` is None for the last layer, which returns the module's own output."""
    result = f"({recording.output},)" if outputs is None else f"({''.join(f'{name}, ' for name in outputs)})"
    text = function_text(recording, segment, inputs, result)
    modules = tuple(statement.module for statement in segment if statement.module is not None)
    attributes = [attribute for statement in segment for attribute in statement.attributes]
    attributes += recording.output_attributes if outputs is None else ()
    computing = [statement for statement in segment if statement.kind not in _BOOKKEEPING]
    settings = ""
    # Only a layer that does nothing but call modules gets settings: constants in other code are not compared.
    calls_modules_only = bool(computing) and all(statement.module is not None for statement in computing)
    if outputs is not None and calls_modules_only and not attributes:
        module_settings = [_settings(module, index_in_list.get(id(module))) for module in modules]
        description = f"{_with_canonical_names(text)} {module_settings}"
        settings = hashlib.blake2b(description.encode(errors="replace"), digest_size=16).hexdigest()
    return LayerSource(
        text=text,
        kind=";".join(statement.kind for statement in computing),
        settings=settings,
        modules=modules,
        attributes=tuple(attributes),
    )


def function_text(recording: Recording, segment: Sequence[Statement], inputs: Sequence[str], result: str) -> str:
    """The text of `def run(inputs)`, with grad mode and autocast switched where the recorded code had switched them."""
    sizes = {statement.name: statement.text for statement in recording.statements if statement.kind == "size"}
    lines = [f"def run({', '.join(inputs)}):"]
    outer = current = recording.outer_context
    for statement in segment:
        if statement.context and statement.context != current:
            current = statement.context
            if current != outer:
                lines.append(f"    with {', '.join(_context_managers(current, outer))}:")
        indent = "    " if current == outer else "        "
        if statement.kind == "check":
            # The error shows sizes as the user knows them: `a0.shape[1]` instead of `s3`.
            condition = re.sub(r"\w+", lambda word: sizes.get(word[0], word[0]), statement.text)
            lines.append(f"{indent}if not {statement.text}: raise _guard_error(_module, {condition!r})")
        else:
            assignment = f"{statement.name} = " if statement.name else ""
            lines.append(f"{indent}{assignment}{statement.text}")
    return "\n".join([*lines, f"    return {result}", ""])


def _context_managers(inner: Context, outer: Context) -> list[str]:
    managers = [] if inner[0] == outer[0] else [f"torch.set_grad_enabled({inner[0]})"]
    return managers + [
        f"torch.autocast({kind!r}, dtype={dtype}, enabled={enabled})"
        for (kind, enabled, dtype), outer_state in zip(inner[1:], outer[1:], strict=True)
        if (kind, enabled, dtype) != outer_state
    ]


def _with_canonical_names(text: str) -> str:
    """The text with variables renamed in order of appearance: equal for texts that differ in variable names only."""
    names: dict[str, str] = {}
    return re.sub(r"\b[atsumxeng]\d+_?\b", lambda word: names.setdefault(word[0], f"v{len(names)}"), text)


_TENSOR_DICTS = ("_parameters", "_buffers", "_modules")


def _settings(module: nn.Module, index: int | None) -> str:
    """A string that is equal for modules of the same types and attributes throughout, whatever their tensors' values.

    Where `index` is given, an attribute that equals it is left out: decoder blocks store their index in the list for
    their caches. It is given only for modules on the meta device, which are planned for and never run.
    """
    parts = []
    for path, submodule in module.named_modules():
        attributes = {
            name: value if isinstance(value, bool | int | float | str | tuple | None) else id(value)
            for name, value in vars(submodule).items()
            if name not in _TENSOR_DICTS and not (isinstance(value, dict | set | None) and not value)
            if not (type(value) is int and value == index)
        }
        tensors = [
            (name, tensor.shape, tensor.dtype)
            for group in ("_parameters", "_buffers")
            for name, tensor in vars(submodule)[group].items()
            if tensor is not None
        ]
        parts.append((path, type(submodule), attributes, tensors))
    return repr(parts)


# From the text of layers to functions.

# Names that the text of every layer may use.
_BUILTIN_NAMESPACE: Mapping[str, Any] = {
    "math": math,
    "torch": torch,
    "_leaves": tree_leaves,
    "_unflatten": tree_unflatten,
    "_guard_error": guard_error,
    "_shape_of": shape_of,
    "_after": after,
    "_call_with_inner_outputs": call_with_inner_outputs,
}


def _recorded_layer(module: nn.Module, source: RecordedForward, number: int) -> ChainLayer:
    # The text is compiled against this process's own modules. On ranks that received the source from rank 0, names in
    # the namespace were resolved by path, so the code is rank 0's and the weights are local.
    layer = source.layers[number]
    namespace = {**_BUILTIN_NAMESPACE, **source.namespace, "_module": module}
    exec(compile(layer.text, f"<layer of {type(module).__name__}>", "exec"), namespace)
    parameters = [parameter for module in layer.modules for parameter in module.parameters()]
    tensors = (getattr(owner, name) for owner, name in layer.attributes)
    parameters += [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]

    submodules = [submodule for module in layer.modules for submodule in module.modules()]

    def find_buffers() -> list[torch.Tensor]:
        # Called in every step: `Module.buffers()` would take a hundred times as long.
        buffers = [
            buffer
            for submodule in submodules
            if submodule._buffers
            for buffer in submodule._buffers.values()
            if buffer is not None
        ]
        # Module tensors that recorded code reads and that are no parameters are buffers, too.
        tensors = (getattr(owner, name) for owner, name in layer.attributes)
        return buffers + [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]

    run = namespace["run"]
    return ChainLayer(
        kind=layer.kind,
        run=_with_forward_signature(module, source, run) if number == 0 else run,
        parameters=tuple(dict.fromkeys(parameters)),
        find_buffers=find_buffers,
        settings=layer.settings,
        modules=layer.modules,
    )


def _with_forward_signature(
    module: nn.Module, source: RecordedForward, run: Callable[..., tuple[Any, ...]]
) -> Callable[..., tuple[Any, ...]]:
    """The first layer as a function of the arguments of the module's forward."""
    normalize = argument_normalizer(module)

    def run_first_layer(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        # Arguments are matched by structure, not by name: the recording knows leaves.
        leaves, spec = tree_flatten(normalize(args, kwargs))
        if spec != source.spec:
            raise WorkloadError(
                f"{type(module).__name__} was recorded with arguments of a different structure: expected "
                f"{source.spec}, "
                f"got {spec}"
            )
        inputs = []
        for leaf, name, constant in zip(leaves, source.inputs, source.constants, strict=True):
            if name is not None:
                inputs.append(leaf)
            elif leaf is not constant and leaf != constant:  # it may select a different branch
                raise GuardError(
                    module,
                    f"{type(module).__name__} was recorded with {constant!r} for an argument that is not a tensor, and "
                    f"now gets {leaf!r}: its forward may take a different branch. Pass the same for every batch, or "
                    "register the module with spindle.module(..., split=False)",
                )
        return run(*inputs)

    return run_first_layer
