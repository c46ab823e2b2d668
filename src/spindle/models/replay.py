"""Replay code between blocks or towers that reads values of tensors (image sizes, masks), up to the next part.

Such code cannot be recorded, because it may differ for every batch. Instead the module's own forward runs on real
tensors whenever a part of the module needs arguments from it. It starts from the beginning; calls of its parts (blocks,
towers, other submodules with parameters) return outputs that are already known; and it stops at the part whose
arguments are needed. This is a pure function of the module's arguments and of the outputs of earlier parts, so it can
run on any rank that has these, and its gradients are right.

    argument ─▶ [code] ─▶ part 0 ─▶ [code again, up to part 1] ─▶ part 1 ─▶ ... ─▶ [code to its end] ─▶ output

`replay_learning` learns once, from a first batch, which parts are called in which order, and what each needs.

Checks: once the code has read a value, it may behave differently for another batch. So all later arguments of parts,
including numbers and None, come from a replay of the current batch. Only outputs of parts that are passed on unchanged
go straight to the next part, and every replay checks that they are still passed on.

Running ahead: most arguments of blocks (masks, positions, lengths of sequences) do not depend on the blocks before.
They are computed once, before the first block: the code runs through all blocks while these return zeros. So nothing
is replayed between blocks that only pass hidden states on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map, tree_unflatten

from spindle.errors import GuardError
from spindle.models.cross_entropy import CrossEntropyFoundError, StopAtCrossEntropy
from spindle.models.fake import as_when_compiling, clone_leaf, device_of, without_caches
from spindle.models.intercept import intercepted_calls
from spindle.models.zeros import zero_weights


@dataclass(frozen=True, slots=True)
class SameShape:
    """The shape of a leaf of an output: that of this leaf of the arguments."""

    leaf: int


@dataclass(frozen=True, slots=True)
class PassedOn:
    """A leaf that the code passes on unchanged: a leaf of the inputs (`call` is None), or of the output of a call."""

    call: int | None
    leaf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedCall:
    """A call of a part.

    `shapes` has, for each leaf of its output: which argument has the same shape; None if that is unknown; or a tuple
    with the leaf itself if it is not a tensor. `passed` has, for each leaf of its arguments that needs no replay, what
    it must be. `writes` says whether the code modifies its output in place.
    """

    path: str
    spec: TreeSpec
    shapes: tuple[Any, ...]
    passed: tuple[PassedOn | None, ...]
    writes: bool


class _Stop(Exception):
    """Ends a forward whose remainder is not needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The forward of a module, run up to the arguments of one of its parts. Can be sent to other processes."""

    module: nn.Module
    spec: Any
    constants: tuple[Any, ...]
    is_input: tuple[bool, ...]
    targets: tuple[str, ...]  # paths of all parts
    calls: tuple[ReplayedCall, ...]
    loose: tuple[tuple[str, str, tuple[int, ...], torch.dtype], ...]  # path of the owner, name, shape, dtype
    first_block: int
    returned: tuple[PassedOn | None, ...]  # of the leaves of the output, like `passed` of calls
    written: tuple[int, ...]  # leaves of the arguments that the code modifies in place

    def __repr__(self) -> str:
        return f"Replay({self.targets}, {[call.path for call in self.calls]}, {self.loose})"

    def segment(self, number: int, needed: Sequence[int], inputs: Any, outputs: Any, loose: Any) -> list[Any]:
        """Run the code up to call `number`, and return the leaves of its arguments; after the last call, those of the
        output. `outputs` are those of earlier calls: real ones for the calls in `needed`, only shapes for the
        others."""
        wanted: list[Any] = []
        known = set(needed)

        def output_of(place: int, call: ReplayedCall, run: Any, args: Any, kwargs: Any) -> Any:
            if place == number:
                wanted.extend(tree_leaves((args, kwargs)))
                raise _Stop
            return outputs[place] if place in known else self._zeros(call, outputs[place], args, kwargs)

        result = self._run(output_of, inputs, loose)
        return tree_leaves(result) if number == len(self.calls) else wanted

    def loss_parts(
        self, which: int, number: int, needed: Sequence[int], inputs: Any, outputs: Any, loose: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The total and the count of a mean that the code computes after its last call, in its cross entropy of number
        `which`. The other arguments are those of `segment`."""
        try:
            with StopAtCrossEntropy(which):
                self.segment(number, needed, inputs, outputs, loose)
        except CrossEntropyFoundError as reached:
            return reached.parts
        raise self._refusal(f"it computed {which + 1} cross entropies, now fewer")

    def ahead(
        self,
        wanted: Sequence[tuple[int, int]],
        exported: Sequence[int],
        inputs: Any,
        loose: Any,
        compute: Callable[[nn.Module, Any, Any], Any] | None = None,
    ) -> list[Any]:
        """Run the code through all blocks, which return zeros. Returns the `wanted` leaves of arguments, given by call
        and leaf, none of which depends on a block; then the outputs of the calls `exported`, which come before the
        first block and are computed."""
        values: dict[tuple[int, int], Any] = {}
        computed: dict[int, Any] = {}
        places = set(wanted)
        last = len(self.calls) - 1  # also beyond the last one needed, so that values that are passed on are checked

        def output_of(place: int, call: ReplayedCall, run: Any, args: Any, kwargs: Any) -> Any:
            for leaf, value in enumerate(tree_leaves((args, kwargs))):
                if (place, leaf) in places:
                    values[place, leaf] = value
            if place >= last and place >= self.first_block:
                raise _Stop
            if place < self.first_block:
                part = self.module.get_submodule(call.path)
                computed[place] = run(args, kwargs) if compute is None else compute(part, args, kwargs)
                return computed[place]
            return self._zeros(call, None, args, kwargs)

        self._run(output_of, inputs, loose)
        return [*(values[place] for place in wanted), *(computed[place] for place in exported)]

    def _zeros(self, call: ReplayedCall, shapes: Any, args: Any, kwargs: Any) -> Any:
        """An output of a call without its values."""
        arguments = tree_leaves((args, kwargs))
        given = tree_leaves(shapes) if shapes is not None else [None] * len(call.shapes)
        leaves = []
        for shape, empty in zip(call.shapes, given, strict=True):
            if isinstance(shape, SameShape):
                leaves.append(torch.zeros_like(arguments[shape.leaf]))
            elif shape is not None:
                leaves.append(shape[0])
            elif isinstance(empty, torch.Tensor):
                leaves.append(empty.new_zeros(empty.shape[1:]))
            else:
                leaves.append(torch.empty(0, device=device_of(arguments)))
        return tree_unflatten(leaves, call.spec)

    def _run(self, output_of: Callable[..., Any], inputs: Any, loose: Any) -> Any:
        targets = [self.module.get_submodule(path) for path in self.targets]
        paths = {id(target): path for target, path in zip(targets, self.targets, strict=True)}
        given = iter(inputs)
        leaves = [next(given) if named else value for named, value in zip(self.is_input, self.constants, strict=True)]
        leaves = [clone_leaf(leaf) if number in self.written else leaf for number, leaf in enumerate(leaves)]
        seen: dict[int | None, list[Any]] = {None: leaves}  # the values that the code received: inputs, and by call
        versions: dict[int | None, list[int]] = {None: list(map(version_of, leaves))}

        def check(values: list[Any], rules: Sequence[PassedOn | None], what: str) -> None:
            if len(values) != len(rules):
                raise self._refusal(f"{what} got {len(rules)} values, now {len(values)}")
            for value, rule in zip(values, rules, strict=True):
                if rule is not None and (
                    value is not seen[rule.call][rule.leaf] or version_of(value) != versions[rule.call][rule.leaf]
                ):
                    raise self._refusal(f"{what} got the output of an earlier part unchanged, now another tensor")

        def intercept(module: nn.Module, run: Any, args: Any, kwargs: Any) -> Any:
            place = len(seen) - 1
            if place >= len(self.calls) or self.calls[place].path != paths[id(module)]:
                calls = ", ".join(call.path for call in self.calls)
                raise self._refusal(f"it called {calls} in this order, now {paths[id(module)]} as number {place}")
            call = self.calls[place]
            check(tree_leaves((tuple(args), dict(kwargs))), call.passed, call.path)
            output = output_of(place, call, run, args, kwargs)
            if not torch.is_grad_enabled():  # the code has disabled gradients around this call
                output = tree_map(_detach, output)
            # a copy of the object, which the code may modify, and of tensors that it does modify
            output = tree_map(clone_leaf if call.writes else lambda leaf: leaf, output)
            seen[place] = tree_leaves(output)
            versions[place] = list(map(version_of, seen[place]))
            return output

        args, kwargs = tree_unflatten(leaves, self.spec)
        has_weights = not any(parameter.is_meta for parameter in islice(self.module.parameters(), 1))
        weights: Any = nullcontext() if has_weights else zero_weights(self.module, device_of(leaves))
        with (
            weights,
            as_when_compiling(),  # otherwise code may leave out a mask that masks nothing in this batch
            without_caches(self.module),
            self._loose_parameters(loose, leaves),
            intercepted_calls(targets, intercept),
        ):
            try:
                result = self.module(*args, **kwargs)
                check(tree_leaves(result), self.returned, "the output")
            except _Stop:
                result = None
        changed = [
            number
            for place, before in versions.items()
            for number, (leaf, version) in enumerate(zip(seen[place], before, strict=True))
            if version_of(leaf) != version
            and not (number in self.written if place is None else self.calls[place].writes)
        ]
        if changed:
            raise self._refusal("it did not change these tensors in place, now it does")
        return result

    def _refusal(self, difference: str) -> GuardError:
        """The error for a batch for which the code behaves differently from the first batch."""
        return GuardError(
            self.module,
            f"{type(self.module).__name__} reads values of tensors between its parts, and takes another branch for "
            f"this batch than for the first: {difference}. Register it with spindle.module(..., split=False)",
        )

    @contextmanager
    def _loose_parameters(self, loose: Any, leaves: Any) -> Iterator[None]:
        """A context in which the parameters that the code reads itself are replaced by these tensors. Those given as
        None do not affect the result, and may be on other ranks."""
        before = []
        for (path, name, shape, dtype), tensor in zip(self.loose, loose, strict=True):
            parameters = self.module.get_submodule(path)._parameters
            before.append((parameters, name, parameters[name]))
            value = torch.zeros(shape, dtype=dtype, device=device_of(leaves)) if tensor is None else tensor
            parameters[name] = value  # type: ignore[assignment]
        try:
            yield
        finally:
            for parameters, name, parameter in before:
                parameters[name] = parameter


def has_replay(namespace: Mapping[str, Any]) -> bool:
    """Whether generated text with these names replays code."""
    return any(isinstance(value, Replay) for value in namespace.values())


def shape_of(value: Any) -> Any:
    """A nest of tensors without values: an empty dimension comes first in each shape. It takes no memory, and only the
    shape is sent."""
    return tree_map(
        lambda leaf: leaf.detach().new_empty((0, *leaf.shape)) if isinstance(leaf, torch.Tensor) else leaf, value
    )


def after(checked: Any, value: Any) -> Any:
    """Return `value`, which may be used because a replay has checked it."""
    return value


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def version_of(leaf: Any) -> int:
    """How often a tensor was changed in place."""
    return leaf._version if isinstance(leaf, torch.Tensor) else 0
