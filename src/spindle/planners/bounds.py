"""How good can any plan be?

Two bounds on folded time. The paper's C* (§3.3) is for one level at a time, and its sum over levels speaks for plans
with a barrier between levels. The LP bound is for the whole graph and any plan that runs each layer over its whole
batch at once: the duration and area of every op lie on the lower hull of its curve, no path is longer than C, the total
area is at most N·C, and the area of all that an op waits for (or that waits for it) fits on N devices before it (after
it). The bound of a whole step also counts the optimizer's update of every parameter, once: with
its state sharded, no parameter needs to be updated twice. Gradients of what one device holds need no synchronisation,
so the bound counts no time for it.

Pipelines have a bound of their own (`bound_ns`): it holds for the chunks that they are cut into.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spindle.errors import ProfileError
from spindle.planners.pipeline.segments import Column, Segments, table_of
from spindle.planners.problem import Choices, Problem, choices_of, falling, problem_of
from spindle.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class LpSolution:
    """The bound, and how it is reached: for each op, layers (not whole) on numbers of devices."""

    bound_s: float
    mixes: tuple[tuple[tuple[int, float], ...], ...]


def lower_hull(choices: Choices) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Duration, area and number of devices of those choices that no mix of others beats, with decreasing duration."""
    hull: list[int] = []
    duration = choices.layer_s
    area = choices.layer_s * choices.num_devices
    for point in range(len(duration)):
        # durations decrease; a point that is both cheaper and faster removes those before it
        while hull and area[point] <= area[hull[-1]]:
            hull.pop()
        while len(hull) >= 2:
            first, second = hull[-2], hull[-1]
            cross = (duration[first] - duration[second]) * (area[point] - area[second])
            if cross <= (duration[second] - duration[point]) * (area[second] - area[first]):
                hull.pop()
            else:
                break
        hull.append(point)
    return duration[hull], area[hull], choices.num_devices[hull]


def graph_bound_s(profile: Profile) -> float:
    """The LP bound over every setting, in seconds."""
    return graph_bound(profile).bound_s


def step_bound_s(profile: Profile) -> float:
    """The LP bound with the optimizer's update of every trained parameter, in seconds."""
    numerics = profile.graph.numerics
    elements = sum(parameter.num_elements for parameter in profile.graph.parameters if parameter.trainable)
    return graph_bound(profile, elements * numerics.update_bytes / profile.cluster.kind.memory_bytes_per_s).bound_s


def graph_bound(profile: Profile, update_s: float = 0.0) -> LpSolution:
    """The LP bound over every setting: each op may take any tensor degree, nothing is recomputed. `update_s` is device
    time in addition to that of layers."""
    problem = best_degree_problem(profile)
    rates = np.array(profile.host_rates)
    if not len(rates):
        return lp_bound(problem, update_s=update_s)
    # If neighbours slow each other down, no layer is faster than at the best rate, and k busy devices do at most k
    # times the work at their rate.
    together = np.arange(1, 1 + len(rates)) * rates
    capacity = sum(float(together[: island.num_devices].max()) for island in profile.cluster.islands)
    return lp_bound(problem, rate=float(rates.max()), capacity=capacity, update_s=update_s)


def best_degree_problem(profile: Profile) -> Problem:
    """A problem in which ops may take, for each number of devices, the tensor degree that is fastest."""
    problem = problem_of(profile, profile.default_setting)
    merged = []
    for op in problem.ops:
        best: dict[int, float] = {}
        for curve in profile.curves[op]:
            setting = profile.setting({profile.graph.metaops[op].module or "": curve.tensor_degree})
            choices = choices_of(profile, setting, op)
            for count, layer_s in zip(choices.num_devices.tolist(), choices.layer_s.tolist(), strict=True):
                best[count] = min(layer_s, best.get(count, layer_s))
        counts = np.array(sorted(best), dtype=np.int64)
        merged.append(falling(counts, np.array([best[count] for count in counts.tolist()])))
    return replace(problem, choices=tuple(merged))


def lp_bound(problem: Problem, rate: float = 1.0, capacity: float | None = None, update_s: float = 0.0) -> LpSolution:
    """The LP bound of a problem under its setting.

    Layers may run at up to `rate`, and all devices together do the work of `capacity` devices; `update_s` of that is
    not available for layers.
    """
    from scipy.optimize import linprog  # slow to import, and ranks that do not plan never need it
    from scipy.sparse import coo_array

    # Data
    hulls = [lower_hull(choices) for choices in problem.choices]
    num_ops = problem.num_ops
    sizes = [len(duration) for duration, _, _ in hulls]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    # Variables: the layers of each op at each hull point, then the end of each op, then C
    first_end = int(offsets[-1])
    makespan = first_end + num_ops
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    num_rows = 0

    def constrain(entries: list[tuple[int, float]]) -> None:
        nonlocal num_rows
        for column, value in entries:
            rows.append(num_rows)
            columns.append(column)
            values.append(value)
        num_rows += 1

    # Constraints (all "at most 0", but for the last): an op ends after its producers and its own duration, C after
    # every end, area fits; the area of all that an op waits for fits before it, that of all that waits for it after it.
    num_busy = problem.num_devices if capacity is None else capacity
    ancestors = _ancestors(problem)
    descendants: list[list[int]] = [[] for _ in range(num_ops)]
    for op in range(num_ops):
        for ancestor in sorted(ancestors[op]):
            descendants[ancestor].append(op)

    def area_of(ops: Iterable[int]) -> list[tuple[int, float]]:
        return [(int(offsets[op]) + k, float(value)) for op in ops for k, value in enumerate(hulls[op][1])]

    for op in range(num_ops):
        duration = [(int(offsets[op]) + k, float(value) / rate) for k, value in enumerate(hulls[op][0])]
        constrain([*duration, (first_end + op, -1.0)])
        for producer in problem.predecessors[op]:
            constrain([*duration, (first_end + producer, 1.0), (first_end + op, -1.0)])
        constrain([(first_end + op, 1.0), (makespan, -1.0)])
        if len(ancestors[op]) > 1:
            own = [(column, value * num_busy) for column, value in duration]
            constrain([*area_of(sorted(ancestors[op])), *own, (first_end + op, -num_busy)])
        if len(descendants[op]) > 1:
            constrain([*area_of(descendants[op]), (first_end + op, num_busy), (makespan, -num_busy)])
    constrain([*area_of(range(num_ops)), (makespan, -num_busy)])
    all_layers = coo_array(
        (np.ones(first_end), (np.repeat(np.arange(num_ops), sizes), np.arange(first_end))),
        shape=(num_ops, makespan + 1),
    )
    limits = np.zeros(num_rows)
    limits[-1] = -update_s
    # Objective
    objective = np.zeros(makespan + 1)
    objective[makespan] = 1.0
    # Solve
    result = linprog(
        objective,
        A_ub=coo_array((values, (rows, columns)), shape=(num_rows, makespan + 1)).tocsr(),
        b_ub=limits,
        A_eq=all_layers.tocsr(),
        b_eq=np.array(problem.num_layers, dtype=float),
        method="highs",
    )
    if not result.success:
        raise ProfileError(f"the bound could not be computed: {result.message}")
    # Read-out
    mixes = []
    for op in range(num_ops):
        layers = result.x[offsets[op] : offsets[op + 1]]
        mixes.append(
            tuple((int(count), float(part)) for count, part in zip(hulls[op][2], layers, strict=True) if part > 1e-9)
        )
    return LpSolution(bound_s=float(result.fun), mixes=tuple(mixes))


def _ancestors(problem: Problem) -> list[set[int]]:
    """For each op, all ops that it waits for, directly or not."""
    ancestors: list[set[int]] = [set() for _ in range(problem.num_ops)]
    for op in sorted(range(problem.num_ops), key=lambda op: problem.levels[op]):
        for producer in problem.predecessors[op]:
            ancestors[op] |= {producer, *ancestors[producer]}
    return ancestors


def bound_ns(segments: Segments) -> int:
    """A lower bound on every schedule of these chunks, in any order, with any memory choices and any amount of memory.

    Each rank is a machine whose passes have heads (the longest path to them) and tails (the longest path from them to
    the end). If passes could be interrupted, serving the largest tail first would be optimal (Jackson's rule), so its
    length is a bound. It includes the longest path of a microbatch, and the work of a rank with its smallest head and
    tail.
    """
    table = table_of(segments)
    unused = np.arange(segments.choice_memory.shape[1]) >= segments.choice_count[:, None]
    never = np.iinfo(np.int64).max
    least = [
        np.where(unused, never, choices).min(axis=1)[segments.choice_of]
        for choices in (segments.choice_forward_ns, segments.choice_backward_ns)
    ]
    forward, backward = least
    # A weight pass may run last of all, so only the rest of a backward is on the way.
    on_way = backward - np.minimum(segments.weight_ns, backward)
    num_pairs, hops = segments.num_pairs, segments.hop_ns
    before = table.predecessor_starts, table.predecessors, table.predecessor_wrap
    behind = table.successor_starts, table.successors, table.successor_wrap
    rising, falling = range(segments.num_ranks), range(segments.num_ranks)[::-1]

    def walk(
        edges: tuple[Column, Column, Column], order: Iterable[int], ranks: range, times: Column, at_least: Sequence[int]
    ) -> tuple[Column, list[int]]:
        """The earliest start of each pair's pass on each rank, and its end on the last one, where passes follow those
        of other pairs along these edges, and none starts before `at_least`."""
        starts, others, wraps = edges
        heads, ends = np.zeros_like(forward), [0] * num_pairs
        for pair in order:
            own = range(starts[pair], starts[pair + 1])
            start = max((ends[others[edge]] + wraps[edge] for edge in own), default=0)
            start = max(start, at_least[pair])
            for rank in ranks:
                heads[pair, rank] = start
                start += times[pair, rank] + hops[pair]
            ends[pair] = start - int(hops[pair])
        return heads, ends

    in_order, from_end = range(num_pairs), range(num_pairs)[::-1]
    forward_heads, forward_ends = walk(before, in_order, rising, forward, [0] * num_pairs)
    backward_heads, _ = walk(behind, from_end, falling, on_way, forward_ends)
    # Tails: the same ways, walked from the end.
    backward_tails, backward_starts = walk(before, in_order, rising, on_way, [0] * num_pairs)
    forward_tails, _ = walk(behind, from_end, falling, forward, backward_starts)
    longest = 0
    later = backward - on_way
    for rank in rising:
        jobs = [
            *zip(
                forward_heads[:, rank].tolist(), forward[:, rank].tolist(), forward_tails[:, rank].tolist(), strict=True
            ),
            *zip(
                backward_heads[:, rank].tolist(),
                on_way[:, rank].tolist(),
                backward_tails[:, rank].tolist(),
                strict=True,
            ),
        ]
        weights = zip((backward_heads + on_way)[:, rank].tolist(), later[:, rank].tolist(), strict=True)
        jobs += [(head, time, 0) for head, time in weights if time]
        longest = max(longest, _one_machine(jobs))
    return longest


def _one_machine(jobs: list[tuple[int, int, int]]) -> int:
    """Length of the best schedule of jobs (head, time, tail) on one machine that may interrupt them."""
    jobs = sorted(jobs)
    waiting: list[list[int]] = []
    now = longest = position = 0
    while waiting or position < len(jobs):
        if not waiting:
            now = max(now, jobs[position][0])
        while position < len(jobs) and jobs[position][0] <= now:
            heapq.heappush(waiting, [-jobs[position][2], jobs[position][1]])
            position += 1
        until = jobs[position][0] if position < len(jobs) else None
        tail, left = waiting[0]
        if until is not None and now + left > until:
            waiting[0][1] -= until - now
            now = until
        else:
            heapq.heappop(waiting)
            now += left
            longest = max(longest, now - tail)
    return longest
