"""Learn from a first batch what a replay needs: a forward whose code reads values, as statements.

The module's forward runs once on real arguments, while its parts return zeros of the right shapes and are not computed.
Operations are followed through the dispatcher, so that for each part it is known which inputs, outputs of earlier parts
and loose parameters its arguments depend on, and which values had been read by then (everything after them may depend
on these). Outputs that a piece of code does not depend on need not be sent to the rank that runs it: it gets zeros of
the same shape.

The result is a list of statements like a recording's, in which pieces of code are calls of a `Replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from spindle.errors import GuardError
from spindle.models.cross_entropy import CrossEntropies
from spindle.models.fake import as_when_compiling, device_of, without_caches
from spindle.models.intercept import intercepted_calls
from spindle.models.recording import argument_normalizer
from spindle.models.replay import Like, Replay, ReplayedCall, Same, version_of
from spindle.models.state import ModuleStates
from spindle.models.statements import (
    INNER_TENSOR,
    Attribute,
    Context,
    Recording,
    References,
    Statement,
    UnsupportedForwardError,
    current_context,
    signature_of,
)
from spindle.models.zeros import zero_output, zero_weights

Source = tuple[str, int]  # of a value: ("input", leaf), ("call", number) or ("loose", number)


def replay_forward(
    module: nn.Module, args: Any, kwargs: Any, blocks: Iterable[nn.Module], *, runs_ahead: bool
) -> Recording:
    """The forward of a module on real arguments, as statements that replay its code around calls of its parts.

    `runs_ahead`: what blocks take that depends on no block is computed in front of the first one.

    A replay runs the code more often than once in a step, and on several ranks, so it must leave no state on modules
    that a later call reads; state that is set up by the first call only is fine, and so are tensors that it leaves for
    others (`rope_deltas`).
    """
    learner = _Learner(module, list(blocks), args, kwargs, runs_ahead)
    recording = learner.recording()
    if learner.has_changed_modules or learner.has_left_tensors:
        # Once more, with what the first call has left: only now it can be read.
        learner = _Learner(module, list(blocks), args, kwargs, runs_ahead)
        recording = learner.recording()
    if learner.has_changed_modules:
        raise UnsupportedForwardError("its forward changes attributes or buffers of the module itself")
    if learner.kept:
        owner, name = learner.kept[0]
        raise UnsupportedForwardError(f"its forward reads {type(owner).__name__}.{name}, a tensor of the call before")
    return recording


class _Dependencies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which sources each storage depends on. Everything after a value that Python reads depends on its sources, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of: dict[int, set[Source]] = {}
        self.read: set[Source] = set()
        self.used: set[int] = set()  # storages of attributes that an operation has taken
        self.attributes: frozenset[int] = frozenset()
        self.is_random = False
        self.is_paused = False
        self._alive: list[Any] = []

    def add(self, value: Any, source: Source) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                self._alive.append(leaf)
                self.of.setdefault(leaf.untyped_storage()._cdata, set()).add(source)

    def sources(self, value: Any) -> set[Source]:
        sources: set[Source] = set()
        for leaf in tree_leaves(value):
            if isinstance(leaf, FakeTensor):  # parts run on fake tensors, and return zeros
                raise UnsupportedForwardError(INNER_TENSOR)
            if isinstance(leaf, torch.Tensor):
                key = leaf.untyped_storage()._cdata
                sources |= self.of.get(key, set())
                if key in self.attributes:
                    self.used.add(key)
        return sources

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        sources = self.sources((args, kwargs or {}))
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            self.read |= sources
        tags = getattr(func, "tags", ())
        self.is_random |= torch.Tag.nondeterministic_seeded in tags
        if func is torch.ops.aten.index.Tensor:  # by a mask: how many rows there are follows from values
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            self.read |= self.sources(masks)
        elif func is torch.ops.aten.masked_select.default:
            self.read |= self.sources(args[1])
        elif func is torch.ops.aten._ctc_loss.Tensor:  # sizes follow from the lengths, not from the probabilities
            self.read |= self.sources(args[1:4])
        elif torch.Tag.dynamic_output_shape in tags:
            self.read |= sources
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._alive.append(leaf)
                self.of.setdefault(leaf.untyped_storage()._cdata, set()).update(sources)
        schema = getattr(func, "_schema", None)
        for argument, value in zip(schema.arguments if schema is not None else (), args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                self.of.setdefault(value.untyped_storage()._cdata, set()).update(sources)
        return result


@dataclass(slots=True)
class _Call:
    module: nn.Module
    leaves: list[Any]  # of its arguments
    spec: TreeSpec
    sources: list[set[Source]]  # by leaf
    read: set[Source]  # values that had been read by then
    versions: list[int]  # of leaves: how often they had been changed in place
    context: Context
    output: list[Any]  # the leaves of what it returns
    output_spec: TreeSpec


@dataclass(slots=True)
class _Learner:
    module: nn.Module
    blocks: list[nn.Module]
    args: Any
    kwargs: Any
    runs_ahead: bool
    calls: list[_Call] = field(default_factory=list)
    losses: dict[int, int | set[int]] = field(default_factory=dict)  # by leaf of the output, see `_losses`
    has_changed_modules: bool = False  # whether the code around its parts has left something on modules
    has_left_tensors: bool = False  # whether it has left other tensors as attributes
    kept: list[tuple[nn.Module, str]] = field(default_factory=list)  # attributes that it has both read and replaced

    def recording(self) -> Recording:
        outer_context = current_context()
        leaves, spec = tree_flatten(argument_normalizer(self.module)(self.args, self.kwargs))
        is_input = [isinstance(leaf, torch.Tensor) or type(leaf) is int for leaf in leaves]
        block_ids = {id(block) for block in self.blocks}
        around = [
            submodule
            for submodule in self.module.modules()
            if id(submodule) not in block_ids and any(id(inner) in block_ids for inner in submodule.modules())
        ]
        inlined = {id(submodule) for submodule in around}
        paths = {id(submodule): path for path, submodule in self.module.named_modules()}
        targets = [
            submodule
            for submodule in self.module.modules()
            if id(submodule) not in inlined and any(True for _ in submodule.parameters())
        ]
        loose = [
            (submodule, name)
            for submodule in self.module.modules()
            if id(submodule) in inlined
            for name, parameter in submodule._parameters.items()
            if parameter is not None
        ]
        follow = _Dependencies()
        device = device_of(leaves)
        leaves = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for number, leaf in enumerate(leaves):
            follow.add(leaf, ("input", number))
        result, result_sources, result_read = self._learn(leaves, spec, targets, loose, follow, device, around)
        self._check_blocks(block_ids)
        # Calls inside a part are its own: only parts that this code calls, or might call, are intercepted from now on.
        outermost = {id(child) for part in self.module.modules() if id(part) in inlined for child in part.children()}
        outermost |= {id(call.module) for call in self.calls}
        targets = [target for target in targets if id(target) in outermost]
        first_block = next(number for number, call in enumerate(self.calls) if id(call.module) in block_ids)
        if follow.is_random:
            raise UnsupportedForwardError("random numbers are drawn between its parts")
        if any(kind != "input" for kind, _ in result_read):  # zeros here; real ones may branch differently
            raise UnsupportedForwardError("the code between its parts branches on values that its parts compute")
        passed = _Passed(leaves, is_input, self.calls)
        replay = Replay(
            module=self.module,
            spec=spec,
            constants=tuple(None if named else leaf for leaf, named in zip(leaves, is_input, strict=True)),
            is_input=tuple(is_input),
            targets=tuple(paths[id(target)] for target in targets),
            calls=tuple(
                ReplayedCall(
                    path=paths[id(call.module)],
                    spec=call.output_spec,
                    shapes=tuple(_shape_rule(leaf, call.leaves) for leaf in call.output),
                    is_block=id(call.module) in block_ids,
                    passed=tuple(map(passed.rule, call.leaves, call.versions, [call.read] * len(call.leaves))),
                    writes=any(version_of(leaf) for leaf in call.output),
                )
                for call in self.calls
            ),
            loose=tuple(
                (paths[id(owner)], name, tuple(owner._parameters[name].shape), owner._parameters[name].dtype)  # type: ignore[union-attr]
                for owner, name in loose
            ),
            first_block=first_block,
            returned=tuple(passed.rule(leaf, version_of(leaf), result_read) for leaf in tree_leaves(result)),
            written=tuple(number for number, leaf in enumerate(leaves) if version_of(leaf)),
        )
        self._try(replay, leaves, len(loose), device)
        writer = _Writer(replay, self.calls, leaves, loose, self.runs_ahead, block_ids)
        return writer.recording(result, result_sources, result_read, outer_context, self.losses)

    def _try(self, replay: Replay, leaves: list[Any], num_loose: int, device: Any) -> None:
        """Replay the code once to its end: it may differ where parts are not computed, because they have hooks."""
        inputs = [leaf for leaf, named in zip(leaves, replay.is_input, strict=True) if named]
        outputs = [tree_unflatten(call.output, call.output_spec) for call in self.calls]
        try:
            with torch.no_grad(), zero_weights(self.module, device):
                replay.segment(len(self.calls), range(len(self.calls)), inputs, outputs, [None] * num_loose)
        except GuardError as error:
            raise UnsupportedForwardError(f"its code cannot be run around its parts: {error}") from error

    def _learn(
        self,
        leaves: list[Any],
        spec: Any,
        targets: list[nn.Module],
        loose: list[Attribute],
        follow: _Dependencies,
        device: Any,
        around: list[nn.Module],
    ) -> tuple[Any, list[set[Source]], set[Source]]:
        def called(module: nn.Module, run: Any, args: Any, kwargs: Any) -> Any:
            context = current_context()
            argument_leaves, argument_spec = tree_flatten((tuple(args), dict(kwargs)))
            sources = [follow.sources(leaf) for leaf in argument_leaves]
            follow.is_paused = losses.is_paused = True
            try:
                output = _without_aliases(zero_output(module, args, kwargs))
            finally:
                follow.is_paused = losses.is_paused = False
            if any(isinstance(leaf, int | float) for leaf in tree_leaves(output)):
                name = type(module).__name__
                raise UnsupportedForwardError(f"its {name} returns a number, which may follow from values of tensors")
            follow.add(output, ("call", len(self.calls)))
            versions = list(map(version_of, argument_leaves))
            # As leaves: the code may change the object that it gets.
            returned = tree_flatten(output)
            self.calls.append(
                _Call(module, argument_leaves, argument_spec, sources, set(follow.read), versions, context, *returned)
            )
            return output

        losses = CrossEntropies()
        args, kwargs = tree_unflatten(leaves, spec)
        # With gradients enabled, as they are outside, to see where the code disables them; zeros require none.
        with as_when_compiling(), without_caches(self.module), zero_weights(self.module, device) as zeros:
            for number, (owner, name) in enumerate(loose):
                follow.add(zeros[id(owner), name], ("loose", number))
            before, tensors = ModuleStates(around), _tensor_attributes(around)
            follow.attributes = frozenset(tensor.untyped_storage()._cdata for tensor, _ in tensors.values())
            with intercepted_calls(targets, called), follow, _noting_reads(follow), losses:
                result = self.module(*args, **kwargs)
            self.has_changed_modules = bool(before.changed_modules(but_for_tensors=True))
            self._compare_tensors(around, tensors, follow)
        result_leaves = tree_leaves(result)
        self.losses = _losses(result_leaves, losses, follow, leaves)
        return result, [follow.sources(leaf) for leaf in result_leaves], set(follow.read)

    def _compare_tensors(
        self, around: list[nn.Module], before: dict[Attribute, tuple[torch.Tensor, int]], follow: _Dependencies
    ) -> None:
        """Note tensors that were left as attributes, and those among them whose earlier values were read."""
        now = _tensor_attributes(around)
        changed = [
            key
            for key, (value, version) in before.items()
            if key not in now or now[key][0] is not value or now[key][1] != version
        ]
        self.has_left_tensors = bool(changed) or now.keys() != before.keys()
        self.kept = [key for key in changed if before[key][0].untyped_storage()._cdata in follow.used]

    def _check_blocks(self, block_ids: set[int]) -> None:
        num_blocks = sum(id(call.module) in block_ids for call in self.calls)
        if num_blocks < (2 if self.runs_ahead else 1):
            raise UnsupportedForwardError("its forward calls fewer than two of its blocks one by one")


def _losses(
    result: list[Any], losses: CrossEntropies, follow: _Dependencies, leaves: list[Any]
) -> dict[int, int | set[int]]:
    """Leaves of the output that are losses over tokens: the number of the cross entropy that is their mean, or the
    inputs that a sum is divided by (`num_items_in_batch`). Where a plain number comes from is not known."""
    found: dict[int, int | set[int]] = {}
    for position, leaf in enumerate(result):
        for number, (value, reduction) in enumerate(losses.results):
            if value is leaf and reduction == "mean":
                found[position] = number
        for quotient, divisor in losses.quotients:
            sources = follow.sources(divisor)
            if (
                quotient is leaf
                and sources
                and all(
                    kind == "input" and not (isinstance(leaves[number], torch.Tensor) and leaves[number].dim())
                    for kind, number in sources
                )
            ):
                found[position] = {number for _, number in sources}
    return found


def _shape_rule(leaf: Any, arguments: list[Any]) -> Any:
    """How a replay knows the shape of a leaf of an output: see `ReplayedCall`."""
    if not isinstance(leaf, torch.Tensor):
        return (leaf,)
    for number, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor) and argument.shape == leaf.shape and argument.dtype == leaf.dtype:
            return Like(number)
    return None


class _Passed:
    """Which tensors the code passes on unchanged."""

    def __init__(self, leaves: list[Any], is_input: list[bool], calls: list[_Call]) -> None:
        self._places: dict[int, Same] = {}
        for number, leaf in enumerate(leaves):
            if is_input[number] and isinstance(leaf, torch.Tensor):
                self._places[id(leaf)] = Same(None, number)
        for number, call in enumerate(calls):
            for position, leaf in enumerate(call.output):
                if isinstance(leaf, torch.Tensor):
                    self._places.setdefault(id(leaf), Same(number, position))

    def rule(self, value: Any, version: int, read: set[Source]) -> Same | None:
        """What a value must be in every batch; None for what is computed in every batch. Inputs are passed on without a
        replay only where no value was read before."""
        place = self._places.get(id(value)) if isinstance(value, torch.Tensor) and version == 0 else None
        return None if place is None or (place.call is None and read) else place


class _Writer:
    """Writes the statements of a replayed forward."""

    def __init__(
        self,
        replay: Replay,
        calls: list[_Call],
        leaves: list[Any],
        loose: list[Attribute],
        runs_ahead: bool,
        block_ids: set[int],
    ) -> None:
        self._replay, self._calls, self._leaves, self._loose = replay, calls, leaves, loose
        self._runs_ahead, self._block_ids = runs_ahead, block_ids
        self._statements: list[Statement] = []
        self._namespace: dict[str, Any] = {"r0_": replay}
        self._names: dict[int, str] = {}  # of modules in the namespace
        self._inputs = [f"a{number}" if named else None for number, named in enumerate(replay.is_input)]
        self._outputs = [f"t{number}" for number in range(len(calls))]
        # Tensors that are passed on as they are, by id: their text, and the variable in it.
        self._same: dict[int, tuple[str, str]] = {}
        for name, leaf in zip(self._inputs, leaves, strict=True):
            if name is not None and isinstance(leaf, torch.Tensor):
                self._same[id(leaf)] = (name, name)

    def _is_same(self, value: Any, version: int, read: set[Source]) -> bool:
        """Whether a tensor is passed on as it was returned, or as it was given before any value was read."""
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
        """Write the code before the first block; the variables of the arguments that it computes, by call and leaf."""
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
        """Run ahead once with zeros: some code fails on block outputs without real values."""
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
            )
        )
        self._register_output(number)

    def _register_output(self, number: int) -> None:
        """Note the output of a call, for code that passes it on unchanged; and its shape, for code that does not need
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
                elif leaf == 0:  # this replay runs only for its checks
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


def _without_aliases(nest: Any) -> Any:
    """A nest in which no tensor is there twice: on other ranks such leaves are different tensors."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        is_known = isinstance(leaf, torch.Tensor) and id(leaf) in seen
        seen.add(id(leaf))
        return leaf.clone() if is_known else leaf

    return tree_map(own, nest)


def _tensor_attributes(modules: Iterable[nn.Module]) -> dict[Attribute, tuple[torch.Tensor, int]]:
    """Plain attributes that are tensors, with how often they were changed in place."""
    return {
        (module, name): (value, version_of(value))
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


@contextmanager
def _noting_reads(follow: _Dependencies) -> Iterator[None]:
    """A context that also notes reads of whole tensors which the dispatcher does not see."""
    names = ("tolist", "numpy", "__array__")
    before = {name: getattr(torch.Tensor, name) for name in names}

    def noting(name: str) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not follow.is_paused:
                follow.read |= follow.sources(tensor)
            return before[name](tensor, *args, **kwargs)

        return read

    own = {name for name in names if name in vars(torch.Tensor)}  # others are inherited
    for name in names:
        setattr(torch.Tensor, name, noting(name))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(torch.Tensor, name, method) if name in own else delattr(torch.Tensor, name)


def _is_flat(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)
