"""How good can any plan be?

Two bounds on folded time. The paper's C* (§3.3) is for one level at a time, and its sum over levels speaks for plans
with a barrier between levels. The LP bound is for the whole graph and any plan that runs each layer over its whole
batch at once: the duration and area of every op lie on the lower hull of its curve, no path is longer than C, and the
total area is at most N·C. The bound of a whole step also counts the optimizer's update of every parameter, once: with
its state sharded, no parameter needs to be updated twice. Gradients of what one device holds need no synchronisation,
so the least that it can take is nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from spindle.errors import ProfileError
from spindle.planners.problem import Choices, Problem, choices_of, falling, problem_of
from spindle.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class LpSolution:
    """The bound, and how it is reached: for each op, layers (not whole) on numbers of devices."""

    bound_s: float
    mixes: tuple[tuple[tuple[int, float], ...], ...]


def lower_hull(choices: Choices) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Duration, area and number of devices of the choices that no mix of others beats; duration falls."""
    kept: list[int] = []
    duration = choices.layer_s
    area = choices.layer_s * choices.num_devices
    for point in range(len(duration)):
        # Duration falls with the number of devices; a cheaper and faster point removes those before it.
        while kept and area[point] <= area[kept[-1]]:
            kept.pop()
        while len(kept) >= 2:
            first, second = kept[-2], kept[-1]
            cross = (duration[first] - duration[second]) * (area[point] - area[second])
            if cross <= (duration[second] - duration[point]) * (area[second] - area[first]):
                kept.pop()
            else:
                break
        kept.append(point)
    return duration[kept], area[kept], choices.num_devices[kept]


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
    time beside that of layers."""
    problem = best_degree_problem(profile)
    rates = np.array(profile.host_rates)
    if not len(rates):
        return lp_bound(problem, update_s=update_s)
    # Where neighbours matter, no layer is faster than at the best rate, and k busy devices do at most k times theirs.
    together = np.arange(1, 1 + len(rates)) * rates
    capacity = sum(float(together[: island.num_devices].max()) for island in profile.cluster.islands)
    return lp_bound(problem, rate=float(rates.max()), capacity=capacity, update_s=update_s)


def best_degree_problem(profile: Profile) -> Problem:
    """The problem whose ops may take, on each number of devices, the tensor degree that is fastest there."""
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

    Layers may run at up to `rate`, and all devices together do the work of `capacity` of them; `update_s` of it is not
    for layers.
    """
    from scipy.optimize import linprog  # takes long to import, and ranks that do not plan do without
    from scipy.sparse import coo_array

    # Data.
    hulls = [lower_hull(choices) for choices in problem.choices]
    num_ops = problem.num_ops
    sizes = [len(duration) for duration, _, _ in hulls]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    # Variables: layers of each op at each hull point, then the end of each op, then C.
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
    # every end, area fits.
    for op in range(num_ops):
        duration = [(int(offsets[op]) + k, float(value) / rate) for k, value in enumerate(hulls[op][0])]
        constrain([*duration, (first_end + op, -1.0)])
        for producer in problem.predecessors[op]:
            constrain([*duration, (first_end + producer, 1.0), (first_end + op, -1.0)])
        constrain([(first_end + op, 1.0), (makespan, -1.0)])
    area = [(int(offsets[op]) + k, float(value)) for op in range(num_ops) for k, value in enumerate(hulls[op][1])]
    constrain([*area, (makespan, -(problem.num_devices if capacity is None else capacity))])
    all_layers = coo_array(
        (np.ones(first_end), (np.repeat(np.arange(num_ops), sizes), np.arange(first_end))),
        shape=(num_ops, makespan + 1),
    )
    limits = np.zeros(num_rows)
    limits[-1] = -update_s
    # Objective.
    objective = np.zeros(makespan + 1)
    objective[makespan] = 1.0
    # Solve.
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
    # Read-out.
    mixes = []
    for op in range(num_ops):
        layers = result.x[offsets[op] : offsets[op + 1]]
        mixes.append(
            tuple((int(count), float(part)) for count, part in zip(hulls[op][2], layers, strict=True) if part > 1e-9)
        )
    return LpSolution(bound_s=float(result.fun), mixes=tuple(mixes))
