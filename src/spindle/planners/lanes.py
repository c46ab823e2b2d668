"""Lanes: slots of a finished plan that run at the same time on one device, where that is simulated to be faster.

Modules that are too small to fill a device share it (Mosaic, §1; the algorithm here is our own). The slots of a module
are a *group* on one lane, because their lane fixes the order in which they add to a gradient. The search chooses a lane
for each group, another one for its weight gradients if the profile has their time, and the order of the groups. At
first, the longest group has a lane of its own, and each of the others the lane with the least work. Simulated annealing
continues from there; then all neighbours of the best candidate are tried until none is faster. Candidates are
simulated: slots that run at the same time slow each other down by their measured pressure and fill. The result is
never slower than the given plan, and weight gradients get lanes of their own only if the simulated gain is larger than
the error of its prediction.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product

import numpy as np

from spindle.errors import PlanError
from spindle.plan import MAX_LANES, Piece, Plan, assemble, check, setting_of, slot_needs, spans
from spindle.profile import Profile, Setting, SmTimes
from spindle.program import Memory, instances_of, lower, verify
from spindle.simulate import simulate

EVALUATIONS = 120
_HOT, _COLD = 0.03, 0.001  # temperatures at the beginning and at the end, as shares of the step
# The least simulated gain over plain lanes for which weight gradients get lanes of their own. Measured on one H200
# (experiments/LOG.md), gains were 3.6 to 5.3 points below those simulated: 7.4 % became 2.1 %, 3.1 % became a loss of
# 1.2 %, 1.6 % a loss of 2.0 %.
MIN_WEIGHT_LANES_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A lane for each group and for its weight gradients, and the order in which groups are preferred."""

    lanes: tuple[int, ...]
    weight_lanes: tuple[int | None, ...]
    order: tuple[int, ...]


def can_share_devices(plan: Plan, profile: Profile) -> bool:
    """Whether lanes can be planned: contention was measured for all slots, and the plan gives no order of passes."""
    setting = setting_of(plan, profile)
    return not plan.passes and all(
        profile.curve(profile.graph.positions[slot.op], setting).contention for slot in plan.slots
    )


def with_lanes(plan: Plan, profile: Profile, most: int, seed: int = 0) -> Plan:
    """The plan with up to `most` lanes on each device; the unchanged plan if no other is simulated to be faster."""
    if not 1 <= most <= MAX_LANES:
        raise PlanError(f"a device has 1 to {MAX_LANES} lanes, got lanes={most}")
    if most == 1 or not can_share_devices(plan, profile):
        return plan
    search, numbers = _Search(plan, profile), random.Random(seed)
    if len(search.groups) > 1:
        search.anneal(most, EVALUATIONS // 2, numbers, splits=False)
        search.descend(most, EVALUATIONS // 2)
    if search.split_groups:
        search.anneal(most, EVALUATIONS // 2, numbers, splits=True)
    best = search.fastest()
    if best is plan:
        return plan
    check(best, profile)
    verify(lower(best, profile), profile)
    return replace(best, bound_s=lanes_bound_s(best, profile, plan.bound_s))


def lanes_bound_s(plan: Plan, profile: Profile, bound_s: float) -> float:
    """What no plan with lanes beats, given the bound of plans without: a pass takes a share of its device as large as
    its fill, and a path of the graph takes as long as alone, without weight gradients, which may run beside it. On
    several devices, every pass is given the smallest fill. With quotas, the share of a pass is that of the SMs on which
    it keeps the smallest part of a device busy for its time."""
    graph, setting = profile.graph, setting_of(plan, profile)
    fills = []
    area_s, path_s = 0.0, [0.0] * len(graph.metaops)
    for op in graph.order:
        curve = profile.curve(op, setting)
        count = graph.metaops[op].num_layers
        fastest = 1.0  # time on some SMs, relative to the time on all
        if plan.quotas:
            assert curve.sm_times is not None
            forward_fill, backward_fill = _sm_shares(curve.sm_times)
            fastest = min(*curve.sm_times.forward, *curve.sm_times.backward)
            fills += [forward_fill, backward_fill]
        else:
            fills += [fill for contention in curve.contention for _, fill in (contention.forward, contention.backward)]
            (_, forward_fill), (_, backward_fill) = curve.contention[0].forward, curve.contention[0].backward
        area_s += count * (min(1.0, forward_fill) * curve.forward_s[0] + min(1.0, backward_fill) * curve.backward_s[0])
        before_s = max((path_s[source] for source in graph.predecessors[op]), default=0.0)
        path_s[op] = before_s + count * fastest * float(min(curve.folded_s() - np.asarray(curve.weight_s or 0.0)))
    if profile.cluster.num_devices == 1:
        return min(bound_s, max(area_s, *path_s))
    return min(bound_s, max(min(1.0, *fills) * bound_s, *path_s))


def _sm_shares(sm_times: SmTimes) -> tuple[float, float]:
    """For forward and backward, the smallest share of a device's time that the layer needs: the share of SMs, times the
    time on them relative to the time on all SMs."""
    shares = np.asarray(sm_times.num_sms) / sm_times.num_sms[-1]
    return float((shares * sm_times.forward).min()), float((shares * sm_times.backward).min())


class _Search:
    """Searches candidates for one plan, and keeps their simulated plans."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self._plan, self._profile = plan, profile
        self._ops = [profile.graph.positions[slot.op] for slot in plan.slots]
        self._setting: Setting = setting_of(plan, profile)
        self._times_s = [span.end_s - span.start_s for span in spans(plan, profile)]
        self.groups = _groups(plan, profile, self._ops)
        self._group_of = {slot: group for group, slots in enumerate(self.groups) for slot in slots}
        # Groups with weight gradients whose backward can be split, so that these may run on another lane.
        self.split_groups = [
            group
            for group, slots in enumerate(self.groups)
            if any(self._can_split(slot) for slot in slots)
            and all(self._can_split(slot) for slot in slots if self._trains(slot))
        ]
        self._needs: list[list[int]] = [[] for _ in plan.slots]
        for producer, consumer in slot_needs(self._ops, profile.graph):
            self._needs[consumer].append(producer)
        self._known: dict[_Candidate, Plan | None] = {}

    def _can_split(self, slot: int) -> bool:
        op = self._ops[slot]
        curve = self._profile.curve(op, self._setting)
        return bool(curve.weight_s) and curve.tensor_degree == 1 and not self._setting.recompute[op]

    def _trains(self, slot: int) -> bool:
        graph, planned = self._profile.graph, self._plan.slots[slot]
        layers = graph.metaops[self._ops[slot]].parameters[planned.first : planned.last]
        return any(graph.parameters[parameter].trainable for layer in layers for parameter in layer)

    def anneal(self, most: int, evaluations: int, numbers: random.Random, *, splits: bool) -> None:
        """Simulate random neighbours of the best start: candidates that differ in the lane or the position of a group.

        With `splits`, weight gradients may have lanes of their own, and the search also starts from the best lanes so
        far.
        """
        starts = [self._start(count, splits) for count in range(2, most + 1)]
        if splits and self._known:
            fastest = min(self._known, key=lambda candidate: self._time_s(self._known[candidate]))
            starts.append(self._with_weights_on_next_lane(fastest.lanes, fastest.order, most))
        current = min(starts, key=lambda start: self._time_s(self.planned(start)))
        current_s, scale_s = self._time_s(self.planned(current)), self._plan.makespan_s
        for number in range(evaluations):
            candidate = self._moved(current, most, numbers, splits)
            time_s = self._time_s(self.planned(candidate))
            temperature_s = scale_s * _HOT * (_COLD / _HOT) ** (number / evaluations)
            if time_s <= current_s or numbers.random() < math.exp((current_s - time_s) / temperature_s):
                current, current_s = candidate, time_s

    def descend(self, most: int, evaluations: int) -> None:
        """Move from the best lanes so far to the first neighbour that is faster, until there is none. Simulates at most
        this many candidates."""
        current = min(self._known, key=lambda candidate: self._time_s(self._known[candidate]))
        limit = len(self._known) + evaluations
        while True:
            for neighbour in _neighbours(current, most):
                if len(self._known) >= limit:
                    return
                if self._time_s(self.planned(neighbour)) < self._time_s(self._known[current]):
                    current = neighbour
                    break
            else:
                return

    def fastest(self) -> Plan:
        """The fastest plan of all that were simulated, including the given one. A plan with weight lanes is only chosen
        if it gains enough over all others."""
        plans = [self._plan, *(plan for plan in self._known.values() if plan is not None)]
        plain = [plan for plan in plans if not any(slot.has_weight_lane for slot in plan.slots)]
        fastest, fastest_plain = (min(of, key=self._time_s) for of in (plans, plain))
        return fastest if fastest.makespan_s < (1 - MIN_WEIGHT_LANES_GAIN) * fastest_plain.makespan_s else fastest_plain

    def _start(self, count: int, spreads: bool) -> _Candidate:
        """A start: the longest group on a lane of its own, then the other groups, longest first, on the lane with the
        least work. With `spreads`, weight gradients are on other lanes."""
        length_s = [sum(self._times_s[slot] for slot in slots) for slots in self.groups]
        longest_first = sorted(range(len(self.groups)), key=lambda group: (-length_s[group], group))
        lanes, work_s = [0] * len(self.groups), [0.0] * count
        for group in longest_first:
            lanes[group] = min(range(count), key=lambda lane: (work_s[lane], lane))
            work_s[lanes[group]] += length_s[group]
        if spreads:
            return self._with_weights_on_next_lane(lanes, longest_first, count)
        return _without_gaps(lanes, [None] * len(lanes), longest_first)

    def _with_weights_on_next_lane(self, lanes: Sequence[int], order: Sequence[int], count: int) -> _Candidate:
        """The same lanes, with the weight gradients of each group on the next lane."""
        weight_lanes: list[int | None] = [None] * len(lanes)
        for group in self.split_groups:
            weight_lanes[group] = (lanes[group] + 1) % count
        return _without_gaps(lanes, weight_lanes, order)

    def _moved(self, candidate: _Candidate, most: int, numbers: random.Random, splits: bool) -> _Candidate:
        """A random neighbour: another lane for a group or its weight gradients, two groups with swapped lanes, or
        another position in the order."""
        lanes, weight_lanes, order = list(candidate.lanes), list(candidate.weight_lanes), list(candidate.order)
        kind = numbers.randrange(4 if splits else 3) if len(lanes) > 1 else 3
        if kind == 3:
            group = numbers.choice(self.split_groups)
            weight_lane = numbers.randrange(most)
            weight_lanes[group] = None if weight_lane in (lanes[group], weight_lanes[group]) else weight_lane
            return _without_gaps(lanes, weight_lanes, order)
        first, second = numbers.sample(range(len(lanes)), 2)
        if kind == 0:
            lanes[first] = numbers.randrange(most)
        elif kind == 1:
            lanes[first], lanes[second] = lanes[second], lanes[first]
        else:
            order.insert(numbers.randrange(len(order)), order.pop(first))
        return _without_gaps(lanes, weight_lanes, order)

    def planned(self, candidate: _Candidate) -> Plan | None:
        """The simulated plan of a candidate. None if its memory does not fit."""
        if candidate not in self._known:
            self._known[candidate] = self._simulated(candidate)
        return self._known[candidate]

    def _simulated(self, candidate: _Candidate) -> Plan | None:
        pieces = [
            Piece(
                op=self._ops[slot],
                num_layers=self._plan.slots[slot].num_layers,
                devices=self._plan.slots[slot].devices,
                round=self._plan.slots[slot].round,
                lane=candidate.lanes[self._group_of[slot]],
                weight_lane=candidate.weight_lanes[self._group_of[slot]] if self._can_split(slot) else None,
            )
            for slot in self._listed(candidate)
        ]
        plan = assemble(self._profile, self._setting, self._plan.planner, pieces, self._plan.seed)
        program = lower(plan, self._profile)
        # `verify` refuses plans that do not fit under every timing of their lanes
        peaks = Memory(program, self._profile).peaks_in_order(instances_of(program))
        timeline = simulate(program, self._profile)
        if np.maximum(peaks, timeline.peak_bytes()).max() > self._profile.cluster.kind.memory_bytes:
            return None
        return replace(
            plan,
            makespan_s=timeline.makespan_s,
            evaluations=self._plan.evaluations,
            cut_s=self._plan.cut_s,
            settings=self._plan.settings,
        )

    def _listed(self, candidate: _Candidate) -> list[int]:
        """All slots, each as soon as its lanes are free and its data is there; among those that could start, the
        preferred one."""
        preference = {group: place for place, group in enumerate(candidate.order)}
        lane_end: dict[tuple[int, int], float] = {}
        ends: dict[int, float] = {}
        left = list(range(len(self._plan.slots)))
        listed: list[int] = []
        while left:
            round_number = min(self._plan.slots[slot].round for slot in left)
            starts: list[tuple[float, int, int]] = []
            for slot in left:
                if self._plan.slots[slot].round == round_number and all(need in ends for need in self._needs[slot]):
                    lane = candidate.lanes[self._group_of[slot]]
                    ready_s = [ends[need] for need in self._needs[slot]]
                    free_s = [lane_end.get((device, lane), 0.0) for device in self._plan.slots[slot].devices]
                    starts.append((max([*ready_s, *free_s]), preference[self._group_of[slot]], slot))
            start_s, _, slot = min(starts)
            left.remove(slot)
            listed.append(slot)
            ends[slot] = start_s + self._times_s[slot]
            for device in self._plan.slots[slot].devices:
                lane_end[device, candidate.lanes[self._group_of[slot]]] = ends[slot]
        return listed

    def _time_s(self, plan: Plan | None) -> float:
        return math.inf if plan is None else plan.makespan_s


def _neighbours(candidate: _Candidate, most: int) -> Iterator[_Candidate]:
    """All candidates that differ in the lane of one group, in the lanes of two groups that swap them, or in the
    position of one group."""
    groups = range(len(candidate.lanes))
    for group, lane in product(groups, range(most)):
        if lane != candidate.lanes[group]:
            lanes = [lane if other == group else of for other, of in enumerate(candidate.lanes)]
            yield _without_gaps(lanes, candidate.weight_lanes, candidate.order)
    for first, second in combinations(groups, 2):
        if candidate.lanes[first] != candidate.lanes[second]:
            lanes = list(candidate.lanes)
            lanes[first], lanes[second] = lanes[second], lanes[first]
            yield _without_gaps(lanes, candidate.weight_lanes, candidate.order)
    for before, after in permutations(groups, 2):
        order = list(candidate.order)
        order.insert(after, order.pop(before))
        yield _without_gaps(candidate.lanes, candidate.weight_lanes, order)


def _without_gaps(lanes: Sequence[int], weight_lanes: Sequence[int | None], order: Sequence[int]) -> _Candidate:
    """The same candidate with lanes numbered from 0. Weight gradients on the lane of their group have no lane of their
    own."""
    separate = [
        None if lane == weight_lane else weight_lane for lane, weight_lane in zip(lanes, weight_lanes, strict=True)
    ]
    used = {*lanes, *(lane for lane in separate if lane is not None)}
    number_of = {lane: number for number, lane in enumerate(sorted(used))}
    return _Candidate(
        lanes=tuple(number_of[lane] for lane in lanes),
        weight_lanes=tuple(None if lane is None else number_of[lane] for lane in separate),
        order=tuple(order),
    )


def _groups(plan: Plan, profile: Profile, ops: Sequence[int]) -> list[list[int]]:
    """Groups of slots that must stay on one lane: those of one module, or that train the same parameters."""
    graph = profile.graph
    group_of = list(range(len(plan.slots)))  # a group is named after its first slot
    first_with: dict[tuple[str, int | str], int] = {}
    for number, (slot, op) in enumerate(zip(plan.slots, ops, strict=True)):
        used = {parameter for layer in graph.metaops[op].parameters[slot.first : slot.last] for parameter in layer}
        trained = [("parameter", parameter) for parameter in used if graph.parameters[parameter].trainable]
        module = graph.metaops[op].module
        for key in [("op", op) if module is None else ("module", module), *trained]:
            ends = group_of[number], group_of[first_with.setdefault(key, number)]
            group_of = [min(ends) if group in ends else group for group in group_of]
    groups: dict[int, list[int]] = {}
    for slot_number, group in enumerate(group_of):
        groups.setdefault(group, []).append(slot_number)
    return list(groups.values())
