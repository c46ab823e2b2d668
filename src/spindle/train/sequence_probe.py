"""Which item calls several devices may share, each with a slice of an item's tokens: tried on a task's first batch.

Single items of different lengths show which dimensions hold tokens at every cut between layers, which integers count
them, and what attention is called with. Then one item is cut into slices, and every kind of layer runs on them as the
members of a sequence group would run it, one after another in this process, forward and backward. Layers that mix
tokens outside of attention (a convolution, a mean), or use the place of a token in its slice, give other results than
on the whole item, row by row: their call is not shared. What comes before the blocks may be such code: members then run
it on all tokens, and cut behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from spindle.models import EmulatedTensorGroup, recorded_attention, sequence_attention, without_caches
from spindle.program import max_slices
from spindle.run import (
    CountedRows,
    ItemCode,
    ItemRows,
    Lengths,
    SequenceCode,
    SliceRule,
    as_leaves,
    copied,
    cut_items,
    cut_slice,
    items_to_measure,
    takes_gradient,
)
from spindle.train.item_probe import row_rule
from spindle.train.items import item_groups, lengths_in
from spindle.train.record import RecordedCall
from spindle.train.trace import TracedTask, first_line
from spindle.train.unchanged import unchanged

MAX_SEQUENCE_DEGREE = 8  # the largest sequence degree: a sequence group stays where links are fast
_SEED = 20240611
_MOST_VALUES = 64  # the largest integer tensor that is examined for counts of tokens
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3}
_HALF = 0.1

Rules = tuple[SliceRule, ...]


class _NotShared(Exception):
    """Raised if a sequence group cannot run a call; the message says why."""


def probe_sequences(
    task: TracedTask, batch: Any, codes: Mapping[str, ItemCode], is_random: set[str]
) -> tuple[dict[str, ItemCode], dict[str, str]]:
    """How devices can share an item of each item call of a task, and why the items of other calls run on one device.
    Modules and random state are restored afterwards."""
    shared: dict[str, ItemCode] = {}
    reasons: dict[str, str] = {}
    calls = {call.name: call for call in task.recorded.calls}
    lengths = lengths_in(task.recorded.definition, batch)
    for group in item_groups(task.recorded.calls):
        if not all(codes[name].can_split for name in group):
            continue
        members = [calls[name] for name in group]
        modules = list({id(call.handle.module): call.handle.module for call in members}.values())
        try:
            if not is_random.isdisjoint(group):
                raise _NotShared("it draws random numbers (dropout?), which its members would draw differently")
            with unchanged(modules), ExitStack() as stack:
                for module in modules:
                    module.eval()
                    stack.enter_context(without_caches(module))
                sequences = _Trial(members, batch, codes, lengths).find()
        except _NotShared as error:
            reasons |= dict.fromkeys(group, str(error))
        except Exception as error:  # the user's code may fail on single items and slices
            text = f"it cannot be tried out ({type(error).__name__}: {first_line(error)})"
            reasons |= dict.fromkeys(group, text)
        else:
            shared |= {name: replace(codes[name], sequence=sequences[name]) for name in group}
    return shared, reasons


@dataclass(slots=True)
class _ItemRecord:
    """What was recorded of one item on its way through a group of calls: the leaves at each cut, and the arguments of
    attention."""

    # By call and by the number of layers before the cut; -1: arguments of the call.
    cuts: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # by call and layer
    heads: list[int] = field(default_factory=list)
    num_bytes: dict[tuple[str, int], int] = field(default_factory=dict)


class _Trial:
    """A group of item calls that is tried on items of a batch."""

    def __init__(
        self, calls: Sequence[RecordedCall], batch: Any, codes: Mapping[str, ItemCode], lengths: Lengths
    ) -> None:
        self._calls, self._batch, self._codes, self._lengths = calls, batch, codes, lengths
        code = codes[calls[0].name]
        if code.length_entry is None:
            raise _NotShared("its items have one row each, in which tokens are not told apart")
        self._entry, self._of_item = code.length_entry, lengths[code.length_entry]
        self._code = replace(code, entries=tuple(dict.fromkeys(entry for call in calls for entry in call.items)))

    def find(self) -> dict[str, SequenceCode]:
        """How the calls can be shared. Raises _NotShared if they cannot."""
        items = items_to_measure(self._of_item)
        if len(items) < 2:
            raise _NotShared("the items of the first batch have one length, which does not show where their tokens are")
        records = {self._of_item[item]: self._record(item) for item in dict.fromkeys([items[0], items[-2], items[-1]])}
        longest = self._of_item[items[-1]]
        heads = math.gcd(*(count for each in records.values() for count in each.heads))
        degrees = tuple(degree for degree in range(2, MAX_SEQUENCE_DEGREE + 1) if heads % degree == 0)
        if not degrees:
            text = "1 head" if heads == 1 else f"{heads} heads"
            raise _NotShared(f"its attention has {text}, which no 2 to {MAX_SEQUENCE_DEGREE} devices can share evenly")
        starts = {
            call.name: 0 if call.sources else self._try_first_layer(call, records, items[-1], degrees[0])
            for call in self._calls
        }
        rules = self._rules(records, starts)
        attended = self._attention_tokens(records, starts)
        alignment = self._alignment(rules, attended)
        if max_slices(longest, alignment) < degrees[0]:
            raise _NotShared(f"the items of the first batch, of up to {longest} rows, are too short to be cut")
        self._compare_layers(rules, attended, alignment, starts, items[-1], degrees[0])
        last = records[longest]
        return {
            call.name: SequenceCode(
                degrees=degrees,
                alignment=alignment,
                whole_layers=starts[call.name],
                cut=() if call.sources else rules[call.name, starts[call.name] - 1],
                attended=attended,
                exchanged_bytes=tuple(
                    last.num_bytes[call.name, number] / longest if number >= starts[call.name] else 0.0
                    for number in range(len(call.chain.layers))
                ),
            )
            for call in self._calls
        }

    def _record(self, item: int) -> _ItemRecord:
        """Run one whole item and record it."""
        record = _ItemRecord()
        outputs: dict[str, Any] = {}
        batch = cut_items(self._batch, self._code, self._lengths, [item])
        torch.manual_seed(_SEED)
        with torch.no_grad():
            for call in self._calls:
                args, kwargs = call.arguments(batch, *(outputs[source] for source in call.sources))
                record.cuts[call.name, -1] = list(map(_fact_of, tree_leaves((args, kwargs))))
                values: Any = None
                for number, layer in enumerate(call.chain.layers):
                    with recorded_attention() as calls:
                        values = layer.run(*args, **kwargs)
                    args, kwargs = values, {}
                    record.cuts[call.name, number] = list(map(_fact_of, tree_leaves(values)))
                    record.tokens[call.name, number] = calls.tokens
                    record.heads += calls.heads
                    record.num_bytes[call.name, number] = calls.num_bytes
                outputs[call.name] = values[0]
        return record

    def _rules_of_cut(self, records: Mapping[int, _ItemRecord], call: str, place: int) -> Rules:
        """Which rows a slice has of each leaf at a cut."""
        leaves = {length: each.cuts[call, place] for length, each in records.items()}
        if len({len(of_length) for of_length in leaves.values()}) > 1:
            raise _NotShared("what passes between its layers depends on the length of an item")
        count = len(next(iter(leaves.values())))
        return tuple(
            self._rule_of_leaf({length: of_length[number] for length, of_length in leaves.items()})
            for number in range(count)
        )

    def _rule_of_leaf(self, facts: Mapping[int, Any]) -> SliceRule:
        """The rule for one leaf, from its values for items of several lengths."""
        (_, first), *others = facts.items()
        if not isinstance(first, _TensorFact):
            is_count = all(type(value) is int for value in facts.values())
            rows = row_rule(0, self._entry, facts) if is_count and any(value != first for _, value in others) else None
            return CountedRows(rows=rows) if rows is not None and rows.entry is not None else None
        shapes = {length: fact.shape for length, fact in facts.items()}
        if any(len(shape) != len(first.shape) for shape in shapes.values()):
            raise _NotShared("what passes between its layers depends on the length of an item")
        grown = [axis for axis in range(len(first.shape)) if len({shape[axis] for shape in shapes.values()}) > 1]
        if len(grown) > 1:  # pairs of tokens, as in a mask: attention needs all of them
            return None
        if grown:
            rows = row_rule(grown[0], self._entry, {length: shape[grown[0]] for length, shape in shapes.items()})
            if rows is None or rows.entry is None:
                counts = ", ".join(f"{shape[grown[0]]} for {length}" for length, shape in shapes.items())
                raise _NotShared(
                    f"its tokens are not in proportion to the rows of an item ({counts}); a class token, or padding?"
                )
            return rows
        counted = [
            place for place in range(len(first.values)) if len({fact.values[place] for fact in facts.values()}) > 1
        ]
        rules = {
            row_rule(0, self._entry, {length: fact.values[place] for length, fact in facts.items()})
            for place in counted
        }
        # No counts, or counts of different things: the trial shows whether every slice can use them unchanged.
        if len(rules) != 1:
            return None
        (rows,) = rules
        if rows is None or rows.entry is None:
            return None
        return CountedRows(rows=rows, places=tuple(counted), num_elements=len(first.values))

    def _rules(self, records: Mapping[int, _ItemRecord], starts: Mapping[str, int]) -> dict[tuple[str, int], Rules]:
        """The rules of all cuts that slices cross."""
        rules = {}
        for call in self._calls:
            for rows in self._codes[call.name].rows:
                if rows is not None and rows.entry is None:
                    raise _NotShared(
                        "its output has as many rows for short items as for long ones (a mean over tokens?)"
                    )
            first = 0 if call.sources else starts[call.name] - 1
            for place in range(first, len(call.chain.layers)):
                rules[call.name, place] = self._rules_of_cut(records, call.name, place)
        return rules

    def _attention_tokens(self, records: Mapping[int, _ItemRecord], starts: Mapping[str, int]) -> ItemRows | None:
        """The tokens for which attention is called, the same in all layers; None without attention."""
        rules: set[ItemRows | None] = set()
        for call in self._calls:
            for number in range(starts[call.name], len(call.chain.layers)):
                tokens = {length: set(each.tokens[call.name, number]) for length, each in records.items()}
                if not any(tokens.values()):
                    continue
                if any(len(counts) != 1 for counts in tokens.values()):
                    raise _NotShared(
                        "its attention is not between all tokens of an item (it has windows, or other queries than "
                        "keys)"
                    )
                rules.add(row_rule(0, self._entry, {length: counts.pop() for length, counts in tokens.items()}))
        if not rules:
            return None
        attended = next(iter(rules))
        if len(rules) > 1 or attended is None or attended.entry is None:
            raise _NotShared("the tokens that its attention sees do not follow from the rows of an item")
        return attended

    def _alignment(self, rules: Mapping[tuple[str, int], Rules], attended: ItemRows | None) -> int:
        """The multiple at which slices of an item must begin, so that each cut has whole rows for each slice."""
        every = [rule for of_cut in rules.values() for rule in of_cut] + [attended]
        every += [rows for call in self._calls for rows in self._codes[call.name].rows]
        rows_of = [rule.rows if isinstance(rule, CountedRows) else rule for rule in every if rule is not None]
        return math.lcm(*(rows.denominator for rows in rows_of))

    def _try_first_layer(self, call: RecordedCall, records: Mapping[int, _ItemRecord], item: int, degree: int) -> int:
        """The number of layers of a call that run on the whole item before it is sliced: 0 or 1. For calls that read
        the batch."""
        try:
            arguments, outputs = (self._rules_of_cut(records, call.name, place) for place in (-1, 0))
            if not any(isinstance(rule, ItemRows) for rule in arguments):
                raise _NotShared("its arguments have no rows for the tokens of an item")
            rules = {(call.name, -1): arguments, (call.name, 0): outputs}
            attended = self._attention_tokens(
                records, {each.name: len(each.chain.layers) for each in self._calls} | {call.name: 0}
            )
            alignment = self._alignment(rules, attended)
            batch = cut_items(self._batch, self._code, self._lengths, [item])
            trial = _Slices(self._of_item[item], degree, alignment, attended)
            trial.compare(
                lambda args, kwargs: call.chain.layers[0].run(*args, **kwargs),
                call.arguments(batch),
                arguments,
                outputs,
                call.chain.layers[0].parameters,
                f"layer 0 of {call.name}",
            )
        except Exception:
            if len(call.chain.layers) == 1:
                raise
            return 1
        return 0

    def _compare_layers(
        self,
        rules: Mapping[tuple[str, int], Rules],
        attended: ItemRows | None,
        alignment: int,
        starts: Mapping[str, int],
        item: int,
        degree: int,
    ) -> None:
        """Run every kind of layer on the slices of an item and on the whole item, and compare."""
        batch = cut_items(self._batch, self._code, self._lengths, [item])
        slices = _Slices(self._of_item[item], degree, alignment, attended)
        outputs: dict[str, Any] = {}
        for call in self._calls:
            tried: set[str] = set()
            sources = [outputs[source] for source in call.sources]
            args, kwargs = call.arguments(batch, *sources)
            values: Any = None
            for number, layer in enumerate(call.chain.layers):
                name = f"layer {number} of {call.name}"
                if number == 0 and call.sources:

                    def first(*sources: Any, call: RecordedCall = call) -> Any:
                        args, kwargs = call.arguments(batch, *sources)
                        return call.chain.layers[0].run(*args, **kwargs)

                    of_sources = tuple(rule for source in call.sources for rule in self._codes[source].rows)
                    slices.compare(first, sources, of_sources, rules[call.name, 0], layer.parameters, name)
                elif number >= max(1, starts[call.name]) and layer.kind not in tried:
                    tried.add(layer.kind)
                    input_rules, output_rules = rules[call.name, number - 1], rules[call.name, number]
                    slices.compare(layer.run, values, input_rules, output_rules, layer.parameters, name)
                torch.manual_seed(_SEED)
                values = layer.run(*args, **kwargs) if number == 0 else layer.run(*copied(values))
                values = as_leaves(values)
            outputs[call.name] = values[0]


@dataclass(frozen=True, slots=True)
class _TensorFact:
    shape: tuple[int, ...]
    values: tuple[int, ...] = ()  # of a small integer tensor


def _fact_of(leaf: Any) -> Any:
    """Shape and values of a leaf, as far as rules need them."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    is_small = not leaf.is_floating_point() and leaf.dtype != torch.bool and leaf.numel() <= _MOST_VALUES
    return _TensorFact(tuple(leaf.shape), tuple(leaf.reshape(-1).tolist()) if is_small else ())


class _Slices:
    """The slices of one item on the members of a sequence group."""

    def __init__(self, length: int, degree: int, alignment: int, attended: ItemRows | None) -> None:
        if max_slices(length, alignment) < degree:
            raise _NotShared(f"the items of the first batch, of up to {length} rows, are too short to be cut")
        code = SequenceCode(degrees=(degree,), alignment=alignment)
        self._degree, self._bounds = degree, code.bounds(length, degree)
        self._tokens = [bound if attended is None else attended.at(bound) for bound in self._bounds]

    def compare(
        self,
        run: Callable[..., Any],
        inputs: Any,
        input_rules: Sequence[SliceRule],
        output_rules: Sequence[SliceRule],
        parameters: Sequence[torch.Tensor],
        name: str,
    ) -> None:
        """Raise _NotShared if outputs or gradients on slices differ from those on the whole item."""
        # The reference: the whole item, with fixed gradients of its outputs (`seeds`).
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        whole_inputs = _own_leaves(inputs)
        with torch.enable_grad():
            outputs = run(*copied(whole_inputs))
            seeds = _seeds(outputs)
            gradients = _gradients(outputs, seeds, whole_inputs, trained)
        group = EmulatedTensorGroup(self._degree)

        # Outputs that all members have whole contribute to the gradient once for each, so their seeds are divided.
        def member(place: int) -> tuple[Any, list[Any]]:
            own_inputs = _own_leaves(cut_slice(inputs, input_rules, self._bounds, place))
            own_seeds = [
                None
                if seed is None
                else cut_slice(seed, [rule], self._bounds, place)
                if isinstance(rule, ItemRows)
                else seed / self._degree
                for seed, rule in zip(seeds, output_rules, strict=True)
            ]
            torch.manual_seed(_SEED)
            with sequence_attention(group, self._tokens), torch.enable_grad():
                own_outputs = run(*copied(own_inputs))
                return own_outputs, _gradients(own_outputs, own_seeds, own_inputs, trained)

        try:
            results = group.run(member)
        except Exception as error:
            raise _NotShared(
                f"{name} does not run on a slice of an item's tokens ({type(error).__name__}: {first_line(error)})"
            ) from error
        for place, (own_outputs, _) in enumerate(results):
            expected = tree_leaves(cut_slice(outputs, output_rules, self._bounds, place))
            for actual, whole, rule in zip(tree_leaves(own_outputs), expected, output_rules, strict=True):
                if not _close(actual, whole, rule):
                    raise _NotShared(
                        f"{name} gives different results on a slice of an item's tokens: it mixes them outside of "
                        "torch.nn.functional.scaled_dot_product_attention (attn_implementation='sdpa'), or uses their "
                        "place"
                    )
        rules = [*input_rules, *(None for _ in trained)]
        # compared relative to the largest gradient, because some are zero in exact arithmetic
        largest = max((float(each.double().norm()) for each in gradients if each is not None), default=0.0)
        for number, (expected, rule) in enumerate(zip(gradients, rules, strict=True)):
            parts = [own_gradients[number] for _, own_gradients in results]
            if expected is None and all(part is None for part in parts):
                continue
            if expected is None or not _close(_combine_gradients(parts, rule), expected, rule, largest):
                raise _NotShared(f"{name} gives different gradients on slices of an item's tokens")


def _own_leaves(tree: Any) -> Any:
    """The tensors of a tree as leaves of a new autograd graph."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten(
        [
            leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ],
        spec,
    )


def _seeds(outputs: Any) -> list[torch.Tensor | None]:
    """Output gradients from which backward starts: those of some sum over the outputs."""
    torch.manual_seed(_SEED)
    return [
        torch.randn(leaf.shape, dtype=leaf.dtype, device=leaf.device) if takes_gradient(leaf) else None
        for leaf in tree_leaves(outputs)
    ]


def _gradients(outputs: Any, seeds: Sequence[Any], inputs: Any, trained: Sequence[torch.Tensor]) -> list[Any]:
    """Gradients of the leaves of inputs, and of parameters; None for those without gradient."""
    leaves = tree_leaves(inputs)
    pairs = [
        (leaf, seed)
        for leaf, seed in zip(tree_leaves(outputs), seeds, strict=True)
        if takes_gradient(leaf) and seed is not None
    ]
    wanted = [leaf for leaf in (*leaves, *trained) if takes_gradient(leaf)]
    gradients: dict[int, Any] = {}
    if pairs and wanted:
        computed = torch.autograd.grad(
            [leaf for leaf, _ in pairs], wanted, [seed for _, seed in pairs], allow_unused=True
        )
        gradients = {id(leaf): gradient for leaf, gradient in zip(wanted, computed, strict=True)}
    return [gradients.get(id(leaf)) for leaf in (*leaves, *trained)]


def _combine_gradients(parts: Sequence[Any], rule: SliceRule) -> Any:
    """The gradient of the whole from those of the members: concatenated for slices, summed for what all members
    have."""
    if isinstance(rule, ItemRows):
        return None if any(part is None for part in parts) else torch.cat(list(parts), dim=rule.axis)
    return sum(part for part in parts if part is not None)


def _close(actual: Any, expected: Any, rule: SliceRule, largest: float = 0.0) -> bool:
    """Whether two values are equal up to rounding, compared row by row, because a convolution mixes only the few tokens
    at the border of a slice. Tensors without rows for tokens are compared whole, relative to the `largest` of their
    kind."""
    if not isinstance(expected, torch.Tensor):
        return bool(actual == expected)
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    axis = rule.axis if isinstance(rule, ItemRows) else None
    difference, exact = (
        (tensor.movedim(axis, 0).flatten(1) if axis is not None else tensor.reshape(1, -1)).double()
        for tensor in (actual.detach() - expected.detach(), expected.detach())
    )
    if not exact.numel():
        return True
    is_half = expected.dtype not in _TOLERANCES or torch.is_autocast_enabled(expected.device.type)
    tolerance = _HALF if is_half else _TOLERANCES[expected.dtype]
    norms = exact.norm(dim=1)
    floor = 0.1 * (norms.max() if axis is not None else norms.new_tensor(largest))
    return bool((difference.norm(dim=1) <= tolerance * torch.maximum(norms, floor)).all())
