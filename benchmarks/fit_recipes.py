"""Fits the recipes to the paper's DeepSpeed times: python benchmarks/fit_recipes.py

What is unknown of each workload are its batch sizes, what share of peak its layers reach (efficiency), and what a layer
costs however small it is (overhead). Efficiency and overhead minimise the squared relative error of the DeepSpeed
milliseconds over all cluster sizes. Batch sizes cannot be told from those alone: among a few plausible ones, the fit
takes those whose DeepSpeed times and DistMM-MT and Spindle-Optimus speedups lie nearest the paper's. The paper's Spindle
column is never looked at. Writes src/spindle/recipes/fitted.json and the tables of docs/recipes.md.

DistMM-MT and Spindle-Optimus are estimates on the curves, for this choice only; `spindle.planners` has the real ones.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from spindle.artifact import write_artifact, write_whole
from spindle.cluster import Cluster, cluster_named
from spindle.graph import MetaGraph, metagraph_of
from spindle.profile import Profile, Roofline, Setting, ring_bytes, roofline_profile, saved_bytes, state_bytes
from spindle.recipes import CELLS, RECIPES, Cell, Fit, Fits, FittedCell, Recipe, clip, ofasys, qwen_val
from spindle.recipes.recipe import FITS_KIND, scaled

ROOT = Path(__file__).resolve().parent.parent
EFFICIENCY = (0.15, 0.6)  # of peak; what layers of this size are known to reach lies between
OVERHEAD_MS = (0.3, 5.0)  # per layer, both passes
MEMORY_SHARE = 0.9  # of a device, for what the memory model counts

# The step of DeepSpeed. `sequential_step` is the one place to change when a simulator takes its part.


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: passes over all micro-steps, then what synchronisation outlasts them, then the optimizer."""

    passes_s: float
    exposed_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        return self.passes_s + self.exposed_s + self.optimizer_s


def sequential_step(profile: Profile, setting: Setting, num_micro_steps: int) -> Step:
    """Every op in turn on the whole cluster, backward mirrored; gradients are all-reduced as soon as their last use ends.

    All reductions share one channel, and overlap the last micro-step's backward pass alone.
    """
    passes = [pass_times_s(profile, setting, op, profile.cluster.num_devices) for op in range(len(profile.curves))]
    forward_s = sum(forward for forward, _ in passes)
    clock_s = channel_s = forward_s
    final = _elements_final_at(profile.graph)
    for op in reversed(range(len(passes))):
        clock_s += passes[op][1]
        if final[op]:
            reduce_s = _all_reduce_s(profile, final[op], setting.tensor_degrees[op])
            channel_s = max(channel_s, clock_s) + reduce_s
    return Step(
        passes_s=num_micro_steps * clock_s,
        exposed_s=max(0.0, channel_s - clock_s),
        optimizer_s=_optimizer_s(profile, setting, final),
    )


def pass_times_s(profile: Profile, setting: Setting, op: int, num_devices: int) -> tuple[float, float]:
    """Forward and backward seconds of all layers of an op, on as many of these devices as it can use."""
    curve = profile.curve(op, setting).up_to(num_devices)
    assert curve is not None
    num_layers = profile.graph.metaops[op].num_layers
    return num_layers * curve.forward_s[-1], num_layers * curve.backward_s[-1]


def _elements_final_at(graph: MetaGraph) -> list[int]:
    """Parameter elements whose gradient is complete when an op's backward ends: it is the first to use them."""
    seen: set[int] = set()
    result = []
    for op in graph.metaops:
        used = {parameter for layer in op.parameters for parameter in layer}
        result.append(sum(graph.parameters[parameter].num_elements for parameter in used - seen))
        seen |= used
    return result


def _all_reduce_s(profile: Profile, num_elements: int, degree: int) -> float:
    """A ring over the replicas: inside an island each device's shard on its own link, beyond it all on the uplink."""
    cluster = profile.cluster
    carried = ring_bytes(num_elements * profile.graph.numerics.gradient_bytes, cluster.num_devices // degree)
    if len(cluster.islands) == 1:
        return carried / degree / cluster.islands[0].link.bytes_per_s
    return carried / min(island.uplink.bytes_per_s for island in cluster.islands)


def _optimizer_s(profile: Profile, setting: Setting, elements: Sequence[int]) -> float:
    held = sum(count / degree for count, degree in zip(elements, setting.tensor_degrees, strict=True))
    return held * profile.graph.numerics.update_bytes / profile.cluster.kind.memory_bytes_per_s


def smallest_setting(profile: Profile) -> Setting:
    """The smallest tensor degree, the same for all modules that allow it, with which the sequential step fits."""
    for degree in (1, 2, 4, 8):
        degrees = {module: min(degree, profile.degrees_of(module)[-1]) for module in profile.graph.modules}
        setting = profile.setting(degrees)
        if sequential_bytes(profile, setting) <= MEMORY_SHARE * profile.cluster.kind.memory_bytes:
            return setting
    raise SystemExit(f"{profile.graph.name} does not fit {profile.cluster.name}")


def sequential_bytes(profile: Profile, setting: Setting) -> float:
    """State and the largest task's activations on one device; DeepSpeed runs one task's both passes at a time."""
    state: dict[int, int] = {}
    activations: dict[str, float] = {}
    for position, op in enumerate(profile.graph.metaops):
        degree = setting.tensor_degrees[position]
        rows = -(-op.batch_size * degree // profile.curve(position, setting).num_devices[-1]) if op.batch_size else 0
        kept = saved_bytes(op, rows, op.num_layers, degree, recompute=False)
        activations[op.task] = activations.get(op.task, 0) + kept
        for parameter in {parameter for layer in op.parameters for parameter in layer}:
            state[parameter] = state_bytes(profile.graph, parameter, degree)
    return sum(state.values()) + max(activations.values())


# Two baselines, estimated on the curves: only numbers of replicas that divide the batch, as in the paper.


def distmm_passes_s(profile: Profile, setting: Setting) -> float:
    """Task after task; the ops of one level side by side or in turn, whichever ends sooner."""
    graph, num_devices = profile.graph, profile.cluster.num_devices
    groups: dict[tuple[str, int], list[int]] = {}
    for op, metaop in enumerate(graph.metaops):
        groups.setdefault((metaop.task, graph.levels[op]), []).append(op)
    total_s = 0.0
    for ops in groups.values():
        in_turn_s = sum(sum(pass_times_s(profile, setting, op, num_devices)) for op in ops)
        total_s += min(in_turn_s, _side_by_side_s([_choices(profile, setting, op) for op in ops], num_devices))
    return total_s


def _choices(profile: Profile, setting: Setting, op: int) -> list[tuple[int, float]]:
    curve, metaop = profile.curve(op, setting), profile.graph.metaops[op]
    assert metaop.batch_size is not None
    return [
        (count, metaop.num_layers * float(time_s))
        for count, time_s in zip(curve.num_devices, curve.folded_s(), strict=True)
        if metaop.batch_size % (count // curve.tensor_degree) == 0
    ]


def _side_by_side_s(choices: list[list[tuple[int, float]]], num_devices: int) -> float:
    """The soonest that all can end together, each on fixed devices of its own."""
    for deadline_s in sorted({time_s for options in choices for _, time_s in options}):
        needed = [min((n for n, time_s in options if time_s <= deadline_s), default=math.inf) for options in choices]
        if sum(needed) <= num_devices:
            return deadline_s
    return math.inf


def optimus_passes_s(profile: Profile, setting: Setting) -> float | None:
    """Every task on devices of its own, doubled where that gains most per device; None with too few devices."""
    graph, num_devices = profile.graph, profile.cluster.num_devices

    @functools.cache
    def task_s(task: str, count: int) -> float:
        ops = [op for op, metaop in enumerate(graph.metaops) if metaop.task == task]
        return sum(sum(pass_times_s(profile, setting, op, count)) for op in ops)

    counts = dict.fromkeys(graph.tasks, max(setting.tensor_degrees))
    if sum(counts.values()) > num_devices:
        return None
    while True:
        free = num_devices - sum(counts.values())
        gains = {t: (task_s(t, n) - task_s(t, 2 * n)) / n for t, n in counts.items() if n <= free}
        best = max(gains, key=gains.__getitem__, default=None)
        if best is None or gains[best] <= 0:
            return max(task_s(task, count) for task, count in counts.items())
        counts[best] *= 2


# Bounds on the passes of any plan, under the setting of the sequential one.


def area_bound_s(profile: Profile, setting: Setting) -> float:
    """The least device seconds of every op, over all devices."""
    return sum(_hull(profile, setting, op)[1][-1] for op in range(len(profile.curves))) / profile.cluster.num_devices


def level_bound_s(profile: Profile, setting: Setting) -> float:
    """C* (§3.3), level by level: the soonest by which the ops of a level need no more area than there is."""
    graph, num_devices = profile.graph, profile.cluster.num_devices
    total_s = 0.0
    for level in sorted(set(graph.levels)):
        hulls = [_hull(profile, setting, op) for op in range(len(graph.metaops)) if graph.levels[op] == level]
        low_s, high_s = max(times[0] for times, _ in hulls), sum(areas[-1] for _, areas in hulls)
        for _ in range(60):
            middle_s = (low_s + high_s) / 2
            area = sum(np.interp(middle_s, times, areas) for times, areas in hulls)
            low_s, high_s = (low_s, middle_s) if area <= num_devices * middle_s else (middle_s, high_s)
        total_s += high_s
    return total_s


def _hull(profile: Profile, setting: Setting, op: int) -> tuple[list[float], list[float]]:
    """The lower hull of (duration, area) of an op, from its fastest choice to its cheapest."""
    curve, num_layers = profile.curve(op, setting), profile.graph.metaops[op].num_layers
    times = curve.folded_s() * num_layers
    hull: list[tuple[float, float]] = []
    for time_s, area in sorted(zip(times.tolist(), (times * curve.num_devices).tolist(), strict=True)):
        while len(hull) > 1 and _turns_up(hull[-2], hull[-1], (time_s, area)):
            hull.pop()
        if not hull or area < hull[-1][1]:
            hull.append((time_s, area))
    return [time_s for time_s, _ in hull], [area for _, area in hull]


def _turns_up(first: tuple[float, float], second: tuple[float, float], third: tuple[float, float]) -> bool:
    return (second[1] - first[1]) * (third[0] - first[0]) >= (third[1] - first[1]) * (second[0] - first[0])


# The fit.


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Batch sizes to try, and the efficiency where the DeepSpeed times cannot tell it from the overhead."""

    batch_sizes: Mapping[str, int]
    efficiency: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One cell of the paper with its graph on its cluster."""

    cell: Cell
    graph: MetaGraph
    cluster: Cluster
    num_micro_steps: int

    def profiled(self, roofline: Roofline) -> tuple[Profile, Setting]:
        profile = roofline_profile(self.graph, self.cluster, roofline)
        return profile, smallest_setting(profile)

    def step(self, roofline: Roofline) -> Step:
        return sequential_step(*self.profiled(roofline), self.num_micro_steps)


def worlds_of(recipe: Recipe, batch_sizes: Mapping[str, int]) -> list[World]:
    worlds = []
    for cell in (cell for cell in CELLS if cell.recipe == recipe.name):
        num_micro_steps = recipe.num_micro_steps(cell.num_devices)
        workload = recipe.build(scaled(recipe.name, batch_sizes, 1 / num_micro_steps))
        cluster = cluster_named(f"a800x{cell.num_devices}")
        worlds.append(
            World(cell=cell, graph=metagraph_of(workload), cluster=cluster, num_micro_steps=num_micro_steps)
        )
    return worlds


def fit_roofline(worlds: Sequence[World], efficiency: float | None) -> Roofline:
    """Efficiency (unless given) and overhead with the least squared relative error of the DeepSpeed times."""

    def roofline_at(x: np.ndarray) -> Roofline:
        return Roofline(efficiency=float(x[1]) if efficiency is None else efficiency, overhead_s=float(x[0]) * 1e-3)

    def residuals(x: np.ndarray) -> list[float]:
        return [world.step(roofline_at(x)).total_s * 1e3 / world.cell.deepspeed_ms - 1 for world in worlds]

    bounds = np.array([OVERHEAD_MS, EFFICIENCY] if efficiency is None else [OVERHEAD_MS]).T
    start = [1.5, 0.35] if efficiency is None else [1.5]
    found = least_squares(residuals, start, bounds=bounds, diff_step=1e-3).x
    rounded = np.round(found, 3)  # what a file should say; 0.001 ms and 0.1 % of peak
    return roofline_at(rounded)


def error_of(worlds: Sequence[World], roofline: Roofline) -> float:
    """Root mean square of the relative errors against DeepSpeed, DistMM-MT and Spindle-Optimus."""
    errors = []
    for world in worlds:
        profile, setting = world.profiled(roofline)
        step = sequential_step(profile, setting, world.num_micro_steps)
        errors.append(step.total_s * 1e3 / world.cell.deepspeed_ms - 1)
        for speedup, passes_s in (
            (world.cell.distmm, distmm_passes_s(profile, setting)),
            (world.cell.optimus, optimus_passes_s(profile, setting)),
        ):
            if passes_s is not None:
                errors.append(step.total_s / _with_rest_s(step, passes_s, world.num_micro_steps) / speedup - 1)
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def _with_rest_s(step: Step, passes_s: float, num_micro_steps: int) -> float:
    return passes_s * num_micro_steps + step.exposed_s + step.optimizer_s


def fit_recipe(recipe: Recipe, candidates: Iterator[Candidate]) -> Fit:
    """The best candidate with its roofline, beside the paper's numbers; of equals the first."""
    tried = []
    for candidate in candidates:
        worlds = worlds_of(recipe, candidate.batch_sizes)
        roofline = fit_roofline(worlds, candidate.efficiency)
        tried.append((error_of(worlds, roofline), candidate, worlds, roofline))
    _, best, worlds, roofline = min(tried, key=lambda one: one[0])
    return Fit(
        recipe=recipe.name,
        efficiency=roofline.efficiency,
        overhead_s=roofline.overhead_s,
        batch_sizes=tuple(best.batch_sizes.items()),
        cells=tuple(_fitted_cell(world, roofline) for world in worlds),
    )


def _fitted_cell(world: World, roofline: Roofline) -> FittedCell:
    profile, setting = world.profiled(roofline)
    step = sequential_step(profile, setting, world.num_micro_steps)
    bounds_ms = [
        round(_with_rest_s(step, bound(profile, setting), world.num_micro_steps) * 1e3, 1)
        for bound in (area_bound_s, level_bound_s)
    ]
    return FittedCell(
        num_devices=world.cell.num_devices,
        num_micro_steps=world.num_micro_steps,
        paper_ms=world.cell.deepspeed_ms,
        predicted_ms=round(step.total_s * 1e3, 1),
        residual_percent=round((step.total_s * 1e3 / world.cell.deepspeed_ms - 1) * 100, 1),
        area_bound_ms=bounds_ms[0],
        level_bound_ms=bounds_ms[1],
    )


# What is tried. A larger batch at a higher efficiency gives the same times, so one batch of each workload is set by hand.


def clip_candidates(tasks: Sequence[str], known: Mapping[str, int]) -> Iterator[Candidate]:
    """Batches for the tasks that a smaller recipe does not know yet; three of the paper's four have 256."""
    if not known:
        for vision in (128, 256, 512, 1024):
            yield Candidate(batch_sizes=dict.fromkeys(tasks, 256) | {"vision-depth": vision})
        return
    new = tasks[len(known) :]
    for sizes in itertools.product((128, 256, 512), repeat=len(new)):
        yield Candidate(batch_sizes=dict(known) | dict(zip(new, sizes, strict=True)))


def ofasys_candidates(tasks: Sequence[str]) -> Iterator[Candidate]:
    """Batches of 256. With micro-steps overhead and work shrink alike, so the other baselines choose the efficiency."""
    for percent in range(20, 61, 5):
        yield Candidate(batch_sizes=dict.fromkeys(tasks, 256), efficiency=percent / 100)


def qwen_val_candidates(tasks: Sequence[str]) -> Iterator[Candidate]:
    for size in (8, 16, 32):
        yield Candidate(batch_sizes=dict.fromkeys(tasks, size))


def fit_all() -> Fits:
    fits: list[Fit] = []
    known: dict[str, int] = {}
    for num_tasks in (4, 7, 10):
        fits.append(fit_recipe(RECIPES[f"clip-{num_tasks}"], clip_candidates(clip.TASKS[:num_tasks], known)))
        known = dict(fits[-1].batch_sizes)
    for num_tasks in (4, 7):
        fits.append(fit_recipe(RECIPES[f"ofasys-{num_tasks}"], ofasys_candidates(ofasys.TASKS[:num_tasks])))
    fits.append(fit_recipe(RECIPES["qwen-val-3"], qwen_val_candidates(qwen_val.TASKS)))
    return Fits(fits=tuple(fits))


# The tables of docs/recipes.md.


def fit_table(fits: Fits) -> str:
    lines = [
        "| recipe | efficiency | overhead per layer | devices | micro-steps | paper ms | model ms | residual |"
        " model / area bound | model / C\\* | paper's Spindle |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    paper = {(cell.recipe, cell.num_devices): cell for cell in CELLS}
    for fit in fits.fits:
        for cell in fit.cells:
            lines.append(
                f"| {fit.recipe} | {fit.efficiency:.3f} | {fit.overhead_s * 1e3:.2f} ms | {cell.num_devices} "
                f"| {cell.num_micro_steps} | {cell.paper_ms:.0f} | {cell.predicted_ms:.0f} "
                f"| {cell.residual_percent:+.1f} % | {cell.predicted_ms / cell.area_bound_ms:.2f} "
                f"| {cell.predicted_ms / cell.level_bound_ms:.2f} "
                f"| {paper[fit.recipe, cell.num_devices].spindle:.2f} |"
            )
    return "\n".join(lines)


def batch_table(fits: Fits) -> str:
    lines = ["| recipe | parameters | batch sizes |", "|---|---|---|"]
    for fit in fits.fits:
        total = RECIPES[fit.recipe].build(dict(fit.batch_sizes)).num_parameters / 1e9
        batches = ", ".join(f"{task} {size}" for task, size in fit.batch_sizes)
        lines.append(f"| {fit.recipe} | {total:.2f}B | {batches} |")
    return "\n".join(lines)


def replace_between(text: str, name: str, body: str) -> str:
    """The text with what stands between the markers of this name replaced."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, rest = text.split(start)
    return f"{head}{start}\n{body}\n{end}{rest.split(end)[1]}"


def main() -> None:
    fits = fit_all()
    write_artifact(ROOT / "src/spindle/recipes/fitted.json", FITS_KIND, fits)
    docs = ROOT / "docs/recipes.md"
    text = docs.read_text(encoding="utf-8")
    tables: dict[str, Callable[[Fits], str]] = {"fit table": fit_table, "batch table": batch_table}
    for name, table in tables.items():
        text = replace_between(text, name, table(fits))
    write_whole(docs, text)
    print(fit_table(fits), batch_table(fits), sep="\n\n")


if __name__ == "__main__":
    main()
