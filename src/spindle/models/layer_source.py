"""A recording, cut into layers: each layer as the text of a Python function.

The statements of a recording are cut before each block, and after the last block of each list of blocks. A layer is a
function of what crosses the cut before it. Besides the hidden states these are side inputs (masks, position ids,
encoder states): whatever later statements use is passed on from layer to layer, so that a rank that runs the last
blocks needs no code of the first. Liveness decides what crosses, not the order of arguments.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from spindle.models.blocks import BlockLists
from spindle.models.statements import Attribute, Context, Recording, Statement, UnsupportedForwardError

_BOOKKEEPING = ("pick", "size", "check")  # kinds of statements that compute nothing


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


def cut_into_layers(module: nn.Module, recording: Recording, lists: BlockLists) -> RecordedForward:
    """Cut a recording of a module into layers."""
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
        blocks = {id(block) for block in items}
        calls_of_list = [position for position in calls if id(statements[position].module) in blocks]
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
