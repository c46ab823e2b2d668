"""From tasks to a workload with the times of its ops on this machine: measured, or from a given profile."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.utils._pytree import tree_map

from spindle.errors import ProfileError
from spindle.graph import MetaGraph
from spindle.launch import Capture, Captured, ProfileCapture, WorkloadCapture, recorder, variables
from spindle.measure import local_profile, measure_update
from spindle.models import clone_leaf, without_torch_logs
from spindle.profile import Profile, profile_for_graph, read_profile, write_profile
from spindle.run import World, on_compute_stream, on_device
from spindle.train.analyze import AnalyzedWorkload, analyze, autocast_of, without_tasks
from spindle.train.bind import BoundWorkload
from spindle.train.config import MakeProfile, TrainConfig
from spindle.train.items import lengths_in
from spindle.train.kinds import kinds_of
from spindle.train.progress import Progress
from spindle.train.task import TaskDefinition
from spindle.train.task_errors import explained_errors
from spindle.train.trace import unchanged
from spindle.workload import GIVEN_PLAN, OWN_FUNCTION, Workload, write_workload


@dataclass(frozen=True, slots=True)
class ProfiledWorkload:
    """A workload, and how long its ops take on this machine."""

    workload: AnalyzedWorkload
    profile: Profile

    def without_tasks(self, ended: Collection[str], name: str) -> ProfiledWorkload:
        """The same without some task variants, under another name. Nothing is traced or measured again."""
        workload = without_tasks(self.workload, ended, name)
        # A call that an ended task has computed for others is computed by another task from now on.
        shared_calls, measured = self.workload.bound.shared_calls, {}
        for op in workload.graph.metaops:
            task, call = shared_calls.get((op.task, op.call or ""), (op.task, op.call))
            measured[op.name] = op.name.replace(f"{op.task}/{op.call}", f"{task}/{call}", 1)
        return ProfiledWorkload(workload, self.profile.restricted(workload.graph, measured))


def trace_and_profile(
    definitions: Collection[TaskDefinition],
    examples: Mapping[str, Any],
    config: TrainConfig,
    world: World,
    progress: Progress,
    notify: Callable[[str], None],
    capture: Capture | None,
    saved: Profile | None = None,
    num_steps: int | None = None,
) -> ProfiledWorkload:
    """Analyze and profile these task variants, each on its batch in `examples`.

    Under a `capture`, write what it requests instead, and end the script; a captured workload says how many steps the
    fit has. A `saved` profile is used if it was measured for the same tasks on at least as many devices.
    """

    def run_tasks() -> None:
        for definition in definitions:
            definition(on_device(tree_map(clone_leaf, examples[definition.name]), world.device))

    with on_compute_stream(world.device), without_torch_logs(), explained_errors(run_tasks):
        # copies, because a trial run may overwrite its input
        copies = {name: on_device(tree_map(clone_leaf, batch), world.device) for name, batch in examples.items()}
        progress.stage("recording tasks")
        has_weights = not isinstance(capture, WorkloadCapture)
        workload = analyze(config, definitions, copies, world, notify, has_weights=has_weights)
        if isinstance(capture, WorkloadCapture):
            write_workload(capture.output, replace(_planned_as(workload.bound.workload, config), num_steps=num_steps))
            raise Captured
        profile = _fitting_saved(saved, workload.graph, world) if capture is None else None
        if profile is None:
            profile = profile_workload(workload, config, copies, world, progress, notify, capture)
        if capture is not None:
            if world.rank == 0:
                write_profile(capture.output, profile)
            world.barrier()
            raise Captured
        return ProfiledWorkload(workload, profile)


def _planned_as(workload: Workload, config: TrainConfig) -> Workload:
    """The workload with what the script says about its planning."""
    planning = config.planning
    planner = planning.planner if isinstance(planning.planner, str) else OWN_FUNCTION
    return replace(
        workload,
        tensor_degrees=tuple(planning.tensor_parallel_degrees.items()),
        planner=planner if planning.plan is None else GIVEN_PLAN,
        pipeline_parallel_degree=planning.pipeline_parallel_degree if planning.is_pipelined else None,
    )


def report_workload(workload: Workload, config: TrainConfig, world: World) -> None:
    """Report the current workload to a scheduler that wants to know when tasks end or join."""
    path = os.environ.get(variables.WORKLOAD_REPORT)
    if path is None or world.rank != 0:
        return
    modules = {module.name for module in workload.modules}
    reported = _planned_as(workload, config)
    reported = replace(
        reported, tensor_degrees=tuple(entry for entry in reported.tensor_degrees if entry[0] in modules)
    )
    with suppress(OSError):  # without a report, the scheduler keeps its estimates
        write_workload(Path(path), reported)
        recorder.begin_tasks(reported.tasks_digest)


def profile_workload(
    workload: AnalyzedWorkload,
    config: TrainConfig,
    examples: Mapping[str, Any],
    world: World,
    progress: Progress,
    notify: Callable[[str], None],
    capture: ProfileCapture | None = None,
) -> Profile:
    """The given profile, or a measured one. `examples` has a batch of each task variant on which layers are measured.
    Under a `capture`, layers are always measured."""
    bound, graph = workload.bound, workload.graph
    if config.planning.profile is not None and capture is None:
        return _given_profile(config.planning.profile, graph, world)
    kinds = world.broadcast_object(kinds_of(bound, graph) if world.rank == 0 else None)
    modules = [handle.module for handle in bound.handles.values()]
    with progress.bar("measuring layers") as report_share, unchanged(modules), autocast_of(config, world):
        return local_profile(
            graph,
            workload.code,
            kinds,
            examples,
            bound.batch_axes,
            world,
            update_bytes_per_s=lambda: _measured_update_speed(bound, config, graph.numerics.update_bytes),
            progress=report_share,
            notify=notify,
            graphs=config.cuda_graphs and not config.planning.is_pipelined,  # a pipeline's programs live for one step
            lanes=config.planning.lanes,
            quotas=config.planning.quotas,
            lengths={name: lengths_in(task.recorded.definition, examples[name]) for name, task in bound.tasks.items()}
            if config.planning.is_pipelined or capture is not None
            else None,
            capture=capture,
        )


def _measured_update_speed(bound: BoundWorkload, config: TrainConfig, update_bytes: int) -> float | None:
    """The optimizer's speed in bytes per second; in a sweep, that of the slowest trial."""
    owners = bound.trial_of if config.is_sweep else {}
    rates = (
        measure_update(
            options.optimizer,
            {name: value for name, value in bound.parameters.items() if owners.get(name, "") == options.trial},
            update_bytes,
        )
        for options in config.updates
    )
    return min((rate for rate in rates if rate is not None), default=None)


def _fitting_saved(saved: Profile | None, graph: MetaGraph, world: World) -> Profile | None:
    if saved is None:
        return None
    try:
        return profile_for_graph(saved.up_to(world.size), graph, world.size, "the saved profile")
    except ProfileError:  # it was measured for other tasks, or for fewer devices
        return None


def _given_profile(given: Profile | Path | str | MakeProfile, graph: MetaGraph, world: World) -> Profile:
    """Rank 0's profile, on all ranks."""
    profile: Profile | None = None
    if isinstance(given, Profile):
        profile = given
    elif world.rank == 0:
        profile = given(graph, world.size) if callable(given) else read_profile(Path(given))
    source = str(given) if isinstance(given, str | Path) else "Planning(profile=...)"
    return profile_for_graph(world.broadcast_object(profile), graph, world.size, source)
