"""The sync lane of one rank: gradients are reduced while backward still runs, and sharded parameters gathered after
their update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn

from spindle.errors import ProgramError
from spindle.graph import MetaGraph
from spindle.program import Backward, GatherParameters, Program
from spindle.run.flat_collectives import start_reduce_scatter
from spindle.run.gradients import GradientBuffers, Gradients
from spindle.run.lanes import release_behind_current_stream, uses_streams
from spindle.run.rank_program import RankProgram
from spindle.run.shards import Flat, Shards
from spindle.run.step import Step, StepTimer
from spindle.run.world import World, peers, wait


class Updates(Protocol):
    """An optimizer, or a wrapper that does more (clipping, a schedule)."""

    def step(self) -> Any: ...


class Syncs:
    """Runs the sync lane of one rank. `trainable` are the positions of the trainable parameters that it holds."""

    def __init__(
        self,
        program: Program,
        graph: MetaGraph,
        rank_program: RankProgram,
        world: World,
        parameters: Sequence[nn.Parameter],
        trainable: set[int],
        reached: Mapping[str, frozenset[int]] | None,
        shards: Shards | None,
        previous: GradientBuffers | None,
    ) -> None:
        self._program, self._world, self._shards = program, world, shards
        self._crosses_streams = uses_streams(program, world)  # from lanes to the lane of reductions
        self.trained: list[nn.Parameter] = [parameters[number] for number in sorted(trainable)]
        trained = {id(parameter) for parameter in self.trained}
        # Parameters that the previous program trained and this one does not: their gradients are dropped.
        untrained = [] if previous is None else previous.parameters
        self._untrained = [parameter for parameter in untrained if id(parameter) not in trained]
        compute = set(rank_program.compute)
        self._after = [compute.intersection(bucket.after) for bucket in program.buckets]
        task_of = [graph.metaops[shape.op].task for shape in program.slots]
        self._users = [
            frozenset(task_of[self._backward_at(position).slot] for position in bucket.after)
            for bucket in program.buckets
        ]
        # The units of reduction: a bucket, or all parameters of one dtype in a sharded bucket.
        summed: list[list[nn.Parameter]] = []
        self._sums_of: list[list[int]] = []  # by bucket
        flats: list[Flat] = []
        for bucket in program.buckets:
            # buckets of other tensor-parallel shards belong to other ranks
            sums = [[parameters[parameter] for parameter in bucket.parameters] if world.rank in bucket.ranks else []]
            if shards is not None:
                flats += shards.of_bucket(bucket)
                sums = [list(flat.parameters) for flat in shards.of_bucket(bucket)]
            self._sums_of.append(list(range(len(summed), len(summed) + len(sums))))
            summed += sums
        self.gradients: Gradients = Gradients(
            summed, dict(enumerate(flats)), None if previous is None else previous.gradients
        )
        # By slot and first layer of a chunk: positions of the gathers that it waits for.
        self._needed_by: dict[tuple[int, int], list[int]] = {}
        self._gathers: list[tuple[int, int]] = []  # in the order of the lane, with the number of the bucket
        for position in rank_program.sync:
            instruction = program.instructions[position]
            if isinstance(instruction, GatherParameters):
                self._gathers.append((position, instruction.bucket))
                for backward in program.buckets[instruction.bucket].after:
                    chunk = self._backward_at(backward)
                    self._needed_by.setdefault((chunk.slot, chunk.first), []).append(position)
        if self._gathers and shards is None:
            raise ProgramError("this plan shards the optimizer, but no shards were made")

        @cache
        def unreached(tasks: frozenset[str]) -> list[nn.Parameter]:
            """The parameters that no gradient of these tasks reaches."""
            if reached is None:
                return []
            reached_by_any = frozenset[int]().union(*(reached[task] for task in tasks))
            return [parameters[number] for number in sorted(trainable - reached_by_any)]

        self._unreached = unreached

    def begin(self, step: Step, timer: StepTimer) -> None:
        """Drop the gradients of the last step, unless this micro-step accumulates. Also drop those of parameters that
        only the previous program trained."""
        for parameter in self._untrained:
            parameter.grad = None
        self._untrained = []
        if self._crosses_streams:
            self.gradients.allocate()
        if self._shards is not None and step.micro_step.is_first:
            self._shards.drop_gradients()
            for position, bucket in self._gathers:
                if self._shards.is_gathering(self._program.buckets[bucket]):
                    timer.posted[position] = timer.now()  # in flight since the last update
        if step.micro_step.is_first:
            for parameter in self.trained:
                parameter.grad = None
        elif step.graphs is not None:
            for parameter in self.trained:
                if parameter.grad is not None:
                    # CUDA graphs overwrite the memory where the gradient may be, and then add to it
                    parameter.grad = parameter.grad.clone()

    def reduces(self, step: Step, bucket: int) -> bool:
        """Whether a bucket is reduced in this step."""
        return not self._users[bucket].isdisjoint(step.micro_step.tasks)

    def post(self, step: Step, bucket: int, position: int) -> bool:
        """Start the reduction of a bucket. Returns False if its gradients are not complete yet."""
        if not self._after[bucket] <= step.backward_done:
            return False
        self._start(step, bucket, position)
        return True

    def _start(self, step: Step, bucket: int, position: int) -> None:
        ranks = tuple(self._program.buckets[bucket].ranks.tolist())
        unreached = {id(parameter) for parameter in self._unreached(step.micro_step.tasks)}
        # collectives are asynchronous: backward continues, and `finish` waits for all of them
        for number in self._sums_of[bucket]:
            for parameter in self.gradients.parameters_of(number) if self._crosses_streams else ():
                release_behind_current_stream(parameter.grad)
            flat = self.gradients.fill_bucket(number, unreached)
            request: Any
            if self._shards is not None:
                request = start_reduce_scatter(flat, ranks, self._world)
            else:
                with peers("synchronising gradients"):
                    request = dist.all_reduce(flat, group=self._world.group("sync", ranks), async_op=True)
            step.syncs.append((position, number, request))

    def finish(self, step: Step, timer: StepTimer, is_replayed: bool) -> None:
        """Wait for all reductions, and set the gradients of parameters.

        A step that is replayed from CUDA graphs has the same gradients every time, so its flags need not be read.
        """
        for position, number, request in step.syncs:
            wait(request)
            timer.end[position] = timer.now()
            # reading the flags synchronizes with the GPU
            is_certain = is_replayed and self.gradients.has_all(number)
            self.gradients.set_from_bucket(number, self.gradients.num_contributors(number) if not is_certain else None)
        step.syncs.clear()
        for parameter in self._unreached(step.micro_step.tasks) if step.micro_step.is_last else ():
            # a sum of zeros is not a gradient: a single process would have None
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None

    def update(self, step: Step, optimizer: Updates) -> None:
        """Run the optimizer's step, and start to gather updated shards at once instead of at the start of the next
        step, because no instruction in between waits for them."""
        if self._shards is not None:
            self._shards.wait_all()  # gathers that no forward of this step has waited for
        optimizer.step()
        for _, bucket in self._gathers:
            if self._shards is not None and self.reduces(step, bucket):
                self._shards.start_gather(self._program.buckets[bucket])

    def wait_for_parameters(self, slot: int, first: int, timer: StepTimer) -> None:
        """Wait for the sharded parameters of one chunk.

        The program waits for those of the whole slot. Here, those of later chunks may arrive while the first one runs.
        """
        for position in self._needed_by.get((slot, first), ()):
            instruction = self._program.instructions[position]
            assert isinstance(instruction, GatherParameters)
            bucket = self._program.buckets[instruction.bucket]
            if self._shards is not None and self._shards.is_gathering(bucket):
                self._shards.wait(bucket)
                timer.end[position] = timer.now()

    def _backward_at(self, position: int) -> Backward:
        instruction = self._program.instructions[position]
        assert isinstance(instruction, Backward)
        return instruction
