"""A module as a chain of layers.

A module's forward is recorded on its first arguments (`recording`) and cut before each block, and behind the last of
each list of blocks. What crosses a cut is whatever later layers still need: tensors, and numbers that are sizes. A
layer is a function made of the text of its steps, so nothing is interpreted when it runs. A module that cannot be
recorded or has no blocks is one layer, and `reason` says why.

A recording follows one way through the code. Arguments that are no tensors (a flag, a mask that is left out) decide
that way, so a call that gives others has a chain of its own.

Cutting gives a `ChainSource`, a value that `serialize` can send to another process; `build_chain` makes the runnable
`Chain` of it, in the process that recorded and in every other one.
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

from spindle.errors import WorkloadError
from spindle.models.blocks import BlockLists, block_lists, is_plain_sequence
from spindle.models.recording import (
    Context,
    Recording,
    Refusal,
    Step,
    normaliser,
    other_way,
    reason_of,
    record_forward,
    signature_of,
)
from spindle.models.state import keep_state
from spindle.models.valueless import without_values


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLayer:
    """One layer: `run(*values)` gives the values that cross the cut behind it, as a tuple.

    Layers of one `kind` are alike but for their weights. Layers with the same `settings`, where there are any, do the
    same with them.
    """

    kind: str
    run: Callable[..., tuple[Any, ...]]
    parameters: tuple[nn.Parameter, ...]
    find_buffers: Callable[[], Iterable[torch.Tensor]] = tuple
    settings: str = ""

    @property
    def buffers(self) -> list[torch.Tensor]:
        """What it may change beside its output, as it is now: moving a module to a device replaces its buffers."""
        return list(dict.fromkeys(self.find_buffers()))


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModule:
    """A module that stays one layer, and why."""

    reason: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildModules:
    """A sequence whose children are its layers, of these kinds."""

    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSource:
    """One layer of a recorded forward: the text of its function `run`, the modules that it calls, and the tensors that
    it reads from modules, by owner and attribute."""

    text: str
    kind: str
    settings: str
    modules: tuple[nn.Module, ...]
    fetched: tuple[tuple[nn.Module, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedForward:
    """A forward as the text of its layers. `bound` has what the text names beside variables; `spec`, `inputs` and
    `constants` are of the arguments, as in `Recording`."""

    layers: tuple[LayerSource, ...]
    bound: Mapping[str, Any]
    spec: Any
    inputs: tuple[str | None, ...]
    constants: tuple[Any, ...]


ChainSource = WholeModule | ChildModules | RecordedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The layers of a module in order. The first takes the call's own arguments, the last gives the output alone."""

    module: nn.Module
    source: ChainSource
    layers: tuple[ChainLayer, ...]

    @property
    def is_recorded(self) -> bool:
        """Whether code of the module's forward is in the layers."""
        return isinstance(self.source, RecordedForward)

    @property
    def reason(self) -> str:
        """Why there is one layer only."""
        return self.source.reason if isinstance(self.source, WholeModule) else ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all layers: the same as the module."""
        values = self.layers[0].run(*args, **kwargs)
        for layer in self.layers[1:]:
            values = layer.run(*values)
        return values[0]


def whole_chain(module: nn.Module, reason: str) -> Chain:
    """A module as one layer."""
    return build_chain(module, WholeModule(reason=reason, kind=signature_of(module)))


def build_chain(module: nn.Module, source: ChainSource) -> Chain:
    """The runnable chain of a module, from what was recorded of it here or in another process."""
    match source:
        case WholeModule(kind=kind):
            layers: tuple[ChainLayer, ...] = (_module_layer(module, kind),)
        case ChildModules(kinds=kinds):
            assert isinstance(module, nn.Sequential)  # in which a module may be twice
            layers = tuple(_module_layer(one, kind) for one, kind in zip(module, kinds, strict=True))
        case RecordedForward():
            layers = tuple(_recorded_layer(module, source, number) for number in range(len(source.layers)))
        case _:
            assert_never(source)
    return Chain(module=module, source=source, layers=layers)


def chain_of(module: nn.Module, *args: Any, **kwargs: Any) -> Chain:
    """Splits a module into layers, for calls with arguments like these, or explains why it stays whole."""
    return chain_and_output(module, args, kwargs)[0]


def chain_and_output(module: nn.Module, args: Any, kwargs: Any, split: bool = True) -> tuple[Chain, Callable[[], Any]]:
    """The chain of a module for such arguments, of one layer if it must not be `split`, and a function that gives its
    output as tensors without values."""

    def run() -> Any:
        put_back = keep_state([module])
        try:
            return without_values(module, args, kwargs)
        finally:
            put_back()

    if not split:
        return whole_chain(module, ""), run
    if _is_hooked(module):
        return whole_chain(module, "it has hooks, which run around all of it"), run
    if is_plain_sequence(module):
        return build_chain(module, ChildModules(kinds=tuple(map(signature_of, module)))), run
    lists = block_lists(module)
    if not lists:
        return whole_chain(module, "it has no list of two or more equal blocks"), run
    try:
        recording = _recorded(module, args, kwargs, lists)
        return build_chain(module, _cut(module, recording, lists)), lambda: recording.result
    except Exception as error:  # recording runs the user's code, which may raise anything
        return whole_chain(module, reason_of(error, module)), run


def _recorded(module: nn.Module, args: Any, kwargs: Any, lists: BlockLists) -> Recording:
    """A forward that keeps nothing on what is opened; setting up something with the first call is no harm."""
    blocks = {id(block): block for items in lists for block in items}
    opened = {id(one) for one in module.modules() if any(id(each) in blocks for each in one.modules())} - blocks.keys()
    for one in module.modules():
        if id(one) in opened and _is_hooked(one):
            raise Refusal(f"its {type(one).__name__} has hooks, which run around several blocks")
    put_back = keep_state([module])
    try:
        recording = record_forward(module, args, kwargs, blocks.values())
        again = keep_state([module])
        if _ids(put_back.changed()) & opened:
            recording = record_forward(module, args, kwargs, blocks.values())
            if _ids(again.changed()) & opened:
                raise Refusal("its forward keeps something on the module itself")
        return recording
    finally:
        put_back()


def _is_hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    return {id(module) for module in modules}


def _module_layer(module: nn.Module, kind: str) -> ChainLayer:
    return ChainLayer(
        kind=kind,
        run=lambda *a, **k: (module(*a, **k),),
        parameters=tuple(module.parameters()),
        find_buffers=module.buffers,
    )


def _cut(module: nn.Module, recording: Recording, lists: BlockLists) -> RecordedForward:
    steps = _used(recording)
    calls = [place for place, step in enumerate(steps) if step.is_block]
    if len(calls) < 2:
        raise Refusal("its forward calls fewer than two of its blocks one by one")
    # Before each block; and behind the last of each list, with what only takes apart what that block gave.
    starts = {0, *calls}
    for items in lists:
        of_list = [place for place in calls if id(steps[place].module) in _ids(items)]
        if of_list:
            behind = of_list[-1] + 1
            while behind < len(steps) and steps[behind].kind in ("pick", "size", "check"):
                behind += 1
            starts.add(behind)
    # What comes before the first block may be nothing but looking at sizes.
    if all(step.kind in ("pick", "size", "check") for step in steps[: calls[0]]):
        starts = (starts - {calls[0]}) | {0}
    places = sorted(start for start in starts if start < len(steps))
    segments = [steps[begin:end] for begin, end in zip(places, [*places[1:], len(steps)], strict=True)]

    layers = []
    place_of: dict[int, int] = {}
    if any(parameter.is_meta for parameter in module.parameters()):
        place_of = {id(block): place for items in lists for place, block in enumerate(items)}
    inputs = [name for name in recording.inputs if name is not None]
    available = inputs
    for number, segment in enumerate(segments):
        later = recording.output_uses.union(*(step.uses for rest in segments[number + 1 :] for step in rest))
        made = [step.name for step in segment if step.name]
        needed = [name for name in dict.fromkeys([*available, *made]) if name in later]
        is_last = number == len(segments) - 1
        _refuse_shared_writes(recording, segment, available, later)
        layers.append(_layer_source(recording, segment, available, None if is_last else needed, place_of))
        available = needed
    words = frozenset(word for layer in layers for word in re.findall(r"\w+", layer.text))
    return RecordedForward(
        layers=tuple(layers),
        bound={name: value for name, value in recording.bound.items() if name in words},
        spec=recording.spec,
        inputs=recording.inputs,
        constants=recording.constants,
    )


def _used(recording: Recording) -> list[Step]:
    """Steps that matter to the output, or to something else outside."""
    wanted = set(recording.output_uses)
    kept = []
    for step in reversed(recording.steps):
        if step.has_effect or step.name in wanted:
            wanted |= step.uses
            kept.append(step)
    return kept[::-1]


def _refuse_shared_writes(
    recording: Recording, segment: list[Step], available: list[str], later: Iterable[str]
) -> None:
    """A tensor that crosses a cut is a copy of its own: what is written to it must not be looked for elsewhere."""
    read = set(later).union(*(step.uses for step in segment))
    for name in {name for step in segment for name in step.writes}:
        memory = recording.aliases.get(name)
        shared = [one for one in available if one in read and recording.aliases.get(one) == memory is not None]
        if len(shared) > 1 or (shared and shared != [name]):
            raise Refusal("its forward changes a tensor in place of which it has used a part before a block")


def _layer_source(
    recording: Recording,
    segment: list[Step],
    inputs: list[str],
    outputs: list[str] | None,
    place_of: Mapping[int, int],
) -> LayerSource:
    """A layer from some steps; without `outputs` it gives the module's own output."""
    result = f"({recording.output},)" if outputs is None else f"({''.join(f'{name}, ' for name in outputs)})"
    text = _source(recording, segment, inputs, result)
    modules = tuple(step.module for step in segment if step.module is not None)
    fetched = [place for step in segment for place in step.fetched]
    fetched += recording.output_fetched if outputs is None else ()
    does = [step for step in segment if step.kind not in ("pick", "size", "check")]
    settings = ""
    if outputs is not None and does and not fetched and all(step.module is not None for step in does):
        described = f"{_renamed(text)} {[_settings(module, place_of.get(id(module))) for module in modules]}"
        settings = hashlib.blake2b(described.encode(errors="replace"), digest_size=16).hexdigest()
    return LayerSource(
        text=text,
        kind=";".join(step.kind for step in does),
        settings=settings,
        modules=modules,
        fetched=tuple(fetched),
    )


def _recorded_layer(module: nn.Module, source: RecordedForward, number: int) -> ChainLayer:
    layer = source.layers[number]
    scope = {**_ALWAYS_BOUND, **source.bound, "_module": module}
    exec(compile(layer.text, f"<layer of {type(module).__name__}>", "exec"), scope)
    parameters = [parameter for module in layer.modules for parameter in module.parameters()]
    tensors = (getattr(owner, name) for owner, name in layer.fetched)
    parameters += [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]

    submodules = [submodule for module in layer.modules for submodule in module.modules()]

    def find_buffers() -> list[torch.Tensor]:
        own = [getattr(owner, name) for owner, name in layer.fetched]
        # Every step asks: `Module.buffers()` takes a hundred times as long.
        return [
            *(
                buffer
                for submodule in submodules
                if submodule._buffers
                for buffer in submodule._buffers.values()
                if buffer is not None
            ),
            *(one for one in own if not isinstance(one, nn.Parameter)),
        ]

    return ChainLayer(
        kind=layer.kind,
        run=_called_like(module, source, scope["run"]) if number == 0 else scope["run"],
        parameters=tuple(dict.fromkeys(parameters)),
        find_buffers=find_buffers,
        settings=layer.settings,
    )


# What the text of every layer may name.
_ALWAYS_BOUND: Mapping[str, Any] = {
    "math": math,
    "torch": torch,
    "_leaves": tree_leaves,
    "_unflatten": tree_unflatten,
    "_other_way": other_way,
}


def _source(recording: Recording, segment: Sequence[Step], inputs: Sequence[str], result: str) -> str:
    sizes = {step.name: step.text for step in recording.steps if step.kind == "size"}
    lines = [f"def run({', '.join(inputs)}):"]
    outside = inside = recording.outside
    for step in segment:
        if step.context and step.context != inside:
            inside = step.context
            if inside != outside:
                lines.append(f"    with {', '.join(_managers(inside, outside))}:")
        indent = "    " if inside == outside else "        "
        if step.kind == "check":
            shown = re.sub(r"\w+", lambda found: sizes.get(found[0], found[0]), step.text)
            lines.append(f"{indent}if not {step.text}: raise _other_way(_module, {shown!r})")
        else:
            lines.append(f"{indent}{step.name} = {step.text}" if step.name else f"{indent}{step.text}")
    return "\n".join([*lines, f"    return {result}", ""])


def _managers(inside: Context, outside: Context) -> list[str]:
    managers = [] if inside[0] == outside[0] else [f"torch.set_grad_enabled({inside[0]})"]
    return managers + [
        f"torch.autocast({kind!r}, dtype={dtype}, enabled={enabled})"
        for (kind, enabled, dtype), other in zip(inside[1:], outside[1:], strict=True)
        if (kind, enabled, dtype) != other
    ]


def _renamed(source: str) -> str:
    """Equal for texts that differ in the names of variables alone."""
    names: dict[str, str] = {}
    return re.sub(r"\b[atsum]\d+_?\b", lambda found: names.setdefault(found[0], f"v{len(names)}"), source)


def _settings(module: nn.Module, place: int | None) -> str:
    """Equal for modules of the same type with the same attributes all through, but for the values of their tensors.

    And but for the number that a block has in its list, where its place is given: decoders keep it for their caches.
    It is given for modules without weights alone, which are planned for, never run.
    """
    parts = []
    for path, one in module.named_modules():
        own = {
            name: value if isinstance(value, bool | int | float | str | tuple | None) else id(value)
            for name, value in vars(one).items()
            if name not in _TENSORS and not (isinstance(value, dict | set | None) and not value)
            if not (type(value) is int and value == place)
        }
        tensors = [
            (name, each.shape, each.dtype)
            for group in _TENSORS[:2]
            for name, each in vars(one)[group].items()
            if each is not None
        ]
        parts.append((path, type(one), own, tensors))
    return repr(parts)


_TENSORS = ("_parameters", "_buffers", "_modules")


def _called_like(
    module: nn.Module, source: RecordedForward, inner: Callable[..., tuple[Any, ...]]
) -> Callable[..., tuple[Any, ...]]:
    """A module's first layer as a function of the arguments of its forward."""
    normalised = normaliser(module)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        leaves, spec = tree_flatten(normalised(args, kwargs))
        if spec != source.spec:
            raise WorkloadError(
                f"{type(module).__name__} was recorded with other arguments than these; expected {source.spec}, got "
                f"{spec}"
            )
        given = []
        for leaf, name, constant in zip(leaves, source.inputs, source.constants, strict=True):
            if name is not None:
                given.append(leaf)
            elif leaf is not constant and leaf != constant:
                raise WorkloadError(
                    f"{type(module).__name__} was recorded with {constant!r} for an argument that is no tensor, and "
                    f"now gets {leaf!r}"
                )
        return inner(*given)

    return run
