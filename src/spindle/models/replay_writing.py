"""Write a learnt forward as statements: calls of its parts, with replays of the code before each of them.

An argument of a part is one of three things: a tensor that the code passes on unchanged, a value that was computed
ahead of the first block, or an entry of a replay's result. Outputs that a replay does not depend on are given to it as
shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from spindle.models.fake import device_of
from spindle.models.replay import Replay, version_of
from spindle.models.statements import (
    Attribute,
    Context,
    Recording,
    References,
    Statement,
    UnsupportedForwardError,
    current_context,
    has_number,
    signature_of,
)
from spindle.models.zeros import zero_output, zero_weights

Source = tuple[str, int]  # of a value: ("input", leaf), ("call", number) or ("loose", number)


@dataclass(slots=True)
class LearntCall:
    """A call of a part, as it was made on the first batch."""

    module: nn.Module
    leaves: list[Any]  # of the arguments
    spec: TreeSpec
    sources: list[set[Source]]  # what each leaf depends on
    read: set[Source]  # values that Python code had read before the call
    versions: list[int]  # how often each leaf had been changed in place
    context: Context
    output: list[Any]  # the leaves of its output
    output_spec: TreeSpec


class ReplayWriter:
    """Writes the statements of a replayed forward."""

    def __init__(
        self,
        replay: Replay,
        calls: list[LearntCall],
        leaves: list[Any],
        loose: list[Attribute],
        runs_ahead: bool,
        block_ids: set[int],
    ) -> None:
        self._replay, self._calls, self._leaves, self._loose = replay, calls, leaves, loose
        self._runs_ahead, self._block_ids = runs_ahead, block_ids
        self._statements: list[Statement] = []
        self._namespace: dict[str, Any] = {"r0_": replay}
        self._names: dict[int, str] = {}  # names of modules in the namespace
        self._inputs = [f"a{number}" if named else None for number, named in enumerate(replay.is_input)]
        self._outputs = [f"t{number}" for number in range(len(calls))]
        # By id of a tensor that is passed on unchanged: its text, and the variable in it.
        self._same: dict[int, tuple[str, str]] = {}
        for name, leaf in zip(self._inputs, leaves, strict=True):
            if name is not None and isinstance(leaf, torch.Tensor):
                self._same[id(leaf)] = (name, name)

    def _is_same(self, value: Any, version: int, read: set[Source]) -> bool:
        """Whether a tensor is an unchanged output of a part, or an unchanged input before any value was read."""
        if not isinstance(value, torch.Tensor) or id(value) not in self._same or version:
            return False
        return not read or self._same[id(value)][1] not in self._inputs

    def recording(
        self,
        result: Any,
        sources: list[set[Source]],
        read: set[Source],
        outer_context: Any,
        losses: dict[int, int | set[int]],
    ) -> Recording:
        first = self._replay.first_block if self._runs_ahead else 0
        ahead = self._write_ahead() if self._runs_ahead else {}
        for number in range(first, len(self._calls)):
            self._write_call(number, ahead)
        leaves = tree_leaves(result)
        texts = self._texts(len(self._calls), leaves, list(map(version_of, leaves)), sources, read, {})
        return Recording(
            statements=tuple(self._statements),
            spec=self._replay.spec,
            inputs=tuple(self._inputs),
            constants=self._replay.constants,
            output=f"_unflatten([{', '.join(text for text, _ in texts)}], c0_)",
            output_uses=frozenset().union(*(references.uses for _, references in texts)),
            output_attributes=(),
            namespace={**self._namespace, "c0_": tree_flatten(result)[1]},
            outer_context=outer_context,
            storages={},
            result=result,
            leaves=tuple(texts),
            losses=self._loss_texts(losses),
        )

    def _loss_texts(self, losses: dict[int, int | set[int]]) -> dict[int, tuple[str, str, References]]:
        """How losses are computed over parts of a batch: by the code after the last call, up to the loss itself."""
        last = next((each for each in self._statements if each.name == f"g{len(self._calls)}"), None)
        texts: dict[int, tuple[str, str, References]] = {}
        if last is None:
            return texts
        for position, number in losses.items():
            if isinstance(number, set):
                names = (self._inputs[each] for each in number)
                texts[position] = "sum", "", References(uses={name for name in names if name is not None})
            else:
                text = last.text.replace("r0_.segment(", f"r0_.loss_parts({number}, ", 1)
                references = References(uses=set(last.uses), attributes=list(last.attributes))
                texts[position] = "mean", text, references
        return texts

    def _write_ahead(self) -> dict[tuple[int, int], str]:
        """Write the code that runs before the first block. Returns the variables of the arguments that it computes, by
        call and leaf."""
        first = self._replay.first_block
        blocks = {("call", number) for number in range(first, len(self._calls))}
        wanted: list[tuple[int, int]] = []
        places: dict[int, tuple[int, int]] = {}  # by tensor
        aliases: dict[tuple[int, int], tuple[int, int]] = {}
        needed: set[Source] = set()
        for number, call in enumerate(self._calls[first:], start=first):
            if call.read & blocks:
                raise UnsupportedForwardError("the code between its blocks branches on values that its blocks return")
            arguments = zip(call.leaves, call.sources, call.versions, strict=True)
            for leaf, (value, sources, version) in enumerate(arguments):
                if self._is_same(value, version, call.read):
                    continue
                if isinstance(value, torch.Tensor):
                    if sources & blocks:
                        continue
                    aliases[number, leaf] = places.setdefault(id(value), (number, leaf))
                    needed |= sources
                elif type(value) is int or call.read:
                    aliases[number, leaf] = (number, leaf)
                else:
                    continue
                if aliases[number, leaf] == (number, leaf):
                    wanted.append((number, leaf))
        exported = list(range(first))
        self._try_ahead(wanted, exported)
        given = ", ".join(name for name in self._inputs if name is not None)
        loose, attributes = self._loose_text({number for kind, number in needed if kind == "loose"})
        parameters = [
            (submodule, name)
            for call in self._calls[:first]
            for submodule in call.module.modules()
            for name, parameter in submodule._parameters.items()
            if parameter is not None
        ]
        self._add(
            "ahead",
            f"r0_.ahead({wanted}, {exported}, ({given},), {loose})",
            {name for name in self._inputs if name is not None},
            kind=f"code before {self._replay.calls[first].path}",
            attributes=(*attributes, *parameters),
        )
        names = {}
        for position, place in enumerate(wanted):
            names[place] = f"x{position}"
            self._add(f"x{position}", f"ahead[{position}]", {"ahead"}, kind="pick")
        for position, number in enumerate(exported, start=len(wanted)):
            self._add(self._outputs[number], f"ahead[{position}]", {"ahead"}, kind="pick")
            self._register_output(number)
        return {place: names[alias] for place, alias in aliases.items()}

    def _try_ahead(self, wanted: list[tuple[int, int]], exported: list[int]) -> None:
        """Run ahead once with zeros, because some code fails without real outputs of blocks."""
        inputs = [leaf for leaf, named in zip(self._leaves, self._replay.is_input, strict=True) if named]
        with torch.no_grad(), zero_weights(self._replay.module, device_of(inputs)):
            self._replay.ahead(wanted, exported, inputs, [None] * len(self._loose), compute=zero_output)

    def _write_call(self, number: int, ahead: dict[tuple[int, int], str]) -> None:
        call = self._calls[number]
        texts = self._texts(number, call.leaves, call.versions, call.sources, call.read, ahead)
        if self._runs_ahead and number == self._replay.first_block and texts and self._calls[-1].read:
            texts[0] = f"_after(ahead, {texts[0][0]})", References(uses={"ahead", *texts[0][1].uses})
        uses: set[str] = set().union(*(references.uses for _, references in texts))
        callee = self._name_of(call.module)
        args, kwargs = tree_unflatten([text for text, _ in texts], call.spec)
        if _is_flat(args) and _is_flat(tuple(kwargs.values())):
            text = ", ".join([*args, *(f"{key}={value}" for key, value in kwargs.items())])
        else:
            spec = f"c{len(self._namespace)}_"
            self._namespace[spec] = call.spec
            nest = f"_unflatten([{', '.join(text for text, _ in texts)}], {spec})"
            self._add(f"n{number}", nest, uses, kind="pick")
            uses, text = {f"n{number}"}, f"*n{number}[0], **n{number}[1]"
        self._statements.append(
            Statement(
                name=self._outputs[number],
                text=f"{callee}({text})",
                uses=frozenset(uses),
                kind=signature_of(call.module),
                module=call.module,
                is_block=id(call.module) in self._block_ids,
                has_effect=True,
                context=call.context,
                changes_module=not has_parameters(call.module),  # such modules are only called for their effects
                returns_number=has_number(call.output),
            )
        )
        self._register_output(number)

    def _register_output(self, number: int) -> None:
        """Note the output of a call, for code that passes it on unchanged, and its shape, for code that does not need
        its values."""
        name, call = self._outputs[number], self._calls[number]
        for position, leaf in enumerate(call.output):
            if isinstance(leaf, torch.Tensor):
                text = name if call.output_spec.is_leaf() else f"_leaves({name})[{position}]"
                self._same[id(leaf)] = (text, name)
        self._add(f"e{number}", f"_shape_of({name})", {name}, kind="pick")

    def _texts(
        self,
        number: int,
        leaves: list[Any],
        versions: list[int],
        sources: list[set[Source]],
        read: set[Source],
        ahead: dict[tuple[int, int], str],
    ) -> list[tuple[str, References]]:
        """The texts of arguments, or of the output: known variables, or entries of a replay's result."""
        texts: list[tuple[str, References] | None] = []
        needed: set[Source] = set(read)
        for leaf, (value, version) in enumerate(zip(leaves, versions, strict=True)):
            if self._is_same(value, version, read):
                text, variable = self._same[id(value)]
                texts.append((text, References(uses={variable})))
            elif (number, leaf) in ahead:
                texts.append((ahead[number, leaf], References(uses={ahead[number, leaf]})))
            elif isinstance(value, bool | float | str | None) and not read:
                texts.append((repr(value), References()))
            else:
                needed |= sources[leaf]
                texts.append(None)
        is_checked = self._runs_ahead and number < len(self._calls)  # by the code that runs ahead
        if None in texts or (read and texts and not is_checked):
            variable = self._write_segment(number, needed)
            for leaf, known in enumerate(texts):
                if known is None:
                    texts[leaf] = f"{variable}[{leaf}]", References(uses={variable})
                elif leaf == 0:  # this replay only runs for its checks
                    texts[leaf] = f"_after({variable}, {known[0]})", References(uses={variable, *known[1].uses})
        return [text for text in texts if text is not None]

    def _write_segment(self, number: int, needed: set[Source]) -> str:
        """Write a replay up to a call, or to the end. Values that it does not need are passed as shapes."""
        variable = f"g{number}"
        calls = sorted(place for kind, place in needed if kind == "call" and place < number)
        uses: set[str] = set()
        outputs = []
        for place in range(number):
            rules = self._replay.calls[place].shapes
            if place in calls:
                text = self._outputs[place]
            elif all(rule is not None for rule in rules):
                text = "None"
            else:
                text = f"e{place}"
            outputs.append(text)
            uses |= {text} - {"None"}
        arguments = []
        for name in self._inputs:
            if name is not None:
                arguments.append(name)
                uses.add(name)
        loose, attributes = self._loose_text({place for kind, place in needed if kind == "loose"})
        self._add(
            variable,
            f"r0_.segment({number}, {calls}, ({', '.join(arguments)},), [{', '.join(outputs)}], {loose})",
            uses,
            kind=f"code before call {number}",
            attributes=attributes,
        )
        return variable

    def _loose_text(self, needed: set[int]) -> tuple[str, tuple[Attribute, ...]]:
        texts, attributes = [], []
        for number, (owner, name) in enumerate(self._loose):
            texts.append(f"{self._name_of(owner)}.{name}" if number in needed else "None")
            attributes += [(owner, name)] if number in needed else []
        return f"[{', '.join(texts)}]", tuple(attributes)

    def _name_of(self, module: nn.Module) -> str:
        if id(module) not in self._names:
            self._names[id(module)] = f"m{len(self._namespace)}_"
            self._namespace[self._names[id(module)]] = module
        return self._names[id(module)]

    def _add(self, name: str, text: str, uses: set[str], kind: str, attributes: tuple[Attribute, ...] = ()) -> None:
        self._statements.append(
            Statement(
                name=name, text=text, uses=frozenset(uses), kind=kind, attributes=attributes, context=current_context()
            )
        )


def _is_flat(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
