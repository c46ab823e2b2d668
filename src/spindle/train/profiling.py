"""How long the ops of a workload take here: measured, or from a profile that the user gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spindle.graph import MetaGraph
from spindle.launch.capture import ProfileCapture
from spindle.measure import local_profile, measure_update
from spindle.profile import Profile, fitting, read_profile
from spindle.run import World
from spindle.train.analyze import AnalyzedWorkload, autocast_of
from spindle.train.config import MakeProfile, TrainConfig
from spindle.train.kinds import kinds_of
from spindle.train.progress import Progress
from spindle.train.trace import unchanged


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
            capture=capture,
        )


def _given_profile(given: Profile | Path | str | MakeProfile, graph: MetaGraph, world: World) -> Profile:
    """Rank 0's profile, on all ranks."""
    profile: Profile | None = None
    if isinstance(given, Profile):
        profile = given
    elif world.rank == 0:
        profile = given(graph, world.size) if callable(given) else read_profile(Path(given))
    source = str(given) if isinstance(given, str | Path) else "Planning(profile=...)"
    return fitting(world.broadcast_object(profile), graph, world.size, source)
