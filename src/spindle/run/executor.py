"""The second interpreter of a Program: runs one rank's instructions on `torch.distributed`.

Transfers are posted as soon as their data is there and waited for when it is needed; synchronisation runs behind the
backward that is still going on. The order of each lane is the program's, so what `verify` proved holds here.

What crosses a link is a nest of tensors. Its form (shapes, types, which leaves carry a gradient) goes ahead of it the
first time a task's batch has a new shape; from then on both sides know it, and only the values move. Rows of a link are
rows of the batch, because both ends of a task's flow have the same one.

Left out so far: tensor degrees above one, lanes with quotas.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from spindle.errors import ProgramError, TrainingError
from spindle.graph import MetaGraph
from spindle.program import Backward, Exchange, Forward, OptimizerStep, Program, SlotShape, SyncGradients
from spindle.program.instructions import COMPUTE, SYNC, TRANSFER
from spindle.run.code import LayerCode, LayersCode, LossCode, OpCode
from spindle.run.rows import (
    Axes,
    Form,
    LeafForm,
    cut,
    cut_leaf,
    form_from_bytes,
    form_of,
    form_to_bytes,
    joined,
    shape_for,
)
from spindle.run.world import World, lost, peers

_MAX_LEAVES = 1000  # of what crosses a link; tags of messages count through them
_MAX_SEEN = 10_000  # shapes of batches remembered
_LENGTH, _FORM, _VALUES = 0, 1, 2  # tags inside a flow: two for the form, then one for each leaf


@dataclass(frozen=True, slots=True)
class _Flow:
    """Rows `[first, last)` to or from a peer. The gradient of what has no rows goes with a consumer's first row, so
    that it is counted once."""

    peer: int
    first: int
    last: int
    with_rowless: bool


@dataclass(frozen=True, slots=True)
class _LinkEnd:
    """A link as this rank sees it."""

    number: int
    producer: int
    consumer: int
    source: str  # the call that produces
    task: str
    axes: Axes
    sends: tuple[tuple[_Flow, ...], tuple[_Flow, ...]]  # forward, backward
    receives: tuple[tuple[_Flow, ...], tuple[_Flow, ...]]
    local: tuple[int, int] | None  # rows that this rank has on both sides


@dataclass(frozen=True, slots=True)
class _Slot:
    """A slot as this rank sees it: its rows of the batch, its links, its chunks of layers in forward order."""

    number: int
    task: str
    call: str
    name: str
    code: OpCode
    first_layer: int  # of the op, in its call
    begins_call: bool
    begin: int
    end: int
    num_rows: int
    ranks: tuple[int, ...]
    inputs: tuple[_LinkEnd, ...]
    outputs: tuple[_LinkEnd, ...]
    chunks: tuple[tuple[int, int], ...]
    recompute: bool

    @property
    def rows(self) -> int:
        return self.end - self.begin


@dataclass(slots=True)
class _Piece:
    """A chunk of layers as it ran: the leaves it began with and what it gave."""

    inputs: Any
    outputs: Any


@dataclass(slots=True)
class _Arrival:
    """What comes over one flow: the leaves' buffers, or nothing yet while their form is still to come."""

    flow: _Flow
    tensors: list[torch.Tensor | None] | None
    requests: list[Any]


@dataclass(slots=True)
class _StepState:
    """What one step holds on one rank."""

    number: int
    batches: Mapping[str, Any]
    signatures: Mapping[str, int]
    check_losses: bool
    new: frozenset[str]  # tasks whose batch has a shape not seen before
    pieces: dict[int, list[_Piece]] = field(default_factory=dict)  # by slot, in forward order
    inputs: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)  # by link: leaves that take gradients
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    arrivals: dict[tuple[int, bool], list[_Arrival]] = field(default_factory=dict)
    sending: list[tuple[Any, torch.Tensor]] = field(default_factory=list)  # buffers must live until they are sent
    forwarded: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)  # slots whose backward is over
    done_chunks: set[int] = field(default_factory=set)
    syncs: list[tuple[int, Any, torch.Tensor, list[nn.Parameter]]] = field(default_factory=list)
    next_transfer: int = 0
    next_sync: int = 0


@dataclass(slots=True)
class Spans:
    """When this rank's instructions ran, in nanoseconds of its clock: posted, start, end by instruction number."""

    begin: int
    posted: dict[int, int] = field(default_factory=dict)
    start: dict[int, int] = field(default_factory=dict)
    end: dict[int, int] = field(default_factory=dict)


class Executor:
    """Runs steps of one program on one rank.

    `parameters` are in the graph's order, this process's own tensors; `reached` are the positions of those that any
    gradient reaches at all. `batch_axes` has the row axes of each task's batch.
    """

    def __init__(
        self,
        program: Program,
        graph: MetaGraph,
        code: Sequence[OpCode],
        parameters: Sequence[nn.Parameter],
        batch_axes: Mapping[str, Axes],
        world: World,
        *,
        reached: frozenset[int] | None = None,
        seed: int = 0,
    ) -> None:
        self.program, self.graph, self.world, self.batch_axes, self.seed = program, graph, world, batch_axes, seed
        if any(shape.tensor_degree > 1 for shape in program.slots):
            raise ProgramError("this plan splits layers over tensor groups, which the runtime does not do yet")
        self._links = [self._link_end(number, code) for number in range(len(program.links))]
        self._numbers = {lane: program.lanes[lane].of_rank(world.rank).tolist() for lane in (COMPUTE, TRANSFER, SYNC)}
        self._slots = self._slots_of_rank(code)
        self.held = held_parameters(program, graph, world.rank)
        trainable = {number for number in self.held if graph.parameters[number].trainable}
        self._trained = [parameters[number] for number in sorted(trainable)]
        mine = set(self._numbers[COMPUTE])
        self._buckets = [
            (
                frozenset(bucket.after) & mine,
                [parameters[number] for number in bucket.parameters if number in self.held],
                tuple(bucket.ranks.tolist()),
            )
            for bucket in program.buckets
        ]
        self._unreached = [] if reached is None else [parameters[number] for number in sorted(trainable - reached)]
        # Forms by link and signature of the task's batch, as received and as sent. All ranks have seen the same.
        self._forms: dict[tuple[int, int], Form] = {}
        self._sent: dict[tuple[int, int], Form] = {}
        self._seen: set[tuple[str, int]] = set()
        self._exchanges = {
            (one.link, one.backward): position
            for position, one in enumerate(program.instructions)
            if isinstance(one, Exchange)
        }
        if world.size > 1:
            for bucket in program.buckets:
                world.group("sync", tuple(bucket.ranks.tolist()))
            for shape in program.slots:
                if isinstance(code[shape.op], LossCode) and len(shape.ranks) > 1:
                    world.group("loss", tuple(shape.ranks.tolist()))

    # What the program says, from this rank's side.

    def _link_end(self, number: int, code: Sequence[OpCode]) -> _LinkEnd:
        program, rank = self.program, self.world.rank
        link = program.links[number]
        producer, consumer = program.slots[link.producer], program.slots[link.consumer]
        made = code[producer.op]
        assert isinstance(made, LayersCode)
        sends, receives = [], []
        for backward, flows in ((False, link.forward), (True, link.backward)):
            rows = list(
                zip(*(one.tolist() for one in (flows.source, flows.destination, flows.first, flows.last)), strict=True)
            )
            begins = {
                taker: int(consumer.bounds[place])
                for place, taker in enumerate(consumer.ranks.tolist())
                if consumer.bounds[place] < consumer.bounds[place + 1]
            }

            def flow(peer: int, first: int, last: int, taker: int, begins: dict[int, int] = begins) -> _Flow:
                return _Flow(peer, first, last, first == begins[taker])

            sends.append(
                tuple(
                    flow(to, first, last, source if backward else to)
                    for source, to, first, last in rows
                    if source == rank
                )
            )
            receives.append(
                tuple(
                    flow(source, first, last, source if backward else to)
                    for source, to, first, last in rows
                    if to == rank
                )
            )
        had, wanted = _rows_on(producer, rank), _rows_on(consumer, rank)
        local = None
        if had and wanted and max(had[0], wanted[0]) < min(had[1], wanted[1]):
            local = (max(had[0], wanted[0]), min(had[1], wanted[1]))
        return _LinkEnd(
            number=number,
            producer=link.producer,
            consumer=link.consumer,
            source=self.graph.metaops[producer.op].call or "",
            task=self.graph.metaops[producer.op].task,
            axes=made.layers[program.plan.slots[link.producer].last - 1].axes,
            sends=(sends[0], sends[1]),
            receives=(receives[0], receives[1]),
            local=local,
        )

    def _slots_of_rank(self, code: Sequence[OpCode]) -> dict[int, _Slot]:
        chunks: dict[int, list[tuple[int, int]]] = {}
        for instruction in self.program.instructions:
            if isinstance(instruction, Backward):
                chunks.setdefault(instruction.slot, []).insert(0, (instruction.first, instruction.last))
        slots = {}
        for number, (shape, planned) in enumerate(zip(self.program.slots, self.program.plan.slots, strict=True)):
            rows = _rows_on(shape, self.world.rank)
            if rows is None:
                continue
            op = self.graph.metaops[shape.op]
            slots[number] = _Slot(
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
                inputs=tuple(link for link in self._links if link.consumer == number),
                outputs=tuple(link for link in self._links if link.producer == number),
                chunks=tuple(chunks[number]),
                recompute=op.name in self.program.plan.recompute,
            )
        return slots

    def reads(self) -> frozenset[str]:
        """Tasks whose batch this rank needs."""
        return frozenset(
            slot.task
            for slot in self._slots.values()
            if isinstance(slot.code, LossCode) or (slot.begins_call and slot.code.arguments is not None)
        )

    # One step.

    def step(
        self,
        number: int,
        batches: Mapping[str, Any],
        signatures: Mapping[str, int],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        check_losses: bool = False,
    ) -> tuple[torch.Tensor, Spans]:
        """Runs a step on its batches (whole ones; each slot takes its rows) and the signatures of all tasks' batches.

        Returns this rank's parts of the tasks' losses, which add up over ranks, and when everything ran.
        """
        clock = time.perf_counter_ns
        new = frozenset(task for task, signature in signatures.items() if (task, signature) not in self._seen)
        state = _StepState(number=number, batches=batches, signatures=signatures, check_losses=check_losses, new=new)
        spans = Spans(clock())
        for parameter in self._trained:
            parameter.grad = None
        self._advance(state, spans)
        for position in self._numbers[COMPUTE]:
            instruction = self.program.instructions[position]
            spans.posted[position] = clock()
            try:
                match instruction:
                    case Forward(slot=slot):
                        self._forward(state, self._slots[slot], spans, position)
                        state.forwarded.add(slot)
                    case Backward(slot=slot, first=first, last=last):
                        self._backward(state, self._slots[slot], first, last, spans, position)
                        state.done_chunks.add(position)
                        if first == self.program.plan.slots[slot].first:
                            state.returned.add(slot)
                    case OptimizerStep():
                        self._finish_syncs(state, spans)
                        spans.start[position] = clock()
                        if optimizer is not None:
                            optimizer.step()
                    case Exchange() | SyncGradients():
                        raise AssertionError("these stand on other lanes")
            except Exception as error:
                error.add_note(f"in step {number} on rank {self.world.rank}, {self._describe(instruction)}")
                raise
            spans.end[position] = clock()
            self._advance(state, spans)
        self._finish_syncs(state, spans)
        for request, _ in state.sending:
            _wait(request)
        self._remember(signatures)
        return self._losses(state), spans

    def _remember(self, signatures: Mapping[str, int]) -> None:
        self._seen.update(signatures.items())
        if len(self._seen) > _MAX_SEEN:  # on all ranks at once
            for known in (self._seen, self._forms, self._sent):
                known.clear()

    def _describe(self, instruction: Forward | Backward | OptimizerStep | Exchange | SyncGradients) -> str:
        match instruction:
            case Forward(slot=slot) | Backward(slot=slot):
                what = "forward" if isinstance(instruction, Forward) else "backward"
                return f"{what} of {self._slots[slot].name}"
            case _:
                return type(instruction).__name__

    # Transfers and synchronisation, posted in the order of their lanes.

    def _advance(self, state: _StepState, spans: Spans) -> None:
        transfers = self._numbers[TRANSFER]
        while state.next_transfer < len(transfers):
            position = transfers[state.next_transfer]
            instruction = self.program.instructions[position]
            assert isinstance(instruction, Exchange)
            if not self._post(state, self._links[instruction.link], instruction.backward):
                break
            spans.posted[position] = time.perf_counter_ns()
            state.next_transfer += 1
        syncs = self._numbers[SYNC]
        while state.next_sync < len(syncs):
            position = syncs[state.next_sync]
            instruction = self.program.instructions[position]
            assert isinstance(instruction, SyncGradients)
            if not self._buckets[instruction.bucket][0] <= state.done_chunks:
                break
            spans.posted[position] = time.perf_counter_ns()
            self._post_sync(state, instruction.bucket, position)
            state.next_sync += 1

    def _post(self, state: _StepState, link: _LinkEnd, backward: bool) -> bool:
        """Posts an exchange, or says that what it sends is not there yet."""
        if link.sends[backward]:
            made = state.returned if backward else state.forwarded
            if (link.consumer if backward else link.producer) not in made:
                return False
        for flow in link.sends[backward]:
            if backward:
                self._send_gradients(state, link, flow)
            else:
                self._send_values(state, link, flow)
        if link.receives[backward]:
            arriving = self._expect_gradients if backward else self._expect_values
            state.arrivals[link.number, backward] = [arriving(state, link, flow) for flow in link.receives[backward]]
        return True

    def _send_values(self, state: _StepState, link: _LinkEnd, flow: _Flow) -> None:
        producer = self._slots[link.producer]
        nest = state.outputs[link.producer]
        form = form_of(nest, producer.rows)
        if link.task in state.new:
            if len(form.leaves) > _MAX_LEAVES:
                raise TrainingError(f"{producer.name} hands on {len(form.leaves)} tensors, more than {_MAX_LEAVES}")
            text = torch.frombuffer(bytearray(form_to_bytes(form)), dtype=torch.uint8)
            self._send(state, torch.tensor([text.numel()]), flow.peer, link, False, _LENGTH)
            self._send(state, text, flow.peer, link, False, _FORM)
        known = self._sent.setdefault((link.number, state.signatures[link.task]), form)
        if known != form:
            raise TrainingError(
                f"{producer.name} gives {_shapes(form)} where it gave {_shapes(known)} for a batch of the same shape; "
                "what crosses from rank to rank must have shapes that follow from the batch's"
            )
        for number, (leaf, axis) in enumerate(zip(tree_leaves(nest), link.axes, strict=True)):
            if isinstance(leaf, torch.Tensor):
                part = cut_leaf(
                    leaf.detach(), axis, producer.rows, flow.first - producer.begin, flow.last - producer.begin
                )
                self._send(state, part, flow.peer, link, False, _VALUES + number)

    def _send_gradients(self, state: _StepState, link: _LinkEnd, flow: _Flow) -> None:
        consumer = self._slots[link.consumer]
        for number, (leaf, axis) in enumerate(zip(state.inputs[link.number], link.axes, strict=True)):
            if leaf is not None and (axis is not None or flow.with_rowless):
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                part = cut_leaf(gradient, axis, consumer.rows, flow.first - consumer.begin, flow.last - consumer.begin)
                self._send(state, part, flow.peer, link, True, _VALUES + number)

    def _expect_values(self, state: _StepState, link: _LinkEnd, flow: _Flow) -> _Arrival:
        if link.task in state.new:
            return _Arrival(flow, None, [])
        arrival = _Arrival(flow, [], [])
        self._receive_leaves(arrival, link, self._forms[link.number, state.signatures[link.task]])
        return arrival

    def _receive_leaves(self, arrival: _Arrival, link: _LinkEnd, form: Form) -> None:
        flow = arrival.flow
        arrival.tensors = []
        for number, (leaf, axis) in enumerate(zip(form.leaves, link.axes, strict=True)):
            buffer = None
            if isinstance(leaf, LeafForm):
                shape = shape_for(leaf, axis, form.num_rows, flow.last - flow.first)
                buffer = torch.empty(shape, dtype=leaf.dtype, device=self.world.device)
                self._receive(arrival.requests, buffer, flow.peer, link, False, _VALUES + number)
            arrival.tensors.append(buffer)

    def _expect_gradients(self, state: _StepState, link: _LinkEnd, flow: _Flow) -> _Arrival:
        producer = self._slots[link.producer]
        arrival = _Arrival(flow, [], [])
        assert arrival.tensors is not None
        for number, (leaf, axis) in enumerate(zip(tree_leaves(state.outputs[link.producer]), link.axes, strict=True)):
            buffer = None
            if _takes_gradient(leaf) and (axis is not None or flow.with_rowless):
                like = cut_leaf(leaf, axis, producer.rows, flow.first - producer.begin, flow.last - producer.begin)
                buffer = torch.empty(like.shape, dtype=leaf.dtype, device=leaf.device)
                self._receive(arrival.requests, buffer, flow.peer, link, True, _VALUES + number)
            arrival.tensors.append(buffer)
        return arrival

    def _tag(self, link: _LinkEnd, backward: bool, part: int) -> int:
        return (link.number * 2 + backward) * (_MAX_LEAVES + _VALUES) + part

    def _send(
        self, state: _StepState, tensor: torch.Tensor, peer: int, link: _LinkEnd, backward: bool, part: int
    ) -> None:
        if tensor.numel():
            kept = tensor.contiguous()
            with peers("sending"):
                state.sending.append((dist.isend(kept, peer, tag=self._tag(link, backward, part)), kept))

    def _receive(
        self, requests: list[Any], buffer: torch.Tensor, peer: int, link: _LinkEnd, backward: bool, part: int
    ) -> None:
        if buffer.numel():
            with peers("receiving"):
                requests.append(dist.irecv(buffer, peer, tag=self._tag(link, backward, part)))

    def _arrived(self, state: _StepState, link: _LinkEnd, backward: bool, spans: Spans) -> list[_Arrival]:
        """What came over a link, waited for."""
        arrivals = state.arrivals.get((link.number, backward), [])
        # `verify` has shown that nothing before it on its lane can still be waiting.
        assert arrivals or not link.receives[backward]
        for arrival in arrivals:
            if arrival.tensors is None:
                key = (link.number, state.signatures[link.task])
                form = self._forms[key] = self._receive_form(link, arrival.flow.peer)
                self._receive_leaves(arrival, link, form)
            for request in arrival.requests:
                _wait(request)
        if arrivals:
            spans.end[self._exchanges[link.number, backward]] = time.perf_counter_ns()
        return arrivals

    def _receive_form(self, link: _LinkEnd, peer: int) -> Form:
        requests: list[Any] = []
        length = torch.zeros(1, dtype=torch.int64)
        self._receive(requests, length, peer, link, False, _LENGTH)
        _wait(requests.pop())
        text = torch.empty(int(length), dtype=torch.uint8)
        self._receive(requests, text, peer, link, False, _FORM)
        _wait(requests.pop())
        return form_from_bytes(text.numpy().tobytes())

    def _post_sync(self, state: _StepState, bucket: int, position: int) -> None:
        _, parameters, ranks = self._buckets[bucket]
        if not parameters:
            return
        gradients = [_gradient(parameter).reshape(-1) for parameter in parameters]
        # Behind them, whether there are any: where no rank has a gradient, one process would have none either.
        there = [parameter.grad is not None for parameter in parameters]
        flat = torch.cat([*gradients, torch.tensor(there, dtype=gradients[0].dtype, device=gradients[0].device)])
        with peers("synchronising gradients"):
            request = dist.all_reduce(flat, group=self.world.group("sync", ranks), async_op=True)
        state.syncs.append((position, request, flat, parameters))

    def _finish_syncs(self, state: _StepState, spans: Spans) -> None:
        for position, request, flat, parameters in state.syncs:
            _wait(request)
            spans.end[position] = time.perf_counter_ns()
            sizes = [parameter.numel() for parameter in parameters]
            *parts, there = torch.split(flat, [*sizes, len(sizes)])
            for parameter, part, holders in zip(parameters, parts, there.tolist(), strict=True):
                parameter.grad = part.view_as(parameter).to(parameter.dtype) if holders else None
        state.syncs.clear()
        for parameter in self._unreached:
            # Zeros from another rank are no gradient: one process would have none.
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None

    # Compute.

    def _forward(self, state: _StepState, slot: _Slot, spans: Spans, position: int) -> None:
        nests = {link.source: self._input(state, link, spans) for link in slot.inputs} if slot.rows else {}
        spans.start[position] = time.perf_counter_ns()
        match slot.code:
            case LossCode() as code:
                state.losses[slot.number] = self._loss(state, slot, code, nests)
            case LayersCode() as code:
                if slot.rows:
                    self._run_layers(state, slot, code, nests)

    def _run_layers(self, state: _StepState, slot: _Slot, code: LayersCode, nests: dict[str, Any]) -> None:
        pieces = state.pieces[slot.number] = []
        values: Any = None
        for first, last in slot.chunks:
            layers = code.layers[first:last]
            inputs: Any = ()
            if values is not None:
                inputs = values = _as_leaves(values)
            elif not (slot.begins_call and code.arguments is not None):
                (values,) = nests.values()
            for number, layer in enumerate(layers, start=first):
                if layer.is_random:
                    self._seed(state, slot, slot.first_layer + number)
                run, args = layer.run, values
                if values is None:
                    # The glue that feeds a call is part of its first layer.
                    run = _behind(code.arguments, layer.run)
                    args = (self._batch(state, slot), *(nests[source][0] for source in code.sources))
                if layer.writes_input and (number == first or slot.recompute):
                    run = _on_copies(run)
                values = _recomputed(layer, run, args) if slot.recompute else run(*args)
            pieces.append(_Piece(inputs=inputs, outputs=values))
        state.outputs[slot.number] = values

    def _seed(self, state: _StepState, slot: _Slot, layer: int) -> None:
        """Random layers draw the same numbers whenever the same rows of the same step pass through them."""
        torch.manual_seed(seed_of(self.seed, state.number, slot.task, slot.call, layer, slot.begin, slot.end))

    def _batch(self, state: _StepState, slot: _Slot) -> Any:
        return cut(state.batches[slot.task], self.batch_axes[slot.task], slot.num_rows, slot.begin, slot.end)

    def _input(self, state: _StepState, link: _LinkEnd, spans: Spans) -> Any:
        """A slot's input over one link: rows that are here and rows that came, joined, as leaves of a new graph."""
        slot = self._slots[link.consumer]
        arrivals = self._arrived(state, link, False, spans)
        if link.local is None:
            form = self._forms[link.number, state.signatures[link.task]]
            here: list[Any] = [None] * len(form.leaves)
            kept: list[Any] = list(form.leaves)
            spec, maker_rows = form.spec, form.num_rows
        else:
            producer = self._slots[link.producer]
            here, spec = tree_flatten(state.outputs[link.producer])
            kept, maker_rows = here, producer.rows
            first, last = link.local[0] - producer.begin, link.local[1] - producer.begin
        leaves: list[Any] = []
        for number, (leaf, axis) in enumerate(zip(kept, link.axes, strict=True)):
            if not isinstance(leaf, torch.Tensor | LeafForm):
                leaves.append(cut_leaf(leaf, axis, maker_rows, 0, slot.rows))
                continue
            parts: list[tuple[int, torch.Tensor]] = []
            if link.local is not None:
                parts.append((link.local[0], cut_leaf(here[number].detach(), axis, producer.rows, first, last)))
            for arrival in arrivals:
                assert arrival.tensors is not None
                part = arrival.tensors[number]
                assert part is not None
                parts.append((arrival.flow.first, part))
            if axis is None:
                whole = min(parts, key=lambda entry: entry[0])[1]
            else:
                try:
                    whole = joined(parts, axis)
                except RuntimeError as error:
                    raise TrainingError(
                        f"{slot.name} gets rows of shapes {', '.join(str(tuple(one.shape)) for _, one in parts)} from "
                        "different ranks; a module's shapes must follow from the batch's, not from its rows"
                    ) from error
            leaves.append(whole.detach().requires_grad_(leaf.requires_grad))
        state.inputs[link.number] = [leaf if _takes_gradient(leaf) else None for leaf in leaves]
        return tree_unflatten(leaves, spec)

    def _loss(self, state: _StepState, slot: _Slot, code: LossCode, nests: dict[str, Any]) -> torch.Tensor:
        """The rank's part of the task's loss; the parts of all its ranks add up to it."""
        result: Any = torch.zeros((), device=self.world.device)
        count: Any = torch.zeros((), dtype=torch.float64, device=self.world.device)
        outputs = [nests[source][0] for source in code.sources] if slot.rows else []
        if code.is_random:
            self._seed(state, slot, slot.first_layer)
        if slot.rows:
            result = code.loss(self._batch(state, slot), *outputs)
            if code.is_mean:
                result, count = result
                count = torch.as_tensor(count, device=self.world.device).detach().to(torch.float64)
            if not isinstance(result, torch.Tensor) or result.numel() != 1:
                got = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
                raise TrainingError(f"task {slot.task!r}: its loss must be one number in a tensor, got {got}")
        if code.is_mean:
            if len(slot.ranks) > 1:
                count = count.clone()
                with peers("counting"):
                    dist.all_reduce(count, group=self.world.group("loss", slot.ranks))
            result = result / count.to(result.dtype)
        elif code.per_sample_mean:
            result = result * (slot.rows / slot.num_rows)
        if state.check_losses and len(slot.ranks) > 1 and not code.is_random:
            self._check_split(state, slot, code, outputs, result.detach())
        return result.reshape(())  # type: ignore[no-any-return]

    def _check_split(
        self, state: _StepState, slot: _Slot, code: LossCode, outputs: list[Any], part: torch.Tensor
    ) -> None:
        """Compares a loss put together from parts with the loss of the whole batch, on the first of its ranks."""
        box = [(slot.begin, tree_map(_detached, outputs), float(part))]
        boxes: list[Any] = [None] * len(slot.ranks)
        with peers("checking a loss"):
            dist.all_gather_object(boxes, box[0], group=self.world.group("loss", slot.ranks))
        if self.world.rank != slot.ranks[0]:
            return
        parts = sorted((one for one in boxes if one[1]), key=lambda one: one[0])
        axes = [link.axes for source in code.sources for link in slot.inputs if link.source == source]
        flat = [tree_flatten(one[1]) for one in parts]
        leaves = [
            leaf[0] if axis is None else torch.cat(leaf, dim=axis) if isinstance(leaf[0], torch.Tensor) else sum(leaf)
            for leaf, axis in zip(
                zip(*(one for one, _ in flat), strict=True), [axis for one in axes for axis in one], strict=True
            )
        ]
        with torch.no_grad():
            whole = code.loss(state.batches[slot.task], *tree_unflatten(leaves, flat[0][1]))
        whole = float(whole[0] / whole[1] if code.is_mean else whole)
        together = sum(one[2] for one in boxes)
        tolerance = {torch.float64: 1e-7, torch.float32: 1e-3}.get(part.dtype, 5e-2)
        if abs(whole - together) > tolerance * max(abs(whole), 1e-3):
            raise TrainingError(
                f"task {slot.task!r}: its loss over the whole batch is {whole:.6g}, but {together:.6g} when put "
                f"together from the parts of {len(slot.ranks)} ranks; "
                + (
                    "spindle.mean(total, count) needs a total and a count that are sums over samples"
                    if code.is_mean
                    else "it is no mean over samples: leave out per_sample_mean=True, or return a spindle.mean"
                )
            )

    def _backward(self, state: _StepState, slot: _Slot, first: int, last: int, spans: Spans, position: int) -> None:
        if isinstance(slot.code, LossCode):
            spans.start[position] = time.perf_counter_ns()
            loss = state.losses[slot.number]
            if loss.requires_grad:
                (loss * slot.code.weight if slot.code.weight != 1 else loss).backward()  # type: ignore[no-untyped-call]
            return
        if slot.rows == 0:
            spans.start[position] = time.perf_counter_ns()
            return
        number = slot.chunks.index((first, last))
        pieces = state.pieces[slot.number]
        outputs = tree_leaves(pieces[number].outputs)
        gradients: Sequence[torch.Tensor | None]
        if number == len(pieces) - 1:
            gradients = self._output_gradients(state, slot, outputs, spans)
        else:
            gradients = [
                leaf.grad if _takes_gradient(leaf) else None for leaf in tree_leaves(pieces[number + 1].inputs)
            ]
        spans.start[position] = time.perf_counter_ns()
        pairs = [
            (leaf, gradient)
            for leaf, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and _takes_gradient(leaf)
        ]
        if pairs:
            torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
        # Activations go as soon as they are used; the inputs of a chunk stay for the chunk before it.
        pieces[number].outputs = None
        del pieces[number + 1 :]
        if number == 0:
            state.outputs.pop(slot.number)
            for link in slot.outputs:
                if not link.sends[True]:
                    state.inputs.pop(link.number, None)

    def _output_gradients(
        self, state: _StepState, slot: _Slot, outputs: list[Any], spans: Spans
    ) -> list[torch.Tensor | None]:
        """The gradient of a slot's output: what its consumers, here and elsewhere, say of its rows."""
        sums: list[torch.Tensor | None] = [None] * len(outputs)
        ours: set[int] = set()
        for link in slot.outputs:
            parts: list[tuple[int, int, bool, list[torch.Tensor | None]]] = [
                (arrival.flow.first, arrival.flow.last, arrival.flow.with_rowless, arrival.tensors or [])
                for arrival in self._arrived(state, link, True, spans)
            ]
            if link.local is not None:
                consumer = self._slots[link.consumer]
                first, last = link.local
                gradients = [
                    None
                    if leaf is None or leaf.grad is None
                    else cut_leaf(leaf.grad, axis, consumer.rows, first - consumer.begin, last - consumer.begin)
                    for leaf, axis in zip(state.inputs[link.number], link.axes, strict=True)
                ]
                parts.append((first, last, first == consumer.begin, gradients))
            for first, last, with_rowless, gradients in parts:
                for number, (leaf, axis, gradient) in enumerate(zip(outputs, link.axes, gradients, strict=True)):
                    if gradient is None or (axis is None and not with_rowless):
                        continue
                    total = sums[number]
                    if total is None and gradient.shape == leaf.shape:
                        sums[number] = gradient  # not ours to write to: it may be on its way to another rank
                        continue
                    if number not in ours:
                        total = torch.zeros_like(leaf) if total is None else total.clone()
                        ours.add(number)
                    assert total is not None
                    sums[number] = total
                    place = cut_leaf(total, axis, slot.rows, first - slot.begin, last - slot.begin)
                    place += gradient
        return sums

    def _losses(self, state: _StepState) -> torch.Tensor:
        """This rank's part of each task's loss, on the host."""
        tasks = list(self.graph.tasks)
        values = torch.zeros(len(tasks), dtype=torch.float64)
        for slot, loss in state.losses.items():
            values[tasks.index(self._slots[slot].task)] += loss.detach().to("cpu", torch.float64)
        return values


def held_parameters(program: Program, graph: MetaGraph, rank: int) -> frozenset[int]:
    """Positions of the parameters that a rank's slots use."""
    held: set[int] = set()
    for shape, slot in zip(program.slots, program.plan.slots, strict=True):
        if rank in shape.ranks.tolist():
            for layer in graph.metaops[shape.op].parameters[slot.first : slot.last]:
                held.update(layer)
    return frozenset(held)


def seed_of(*parts: object) -> int:
    """A seed from anything with a text."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def _rows_on(shape: SlotShape, rank: int) -> tuple[int, int] | None:
    """The rows of a slot on a rank; None where it does not run."""
    for place, one in enumerate(shape.ranks.tolist()):
        if one == rank:
            return int(shape.bounds[place]), int(shape.bounds[place + 1])
    return None


def _wait(request: Any) -> None:
    try:
        request.wait()
    except RuntimeError as error:
        raise lost("waiting for it", error) from error


def _as_leaves(nest: Any) -> Any:
    """The same values, cut off from the graph that made them, collecting gradients where that one did."""
    return tree_map(
        lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf, nest
    )


Run = Callable[..., Any]


def _behind(arguments: Run | None, run: Run) -> Run:
    """A call's first layer over what its arguments are made of."""

    def glued(batch: Any, *outputs: Any) -> Any:
        assert arguments is not None
        args, kwargs = arguments(batch, *outputs)
        return run(*args, **kwargs)

    return glued


def _on_copies(run: Run) -> Run:
    return lambda *args: run(*_copied(args))


def _recomputed(layer: LayerCode, run: Run, args: Any) -> Any:
    """Runs a layer now, and again in backward instead of keeping what it needs there."""
    before = [buffer.clone() for buffer in layer.buffers()]
    return checkpoint(run, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _again(layer, before)))


@contextmanager
def _again(layer: LayerCode, before: list[torch.Tensor]) -> Iterator[None]:
    """Inside, a layer's buffers are as they were when it first ran; what it does to them counts once."""
    after = [buffer.clone() for buffer in layer.buffers()]
    _fill(layer.buffers(), before)
    try:
        yield
    finally:
        _fill(layer.buffers(), after)


def _fill(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)  # unseen by autograd, which keeps running statistics for backward


def _copied(nest: Any) -> Any:
    """Copies that may be written to; gradients pass through."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, nest)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _takes_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _shapes(form: Form) -> str:
    return ", ".join(str(leaf.shape) if isinstance(leaf, LeafForm) else repr(leaf) for leaf in form.leaves)
