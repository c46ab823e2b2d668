"""From a profile to a plan and its program, the same on all ranks.

Rank 0 plans; all ranks lower the plan, and compare their programs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_leaves

from spindle.display import listed
from spindle.errors import PlanError, ProfileError, SpindleError, TrainingError
from spindle.graph import MetaGraph
from spindle.launch import variables
from spindle.models import builtin_tp_plan
from spindle.plan import Plan, check, parse_plan, read_plan
from spindle.planners import SPREAD, Layout, PlanOptions, choose_colocation, make_plan, owning_ranks_in, pipeline_layout
from spindle.profile import Contention, Profile, read_profile
from spindle.program import Program, lower, verify
from spindle.run import World, partitions
from spindle.train.agreement import compare
from spindle.train.analyze import AnalyzedWorkload
from spindle.train.config import COLOCATE, PIPELINE, Planning, TrainConfig
from spindle.train.feed import Batch
from spindle.train.item_parts import (
    WHOLE_CALLS,
    BatchItems,
    PartSettings,
    groups_of_ops,
    item_code,
    item_lengths,
    undivided_modules,
)
from spindle.train.items import has_items, lengths_in
from spindle.train.microbatches import Key, step_graph, without_values
from spindle.train.progress import Progress
from spindle.train.trace import TracedTask
from spindle.train.trial import why_not_sharded

# The share of the memory limit that plans may use: predictions of memory are about this accurate.
_PLANNED_MEMORY = 0.95

SampleStep = Sequence[Mapping[str, Batch]]  # batches by micro-step and task variant


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorkload:
    """A plan with its program, and the profile that it was made from.

    A pipeline has a `layout` of its chunks. Its plan is that of one microbatch of each task variant, because each of
    its steps has a plan of its own.
    """

    profile: Profile
    plan: Plan
    program: Program
    layout: Layout | None = None
    step_planner: str = PIPELINE  # the planner of each step, if there is a layout
    parts: PartSettings | None = None  # of item calls, if there is a layout


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlanning:
    """The plan and the profile of a checkpoint, if the user's planning options are still the same; or those that a
    scheduler has provided, whose plan is used if the script's own planner made it."""

    plan: Plan | None = None
    profile: Profile | None = None
    is_scheduled: bool = False

    def applied_to(self, config: TrainConfig, graph: MetaGraph, profile: Profile, num_ranks: int) -> TrainConfig:
        """The configuration with the saved plan, if that was made for the same graph, number of ranks and profile."""
        if (
            self.plan is None
            or self.profile is None
            or config.planning.is_pipelined
            or (self.is_scheduled and not _would_make(config.planning, self.plan))
            or (self.plan.num_devices, self.plan.fingerprint) != (num_ranks, graph.fingerprint)
            or profile != replace(self.profile, graph=graph)
        ):
            return config
        return replace(config, planning=replace(config.planning, plan=self.plan))


def scheduled_planning(planning: Planning, world: World) -> SavedPlanning:
    """The plan and the profile that a scheduler has provided for this start of the job, so that it neither measures nor
    plans.

    As read by rank 0. Empty if the script plans in another way (with another planner, a function, a plan or a profile),
    or if rank 0 cannot read them.
    """
    names = os.environ.get(variables.PLAN), os.environ.get(variables.PLAN_PROFILE)
    if None in names:
        return SavedPlanning()
    scheduled = SavedPlanning()
    if world.rank == 0:
        with suppress(SpindleError):
            profile = read_profile(Path(str(names[1])))
            plan = read_plan(Path(str(names[0])), profile)
            if planning.profile is None and _would_make(planning, plan):
                scheduled = SavedPlanning(plan=plan, profile=profile, is_scheduled=True)
    received: SavedPlanning = world.broadcast_object(scheduled)
    return received


def _would_make(planning: Planning, plan: Plan) -> bool:
    """Whether a plan is by the planner that the script chose, and by no memory limit, of which a scheduler knows
    nothing."""
    return planning.plan is None and planning.planner == plan.planner and planning.memory_limit_bytes is None


def plan_workload(
    workload: AnalyzedWorkload,
    profile: Profile,
    config: TrainConfig,
    world: World,
    progress: Progress,
    notify: Callable[[str], None],
    examples: Mapping[str, Any],
    sample_steps: Sequence[SampleStep] = (),
) -> PlannedWorkload:
    """Make a plan, lower it to a program, and verify the program.

    `examples` has a batch of each task variant. `sample_steps` are, on rank 0, a representative step, and steps
    with the extremes of a mix.
    """
    planning = config.planning
    if planning.memory_limit_bytes is not None:
        cluster = profile.cluster.with_memory(int(_PLANNED_MEMORY * planning.memory_limit_bytes))
        profile = replace(profile, cluster=cluster)
    degrees = {
        name: degree for name, degree in planning.tensor_parallel_degrees.items() if name not in workload.ended_modules
    }
    if degrees:
        profile = _with_tensor_degrees(profile, workload, degrees)
    layout: Layout | None = None
    parts: PartSettings | None = None
    _check_sequence_degrees(workload, planning.sequence_parallel_degrees)
    if planning.is_pipelined:
        profile = profile.on_one_device()  # each stage has one device
        with progress.bar("planning"):
            layout, parts, plan = _pipeline_plan(workload, profile, config, world, notify, examples, sample_steps)
    else:
        with progress.bar("planning") as report_share:
            plan = _shared_plan(workload, profile, config, world, report_share, notify)
        if plan.num_lanes > 1:
            profile = _with_lanes(plan, profile, world, notify)
        check(plan, profile)
        if plan.quotas:
            _grant_quotas(plan, profile, world, notify)
    if planning.quotas and (reason := _why_no_quotas(world)):
        notify(f"Planning(quotas=True) has no effect here: quotas of SMs are for one process with a GPU, and {reason}")
    owning_ranks = None if layout is None else owning_ranks_in(workload.graph, layout)
    program = lower(plan, profile, owning_ranks=owning_ranks)
    compare(world, {"the workload": workload.bound.workload, "the profile": profile, **_program_items(program)})
    _verify(program, profile, world)
    step_planner = str(planning.planner) if parts is not None and parts.has_parts else PIPELINE
    return PlannedWorkload(
        profile=profile, plan=plan, program=program, layout=layout, step_planner=step_planner, parts=parts
    )


def program_for_rows(planned: PlannedWorkload, rows: Mapping[str, int], world: World) -> Program:
    """The plan's program for batches of other sizes than planned, by task variant, as a loader's short last batch
    has."""
    program = lower(planned.plan, planned.profile, dict(rows))
    compare(world, _program_items(program))
    _verify(program, planned.profile, world)
    return program


def _verify(program: Program, profile: Profile, world: World) -> None:
    """Verify on rank 0 a program that all ranks have; the other ranks need not load compiled loops for that."""
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


def _pipeline_plan(
    workload: AnalyzedWorkload,
    profile: Profile,
    config: TrainConfig,
    world: World,
    notify: Callable[[str], None],
    examples: Mapping[str, Any],
    sample_steps: Sequence[SampleStep],
) -> tuple[Layout, PartSettings, Plan]:
    """Rank 0's placement of chunks, on all ranks, with a plan of one microbatch of each task variant; and how item
    calls are split into parts if encoders are replicated.

    An optimizer that cannot update parts of parameters is not sharded.
    """
    planning = config.planning
    num_ranks = planning.pipeline_parallel_degree or world.size
    measured = {
        name: BatchItems(without_values(examples[name]), lengths_in(task.recorded.definition, examples[name]))
        for name, task in workload.bound.tasks.items()
    }
    placed: tuple[Layout, int | None, Plan, str | None] | None = None
    if world.rank == 0:
        shards_optimizer, reason = planning.shard_optimizer, None
        if planning.planner == PIPELINE and shards_optimizer is None:
            shards_optimizer = False
        if world.size == 1:
            shards_optimizer = False
        elif shards_optimizer is not False:
            reason = _why_not_sharded(workload, config)
            shards_optimizer = shards_optimizer if reason is None else False
        planner, part_tokens = PIPELINE, None
        if planning.planner == PIPELINE:
            layout = pipeline_layout(profile, num_ranks, shards_optimizer is True)
        else:
            layout, part_tokens = _choose_colocation(
                workload, profile, config, num_ranks, measured, sample_steps, shards_optimizer
            )
            planner = PIPELINE if part_tokens is None else str(planning.planner)
        options = PlanOptions(seed=config.seed, evaluations=1, layouts=(layout,))
        placed = layout, part_tokens, make_plan(profile, planner, options), reason
    placed = world.broadcast_object(placed)
    assert placed is not None
    layout, part_tokens, plan, reason = placed
    if reason is not None:
        notify(f"the optimizer is not sharded: {reason}")
    undivided = undivided_modules(workload.graph, workload.code) if planning.takes_parts else {}
    for module, why in sorted(undivided.items()):
        notify(f"module {module!r} runs in the pipeline, its items undivided: {why}")
    return layout, PartSettings(part_tokens, measured, planning.sequence_parallel_degrees), plan


def _check_sequence_degrees(workload: AnalyzedWorkload, degrees: Mapping[str, int]) -> None:
    """Refuse sequence degrees for modules that cannot have them, with the reason."""
    facts = workload.bound.facts
    for name, degree in degrees.items():
        where = f"spindle.Planning(sequence_parallel_degrees={{{name!r}: {degree}}})"
        if name in workload.ended_modules:
            continue
        calls = [
            (task, call.name)
            for task, traced in workload.bound.tasks.items()
            for call in traced.recorded.calls
            if call.handle.name == name
        ]
        if not calls:
            raise PlanError(f"{where}: no module has that name; there are {', '.join(workload.bound.handles)}")
        for key in calls if degree > 1 else ():
            code = facts.items.get(key)
            sequence = None if code is None else code.sequence
            if sequence is not None and degree not in sequence.degrees:
                raise PlanError(
                    f"{where}: {degree} devices cannot share the attention heads of {key[1]}; expected one of "
                    f"{', '.join(map(str, (1, *sequence.degrees)))}"
                )
            if sequence is None and code is None:
                raise PlanError(f"{where}: {key[1]} does not read items alone; declare them with items={{...}}")
            reason = facts.unshared_items.get(key) or facts.coupled_items.get(key)
            if sequence is None and reason is not None:
                raise PlanError(f"{where}: several devices cannot share items of {key[1]}: {reason}")


def _choose_colocation(
    workload: AnalyzedWorkload,
    profile: Profile,
    config: TrainConfig,
    num_ranks: int,
    measured: Mapping[str, BatchItems],
    sample_steps: Sequence[SampleStep],
    shards_optimizer: bool | None,
) -> tuple[Layout, int | None]:
    """Where encoders are placed and how large parts are, chosen on the first of the steps, and for what the others are
    like. The part size is None if all modules are best spread over ranks."""
    planner, graph, code = str(config.planning.planner), workload.graph, workload.code
    tasks = workload.bound.tasks
    batches = {(name, 0): batch for name, batch in measured.items()}  # by variant and signature
    scales: dict[tuple[str, int], dict[int, float]] = {(name, 0): {} for name in measured}
    for row in chain.from_iterable(sample_steps):
        for name, batch in row.items():
            batches[name, batch.signature] = BatchItems(without_values(batch.nest), batch.lengths)
            # Shapes are not inferred yet: calls without items are assumed to take time in proportion to their rows.
            scale = _num_row_elements(tasks[name], batch.nest) / _num_row_elements(tasks[name], measured[name].nest)
            scales[name, batch.signature] = dict.fromkeys(range(len(graph.metaops)), scale)
    key, *extreme_keys = [
        tuple(tuple((name, batch.num_rows, batch.signature) for name, batch in row.items()) for row in step)
        for step in sample_steps or [()]
    ]
    if not any(key):  # the first batches of the variants of each task, in turn
        variants: dict[int, list[str]] = {}  # by the function of their task
        for name, task in tasks.items():
            variants.setdefault(id(task.recorded.definition.function), []).append(name)
        key = tuple(
            tuple(
                (name, tasks[name].recorded.definition.batch_size, 0)
                for name in (names[number % len(names)] for names in variants.values())
            )
            for number in range(max(config.gradient_accumulation_steps, *map(len, variants.values())))
        )

    # modules of variants that the step does not have need a place, too
    def with_all_tasks(key: Key) -> Key:
        missing = set(tasks).difference(name for row in key for name, _, _ in row)
        return key + tuple(
            ((name, tasks[name].recorded.definition.batch_size, 0),) for name in tasks if name in missing
        )

    key = with_all_tasks(key)
    sizes = []  # of all items of a microbatch
    for group in groups_of_ops(graph, code, range(len(graph.metaops))):
        known, variant = item_code(code[group[0]]), graph.metaops[group[0]].task
        assert known is not None
        batches_of_variant = [batches[name, signature] for row in key for name, _, signature in row if name == variant]
        sizes += [sum(item_lengths(known, batch)) for batch in batches_of_variant]
    sizes = [size for size in sizes if size]
    # The first batch of a task may have no items: it is planned without parts until one with items appears.
    awaits_items = any(
        task.recorded.definition.items and not has_items(task.recorded.definition, measured[name].nest)
        for name, task in tasks.items()
    )
    has_others = bool(undivided_modules(graph, code))
    if not sizes and planner != COLOCATE and not awaits_items and not has_others:
        raise PlanError(
            f'spindle.Planning(planner="{planner}"): places the modules that read items alone, and no task has such a '
            'call; declare them with @spindle.task(items={...}), or take planner="pipeline"'
        )

    def step_profile(part_tokens: int | None, key: Key = key) -> Profile:
        parts = PartSettings(part_tokens, measured, config.planning.sequence_parallel_degrees)
        return step_graph(key, profile, code, scales, None, dict.fromkeys(tasks, 1), batches, parts).profile

    in_parts: dict[int, Profile] = {}
    if sizes:
        mean = sum(sizes) / len(sizes)
        for part_tokens in (WHOLE_CALLS, *(max(1, math.ceil(mean / share)) for share in (num_ranks, 2 * num_ranks))):
            in_parts.setdefault(part_tokens, step_profile(part_tokens))
    whole = in_parts.get(WHOLE_CALLS)
    part_profiles = [] if whole is None else [whole, *in_parts.values()]
    other_batches = [
        [step_profile(part_tokens, with_all_tasks(each)) for part_tokens in in_parts] for each in extreme_keys
    ]
    chosen, layout = choose_colocation(
        planner,
        part_profiles,
        [step_profile(None)],
        num_ranks,
        shards_optimizer,
        [[*profiles[:1], *profiles] for profiles in other_batches],
    )
    if all(chain.placement == SPREAD for chain in layout.chains):
        return layout, None
    return layout, next(part_tokens for part_tokens, candidate in in_parts.items() if candidate is chosen)


def _num_row_elements(task: TracedTask, nest: Any) -> int:
    """The number of elements in those tensors of a batch that have one row per sample."""
    leaves = zip(tree_leaves(nest), task.batch_axes, strict=True)
    return max(1, sum(int(leaf.numel()) for leaf, axis in leaves if axis is not None))


def _with_tensor_degrees(profile: Profile, workload: AnalyzedWorkload, degrees: Mapping[str, int]) -> Profile:
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

    If ranks would update parts of parameters, the optimizer is tried first. If it cannot do that, its state is not
    sharded, and tensor-parallel groups are refused.
    """
    plan: Plan | None = None
    reason: str | None = None
    if world.rank == 0:
        plan = _rank_0_plan(profile, config, config.planning.shard_optimizer, report_share)
        if (plan.shard_optimizer or _splits_parameters(plan)) and world.size > 1:
            reason = _why_not_sharded(workload, config)
        # plan again, because without sharding another plan may be best
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


def _why_not_sharded(workload: AnalyzedWorkload, config: TrainConfig) -> str | None:
    trained = [item for item in workload.bound.parameters.items() if item[1].requires_grad]
    owners = workload.bound.trial_of if config.is_sweep else {}
    reasons = (
        why_not_sharded(options.optimizer, [item for item in trained if owners.get(item[0], "") == options.trial])
        for options in config.updates
    )
    return next((reason for reason in reasons if reason is not None), None)


def _with_lanes(plan: Plan, profile: Profile, world: World, notify: Callable[[str], None]) -> Profile:
    """The profile for a plan with several lanes.

    On CPUs, lanes run one after another, so two passes at the same time take as long as in sequence. On GPUs, their
    contention must have been measured.
    """
    if world.device.type == "cuda":
        if world.shares_gpu:
            raise PlanError(
                f"this plan has {plan.num_lanes} lanes, and a virtual device has one: {world.size} ranks share the "
                "GPU; plan with Planning(lanes=1), or give a plan with lane 0 alone"
            )
        return profile
    notify(f"this plan has {plan.num_lanes} lanes; on CPUs they run one after another, in the order of the plan")
    return with_serial_lanes(profile)


def with_serial_lanes(profile: Profile) -> Profile:
    """The profile in which two passes at the same time take as long as in sequence, unless their contention was
    measured."""
    alone = Contention(forward=(1.0, 1.0), backward=(1.0, 1.0))
    curves = tuple(
        tuple(
            curve if curve.contention else replace(curve, contention=(alone,) * len(curve.num_devices))
            for curve in choices
        )
        for choices in profile.curves
    )
    return replace(profile, curves=curves)


def _grant_quotas(plan: Plan, profile: Profile, world: World, notify: Callable[[str], None]) -> None:
    """Split the SMs of this GPU among the lanes, and report how many each of them has."""
    if reason := _why_no_quotas(world):
        raise PlanError(
            f"this plan has quotas of {listed([str(quota) for quota in plan.quotas])} SMs, which are for one process "
            f"with a GPU, and {reason}; leave its quotas out"
        )
    groups = profile.cluster.kind.sm_groups
    assert groups is not None, "check refuses quotas of unknown SMs"
    granted = [f"lane {lane} on {len(partition.sms)}" for lane, partition in enumerate(partitions(plan.quotas))]
    notify(f"lanes have SMs of their own: {listed(granted)}, of {groups.num_sms}")


def _why_no_quotas(world: World) -> str | None:
    if world.device.type != "cuda":
        return "CPUs have no SMs"
    return f"got {world.size} ranks" if world.size > 1 else None


def _splits_parameters(plan: Plan) -> bool:
    return any(degree > 1 for _, degree in plan.tensor_degrees)


def _rank_0_plan(
    profile: Profile, config: TrainConfig, shard_optimizer: bool | None, report_share: Callable[[float], None]
) -> Plan:
    """Rank 0's plan: the given one, or a new one."""
    given, planner = config.planning.plan, config.planning.planner
    if given is None and isinstance(planner, str):
        options = PlanOptions(
            seed=config.seed,
            shard_optimizer=shard_optimizer,
            lanes=config.planning.lanes,
            quotas=config.planning.quotas,
        )
        return make_plan(profile, planner, options, report_share)
    if given is None:
        assert callable(planner)
        plan = planner(profile)
    elif isinstance(given, Plan):
        plan = given
    elif isinstance(given, str) and "*" in given:
        plan = parse_plan(given, profile)
    else:
        plan = read_plan(Path(given), profile)
    return plan if shard_optimizer is None else replace(plan, shard_optimizer=shard_optimizer)
