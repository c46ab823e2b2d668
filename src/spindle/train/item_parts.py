"""Item calls of a microbatch as parts: which items run together, and what each part costs.

The items of one group of item calls (an encoder and its projector) are grouped by length; every part is a copy of the
group's ops with some of the items. Ranks that know the lengths of items compute the same parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from spindle.graph import MetaGraph, MetaOp
from spindle.profile import Curve, ItemTimes, Profile, all_to_all_s
from spindle.run import ItemCode, LayersCode, Lengths, OpCode, SequenceCode
from spindle.workload import LayerCost, items_in_parts

WHOLE_CALLS = 1 << 60  # as the size of parts: all items of a call form one part


@dataclass(frozen=True, slots=True)
class BatchItems:
    """A batch without values, and the rows of its items."""

    nest: Any
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class PartSettings:
    """How item calls are split into parts of about `part_tokens` rows each, or not at all.

    `measured` has, by variant, the batch on which times were measured. `sequence_degrees` limits, by module, how many
    devices may share an item.
    """

    part_tokens: int | None
    measured: Mapping[str, BatchItems]
    sequence_degrees: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_parts(self) -> bool:
        return self.part_tokens is not None


def groups_of_ops(graph: MetaGraph, code: Sequence[OpCode], positions: Sequence[int]) -> list[list[int]]:
    """The ops of item calls at these positions that may run in parts, in groups whose calls read each other, each in
    topological order."""
    groups: list[list[int]] = []
    modules = modules_in_parts(graph, code)
    for position in graph.order:
        if position in positions and graph.metaops[position].module in modules and item_code(code[position]):
            joined = [group for group in groups if not set(graph.predecessors[position]).isdisjoint(group)]
            groups = [group for group in groups if group not in joined]
            groups.append([*(op for group in joined for op in group), position])
    return groups


def modules_in_parts(graph: MetaGraph, code: Sequence[OpCode]) -> set[str]:
    """The modules whose item calls may run in parts, on any rank."""
    return _item_modules(graph, code) - undivided_modules(graph, code).keys()


def undivided_modules(graph: MetaGraph, code: Sequence[OpCode]) -> dict[str, str]:
    """The modules with item calls that run in the pipeline like all others, and why: on several ranks, each would have
    seen some of the calls that change it; and a part cannot wait for the pipeline, as a projector does through which
    embeddings of tokens pass, too."""
    reasons = {
        op.module: "its calls change it (running statistics?)"
        for op, each in zip(graph.metaops, code, strict=True)
        if op.module and (known := item_code(each)) is not None and known.changes_module
    }
    modules = _item_modules(graph, code) - reasons.keys()
    while True:
        waiting = {
            op.module
            for producer, consumer in graph.edges
            if (op := graph.metaops[consumer]).module in modules and graph.metaops[producer].module not in modules
        }
        if not waiting:
            return reasons
        modules -= waiting
        reasons |= {module: "it also reads outputs of modules in the pipeline" for module in waiting if module}


def _item_modules(graph: MetaGraph, code: Sequence[OpCode]) -> set[str]:
    return {op.module for op, each in zip(graph.metaops, code, strict=True) if op.module and item_code(each)}


def item_code(code: OpCode) -> ItemCode | None:
    return code.items if isinstance(code, LayersCode) else None


def parts_of_group(
    group: Sequence[int], code: Sequence[OpCode], batch: BatchItems, part_tokens: int
) -> list[list[int]]:
    """The items of each part of a group. Empty if the batch has no items."""
    first = item_code(code[group[0]])
    assert first is not None
    num_items = first.num_items(batch.nest, batch.lengths)
    if not num_items:
        return []
    if not all(known.can_split for op in group if (known := item_code(code[op])) is not None):
        return [list(range(num_items))]
    return [list(items) for items in items_in_parts(item_lengths(first, batch, num_items), part_tokens)]


def item_lengths(code: ItemCode, batch: BatchItems, num_items: int | None = None) -> tuple[int, ...]:
    """The length of each item, on which its time depends."""
    if code.length_entry is not None:
        return batch.lengths[code.length_entry]
    return (1,) * (code.num_items(batch.nest, batch.lengths) if num_items is None else num_items)


def part_op(
    op: MetaOp,
    number: int,
    items: Sequence[int],
    name: str,
    task: str,
    microbatch: int,
    lengths: Sequence[int],
    whole: int,
) -> MetaOp:
    """The op of one part. `whole` is the total length of the items for which the op's cost was traced."""
    assert op.cost is not None
    share = sum(lengths[item] for item in items) / max(1, whole)
    return replace(
        op,
        name=name,
        task=task,
        call=f"{op.call}.{number}",
        microbatch=microbatch,
        batch_size=1,
        cost=scaled_cost(op.cost, share * (op.batch_size or 1)),
        items=tuple(items),
    )


def part_curve(curve: Curve, times: ItemTimes | None, lengths: Sequence[int], whole: int) -> Curve:
    """The times of a part on one device: the sum over its items if single items were measured, otherwise its share of
    the `whole` length."""
    if times is None:
        return curve.scaled(sum(lengths) / max(1, whole))
    forward_s, backward_s = times.of_part(lengths, (curve.forward_s[0], curve.backward_s[0]))
    return replace(curve, forward_s=(forward_s,), backward_s=(backward_s,))


def shared_curve(
    curve: Curve,
    times: ItemTimes | None,
    length: int,
    sequence: SequenceCode,
    layer: int,
    profile: Profile,
    most_devices: int | None,
) -> Curve:
    """The times of a part with a single item, on one device and on the sequence groups that may share it.

    `curve` has the times on one device. `layer` is the number of the layer in its call.
    """
    most = max(island.num_devices for island in profile.cluster.islands)
    most = most if most_devices is None else min(most, most_devices)
    degrees = [degree for degree in sequence.degrees if degree <= most and sequence.allows(length, degree)]
    forward_s, backward_s = [curve.forward_s[0]], [curve.backward_s[0]]
    for degree in degrees:
        bounds = sequence.bounds(length, degree)
        longest = max(last - first for first, last in pairwise(bounds))
        alone_s = (0.0, 0.0) if times is None else times.at(longest)
        exchange_s, share = 0.0, longest / length
        if layer < sequence.whole_layers:
            share = 1.0
        elif sequence.exchanged_bytes[layer]:
            # Queries, keys and values take one all-to-all, the output another; in backward, their gradients likewise.
            exchange_s = all_to_all_s(sequence.exchanged_bytes[layer] * longest, degree, profile.exchange_link, count=2)
        for pass_s, alone, launch_s in zip((forward_s, backward_s), alone_s, curve.launch_s, strict=True):
            # A shorter slice attends to just as many tokens, and takes no less time than a whole item of the slice's
            # length.
            pass_s.append(max(share * pass_s[0], min(alone, pass_s[0]), launch_s) + exchange_s)
    return replace(curve, num_devices=(1, *degrees), forward_s=tuple(forward_s), backward_s=tuple(backward_s))


def scaled_cost(cost: LayerCost, scale: float) -> LayerCost:
    names = ("forward_flops", "backward_flops", "traffic_bytes", "saved_bytes", "output_bytes")
    return replace(cost, **{name: scale * getattr(cost, name) for name in names})


def times_of(profile: Profile, op: MetaOp) -> ItemTimes | None:
    return next((times for name, times in profile.item_times if name == op.name), None)
