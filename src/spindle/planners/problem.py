"""What a planner has to solve: some ops of a profile under one setting, with only the choices worth having."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spindle.profile import Profile, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The numbers of devices that an op may take, increasing, with the folded seconds of one layer on each, strictly
    decreasing."""

    num_devices: NDArray[np.int64]
    layer_s: NDArray[np.float64]

    def time_on(self, num_devices: int) -> float:
        position = int(np.searchsorted(self.num_devices, num_devices))
        assert self.num_devices[position] == num_devices
        return float(self.layer_s[position])

    def widest_within(self, num_devices: int) -> int | None:
        """The largest choice of at most `num_devices` devices."""
        position = int(np.searchsorted(self.num_devices, num_devices, side="right"))
        return int(self.num_devices[position - 1]) if position else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a scheduler has to solve. Ops are numbered within the problem; `ops` maps them to the graph. Edges to other
    ops are dropped, because those ran in an earlier round."""

    profile: Profile
    setting: Setting
    ops: tuple[int, ...]
    num_layers: tuple[int, ...]
    choices: tuple[Choices, ...]
    predecessors: tuple[tuple[int, ...], ...]
    levels: tuple[int, ...]
    tasks: tuple[str, ...]
    num_devices: int

    @property
    def num_ops(self) -> int:
        return len(self.ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """The next layers of an op (numbered in the graph) on a number of devices, with start and end in folded time.

    A planner may require a wave (the piece then starts no earlier than planned) and a `team`: all pieces of a team use
    the devices of its first piece.
    """

    op: int
    num_layers: int
    num_devices: int
    start_s: float
    end_s: float
    round: int = 0
    wave: int | None = None
    team: str | None = None


def problem_of(profile: Profile, setting: Setting, tasks: frozenset[str] | None = None) -> Problem:
    """The problem of all tasks, or of the given tasks."""
    graph = profile.graph
    ops = tuple(position for position, op in enumerate(graph.metaops) if tasks is None or op.task in tasks)
    groups = graph.task_groups
    place = {op: number for number, op in enumerate(ops)}
    return Problem(
        profile=profile,
        setting=setting,
        ops=ops,
        num_layers=tuple(graph.metaops[op].num_layers for op in ops),
        choices=tuple(choices_of(profile, setting, op) for op in ops),
        predecessors=tuple(tuple(place[producer] for producer in graph.predecessors[op]) for op in ops),
        levels=tuple(graph.levels[op] for op in ops),
        tasks=tuple(groups[graph.metaops[op].task] for op in ops),
        num_devices=profile.cluster.num_devices,
    )


def choices_of(profile: Profile, setting: Setting, op: int, divisors_only: bool = False) -> Choices:
    """The allowed numbers of devices, without those on which a layer is no faster than on fewer.

    Dropping them gives the running minimum that Theorem 1 of the paper needs, without pretending that idle devices
    help.
    """
    curve = profile.curve(op, setting)
    counts = np.asarray(curve.num_devices, dtype=np.int64)
    layer_s = curve.folded_s(setting.recompute[op])
    batch_size = profile.graph.metaops[op].batch_size
    if divisors_only and batch_size is not None:
        divides = (batch_size * curve.tensor_degree) % counts == 0
        if divides.any():
            counts, layer_s = counts[divides], layer_s[divides]
    return falling(counts, layer_s)


def falling(counts: NDArray[np.int64], layer_s: NDArray[np.float64]) -> Choices:
    """The choices that are faster than every smaller one."""
    best = np.minimum.accumulate(layer_s)
    faster = np.append(True, layer_s[1:] < best[:-1] * (1 - 1e-12))
    return Choices(num_devices=counts[faster], layer_s=layer_s[faster])
