"""Profiles as files, so that what was measured on one machine can be planned on another."""

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


def fitting(profile: Profile, graph: MetaGraph, num_devices: int, where: str) -> Profile:
    """The profile for a graph that is the one it was measured for, but for what tracing found of its costs."""
    if profile.cluster.num_devices != num_devices:
        raise ProfileError(
            f"{where} is for {profile.cluster.num_devices} devices, but {num_devices} ranks were started; start as "
            "many, or measure again (spindle profile)"
        )
    measured, given = (
        {op.name: (op.num_layers, op.batch_size) for op in one.metaops} for one in (profile.graph, graph)
    )
    for name in (*given, *measured):
        if given.get(name) != measured.get(name):
            raise ProfileError(
                f"{where} was measured for other tasks: it has {_described(name, measured)}, this training has "
                f"{_described(name, given)}; measure again (spindle profile)"
            )
    if list(measured) != list(given) or profile.graph.edges != graph.edges:
        raise ProfileError(f"{where} was measured for tasks in another order; measure again (spindle profile)")
    if profile.graph.parameters != graph.parameters:
        raise ProfileError(
            f"{where} was measured for modules with other weights, or others of them frozen; measure again "
            "(spindle profile)"
        )
    return replace(profile, graph=graph)


def _described(name: str, ops: Mapping[str, tuple[int, int | None]]) -> str:
    if name not in ops:
        return f"no {name}"
    num_layers, batch_size = ops[name]
    return f"{name} with {num_layers} layers over {batch_size} samples"
