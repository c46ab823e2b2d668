"""The second interpreter of a Program: runs one rank's instructions on `torch.distributed`.

Transfers are posted as soon as their data is there and waited for when it is needed; synchronisation runs behind the
backward that is still going on. The order of each lane is the program's, so what `verify` proved holds here.

Rows of a link are rows of the batch, because both ends of a task's flow have the same one. Left out so far: tensor
degrees above one, lanes with quotas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from spindle.graph import MetaGraph
from spindle.program import Backward, Exchange, Forward, OptimizerStep, Program, SyncGradients
from spindle.program.instructions import COMPUTE, SYNC, TRANSFER
from spindle.run.code import LayersCode, LossCode, OpCode
from spindle.run.nest import HEADER_BYTES, cut_rows, describe, join_rows, pack, unpack


@dataclass(slots=True)
class _Piece:
    """A chunk of layers as it ran: the leaves it began with and what it gave."""

    inputs: Any
    outputs: Any


@dataclass(slots=True)
class _Transfer:
    """One exchange on this rank: what is on its way."""

    requests: list[Any] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)  # buffers must live until they are sent
    arriving: list[tuple[int, int, torch.Tensor, Any, int]] = field(
        default_factory=list
    )  # first, last, header, request, source


@dataclass(slots=True)
class _StepState:
    """What one step holds on one rank."""

    batches: Mapping[str, Any]
    pieces: dict[int, list[_Piece]] = field(default_factory=dict)  # by slot, in forward order
    inputs: dict[int, dict[int, Any]] = field(default_factory=dict)  # by slot, by link: leaves
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    transfers: dict[tuple[int, bool], _Transfer] = field(default_factory=dict)
    forwarded: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)  # slots whose backward is over
    done_chunks: set[int] = field(default_factory=set)
    syncs: list[tuple[Any, torch.Tensor, list[nn.Parameter]]] = field(default_factory=list)
    next_transfer: int = 0
    next_sync: int = 0


class Executor:
    """Runs steps of one program on one rank. `parameters` are in the graph's order, this process's own tensors."""

    def __init__(
        self, program: Program, graph: MetaGraph, code: Sequence[OpCode], parameters: Sequence[nn.Parameter], rank: int
    ) -> None:
        self.program, self.graph, self.code, self.parameters, self.rank = program, graph, code, parameters, rank
        self._numbers = {lane: program.lanes[lane].of_rank(rank).tolist() for lane in (COMPUTE, TRANSFER, SYNC)}
        self._rows: dict[int, tuple[int, int]] = {}
        self._chunks: dict[int, list[tuple[int, int]]] = {}
        for number, shape in enumerate(program.slots):
            for place, device in enumerate(shape.ranks.tolist()):
                if device == rank:
                    self._rows[number] = (int(shape.bounds[place]), int(shape.bounds[place + 1]))
        for instruction in program.instructions:
            if isinstance(instruction, Backward):
                self._chunks.setdefault(instruction.slot, []).insert(0, (instruction.first, instruction.last))
        # Every rank makes every group, in one order.
        self._groups: dict[tuple[int, ...], Any] = {}
        meeting = [tuple(bucket.ranks.tolist()) for bucket in program.buckets]
        meeting += [
            tuple(sorted(shape.ranks.tolist()))
            for shape in program.slots
            if isinstance(code[shape.op], LossCode) and len(shape.ranks) > 1
        ]
        for ranks in dict.fromkeys(meeting):
            self._groups[ranks] = dist.new_group(list(ranks))

    def step(self, batches: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None) -> dict[str, float]:
        """One step on this step's batches (whole ones; each slot takes its rows). Returns the loss of each task."""
        state = _StepState(batches=batches)
        for parameter in self.parameters:
            parameter.grad = None
        self._advance(state)
        for number in self._numbers[COMPUTE]:
            match self.program.instructions[number]:
                case Forward(slot=slot):
                    self._forward(state, slot)
                    state.forwarded.add(slot)
                case Backward(slot=slot, first=first, last=last):
                    self._backward(state, slot, first, last)
                    state.done_chunks.add(number)
                    if first == self.program.plan.slots[slot].first:
                        state.returned.add(slot)
                case OptimizerStep():
                    self._finish_syncs(state)
                    if optimizer is not None:
                        optimizer.step()
                case Exchange() | SyncGradients():
                    raise AssertionError("these stand on other lanes")
            self._advance(state)
        self._finish_syncs(state)
        for transfer in state.transfers.values():
            for request in transfer.requests:
                request.wait()
        return self._losses(state)

    # Transfers and synchronisation, posted in the order of their lanes.

    def _advance(self, state: _StepState) -> None:
        transfers = self._numbers[TRANSFER]
        while state.next_transfer < len(transfers):
            instruction = self.program.instructions[transfers[state.next_transfer]]
            assert isinstance(instruction, Exchange)
            if not self._post(state, instruction):
                break
            state.next_transfer += 1
        syncs = self._numbers[SYNC]
        while state.next_sync < len(syncs):
            instruction = self.program.instructions[syncs[state.next_sync]]
            assert isinstance(instruction, SyncGradients)
            bucket = self.program.buckets[instruction.bucket]
            mine = set(bucket.after) & set(self._numbers[COMPUTE])
            if not mine <= state.done_chunks:
                break
            self._post_sync(state, bucket.parameters, tuple(bucket.ranks.tolist()))
            state.next_sync += 1

    def _post(self, state: _StepState, exchange: Exchange) -> bool:
        """Posts an exchange, or says that what it sends is not there yet."""
        link = self.program.links[exchange.link]
        giver = link.consumer if exchange.backward else link.producer
        flows = link.backward if exchange.backward else link.forward
        made = state.returned if exchange.backward else state.forwarded
        sends = (flows.source == self.rank).nonzero()[0].tolist()
        if sends and giver not in made:
            return False
        transfer = _Transfer()
        for number in sends:
            first, last = int(flows.first[number]), int(flows.last[number])
            header, data = pack(self._given(state, exchange, first, last))
            peer = int(flows.destination[number])
            transfer.kept += [header, data]
            transfer.requests.append(dist.isend(header, peer, tag=self._tag(exchange, 0)))
            if data.numel():
                transfer.requests.append(dist.isend(data, peer, tag=self._tag(exchange, 1)))
        for number in (flows.destination == self.rank).nonzero()[0].tolist():
            header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
            source = int(flows.source[number])
            request = dist.irecv(header, source, tag=self._tag(exchange, 0))
            rows = int(flows.first[number]), int(flows.last[number])
            transfer.arriving.append((*rows, header, request, source))
        state.transfers[exchange.link, exchange.backward] = transfer
        return True

    def _tag(self, exchange: Exchange, part: int) -> int:
        return (exchange.link * 2 + exchange.backward) * 2 + part

    def _given(self, state: _StepState, exchange: Exchange, first: int, last: int) -> Any:
        link = self.program.links[exchange.link]
        if exchange.backward:
            begin, end = self._rows[link.consumer]
            grads = tree_map(_gradient_of, state.inputs[link.consumer][exchange.link])
            return cut_rows(grads, end - begin, first - begin, last - begin)
        begin, end = self._rows[link.producer]
        return cut_rows(state.outputs[link.producer], end - begin, first - begin, last - begin)

    def _received(self, state: _StepState, link: int, backward: bool) -> list[tuple[int, int, Any]]:
        """What arrived over a link: first row, last row, nest. Waits for it."""
        transfer = state.transfers.get((link, backward))
        # `verify` has shown that nothing before it on its lane can still be waiting.
        assert transfer is not None or not self._takes_part(link, backward)
        result = []
        for first, last, header, request, source in transfer.arriving if transfer else ():
            request.wait()
            _, num_bytes = describe(header)
            data = torch.zeros(num_bytes, dtype=torch.uint8)
            if num_bytes:
                dist.recv(data, source, tag=self._tag(Exchange(link=link, backward=backward), 1))
            result.append((first, last, unpack(header, data)))
        return result

    def _takes_part(self, link: int, backward: bool) -> bool:
        flows = self.program.links[link].backward if backward else self.program.links[link].forward
        return bool((flows.destination == self.rank).any())

    def _post_sync(self, state: _StepState, parameters: tuple[int, ...], ranks: tuple[int, ...]) -> None:
        tensors = [self.parameters[parameter] for parameter in parameters]
        flat = torch.cat([_gradient_of(tensor).reshape(-1) for tensor in tensors])
        request = dist.all_reduce(flat, group=self._groups[ranks], async_op=True)
        state.syncs.append((request, flat, tensors))

    def _finish_syncs(self, state: _StepState) -> None:
        for request, flat, tensors in state.syncs:
            request.wait()
            place = 0
            for tensor in tensors:
                tensor.grad = flat[place : place + tensor.numel()].view_as(tensor)
                place += tensor.numel()
        state.syncs.clear()

    # Compute.

    def _forward(self, state: _StepState, slot: int) -> None:
        shape = self.program.slots[slot]
        op, code = self.graph.metaops[shape.op], self.code[shape.op]
        begin, end = self._rows[slot]
        arrived = state.inputs[slot] = {
            number: self._leaves(state, number, slot)
            for number, link in enumerate(self.program.links)
            if link.consumer == slot
        }
        by_call = {
            self.graph.metaops[self.program.slots[self.program.links[number].producer].op].call: values
            for number, values in arrived.items()
        }
        match code:
            case LossCode():
                outputs = [by_call[source][0] for source in code.sources]
                batch = cut_rows(state.batches[op.task], op.batch_size or 0, begin, end)
                state.losses[slot] = self._loss(code, slot, batch, outputs)
            case LayersCode():
                whole = self.program.plan.slots[slot]
                pieces = state.pieces[slot] = []
                values: Any = None
                for first, last in self._chunks[slot]:
                    layers = code.layers[first:last]
                    if values is None and whole.first == 0 and code.arguments is not None:
                        # The glue that feeds a call is part of its first chunk.
                        batch = cut_rows(state.batches[op.task], op.batch_size or 0, begin, end)
                        args, kwargs = code.arguments(batch, *(by_call[source][0] for source in code.sources))
                        inputs: Any = ()
                        values = layers[0].run(*args, **kwargs)
                        layers = layers[1:]
                    else:
                        inputs = next(iter(arrived.values())) if values is None else _as_leaves(values)
                        values = inputs
                    for layer in layers:
                        values = layer.run(*values)
                    pieces.append(_Piece(inputs=inputs, outputs=values))
                state.outputs[slot] = values

    def _leaves(self, state: _StepState, link: int, slot: int) -> Any:
        """A slot's input over one link: local rows and received ones, joined, as leaves of a new graph."""
        begin, end = self._rows[slot]
        producer = self.program.links[link].producer
        parts = [(first, nest, last - first) for first, last, nest in self._received(state, link, False)]
        if producer in self._rows:
            low, high = self._rows[producer]
            first, last = max(low, begin), min(high, end)
            if first < last:
                local = cut_rows(state.outputs[producer], high - low, first - low, last - low)
                parts.append((first, local, last - first))
        return _as_leaves(join_rows([(first, nest) for first, nest, _ in parts], [size for *_, size in parts]))

    def _loss(self, code: LossCode, slot: int, batch: Any, outputs: list[Any]) -> torch.Tensor:
        """The rank's part of the task's loss; the parts of all its ranks add up to it."""
        shape = self.program.slots[slot]
        result: Any = code.loss(batch, *outputs)
        begin, end = self._rows[slot]
        if code.is_mean:
            total, count = result
            count = count.detach().clone() if isinstance(count, torch.Tensor) else torch.tensor(float(count))
            if len(shape.ranks) > 1:
                dist.all_reduce(count, group=self._groups[tuple(sorted(shape.ranks.tolist()))])
            result = total / count
        elif code.per_sample_mean:
            result = result * ((end - begin) / shape.num_rows)
        assert isinstance(result, torch.Tensor)
        return result

    def _backward(self, state: _StepState, slot: int, first: int, last: int) -> None:
        code = self.code[self.program.slots[slot].op]
        if isinstance(code, LossCode):
            if state.losses[slot].requires_grad:
                torch.autograd.backward([state.losses[slot] * code.weight])
            return
        number = self._chunks[slot].index((first, last))
        pieces = state.pieces[slot]
        if number == len(pieces) - 1:
            gradients = self._output_gradients(state, slot)
        else:
            gradients = [_gradient_of(leaf) for leaf in _float_leaves(pieces[number + 1].inputs)]
        outputs = _float_leaves(pieces[number].outputs)
        pairs = [(one, grad) for one, grad in zip(outputs, gradients, strict=True) if one.requires_grad]
        if pairs:
            torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])

    def _output_gradients(self, state: _StepState, slot: int) -> list[torch.Tensor]:
        """The gradient of a slot's output: what its consumers, here and elsewhere, say of its rows."""
        begin, end = self._rows[slot]
        outputs = _float_leaves(state.outputs[slot])
        sums = [torch.zeros_like(one) for one in outputs]
        for number, link in enumerate(self.program.links):
            if link.producer != slot:
                continue
            parts = self._received(state, number, True)
            if link.consumer in self._rows:
                low, high = self._rows[link.consumer]
                first, last = max(low, begin), min(high, end)
                if first < last:
                    grads = tree_map(_gradient_of, state.inputs[link.consumer][number])
                    parts.append((first, last, cut_rows(grads, high - low, first - low, last - low)))
            for first, last, nest in parts:
                for total, one in zip(sums, _float_leaves(nest), strict=True):
                    if total.dim() and total.shape[0] == end - begin and one.shape[0] == last - first:
                        total[first - begin : last - begin] += one
                    else:
                        total += one
        return sums

    def _losses(self, state: _StepState) -> dict[str, float]:
        """Every task's loss on every rank."""
        tasks = list(self.graph.tasks)
        values = torch.zeros(len(tasks), dtype=torch.float64)
        for slot, loss in state.losses.items():
            values[tasks.index(self.graph.metaops[self.program.slots[slot].op].task)] += loss.detach().double()
        if self.program.num_ranks > 1:
            dist.all_reduce(values)
        return dict(zip(tasks, values.tolist(), strict=True))


def _as_leaves(nest: Any) -> Any:
    """The same values, cut off from the graph that made them; floating tensors collect gradients."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().requires_grad_(leaf.is_floating_point())

    return tree_map(cut, nest)


def _float_leaves(nest: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _gradient_of(leaf: Any) -> Any:
    """A tensor's gradient, zero where nothing reached it; anything else as it is."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
