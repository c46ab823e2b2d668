"""Profiles on disk, so that one machine can measure and another can plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from spindle.artifact import read_artifact, write_artifact
from spindle.errors import ProfileError
from spindle.graph import MetaGraph
from spindle.profile.profile import Profile

KIND = "profile"


def write_profile(path: Path, profile: Profile) -> None:
    write_artifact(path, KIND, profile)


def read_profile(path: Path) -> Profile:
    return read_artifact(path, KIND, Profile)


def profile_for_graph(profile: Profile, graph: MetaGraph, num_devices: int, where: str) -> Profile:
    """The profile with this graph in place of its own. Refuses a profile that was measured for other ops, edges or
    parameters.

    Costs of layers may differ, because every run traces them anew.
    """
    if profile.cluster.num_devices != num_devices:
        raise ProfileError(
            f"{where} is for {profile.cluster.num_devices} devices, but {num_devices} ranks were started; start "
            f"{profile.cluster.num_devices} ranks, or measure again (spindle profile)"
        )
    measured, current = (
        {op.name: (op.num_layers, op.batch_size) for op in metagraph.metaops} for metagraph in (profile.graph, graph)
    )
    for name in (*current, *measured):
        if current.get(name) != measured.get(name):
            raise ProfileError(
                f"{where} was measured for other tasks: it has {_describe(name, measured)}, this training has "
                f"{_describe(name, current)}; measure again (spindle profile)"
            )
    if list(measured) != list(current) or profile.graph.all_edges != graph.all_edges:
        raise ProfileError(f"{where} was measured for tasks in a different order; measure again (spindle profile)")
    if _weights(profile.graph) != _weights(graph):
        raise ProfileError(
            f"{where} was measured for modules with other weights, or with other weights frozen; measure again "
            "(spindle profile)"
        )
    return replace(profile, graph=graph)


def _weights(graph: MetaGraph) -> list[tuple[str, int, bool]]:
    """What must agree of the parameters. Not `is_split`, which a single process does not detect."""
    return [(parameter.name, parameter.num_elements, parameter.trainable) for parameter in graph.parameters]


def _describe(name: str, ops: Mapping[str, tuple[int, int | None]]) -> str:
    if name not in ops:
        return f"no {name}"
    num_layers, batch_size = ops[name]
    return f"{name} with {num_layers} layers over {batch_size} samples"
