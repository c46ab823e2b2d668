"""Which captured passes are launched together: a region of passes that need only what earlier graphs leave in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from spindle.program import Backward, Forward, Instruction
from spindle.run.captured_slot import CapturedBackward, CapturedSlot, addresses
from spindle.run.graph_gradients import GraphGradients
from spindle.run.lanes import Lanes
from spindle.run.op_code import LossCode
from spindle.run.pytrees import leaves_of, takes_gradient
from spindle.run.rank_program import LinkEnd, RankSlot
from spindle.run.regions import Region, region_positions


class GraphRegions:
    """Launches the graphs of `slots`: one by one, or added to the region that is about to be launched."""

    def __init__(self, slots: Mapping[int, CapturedSlot], gradients: GraphGradients, refused: dict[str, str]) -> None:
        self._slots, self._gradients, self._refused = slots, gradients, refused
        self._regions: list[Region] | None = None  # in the order of the host, once they are known
        self._region: Region | None = None  # the region to which graphs are added
        self._position = -1  # the instruction of the pass that is being added
        self._pending: list[CapturedBackward] = []  # its backward passes, whose parameters have no `grad` yet

    def replay(self, backward: CapturedBackward) -> None:
        """Launch a backward pass, and set the gradients that it writes."""
        if backward.graph is not None:
            self.launch(backward.graph)
        if self._region is not None:
            self._pending.append(backward)
        else:
            self._gradients.set_grads(backward)

    def launch(self, graph: torch.cuda.CUDAGraph) -> None:
        """Launch a graph, or add it to the current region."""
        if self._region is not None:
            self._region.add_graph(self._position, graph)
        else:
            graph.replay()

    @contextmanager
    def collected(self, region: Region, position: int) -> Iterator[None]:
        """A context in which the pass of an instruction is added to a region instead of being launched."""
        self._region, self._position = region, position
        try:
            yield
        finally:
            self._region = None

    def replay_region(self, region: Region) -> bool:
        """Launch the passes that were added. Returns whether it launches additions of gradients after them."""
        region.replay()
        if region.failure is not None:
            self._refused["regions of several slots"] = region.failure
        have_additions = [self._gradients.set_grads(backward) for backward in self._pending]
        self._pending.clear()
        return any(have_additions)

    def regions_of(
        self,
        positions: Sequence[int],
        instructions: Sequence[Instruction],
        slots: Mapping[int, RankSlot],
        lanes: Lanes,
    ) -> list[Region]:
        """All captured passes of a step in host order, cut into regions."""

        def is_fit(position: int, fits: Callable[[RankSlot, Forward | Backward], bool]) -> bool:
            instruction = instructions[position]
            assert isinstance(instruction, Forward | Backward)
            return fits(slots[instruction.slot], instruction)

        if self._regions is None:
            self._regions = [
                lanes.region_of(region)
                for region in region_positions(
                    positions,
                    lanes.needs_of(positions),
                    can_begin=lambda position: is_fit(position, self._has_own_graph),
                    can_follow=lambda position: is_fit(position, self._is_graph_alone),
                )
            ]
        return self._regions

    @property
    def region_sizes(self) -> list[int]:
        """How many passes are launched together, for those that are not launched one by one."""
        return [len(region.positions) for region in self._regions or () if len(region.positions) > 1]

    def _has_own_graph(self, slot: RankSlot, instruction: Forward | Backward) -> bool:
        """Whether a pass has a graph of its own, whose random numbers need not be seeded."""
        captured = self._slots.get(slot.number)
        if captured is None or captured.forward is None or captured.generators:
            return False
        match instruction:
            case Forward():
                return True
            case Backward(first=first):
                return first in (captured.backward if instruction.makes_inputs else captured.weights)

    def _is_graph_alone(self, slot: RankSlot, instruction: Forward | Backward) -> bool:
        """Whether a pass launches nothing but its graph: everything it reads is where other passes leave it."""
        if not self._has_own_graph(slot, instruction):
            return False
        match instruction:
            case Forward():
                return all(self._is_in_place(slot, link) for link in slot.inputs)
            case Backward(first=first, last=last):
                is_last = (first, last) == slot.chunks[-1]
                if not (instruction.makes_inputs and is_last) or isinstance(slot.code, LossCode):
                    return True
                return len(slot.outputs) == 1 and self._is_gradient_in_place(slot, slot.outputs[0], first)

    def _is_in_place(self, slot: RankSlot, link: LinkEnd) -> bool:
        """Whether a slot reads the output of another slot directly, from the memory where that slot wrote it."""
        producer = self._slots.get(link.producer)
        if producer is None or not link.is_whole or link.items:
            return False
        return addresses(producer.output.outputs) == addresses(self._slots[slot.number].inputs[link.source])

    def _is_gradient_in_place(self, slot: RankSlot, link: LinkEnd, first: int) -> bool:
        """Whether a slot reads the gradient of its output where the consumer has left it."""
        consumer = self._slots.get(link.consumer)
        if consumer is None or not link.is_whole or link.items:
            return False
        leaves = leaves_of(consumer.inputs[link.source])
        gradients = [leaf.grad if takes_gradient(leaf) else None for leaf in leaves]
        return addresses(gradients) == addresses(self._slots[slot.number].backward[first].gradients)
