"""Values and gradients between ranks: sent as soon as they are there, waited for when they are needed.

What crosses a link is a nest of tensors. Where the step does not come with its form (shapes, types, which leaves carry
a gradient), that goes ahead of it the first time a task's batch has a new shape; from then on both sides know it, and
only the values move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from spindle.errors import TrainingError
from spindle.program import Exchange, Program
from spindle.run.rows import (
    Form,
    LeafForm,
    cut_leaf,
    form_from_bytes,
    form_of,
    form_to_bytes,
    form_with,
    leaves_of,
    shape_for,
    takes_gradient,
)
from spindle.run.side import Flow, LinkEnd, Side
from spindle.run.step import Arrival, Step, Watch
from spindle.run.world import World, peers, wait

_MAX_LEAVES = 1000  # of what crosses a link; tags of messages count through them
_MAX_SEEN = 10_000  # shapes of batches remembered
_LENGTH, _FORM, _VALUES = 0, 1, 2  # tags inside a flow: two for the form, then one for each leaf


class Transfers:
    """The exchanges of one rank. Forms are by link and signature of the task's batch; all ranks have seen the same."""

    def __init__(self, program: Program, side: Side, world: World) -> None:
        self._side, self._world = side, world
        self._received: dict[tuple[int, int], Form] = {}
        self._sent: dict[tuple[int, int], Form] = {}
        self._seen: set[tuple[str, int]] = set()
        self._positions = {
            (one.link, one.backward): position
            for position, one in enumerate(program.instructions)
            if isinstance(one, Exchange)
        }

    def new(self, signatures: Mapping[str, int]) -> frozenset[str]:
        """Tasks whose batch has a shape not seen before."""
        return frozenset(task for task, signature in signatures.items() if (task, signature) not in self._seen)

    def remember(self, signatures: Mapping[str, int]) -> None:
        """The step with these is over."""
        self._seen.update(signatures.items())
        if len(self._seen) > _MAX_SEEN:  # on all ranks at once
            for known in (self._seen, self._received, self._sent):
                known.clear()

    def form_of(self, step: Step, link: LinkEnd) -> Form:
        """The form of what came over a link."""
        return step.forms.get(link.cut) or self._received[link.number, step.signatures[link.task]]

    def _must_tell(self, step: Step, link: LinkEnd) -> bool:
        """Whether a form goes ahead of what it is the form of."""
        return link.task in step.new and link.cut not in step.forms

    def post(self, step: Step, link: LinkEnd, backward: bool) -> bool:
        """Posts an exchange, or says that what it sends is not there yet."""
        if link.sends[backward]:
            made = step.returned if backward else step.forwarded
            if (link.consumer if backward else link.producer) not in made:
                return False
        if backward and link.receives[True] and link.producer not in step.forwarded:
            return False  # another member of its tensor group sent what it made, and this rank is behind
        for flow in link.sends[backward]:
            if backward:
                self._send_gradients(step, link, flow)
            else:
                self._send_values(step, link, flow)
        if backward and link.sends[True] and link.local is None:
            step.inputs.pop(link.number, None)
        if link.receives[backward]:
            arriving = self._expect_gradients if backward else self._expect_values
            step.arrivals[link.number, backward] = [arriving(step, link, flow) for flow in link.receives[backward]]
        return True

    def _send_values(self, step: Step, link: LinkEnd, flow: Flow) -> None:
        producer = self._side.slots[link.producer]
        nest = step.outputs[link.producer]
        form = form_of(nest, producer.rows)
        if len(form.leaves) > _MAX_LEAVES:
            raise TrainingError(f"{producer.name} hands on {len(form.leaves)} tensors, more than {_MAX_LEAVES}")
        if self._must_tell(step, link):
            text = torch.frombuffer(bytearray(form_to_bytes(form)), dtype=torch.uint8)
            self._send(step, torch.tensor([text.numel()]), flow.peer, link, False, _LENGTH)
            self._send(step, text, flow.peer, link, False, _FORM)
        known = self._sent.setdefault((link.number, step.signatures[link.task]), form)
        given = step.forms.get(link.cut)
        if given is not None:
            known = form_with(given, link.axes, producer.rows)
        if known != form:
            raise TrainingError(
                f"{producer.name} gives {_shapes(form)} where it gave {_shapes(known)} for a batch of the same shape; "
                "what crosses from rank to rank must have shapes that follow from the batch's: let it pad to a fixed "
                "length, or keep it whole with spindle.module(..., whole_batch=True)"
            )
        for number, (leaf, axis) in enumerate(zip(leaves_of(nest), link.axes, strict=True)):
            if isinstance(leaf, torch.Tensor):
                part = cut_leaf(
                    leaf.detach(), axis, producer.rows, flow.first - producer.begin, flow.last - producer.begin
                )
                self._send(step, part, flow.peer, link, False, _VALUES + number)

    def _send_gradients(self, step: Step, link: LinkEnd, flow: Flow) -> None:
        consumer = self._side.slots[link.consumer]
        for number, (leaf, axis) in enumerate(zip(step.inputs[link.number], link.axes, strict=True)):
            if leaf is not None and (axis is not None or flow.with_rowless):
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                part = cut_leaf(gradient, axis, consumer.rows, flow.first - consumer.begin, flow.last - consumer.begin)
                self._send(step, part, flow.peer, link, True, _VALUES + number)

    def _expect_values(self, step: Step, link: LinkEnd, flow: Flow) -> Arrival:
        if self._must_tell(step, link):
            return Arrival(flow, None, [])
        arrival = Arrival(flow, [], [])
        form = self._received[link.number, step.signatures[link.task]] = self.form_of(step, link)
        self._receive_leaves(arrival, link, form)
        return arrival

    def _receive_leaves(self, arrival: Arrival, link: LinkEnd, form: Form) -> None:
        flow = arrival.flow
        arrival.tensors = []
        for number, (leaf, axis) in enumerate(zip(form.leaves, link.axes, strict=True)):
            buffer = None
            if isinstance(leaf, LeafForm):
                shape = shape_for(leaf, axis, form.num_rows, flow.last - flow.first)
                buffer = torch.empty(shape, dtype=leaf.dtype, device=self._world.device)
                self._receive(arrival.requests, buffer, flow.peer, link, False, _VALUES + number)
            arrival.tensors.append(buffer)

    def _expect_gradients(self, step: Step, link: LinkEnd, flow: Flow) -> Arrival:
        producer = self._side.slots[link.producer]
        arrival = Arrival(flow, [], [])
        assert arrival.tensors is not None
        for number, (leaf, axis) in enumerate(zip(leaves_of(step.outputs[link.producer]), link.axes, strict=True)):
            buffer = None
            if takes_gradient(leaf) and (axis is not None or flow.with_rowless):
                like = cut_leaf(leaf, axis, producer.rows, flow.first - producer.begin, flow.last - producer.begin)
                buffer = torch.empty(like.shape, dtype=leaf.dtype, device=leaf.device)
                self._receive(arrival.requests, buffer, flow.peer, link, True, _VALUES + number)
            arrival.tensors.append(buffer)
        return arrival

    def _tag(self, link: LinkEnd, backward: bool, part: int) -> int:
        return (link.number * 2 + backward) * (_MAX_LEAVES + _VALUES) + part

    def _send(self, step: Step, tensor: torch.Tensor, peer: int, link: LinkEnd, backward: bool, part: int) -> None:
        if tensor.numel():
            kept = tensor.contiguous()
            with peers("sending"):
                request = dist.isend(kept, peer, tag=self._tag(link, backward, part))
            step.sending.setdefault((link.number, backward), []).append((peer, request, kept))

    def _receive(
        self, requests: list[Any], buffer: torch.Tensor, peer: int, link: LinkEnd, backward: bool, part: int
    ) -> None:
        if buffer.numel():
            with peers("receiving"):
                requests.append(dist.irecv(buffer, peer, tag=self._tag(link, backward, part)))

    def arrived(self, step: Step, link: LinkEnd, backward: bool, watch: Watch) -> list[Arrival]:
        """What came over a link, waited for; it is handed over once."""
        arrivals = step.arrivals.pop((link.number, backward), [])
        # `verify` has shown that nothing before it on its lane can still be waiting.
        assert arrivals or not link.receives[backward]
        for arrival in arrivals:
            if arrival.tensors is None:
                key = (link.number, step.signatures[link.task])
                form = self._received[key] = self._receive_form(link, arrival.flow.peer)
                self._receive_leaves(arrival, link, form)
            for request in arrival.requests:
                wait(request)
        if arrivals:
            watch.end[self._positions[link.number, backward]] = watch.now()
        if backward:
            self._let_go(step, (link.number, False), {arrival.flow.peer for arrival in arrivals})
        if self._world.device.type == "cuda":
            for key in list(step.sending):
                self._let_go(step, key, set())
        return arrivals

    def _let_go(self, step: Step, key: tuple[int, bool], back: set[int]) -> None:
        """What was sent needs no buffer. Whoever sends a gradient `back` has the values that it is for; gloo does not
        say of others whether they are over."""
        kept = []
        for peer, request, buffer in step.sending.pop(key, []):
            if peer in back:
                wait(request)
            elif not request.is_completed():
                kept.append((peer, request, buffer))
        if kept:
            step.sending[key] = kept

    def finish(self, step: Step) -> None:
        """Waits until all is sent."""
        for sent in step.sending.values():
            for _, request, _ in sent:
                wait(request)
        step.sending.clear()

    def _receive_form(self, link: LinkEnd, peer: int) -> Form:
        requests: list[Any] = []
        length = torch.zeros(1, dtype=torch.int64)
        self._receive(requests, length, peer, link, False, _LENGTH)
        wait(requests.pop())
        text = torch.empty(int(length), dtype=torch.uint8)
        self._receive(requests, text, peer, link, False, _FORM)
        wait(requests.pop())
        return form_from_bytes(text.numpy().tobytes())


def _shapes(form: Form) -> str:
    return ", ".join(str(leaf.shape) if isinstance(leaf, LeafForm) else repr(leaf) for leaf in form.leaves)
