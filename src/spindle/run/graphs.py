"""Slots as CUDA graphs: one graph for a slot's forward pass, and one for the backward pass of each of its chunks.

A step is captured as it runs: each piece of compute is recorded, then replayed at once, so that transfers between
pieces proceed as usual. The graphs of a lane allocate from one memory pool, in the order of the rank's program. Later
steps replay them in the same order, so later pieces may reuse the memory of earlier ones. Inputs, outputs and
gradients keep their addresses.

Eager steps and captures run on the stream of a slot's lane, not on the default stream, because autograd accumulates a
parameter's gradient on the stream of its first use. Weight gradients that have a lane of their own are a graph that is
captured on the stream of the slot and replayed on the stream of their lane. It allocates from the pool of that lane,
and everything it reads is kept until the capture of the step is complete, so that no other graph gets this memory.
cuBLAS keeps one workspace per stream, to which both lanes would write at once; in such a plan each graph has its own.

Each layer that draws random numbers has a generator that is registered with its graph. It is seeded before each replay
as torch's default generator is before the layer in an eager step: the same numbers.

A piece that cannot be captured (it synchronizes with the GPU, draws random numbers on the host, communicates with other
ranks) runs eagerly. If all pieces can be captured, and the rank communicates with no other, one graph runs the whole
step (`step_graph`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from spindle.errors import TrainingError
from spindle.models import clone_leaf
from spindle.program import Instruction
from spindle.run.backward_split import WeightPart
from spindle.run.captured_slot import (
    CapturedBackward,
    CapturedSlot,
    Chunk,
    Failure,
    InputsByCall,
    SlotOutput,
    buffers_restored,
    copy_gradients,
    copy_into,
    detached_leaf,
    draws_same_numbers,
    failure_of,
    gradient_pairs,
    host_generators,
    is_hooked,
    writable,
)
from spindle.run.composed_graph import ComposedGraph
from spindle.run.gradients import Gradients
from spindle.run.graph_gradients import GraphGradients
from spindle.run.graph_memory import GraphMemory, default_generator, is_memory_half_used
from spindle.run.graph_regions import GraphRegions
from spindle.run.lanes import Lanes, lane_stream
from spindle.run.op_code import LossCode
from spindle.run.rank_program import RankSlot
from spindle.run.regions import Region
from spindle.run.step import Step, StepTimer
from spindle.run.step_graph import StepGraph

RANDOM_LAYERS = True  # whether layers that draw random numbers are captured


class Graphs:
    """The captured slots of one rank, for batches with one set of shapes."""

    def __init__(
        self,
        gradients: Gradients,
        batches: Mapping[str, Any],
        refused: dict[str, str],
        memory: GraphMemory,
        evict: Callable[[], None],
    ) -> None:
        """`evict()` drops all other sets of graphs when memory runs out."""
        self.refused = refused  # by slot: why it runs without a graph
        self.step_graph: StepGraph | None = None  # the graph of all slots, if there is one
        self.is_invalid = False  # whether these graphs must not be replayed
        self.num_steps = 0  # how many steps have replayed them
        self.ran_out_of_memory = False
        self._memory, self._evict = memory, evict
        self._generators: dict[int, torch.Generator] | None = None  # by layer of the slot that is being captured
        self._batches = {task: tree_map(clone_leaf, tree) for task, tree in batches.items()}
        self._slots: dict[int, CapturedSlot] = {}
        self._gradients = GraphGradients(gradients)
        self.regions = GraphRegions(self._slots, self._gradients, refused)
        self.first_written: list[nn.Parameter] = []  # parameters whose gradients the step's graph writes
        self.is_complete = False  # whether the capturing step is finished
        gc.collect()  # so that memory of earlier steps is free for the pool
        torch.cuda.empty_cache()

    def batches(self, batches: Mapping[str, Any]) -> Mapping[str, Any]:
        """Copy batches to the memory from which the graphs read."""
        return {task: copy_into(self._batches[task], tree) for task, tree in batches.items()}

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def has(self, slot: RankSlot) -> bool:
        """Whether a slot runs as a graph, or will be captured in this step."""
        return slot.number in self._slots or (not self.is_complete and self.is_capturable(slot))

    def is_capturable(self, slot: RankSlot) -> bool:
        """Whether nothing that is known about a slot forbids capturing it."""
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
                elif any(is_hooked(parameter) for layer in code.layers for parameter in layer.parameters):
                    reason = "a parameter has a hook"
        if reason is not None:
            self.refused[slot.name] = reason
        return slot.name not in self.refused

    def use_generator_of(self, layer: int) -> bool:
        """Let a random layer draw from a generator of its own, if its slot is being captured. Returns whether it
        is."""
        if self._generators is None:
            return False
        default_generator().graphsafe_set_state(self._generators[layer])
        return True

    def forward(
        self,
        slot: RankSlot,
        inputs: InputsByCall,
        compute: Callable[[InputsByCall], SlotOutput],
        seeds: Mapping[int, int],
    ) -> tuple[InputsByCall, SlotOutput]:
        """Run a slot's forward pass. Returns the inputs that will get gradients, and the results. `seeds` are those of
        its random layers in this step."""
        # Part of the graph of the whole step: nothing is replayed, or kept for a replay.
        if self.step_graph is not None:
            output = compute(inputs)
            self._slots[slot.number] = CapturedSlot(None, None, {}, SlotOutput(output.pieces, None), {})
            return inputs, SlotOutput(output.pieces, tree_map(detached_leaf, output.outputs))
        # Replay: copy inputs to where the graph reads them, seed the generators, launch. Outputs keep their addresses.
        captured = self._slots.get(slot.number)
        if captured is not None:
            assert captured.forward is not None
            for source, tree in inputs.items():
                copy_into(captured.inputs[source], tree)
            for layer, seed in seeds.items():
                captured.generators[layer].manual_seed(seed)
            self.regions.launch(captured.forward)
            return captured.inputs, captured.output
        # Capture. Nothing runs on the GPU meanwhile, so replay the graph right away to get this step's results.
        inputs = {source: tree_map(writable, tree) for source, tree in inputs.items()}
        graph = self._memory.new_graph()
        generators: dict[int, torch.Generator] = {}
        host_states = host_generators()
        failed = False
        try:
            for layer in seeds:
                generators[layer] = torch.Generator(device="cuda")
                graph.register_generator_state(generators[layer])
            self._generators = generators
            with self._memory.capturing(graph, slot.lane):
                output = compute(inputs)
                if host_generators() != host_states:
                    raise TrainingError("it draws random numbers on the host")
            self._generators = None
            for layer, seed in seeds.items():
                generators[layer].manual_seed(seed)
            graph.replay()
            if seeds and not draws_same_numbers(slot, output, lambda: compute(inputs)):
                raise TrainingError("it draws other random numbers in a graph")
        except Exception as error:
            self._refuse_slot(slot, error)
            failed = True
        finally:
            self._generators = None
        if failed:
            # Torch 2.11's checkpoint keeps its hooks until its frames are freed, and the error has kept these.
            gc.collect()
            return inputs, compute(inputs)
        self._slots[slot.number] = CapturedSlot(graph, compute, inputs, output, generators)
        return inputs, SlotOutput(output.pieces, tree_map(detached_leaf, output.outputs))

    def backward(
        self,
        slot: RankSlot,
        first: int,
        gradients: list[torch.Tensor | None],
        chunk: Callable[[], Chunk],
        *,
        is_last: bool,
    ) -> bool:
        """Run the backward pass of a chunk of a slot. Returns False if it has no graph.

        `gradients` are those of its outputs. Only those of the last chunk come from other slots; those of other chunks
        are where the chunk after them has left them. Afterwards, `grad` of its inputs and parameters has their
        gradients.
        """
        captured = self._slots.get(slot.number)
        if captured is None:
            return False
        if self.step_graph is not None:
            self._backward_in_step_graph(gradients, chunk())
            return True
        backward = captured.backward.get(first)
        if backward is None:
            if is_last:  # otherwise the replay of the chunk after this one writes them
                gradients = [writable(gradient) for gradient in gradients]
            backward = self._capture_backward(slot, gradients, chunk())
            if backward is None:
                self._fall_back_to_eager(slot, captured)
                return False
            if is_last:
                backward.gradients = gradients
            captured.backward[first] = backward
        elif is_last:
            copy_gradients(slot, backward, gradients)
        self.regions.replay(backward)
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
        """Run the input gradients of a chunk, like `backward`. `run` computes them from the gradients of the outputs,
        and returns the parts that compute the weight gradients."""
        captured = self._slots.get(slot.number)
        if captured is None:
            return False
        if self.step_graph is not None:
            captured.parts[first] = run(gradients)
            return True
        backward = captured.backward.get(first)
        if backward is None:
            if is_last:
                gradients = [writable(gradient) for gradient in gradients]
            graph = self._memory.new_graph()
            try:
                with self._memory.capturing(graph, slot.lane):
                    captured.parts[first] = run(gradients)
            except Exception as error:
                self._refuse_slot(slot, error)
            else:
                backward = captured.backward[first] = CapturedBackward(graph, gradients if is_last else [], [])
            if backward is None:
                self._fall_back_to_eager(slot, captured)
                return False
        elif is_last:
            copy_gradients(slot, backward, gradients)
        self.regions.replay(backward)
        return True

    def backward_weights(self, slot: RankSlot, first: int, parameters: list[nn.Parameter]) -> list[WeightPart] | None:
        """Run the weight gradients of a chunk on the current stream. If that fails, returns the parts that are left to
        run eagerly."""
        captured = self._slots[slot.number]
        if self.step_graph is not None:
            written, buffers = self._gradients.write_weight_gradients(captured.parts[first], parameters)
            self._gradients.attach_parameters(written, buffers)
            self.first_written += [parameter for parameter, is_first in written if is_first]
            return None
        backward = captured.weights.get(first)
        if backward is None:
            graph = self._memory.new_graph()
            try:
                # Autograd launches on the stream of the forward; nothing runs until the replay.
                with _on_lane(slot.lane), self._memory.capturing(graph, slot.weight_lane):
                    written, buffers = self._gradients.write_weight_gradients(captured.parts[first], parameters)
            except Exception as error:
                self._refuse_slot(slot, error)
                self.is_invalid = True
            else:
                self._gradients.attach_parameters(written, buffers)
                backward = captured.weights[first] = CapturedBackward(graph, [], written)
            if backward is None:
                return captured.parts[first]
        self.regions.replay(backward)
        return None

    def has_weight_gradients(self, slot: RankSlot, first: int) -> bool:
        """Whether the weight gradients of a chunk run as a graph; they must if its input gradients do."""
        captured = self._slots.get(slot.number)
        return captured is not None and (first in captured.parts or first in captured.weights)

    def _fall_back_to_eager(self, slot: RankSlot, captured: CapturedSlot) -> None:
        """Continue eagerly with a slot whose backward could not be captured."""
        # The attempt has freed the autograd graph, so run forward again. Other graphs may have been captured in memory
        # that this one would otherwise have occupied.
        gc.collect()  # as in `forward`
        self.is_invalid = True
        assert captured.compute is not None
        with buffers_restored(slot):
            captured.output.pieces[:] = captured.compute(captured.inputs).pieces
        del self._slots[slot.number]

    def _capture_backward(
        self,
        slot: RankSlot,
        gradients: list[torch.Tensor | None],
        chunk: Chunk,
    ) -> CapturedBackward | None:
        graph = self._memory.new_graph()
        pairs = gradient_pairs(chunk, gradients)
        if not (pairs and (chunk.inputs or chunk.parameters)):
            return CapturedBackward(None, [], [])
        try:
            buffers = self._gradients.grad_buffers(chunk.parameters)
            with self._memory.capturing(graph, slot.lane):
                of_inputs, written = self._gradients.differentiate(chunk, pairs, buffers)
        except Exception as error:
            self._refuse_slot(slot, error)
            return None
        self._gradients.attach(chunk, of_inputs, written, buffers)
        return CapturedBackward(graph, [], written)

    def _backward_in_step_graph(self, gradients: list[torch.Tensor | None], chunk: Chunk) -> None:
        pairs = gradient_pairs(chunk, gradients)
        if pairs and (chunk.inputs or chunk.parameters):
            buffers = self._gradients.grad_buffers(chunk.parameters)
            of_inputs, written = self._gradients.differentiate(chunk, pairs, buffers)
            self._gradients.attach(chunk, of_inputs, written, buffers)
            self.first_written += [parameter for parameter, is_first in written if is_first]

    def regions_of(
        self,
        positions: Sequence[int],
        instructions: Sequence[Instruction],
        slots: Mapping[int, RankSlot],
        lanes: Lanes,
    ) -> list[Region]:
        """All passes of a step in host order, cut into regions once they are captured."""
        if not self.is_complete or self.step_graph is not None:
            return [Region.of_one(position) for position in positions]
        return self.regions.regions_of(positions, instructions, slots, lanes)

    def capture_step(self, step_graph: StepGraph, run: Callable[[StepTimer], Step], lanes: Lanes) -> Failure | None:
        """Capture all slots of a step as one graph. Returns why that failed."""
        host_states = host_generators()
        self.step_graph, self.first_written = step_graph, []

        def run_checked(timer: StepTimer) -> Step:
            captured = run(timer)
            if host_generators() != host_states:
                raise TrainingError("it draws random numbers on the host")
            return captured

        try:
            if lanes.has_weight_lanes:
                step_graph.compose(run_checked, lambda graph: lanes.recording(partial(self._captured_child, graph)))
            else:
                step_graph.capture(run_checked, lambda graph: self._memory.capturing(graph, 0))
        except Exception as error:  # do not keep the error: its frames hold the tensors of the capture
            return failure_of(error)
        return None

    @contextmanager
    def _captured_child(self, whole: ComposedGraph, number: int, lane: int, needs: frozenset[int]) -> Iterator[None]:
        """Capture an instruction as a child graph, with memory of its lane. Which children run at the same time follows
        from what they need, not from the streams on which they were captured."""
        child = torch.cuda.CUDAGraph(keep_graph=True)
        with self._memory.capturing(child, lane):
            yield
        whole.add(number, child, needs)

    def finish(self) -> None:
        """End the capturing step: free its autograd graphs."""
        for slot in self._slots.values():
            slot.parts.clear()
            slot.output, slot.compute = SlotOutput([], tree_map(detached_leaf, slot.output.outputs)), None
        self.is_complete = True

    def _refuse_slot(self, slot: RankSlot, error: Exception) -> None:
        # What is captured from here on needs a second pool. If memory may not suffice for two, the step is captured
        # again later, without this slot.
        self.is_invalid |= is_memory_half_used()
        self._memory.renew()
        failure = failure_of(error)
        if failure.is_out_of_memory:
            self.ran_out_of_memory = self.is_invalid = True
            self._evict()
            return
        self.refused[slot.name] = f"capturing it failed: {failure.reason}"


@contextmanager
def _on_lane(lane: int) -> Iterator[None]:
    """A context in which the current stream is that of a lane."""
    if not torch.cuda.is_available():
        yield
        return
    with torch.cuda.stream(lane_stream(lane)):
        yield
