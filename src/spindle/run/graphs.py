"""Slots as CUDA graphs: one graph for a slot's forward pass, and one for the backward pass of each of its chunks.

A step is captured as it runs: each piece of compute is recorded instead of launched, then replayed at once, so that
transfers between pieces proceed as usual. The graphs of a lane allocate from one memory pool, in the order of the
rank's program, and later steps replay them in that order, so that later pieces reuse the memory of earlier ones as in
the captured step. What lives longer (inputs, outputs, gradients) keeps its addresses.

Captures and all other steps run on the stream of a slot's lane, not the default one, because autograd accumulates a
parameter's gradient on the stream of its first use. Where weight gradients have a lane of their own, they are a graph
that is captured on the stream of the slot and replayed on that of their lane. It has the memory of that lane, and all
that it reads is held until the capture of the step is complete, so that nothing else gets this memory. cuBLAS keeps a
workspace per stream, which both lanes would write to at once: then each graph has one in its own memory.

Each layer that draws random numbers has a generator that is registered with its graph. It is seeded before each replay
as torch's default generator is before the layer in an eager step: the same numbers.

A piece that cannot be captured (it synchronizes with the GPU, draws random numbers on the host, communicates with other
ranks) runs eagerly. Where all of them can be, on a rank that communicates with no other, one graph has them all
(`step_graph`).
"""

from __future__ import annotations

import gc
import pickle
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from spindle.errors import TrainingError
from spindle.program import Backward, Forward, Instruction
from spindle.run.backward_split import WeightPart
from spindle.run.composed_graph import ComposedGraph
from spindle.run.gradients import Gradients
from spindle.run.lanes import Lanes, lane_stream, release_behind_current_stream
from spindle.run.op_code import LossCode
from spindle.run.pytrees import leaves_of, takes_gradient
from spindle.run.rank_program import LinkEnd, RankSlot
from spindle.run.regions import Region, region_positions
from spindle.run.step import Piece, Step, Watch
from spindle.run.step_graph import StepGraph

Trees = dict[str, Any]
Places = dict[int, torch.Tensor | None]  # of gradients, by parameter; None where autograd allocates them
RANDOM_LAYERS = True  # whether layers that draw random numbers are captured
_ROUNDING = 0.05  # largest rounding error relative to a tensor's norm, in bfloat16


@dataclass(slots=True)
class SlotOutput:
    """The results of a slot's forward pass: its pieces, and its output (a loss, or a pytree of tensors)."""

    pieces: list[Piece]
    outputs: Any


@dataclass(frozen=True, slots=True)
class Chunk:
    """Layers whose backward runs as one: their outputs, and the leaves that get gradients."""

    outputs: list[Any]
    inputs: list[torch.Tensor]
    parameters: list[nn.Parameter]


@dataclass(slots=True)
class _Slot:
    """A captured slot; backward graphs are by the first layer of their chunk."""

    forward: torch.cuda.CUDAGraph | None  # None where it is part of the step's graph
    compute: Callable[[Trees], SlotOutput] | None  # until its backward passes are captured
    trees: Trees
    output: SlotOutput  # with its autograd graph until then
    generators: dict[int, torch.Generator]  # by layer that draws random numbers
    backward: dict[int, _Backward] = field(default_factory=dict)
    weights: dict[int, _Backward] = field(default_factory=dict)  # where weight gradients have graphs of their own
    parts: dict[int, list[WeightPart]] = field(default_factory=dict)  # held until the capturing step is finished


@dataclass(slots=True)
class _Backward:
    graph: torch.cuda.CUDAGraph | None  # None where nothing needs a gradient
    gradients: list[torch.Tensor | None]  # of the outputs, where other slots compute them
    written: list[tuple[nn.Parameter, bool]]  # and whether this pass is the first to write the parameter's gradient


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a capture failed."""

    reason: str
    is_out_of_memory: bool


def _failure(error: Exception) -> Failure:
    cause = error.__context__ or error  # ending a failed capture raises, too
    is_out_of_memory = isinstance(error, torch.OutOfMemoryError) or isinstance(cause, torch.OutOfMemoryError)
    return Failure((str(cause).splitlines() or [type(cause).__name__])[0], is_out_of_memory)


class _Pool:
    """A memory pool of graphs."""

    def __init__(self, reserves: bool) -> None:
        """The pool begins as one block if it `reserves`, as large as the peak of activations so far: blocks that are
        allocated one by one fragment, because what one round frees is too small for a tensor of the next."""
        self.handle: Any = torch.cuda.graph_pool_handle()
        self._anchor: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        num_bytes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        try:
            # An empty graph, even if nothing is reserved: torch counts the graphs of a pool, which must not be left
            # without one while gradients lie in it.
            with capturing(self._anchor, self.handle):
                if num_bytes > 0 and reserves:
                    torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        except RuntimeError:  # not in one block
            torch.cuda.synchronize()
            self.handle, self._anchor = torch.cuda.graph_pool_handle(), None


class GraphMemory:
    """The memory pools of all graphs of a rank, one for each lane. A step replays one set of graphs, from its first
    forward to its last backward, so sets may share memory that is free between pieces; what a set keeps is its own."""

    def __init__(self, num_lanes: int = 1, *, has_weight_lanes: bool = False) -> None:
        self.num_lanes = num_lanes
        self._reserves = num_lanes == 1  # memory that one stream reserves serves no other
        self.has_weight_lanes = has_weight_lanes
        self._pools: dict[int, _Pool] = {}

    def of_lane(self, lane: int) -> Any:
        """The pool of a lane."""
        if lane not in self._pools:
            self._pools[lane] = _Pool(self._reserves)
        return self._pools[lane].handle

    def new_graph(self) -> torch.cuda.CUDAGraph:
        """A graph for a pass. With several lanes it is kept, so that a region can have it as a child."""
        return torch.cuda.CUDAGraph(keep_graph=self.num_lanes > 1)

    def renew(self) -> None:
        """Start new pools: a failed capture does not return its memory."""
        torch.cuda.synchronize()
        self.release()
        self._reserves = False

    def release(self) -> None:
        """Release the pools, when no graph is left."""
        self._pools.clear()


class Graphs:
    """The captured slots of one rank, for batches of one set of shapes."""

    def __init__(
        self,
        gradients: Gradients,
        batches: Mapping[str, Any],
        refused: dict[str, str],
        memory: GraphMemory,
        evict: Callable[[], None],
    ) -> None:
        """`evict()` drops all other sets, when memory runs out."""
        self.gradients = gradients
        self.refused = refused  # why slots run without a graph, by name
        self.step_graph: StepGraph | None = None  # where one graph has all slots
        self.is_invalid = False  # must not be replayed
        self.num_steps = 0  # that have replayed them
        self.ran_out_of_memory = False
        self._memory, self._evict = memory, evict
        self._generators: dict[int, torch.Generator] | None = None  # of the slot being captured, by layer
        self._batches = {task: tree_map(_copied, tree) for task, tree in batches.items()}
        self._slots: dict[int, _Slot] = {}
        self._written: set[int] = set()
        self.first_written: list[nn.Parameter] = []  # parameters whose gradients the step's graph writes
        self.is_complete = False  # whether the capturing step is finished
        self._regions: list[Region] | None = None  # in the order of the host, once they are known
        self._region: Region | None = None  # that is about to be launched
        self._position = -1  # of the pass that is added to it
        self._region_gradients: list[_Backward] = []
        gc.collect()  # memory of earlier steps goes to the pool
        torch.cuda.empty_cache()

    def batches(self, batches: Mapping[str, Any]) -> Mapping[str, Any]:
        """Copy batches to the memory from which the graphs read."""
        return {task: _put(self._batches[task], tree) for task, tree in batches.items()}

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def has(self, slot: RankSlot) -> bool:
        """Whether a slot runs as a graph, or will be captured in this step."""
        return slot.number in self._slots or (not self.is_complete and self.can_try(slot))

    def can_try(self, slot: RankSlot) -> bool:
        """Whether no known property of a slot forbids capturing it."""
        reason = "its task's code reads values of tensors" if slot.code.reads_values else None
        match slot.code:
            case LossCode() as code:
                if slot.rows == 0:
                    return False
                if code.is_mean and len(slot.ranks) > 1:
                    reason = "its ranks all-reduce their counts"
                elif code.is_random and not RANDOM_LAYERS:
                    reason = "its loss draws random numbers"
            case code:
                if len(slot.group) > 1:
                    reason = "its tensor-parallel group communicates inside it"
                elif code.is_random and not RANDOM_LAYERS:
                    reason = "it draws random numbers"
                elif any(_is_hooked(parameter) for layer in code.layers for parameter in layer.parameters):
                    reason = "a parameter has a hook"
        if reason is not None:
            self.refused[slot.name] = reason
        return slot.name not in self.refused

    def draw_from(self, layer: int) -> bool:
        """Make a random layer draw from its own generator, if its slot is being captured."""
        if self._generators is None:
            return False
        _generator().graphsafe_set_state(self._generators[layer])
        return True

    def forward(
        self,
        slot: RankSlot,
        trees: Trees,
        compute: Callable[[Trees], SlotOutput],
        seeds: Mapping[int, int],
    ) -> tuple[Trees, SlotOutput]:
        """Run a slot's forward pass. Returns the inputs that will get gradients, and the results. `seeds` are those of
        its random layers in this step."""
        if self.step_graph is not None:  # captured with all others: nothing is replayed, or kept for a replay
            output = compute(trees)
            self._slots[slot.number] = _Slot(None, None, {}, SlotOutput(output.pieces, None), {})
            return trees, SlotOutput(output.pieces, tree_map(_detached, output.outputs))
        # Replay: copy inputs to where the graph reads them, seed what draws, launch. Outputs are where they were.
        captured = self._slots.get(slot.number)
        if captured is not None:
            assert captured.forward is not None
            for source, tree in trees.items():
                _put(captured.trees[source], tree)
            for layer, seed in seeds.items():
                captured.generators[layer].manual_seed(seed)
            self._launch(captured.forward)
            return captured.trees, captured.output
        # Capture: nothing runs on the GPU while a graph is captured, so it is replayed right after, for this step's
        # results.
        trees = {source: tree_map(_writable, tree) for source, tree in trees.items()}
        graph = self._memory.new_graph()
        generators: dict[int, torch.Generator] = {}
        on_host = _host_generators()
        failed = False
        try:
            for layer in seeds:
                generators[layer] = torch.Generator(device="cuda")
                graph.register_generator_state(generators[layer])
            self._generators = generators
            with self._capturing(graph, slot.lane):
                output = compute(trees)
                if _host_generators() != on_host:
                    raise TrainingError("it draws random numbers on the host")
            self._generators = None
            for layer, seed in seeds.items():
                generators[layer].manual_seed(seed)
            graph.replay()
            if seeds and not _draws_same_numbers(slot, output, lambda: compute(trees)):
                raise TrainingError("it draws other random numbers in a graph")
        except Exception as error:
            self._refuse(slot, error)
            failed = True
        finally:
            self._generators = None
        if failed:
            gc.collect()  # torch 2.11's checkpoint keeps its hooks until its frames are freed, which the error held
            return trees, compute(trees)
        self._slots[slot.number] = _Slot(graph, compute, trees, output, generators)
        return trees, SlotOutput(output.pieces, tree_map(_detached, output.outputs))

    def backward(
        self,
        slot: RankSlot,
        first: int,
        gradients: list[torch.Tensor | None],
        chunk: Callable[[], Chunk],
        *,
        is_last: bool,
    ) -> bool:
        """Run the backward pass of a chunk of a slot. Returns False where it has no graph.

        `gradients` are those of its outputs. Only the last chunk's come from other slots; those of the others are where
        the chunk after them left them. Gradients of its inputs and parameters are in their `grad` afterwards.
        """
        captured = self._slots.get(slot.number)
        if captured is None:
            return False
        if self.step_graph is not None:
            self._backward_in_step_graph(gradients, chunk())
            return True
        known = captured.backward.get(first)
        if known is None:
            if is_last:  # else the replay of the chunk after this one writes them
                gradients = [_writable(gradient) for gradient in gradients]
            known = self._capture_backward(slot, gradients, chunk())
            if known is None:
                self._abandon(slot, captured)
                return False
            if is_last:
                known.gradients = gradients
            captured.backward[first] = known
        elif is_last:
            _put_gradients(slot, known, gradients)
        self._replay(known)
        return True

    def backward_inputs(
        self,
        slot: RankSlot,
        first: int,
        gradients: list[torch.Tensor | None],
        run: Callable[[list[torch.Tensor | None]], list[WeightPart]],
        *,
        is_last: bool,
    ) -> bool:
        """Run the input gradients of a chunk, as `backward`. `run` computes them, given those of the outputs, and
        returns what computes the weight gradients."""
        captured = self._slots.get(slot.number)
        if captured is None:
            return False
        if self.step_graph is not None:
            captured.parts[first] = run(gradients)
            return True
        known = captured.backward.get(first)
        if known is None:
            if is_last:
                gradients = [_writable(gradient) for gradient in gradients]
            graph = self._memory.new_graph()
            try:
                with self._capturing(graph, slot.lane):
                    captured.parts[first] = run(gradients)
            except Exception as error:
                self._refuse(slot, error)
            else:
                known = captured.backward[first] = _Backward(graph, gradients if is_last else [], [])
            if known is None:
                self._abandon(slot, captured)
                return False
        elif is_last:
            _put_gradients(slot, known, gradients)
        self._replay(known)
        return True

    def backward_weights(self, slot: RankSlot, first: int, parameters: list[nn.Parameter]) -> list[WeightPart] | None:
        """Run the weight gradients of a chunk, on the current stream. Where that failed, returns what is left to run
        eagerly."""
        captured = self._slots[slot.number]
        if self.step_graph is not None:
            written, places = self._weight_gradients(captured.parts[first], parameters)
            self._note_written(written, places)
            self.first_written += [parameter for parameter, is_first in written if is_first]
            return None
        known = captured.weights.get(first)
        if known is None:
            graph = self._memory.new_graph()
            try:
                # Autograd launches on the stream of the forward; nothing runs until the replay.
                with _on_lane(slot.lane), self._capturing(graph, slot.weight_lane):
                    written, places = self._weight_gradients(captured.parts[first], parameters)
            except Exception as error:
                self._refuse(slot, error)
                self.is_invalid = True
            else:
                self._note_written(written, places)
                known = captured.weights[first] = _Backward(graph, [], written)
            if known is None:
                return captured.parts[first]
        self._replay(known)
        return None

    def has_weights(self, slot: RankSlot, first: int) -> bool:
        """Whether the weight gradients of a chunk belong to graphs, because its input gradients do."""
        captured = self._slots.get(slot.number)
        return captured is not None and (first in captured.parts or first in captured.weights)

    def _weight_gradients(
        self, parts: Sequence[WeightPart], parameters: list[nn.Parameter]
    ) -> tuple[list[tuple[nn.Parameter, bool]], Places]:
        """Compute the weight gradients of a chunk in their places. Returns which parameters have one, as
        `_differentiate`, and the places."""
        places = self._places_of(parameters)
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for part in reversed(parts):
            for number, gradient in enumerate(part.gradients(parameters)):
                total = sums[number]
                sums[number] = gradient if total is None or gradient is None else total + gradient
                if gradient is None:
                    sums[number] = total
        others = [gradient for part in parts for gradient in part.sources]
        return self._write(parameters, sums, others, places), places

    def _replay(self, known: _Backward) -> None:
        if known.graph is not None:
            self._launch(known.graph)
        if self._region is not None:
            self._region_gradients.append(known)  # which are not written yet
        else:
            self._set_gradients(known)

    def _launch(self, graph: torch.cuda.CUDAGraph) -> None:
        if self._region is not None:
            self._region.add_graph(self._position, graph)
        else:
            graph.replay()

    @contextmanager
    def collected(self, region: Region, position: int) -> Iterator[None]:
        """Inside, the pass of an instruction is not launched, but added to a region."""
        self._region, self._position = region, position
        try:
            yield
        finally:
            self._region = None

    def replay_region(self, region: Region) -> bool:
        """Launch the passes that were added. Returns whether gradients are added behind them."""
        region.replay()
        if region.failure is not None:
            self.refused["regions of several slots"] = region.failure
        have_more = [self._set_gradients(known) for known in self._region_gradients]
        self._region_gradients.clear()
        return any(have_more)

    def regions_of(
        self,
        positions: Sequence[int],
        instructions: Sequence[Instruction],
        slots: Mapping[int, RankSlot],
        lanes: Lanes,
    ) -> list[Region]:
        """All passes of a step in the order of the host, cut into regions once they are captured."""
        if not self.is_complete or self.step_graph is not None:
            return [Region.of_one(position) for position in positions]

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
        """Whether nothing but its graph is launched in a pass, or nothing that needs other passes of the step: what it
        reads is where they leave it."""
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
        """Whether a slot reads the output of another where that one has left it."""
        producer = self._slots.get(link.producer)
        if producer is None or not link.is_whole or link.items:
            return False
        return _addresses(producer.output.outputs) == _addresses(self._slots[slot.number].trees[link.source])

    def _is_gradient_in_place(self, slot: RankSlot, link: LinkEnd, first: int) -> bool:
        """Whether a slot reads the gradient of its output where the consumer has left it."""
        consumer = self._slots.get(link.consumer)
        if consumer is None or not link.is_whole or link.items:
            return False
        leaves = leaves_of(consumer.trees[link.source])
        gradients = [leaf.grad if takes_gradient(leaf) else None for leaf in leaves]
        return _addresses(gradients) == _addresses(self._slots[slot.number].backward[first].gradients)

    def _set_gradients(self, known: _Backward) -> bool:
        """Set the gradients that a pass has written. Returns whether others are added to them."""
        has_more = False
        for parameter, is_first in known.written:
            place = self.gradients.place(parameter)
            if is_first and parameter.grad is not None and parameter.grad.data_ptr() != place.data_ptr():
                place += parameter.grad  # from a slot that ran eagerly, or copied before this micro-step
                has_more = True
                if place.is_cuda:
                    release_behind_current_stream(parameter.grad)
            parameter.grad = place
        return has_more

    def _abandon(self, slot: RankSlot, captured: _Slot) -> None:
        """Go on eagerly with a slot whose backward could not be captured."""
        # The attempt has freed the autograd graph, so run forward again. Other graphs may have been captured in memory
        # that this one would have left free.
        gc.collect()  # as in `forward`
        self.is_invalid = True
        assert captured.compute is not None
        with _buffers_restored(slot):
            captured.output.pieces[:] = captured.compute(captured.trees).pieces
        del self._slots[slot.number]

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, lane: int) -> Iterator[None]:
        """Capture the current stream with memory of a lane."""
        pool = self._memory.of_lane(lane)
        with own_workspaces() if self._memory.has_weight_lanes else nullcontext(), capturing(graph, pool):
            yield

    def _capture_backward(
        self,
        slot: RankSlot,
        gradients: list[torch.Tensor | None],
        chunk: Chunk,
    ) -> _Backward | None:
        graph = self._memory.new_graph()
        pairs = _gradient_pairs(chunk, gradients)
        if not (pairs and (chunk.inputs or chunk.parameters)):
            return _Backward(None, [], [])
        try:
            places = self._places_of(chunk.parameters)
            with self._capturing(graph, slot.lane):
                of_inputs, written = self._differentiate(chunk, pairs, places)
        except Exception as error:
            self._refuse(slot, error)
            return None
        self._take(chunk, of_inputs, written, places)
        return _Backward(graph, [], written)

    def _backward_in_step_graph(self, gradients: list[torch.Tensor | None], chunk: Chunk) -> None:
        pairs = _gradient_pairs(chunk, gradients)
        if pairs and (chunk.inputs or chunk.parameters):
            places = self._places_of(chunk.parameters)
            of_inputs, written = self._differentiate(chunk, pairs, places)
            self._take(chunk, of_inputs, written, places)
            self.first_written += [parameter for parameter, is_first in written if is_first]

    def _places_of(self, parameters: Sequence[nn.Parameter]) -> Places:
        """Where the gradients of a chunk's parameters go. One that only this chunk writes may stay in the graph's
        memory, without a copy. Others have a place in a reduction buffer, or are summed over several chunks."""
        return {
            id(parameter): None
            if self.gradients.is_free(parameter) and id(parameter) not in self._written
            else self.gradients.place(parameter)
            for parameter in parameters
        }

    def _differentiate(
        self, chunk: Chunk, pairs: list[tuple[Any, torch.Tensor]], places: Places
    ) -> tuple[Sequence[torch.Tensor | None], list[tuple[nn.Parameter, bool]]]:
        """Compute gradients, those of parameters in their places. Returns those of inputs, and which parameters have
        one, each with whether it is the first that is written."""
        computed: Sequence[torch.Tensor | None] = torch.autograd.grad(
            [leaf for leaf, _ in pairs],
            [*chunk.inputs, *chunk.parameters],
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
        of_inputs, of_parameters = computed[: len(chunk.inputs)], computed[len(chunk.inputs) :]
        others = [*of_inputs, *(gradient for _, gradient in pairs)]
        return of_inputs, self._write(chunk.parameters, of_parameters, others, places)

    def _write(
        self,
        parameters: Sequence[nn.Parameter],
        computed: Sequence[torch.Tensor | None],
        others: Sequence[torch.Tensor | None],
        places: Places,
    ) -> list[tuple[nn.Parameter, bool]]:
        """Write the gradients of parameters to their places; `others` are in use beside them."""
        written = []
        # Autograd may return one tensor for several gradients, or an output's gradient unchanged. Such memory has
        # another owner, so it is copied.
        storages = Counter(_storage(tensor) for tensor in [*computed, *others])
        for parameter, gradient in zip(parameters, computed, strict=True):
            if gradient is None:
                continue
            is_first, place = id(parameter) not in self._written, places[id(parameter)]
            if place is None and storages[_storage(gradient)] == 1 and _is_shaped_like(gradient, parameter):
                places[id(parameter)] = gradient
            elif place is None:
                places[id(parameter)] = torch.empty_like(parameter).copy_(gradient)
            else:
                place.copy_(gradient) if is_first else place.add_(gradient)
            written.append((parameter, is_first))
        return written

    def _take(
        self,
        chunk: Chunk,
        of_inputs: Sequence[torch.Tensor | None],
        written: list[tuple[nn.Parameter, bool]],
        places: Places,
    ) -> None:
        self._note_written(written, places)
        for leaf, gradient in zip(chunk.inputs, of_inputs, strict=True):
            leaf.grad = gradient

    def _note_written(self, written: list[tuple[nn.Parameter, bool]], places: Places) -> None:
        for parameter, _ in written:
            self.gradients.take(parameter, places[id(parameter)])
        self._written.update(id(parameter) for parameter, _ in written)

    def capture_step(self, step_graph: StepGraph, run: Callable[[Watch], Step], lanes: Lanes) -> Failure | None:
        """Capture all slots of a step as one graph. Returns why that failed."""
        on_host = _host_generators()
        self.step_graph, self.first_written = step_graph, []

        def checked(watch: Watch) -> Step:
            captured = run(watch)
            if _host_generators() != on_host:
                raise TrainingError("it draws random numbers on the host")
            return captured

        try:
            if lanes.has_weight_lanes:
                step_graph.compose(checked, lambda graph: lanes.recording(partial(self._captured_child, graph)))
            else:
                step_graph.capture(checked, lambda graph: self._capturing(graph, 0))
        except Exception as error:  # not kept: its frames hold the tensors of the capture
            return _failure(error)
        return None

    @contextmanager
    def _captured_child(self, whole: ComposedGraph, number: int, lane: int, needs: frozenset[int]) -> Iterator[None]:
        """Capture an instruction as a child graph, with memory of its lane. Which ones run at the same time follows
        from what they need, not from the streams on which they are captured."""
        child = torch.cuda.CUDAGraph(keep_graph=True)
        with self._capturing(child, lane):
            yield
        whole.add(number, child, needs)

    def finish(self) -> None:
        """End the capturing step: free its autograd graphs."""
        for slot in self._slots.values():
            slot.parts.clear()
            slot.output, slot.compute = SlotOutput([], tree_map(_detached, slot.output.outputs)), None
        self.is_complete = True

    def _refuse(self, slot: RankSlot, error: Exception) -> None:
        # What was captured before is in another pool than what follows. Where memory does not suffice for two pools, a
        # later step with these shapes is captured anew, without this slot.
        self.is_invalid |= _is_memory_half_used()
        self._memory.renew()
        failure = _failure(error)
        if failure.is_out_of_memory:
            self.ran_out_of_memory = self.is_invalid = True
            self._evict()
            return
        self.refused[slot.name] = f"capturing it failed: {failure.reason}"


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, draws_from: torch.Generator | None = None) -> Iterator[None]:
    """Capture the current stream, which is not the default one, into a graph with memory from this pool.

    A failed capture leaves its registered generators unusable, so torch's default generator takes no part in it: random
    numbers are drawn from another generator, which the graph knows, or drawing them ends the capture.
    """
    collects = gc.isenabled()
    gc.disable()  # freeing memory of another graph would end the capture
    generator, unknown = _generator(), torch.Generator(device="cuda")
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(draws_from or torch.Generator(device="cuda"))  # registered by capture_begin
    try:
        # Other threads (transfers) use the GPU meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        if draws_from is None:
            generator.graphsafe_set_state(unknown)
        try:
            yield
        finally:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a layer may do nothing but views
                    graph.capture_end()
            except Exception:
                # Without this, torch's allocator stays in capture mode and defers frees of other streams' memory.
                device = torch.cuda.current_device()
                for end in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                    with suppress(Exception):
                        getattr(torch._C, end)(device, pool)
                raise
    finally:
        generator.graphsafe_set_state(state)
        if collects:
            gc.enable()


@contextmanager
def own_workspaces() -> Iterator[None]:
    """Inside, cuBLAS allocates its workspaces anew, in the memory of the graph that is captured."""
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def _on_lane(lane: int) -> Iterator[None]:
    """Inside, the current stream is that of a lane."""
    if not torch.cuda.is_available():
        yield
        return
    with torch.cuda.stream(lane_stream(lane)):
        yield


def _put_gradients(slot: RankSlot, known: _Backward, gradients: Sequence[torch.Tensor | None]) -> None:
    """Copy the gradients of a slot's outputs to where its backward reads them."""
    for place, gradient in zip(known.gradients, gradients, strict=True):
        if (place is None) != (gradient is None):
            raise TrainingError(
                f"{slot.name} got gradients for other outputs than when it was captured in a CUDA graph; "
                "train with spindle.Trainer(cuda_graphs=False)"
            )
        _put(place, gradient)


def _draws_same_numbers(slot: RankSlot, output: SlotOutput, compute: Callable[[], SlotOutput]) -> bool:
    """Whether a slot computes eagerly what its graph computed: other random numbers change the output far more than
    rounding does. Its buffers (running statistics) stay as the graph left them."""
    with torch.no_grad(), _buffers_restored(slot):
        eager = compute().outputs
        return all(
            float((replayed - expected).norm()) <= _ROUNDING * max(float(expected.norm()), 1e-6)
            for replayed, expected in zip(tree_leaves(output.outputs), tree_leaves(eager), strict=True)
            if isinstance(replayed, torch.Tensor) and replayed.is_floating_point()
        )


def _is_memory_half_used() -> bool:
    """Whether this process has reserved more than half of the memory that it may use."""
    if not torch.cuda.is_available():
        return False
    device = torch.cuda.current_device()
    limit = torch.cuda.mem_get_info()[1] * torch.cuda.get_per_process_memory_fraction(device)
    return torch.cuda.memory_reserved(device) > 0.5 * limit


@contextmanager
def _buffers_restored(slot: RankSlot) -> Iterator[None]:
    """Restore a slot's buffers afterwards: it has run in this step before."""
    code = slot.code
    buffers = [] if isinstance(code, LossCode) else [buffer for layer in code.layers for buffer in layer.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)  # without a version bump


def _put(place: Any, value: Any) -> Any:
    """Copy values into the tensors of a pytree, unless they are there already."""
    with torch.no_grad():
        for old, new in zip(tree_leaves(place), tree_leaves(value), strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.detach().copy_(new, non_blocking=True)
    return place


def _writable(leaf: Any) -> Any:
    """A leaf, or a copy of one whose elements overlap in memory, which cannot be written to."""
    if not isinstance(leaf, torch.Tensor) or 0 not in leaf.stride():
        return leaf
    return leaf.detach().clone(memory_format=torch.contiguous_format).requires_grad_(leaf.requires_grad)


def _gradient_pairs(chunk: Chunk, gradients: list[torch.Tensor | None]) -> list[tuple[Any, torch.Tensor]]:
    """The outputs of a chunk at which its backward begins, with their gradients."""
    return [
        (leaf, gradient)
        for leaf, gradient in zip(chunk.outputs, gradients, strict=True)
        if gradient is not None and takes_gradient(leaf)
    ]


def _addresses(tree: Any) -> list[int | None]:
    return [leaf.data_ptr() if isinstance(leaf, torch.Tensor) else None for leaf in leaves_of(tree)]


def _storage(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.untyped_storage().data_ptr()


def _is_shaped_like(gradient: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Whether a gradient can be a parameter's `grad` as it is: it fills its storage, with the parameter's strides."""
    num_bytes = gradient.numel() * gradient.element_size()
    return gradient.stride() == parameter.stride() and gradient.untyped_storage().nbytes() == num_bytes


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _generator() -> torch.Generator:
    """Torch's default generator of this device."""
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _host_generators() -> tuple[Any, ...]:
    """The states of host generators, from which a replay does not draw."""
    return bytes(torch.get_rng_state().numpy()), random.getstate(), pickle.dumps(numpy.random.get_state())


def _is_hooked(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
