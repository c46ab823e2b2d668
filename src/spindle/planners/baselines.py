"""Baselines: what people use today, each at its best.

`sequential`: every module on the whole cluster in turn, as DeepSpeed and Megatron-LM users do. `distmm`: one task after
another, its towers side by side on the split of devices that ends soonest. `task-level`: every task has its own devices
for the whole step (Spindle-Optimus, §5): devices go one choice at a time to the task that gains most from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from spindle.planners.problem import Problem, Timed, choices_of


def schedule_sequential(problem: Problem) -> list[Timed]:
    """Run one op after another, each on the number of devices that makes it fastest."""
    return _in_turn(problem, _task_by_task(problem, range(problem.num_ops)), problem.num_devices, 0.0)


def schedule_distmm(problem: Problem) -> list[Timed]:
    """Run one task after another. Independent towers of a task run side by side if that ends sooner.

    A tower is a chain of ops that keeps its devices from its first op to its last.
    """
    timed: list[Timed] = []
    start_s = 0.0
    for task in dict.fromkeys(problem.tasks):
        for towers in _towers_by_level(problem, [op for op in range(problem.num_ops) if problem.tasks[op] == task]):
            in_turn = _in_turn(problem, [op for tower in towers for op in tower], problem.num_devices, start_s)
            side_by_side = _side_by_side(problem, towers, start_s)
            timed += min((side_by_side, in_turn), key=_end_s) if side_by_side else in_turn
            start_s = _end_s(timed)
    return timed


def _towers_by_level(problem: Problem, ops: Sequence[int]) -> list[list[list[int]]]:
    """Chains of a task's ops, grouped by level: chains of one group are independent of each other."""
    consumers: dict[int, list[int]] = {op: [] for op in ops}
    for op in ops:
        for producer in problem.predecessors[op]:
            consumers[producer].append(op)
    order = sorted(ops, key=lambda op: (problem.levels[op], op))
    tower_of: dict[int, int] = {}
    towers: list[list[int]] = []
    for op in order:
        producers = problem.predecessors[op]
        if len(producers) == 1 and len(consumers[producers[0]]) == 1:
            tower_of[op] = tower_of[producers[0]]
            towers[tower_of[op]].append(op)
        else:
            tower_of[op] = len(towers)
            towers.append([op])
    levels: list[int] = []
    for tower in towers:  # the producers of a tower come before it
        before = [levels[tower_of[producer]] + 1 for producer in problem.predecessors[tower[0]]]
        levels.append(max(before, default=0))
    return [
        [tower for tower, its_level in zip(towers, levels, strict=True) if its_level == level]
        for level in sorted(set(levels))
    ]


def schedule_task_level(problem: Problem) -> list[Timed]:
    """Run all tasks side by side for the whole step, each with its ops in turn on devices of its own.

    With more tasks than devices, the lightest tasks are merged until there is a device for each group. The paper's
    greedy stops at plateaus of a curve, so it is also tried with divisors of the batches only, and compared with the
    split that is best for the slowest task. The best of the three counts.
    """
    groups = _groups_that_fit(problem)
    if groups is None:
        return schedule_sequential(problem)
    steps = [np.unique(np.concatenate([problem.choices[op].num_devices for op in group])) for group in groups]
    even_steps = [np.unique(np.concatenate([_even_choices(problem, op) for op in group])) for group in groups]
    splits = [
        _marginal_gains(problem, groups, steps),
        _marginal_gains(problem, groups, even_steps),
        _shortest_longest(problem, groups, steps),
    ]
    schedules = [
        [
            replace(piece, team=f"group {number}")
            for number, (group, count) in enumerate(zip(groups, counts, strict=True))
            for piece in _in_turn(problem, group, count, 0.0)
        ]
        for counts in splits
    ]
    return sorted(min(schedules, key=_end_s), key=lambda piece: piece.start_s)


def _end_s(timed: Iterable[Timed]) -> float:
    return max(piece.end_s for piece in timed)


def _task_by_task(problem: Problem, ops: Sequence[int]) -> list[int]:
    """Task after task, each in flow order."""
    first_of_task: dict[str, int] = {}
    for op in ops:
        first_of_task.setdefault(problem.tasks[op], op)
    return sorted(ops, key=lambda op: (first_of_task[problem.tasks[op]], problem.levels[op], op))


def _in_turn(problem: Problem, ops: Sequence[int], num_devices: int, start_s: float) -> list[Timed]:
    timed = []
    for op in ops:
        count = problem.choices[op].widest_within(num_devices)
        assert count is not None
        end_s = start_s + problem.num_layers[op] * problem.choices[op].time_on(count)
        timed.append(_whole(problem, op, count, start_s, end_s))
        start_s = end_s
    return timed


def _whole(problem: Problem, op: int, num_devices: int, start_s: float, end_s: float) -> Timed:
    return Timed(
        op=problem.ops[op], num_layers=problem.num_layers[op], num_devices=num_devices, start_s=start_s, end_s=end_s
    )


def _side_by_side(problem: Problem, towers: list[list[int]], start_s: float) -> list[Timed] | None:
    """Towers side by side on fixed devices, so that the last one ends as early as possible. None if they do not fit."""
    if sum(_fewest(problem, tower) for tower in towers) > problem.num_devices:
        return None
    steps = [np.unique(np.concatenate([problem.choices[op].num_devices for op in tower])) for tower in towers]
    counts = _shortest_longest(problem, towers, steps)
    return [
        replace(piece, team=f"tower of {problem.ops[tower[0]]}")
        for tower, count in zip(towers, counts, strict=True)
        for piece in _in_turn(problem, tower, count, start_s)
    ]


def _groups_that_fit(problem: Problem) -> list[list[int]] | None:
    """The ops of each task, with the lightest tasks merged if there are more than devices. None if they never fit."""
    groups = [
        _task_by_task(problem, [op for op in range(problem.num_ops) if problem.tasks[op] == task])
        for task in dict.fromkeys(problem.tasks)
    ]

    def work_s(group: list[int]) -> float:
        return sum(problem.num_layers[op] * float(problem.choices[op].layer_s[0]) for op in group)

    while sum(_fewest(problem, group) for group in groups) > problem.num_devices:
        if len(groups) == 1:
            return None
        groups.sort(key=work_s)
        lightest, second, *rest = groups
        groups = [lightest + second, *rest]
    return sorted(groups, key=lambda group: group[0])


def _even_choices(problem: Problem, op: int) -> np.ndarray:
    return choices_of(problem.profile, problem.setting, problem.ops[op], divisors_only=True).num_devices


def _group_s(problem: Problem, group: list[int], count: int) -> float:
    """Seconds of a group's ops, run one after another on this many devices."""
    total_s = 0.0
    for op in group:
        choices = problem.choices[op]
        widest = int(np.searchsorted(choices.num_devices, count, side="right")) - 1
        total_s += problem.num_layers[op] * float(choices.layer_s[widest])
    return total_s


def _fewest(problem: Problem, group: list[int]) -> int:
    return max(int(problem.choices[op].num_devices[0]) for op in group)


def _marginal_gains(problem: Problem, groups: list[list[int]], steps: list[np.ndarray]) -> list[int]:
    """The number of devices of each group, by marginal gain (T(n) - T(n')) / (n' - n), where n' is the group's next
    step."""
    counts = [_fewest(problem, group) for group in groups]

    def next_gain(place: int) -> tuple[float, int]:
        """The gain per device of a group's next step, and that step."""
        wider = _next_step(steps[place], counts[place])
        if wider is None:
            return 0.0, 0
        group, count = groups[place], counts[place]
        return (_group_s(problem, group, count) - _group_s(problem, group, wider)) / (wider - count), wider

    gains = [next_gain(place) for place in range(len(groups))]
    while True:
        free = problem.num_devices - sum(counts)
        open_to = [place for place, (gain, wider) in enumerate(gains) if gain > 0 and wider <= counts[place] + free]
        if not open_to:
            return counts
        best = max(open_to, key=lambda place: gains[place][0])
        counts[best] = gains[best][1]
        gains[best] = next_gain(best)


def _shortest_longest(problem: Problem, groups: list[list[int]], steps: list[np.ndarray]) -> list[int]:
    """The number of devices of each group that minimises the time of the slowest group."""
    counts = [_fewest(problem, group) for group in groups]
    times_s = [_group_s(problem, group, count) for group, count in zip(groups, counts, strict=True)]
    while True:
        slowest = times_s.index(max(times_s))
        wider = _next_step(steps[slowest], counts[slowest])
        if wider is None or sum(counts) - counts[slowest] + wider > problem.num_devices:
            return counts
        counts[slowest] = wider
        times_s[slowest] = _group_s(problem, groups[slowest], wider)


def _next_step(steps: np.ndarray, count: int) -> int | None:
    place = int(np.searchsorted(steps, count, side="right"))
    return int(steps[place]) if place < len(steps) else None
