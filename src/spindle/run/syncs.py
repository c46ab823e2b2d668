"""Gradients of one rank, summed over ranks while backward still runs, and parameters gathered that ranks updated in
parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from spindle.errors import ProgramError
from spindle.graph import MetaGraph
from spindle.program import Backward, GatherParameters, Program
from spindle.run.flat_collectives import start_reduce_scatter
from spindle.run.gradients import GradientBuffers, Gradients
from spindle.run.rank_program import RankProgram
from spindle.run.shards import Shards
from spindle.run.step import Step, Watch
from spindle.run.world import World, peers, wait


class Updates(Protocol):
    """What changes parameters by their gradients: an optimizer, or what does more around one."""

    def step(self) -> Any: ...


class Syncs:
    """The sync lane of one rank. `trainable` are positions of parameters that its slots use."""

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
        last: GradientBuffers | None,
    ) -> None:
        self._program, self._world, self._rank_program, self._shards = program, world, rank_program, shards
        self.trained: list[nn.Parameter] = [parameters[number] for number in sorted(trainable)]
        mine = {id(one) for one in self.trained}
        # Parameters that the last program trained and this one does not: their gradients are dropped.
        self._left = [] if last is None else [one for one in last.parameters if id(one) not in mine]
        compute = set(rank_program.compute)
        self._after = [compute.intersection(bucket.after) for bucket in program.buckets]
        task_of = [graph.metaops[shape.op].task for shape in program.slots]
        self._users = [
            frozenset(task_of[self._backward_at(position).slot] for position in bucket.after)
            for bucket in program.buckets
        ]
        # What is summed at once: a bucket, or all of one type in a bucket that is sharded.
        summed: list[list[nn.Parameter]] = []
        self._sums_of: list[list[int]] = []  # by bucket
        for number, bucket in enumerate(program.buckets):
            # Other shards than this rank's are other ranks' matter.
            sums = [[parameters[parameter] for parameter in bucket.parameters] if world.rank in bucket.ranks else []]
            if shards is not None:
                sums = [list(flat.parameters) for flat in shards.flats[number]]
            self._sums_of.append(list(range(len(summed), len(summed) + len(sums))))
            summed += sums
        flats = dict(enumerate(shards)) if shards is not None else {}
        self.gradients: Gradients = Gradients(summed, flats, None if last is None else last.gradients)
        # By slot and the first layer of a chunk: positions of the gathers that it waits for.
        self._needed_by: dict[tuple[int, int], list[int]] = {}
        self._gathers: list[tuple[int, int]] = []  # in the order of the lane, with the bucket
        for position in rank_program.sync:
            instruction = program.instructions[position]
            if isinstance(instruction, GatherParameters):
                self._gathers.append((position, instruction.bucket))
                for one in program.buckets[instruction.bucket].after:
                    chunk = self._backward_at(one)
                    self._needed_by.setdefault((chunk.slot, chunk.first), []).append(position)
        if self._gathers and shards is None:
            raise ProgramError("this plan shards the optimizer, but no shards were made")

        @cache
        def unreached(tasks: frozenset[str]) -> list[nn.Parameter]:
            """What no gradient of these tasks reaches."""
            if reached is None:
                return []
            found = frozenset[int]().union(*(reached[task] for task in tasks))
            return [parameters[number] for number in sorted(trainable - found)]

        self._unreached = unreached

    def begin(self, step: Step, watch: Watch) -> None:
        """Gradients start anew, unless they add up. Those of other parameters, from another program, are over."""
        for parameter in self._left:
            parameter.grad = None
        self._left = []
        if self._shards is not None and step.micro_step.is_first:
            self._shards.drop_gradients()
            for position, bucket in self._gathers:
                if self._shards.is_gathering(bucket):
                    watch.posted[position] = watch.now()  # they go on since the last update
        for parameter in self.trained:
            if step.micro_step.is_first:
                parameter.grad = None
            elif step.graphs is not None and parameter.grad is not None:
                parameter.grad = parameter.grad.clone()  # graphs write over the place where it may be, and then add it

    def is_on(self, step: Step, bucket: int) -> bool:
        """Whether a bucket is summed in this step."""
        return not self._users[bucket].isdisjoint(step.micro_step.tasks)

    def post(self, step: Step, bucket: int, position: int) -> bool:
        """Starts the sum of a bucket, or says that its gradients are not there yet."""
        if not self._after[bucket] <= step.done_chunks:
            return False
        self._start(step, bucket, position)
        return True

    def _start(self, step: Step, bucket: int, position: int) -> None:
        ranks = tuple(self._program.buckets[bucket].ranks.tolist())
        unreached = {id(parameter) for parameter in self._unreached(step.micro_step.tasks)}
        for one in self._sums_of[bucket]:
            flat = self.gradients.gathered(one, unreached)
            request: Any
            if self._shards is not None:
                request = start_reduce_scatter(flat, ranks, self._world)
            else:
                with peers("synchronising gradients"):
                    request = dist.all_reduce(flat, group=self._world.group("sync", ranks), async_op=True)
            step.syncs.append((position, one, request))

    def finish(self, step: Step, watch: Watch, is_replayed: bool) -> None:
        """Waits for all sums. Where all is replayed, what this rank has it always has."""
        for position, one, request in step.syncs:
            wait(request)
            watch.end[position] = watch.now()
            # Reading the flags waits for the GPU.
            is_certain = is_replayed and self.gradients.has_all(one)
            self.gradients.spread(one, self.gradients.holders(one) if not is_certain else None)
        step.syncs.clear()
        for parameter in self._unreached(step.micro_step.tasks) if step.micro_step.is_last else ():
            # Zeros from another rank are no gradient: one process would have none.
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None

    def update(self, step: Step, optimizer: Updates) -> None:
        """The optimizer's step. What it changes of sharded parameters goes to other ranks at once, rather than when the
        next step begins: nothing that stands between waits for it."""
        if self._shards is not None:
            self._shards.settle()  # what no forward of this step has waited for
        optimizer.step()
        for _, bucket in self._gathers:
            if self._shards is not None and self.is_on(step, bucket):
                self._shards.start_gather(bucket)

    def wait_for_parameters(self, slot: int, first: int, watch: Watch) -> None:
        """Chunk by chunk, where the program waits for those of a whole slot: the last ones come while the first run."""
        for position in self._needed_by.get((slot, first), ()):
            instruction = self._program.instructions[position]
            assert isinstance(instruction, GatherParameters)
            if self._shards is not None and self._shards.is_gathering(instruction.bucket):
                self._shards.wait(instruction.bucket)
                watch.end[position] = watch.now()

    def _backward_at(self, position: int) -> Backward:
        instruction = self._program.instructions[position]
        assert isinstance(instruction, Backward)
        return instruction

    @property
    def memory(self) -> list[torch.Tensor]:
        """Where gradients stand from step to step."""
        return self.gradients.memory
