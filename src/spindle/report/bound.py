"""What limits a step: the bounds, and whether work or order sets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spindle.display import count_of, percent, seconds
from spindle.planners import Problem, best_degree_problem, lower_hull, lp_bound, paper_waves, problem_of
from spindle.profile import Profile

_TIGHT = 1e-3  # of the bound: a smaller difference does not count, because numbers are printed with four digits


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundReport:
    """`area_s` is the least device time of all ops divided by the number of devices, `path_s` the longest chain of ops
    with each at its fastest; the LP bound is at least both, and more if shortening the chain costs area. `path` names
    the longest chain of the LP's own solution, which takes `path_at_bound_s`. `level_s` is the paper's C* of each
    level.
    """

    workload: str
    cluster: str
    num_devices: int
    lp_s: float
    level_s: tuple[float, ...]
    area_s: float
    path_s: float
    path: tuple[str, ...]
    path_at_bound_s: float
    leaves_out: tuple[str, ...]

    @property
    def paper_s(self) -> float:
        """The sum over levels, a bound for plans with a barrier between them."""
        return sum(self.level_s)

    @property
    def limit(self) -> Literal["area", "path", "both"]:
        if self.area_s >= self.lp_s * (1 - _TIGHT):
            return "area"
        return "path" if self.path_s >= self.lp_s * (1 - _TIGHT) else "both"


def bound_report(profile: Profile) -> BoundReport:
    """The LP bound and the paper's bound of a profile, and what limits them."""
    problem = best_degree_problem(profile)
    solution = lp_bound(problem)
    hulls = [lower_hull(choices) for choices in problem.choices]
    least_area = sum(layers * float(area.min()) for layers, (_, area, _) in zip(problem.num_layers, hulls, strict=True))
    fastest = [layers * float(times.min()) for layers, (times, _, _) in zip(problem.num_layers, hulls, strict=True)]
    at_bound = [
        sum(layers * problem.choices[op].time_on(count) for count, layers in mix)
        for op, mix in enumerate(solution.mixes)
    ]
    path, path_at_bound_s = _longest_path(problem, at_bound)
    return BoundReport(
        workload=profile.graph.name,
        cluster=profile.cluster.name,
        num_devices=problem.num_devices,
        lp_s=solution.bound_s,
        level_s=tuple(paper_waves(problem_of(profile, profile.default_setting))[0]),
        area_s=least_area / problem.num_devices,
        path_s=_longest_path(problem, fastest)[1],
        path=tuple(profile.graph.metaops[problem.ops[op]].name for op in path),
        path_at_bound_s=path_at_bound_s,
        leaves_out=profile.leaves_out,
    )


def _longest_path(problem: Problem, duration_s: list[float]) -> tuple[list[int], float]:
    """The ops of the longest chain, and its length."""
    end_s: dict[int, float] = {}
    before: dict[int, int | None] = {}
    for op in sorted(range(problem.num_ops), key=lambda op: (problem.levels[op], op)):
        before[op] = max(problem.predecessors[op], key=lambda producer: end_s[producer], default=None)
        producer = before[op]
        end_s[op] = duration_s[op] + (0.0 if producer is None else end_s[producer])
    last: int | None = max(end_s, key=lambda op: end_s[op])
    length_s = end_s[last] if last is not None else 0.0
    path: list[int] = []
    while last is not None:
        path.append(last)
        last = before[last]
    return path[::-1], length_s


def limit_sentences(report: BoundReport) -> list[str]:
    """What limits the bound, as sentences."""
    chain = " → ".join(report.path if len(report.path) <= 8 else (*report.path[:4], "…", *report.path[-3:]))
    what = "path" if len(report.path) > 1 else "op"
    devices = count_of(report.num_devices, "device")
    alone = (
        f"The work alone would allow {seconds(report.area_s)}; the longest path alone, every op at its fastest, "
        f"{seconds(report.path_s)}."
    )
    match report.limit:
        case "area":
            first = (
                f"Area limits it: {devices} busy all the time, every op where it wastes least. "
                f"The longest {what} there, {chain}, takes {percent(report.path_at_bound_s / report.lp_s)} of it."
            )
        case "path":
            first = f"The longest {what} limits it: {chain}, at its fastest. More devices would not help."
        case "both":
            first = (
                f"Area and order limit it together: chains such as {chain} would take too long where their ops waste "
                f"least, so they run wider, and then {devices} are busy all the time."
            )
    return [first, alone]
