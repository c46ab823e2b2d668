"""The places where tests reach behind Spindle's public interface, all in one file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import spindle
from backends import graphs_on_any_device, on_gpu
from spindle.cluster import cluster_named
from spindle.graph import MetaGraph
from spindle.profile import Profile, roofline_profile
from spindle.run import Executor
from spindle.train import analyze, profiling, reporting, steps
from spindle.train.tensor import Sharing, find_sharing


def guessed_profile(graph: MetaGraph, num_devices: int) -> Profile:
    """A profile from a roofline: quick, and the same each time."""
    return replace(roofline_profile(graph, cluster_named(f"cpux{num_devices}")), gradients_stay=False, sends_stay=True)


def unmeasured() -> Any:
    """Inside, a Trainer plans from a guessed profile, without `Planning(profile=...)`."""

    def guess(graph: Any, code: Any, kinds: Any, examples: Any, axes: Any, world: Any, **options: Any) -> Profile:
        return guessed_profile(graph, world.size)

    return mock.patch.object(profiling, "local_profile", guess)


class CapturingExecutor(Executor):
    """Captures slots though there is no GPU."""

    def __init__(self, *args: Any, cuda_graphs: bool, **options: Any) -> None:
        super().__init__(*args, cuda_graphs=cuda_graphs, **options)
        self.graph_cache.is_enabled = cuda_graphs


@contextmanager
def capturing() -> Iterator[None]:
    """Inside, a Trainer captures slots, with or without a GPU."""
    if on_gpu():
        yield
        return
    with graphs_on_any_device(), mock.patch.object(steps, "Executor", CapturingExecutor):
        yield


_SHARING: dict[tuple[str, ...], Sharing] = {}  # a process of the pool serves many tests


def sharing_found_once(workload: str) -> Any:
    """Inside, which tensor degrees the modules of tasks can have is found once per process: trying layers is slow."""

    def find(tasks: Sequence[Any], *args: Any, **options: Any) -> Sharing:
        key = (workload, *(task.name for task in tasks))
        if key not in _SHARING:
            _SHARING[key] = find_sharing(tasks, *args, **options)
        return _SHARING[key]

    return mock.patch.object(analyze, "find_sharing", find)


def losses_behind(trainer: spindle.Trainer) -> int:
    """Steps by which losses reach `on_step` late, inside `one_step_behind`."""
    return reporting.LOSSES_BEHIND[trainer.world.device.type]


def one_step_behind() -> Any:
    """Inside, losses reach `on_step` one step late on a GPU too. Further behind, several would arrive at once when
    tasks change, and so would the changes that they trigger."""
    return mock.patch.dict(reporting.LOSSES_BEHIND, {"cuda": 1})
