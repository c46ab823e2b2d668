"""The balance of plans that run encoders in parts: the load of each module over devices, and what is recomputed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spindle.display import count_of, percent, seconds
from spindle.graph import MetaGraph
from spindle.plan import Plan
from spindle.profile import Profile
from spindle.program import Program, lower
from spindle.simulate.costs import passes_s
from spindle.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLoad:
    """A module over the devices of a plan: seconds of the slowest device and on average, slots on sequence groups, and
    the share of its layers that is recomputed."""

    module: str
    slowest_s: float
    mean_s: float
    num_parts: int
    num_shared: int
    recomputed: float

    @property
    def imbalance(self) -> float:
        """The slowest device over the mean of all devices."""
        return self.slowest_s / max(self.mean_s, 1e-30)


def module_loads(plan: Plan, profile: Profile) -> list[ModuleLoad]:
    """The load of each module, by the times of the plan's passes; the mean is over the devices that hold the module."""
    program = lower(plan, profile)
    time_s = passes_s(program, profile)
    busy: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(program.num_ranks))
    layers: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    parts: dict[str, set[str]] = defaultdict(set)
    shared: dict[str, set[str]] = defaultdict(set)
    for number, instruction in enumerate(program.instructions):
        slot_number = getattr(instruction, "slot", None)
        if slot_number is not None:
            module = profile.graph.metaops[program.slots[slot_number].op].module or ""
            busy[module][program.slots[slot_number].ranks] += time_s[number]
    for slot, shape in zip(plan.slots, program.slots, strict=True):
        op = profile.graph.metaops[shape.op]
        layers[op.module or ""][0] += slot.recomputed
        layers[op.module or ""][1] += slot.num_layers
        if op.items:
            parts[op.module or ""].add(f"{op.task}/{op.call}")
        if slot.sequence_degree > 1:
            shared[op.module or ""].add(f"{op.task}/{op.call}")
    return [
        ModuleLoad(
            module=module,
            slowest_s=float(times.max()),
            mean_s=float(times[times > 0].mean()) if times.any() else 0.0,
            num_parts=len(parts[module]),
            num_shared=len(shared[module]),
            recomputed=layers[module][0] / max(1, layers[module][1]),
        )
        for module, times in busy.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBalance:
    """The busy time of the slowest device over the mean of all devices, in one step: in calls that run in parts, in all
    other calls, and in both together."""

    parts: float
    others: float
    together: float


def step_balance(timeline: Timeline, program: Program, graph: MetaGraph) -> StepBalance | None:
    """The balance of a simulated or measured step; None if none of its calls runs in parts."""
    is_part = np.array([bool(graph.metaops[shape.op].items) for shape in program.slots], dtype=bool)
    if not is_part.any():
        return None
    slot_of = np.array([getattr(instruction, "slot", -1) for instruction in program.instructions])[timeline.instruction]
    time_ns = (timeline.end - timeline.start)[slot_of >= 0]
    ranks, parts = timeline.rank[slot_of >= 0], is_part[slot_of[slot_of >= 0]]
    busy = [
        np.bincount(ranks[chosen], weights=time_ns[chosen], minlength=timeline.num_ranks) for chosen in (parts, ~parts)
    ]
    slowest = [float(times.max() / max(times.mean(), 1e-30)) for times in (*busy, busy[0] + busy[1])]
    return StepBalance(parts=slowest[0], others=slowest[1], together=slowest[2])


def module_load_lines(loads: Sequence[ModuleLoad]) -> list[str]:
    """A sentence for each module."""
    lines = []
    for load in loads:
        parts = f", in {count_of(load.num_parts, 'part')}, {load.num_shared} of them shared" if load.num_parts else ""
        lines.append(
            f"{load.module}: {seconds(load.slowest_s)} on the slowest device, {load.imbalance:.2f} × the mean of those "
            f"that run it{parts}; {percent(load.recomputed)} of its layers recomputed."
        )
    return lines


def placement_lines(compared: Sequence[tuple[str, float | None, str]], chosen: str) -> list[str]:
    """What each placement of encoders would take, shortest first: text, seconds or None, and why it does not fit."""
    fitting = sorted((time_s, text) for text, time_s, _ in compared if time_s is not None)
    lines = [f"{seconds(time_s)}: {text}{' (chosen)' if text == chosen else ''}." for time_s, text in fitting]
    return lines + [f"does not fit: {text} ({why})." for text, time_s, why in compared if time_s is None]
