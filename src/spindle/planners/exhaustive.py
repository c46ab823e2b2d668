"""Planner `exhaustive`: the best folded time there is, for graphs small enough to try everything.

Every order of layers that respects the flows, every number of devices for each, each layer as early as devices allow
around what is already placed: such schedules contain an optimal one. Branches that cannot beat the best are cut.
"""

from __future__ import annotations

import math

from spindle.errors import ProfileError
from spindle.planners.problem import Problem, Timed

MAX_STATES = 2_000_000
MAX_SHORTENING_NODES = 10_000


def schedule_exhaustive(problem: Problem) -> list[Timed]:
    """Find the optimal schedule; refuses problems with too many schedules to try."""
    states = _num_states(problem)
    if states > MAX_STATES:
        raise ProfileError(
            f"exhaustive search would try about {states:.1e} schedules, its limit is {MAX_STATES:.1e}; "
            "it is for a handful of layers on a few devices"
        )
    search = _Search(problem)
    search.extend([0.0] * problem.num_ops, list(problem.num_layers), [], 0.0)
    return sorted(search.best, key=lambda piece: piece.start_s)


def shorten(problem: Problem, schedule: list[Timed]) -> list[Timed]:
    """The optimal schedule of a tiny problem; the given one if none is shorter, or none was found within the node
    limit."""
    if _num_states(problem) > MAX_STATES:
        return schedule
    search = _Search(problem, MAX_SHORTENING_NODES)
    search.best, search.best_s = schedule, max(piece.end_s for piece in schedule)
    search.extend([0.0] * problem.num_ops, list(problem.num_layers), [], 0.0)
    return schedule if search.best is schedule else sorted(search.best, key=lambda piece: piece.start_s)


def _num_states(problem: Problem) -> float:
    """About how many schedules there are."""
    states = 1.0
    remaining = sum(problem.num_layers)
    for layers, choices in zip(problem.num_layers, problem.choices, strict=True):
        for _ in range(layers):
            states *= len(choices.num_devices) * min(remaining, problem.num_ops)
    return states


class _Search:
    def __init__(self, problem: Problem, max_nodes: float = math.inf) -> None:
        self.problem = problem
        self._nodes_left = max_nodes
        self.best: list[Timed] = []
        self.best_s = float("inf")
        self._fastest = [float(choices.layer_s[-1]) for choices in problem.choices]
        areas = [float((choices.layer_s * choices.num_devices).min()) for choices in problem.choices]
        self._least_area = areas

    def extend(self, ends_s: list[float], left: list[int], placed: list[Timed], makespan_s: float) -> None:
        """Place every possible next layer in turn; `ends_s` is when each op's last placed layer ends."""
        self._nodes_left -= 1
        if makespan_s >= self.best_s - 1e-15 or self._nodes_left < 0:
            return
        if not any(left):
            self.best, self.best_s = list(placed), makespan_s
            return
        area = sum((piece.end_s - piece.start_s) * piece.num_devices for piece in placed)
        area += sum(count * least for count, least in zip(left, self._least_area, strict=True))
        if area / self.problem.num_devices >= self.best_s - 1e-15:
            return
        for op in range(self.problem.num_ops):
            if left[op] and not any(left[producer] for producer in self.problem.predecessors[op]):
                self._place(op, ends_s, left, placed, makespan_s)

    def _place(self, op: int, ends_s: list[float], left: list[int], placed: list[Timed], makespan_s: float) -> None:
        ready_s = max([ends_s[op], *(ends_s[producer] for producer in self.problem.predecessors[op])])
        if ready_s + left[op] * self._fastest[op] >= self.best_s - 1e-15:
            return
        choices = self.problem.choices[op]
        for count, layer_s in zip(choices.num_devices.tolist(), choices.layer_s.tolist(), strict=True):
            start_s = self._earliest(placed, ready_s, count, layer_s)
            piece = Timed(
                op=self.problem.ops[op], num_layers=1, num_devices=count, start_s=start_s, end_s=start_s + layer_s
            )
            before = ends_s[op]
            ends_s[op], left[op] = piece.end_s, left[op] - 1
            placed.append(piece)
            self.extend(ends_s, left, placed, max(makespan_s, piece.end_s))
            placed.pop()
            ends_s[op], left[op] = before, left[op] + 1

    def _earliest(self, placed: list[Timed], ready_s: float, count: int, layer_s: float) -> float:
        """The earliest time from which `count` devices are free for `layer_s`."""
        for start_s in sorted({ready_s, *(piece.end_s for piece in placed if piece.end_s > ready_s)}):
            moments = [start_s, *(piece.start_s for piece in placed if start_s < piece.start_s < start_s + layer_s)]
            if all(self._used(placed, moment) + count <= self.problem.num_devices for moment in moments):
                return start_s
        raise AssertionError("the end of everything placed is always free")

    def _used(self, placed: list[Timed], moment: float) -> int:
        return sum(piece.num_devices for piece in placed if piece.start_s <= moment < piece.end_s)
