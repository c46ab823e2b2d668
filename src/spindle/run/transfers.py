"""Activations and gradients between ranks: sent as soon as they exist, waited for when they are needed.

What crosses a link is a pytree of tensors. If its metadata (shapes, dtypes, which leaves require gradients) was not
inferred before the step, the sender sends the metadata first when a task's batch has a new shape. From then on both
sides know it, and only the values are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from spindle.errors import TrainingError
from spindle.program import Exchange, Program
from spindle.run.items import slice_rows
from spindle.run.lanes import release_behind_current_stream, uses_streams
from spindle.run.pytrees import (
    PytreeMeta,
    TensorMeta,
    cut_leaf,
    leaves_of,
    meta_from_bytes,
    meta_to_bytes,
    pytree_meta,
    shape_for,
    takes_gradient,
    with_rows,
)
from spindle.run.rank_program import Flow, LinkEnd, RankProgram, RankSlot
from spindle.run.step import Arrival, Step, StepTimer
from spindle.run.world import Message, World, wait

_MAX_LEAVES = 1000  # the largest number of leaves that may cross a link; each has a message tag of its own
_MAX_SEEN = 10_000  # the number of batch shapes that are remembered
_LENGTH, _METADATA, _VALUES = 0, 1, 2  # tags of a flow: two for the metadata, then one per leaf


class Transfers:
    """The exchanges of one rank. Metadata is cached by link and by the signature of the task's batch, the same on all
    ranks."""

    def __init__(self, program: Program, rank_program: RankProgram, world: World) -> None:
        self._rank_program, self._world = rank_program, world
        # Messages are launched from another stream than those that produce and use their tensors.
        self._crosses_streams = uses_streams(program, world)
        self._received: dict[tuple[int, int], PytreeMeta] = {}
        self._sent: dict[tuple[int, int], PytreeMeta] = {}
        self._seen: set[tuple[str, int]] = set()
        self._positions = {
            (instruction.link, instruction.backward): position
            for position, instruction in enumerate(program.instructions)
            if isinstance(instruction, Exchange)
        }

    def tasks_with_new_shapes(self, signatures: Mapping[str, int]) -> frozenset[str]:
        """Tasks whose batch has a shape that was not seen before."""
        return frozenset(task for task, signature in signatures.items() if (task, signature) not in self._seen)

    def mark_seen(self, signatures: Mapping[str, int]) -> None:
        """Note that a step with these signatures has run."""
        self._seen.update(signatures.items())
        if len(self._seen) > _MAX_SEEN:  # on all ranks at the same time
            for known in (self._seen, self._received, self._sent):
                known.clear()

    def meta_of(self, step: Step, link: LinkEnd) -> PytreeMeta:
        """The metadata of the values on a link."""
        return step.cuts.get(link.cut) or self._received[link.number, step.signatures[link.task]]

    def _is_new(self, step: Step, link: LinkEnd) -> bool:
        """Whether the sender first sends the metadata of a link's values."""
        return (link.has_new_shapes or link.task in step.new_shapes) and link.cut not in step.cuts

    def send_metadata(self, step: Step, slot: RankSlot) -> None:
        """Send the metadata of a slot's outputs, ahead of the values, to ranks that do not know it yet."""
        if slot.rows == 0:
            return
        for link in slot.outputs:
            if self._is_new(step, link):
                message = torch.frombuffer(
                    bytearray(meta_to_bytes(pytree_meta(step.outputs[slot.number], slot.rows))), dtype=torch.uint8
                )
                for flow in link.sends[False]:
                    for part, tensor in ((_LENGTH, torch.tensor([message.numel()])), (_METADATA, message)):
                        request = self._world.send_on_host(tensor, flow.peer, self._tag(link, False, part))
                        step.sending.setdefault((link.number, False), []).append((flow.peer, request, tensor))

    def post(self, step: Step, link: LinkEnd, backward: bool, *, wait_for_metadata: bool = False) -> bool:
        """Post an exchange. Returns False if it cannot be posted yet.

        Either what it sends does not exist yet; or, if sends and receives are one group call, the metadata of what it
        receives is unknown and must not be waited for.
        """
        if link.sends[backward]:
            results = step.input_gradients_done if backward else step.forward_done
            if (link.consumer if backward else link.producer) not in results:
                return False
        if backward and link.receives[True] and link.producer not in step.forward_done:
            return False  # another member of its tensor-parallel group has sent the output; this rank is not there yet
        receives, is_open = link.receives[backward], not backward and self._is_new(step, link)
        if self._world.launches_in_order and receives and is_open:
            if not wait_for_metadata:
                return False
            self._receive_all_metadata(step, link)
            is_open = False
        sends: list[Message] = []
        for flow in link.sends[backward]:
            sends += (self._gradients_to if backward else self._values_to)(step, link, flow)
        if backward and link.sends[True] and link.local is None:
            step.inputs.pop(link.number, None)
        arrivals = []
        for flow in receives:
            tensors = None
            if backward:
                tensors = self._gradient_buffers(step, link, flow)
            elif not is_open:
                tensors = self._value_buffers(step, link, flow)
            arrivals.append(Arrival(flow, tensors, []))
        incoming = [self._messages_in(link, backward, arrival) for arrival in arrivals]
        sent, received = self._world.start_exchange(sends, [message for messages in incoming for message in messages])
        for message, request in zip(sends, sent, strict=True):
            step.sending.setdefault((link.number, backward), []).append((message.peer, request, message.tensor))
        requests = iter(received)
        for arrival, messages in zip(arrivals, incoming, strict=True):
            arrival.requests += [next(requests) for _ in messages]
        if arrivals:
            step.arrivals[link.number, backward] = arrivals
        return True

    def _values_to(self, step: Step, link: LinkEnd, flow: Flow) -> Iterator[Message]:
        producer = self._rank_program.slots[link.producer]
        tree = step.outputs[link.producer]
        meta = pytree_meta(tree, producer.rows)
        if len(meta.leaves) > _MAX_LEAVES:
            raise TrainingError(f"{producer.name} returns {len(meta.leaves)} tensors, more than {_MAX_LEAVES}")
        known = meta
        if not link.has_new_shapes:
            known = self._sent.setdefault((link.number, step.signatures[link.task]), meta)
        given = step.cuts.get(link.cut)
        if given is not None:
            known = with_rows(given, link.axes, producer.rows)
            if link.num_slices > 1:
                leaves = [
                    replace(leaf, shape=_slice_shape(step, link, leaf, number, flow))
                    if isinstance(leaf, TensorMeta)
                    else leaf
                    for number, leaf in enumerate(given.leaves)
                ]
                known = replace(given, leaves=tuple(leaves))
        if known != meta and (given is not None or not link.has_new_shapes):
            raise TrainingError(
                f"{producer.name} returns {_shapes(meta)} where it returned {_shapes(known)} for a batch of the same "
                "shape; "
                "what crosses from rank to rank must have shapes that follow from the batch's: let it pad to a fixed "
                "length, or keep it whole with spindle.module(..., whole_batch=True)"
            )
        for number, (leaf, axis) in enumerate(zip(leaves_of(tree), link.axes, strict=True)):
            if isinstance(leaf, torch.Tensor):
                if self._crosses_streams:
                    release_behind_current_stream(leaf)
                part = cut_leaf(
                    leaf.detach(), axis, producer.rows, flow.first - producer.begin, flow.last - producer.begin
                )
                yield from self._message(part, flow.peer, link, False, number)

    def _gradients_to(self, step: Step, link: LinkEnd, flow: Flow) -> Iterator[Message]:
        consumer = self._rank_program.slots[link.consumer]
        for number, (leaf, axis) in enumerate(zip(step.inputs[link.number], link.axes, strict=True)):
            if leaf is not None and (axis is not None or flow.with_rowless):
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                if self._crosses_streams:
                    release_behind_current_stream(gradient)
                part = cut_consumed(step, link, consumer, number, gradient, flow.first, flow.last)
                yield from self._message(part, flow.peer, link, True, number)

    def _message(
        self, tensor: torch.Tensor, peer: int, link: LinkEnd, backward: bool, number: int
    ) -> Iterator[Message]:
        """The message of a tensor; none for an empty one."""
        if tensor.numel():
            yield Message(tensor.contiguous(), peer, self._tag(link, backward, _VALUES + number))

    def _value_buffers(self, step: Step, link: LinkEnd, flow: Flow) -> list[torch.Tensor | None]:
        """Receive buffers for the values of a flow, leaf by leaf."""
        meta = self._received[link.number, step.signatures[link.task]] = self.meta_of(step, link)
        return [
            torch.empty(
                _slice_shape(step, link, leaf, number, flow)
                if link.num_slices > 1
                else shape_for(leaf, link.axes[number], meta.num_rows, flow.last - flow.first),
                dtype=leaf.dtype,
                device=self._world.device,
            )
            if isinstance(leaf, TensorMeta)
            else None
            for number, leaf in enumerate(meta.leaves)
        ]

    def _gradient_buffers(self, step: Step, link: LinkEnd, flow: Flow) -> list[torch.Tensor | None]:
        producer = self._rank_program.slots[link.producer]
        buffers: list[torch.Tensor | None] = []
        for leaf, axis in zip(leaves_of(step.outputs[link.producer]), link.axes, strict=True):
            buffer = None
            if takes_gradient(leaf) and (axis is not None or flow.with_rowless):
                like = cut_leaf(leaf, axis, producer.rows, flow.first - producer.begin, flow.last - producer.begin)
                buffer = torch.empty(like.shape, dtype=leaf.dtype, device=leaf.device)
            buffers.append(buffer)
        return buffers

    def _messages_in(self, link: LinkEnd, backward: bool, arrival: Arrival) -> list[Message]:
        return [
            message
            for number, buffer in enumerate(arrival.tensors or ())
            if buffer is not None
            for message in self._message(buffer, arrival.flow.peer, link, backward, number)
        ]

    def _tag(self, link: LinkEnd, backward: bool, part: int) -> int:
        return (link.number * 2 + backward) * (_MAX_LEAVES + _VALUES) + part

    def _receive_all_metadata(self, step: Step, link: LinkEnd) -> None:
        """Receive the metadata of a link's values from each of its senders."""
        for flow in link.receives[False]:
            self._received[link.number, step.signatures[link.task]] = self._receive_metadata(link, flow.peer)

    def arrived(self, step: Step, link: LinkEnd, backward: bool, timer: StepTimer) -> list[Arrival]:
        """Wait for what a link carries, and return it. Each arrival is returned once."""
        arrivals = step.arrivals.pop((link.number, backward), [])
        # It is posted: `verify` has proved that nothing before it on its lane can still be blocked.
        assert arrivals or not link.receives[backward]
        if any(arrival.tensors is None for arrival in arrivals):
            self._receive_all_metadata(step, link)
            for arrival in arrivals:
                arrival.tensors = self._value_buffers(step, link, arrival.flow)
                _, arrival.requests = self._world.start_exchange([], self._messages_in(link, backward, arrival))
        for arrival in arrivals:
            for request in arrival.requests:
                wait(request)
        if arrivals:
            timer.end[self._positions[link.number, backward]] = timer.now()
        if self._crosses_streams:
            for tensor in (tensor for arrival in arrivals for tensor in arrival.tensors or ()):
                release_behind_current_stream(tensor)
        elif backward:
            # with several streams, waiting for a send here says nothing about the stream that owns its buffer
            self._free_sent(step, (link.number, False), {arrival.flow.peer for arrival in arrivals})
        if self._world.device.type == "cuda":
            for key in list(step.sending):
                self._free_sent(step, key, set())
        return arrivals

    def _free_sent(self, step: Step, key: tuple[int, bool], answered: set[int]) -> None:
        """Free the buffers of completed sends. Peers that have `answered` with a gradient have received the values. Of
        other sends, gloo does not report whether they are complete."""
        unsent = []
        for peer, request, buffer in step.sending.pop(key, []):
            if peer in answered:
                wait(request)
            elif not request.is_completed():
                unsent.append((peer, request, buffer))
        if unsent:
            step.sending[key] = unsent

    def finish(self, step: Step) -> None:
        """Wait until everything is sent."""
        for sent in step.sending.values():
            for _, request, _ in sent:
                wait(request)
        step.sending.clear()

    def _receive_metadata(self, link: LinkEnd, peer: int) -> PytreeMeta:
        length = torch.zeros(1, dtype=torch.int64)
        self._world.receive_on_host(length, peer, self._tag(link, False, _LENGTH))
        message = torch.empty(int(length), dtype=torch.uint8)
        self._world.receive_on_host(message, peer, self._tag(link, False, _METADATA))
        return meta_from_bytes(message.numpy().tobytes())


def cut_consumed(
    step: Step, link: LinkEnd, consumer: RankSlot, number: int, tensor: torch.Tensor, first: int, last: int
) -> Any:
    """Rows `[first, last)`, or slices, of a leaf that a slot has received over a link."""
    axis = link.axes[number]
    bounds = _rows_of_slices(step, link, number) if link.num_slices > 1 and axis is not None else None
    if bounds is None or axis is None:
        return cut_leaf(tensor, axis, consumer.rows, first - consumer.begin, last - consumer.begin)
    return tensor.narrow(axis, bounds[first], bounds[last] - bounds[first])


def _slice_shape(step: Step, link: LinkEnd, leaf: TensorMeta, number: int, flow: Flow) -> tuple[int, ...]:
    """The shape of one slice of an item's leaf, derived from that of another slice or of the whole."""
    bounds, axis = _rows_of_slices(step, link, number), link.axes[number]
    if bounds is None or axis is None:
        return leaf.shape
    return (*leaf.shape[:axis], bounds[flow.last] - bounds[flow.first], *leaf.shape[axis + 1 :])


def _rows_of_slices(step: Step, link: LinkEnd, number: int) -> list[int] | None:
    """Where the slices of an item start and end in a leaf of what a sequence group sends."""
    assert link.item_code is not None
    return slice_rows(link.item_code, step.lengths[link.task], link.items[0], link.num_slices, number)


def _shapes(meta: PytreeMeta) -> str:
    return ", ".join(str(leaf.shape) if isinstance(leaf, TensorMeta) else repr(leaf) for leaf in meta.leaves)
