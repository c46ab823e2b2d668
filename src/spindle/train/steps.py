"""The programs of a training's steps, each with this rank's executor.

A static plan runs the same program in every step, once for each micro-step. A pipeline runs all micro-steps of a step
as the microbatches of one program, which is made for their contents. The training loop does not distinguish them: it
only gets the runs of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from spindle.data import WHOLE, Wanted
from spindle.graph import microbatch_name
from spindle.planners import Layout, owning_ranks_in
from spindle.profile import Profile
from spindle.program import Program
from spindle.run import (
    Cuts,
    Executor,
    Lengths,
    MicroStep,
    PytreeMeta,
    ShapeInference,
    Shards,
    World,
    rank_program_of,
)
from spindle.train.agreement import compare, shape_items
from spindle.train.analyze import AnalyzedWorkload
from spindle.train.config import TrainConfig
from spindle.train.feed import Batch
from spindle.train.header import BatchHeader, MicroSteps
from spindle.train.item_parts import BatchItems
from spindle.train.items import EVERYTHING
from spindle.train.microbatches import Key, Microbatches, StepGraph, without_values
from spindle.train.plan import PlannedWorkload, program_for_rows
from spindle.train.samples import Needs, needs_of
from spindle.train.task_variants import TaskVariants

_MOST_SHAPES = 10_000  # the number of batches whose shapes are kept


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The batch of a task in one micro-step, and the variant of the task that it takes."""

    task: str
    variant: str
    micro_step: int
    header: BatchHeader


def microbatches_of(headers: Sequence[Mapping[str, BatchHeader]], variants: TaskVariants) -> list[Microbatch]:
    """The microbatches of a step, by micro-step and task. Their variants must be known."""
    microbatches = []
    for micro_step, row in enumerate(headers):
        for task, header in row.items():
            variant = variants.get(task, header.variant)
            assert variant is not None
            microbatches.append(Microbatch(task, variant.name, micro_step, header))
    return microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """One run of a program, with all or some of a step's microbatches, by the task names of the program."""

    executor: Executor
    profile: Profile  # task names of the program
    microbatches: Mapping[str, Microbatch]
    micro_step: MicroStep
    checks_losses: bool  # whether a split loss is first compared with the whole one
    is_as_planned: bool = True  # whether its batches have the planned sizes
    # The run's share of the step's tokens, if losses are weighted by them.
    shares: Mapping[str, float] = field(default_factory=dict)
    cuts: Mapping[tuple[int, int], PytreeMeta] = field(default_factory=dict)
    lengths: Mapping[str, Lengths] = field(default_factory=dict)  # the number of rows of each item


def shares_of_tokens(microbatches: Sequence[Microbatch], weighted: Collection[str]) -> dict[int, float]:
    """The share of each microbatch in the tokens of its task in the step, by position. Only for the variants in
    `weighted`, whose losses are weighted by tokens."""
    totals: dict[str, int] = {}
    chosen = [number for number, microbatch in enumerate(microbatches) if microbatch.variant in weighted]
    for number in chosen:
        task, tokens = microbatches[number].task, microbatches[number].header.tokens
        totals[task] = totals.get(task, 0) + tokens
    return {
        number: microbatches[number].header.tokens / totals[microbatches[number].task]
        for number in chosen
        if totals[microbatches[number].task]
    }


Uses = Sequence[tuple[str, Callable[..., Any], int, int]]  # task, code that reads its batch, and the rows that it reads


def wanted_of(uses: Uses, items_used: Mapping[str, tuple[int, ...]], task: str, batch: Batch) -> Wanted:
    """What the slots of a rank read of a batch. `task` is its name in the program. `items_used` is what parts read."""
    needs = needs_of((code, first, last) for name, code, first, last in uses if name == task)
    fields = {field for field, _, _ in needs}
    if EVERYTHING in fields:
        return WHOLE
    reads_all_items = not batch.item_entries.isdisjoint(fields)
    rows = tuple((field, first, last) for field, first, last in needs if field not in batch.item_entries)
    return Wanted(rows, None if reads_all_items else items_used.get(task, ()))


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The program of the next step, and what this rank reads in it."""

    key: Key
    program: Program
    uses: Uses
    items_used: Mapping[str, tuple[int, ...]]


class Steps:
    """Abstract base class: the runs of each step. `main` is the executor of the plan's own program."""

    plans_ahead: bool  # whether the next step should be announced while a step runs

    def __init__(self, main: Executor, workload: AnalyzedWorkload) -> None:
        self.main = main
        self._weighed = frozenset(
            name
            for name, task in workload.bound.tasks.items()
            if task.recorded.is_mean and task.recorded.definition.tokens is not None
        )
        self._needs: dict[tuple[str, ...], Needs] = {}

    def needs(self, variants: Iterable[str]) -> Needs:
        """The rows and fields that this rank's slots read of a batch of the planned size, if it takes one of these
        variants."""
        key = tuple(variants)
        if key not in self._needs:
            uses = [(code, first, last) for task, code, first, last in self.main.uses if task in key]
            self._needs[key] = needs_of(uses)
        return self._needs[key]

    def reads(self, variants: Iterable[str]) -> bool:
        """Whether this rank needs batches that take any of these task variants."""
        return not self.main.reads.isdisjoint(variants)

    def runs(self, microbatches: Sequence[Microbatch], num_micro_steps: int, batches: MicroSteps) -> Iterator[StepRun]:
        """The runs of a step with these microbatches. `batches` are those that this rank has read."""
        raise NotImplementedError

    def plan_ahead(
        self,
        microbatches: Sequence[Microbatch],
        num_micro_steps: int,
        batches: MicroSteps,
        time_limit_s: float | None,
        upcoming: Sequence[Mapping[str, Batch]] | None = None,
    ) -> None:
        """Start to plan the step after the current one.

        `upcoming`, on rank 0, are the batches of the step after that one, by micro-step and variant. With it, that step
        is planned as well, so that the program of the next step is known in time to decode what it reads.
        """

    def wanted(self, variant: str, micro_step: int, batch: Batch) -> Wanted | None:
        """What this rank needs of a batch of the next step; None while that is not known."""
        raise NotImplementedError

    def gradient_tensors(self) -> Iterator[torch.Tensor]:
        """The gradient buffers that are kept from step to step."""
        raise NotImplementedError

    def close(self) -> None:
        """End processes that plan steps."""


class _Executors:
    """Makes executors over the parameters of this rank."""

    def __init__(
        self,
        workload: AnalyzedWorkload,
        parameters: Sequence[nn.Parameter],
        config: TrainConfig,
        world: World,
    ) -> None:
        self._workload, self._parameters, self._config, self._world = workload, parameters, config, world

    def of_plan(self, program: Program, shards: Shards | None, *, captures: bool) -> Executor:
        """An executor of a program of the plan."""
        workload, config = self._workload, self._config
        return Executor(
            program,
            workload.graph,
            workload.code,
            self._parameters,
            workload.bound.batch_axes,
            self._world,
            reached=workload.reached,
            seed=config.seed,
            cuda_graphs=config.cuda_graphs and captures,
            autocast=config.autocast,
            shards=shards,
        )

    def of_step(self, program: Program, step: StepGraph, shards: Shards | None, last: Executor) -> Executor:
        """An executor of a step's own program, which reuses the gradient buffers of the previous one."""
        axes = self._workload.bound.batch_axes
        return Executor(
            program,
            step.profile.graph,
            step.code,
            self._parameters,
            {task: axes[variant] for task, variant in step.variants.items()},
            self._world,
            reached=step.reached,
            seed=self._config.seed,
            cuda_graphs=False,
            autocast=self._config.autocast,
            shards=shards,
            gradient_buffers=last.release_gradient_buffers(),
        )


class StaticSteps(Steps):
    """Steps that all run the plan's program, once per micro-step."""

    plans_ahead = False

    def __init__(
        self,
        workload: AnalyzedWorkload,
        planned: PlannedWorkload,
        parameters: Sequence[nn.Parameter],
        shards: Shards | None,
        config: TrainConfig,
        world: World,
    ) -> None:
        self._planned, self._shards, self._world = planned, shards, world
        self._make = _Executors(workload, parameters, config, world)
        super().__init__(self._make.of_plan(planned.program, shards, captures=True), workload)
        self._planned_rows = {name: task.recorded.definition.batch_size for name, task in workload.bound.tasks.items()}
        self._executors = {tuple(self._planned_rows.values()): self.main}

    def runs(self, microbatches: Sequence[Microbatch], num_micro_steps: int, batches: MicroSteps) -> Iterator[StepRun]:
        # The optimizer steps after the last micro-step, with the gradients of all variants that any micro-step has
        # used.
        used: frozenset[str] = frozenset()
        shares = shares_of_tokens(microbatches, self._weighed) if num_micro_steps > 1 else {}
        for number in range(num_micro_steps):
            by_variant = {
                microbatch.variant: microbatch for microbatch in microbatches if microbatch.micro_step == number
            }
            used |= frozenset(by_variant)
            executor = self._executor_for({name: microbatch.header.num_rows for name, microbatch in by_variant.items()})
            own_shares = {
                microbatches[place].variant: share
                for place, share in shares.items()
                if microbatches[place].micro_step == number
            }
            yield StepRun(
                executor=executor,
                profile=self._planned.profile,
                microbatches=by_variant,
                micro_step=_weighted_micro_step(
                    MicroStep(number, num_micro_steps, used), own_shares, by_variant, num_micro_steps
                ),
                shares=own_shares,
                checks_losses=True,
                is_as_planned=executor is self.main,
            )

    def wanted(self, variant: str, micro_step: int, batch: Batch) -> Wanted | None:
        if batch.num_rows != self._planned_rows[variant]:
            return None
        return wanted_of(self.main.uses, self.main.items_used, variant, batch)

    def _executor_for(self, rows: Mapping[str, int]) -> Executor:
        """The executor for these numbers of rows. They differ from the planned ones for a loader's short last batch."""
        key = tuple(rows.get(name, planned) for name, planned in self._planned_rows.items())
        if key not in self._executors:
            program = program_for_rows(self._planned, dict(zip(self._planned_rows, key, strict=True)), self._world)
            self._executors[key] = self._make.of_plan(program, self._shards, captures=False)
        return self._executors[key]

    def gradient_tensors(self) -> Iterator[torch.Tensor]:
        for executor in self._executors.values():
            yield from executor.gradient_memory


class PipelinedSteps(Steps):
    """Steps whose microbatches run in one program, made for the step."""

    plans_ahead = True

    def __init__(
        self,
        workload: AnalyzedWorkload,
        planned: PlannedWorkload,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        shards: Shards | None,
        examples: Mapping[str, Any],
        config: TrainConfig,
        world: World,
    ) -> None:
        """`examples` has the batch on which each task variant was measured."""
        self._workload, self._layout, self._shards, self._world = workload, layout, shards, world
        self._make = _Executors(workload, parameters, config, world)
        super().__init__(self._make.of_plan(planned.program, shards, captures=False), workload)
        self._last = self.main
        modules = [handle.module for handle in workload.bound.handles.values()]
        self._has_parts = planned.parts is not None and planned.parts.has_parts
        self._microbatches = Microbatches(
            planned.profile,
            layout,
            workload.code,
            examples,
            ShapeInference(modules, world.device, config.autocast),
            is_first=world.rank == 0,
            seed=config.seed,
            planner=planned.step_planner,
            parts=planned.parts,
        )
        self._microbatches.owning_ranks = owning_ranks_in(workload.graph, layout)
        self._shapes: dict[tuple[str, int, int], BatchItems] = {}
        self._ahead: _Ahead | None = None

    def reads(self, variants: Iterable[str]) -> bool:
        # Which replica runs which microbatch, and which rank runs which part, is only known when all of them are read.
        return self._layout.num_replicas > 1 or self._has_parts or super().reads(variants)

    def runs(self, microbatches: Sequence[Microbatch], num_micro_steps: int, batches: MicroSteps) -> Iterator[StepRun]:
        world = self._world
        key = _key_of(microbatches, num_micro_steps)
        self._share_shapes(microbatches, batches)  # this may broadcast, so all ranks do it before anything else
        step = self._step_graph(key, microbatches, num_micro_steps)
        program = None if self._ahead is None or self._ahead.key != key else self._ahead.program
        if program is None:
            program = world.broadcast_object(self._microbatches.program(key, step.profile) if world.rank == 0 else None)
        self._last = self._make.of_step(program, step, self._shards, self._last)
        names = [microbatch_name(microbatch.variant, microbatch.micro_step) for microbatch in microbatches]
        by_name = dict(zip(names, microbatches, strict=True))
        shares = shares_of_tokens(microbatches, self._weighed) if num_micro_steps > 1 else {}
        by_share = {names[place]: share for place, share in shares.items()}
        yield StepRun(
            executor=self._last,
            profile=step.profile,
            microbatches=by_name,
            micro_step=_weighted_micro_step(MicroStep(tasks=frozenset(by_name)), by_share, by_name, num_micro_steps),
            shares=by_share,
            checks_losses=False,
            cuts=self._microbatches.cuts(step, key),
            lengths=self._microbatches.lengths(key),
        )

    def plan_ahead(
        self,
        microbatches: Sequence[Microbatch],
        num_micro_steps: int,
        batches: MicroSteps,
        time_limit_s: float | None,
        upcoming: Sequence[Mapping[str, Batch]] | None = None,
    ) -> None:
        self._share_shapes(microbatches, batches)
        key = _key_of(microbatches, num_micro_steps)
        if self._world.rank == 0:
            profile = self._step_graph(key, microbatches, num_micro_steps).profile
            self._microbatches.request_plan(key, profile, time_limit_s)
        self._ahead = None
        if upcoming is None or not self._has_parts:
            return
        # The program of the next step, if it is planned by now: it was requested a step ago, as an upcoming step.
        ready = self._microbatches.ready(key) if self._world.rank == 0 else None
        program: Program | None = self._world.broadcast_object(ready)
        if program is not None:
            step = self._step_graph(key, microbatches, num_micro_steps)
            in_order = self._world.launches_in_order
            rank_program = rank_program_of(program, step.profile.graph, step.code, self._world.rank, in_order=in_order)
            self._ahead = _Ahead(key, program, rank_program.uses, rank_program.items_used)
        if self._world.rank == 0 and upcoming:
            batches_of = [(name, batch) for row in upcoming for name, batch in row.items()]
            self._microbatches.request_plan_early(
                tuple(
                    tuple((name, batch.num_rows, batch.signature) for name, batch in row.items()) for row in upcoming
                ),
                {(name, batch.signature): BatchItems(batch.nest, batch.lengths) for name, batch in batches_of},
                self._workload.reached,
                {name: len(upcoming) for name, _ in batches_of},
                time_limit_s,
            )

    def wanted(self, variant: str, micro_step: int, batch: Batch) -> Wanted | None:
        if self._ahead is None:
            return None
        return wanted_of(self._ahead.uses, self._ahead.items_used, microbatch_name(variant, micro_step), batch)

    def _step_graph(self, key: Key, microbatches: Sequence[Microbatch], num_micro_steps: int) -> StepGraph:
        counts = {microbatch.variant: num_micro_steps for microbatch in microbatches}
        return self._microbatches.graph(key, self._workload.reached, counts)

    def _share_shapes(self, microbatches: Sequence[Microbatch], batches: MicroSteps) -> None:
        """Give all ranks every microbatch's batch without values, and the lengths of its items, so that ranks which do
        not read the batch can infer the shapes that they will receive."""
        if len(self._shapes) > _MOST_SHAPES:  # all ranks at the same time
            self._shapes.clear()
            self._microbatches.forget()
        new: dict[int, dict[tuple[str, int, int], Microbatch]] = {}  # by the rank that reads them
        for microbatch in microbatches:
            header = microbatch.header
            key = (microbatch.task, header.variant, header.signature)
            if key not in self._shapes:
                new.setdefault(header.reader, {})[key] = microbatch
        for reader, wanted in sorted(new.items()):
            new_shapes = None
            if self._world.rank == reader:
                read = {key: batches[microbatch.micro_step][microbatch.task] for key, microbatch in wanted.items()}
                new_shapes = {key: BatchItems(without_values(batch.nest), batch.lengths) for key, batch in read.items()}
            self._shapes.update(self._world.broadcast_object(new_shapes, reader))
        new_cuts: dict[str, Cuts] = {}
        for microbatch in microbatches:
            header = microbatch.header
            shape = self._shapes[microbatch.task, header.variant, header.signature]
            cuts = self._microbatches.infer_cuts(microbatch.variant, header.signature, shape)
            if cuts is not None:
                new_cuts[microbatch_name(microbatch.variant, microbatch.micro_step)] = cuts
        if new_cuts:
            compare(self._world, shape_items(new_cuts))

    def gradient_tensors(self) -> Iterator[torch.Tensor]:
        yield from self.main.gradient_memory
        if self._last is not self.main:
            yield from self._last.gradient_memory

    def close(self) -> None:
        self._microbatches.close()


def _weighted_micro_step(
    micro_step: MicroStep, shares: Mapping[str, float], microbatches: Mapping[str, Microbatch], num_micro_steps: int
) -> MicroStep:
    """A micro-step whose losses are weighted by their shares of the step's tokens, instead of equally."""
    return replace(
        micro_step,
        weights={name: share * num_micro_steps for name, share in shares.items()},
        token_counts={name: microbatches[name].header.tokens for name in shares},
    )


def _key_of(microbatches: Sequence[Microbatch], num_micro_steps: int) -> Key:
    """What a step's program depends on: the variants, rows and signatures of its batches, by micro-step."""
    return tuple(
        tuple(
            (microbatch.variant, microbatch.header.num_rows, microbatch.header.signature)
            for microbatch in microbatches
            if microbatch.micro_step == number
        )
        for number in range(num_micro_steps)
    )
