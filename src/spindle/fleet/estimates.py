"""Step times of cells without running a job: bounds and plans, from a roofline or from a profile that was measured.

A bound takes milliseconds, a plan seconds. Planning is lazy: choose on bounds, plan only the chosen cells, choose again
with their times, until no new cell is chosen. Bounds are optimistic, so no better cell is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from spindle.cluster import Cluster
from spindle.display import count_of
from spindle.errors import ClusterError, DoesNotFitError, FleetError, ProfileError, WorkloadError
from spindle.fleet.cells import Cell, Estimate
from spindle.fleet.fleet import Fleet
from spindle.fleet.job import Job
from spindle.graph import metagraph_of
from spindle.plan import Plan
from spindle.planners import (
    PLANNERS,
    PlanOptions,
    choose_layout,
    graph_bound_s,
    make_plan,
    pipeline_bound_s,
    pipeline_layout,
    planner_of,
)
from spindle.profile import Profile, Roofline, profile_for_graph, roofline_profile
from spindle.recipes import Step
from spindle.simulate import simulate_step
from spindle.workload import GIVEN_PLAN, Workload

StepOn = Callable[[Cluster], Step]  # the step of a job on a cluster of one kind
_PIPELINE = "pipeline"
_UNSUITABLE = (ClusterError, ProfileError, WorkloadError)  # a number of devices that does not suit a job


def workload_step(
    workload: Workload,
    roofline: Roofline = Roofline(),  # noqa: B008
    measured: Mapping[str, Profile] = MappingProxyType({}),
) -> StepOn:
    """The step of a workload: with the times of a roofline, and on kinds of devices where its layers were `measured`
    with those.

    On more devices than were measured, layers are as much slower than the roofline's as they are all together on the
    largest measured number; nothing else is extrapolated. The planner is `cell_planner_of` the workload. A script's
    `pipeline_parallel_degree` has to divide the number of devices. All microbatches of a pipeline are like the first
    batch.
    """
    graph = metagraph_of(workload)
    degrees = dict(workload.tensor_degrees)
    profiles = {
        kind: profile_for_graph(profile, graph, profile.cluster.num_devices, f"the profile on {kind}").with_degrees(
            degrees
        )
        for kind, profile in measured.items()
    }

    def described(cluster: Cluster) -> Profile:
        return roofline_profile(graph, cluster, roofline).with_degrees(degrees)

    planner, _ = cell_planner_of(workload)
    degree = workload.pipeline_parallel_degree or 1

    def step(cluster: Cluster) -> Step:
        if cluster.num_devices % degree:
            raise WorkloadError(
                f"pipeline_parallel_degree={degree} of the script does not divide "
                f"{count_of(cluster.num_devices, 'device')}"
            )
        known = profiles.get(cluster.kind.name)
        profile = described(cluster) if known is None else _measured_on(known, cluster, described)
        num_micro_steps = workload.gradient_accumulation_steps
        if not PLANNERS[planner].is_pipeline:
            return Step(profile=lambda sizes: profile, planner=planner, num_micro_steps=num_micro_steps)
        microbatch = profile.on_one_device()
        microbatches = microbatch.repeated(num_micro_steps)
        return Step(
            profile=lambda sizes: microbatches,
            pipeline_ranks=workload.pipeline_parallel_degree or cluster.num_devices,
            layout_profile=microbatch,
        )

    return step


def cell_planner_of(workload: Workload) -> tuple[str, str]:
    """The planner that plans the cells of a workload. If that is not its script's, also the reason."""
    return (_PIPELINE, "") if workload.planner == _PIPELINE else planner_of(workload)


def other_planner_note(workload: Workload) -> str:
    """A sentence if cells are not estimated with the planner of the workload's script, which then plans for itself when
    it starts; else empty."""
    planner, reason = cell_planner_of(workload)
    hint = " (give it as --count)" if workload.planner == GIVEN_PLAN else ""
    return f"cells are estimated with {planner!r}: {reason}{hint}" if reason else ""


def _measured_on(measured: Profile, cluster: Cluster, described: Callable[[Cluster], Profile]) -> Profile:
    num_measured = measured.cluster.num_devices
    if cluster.num_devices <= num_measured:
        part = measured.up_to(cluster.num_devices)
        # Other jobs keep the rest of the GPU busy: no share is ever faster because its neighbours are idle.
        return replace(part, host_rates=()) if cluster.kind.num_shares > 1 else part
    ratio = graph_bound_s(measured) / graph_bound_s(described(cluster.up_to(num_measured)))
    beyond = described(cluster)
    curves = tuple(tuple(curve.scaled(ratio) for curve in curves) for curves in beyond.curves)
    return replace(beyond, curves=curves)


def bound_estimates(step_on: StepOn, fleet: Fleet, job: Job) -> tuple[Estimate, ...]:
    """Bounds of every cell that a job accepts, without those that it cannot run in."""
    estimates, refused = [], ""
    for kind, device in enumerate(fleet.kinds):
        for count in fleet.counts(kind):
            if job.accepts(device.name, count):
                try:
                    estimates.append(_bound(step_on, fleet, Cell(kind=device.name, num_devices=count)))
                except _UNSUITABLE as error:
                    refused = f"; {error}"
    if not estimates:
        cells = "; ".join(
            f"{', '.join(map(str, fleet.counts(kind)))} of {device.name}" for kind, device in enumerate(fleet.kinds)
        )
        raise FleetError(
            f"job {job.name!r} can run in no cell of the fleet: it accepts "
            f"{', '.join(job.kinds) or 'any kind'}, {job.min_devices} to {job.max_devices or 'any number of'} devices; "
            f"a job may have {cells}{refused}"
        )
    return tuple(estimates)


def bound_estimate(step_on: StepOn, fleet: Fleet, cell: Cell) -> Estimate | None:
    """The bound of one cell; None if its number of devices does not suit the job (a pipeline's stages, say)."""
    try:
        return _bound(step_on, fleet, cell)
    except _UNSUITABLE:
        return None


def _bound(step_on: StepOn, fleet: Fleet, cell: Cell) -> Estimate:
    step = step_on(fleet.cluster_of(fleet.kind_number(cell.kind), cell.num_devices))
    if step.pipeline_ranks is None:
        # No device begins a layer again before all that depends on it has run backward: no micro-steps are faster
        # together than one after the other.
        return Estimate(cell=cell, step_s=step.num_micro_steps * graph_bound_s(step.whole), grade="bound")
    bound_s = pipeline_bound_s(step.split_profiles(), step.pipeline_ranks)
    return Estimate(cell=replace(cell, num_stages=step.pipeline_ranks), step_s=bound_s, grade="bound")


def planned_estimate(
    step_on: StepOn,
    fleet: Fleet,
    bound: Estimate,
    options: PlanOptions = PlanOptions(),  # noqa: B008
) -> Estimate:
    """The simulated step of the plan that the job would run in a cell; one that does not fit has `fits` False and the
    memory that it would need."""
    return planned_cell(step_on, fleet, bound, options)[0]


def planned_cell(
    step_on: StepOn,
    fleet: Fleet,
    bound: Estimate,
    options: PlanOptions = PlanOptions(),  # noqa: B008
) -> tuple[Estimate, Plan | None, Profile | None]:
    """The estimate of a planned cell, with its plan and the profile that this was made from."""
    cell = bound.cell
    step = step_on(fleet.cluster_of(fleet.kind_number(cell.kind), cell.num_devices))
    try:
        profile, planner, given = _planner_input(step, options)
        plan = make_plan(profile, planner, given)
    except DoesNotFitError as error:
        return replace(bound, grade="planned", fits=False, memory_bytes=error.needed_bytes), None, None
    step_s, peak_bytes = simulate_step(plan, profile, step.num_micro_steps)
    return replace(bound, step_s=step_s, grade="planned", memory_bytes=peak_bytes), plan, profile


def _planner_input(step: Step, options: PlanOptions) -> tuple[Profile, str, PlanOptions]:
    if step.pipeline_ranks is None:
        return step.whole, step.planner, options
    profiles = step.split_profiles()
    if step.layout_profile is None:
        profile, layout = choose_layout(profiles, step.pipeline_ranks)
    else:
        profile, layout = step.whole, pipeline_layout(step.layout_profile, step.pipeline_ranks)
    bound_s = pipeline_bound_s(profiles, step.pipeline_ranks)
    return profile, _PIPELINE, replace(options, pipeline_ranks=step.pipeline_ranks, layouts=(layout,), bound_s=bound_s)


def least_memory(estimates: tuple[Estimate, ...]) -> int:
    """The least memory of a device with which some cell would fit; 0 if one does."""
    if any(estimate.fits for estimate in estimates):
        return 0
    return min((estimate.memory_bytes for estimate in estimates if estimate.memory_bytes), default=0)
