"""A module as a chain of layers.

    module, arguments ── record_forward ─▶ Recording ── cut_into_layers ─▶ RecordedForward ── build_chain ─▶ Chain

1. The module's forward is recorded on its first arguments (`recording`), as a list of statements.
2. The list is cut before each block, and after the last block of each list of blocks (`layer_source`). Each segment is
   a layer. What crosses a cut is whatever later layers still need: tensors, and ints that are sizes.
3. Each layer becomes a Python function, compiled from the text of its statements, so running it interprets nothing.

A module that has no blocks, or whose forward cannot be recorded, is one layer; `Chain.reason` says why.

A recording holds for one branch of the code. Arguments other than tensors (a flag, a mask that is left out) select the
branch, so a call with other such arguments needs a chain of its own.

`ChainSource` is the part that can be sent to another process (`serialize`), where `build_chain` makes the runnable
`Chain` from it and that process's own module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from spindle.errors import GuardError, WorkloadError
from spindle.models.blocks import BlockLists, block_lists, is_plain_sequence
from spindle.models.fake import call_without_cache, configs_with_caches, fake_output
from spindle.models.inner_outputs import call_with_inner_outputs
from spindle.models.layer_source import RecordedForward, cut_into_layers
from spindle.models.recording import argument_normalizer, record_forward
from spindle.models.replay import Replay, after, has_replay, shape_of
from spindle.models.replay_learning import replay_forward
from spindle.models.state import ModuleSnapshot
from spindle.models.statements import (
    Recording,
    UnsupportedForwardError,
    failure_reason,
    guard_error,
    needs_values,
    signature_of,
)
from spindle.models.zeros import parts_of, zero_output


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLayer:
    """One layer of a chain. `run(*values)` returns a tuple of the values that cross the cut after it.

    Layers of the same `kind` differ only in their weights. Two layers with the same non-empty `settings` also have the
    same attributes throughout, so what was traced for one holds for the other.
    """

    kind: str
    run: Callable[..., tuple[Any, ...]]
    parameters: tuple[nn.Parameter, ...]
    find_buffers: Callable[[], Iterable[torch.Tensor]] = tuple
    settings: str = ""
    modules: tuple[nn.Module, ...] = ()  # the modules that it calls

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers that it may update. Looked up each time, because moving a module to a device replaces its
        buffers."""
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


ChainSource = WholeModule | ChildModules | RecordedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The layers of a module in order. The first layer takes the arguments of the call, the last one returns
    `(output,)`."""

    module: nn.Module
    source: ChainSource
    layers: tuple[ChainLayer, ...]

    @property
    def is_recorded(self) -> bool:
        """Whether the layers run recorded code, not only modules."""
        return isinstance(self.source, RecordedForward)

    @property
    def constants(self) -> tuple[Any, ...]:
        """The leaves of its arguments that must be the same in every call; None for other leaves."""
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
        """Run all layers, which equals calling the module."""
        values = self.layers[0].run(*args, **kwargs)
        for layer in self.layers[1:]:
            values = layer.run(*values)
        return values[0]


def whole_chain(module: nn.Module, reason: str) -> Chain:
    """A module as a chain of one layer."""
    return build_chain(module, WholeModule(reason=reason, kind=signature_of(module)))


def build_chain(module: nn.Module, source: ChainSource) -> Chain:
    """Build the runnable chain of a module from its recorded source, which may come from another process."""
    match source:
        case WholeModule(kind=kind):
            layers: tuple[ChainLayer, ...] = (_module_layer(module, kind),)
        case ChildModules(kinds=kinds):
            # Iterated, because `children()` would skip a module that is in it twice.
            assert isinstance(module, nn.Sequential)
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

    With `split=False`, the chain is one layer. `values` returns the arguments as real tensors, for code between blocks
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

    # from cheap to expensive: reasons to stay one layer, children that are layers already, a recording
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
        recording = record_pure(module, args, kwargs, lists, allows_inner_outputs=True)
        chain = build_chain(module, cut_into_layers(module, recording, lists))
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
        return build_chain(module, cut_into_layers(module, replayed, lists)), lambda: replayed.result
    except Exception as error:
        return whole(f"{reason}; and on real tensors, {failure_reason(error)}")
    finally:
        before.restore()


def record_pure(
    module: nn.Module, args: Any, kwargs: Any, lists: BlockLists, *, allows_inner_outputs: bool = False
) -> Recording:
    """Record a forward whose inlined code leaves no state on modules, because recorded code would not update that
    state.

    State that only the first call sets up is fine: a forward that changed something is recorded again, and then must
    change nothing.
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
        recording = record_forward(module, args, kwargs, blocks.values(), allows_inner_outputs=allows_inner_outputs)
        after_first = ModuleSnapshot([module])
        if _ids(before.changed_modules()) & inlined:
            recording = record_forward(module, args, kwargs, blocks.values(), allows_inner_outputs=allows_inner_outputs)
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


# names that the text of every layer may use
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
        # called in every step; `Module.buffers()` would take a hundred times as long
        buffers = [
            buffer
            for submodule in submodules
            if submodule._buffers
            for buffer in submodule._buffers.values()
            if buffer is not None
        ]
        # module tensors that recorded code reads and that are not parameters are buffers, too
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
        # arguments are matched by structure, not by name, because the recording only knows leaves
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
            elif leaf is not constant and leaf != constant:  # it may select another branch
                raise GuardError(
                    module,
                    f"{type(module).__name__} was recorded with {constant!r} for an argument that is not a tensor, and "
                    f"now gets {leaf!r}: its forward may take a different branch. Pass the same for every batch, or "
                    "register the module with spindle.module(..., split=False)",
                )
        return run(*inputs)

    return run_first_layer
