"""The interpreter of a Program that runs one rank's instructions on `torch.distributed`; the simulator is the other.

    Program ── rank_program_of ─▶ RankProgram ── Executor.step ─┬▶ Compute     slots, forward and backward
                                                                ├▶ Transfers   messages between ranks
                                                                └▶ Syncs       gradients reduced, parameters gathered

Transfers are posted as soon as their data exists and waited for when it is needed; gradients are synchronised while
backward still runs. Each lane keeps the program's order, so what `verify` has proved holds here. Under NCCL, transfers
and collectives are launched in one order, the same on all ranks (`program.launch_order`).

A link carries rows of the batch. Parts of an item call are different: a part sends its whole output, and a member of
its sequence group its whole slice. The receiver joins slices in token order, and parts in item order (`items`). Slots
on several lanes of a GPU run on streams of their own (`lanes`).
"""

from __future__ import annotations

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
    offload_copies,
)
from spindle.run import graph_cache
from spindle.run.compute import Compute
from spindle.run.gradients import GradientBuffers
from spindle.run.graph_cache import GraphCache
from spindle.run.items import Lengths
from spindle.run.lanes import Lanes
from spindle.run.op_code import LossCode, OpCode
from spindle.run.pytrees import Axes, PytreeMeta
from spindle.run.rank_program import held_parameters, rank_program_of, sequence_groups, tensor_groups
from spindle.run.recompute_offload import HostOffload
from spindle.run.regions import Region
from spindle.run.sequence_parallel import SEQUENCE
from spindle.run.shards import Shards
from spindle.run.step import HostCopy, LaunchThrottle, MicroStep, ReadBytes, Step, StepTimer
from spindle.run.step_graph import StepGraph, accumulate
from spindle.run.syncs import Syncs, Updates
from spindle.run.tensor_parallel import TENSOR
from spindle.run.transfers import Transfers
from spindle.run.world import World, on_compute_stream


class Executor:
    """Runs steps of one program on one rank.

    `parameters` are this process's own tensors, in the graph's order; `reached` has, by task, the positions of those
    that a gradient reaches. `batch_axes` has the batch dimension of each leaf of a task's batch. Layers and losses run
    under `autocast` to that dtype. The program of a plan that shards the optimizer needs `shards`, to which parameters
    are attached.

    `gradient_buffers`, released by the executor of the previous program, are reused.

    A step may leave tasks out. All ranks then skip the instructions of these tasks; the others keep the order that
    `verify` has checked.
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
        self.items_used = self._rank_program.items_used
        self.held = held_parameters(program, graph, world.rank)
        trainable = {number for number in self.held if graph.parameters[number].trainable}
        self._syncs: Syncs = Syncs(
            program, graph, self._rank_program, world, parameters, trainable, reached, shards, gradient_buffers
        )
        # a program with an order of passes of its own runs only a few times, so capturing it would not pay off
        captures = cuda_graphs and world.device.type == "cuda" and not program.plan.passes
        self.graph_cache = GraphCache(
            self._rank_program,
            self._syncs.gradients,
            is_enabled=captures,
            communicates=world.size > 1,
            num_lanes=program.plan.num_lanes,
            has_weight_lanes=any(slot.has_weight_lane for slot in program.plan.slots),
        )
        self.offload = HostOffload(world.device, offload_copies(program, world.rank))
        self._compute_index = {position: index for index, position in enumerate(self._rank_program.compute)}
        self._compute = Compute(
            self._rank_program,
            self._transfers,
            self._syncs,
            self.graph_cache,
            world,
            batch_axes,
            seed,
            autocast,
            self.offload,
        )
        self._lanes_of_device = Lanes(program, self._rank_program, world)
        self._has_regions = graph_cache.REGIONS and program.plan.num_lanes > 1
        self._chunks_of: dict[str, set[int]] = {}  # backward instructions by task
        for position in self._rank_program.compute:
            instruction = program.instructions[position]
            if isinstance(instruction, Backward):
                self._chunks_of.setdefault(self._rank_program.slots[instruction.slot].task, set()).add(position)
        self._losses_of = {
            op.task: op_code for op, op_code in zip(graph.metaops, code, strict=True) if isinstance(op_code, LossCode)
        }
        self._launched_before = self._rank_program.launches_before(program.instructions)
        if world.uses_nccl:
            _ = world.control, world.everyone  # collective: all ranks create a group, whether or not they use it
        if world.size > 1:
            _make_groups(program, code, world)

    def step(
        self,
        number: int,
        batches: Mapping[str, Any],
        signatures: Mapping[str, int],
        optimizer: Updates | None = None,
        *,
        micro_step: MicroStep | None = None,
        held: Mapping[str, tuple[tuple[int, int], ...]] | None = None,
        cuts: Mapping[tuple[int, int], PytreeMeta] | None = None,
        lengths: Mapping[str, Lengths] | None = None,
        held_items: Mapping[str, tuple[int, ...]] | None = None,
        loss_scale: torch.Tensor | None = None,
        check_losses: bool = False,
        timed: bool = True,
        read_bytes: ReadBytes | None = None,
    ) -> tuple[HostCopy, StepTimer]:
        """Run a step, or one micro-step of it. The last micro-step synchronises gradients and runs the optimizer.

        `batches` are whole batches, from which each slot takes its rows. `signatures` are digests of their shapes; a
        task without one is left out. If this rank has only some rows of a batch, `held` says which, by leaf. `cuts`
        has, by op and number of layers, the shapes that cross that cut. All ranks must give the same ones, or none:
        then senders send the metadata first. `lengths` has the rows of items, by task with parts, and `held_items` the
        items on this rank, if not all are. Losses are multiplied by `loss_scale` for backward.

        Returns this rank's parts of the tasks' losses, then of the totals and counts of `metrics`, to be summed over
        ranks; and the times of a timed step, with what `read_bytes` reads.
        """
        step = Step(
            number=number,
            batches=batches,
            signatures=signatures,
            check_losses=check_losses,
            held=held or {},
            cuts=cuts or {},
            lengths=lengths or {},
            held_items=held_items or {},
            loss_scale=loss_scale,
            new_shapes=self._transfers.tasks_with_new_shapes(signatures),
            micro_step=micro_step or MicroStep(tasks=frozenset(signatures)),
            next_by_lane=[0] * len(self._lanes),
        )
        # A bucket is reduced once its backward instructions are done. The instructions of tasks that this step leaves
        # out never run, so they count as done from the start.
        for task, chunks in self._chunks_of.items():
            if task not in signatures:
                step.backward_done |= chunks
        with on_compute_stream(self.world.device):
            timer = StepTimer(self.world.device, timed, read_bytes=read_bytes)
            self.graph_cache.use(step)
            num_sets = len(self.graph_cache)
            self._run(step, optimizer, timer)
            self._transfers.mark_seen(signatures)
            self.graph_cache.finish(step, num_sets)
            return self._losses(step), timer

    def _run(self, step: Step, optimizer: Updates | None, timer: StepTimer) -> None:
        """Run this rank's instructions in order."""
        # The compute lane drives the step. After each of its instructions the other lanes launch what is ready. No lane
        # needs a thread of its own, because transfers and collectives are asynchronous once they are launched.
        self._syncs.begin(step, timer)
        passes, updates = self._positions(step)
        if self._run_step_graph(step, timer):
            passes = []
        self._run_instructions(step, optimizer, timer, [*passes, *updates])
        self._syncs.finish(step, timer, self.graph_cache.replays_all_layers(step))
        self._transfers.finish(step)

    def _run_instructions(
        self, step: Step, optimizer: Updates | None, timer: StepTimer, positions: Sequence[int]
    ) -> None:
        """Run instructions of the compute lanes, with all communication in between."""
        throttle = LaunchThrottle(self.world)
        self._lanes_of_device.begin()
        self._advance(step, timer)
        self.offload.begin()
        for region in self._regions(step, timer, positions):
            self._launch_before(step, timer, region.positions[0])
            throttle.wait()
            if len(region.positions) == 1:
                (position,) = region.positions
                with self._lanes_of_device.on_stream_of(position):
                    self.offload.before(self._compute_index[position])
                    self._run_instruction(step, optimizer, timer, position)
            else:
                self._run_region(step, timer, region)
            step.compute_done.update(region.positions)
            self._advance(step, timer)
        self._lanes_of_device.join()

    def _regions(self, step: Step, timer: StepTimer, positions: Sequence[int]) -> list[Region]:
        """The instructions of a step in host order. Passes that are launched together form one region."""
        # A pass inside a region has no times of its own.
        if not self._has_regions or step.graphs is None or timer.is_timed:
            return [Region.of_one(position) for position in positions]
        instructions = self.program.instructions
        passes = [position for position in positions if not isinstance(instructions[position], OptimizerStep)]
        regions = step.graphs.regions_of(passes, instructions, self._rank_program.slots, self._lanes_of_device)
        return [*regions, *(Region.of_one(position) for position in positions[len(passes) :])]

    def _run_region(self, step: Step, timer: StepTimer, region: Region) -> None:
        """Launch the passes of a region together, after anything else that they launch on their lanes."""
        assert step.graphs is not None
        for position in region.positions:
            with self._lanes_of_device.on_stream_of(position), step.graphs.regions.collected(region, position):
                self._run_instruction(step, None, timer, position)
        self._lanes_of_device.launch(region, partial(step.graphs.regions.replay_region, region))

    def _run_step_graph(self, step: Step, timer: StepTimer) -> bool:
        """Run forward and backward of the whole step as one CUDA graph, which is captured first if necessary. Returns
        False if there is none."""
        graphs = step.graphs
        if graphs is None or (graphs.step_graph is None and not self.graph_cache.can_capture_step(step)):
            return False
        factors = self._compute.loss_factors(step)
        before = {id(parameter): parameter.grad for parameter in self._syncs.trained if parameter.grad is not None}
        if graphs.step_graph is None:
            for parameter in self._syncs.trained:
                # Otherwise adding to the gradients of earlier micro-steps would become part of the graph.
                parameter.grad = None
            step_graph = StepGraph(list(factors), self.world.device)
            step_graph.set_factors(factors, step.loss_scale)
            # in a copy of the step, because a failed capture leaves its state behind
            failure = graphs.capture_step(
                step_graph, lambda timer: self._run_passes(step.fork(), timer), self._lanes_of_device
            )
            for parameter in self._syncs.trained:
                parameter.grad = before.get(id(parameter))
            if failure is not None:
                del graphs, step_graph  # with the memory of the capture
                self.graph_cache.refuse_step_graph(step, failure)
                return False
        assert graphs.step_graph is not None
        graphs.step_graph.set_factors(factors, step.loss_scale)
        graphs.step_graph.replay(step, timer)
        accumulate(graphs.first_written, before, self._syncs.gradients)
        return True

    def _run_passes(self, step: Step, timer: StepTimer) -> Step:
        """Run forward and backward of all slots of a step."""
        passes, _ = self._positions(step)
        self._run_instructions(step, None, timer, passes)
        return step

    def _positions(self, step: Step) -> tuple[list[int], list[int]]:
        """The instructions of the compute lanes that run in a step: passes, and the optimizer step, which is the last
        one."""
        instructions = self.program.instructions
        on = [position for position in self._rank_program.compute if self._runs_in(step, instructions[position])]
        updates = [position for position in on if isinstance(instructions[position], OptimizerStep)]
        return on[: len(on) - len(updates)], updates

    def _run_instruction(self, step: Step, optimizer: Updates | None, timer: StepTimer, position: int) -> None:
        """Run an instruction of a compute lane."""
        instruction = self.program.instructions[position]
        timer.posted[position] = timer.now()
        try:
            match instruction:
                case Forward(slot=slot):
                    self._compute.forward(step, self._rank_program.slots[slot], timer, position)
                    self._lanes_of_device.keep_for_other_lanes(step, self._rank_program.slots[slot])
                    step.forward_done.add(slot)
                    self._transfers.send_metadata(step, self._rank_program.slots[slot])
                case Backward(slot=slot, first=first):
                    self._compute.backward(step, self._rank_program.slots[slot], instruction, timer, position)
                    step.backward_done.add(position)
                    if instruction.makes_inputs and first == self.program.plan.slots[slot].first:
                        step.input_gradients_done.add(slot)
                case OptimizerStep():
                    self._syncs.finish(step, timer, self.graph_cache.replays_all_layers(step))
                    timer.start[position] = timer.now()
                    if optimizer is not None:
                        self._syncs.update(step, optimizer)
                case Exchange() | SyncGradients() | GatherParameters():
                    raise AssertionError("these instructions are on other lanes")
        except Exception as error:
            error.add_note(
                f"in step {step.number} on rank {self.world.rank}, {self._rank_program.describe(instruction)}"
            )
            raise
        timer.note_end(position)

    def _runs_in(self, step: Step, instruction: Instruction) -> bool:
        """Whether an instruction runs in this step."""
        match instruction:
            case Forward(slot=slot) | Backward(slot=slot):
                return self._rank_program.slots[slot].task in step.signatures
            case Exchange(link=link):
                return self._rank_program.links[link].task in step.signatures
            case SyncGradients(bucket=bucket):
                return self._syncs.reduces(step, bucket)
            case GatherParameters():
                return step.micro_step.is_first
            case OptimizerStep():
                return step.micro_step.is_last

    def release_gradient_buffers(self) -> GradientBuffers:
        """Hand this executor's gradient buffers over to the executor of the next program. This one must not run
        again."""
        return GradientBuffers(tuple(self._syncs.trained), self._syncs.gradients)

    @property
    def gradient_memory(self) -> list[torch.Tensor]:
        """The memory that holds gradients from step to step."""
        return self._syncs.gradients.memory

    def instructions_of(self, name: str) -> frozenset[int]:
        """The passes of the slots of a name, by instruction number."""
        slots = {number for number, slot in self._rank_program.slots.items() if slot.name == name}
        return frozenset(
            position
            for position in self._rank_program.compute
            if isinstance(instruction := self.program.instructions[position], Forward | Backward)
            and instruction.slot in slots
        )

    @property
    def without_weight_lane(self) -> dict[str, str]:
        """Slot → why its weight gradients run on the slot's own lane on a GPU, although the plan gives them another
        lane."""
        if self.world.device.type != "cuda":
            return {}
        planned = [slot.name for slot in self._rank_program.slots.values() if slot.lane != slot.weight_lane]
        if not self.graph_cache.is_enabled:
            return dict.fromkeys(planned, "CUDA graphs are off")
        every = self.graph_cache.refused.get("every slot")
        refused = {name: self.graph_cache.refused.get(name, every) for name in planned}
        return {name: reason for name, reason in refused.items() if reason is not None}

    # Launching communication, in the order of its lanes

    def _advance(self, step: Step, timer: StepTimer) -> None:
        """Launch all communication that is ready."""
        for number, lane in enumerate(self._lanes):
            while step.next_by_lane[number] < len(lane) and self._launch(step, timer, lane[step.next_by_lane[number]]):
                step.next_by_lane[number] += 1

    def _launch_before(self, step: Step, timer: StepTimer, position: int) -> None:
        """Launch everything that precedes an instruction in the common launch order. Waits for the shapes of what is to
        be received."""
        while step.next_by_lane[0] < self._launched_before.get(position, 0):
            operation = self._lanes[0][step.next_by_lane[0]]
            is_launched = self._launch(step, timer, operation, wait_for_metadata=True)
            assert is_launched, "launch_order puts what an operation needs before it"
            step.next_by_lane[0] += 1

    def _launch(self, step: Step, timer: StepTimer, position: int, *, wait_for_metadata: bool = False) -> bool:
        """Launch an operation, unless this step skips it. Returns False if it cannot be launched yet."""
        instruction = self.program.instructions[position]
        if not self._runs_in(step, instruction):
            return True
        match instruction:
            case GatherParameters():
                return True  # launched after the last update
            case Forward() | Backward() | OptimizerStep():
                return position in step.compute_done
            case SyncGradients() if not step.micro_step.is_last:
                return True
            case SyncGradients(bucket=bucket):
                launch = partial(self._syncs.post, step, bucket, position)
            case Exchange(link=link, backward=backward):
                end = self._rank_program.links[link]
                launch = partial(self._transfers.post, step, end, backward, wait_for_metadata=wait_for_metadata)
        with self._lanes_of_device.on_communication_stream(position):
            launched = timer.now()
            is_launched = launch()
        if is_launched:
            timer.posted[position] = launched
        return is_launched

    @property
    def metrics(self) -> list[tuple[str, str]]:
        """Task and name of all metrics."""
        return [(task, name) for task, code in self._losses_of.items() for name in code.metrics]

    def _losses(self, step: Step) -> HostCopy:
        """This rank's part of each task's loss, and of its metrics."""
        zero = torch.zeros((), dtype=torch.float64, device=self.world.device)
        values = dict.fromkeys(self.graph.tasks, zero)
        for slot, loss in step.losses.items():
            task = self._rank_program.slots[slot].task
            values[task] = values[task] + loss.detach()
        parts = [torch.stack(list(values.values()))]
        sums: dict[str, torch.Tensor] = {}
        for slot, metrics in step.metrics.items():
            task = self._rank_program.slots[slot].task
            sums[task] = sums[task] + metrics if task in sums else metrics
        parts += [
            sums[task] if task in sums else zero.expand(2 * len(code.metrics))
            for task, code in self._losses_of.items()
            if code.metrics
        ]
        return HostCopy(torch.cat(parts) if len(parts) > 1 else parts[0])


def _make_groups(program: Program, code: Sequence[OpCode], world: World) -> None:
    """Make the process groups of all buckets and slots, not only of this rank's: `new_group` is collective over all
    ranks, and a rank that makes one later than its peers would hang them in the middle of a step."""
    for bucket in program.buckets:
        world.group("sync", tuple(bucket.ranks.tolist()))
    for shape in program.slots:
        if isinstance(code[shape.op], LossCode) and len(shape.ranks) > 1:
            world.group("loss", tuple(shape.ranks.tolist()))
        for group in tensor_groups(shape) if shape.tensor_degree > 1 else ():
            world.group(TENSOR, group)
        for group in sequence_groups(shape):
            world.group(SEQUENCE, group)
