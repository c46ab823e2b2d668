"""Quotas: the SMs of a device divided among the lanes of a finished plan, where that is simulated to be faster.

Lanes that share all SMs fill the gaps that each of them leaves, so quotas gain only where lanes disturb each other more
than fewer SMs cost (Mosaic gives every module a quota; its algorithm is not published, this one is our own). Which
slots stand on which lane stays as it is. The division begins with SMs in proportion to the work of each lane, and goes
on with moves of one to eight groups of SMs from lane to lane, because times on more SMs have plateaus; with two lanes,
all divisions are simulated. The SMs that the driver leaves over go where they help most.

Left out: lanes for weight gradients, which run on the SMs of their slot whatever the quotas are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spindle.plan import Plan, check, setting_of, spans
from spindle.planners.lanes import lanes_bound_s
from spindle.profile import Profile
from spindle.program import lower, verify
from spindle.simulate import simulate

EVALUATIONS = 300
_LARGEST_MOVE = 8  # groups of SMs

# The number of SM groups of each lane, and the lane that gets the remaining SMs.
_Division = tuple[tuple[int, ...], int | None]


def with_quotas(plan: Plan, profile: Profile) -> Plan:
    """The plan with a quota for each of its lanes. The unchanged plan if no quotas are simulated to be faster, or if no
    times on some of the SMs are known."""
    if plan.num_lanes == 1 or not _has_sm_times(plan, profile) or any(slot.has_weight_lane for slot in plan.slots):
        return plan
    best = QuotaSearch(plan, profile).fastest()
    if best is plan:
        return plan
    check(best, profile)
    verify(lower(best, profile), profile)
    return replace(best, bound_s=lanes_bound_s(best, profile, plan.bound_s))


def _has_sm_times(plan: Plan, profile: Profile) -> bool:
    setting = setting_of(plan, profile)
    curves = [profile.curve(profile.graph.positions[slot.op], setting) for slot in plan.slots]
    return profile.cluster.kind.sm_groups is not None and all(curve.sm_times is not None for curve in curves)


class QuotaSearch:
    """Searches divisions of the SMs among lanes, and keeps the simulated plans."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self._plan, self._profile = plan, profile
        groups = profile.cluster.kind.sm_groups
        assert groups is not None
        self._groups = groups
        self._program = lower(plan, profile)
        setting = setting_of(plan, profile)
        curves = [profile.curve(op, setting) for op in range(len(profile.graph.metaops))]
        measured = [curve.sm_times.num_sms[0] for curve in curves if curve.sm_times is not None]
        self._least = -(-max(measured) // groups.group_sms)  # groups of a lane
        self._known: dict[_Division, Plan] = {}

    @property
    def simulated(self) -> list[Plan]:
        """All plans with quotas that were simulated."""
        return list(self._known.values())

    def fastest(self) -> Plan:
        """The fastest plan of all that were simulated, including the given one."""
        num_lanes = self._plan.num_lanes
        if num_lanes * self._least > self._groups.num_groups:
            return self._plan
        # Otherwise no quota could ask for the remaining SMs.
        has_rest = self._groups.rest_sms % self._groups.group_sms > 0
        for counts in [self._climb(self._start())] if num_lanes > 2 else self._pairs():
            for with_rest in (None, *(range(num_lanes) if has_rest else ())):
                self._time_s((counts, with_rest))
        return min([self._plan, *self._known.values()], key=lambda plan: plan.makespan_s)

    def _pairs(self) -> list[tuple[int, ...]]:
        num_groups = self._groups.num_groups
        return [(first, num_groups - first) for first in range(self._least, num_groups - self._least + 1)]

    def _start(self) -> tuple[int, ...]:
        """Assign groups of SMs one by one to the lane with the most work per group."""
        work_s = [0.0] * self._plan.num_lanes
        for span in spans(self._plan, self._profile):
            work_s[self._plan.slots[span.slot].lane] += span.end_s - span.start_s
        counts = [self._least] * len(work_s)
        for _ in range(self._groups.num_groups - sum(counts)):
            counts[max(range(len(counts)), key=lambda lane: (work_s[lane] / counts[lane], -lane))] += 1
        return tuple(counts)

    def _climb(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Take the best of all moves, again and again, until none is faster."""
        while len(self._known) < EVALUATIONS:
            moved = min(self._moves(counts), key=lambda other: self._time_s((other, None)), default=counts)
            if self._time_s((moved, None)) >= self._time_s((counts, None)):
                return counts
            counts = moved
        return counts

    def _moves(self, counts: Sequence[int]) -> list[tuple[int, ...]]:
        moves = []
        for giver in range(len(counts)):
            for taker in range(len(counts)):
                for size in range(1, min(_LARGEST_MOVE, counts[giver] - self._least) + 1):
                    if giver != taker:
                        moved = list(counts)
                        moved[giver] -= size
                        moved[taker] += size
                        moves.append(tuple(moved))
        return moves

    def _time_s(self, division: _Division) -> float:
        if division not in self._known:
            counts, with_rest = division
            quotas = tuple(
                count * self._groups.group_sms + self._groups.rest_sms * (lane == with_rest)
                for lane, count in enumerate(counts)
            )
            plan = replace(self._plan, quotas=quotas)
            timeline = simulate(replace(self._program, plan=plan), self._profile)
            self._known[division] = replace(plan, makespan_s=timeline.makespan_s)
        return self._known[division].makespan_s
