"""The second interpreter of a Program: runs one rank's instructions on `torch.distributed`.

Transfers are posted as soon as their data is there and waited for when it is needed; synchronisation runs behind the
backward that is still going on. The order of each lane is the program's, so what `verify` proved holds here. Under NCCL
transfers and collectives are launched in one order, the same on all ranks (`program.launch_order`).

Rows of a link are rows of the batch, because both ends of a task's flow have the same one. Left out
so far: lanes with quotas.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from spindle.graph import MetaGraph
from spindle.program import (
    Backward,
    Exchange,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    Program,
    SyncGradients,
)
from spindle.run.compute import Compute
from spindle.run.gradients import GradientBuffers
from spindle.run.graphs import GraphMemory, Graphs
from spindle.run.nests import Axes, Form
from spindle.run.op_code import LayersCode, LossCode, OpCode
from spindle.run.rank_program import held_parameters, rank_program_of, tensor_groups
from spindle.run.shards import Shards
from spindle.run.step import Losses, MicroStep, Pace, Step, Watch
from spindle.run.syncs import Syncs, Updates
from spindle.run.tensor_parallel import TENSOR
from spindle.run.transfers import Transfers
from spindle.run.world import World, on_compute_stream

_STEPS_BEFORE_CAPTURE = 2  # in which libraries choose their kernels
_MOST_GRAPHS = 64  # sets of them, one for each choice of tasks and shapes of their batches
_MOST_SHAPES = 10_000  # whose steps are counted
_STEPS_OF_USE, _MOST_WASTED = 8, 8  # steps that make up for capturing, and sets for which they did not
Shapes = frozenset[tuple[str, int]]  # signatures of batches, by task


class Executor:
    """Runs steps of one program on one rank.

    `parameters` are in the graph's order, this process's own tensors; `reached` has by task the positions of those that
    any gradient reaches at all. `batch_axes` has the row axes of each task's batch. Layers and losses run under an
    `autocast` to that type. The program of a plan that shards the optimizer needs `shards`, which took parameters in.

    `gradient_buffers` are what the executor of the program before released: memory for gradients is taken over.

    A step may leave tasks out. All ranks then pass over whatever their programs have of these, which leaves the order
    of everything else as `verify` saw it.
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
        reached: Mapping[str, frozenset[int]] | None = None,
        seed: int = 0,
        cuda_graphs: bool = True,
        autocast: torch.dtype | None = None,
        shards: Shards | None = None,
        gradient_buffers: GradientBuffers | None = None,
    ) -> None:
        self.program, self.graph, self.world = program, graph, world
        self._rank_program = rank_program_of(program, graph, code, world.rank, in_order=world.launches_in_order)
        self._lanes = (
            (self._rank_program.launches,)
            if world.launches_in_order
            else (self._rank_program.transfer, self._rank_program.sync)
        )
        self._transfers = Transfers(program, self._rank_program, world)
        self.reads, self.uses = self._rank_program.reads, self._rank_program.uses
        self.held = held_parameters(program, graph, world.rank)
        trainable = {number for number in self.held if graph.parameters[number].trainable}
        self._syncs: Syncs = Syncs(
            program, graph, self._rank_program, world, parameters, trainable, reached, shards, gradient_buffers
        )
        self._compute = Compute(self._rank_program, self._transfers, self._syncs, world, batch_axes, seed, autocast)
        self._chunks_of: dict[str, set[int]] = {}  # backward instructions by task
        for position in self._rank_program.compute:
            instruction = program.instructions[position]
            if isinstance(instruction, Backward):
                self._chunks_of.setdefault(self._rank_program.slots[instruction.slot].task, set()).add(position)
        # A program whose passes have an order of their own is for one step, or a few.
        self._launched_before = self._order_launches()
        self._captures = cuda_graphs and world.device.type == "cuda" and not program.plan.passes
        # By the shapes they are for; those that were used last stand last.
        self._graphs: dict[Shapes, Graphs] = {}
        self._graph_memory = GraphMemory()
        self._most_graphs = _MOST_GRAPHS  # that memory allows, as far as is known
        self._steps_on: Counter[Shapes] = Counter()
        self._num_wasted = 0  # sets of graphs that went before they were of use
        self._refused: dict[str, str] = {}
        self._places: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # of parameters and buffers, by slot
        if world.uses_nccl:
            _ = world.control, world.everyone  # a group is made by all ranks, whoever uses it
        if world.size > 1:
            for bucket in program.buckets:
                world.group("sync", tuple(bucket.ranks.tolist()))
            for shape in program.slots:
                if isinstance(code[shape.op], LossCode) and len(shape.ranks) > 1:
                    world.group("loss", tuple(shape.ranks.tolist()))
                for group in tensor_groups(shape) if shape.tensor_degree > 1 else ():
                    world.group(TENSOR, group)

    def step(
        self,
        number: int,
        batches: Mapping[str, Any],
        signatures: Mapping[str, int],
        optimizer: Updates | None = None,
        *,
        micro_step: MicroStep | None = None,
        held: Mapping[str, tuple[tuple[int, int], ...]] | None = None,
        forms: Mapping[tuple[int, int], Form] | None = None,
        check_losses: bool = False,
        timed: bool = True,
    ) -> tuple[Losses, Watch]:
        """Runs a step on its batches (whole ones; each slot takes its rows) and the signatures of all tasks' batches.

        Of a batch that is not all here, `held` has the rows of each leaf. `forms` has, by op and number of layers, what
        these give; all ranks must give the same ones, or leave them to be told. A task without a signature is left
        out. Of several turns, the last one synchronises gradients and updates.
        Returns this rank's parts of the tasks' losses, which add up over ranks, and, of a timed step, when everything
        ran.
        """
        step = Step(
            number=number,
            batches=batches,
            signatures=signatures,
            check_losses=check_losses,
            held=held or {},
            forms=forms or {},
            new=self._transfers.new(signatures),
            micro_step=micro_step or MicroStep(tasks=frozenset(signatures)),
            next_in=[0] * len(self._lanes),
        )
        for task, chunks in self._chunks_of.items():
            if task not in signatures:
                step.done_chunks |= chunks
        with on_compute_stream(self.world.device):
            watch = Watch(self.world.device, timed)
            self._use_graphs(step)
            num_graphs = len(self._graphs)
            self._run(step, optimizer, watch)
            self._transfers.remember(signatures)
            if step.graphs is not None and not step.graphs.is_complete:
                step.graphs.finish()
                if step.graphs.ran_out_of_memory:
                    self._ran_out_of_memory(num_graphs - 1)
                elif step.graphs.is_spoiled:
                    self._drop_graphs()
            return self._losses(step), watch

    def _run(self, step: Step, optimizer: Updates | None, watch: Watch) -> None:
        """This rank's instructions, in order."""
        self._syncs.begin(step, watch)
        self._advance(step, watch)
        pace = Pace(self.world)
        for position in self._rank_program.compute:
            instruction = self.program.instructions[position]
            if not self._is_on(step, instruction):
                continue
            self._launch_before(step, watch, position)
            pace.keep()
            watch.posted[position] = watch.now()
            try:
                match instruction:
                    case Forward(slot=slot):
                        self._compute.forward(step, self._rank_program.slots[slot], watch, position)
                        step.forwarded.add(slot)
                        self._transfers.send_forms(step, self._rank_program.slots[slot])
                    case Backward(slot=slot, first=first):
                        self._compute.backward(step, self._rank_program.slots[slot], instruction, watch, position)
                        step.done_chunks.add(position)
                        if instruction.makes_inputs and first == self.program.plan.slots[slot].first:
                            step.returned.add(slot)
                    case OptimizerStep():
                        self._syncs.finish(step, watch, self._replays_all_layers(step))
                        watch.start[position] = watch.now()
                        if optimizer is not None:
                            self._syncs.update(step, optimizer)
                    case Exchange() | SyncGradients() | GatherParameters():
                        raise AssertionError("these stand on other lanes")
            except Exception as error:
                error.add_note(f"in step {step.number} on rank {self.world.rank}, {self._describe(instruction)}")
                raise
            watch.end[position] = watch.now()
            step.computed.add(position)
            self._advance(step, watch)
        self._syncs.finish(step, watch, self._replays_all_layers(step))
        self._transfers.finish(step)

    def _is_on(self, step: Step, instruction: Instruction) -> bool:
        """Whether an instruction belongs to this step."""
        match instruction:
            case Forward(slot=slot) | Backward(slot=slot):
                return self._rank_program.slots[slot].task in step.signatures
            case Exchange(link=link):
                return self._rank_program.links[link].task in step.signatures
            case SyncGradients(bucket=bucket):
                return self._syncs.is_on(step, bucket)
            case GatherParameters():
                return step.micro_step.is_first
            case OptimizerStep():
                return step.micro_step.is_last

    def _use_graphs(self, step: Step) -> None:
        """After a few steps on batches of the same shapes, the next is captured and later ones replay it."""
        if not self._captures or step.check_losses:
            return
        tasks = {slot.task for slot in self._rank_program.slots.values() if slot.task in step.signatures}
        shapes = frozenset((task, step.signatures[task]) for task in tasks)
        self._watch_places()
        if shapes in self._graphs:
            self._graphs[shapes] = self._graphs.pop(shapes)
            self._graphs[shapes].num_steps += 1
        else:
            if len(self._steps_on) > _MOST_SHAPES:
                self._steps_on.clear()
            self._steps_on[shapes] += 1
            if self._steps_on[shapes] > _STEPS_BEFORE_CAPTURE and self._most_graphs > 0:
                self._capture(step, shapes)
        step.graphs = self._graphs.get(shapes)
        if step.graphs is not None:
            step.batches = step.graphs.batches(step.batches)

    def _capture(self, step: Step, shapes: Shapes) -> None:
        """Makes room for a new set of graphs and begins it. Where sets go before they were of use, there are more
        shapes than room, and those that are there stay."""
        while len(self._graphs) >= self._most_graphs:
            oldest = next(iter(self._graphs))
            self._num_wasted += self._graphs[oldest].num_steps < _STEPS_OF_USE
            if self._num_wasted > _MOST_WASTED:
                return
            del self._graphs[oldest]
            self._steps_on.pop(oldest, None)
        try:
            self._graphs[shapes] = Graphs(
                self._syncs.gradients, step.batches, self._refused, self._graph_memory, partial(self._evict, shapes)
            )
        except torch.OutOfMemoryError:
            self._ran_out_of_memory(len(self._graphs))

    def _ran_out_of_memory(self, num_graphs: int) -> None:
        """From now on there are no more sets of graphs than these."""
        self._most_graphs = num_graphs
        self._drop_graphs()
        if num_graphs == 0:
            self._refused["every slot"] = "memory ran out while steps were captured"

    def _watch_places(self) -> None:
        """Graphs know where parameters and buffers were. Moved ones need new graphs; a slot whose buffers are others
        after every step can have none."""
        for slot in self._rank_program.slots.values():
            if not isinstance(slot.code, LayersCode):
                continue
            layers = slot.code.layers[slot.chunks[0][0] : slot.chunks[-1][1]]
            weights = tuple(parameter.data_ptr() for layer in layers for parameter in layer.parameters)
            buffers = tuple(buffer.data_ptr() for layer in layers for buffer in layer.buffers())
            before = self._places.get(slot.number)
            self._places[slot.number] = (weights, buffers)
            if before is None or before == (weights, buffers) or slot.name in self._refused:
                continue
            if before[0] == weights:
                self._refused[slot.name] = "it replaces its buffers"
            self._drop_graphs()

    def _replays_all_layers(self, step: Step) -> bool:
        layers = (
            slot
            for slot in self._rank_program.slots.values()
            if isinstance(slot.code, LayersCode) and slot.task in step.signatures
        )
        return (
            step.graphs is not None
            and step.graphs.is_complete
            and all(layer.name not in self._refused for layer in layers)
        )

    def _evict(self, shapes: Shapes) -> None:
        """Gives up all graphs but those for batches of these shapes."""
        self._graphs = {key: graphs for key, graphs in self._graphs.items() if key == shapes}
        gc.collect()
        torch.cuda.empty_cache()

    def _drop_graphs(self) -> None:
        self._graphs.clear()
        self._syncs.gradients.forget_taken()
        self._graph_memory.release()
        self._steps_on.clear()

    @property
    def _captures(self) -> bool:
        return self._compute.captures

    @_captures.setter
    def _captures(self, captures: bool) -> None:
        self._compute.captures = captures

    @property
    def offloaded_bytes(self) -> int:
        """How much went to the host so far."""
        return self._compute.host.num_bytes

    def release_gradient_buffers(self) -> GradientBuffers:
        """What this executor keeps for gradients, for the executor of the next program; it must not run again."""
        return GradientBuffers(tuple(self._syncs.trained), self._syncs.gradients)

    @property
    def gradient_memory(self) -> list[torch.Tensor]:
        """Where gradients stand from step to step."""
        return self._syncs.gradients.memory

    @property
    def num_captured(self) -> int:
        """How many slots run as CUDA graphs."""
        return max((graph.num_slots for graph in self._graphs.values()), default=0)

    @property
    def without_graph(self) -> dict[str, str]:
        """Why slots run without a CUDA graph, by name."""
        return self._refused

    def _describe(self, instruction: Instruction) -> str:
        match instruction:
            case Forward(slot=slot) | Backward(slot=slot):
                what = "forward" if isinstance(instruction, Forward) else "backward"
                return f"{what} of {self._rank_program.slots[slot].name}"
            case _:
                return type(instruction).__name__

    # Communication, launched in the order of its lanes.

    def _advance(self, step: Step, watch: Watch) -> None:
        """Launches whatever can be launched now."""
        for number, lane in enumerate(self._lanes):
            while step.next_in[number] < len(lane) and self._launch(step, watch, lane[step.next_in[number]]):
                step.next_in[number] += 1

    def _launch_before(self, step: Step, watch: Watch, position: int) -> None:
        """Launches what must be launched before an instruction, and waits for forms that it takes."""
        while step.next_in[0] < self._launched_before.get(position, 0):
            other = self._lanes[0][step.next_in[0]]
            is_launched = self._launch(step, watch, other, wait_for_forms=True)
            assert is_launched, "launch_order has what an operation needs before it"
            step.next_in[0] += 1

    def _order_launches(self) -> dict[int, int]:
        """How much of the common launch order comes before each instruction of the compute lane: the exchanges that it
        waits for, and whatever other ranks launch before the collectives inside of it."""
        place = {position: number for number, position in enumerate(self._rank_program.launches)}
        exchanges = {
            (one.link, one.backward): place[position]
            for position, one in enumerate(self.program.instructions)
            if isinstance(one, Exchange) and position in place
        }
        before = {}
        for position in self._rank_program.compute if place else ():
            ends = [place.get(position, 0)]
            match self.program.instructions[position]:
                case Forward(slot=slot):
                    ends += [
                        exchanges.get((link.number, False), -1) + 1 for link in self._rank_program.slots[slot].inputs
                    ]
                case Backward(slot=slot):
                    ends += [
                        exchanges.get((link.number, True), -1) + 1 for link in self._rank_program.slots[slot].outputs
                    ]
                case _:
                    ends.append(len(place))
            before[position] = max(ends)
        return before

    def _launch(self, step: Step, watch: Watch, position: int, *, wait_for_forms: bool = False) -> bool:
        """Launches an operation, unless it has no part in this step, or says that it cannot be launched yet."""
        instruction = self.program.instructions[position]
        if not self._is_on(step, instruction):
            return True
        launched = watch.now()
        match instruction:
            case Exchange(link=link, backward=backward):
                end = self._rank_program.links[link]
                is_launched = self._transfers.post(step, end, backward, wait_for_forms=wait_for_forms)
            case SyncGradients(bucket=bucket):
                if not step.micro_step.is_last:
                    return True
                is_launched = self._syncs.post(step, bucket, position)
            case GatherParameters():
                return True  # launched behind the last update
            case Forward() | Backward() | OptimizerStep():
                return position in step.computed
        if is_launched:
            watch.posted[position] = launched
        return is_launched

    def _losses(self, step: Step) -> Losses:
        """This rank's part of each task's loss."""
        nothing = torch.zeros((), dtype=torch.float64, device=self.world.device)
        values = dict.fromkeys(self.graph.tasks, nothing)
        for slot, loss in step.losses.items():
            task = self._rank_program.slots[slot].task
            values[task] = values[task] + loss.detach()
        return Losses(torch.stack(list(values.values())))
