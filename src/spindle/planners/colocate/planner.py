"""Planner `colocate`: encoders stand whole on the language model's devices, each item is encoded where there is time
(MegaScale-Omni).

Placement, tensor degree and size of parts are chosen once, on a batch that stands for all (`choose_colocation`). Then,
for each batch: parts to devices, level over the step; an order of passes on every device; what each stage and part
keeps. Where a batch has no parts, or its layout spreads all modules, this is planner `pipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from spindle.errors import DoesNotFitError, PlanError
from spindle.graph import MetaGraph
from spindle.plan import Plan
from spindle.planners.colocate.columns import (
    EVERYTHING,
    Known,
    Replica,
    activation_budgets,
    assigned_parts,
    passes_of,
    plan_of_orders,
    replicas_of,
)
from spindle.planners.colocate.order import Order, ordered
from spindle.planners.finish import finished
from spindle.planners.options import DEDICATED, FIRST, REPLICATED, SPREAD, Chain, Layout, PlanOptions, Progress
from spindle.planners.pipeline.baselines import baseline_layouts, plan_baseline
from spindle.planners.pipeline.bound import pipeline_bound_s
from spindle.planners.pipeline.chains import (
    layer_counts,
    layer_loads,
    lightest_cuts,
    pipeline_ranks_of,
    tensor_degree_of,
)
from spindle.planners.pipeline.choose import choose_layout
from spindle.planners.pipeline.planner import plan_pipeline
from spindle.planners.pipeline.segments import Column
from spindle.planners.pipeline.stages import NS, owning_ranks_in, ranks_of_whole
from spindle.profile import Profile
from spindle.program import lower, posted_peaks, refuse_overfull
from spindle.simulate import simulate

_ATTEMPTS = 6
_MARGIN = 1 / 4096  # of a device's memory: taken from a budget beyond the excess
_LEVELS = 8  # of memory choices, from the leanest to the fastest
_ALL_LEVELS = (8, 3, 0)
_ROUNDS = (1, 2, 4)  # how often the language model passes its ranks
_NUM_FINALISTS = 4  # layouts that become plans, after a first look at their schedules
_EVALUATIONS = 256  # of planner `pipeline`, where the two are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the parts of a batch are placed and ordered; planners and baselines differ in these.

    The best of all `ahead` (microbatches by which a part comes before its language model) and `lag` (by which its
    backward comes after) is taken. Without `sequence_groups` items are not split; `is_in_turn` has no balancing.
    """

    ahead: tuple[int, ...] = (1, 2, 4, EVERYTHING)
    lag: tuple[int, ...] = (2, 0, 4, EVERYTHING)
    levels: tuple[int, ...] = _ALL_LEVELS
    sequence_groups: bool = True
    is_in_turn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A way to place encoders and order their parts. `whole_calls`: all items of a microbatch are one part, at the
    tensor degree of the language model. `may_spread`: the layout of planner `pipeline` is a candidate, too."""

    description: str
    rules: Rules
    placements: tuple[str, ...]
    whole_calls: bool = False
    may_spread: bool = False


SYSTEMS: Mapping[str, System] = {
    "colocate": System(
        description="encoders whole on the language model's devices, items encoded just in time, long ones shared",
        rules=Rules(),
        placements=(REPLICATED, DEDICATED),
        may_spread=True,
    ),
    "upfront": System(
        description="colocated, all items encoded before the language model and back-propagated behind it",
        rules=Rules(ahead=(EVERYTHING,), lag=(EVERYTHING,)),
        placements=(REPLICATED,),
    ),
    "stage-0": System(
        description="encoders on the first pipeline rank (Megatron-LM)",
        rules=Rules(lag=(0,), sequence_groups=False),
        placements=(FIRST,),
        whole_calls=True,
    ),
    "dedicated": System(
        description="encoders on pipeline ranks of their own, items in turn (disaggregated)",
        rules=Rules(sequence_groups=False, is_in_turn=True),
        placements=(DEDICATED,),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scheduled:
    """Orders of all replicas of a layout, and the `ahead` and `lag` of each."""

    layout: Layout
    replicas: tuple[Replica, ...]
    assigned: tuple[tuple[tuple[int, int], ...], ...]
    orders: tuple[Order, ...]
    settings: tuple[tuple[int, int, int], ...]  # by replica: ahead, lag, level

    @property
    def makespan_ns(self) -> int:
        return max(order.makespan_ns for order in self.orders)


def plan_system(planner: str, profile: Profile, options: PlanOptions, progress: Progress | None = None) -> Plan:
    """The best plan of a system over the layouts that are given, or over all that it may have."""
    return plan_by_rules(profile, options, planner, SYSTEMS[planner].rules, SYSTEMS[planner].placements, progress)


def plan_by_rules(
    profile: Profile,
    options: PlanOptions,
    planner: str,
    rules: Rules,
    placements: Sequence[str],
    progress: Progress | None = None,
) -> Plan:
    """The best plan of some rules over layouts with these placements of the modules that run in parts."""
    layouts = options.layouts or layouts_with(profile, pipeline_ranks_of(profile, options), placements)
    if not layouts or all(chain.placement == SPREAD for chain in layouts[0].chains):
        # Nothing to place: our own search, or for other systems the pipeline that they have without encoders.
        if SYSTEMS[planner].may_spread:
            return replace(plan_pipeline(profile, options, progress), planner=planner)
        return replace(plan_baseline("static", profile, replace(options, layouts=()), progress), planner=planner)
    scheduled = best_schedule(profile, layouts, rules)
    plan = _fitting(profile, scheduled, planner, rules, options)
    ahead, lag, _ = scheduled.settings[0]
    how_far = "all microbatches" if ahead >= EVERYTHING else f"{ahead} microbatch{'es' if ahead > 1 else ''}"
    shared = sum(degree > 1 for devices in scheduled.assigned for _, degree in devices)
    texts = [
        scheduled.layout.text,
        f"parts {how_far} ahead, backward {'last' if lag >= EVERYTHING else f'{lag} behind'}",
    ]
    texts += [f"{shared} items on sequence groups"] if shared else []
    if progress is not None:
        progress(1.0)
    return replace(plan, seed=options.seed, settings="; ".join(texts))


def layouts_with(
    profile: Profile, num_ranks: int, placements: Sequence[str], shards_optimizer: bool = True
) -> tuple[Layout, ...]:
    """Layouts whose modules that run in parts stand as one of the placements says; the others are cut into one chunk
    for each rank, or several, lighter on rank 0 where encoders stand there alone. Empty where nothing runs in parts."""
    graph = profile.graph
    rows = rows_of_item_modules(graph)
    item_modules = [module for row in rows for module in row]
    counts, loads = layer_counts(graph), layer_loads(profile)
    spread = [module for module in counts if module not in item_modules]
    if not item_modules or not spread:
        return ()
    degree = tensor_degree_of(profile)
    num_replicas, rest = divmod(profile.cluster.num_devices, num_ranks * degree)
    if num_replicas < 1 or rest:
        raise PlanError(
            f"{num_ranks} pipeline ranks of {degree} devices need a multiple of {num_ranks * degree} devices, got "
            f"{profile.cluster.num_devices}"
        )
    together = np.concatenate([loads[module] for module in spread])
    degrees_of = [
        sorted(set.intersection(*(set(profile.degrees_of(module)) for module in row)) & set(divisors_of(degree)))
        for row in rows
    ]
    layouts = []
    seconds_of = {
        (row, each): sum(_seconds_of(profile, module, each) for module in row)
        for row, degrees in zip(rows, degrees_of, strict=True)
        for each in degrees
    }
    for placement, degrees, rounds in product(placements, product(*degrees_of), _ROUNDS):
        for num_dedicated in range(1, num_ranks) if placement == DEDICATED else (0,):
            num_chunks = rounds * (num_ranks - num_dedicated)
            if rounds > 1 and (num_chunks > len(together) or num_chunks == rounds):
                continue
            in_front = 0.0
            if placement == FIRST:
                in_front = sum(seconds_of[row, each] * each / degree for row, each in zip(rows, degrees, strict=True))
            whole = tuple(
                Chain(
                    modules=row,
                    num_layers=tuple(counts[module] for module in row),
                    bounds=(0, sum(counts[module] for module in row)),
                    placement=placement,
                    tensor_degree=each,
                )
                for row, each in zip(rows, degrees, strict=True)
            )
            chain = Chain(
                modules=tuple(spread),
                num_layers=tuple(counts[module] for module in spread),
                bounds=_cuts_behind(together, num_chunks, in_front),
            )
            layouts.append(
                Layout(
                    num_ranks=num_ranks,
                    num_replicas=num_replicas,
                    tensor_degree=degree,
                    chains=(*whole, chain),
                    num_dedicated=num_dedicated,
                    shards_optimizer=shards_optimizer,
                )
            )
    return tuple(layouts)


def rows_of_item_modules(graph: MetaGraph) -> list[tuple[str, ...]]:
    """Modules that run in parts, those together whose calls read each other: their parts stand on the same devices."""
    rows: list[list[str]] = [[module] for module in dict.fromkeys(op.module or "" for op in graph.metaops if op.items)]
    for producer, consumer in graph.edges:
        source, target = graph.metaops[producer], graph.metaops[consumer]
        if source.items and target.items and source.module != target.module:
            first = next(row for row in rows if source.module in row)
            second = next(row for row in rows if target.module in row)
            if first is not second:
                rows.remove(second)
                first += second
    return [tuple(row) for row in rows]


def divisors_of(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _seconds_of(profile: Profile, module: str, degree: int) -> float:
    """All passes of a module over a batch, each on one tensor group of this degree."""
    setting = profile.setting({module: degree})
    return sum(
        op.num_layers * profile.curve(position, setting).layer_s(degree)
        for position, op in enumerate(profile.graph.metaops)
        if op.module == module
    )


def _cuts_behind(loads: np.ndarray, num_chunks: int, in_front: float) -> tuple[int, ...]:
    """Bounds of chunks whose first has so much other work in front of it."""
    if not in_front:
        return lightest_cuts(loads, num_chunks)
    cuts = lightest_cuts(np.concatenate([[in_front], loads]), num_chunks)
    return (0, *(max(0, cut - 1) for cut in cuts[1:]))


def best_schedule(profile: Profile, layouts: Sequence[Layout], rules: Rules) -> Scheduled:
    """The shortest schedule over layouts."""
    best: Scheduled | None = None
    refusals: list[DoesNotFitError] = []
    known: Known = {}
    for layout in layouts:
        try:
            scheduled = schedule_parts(profile, layout, rules, known=known)
        except DoesNotFitError as error:
            refusals.append(error)
            continue
        if best is None or scheduled.makespan_ns < best.makespan_ns:
            best = scheduled
    if best is None:
        raise min(refusals, key=lambda refusal: refusal.needed_bytes)
    return best


def schedule_parts(
    profile: Profile,
    layout: Layout,
    rules: Rules,
    budgets: Sequence[Column] | None = None,
    known: Known | None = None,
) -> Scheduled:
    """The shortest schedule of each replica over what the rules leave open, under activation budgets by device."""
    replicas = replicas_of(profile, layout, known)
    if budgets is None:
        budgets = [activation_budgets(profile, layout, replica) for replica in replicas]
    assigned, orders, settings = [], [], []
    for replica, budget in zip(replicas, budgets, strict=True):
        devices = assigned_parts(profile, layout, replica, rules.sequence_groups, rules.is_in_turn)
        best: tuple[Order, tuple[int, int, int]] | None = None
        # Every `ahead` with the first `lag`, the last of both, and the best `ahead` with the other `lag`.
        pairs = [*((ahead, rules.lag[0]) for ahead in rules.ahead), (rules.ahead[-1], rules.lag[-1])]
        for number in range(len(pairs) + len(rules.lag[1:])):
            if number < len(pairs):
                ahead, lag = pairs[number]
            else:
                ahead, lag = best[1][0] if best else rules.ahead[0], rules.lag[1 + number - len(pairs)]
            if (ahead, lag) in pairs[:number]:
                continue
            passes = passes_of(profile, layout, replica, devices, ahead, lag)
            for level in rules.levels:
                order = ordered(passes, budget, level, _LEVELS)
                if order is not None and (best is None or order.makespan_ns < best[0].makespan_ns):
                    best = order, (ahead, lag, level)
        if best is None:
            needed = profile.cluster.kind.memory_bytes + 1
            raise DoesNotFitError(
                f"{profile.graph.name} does not fit: parts {layout.text} leave too little memory for the microbatches "
                f"that the language model has in flight, even if all is recomputed",
                needed,
            )
        if any(degree > 1 for _, degree in devices):
            # Level work is not always a short step: the devices of a sequence group wait for each other.
            alone = assigned_parts(profile, layout, replica, False, rules.is_in_turn)
            ahead, lag, level = best[1]
            order = ordered(passes_of(profile, layout, replica, alone, ahead, lag), budget, level, _LEVELS)
            if order is not None and order.makespan_ns < best[0].makespan_ns:
                devices, best = alone, (order, best[1])
        assigned.append(tuple(devices))
        orders.append(best[0])
        settings.append(best[1])
    return Scheduled(
        layout=layout,
        replicas=tuple(replicas),
        assigned=tuple(assigned),
        orders=tuple(orders),
        settings=tuple(settings),
    )


def _fitting(profile: Profile, scheduled: Scheduled, planner: str, rules: Rules, options: PlanOptions) -> Plan:
    """A plan of the schedule that fits with what is in flight between devices: budgets shrink by the excess from
    attempt to attempt, as in planner `pipeline`."""
    layout, limit = scheduled.layout, profile.cluster.kind.memory_bytes
    num_devices = layout.num_ranks * layout.tensor_degree
    owning_ranks = tuple(sorted(owning_ranks_in(profile.graph, layout).items()))
    budgets = [activation_budgets(profile, layout, replica) for replica in scheduled.replicas]
    for _ in range(_ATTEMPTS):
        plan = plan_of_orders(profile, layout, planner, scheduled.replicas, scheduled.assigned, scheduled.orders)
        program = lower(plan, profile)
        timeline = simulate(program, profile)
        plan = replace(plan, makespan_s=timeline.makespan_s)
        # A device holds the weights of its chains also in steps that do not use them there.
        owned = replace(program, owning_ranks=owning_ranks)
        peaks = np.maximum(timeline.peak_bytes(), posted_peaks(owned, profile, range(profile.cluster.num_devices)))
        excess = (peaks - limit).reshape(layout.num_replicas, num_devices)
        if excess.max() <= 0:
            break
        smaller = []
        for replica, budget, order in zip(scheduled.replicas, budgets, scheduled.orders, strict=True):
            over = excess[replica.number].reshape(layout.num_ranks, -1).max(axis=1).repeat(layout.tensor_degree)
            shrunk = np.minimum(budget, order.peak) - over - int(_MARGIN * limit)
            smaller.append(np.where(over > 0, np.maximum(1, shrunk), budget))
        budgets = smaller
        scheduled = schedule_parts(profile, layout, rules, budgets)
    refuse_overfull(peaks, profile)
    bound_s = options.bound_s
    if bound_s is None:
        bound_s = pipeline_bound_s([profile], layout.num_ranks)
    return finished(plan, profile, bound_s)


def choose_colocation(
    planner: str,
    part_profiles: Sequence[Profile],
    split_profiles: Sequence[Profile],
    num_ranks: int,
    shards_optimizer: bool | None = None,
) -> tuple[Profile, Layout]:
    """Choose placement, tensor degree and parts of encoders for a system, on a batch that stands for all: among
    profiles whose item calls are in parts, the first of them in whole calls, by the lengths of their schedules; the
    best of these against planner `pipeline` on `split_profiles`, by simulation. The optimizer is sharded where encoders
    stand whole, unless `shards_optimizer` decides."""
    system = SYSTEMS[planner]
    ahead, lag = system.rules.ahead, system.rules.lag
    rules = replace(system.rules, ahead=(ahead[0], *ahead[1:][-1:]), lag=(lag[0], *lag[1:][-1:]), levels=(_LEVELS, 0))
    lengths: list[tuple[float, Profile, Layout]] = []
    refusals: list[DoesNotFitError] = []
    known: dict[tuple[int, str, int], float] = {}
    stages: Known = {}
    candidates = [
        (_work_s(profile, layout, known), profile, layout)
        for profile in (part_profiles[:1] if system.whole_calls else part_profiles[1:])
        for layout in layouts_with(profile, num_ranks, system.placements, shards_optimizer is not False)
        if not system.whole_calls or all(chain.tensor_degree in (0, layout.tensor_degree) for chain in layout.chains)
    ]
    for work_s, profile, layout in sorted(candidates, key=lambda candidate: candidate[0]):
        if lengths and work_s >= min(length_s for length_s, _, _ in lengths):
            break  # neither this one nor the others, which have more work, can be shorter
        try:
            lengths.append((schedule_parts(profile, layout, rules, known=stages).makespan_ns / NS, profile, layout))
        except DoesNotFitError as error:
            refusals.append(error)
    lengths.sort(key=lambda entry: entry[0])
    finalists = [
        (_simulated_s(planner, profile, layout), profile, layout) for _, profile, layout in lengths[:_NUM_FINALISTS]
    ]
    best = min(finalists, key=lambda entry: entry[0], default=None)
    if not system.may_spread and not part_profiles:
        layout = baseline_layouts("static", split_profiles[0], num_ranks)[0]
        return split_profiles[0], replace(layout, shards_optimizer=shards_optimizer is True)
    if system.may_spread and split_profiles:
        try:
            profile, layout = choose_layout(split_profiles, num_ranks, shards_optimizer is True)
            if best is None:
                return profile, layout
            spread = plan_pipeline(profile, PlanOptions(evaluations=_EVALUATIONS, layouts=(layout,)))
            if spread.makespan_s < best[0]:
                return profile, layout
        except DoesNotFitError as error:
            refusals.append(error)
    if best is None:
        raise min(refusals, key=lambda refusal: refusal.needed_bytes)
    return best[1], best[2]


def _work_s(profile: Profile, layout: Layout, known: dict[tuple[int, str, int], float]) -> float:
    """No step of a layout is shorter: all work over the devices that may do it, nothing computed twice. `known` keeps
    the seconds of modules."""
    spread, whole, devices = 0.0, 0.0, range(0)
    for chain in layout.chains:
        degree = chain.tensor_degree or layout.tensor_degree
        seconds = 0.0
        for module in chain.modules:
            key = (id(profile), module, degree)
            if key not in known:
                known[key] = _seconds_of(profile, module, degree)
            seconds += known[key] * degree
        if chain.placement == SPREAD:
            spread += seconds
        else:
            whole += seconds
            devices = ranks_of_whole(layout, chain)
    per_rank = layout.num_replicas * layout.tensor_degree
    if len(devices) == layout.num_ranks:
        return (spread + whole) / (per_rank * layout.num_ranks)
    both_s = (spread + whole) / (per_rank * layout.num_ranks)
    return max(both_s, whole / (per_rank * max(1, len(devices))), spread / (per_rank * layout.num_spread_ranks))


def _simulated_s(planner: str, profile: Profile, layout: Layout) -> float:
    """The simulated step of a layout; without end where it does not fit after all."""
    try:
        return plan_system(planner, profile, PlanOptions(layouts=(layout,))).makespan_s
    except DoesNotFitError:
        return float("inf")


def compare_placements(part_profiles: Sequence[Profile], num_ranks: int) -> list[tuple[str, float | None, str]]:
    """Every placement and tensor degree of encoders: in words, the seconds of its shortest schedule over sizes of parts
    and numbers of chunks, or None and why it does not fit."""
    rules = replace(SYSTEMS["colocate"].rules, ahead=(1,), lag=(2,), levels=(_LEVELS, 0))
    best: dict[str, tuple[float | None, str]] = {}
    stages: Known = {}
    for profile in part_profiles[1:]:
        for layout in layouts_with(profile, num_ranks, (REPLICATED, DEDICATED, FIRST)):
            text = layout.whole_text
            try:
                length_s = schedule_parts(profile, layout, rules, known=stages).makespan_ns / NS
            except DoesNotFitError as error:
                best.setdefault(text, (None, str(error)))
                continue
            before = best.get(text, (None, ""))[0]
            best[text] = (length_s if before is None else min(before, length_s), "")
    return [(text, length_s, why) for text, (length_s, why) in best.items()]
