"""The part of a program that one rank runs: its slots with their rows, its ends of links, its instructions by lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spindle.errors import ProgramError
from spindle.graph import MetaGraph
from spindle.program import (
    SYNC,
    TRANSFER,
    Backward,
    Column,
    Exchange,
    Flows,
    Forward,
    Instruction,
    Link,
    Program,
    SlotShape,
    launch_order,
    launches_collectives,
    placement_key,
)
from spindle.run.items import ItemCode
from spindle.run.op_code import LayersCode, LossCode, OpCode
from spindle.run.pytrees import Axes


@dataclass(frozen=True, slots=True)
class Flow:
    """Rows `[first, last)` sent to or received from a peer.

    `with_rowless`: leaves without a batch dimension send their gradient with this flow, which carries the consumer's
    first row, so that it is counted once.
    """

    peer: int
    first: int
    last: int
    with_rowless: bool


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """A link as this rank sees it."""

    number: int
    producer: int
    consumer: int
    source: str  # the call that produces the values
    task: str
    cut: tuple[int, int]  # the op that produces the values, and how many of its layers come before
    axes: Axes
    sends: tuple[tuple[Flow, ...], tuple[Flow, ...]]  # forward, backward
    receives: tuple[tuple[Flow, ...], tuple[Flow, ...]]
    local: tuple[int, int] | None  # rows that this rank produces and consumes
    is_whole: bool  # whether this rank produces and consumes the same rows, so that nothing is sent
    has_new_shapes: bool  # whether the values may have other shapes in every step
    items: tuple[int, ...] = ()  # the items of the part that produces; each of its ranks sends all of its output
    item_code: ItemCode | None = None
    num_slices: int = 1  # the slices of the item, if a sequence group produces; rows then count slices


@dataclass(frozen=True, slots=True)
class RankSlot:
    """A slot as this rank sees it: its rows of the batch, its links, its chunks of layers in forward order."""

    number: int
    task: str
    call: str
    name: str
    code: OpCode
    first_layer: int  # the number of the op's first layer in its call
    begins_call: bool
    begin: int
    end: int
    num_rows: int
    ranks: tuple[int, ...]
    group: tuple[int, ...]  # this rank's tensor-parallel group; itself alone at degree 1
    inputs: tuple[LinkEnd, ...]
    outputs: tuple[LinkEnd, ...]
    chunks: tuple[tuple[int, int], ...]
    is_split: bool  # whether its backward is split into input and weight gradients
    recomputed: int  # how many of its first layers are recomputed
    offloaded: int  # how many of the layers after those are offloaded
    lane: int = 0
    weight_lane: int = 0  # the lane of its weight gradients: its own, unless the plan gives another
    items: tuple[int, ...] = ()  # the items of a part
    sequence_group: tuple[int, ...] = ()  # ranks that share its item, in the order of slices; empty if it is not shared

    @property
    def first(self) -> int:
        return self.chunks[0][0]

    @property
    def rows(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """Everything that one rank does.

    Lanes hold instruction numbers in order. `launches` has the rank's communication in the launch order common to all
    ranks, together with those instructions of the compute lane that launch collectives themselves.
    """

    links: dict[int, LinkEnd]  # by number
    slots: dict[int, RankSlot]  # by number
    compute: tuple[int, ...]
    transfer: tuple[int, ...]
    sync: tuple[int, ...]
    launches: tuple[int, ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        """Tasks whose batch this rank needs."""
        return frozenset((*(task for task, _, _, _ in self.uses), *self.items_used))

    @property
    def uses(self) -> list[tuple[str, Callable[..., Any], int, int]]:
        """The code that reads batches, with its task, function and rows; without parts."""
        uses = []
        for slot in self.slots.values():
            if slot.items:
                continue
            code = slot.code.loss if isinstance(slot.code, LossCode) else slot.code.arguments
            if code is not None and (slot.begins_call or isinstance(slot.code, LossCode)):
                uses.append((slot.task, code, slot.begin, slot.end))
        return uses

    @property
    def items_used(self) -> dict[str, tuple[int, ...]]:
        """The items that parts on this rank read, by task."""
        items: dict[str, set[int]] = {}
        for slot in self.slots.values():
            if (
                slot.items
                and slot.begins_call
                and isinstance(slot.code, LayersCode)
                and slot.code.arguments is not None
            ):
                items.setdefault(slot.task, set()).update(slot.items)
        return {task: tuple(sorted(numbers)) for task, numbers in items.items()}

    def launches_before(self, instructions: Sequence[Instruction]) -> dict[int, int]:
        """For each instruction of the compute lane: how many operations of the common launch order precede it. They
        end with the exchanges that it waits for, or with its own position if it launches collectives itself."""
        index = {position: number for number, position in enumerate(self.launches)}
        exchanges = {
            (instruction.link, instruction.backward): index[position]
            for position, instruction in enumerate(instructions)
            if isinstance(instruction, Exchange) and position in index
        }
        before = {}
        # Everything up to the exchange that an instruction waits for must be launched before it, in the common order.
        # Later operations can overlap with compute.
        for position in self.compute if index else ():
            ends = [index.get(position, 0)]
            match instructions[position]:
                case Forward(slot=slot):
                    ends += [exchanges.get((link.number, False), -1) + 1 for link in self.slots[slot].inputs]
                case Backward(slot=slot):
                    ends += [exchanges.get((link.number, True), -1) + 1 for link in self.slots[slot].outputs]
                case _:
                    ends.append(len(index))
            before[position] = max(ends)
        return before

    def describe(self, instruction: Instruction) -> str:
        """What an instruction does, for errors."""
        match instruction:
            case Forward(slot=slot) | Backward(slot=slot):
                what = "forward" if isinstance(instruction, Forward) else "backward"
                return f"{what} of {self.slots[slot].name}"
            case _:
                return type(instruction).__name__


def rank_program_of(
    program: Program, graph: MetaGraph, code: Sequence[OpCode], rank: int, *, in_order: bool = False
) -> RankProgram:
    """The part of a program that a rank runs. `code` is by op. With `in_order`, it has the common launch order."""
    placements: dict[tuple[int, ...], Rows] = {}  # most slots have the same rows on the same ranks as others
    for shape in program.slots:
        if placement_key(shape) not in placements:
            placements[placement_key(shape)] = _rows_of(shape)
    rows = [placements[placement_key(shape)] for shape in program.slots]
    cache: dict[tuple[object, ...], _Ends] = {}
    links = {
        number: _link_end(program, graph, code, rank, number, rows[link.producer], rows[link.consumer], cache)
        for number, link in enumerate(program.links)
        if rank in rows[link.producer] or rank in rows[link.consumer]
    }
    compute = tuple(program.compute_of_rank(rank))
    transfer, sync = (tuple(program.lanes[lane].of_rank(rank).tolist()) for lane in (TRANSFER, SYNC))
    slots = _slots(program, graph, code, rank, links, rows)
    launches: tuple[int, ...] = ()
    if in_order:
        # Compute instructions that launch collectives take part in the common order: a tensor-parallel all-reduce that
        # one rank launches before a transfer, and its peer after it, can deadlock under NCCL.
        order_of = launch_order(program)
        # The host launches compute in that order, too. With several lanes, the plan's order may be a different one that
        # also respects the order of each lane.
        compute = tuple(sorted(compute, key=lambda number: int(order_of[number])))
        within = [number for number in compute if launches_collectives(program, program.instructions[number])]
        launches = tuple(sorted((*transfer, *sync, *within), key=lambda number: int(order_of[number])))
    return RankProgram(links=links, slots=slots, compute=compute, transfer=transfer, sync=sync, launches=launches)


Rows = dict[int, tuple[int, int]]  # by rank


@dataclass(frozen=True, slots=True)
class _Ends:
    """Messages and rows of a link end: the same for all links between equal placements."""

    sends: tuple[tuple[Flow, ...], tuple[Flow, ...]]
    receives: tuple[tuple[Flow, ...], tuple[Flow, ...]]
    local: tuple[int, int] | None
    is_whole: bool


def _link_end(
    program: Program,
    graph: MetaGraph,
    code: Sequence[OpCode],
    rank: int,
    number: int,
    produced: Rows,
    consumed: Rows,
    cache: dict[tuple[object, ...], _Ends],
) -> LinkEnd:
    link = program.links[number]
    producer = program.slots[link.producer]
    layers = code[producer.op]
    assert isinstance(layers, LayersCode)
    last = program.plan.slots[link.producer].last
    op, num_slices = graph.metaops[producer.op], producer.sequence_degree
    axes = layers.layers[last - 1].axes
    is_inside = bool(graph.metaops[program.slots[link.consumer].op].items)  # of a part
    if op.items and num_slices > 1:
        if layers.items is None or (consumed.keys() != produced.keys() if is_inside else len(consumed) > 1):
            raise ProgramError(
                f"{op.name} is shared by the sequence group {sorted(produced)} and feeds ranks {sorted(consumed)}, "
                "expected the same ranks inside its part, and one rank behind it"
            )
        if not is_inside:
            axes = tuple(None if rows is None else rows.axis for rows in layers.items.rows)
    key = (id(link.forward), id(link.backward), id(produced), id(consumed), bool(op.items), is_inside, num_slices)
    if key not in cache:
        cache[key] = _ends(link, rank, produced, consumed, num_slices if op.items else None, is_inside)
    ends = cache[key]
    return LinkEnd(
        number=number,
        producer=link.producer,
        consumer=link.consumer,
        source=graph.source_name(producer.op, program.slots[link.consumer].op),
        task=op.task,
        cut=(producer.op, last),
        axes=axes,
        sends=ends.sends,
        receives=ends.receives,
        local=ends.local,
        is_whole=ends.is_whole,
        has_new_shapes=layers.reads_values,
        items=op.items,
        item_code=layers.items,
        num_slices=num_slices,
    )


def _ends(link: Link, rank: int, produced: Rows, consumed: Rows, num_slices: int | None, is_inside: bool) -> _Ends:
    """A rank's messages and rows on a link. `num_slices` is set if the producer is a part: the slices of its item.
    `is_inside` says whether the consumer belongs to the same part."""
    directions = ((link.forward, False), (link.backward, True))
    if num_slices is not None:
        # Parts and the slots that they feed count rows of different things. Each rank of a part sends all it has, one
        # slice. A slot after the part receives all slices; a layer of the same part continues with the same slice.
        consumed = {rank: produced.get(rank, (0, 1)) if is_inside else (0, num_slices) for rank in consumed}
        directions = (
            (_flows_of_slices(link.forward, link.forward.source, produced), False),
            (_flows_of_slices(link.backward, link.backward.destination, produced), True),
        )
    produced_rows, consumed_rows = produced.get(rank), consumed.get(rank)
    local = None
    # Rows that a rank both produces and consumes are handed over in memory. A rank without rows (if there are more
    # devices than rows) has no part in the link.
    if produced_rows and consumed_rows:
        first, last = max(produced_rows[0], consumed_rows[0]), min(produced_rows[1], consumed_rows[1])
        local = (first, last) if first < last else None
    forward_sends, backward_sends = (_flows(flows, back, consumed, rank, sends=True) for flows, back in directions)
    forward_receives, backward_receives = (
        _flows(flows, back, consumed, rank, sends=False) for flows, back in directions
    )
    messages = (*forward_sends, *forward_receives, *backward_sends, *backward_receives)
    return _Ends(
        sends=(forward_sends, backward_sends),
        receives=(forward_receives, backward_receives),
        local=local,
        is_whole=produced_rows == consumed_rows == local and not messages,
    )


def _flows_of_slices(flows: Flows, ranks: Column, slices: Rows) -> Flows:
    """The same messages, each carrying the slice that one of `ranks` produces; all of a part's output if it is not
    shared."""
    first = np.array([slices[rank][0] for rank in ranks.tolist()], dtype=np.int64)
    return replace(flows, first=first, last=first + 1)


def _flows(flows: Flows, backward: bool, consumed: Rows, rank: int, sends: bool) -> tuple[Flow, ...]:
    """The flows of a link in one direction that a rank sends or receives."""
    own, peers = (flows.source, flows.destination) if sends else (flows.destination, flows.source)
    consumers = flows.source if backward else flows.destination
    return tuple(
        Flow(peer, first, last, first == consumed[consumer][0])
        for owner, peer, consumer, first, last in zip(
            *(column.tolist() for column in (own, peers, consumers, flows.first, flows.last)), strict=True
        )
        if owner == rank
    )


def _slots(
    program: Program,
    graph: MetaGraph,
    code: Sequence[OpCode],
    rank: int,
    links: Mapping[int, LinkEnd],
    rows_of: Sequence[Rows],
) -> dict[int, RankSlot]:
    chunks: dict[int, list[tuple[int, int]]] = {}
    split: set[int] = set()
    for instruction in program.instructions:
        if isinstance(instruction, Backward):
            # Backward instructions are listed last layers first, so each is inserted before those that came earlier. Of
            # a split backward only the input part counts: both parts cover the same layers.
            if instruction.makes_inputs:
                chunks.setdefault(instruction.slot, []).insert(0, (instruction.first, instruction.last))
            else:
                split.add(instruction.slot)
    inputs: dict[int, list[LinkEnd]] = {}
    outputs: dict[int, list[LinkEnd]] = {}
    for link in links.values():
        inputs.setdefault(link.consumer, []).append(link)
        outputs.setdefault(link.producer, []).append(link)
    slots = {}
    recompute = frozenset(program.plan.recompute)
    for number, (shape, planned) in enumerate(zip(program.slots, program.plan.slots, strict=True)):
        rows = rows_of[number].get(rank)
        if rows is None:
            continue
        op = graph.metaops[shape.op]
        slots[number] = RankSlot(
            number=number,
            task=op.task,
            call=op.call or "",
            name=f"{op.task}/{op.call}[{op.first_layer + planned.first}:{op.first_layer + planned.last}]",
            code=code[shape.op],
            first_layer=op.first_layer,
            begins_call=planned.first == 0,
            begin=rows[0],
            end=rows[1],
            num_rows=shape.num_rows,
            ranks=tuple(shape.ranks.tolist()),
            group=_tensor_group(shape, rank),
            inputs=tuple(inputs.get(number, ())),
            outputs=tuple(outputs.get(number, ())),
            chunks=tuple(chunks[number]),
            is_split=number in split,
            recomputed=planned.num_layers if op.name in recompute else planned.recomputed,
            offloaded=0 if op.name in recompute else planned.offloaded,
            lane=planned.lane,
            weight_lane=planned.lane_of_weights,
            items=op.items,
            sequence_group=_sequence_group(shape, rank, code[shape.op], op.name),
        )
    return slots


def _rows_of(shape: SlotShape) -> Rows:
    """The rows of a slot by rank. Members of a tensor-parallel group have the same rows."""
    bounds: list[int] = shape.bounds.tolist()
    return {
        rank: (bounds[place], bounds[place + 1]) for place, group in enumerate(tensor_groups(shape)) for rank in group
    }


def tensor_groups(shape: SlotShape) -> list[tuple[int, ...]]:
    """The tensor-parallel groups of a slot, in the order of its rows. Single ranks at degree one."""
    ranks, degree = shape.ranks.tolist(), shape.tensor_degree
    return [tuple(ranks[start : start + degree]) for start in range(0, len(ranks), degree)]


def _tensor_group(shape: SlotShape, rank: int) -> tuple[int, ...]:
    """The tensor-parallel group of a rank in a slot."""
    ranks: list[int] = shape.ranks.tolist()
    first = ranks.index(rank) // shape.tensor_degree * shape.tensor_degree
    return tuple(ranks[first : first + shape.tensor_degree])


def sequence_groups(shape: SlotShape) -> list[tuple[int, ...]]:
    """The sequence groups of a slot, in the order of its rows. Empty at degree one."""
    ranks, size = shape.ranks.tolist(), shape.group_size
    if shape.sequence_degree == 1:
        return []
    return [tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def _sequence_group(shape: SlotShape, rank: int, code: OpCode, name: str) -> tuple[int, ...]:
    """The sequence group of a rank in a slot; empty at degree one. Refuses a degree that its module does not allow."""
    group = next((group for group in sequence_groups(shape) if rank in group), ())
    if group:
        sequence = code.items.sequence if isinstance(code, LayersCode) and code.items is not None else None
        if sequence is None or shape.sequence_degree not in sequence.degrees or shape.tensor_degree > 1:
            allowed = ", ".join(map(str, sequence.degrees)) if sequence is not None else "none"
            raise ProgramError(
                f"{name} is on a sequence group of {len(group)} ranks, where sequence degrees that its module allows "
                f"are: {allowed}"
            )
    return group


def held_parameters(program: Program, graph: MetaGraph, rank: int) -> frozenset[int]:
    """Positions of the parameters that a rank holds: those that its slots use, and those that it keeps from step to
    step."""
    held = {number for number, ranks in program.owning_ranks if rank in ranks}
    for shape, slot in zip(program.slots, program.plan.slots, strict=True):
        if rank in shape.ranks.tolist():
            for layer in graph.metaops[shape.op].parameters[slot.first : slot.last]:
                held.update(layer)
    return frozenset(held)
