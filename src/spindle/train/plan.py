"""From a profile to a plan and its program, the same on all ranks.

Rank 0 plans; all ranks lower the plan, and compare their programs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from spindle.errors import PlanError, ProfileError, SpindleError, TrainingError
from spindle.graph import MetaGraph
from spindle.launch import variables
from spindle.models import builtin_tp_plan
from spindle.plan import Plan, check, parse_plan, read_plan
from spindle.planners import Layout, PlanOptions, make_plan, owning_ranks_in, pipeline_layout
from spindle.profile import Contention, Profile, read_profile
from spindle.program import Program, lower, verify
from spindle.run import World
from spindle.train.agreement import compare
from spindle.train.analyze import AnalyzedWorkload
from spindle.train.config import DEFAULT_PLANNER, Planning, TrainConfig
from spindle.train.microbatches import on_one_device
from spindle.train.progress import Progress
from spindle.train.trial import why_not_sharded

_PLANNED_MEMORY = 0.95  # share of the limit; predictions of memory are about this accurate


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorkload:
    """A plan with its program, and the profile that it was made from.

    A pipeline has a `layout` of its chunks; its plan is that of one microbatch of each task variant, and its steps have
    plans of their own.
    """

    profile: Profile
    plan: Plan
    program: Program
    layout: Layout | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlanning:
    """The plan and the profile of a checkpoint, if the user's planning options are those with which it was saved; or
    those that a scheduler hands over."""

    plan: Plan | None = None
    profile: Profile | None = None

    def applied_to(self, config: TrainConfig, graph: MetaGraph, profile: Profile, num_ranks: int) -> TrainConfig:
        """The configuration with the saved plan, if that is for the same graph, ranks and profile."""
        if (
            self.plan is None
            or self.profile is None
            or config.planning.is_pipelined
            or (self.plan.num_devices, self.plan.fingerprint) != (num_ranks, graph.fingerprint)
            or profile != replace(self.profile, graph=graph)
        ):
            return config
        return replace(config, planning=replace(config.planning, plan=self.plan))


def scheduled_planning(planning: Planning, environment: Mapping[str, str] = os.environ) -> SavedPlanning:
    """The plan and the profile that a scheduler hands over to this start of the job, so that it neither measures nor
    plans; nothing where the script itself says how to plan, or what is handed over cannot be read."""
    names = environment.get(variables.PLAN), environment.get(variables.PLAN_PROFILE)
    is_free = planning.plan is None and planning.profile is None and planning.planner == DEFAULT_PLANNER
    if None in names or not is_free:
        return SavedPlanning()
    try:
        profile = read_profile(Path(str(names[1])))
        return SavedPlanning(plan=read_plan(Path(str(names[0])), profile.graph), profile=profile)
    except SpindleError:
        return SavedPlanning()


def plan_workload(
    workload: AnalyzedWorkload,
    profile: Profile,
    config: TrainConfig,
    world: World,
    progress: Progress,
    notify: Callable[[str], None],
) -> PlannedWorkload:
    """Plan, and lower the plan to a program that is verified."""
    planning = config.planning
    if planning.memory_limit_bytes is not None:
        cluster = profile.cluster.with_memory(int(_PLANNED_MEMORY * planning.memory_limit_bytes))
        profile = replace(profile, cluster=cluster)
    degrees = {
        name: degree for name, degree in planning.tensor_parallel_degrees.items() if name not in workload.ended_modules
    }
    if degrees:
        profile = _with_degrees(profile, workload, degrees)
    layout: Layout | None = None
    if planning.is_pipelined:
        profile = on_one_device(profile)  # stages have one device each
        with progress.bar("planning"):
            layout, plan = _pipeline_plan(profile, config, world)
    else:
        with progress.bar("planning") as report_share:
            plan = _shared_plan(workload, profile, config, world, report_share, notify)
        if plan.num_lanes > 1:
            profile = _with_lanes(plan, profile, world, notify)
        check(plan, profile)
    owning_ranks = None if layout is None else owning_ranks_in(workload.graph, layout)
    program = lower(plan, profile, owning_ranks=owning_ranks)
    compare(world, {"the workload": workload.bound.workload, "the profile": profile, **_program_items(program)})
    _verify(program, profile, world)
    return PlannedWorkload(profile=profile, plan=plan, program=program, layout=layout)


def program_for_rows(planned: PlannedWorkload, rows: Mapping[str, int], world: World) -> Program:
    """The plan's program for batches of these sizes, by task variant: other than planned in a loader's last batch."""
    program = lower(planned.plan, planned.profile, dict(rows))
    compare(world, _program_items(program))
    _verify(program, planned.profile, world)
    return program


def _verify(program: Program, profile: Profile, world: World) -> None:
    """Verify a program that all ranks have, on rank 0: others need not load compiled loops for that."""
    error: SpindleError | None = None
    if world.rank == 0:
        try:
            verify(program, profile)
        except SpindleError as raised:
            error = raised
    error = world.broadcast_object(error)
    if error is not None:
        raise error


def _program_items(program: Program) -> dict[str, Any]:
    columns = {field.name: getattr(program, field.name) for field in fields(program) if field.name != "plan"}
    return {"the plan": program.plan, "the program": columns}


def _pipeline_plan(profile: Profile, config: TrainConfig, world: World) -> tuple[Layout, Plan]:
    """Rank 0's placement of chunks, on all ranks, with a plan of one microbatch of each task variant."""
    placed: tuple[Layout, Plan] | None = None
    if world.rank == 0:
        layout = pipeline_layout(profile, config.planning.pipeline_parallel_degree or world.size)
        options = PlanOptions(seed=config.seed, evaluations=1, layouts=(layout,))
        placed = layout, make_plan(profile, "pipeline", options)
    placed = world.broadcast_object(placed)
    assert placed is not None
    return placed


def _with_degrees(profile: Profile, workload: AnalyzedWorkload, degrees: Mapping[str, int]) -> Profile:
    try:
        return profile.with_degrees(degrees)
    except ProfileError as error:
        handles, sharing = workload.bound.handles, workload.bound.sharing
        reasons = [f"{name!r}: {text}" for name, text in sharing.reasons.items() if name in degrees]
        reasons += [
            f"{name!r} has no tensor parallel plan; give one with spindle.module({name!r}, tensor_parallel=...)"
            for name in degrees
            if name in handles and not handles[name].tensor_parallel and not builtin_tp_plan(handles[name].module)
        ]
        raise ProfileError(f"Planning(tensor_parallel_degrees=...): {'; '.join([str(error), *reasons])}") from error


def _shared_plan(
    workload: AnalyzedWorkload,
    profile: Profile,
    config: TrainConfig,
    world: World,
    report_share: Callable[[float], None],
    notify: Callable[[str], None],
) -> Plan:
    """Rank 0's plan, on all ranks.

    Where ranks would update parts of parameters, the optimizer is tried first: if it cannot, it is not sharded, and
    tensor parallel groups are refused.
    """
    plan: Plan | None = None
    reason: str | None = None
    if world.rank == 0:
        plan = _rank_0_plan(profile, config, config.planning.shard_optimizer, report_share)
        if (plan.shard_optimizer or _splits_parameters(plan)) and world.size > 1:
            trained = [item for item in workload.bound.parameters.items() if item[1].requires_grad]
            reason = why_not_sharded(config.optimizer, trained)
        # Plan again: without sharding, a different plan may be best.
        if reason is not None and plan.shard_optimizer:
            plan = _rank_0_plan(profile, config, False, report_share)
    shared: Plan
    shared, reason = world.broadcast_object((plan, reason))
    if reason is not None and _splits_parameters(shared):
        raise TrainingError(
            f"tensor groups split parameters, of which the optimizer cannot update parts: {reason}; use another "
            "optimizer, or tensor degree 1 (Planning(tensor_parallel_degrees={...: 1}))"
        )
    if reason is not None:
        notify(f"the optimizer is not sharded: {reason}")
    if shared.num_devices != world.size:
        raise PlanError(
            f"the plan is for {shared.num_devices} devices, but {world.size} ranks were started; start "
            f"{shared.num_devices} (spindle launch -n {shared.num_devices} ...), or leave the plan out to make one"
        )
    return shared


def _with_lanes(plan: Plan, profile: Profile, world: World, notify: Callable[[str], None]) -> Profile:
    """The profile for a plan with several lanes. On CPUs, where lanes run in turn, two passes together take as long as
    one after the other; on GPUs their contention must have been measured."""
    if world.device.type == "cuda":
        if world.size > 1:
            raise PlanError(
                f"this plan has {plan.num_lanes} lanes, got {world.size} ranks; lanes are for one process with a whole "
                "GPU, expected a plan with one lane: leave it out, or plan with Planning(lanes=1)"
            )
        return profile
    notify(f"this plan has {plan.num_lanes} lanes; on CPUs they run one after another, in the order of the plan")
    alone = Contention(forward=(1.0, 1.0), backward=(1.0, 1.0))
    curves = tuple(
        tuple(
            curve if curve.contention else replace(curve, contention=(alone,) * len(curve.num_devices))
            for curve in choices
        )
        for choices in profile.curves
    )
    return replace(profile, curves=curves)


def _splits_parameters(plan: Plan) -> bool:
    return any(degree > 1 for _, degree in plan.tensor_degrees)


def _rank_0_plan(
    profile: Profile, config: TrainConfig, shard_optimizer: bool | None, report_share: Callable[[float], None]
) -> Plan:
    """The given plan, or a new one."""
    given, planner = config.planning.plan, config.planning.planner
    if given is None and isinstance(planner, str):
        options = PlanOptions(seed=config.seed, shard_optimizer=shard_optimizer, lanes=config.planning.lanes)
        return make_plan(profile, planner, options, report_share)
    if given is None:
        assert callable(planner)
        plan = planner(profile)
    elif isinstance(given, Plan):
        plan = given
    elif isinstance(given, str) and "*" in given:
        plan = parse_plan(given, profile)
    else:
        plan = read_plan(Path(given), profile.graph)
    return plan if shard_optimizer is None else replace(plan, shard_optimizer=shard_optimizer)
