"""Which steps run as CUDA graphs: sets of them, cached by the shapes of the batches that they were captured for."""

from __future__ import annotations

import gc
from collections import Counter
from functools import partial

import torch

from spindle.run.captured_slot import Failure
from spindle.run.gradients import Gradients
from spindle.run.graph_memory import GraphMemory
from spindle.run.graphs import Graphs
from spindle.run.op_code import LayersCode
from spindle.run.rank_program import RankProgram
from spindle.run.step import Step

STEP_GRAPHS = True  # capture whole steps as one graph, if possible
REGIONS = True  # launch passes between messages together, if there are several lanes
_WARM_UP_STEPS = 2  # eager steps before a capture, in which libraries choose their kernels
_MAX_SETS = 64  # sets of graphs, each for one choice of tasks and shapes of their batches
_MAX_SHAPES = 10_000  # choices of tasks and shapes whose steps are counted
# Replays that pay for a capture, and evictions before so many replays after which eviction stops.
_AMORTIZED_STEPS, _MAX_WASTED = 8, 8
Shapes = frozenset[tuple[str, int]]  # signatures of batches, by task


class GraphCache:
    """The sets of CUDA graphs of one rank. The least recently used sets are evicted first."""

    def __init__(
        self,
        rank_program: RankProgram,
        gradients: Gradients,
        *,
        is_enabled: bool,
        communicates: bool = True,
        num_lanes: int = 1,
        has_weight_lanes: bool = False,
    ) -> None:
        """`communicates`: whether other ranks take part in steps."""
        self.is_enabled = is_enabled
        self._makes_step_graphs = STEP_GRAPHS and not communicates
        # Why each slot has a graph of its own, after one for the whole step was tried.
        self.step_graph_refused: str | None = None
        self.peak_bytes = 0  # bytes that this rank held when steps were captured, because a replay allocates nothing
        self.refused: dict[str, str] = {}  # by slot: why it runs without a graph
        self._rank_program, self._gradients = rank_program, gradients
        self._sets: dict[Shapes, Graphs] = {}  # most recently used last
        self._memory = GraphMemory(num_lanes, has_weight_lanes=has_weight_lanes)
        self._max_sets = _MAX_SETS  # lowered when memory runs out
        self._num_steps: Counter[Shapes] = Counter()
        self._num_wasted = 0  # how many sets were evicted before they had paid off
        # Addresses of parameters and buffers, by slot.
        self._addresses: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    @property
    def num_captured(self) -> int:
        """How many slots run as CUDA graphs."""
        return max((graphs.num_slots for graphs in self._sets.values()), default=0)

    @property
    def has_step_graph(self) -> bool:
        return any(graphs.step_graph is not None for graphs in self._sets.values())

    @property
    def region_sizes(self) -> list[int]:
        """For each region of a step: how many passes are launched together as one graph."""
        return max((graphs.regions.region_sizes for graphs in self._sets.values()), default=[])

    def use(self, step: Step) -> None:
        """Let a step replay the graphs for its shapes. After some warm-up steps on batches of the same shapes, capture
        them in this step."""
        if not self.is_enabled or step.check_losses:
            return
        tasks = {slot.task for slot in self._rank_program.slots.values() if slot.task in step.signatures}
        shapes = frozenset((task, step.signatures[task]) for task in tasks)
        self._check_addresses()
        if shapes in self._sets:
            self._sets[shapes] = self._sets.pop(shapes)
            self._sets[shapes].num_steps += 1
        else:
            if len(self._num_steps) > _MAX_SHAPES:
                self._num_steps.clear()
            self._num_steps[shapes] += 1
            if self._num_steps[shapes] > _WARM_UP_STEPS and self._max_sets > 0:
                self._begin_capture(step, shapes)
        step.graphs = self._sets.get(shapes)
        if step.graphs is not None:
            step.batches = step.graphs.batches(step.batches)

    def can_capture_step(self, step: Step) -> bool:
        """Whether a step that is about to be captured may become one graph. Layers that draw random numbers are
        compared with an eager run when they are captured, which requires a graph per slot."""
        if step.graphs is None or step.graphs.is_complete or not self._makes_step_graphs:
            return False
        slots = [slot for slot in self._rank_program.slots.values() if slot.task in step.signatures]
        return all(step.graphs.is_capturable(slot) and not slot.code.is_random for slot in slots)

    def refuse_step_graph(self, step: Step, failure: Failure) -> None:
        """Run this step eagerly, and capture slot by slot from now on, because capturing it as one graph has failed.

        If memory ran out, hold fewer sets of graphs instead. All graphs are dropped, because gradients may be in memory
        of the failed capture.
        """
        num_others = len(self._sets) - 1
        step.graphs = None
        if failure.is_out_of_memory and num_others > 0:
            self._limit_sets(num_others)
        else:
            self._makes_step_graphs, self.step_graph_refused = False, failure.reason
            num_steps = self._num_steps.copy()  # libraries have chosen their kernels by now
            self.drop()
            self._num_steps = num_steps
        gc.collect()
        torch.cuda.synchronize()

    def finish(self, step: Step, num_sets: int) -> None:
        """End the capture of a step, before which there were `num_sets` sets."""
        if step.graphs is None or step.graphs.is_complete:
            return
        step.graphs.finish()
        if torch.cuda.is_available():
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())
        if step.graphs.ran_out_of_memory:
            self._limit_sets(num_sets - 1)
        elif step.graphs.is_invalid:
            self.drop()

    def __len__(self) -> int:
        return len(self._sets)

    def _begin_capture(self, step: Step, shapes: Shapes) -> None:
        """Begin a new set, after evicting the least recently used ones if the cache is full.

        If sets are often evicted before they have paid off, there are more shapes than the cache can hold; then nothing
        is evicted any more.
        """
        while len(self._sets) >= self._max_sets:
            oldest = next(iter(self._sets))
            self._num_wasted += self._sets[oldest].num_steps < _AMORTIZED_STEPS
            if self._num_wasted > _MAX_WASTED:
                return
            del self._sets[oldest]
            self._num_steps.pop(oldest, None)
        try:
            self._sets[shapes] = Graphs(
                self._gradients, step.batches, self.refused, self._memory, partial(self._evict_all_but, shapes)
            )
        except torch.OutOfMemoryError:
            self._limit_sets(len(self._sets))

    def _limit_sets(self, num_sets: int) -> None:
        """Hold at most this many sets from now on, because memory has run out."""
        self._max_sets = num_sets
        self.drop()
        if num_sets == 0:
            self.refused["every slot"] = "memory ran out while steps were captured"

    def _check_addresses(self) -> None:
        """Drop graphs if parameters or buffers have moved since they were captured. A slot that replaces its buffers in
        every step is refused."""
        for slot in self._rank_program.slots.values():
            if not isinstance(slot.code, LayersCode):
                continue
            layers = slot.code.layers[slot.chunks[0][0] : slot.chunks[-1][1]]
            weights = tuple(parameter.data_ptr() for layer in layers for parameter in layer.parameters)
            buffers = tuple(buffer.data_ptr() for layer in layers for buffer in layer.buffers())
            before = self._addresses.get(slot.number)
            self._addresses[slot.number] = (weights, buffers)
            if before is None or before == (weights, buffers) or slot.name in self.refused:
                continue
            if before[0] == weights:
                self.refused[slot.name] = "it replaces its buffers"
            self.drop()

    def replays_all_layers(self, step: Step) -> bool:
        """Whether all layers of a step are replayed, so that the same gradients exist in every such step."""
        layers = (
            slot
            for slot in self._rank_program.slots.values()
            if isinstance(slot.code, LayersCode) and slot.task in step.signatures
        )
        return (
            step.graphs is not None
            and step.graphs.is_complete
            and all(layer.name not in self.refused for layer in layers)
        )

    def _evict_all_but(self, shapes: Shapes) -> None:
        self._sets = {key: graphs for key, graphs in self._sets.items() if key == shapes}
        gc.collect()
        torch.cuda.empty_cache()

    def drop(self) -> None:
        """Drop all graphs and their memory."""
        self._sets.clear()
        self._gradients.drop_graph_memory()
        self._memory.release()
        self._num_steps.clear()
        self.peak_bytes = 0
