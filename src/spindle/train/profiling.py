"""From tasks to a workload with the times of its ops on this machine: measured, or from a given profile."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from spindle.errors import ProfileError
from spindle.graph import MetaGraph
from spindle.launch import Capture, Captured, ProfileCapture, WorkloadCapture, recorder, variables
from spindle.measure import local_profile, measure_update
from spindle.models import without_torch_logs
from spindle.profile import Profile, fitting, read_profile, write_profile
from spindle.run import World, on_compute_stream, on_device
from spindle.train.analyze import AnalyzedWorkload, analyze, autocast_of, without_tasks
from spindle.train.config import MakeProfile, TrainConfig
from spindle.train.items import lengths_in
from spindle.train.kinds import kinds_of
from spindle.train.progress import Progress
from spindle.train.task import TaskDefinition
from spindle.train.task_errors import explained_errors
from spindle.train.trace import unchanged
from spindle.workload import Workload, write_workload


@dataclass(frozen=True, slots=True)
class ProfiledWorkload:
    """A workload, and how long its ops take on this machine."""

    workload: AnalyzedWorkload
    profile: Profile

    def without_tasks(self, ended: Collection[str], name: str) -> ProfiledWorkload:
        """What remains without some task variants, under another name. Nothing is traced or measured again."""
        workload = without_tasks(self.workload, ended, name)
        return ProfiledWorkload(workload, self.profile.restricted(workload.graph))


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
    """Analyze and profile these task variants, of which `examples` has a batch each. Under a `capture`, write what it
    asks for instead, and end the script; a workload says how many steps the fit has. A `saved` profile holds where it
    is for the same tasks, on as many devices or more."""

    def run_tasks() -> None:
        for definition in definitions:
            definition(on_device(tree_map(_cloned, examples[definition.name]), world.device))

    with on_compute_stream(world.device), without_torch_logs(), explained_errors(run_tasks):
        # Copies, because a trial may overwrite its input.
        copies = {name: on_device(tree_map(_cloned, batch), world.device) for name, batch in examples.items()}
        progress.stage("recording tasks")
        has_weights = not isinstance(capture, WorkloadCapture)
        workload = analyze(config, definitions, copies, world, notify, has_weights=has_weights)
        if isinstance(capture, WorkloadCapture):
            degrees = tuple(config.planning.tensor_parallel_degrees.items())
            captured = replace(workload.bound.workload, tensor_degrees=degrees, num_steps=num_steps)
            write_workload(capture.output, captured)
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


def report_workload(
    workload: Workload, config: TrainConfig, world: World, environment: Mapping[str, str] = os.environ
) -> None:
    """Tell a scheduler what is trained from now on, where one asks for it: a task may have ended or joined."""
    path = environment.get(variables.WORKLOAD_REPORT)
    if path is None or world.rank != 0:
        return
    modules = {module.name for module in workload.modules}
    degrees = config.planning.tensor_parallel_degrees.items()
    reported = replace(workload, tensor_degrees=tuple(entry for entry in degrees if entry[0] in modules))
    with suppress(OSError):  # the scheduler keeps its estimates
        write_workload(Path(path), reported)
        recorder.begin_tasks(reported.tasks_digest)


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def profile_workload(
    workload: AnalyzedWorkload,
    config: TrainConfig,
    examples: Mapping[str, Any],
    world: World,
    progress: Progress,
    notify: Callable[[str], None],
    capture: ProfileCapture | None = None,
) -> Profile:
    """The given profile, or a measured one: `examples` has a batch of each task variant to measure layers on.

    Under a `capture` layers are always measured.
    """
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
            update_bytes_per_s=lambda: measure_update(config.optimizer, bound.parameters, graph.numerics.update_bytes),
            progress=report_share,
            notify=notify,
            graphs=config.cuda_graphs and not config.planning.is_pipelined,  # whose programs live for a step
            lanes=config.planning.lanes,
            quotas=config.planning.quotas,
            lengths={name: lengths_in(task.recorded.definition, examples[name]) for name, task in bound.tasks.items()}
            if config.planning.is_pipelined or capture is not None
            else None,
            capture=capture,
        )


def _fitting_saved(saved: Profile | None, graph: MetaGraph, world: World) -> Profile | None:
    try:
        return None if saved is None else fitting(saved.up_to(world.size), graph, world.size, "the saved profile")
    except ProfileError:  # of other tasks, or for fewer devices
        return None


def _given_profile(given: Profile | Path | str | MakeProfile, graph: MetaGraph, world: World) -> Profile:
    """Rank 0's profile, on all ranks."""
    profile: Profile | None = None
    if isinstance(given, Profile):
        profile = given
    elif world.rank == 0:
        profile = given(graph, world.size) if callable(given) else read_profile(Path(given))
    source = str(given) if isinstance(given, str | Path) else "Planning(profile=...)"
    return fitting(world.broadcast_object(profile), graph, world.size, source)
