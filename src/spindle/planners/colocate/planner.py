"""Planner `colocate`: every device of the language model also has the whole encoders, and each item is encoded on
devices that have time for it (MegaScale-Omni).

Placement, tensor degree and size of parts are chosen once, on representative batches (`choose`). Then, for each batch:
the devices of each part, balanced over blocks of microbatches; the order of passes on every device; and which
activations each stage and part keeps. If a batch has no parts, or its layout spreads all modules over the pipeline,
this is planner `pipeline`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from spindle.display import count_of
from spindle.errors import DoesNotFitError
from spindle.plan import Plan
from spindle.planners.colocate.columns import (
    EVERYTHING,
    STRICT,
    Known,
    Replica,
    Seen,
    Template,
    activation_budgets,
    assigned_parts,
    key_of_ns,
    passes_of,
    plan_of_orders,
    refuse_weights,
    replicas_of,
    seen_in,
    template_of,
)
from spindle.planners.colocate.layouts import layouts_with
from spindle.planners.colocate.order import Order, ordered
from spindle.planners.colocate.search import Devices, searched_order
from spindle.planners.finish import finished
from spindle.planners.options import DEDICATED, FIRST, REPLICATED, SPREAD, Layout, PlanOptions, Progress
from spindle.planners.pipeline.baselines import plan_baseline
from spindle.planners.pipeline.bound import pipeline_bound_s
from spindle.planners.pipeline.chains import pipeline_ranks_of
from spindle.planners.pipeline.planner import plan_pipeline
from spindle.planners.pipeline.rank_parameters import owning_ranks_in
from spindle.planners.pipeline.segments import Column
from spindle.profile import Profile
from spindle.program import lower, posted_peaks, refuse_overfull
from spindle.simulate import simulate

_ATTEMPTS = 8
_SEARCHES = 3  # attempts that look at all settings
_MARGIN = 1 / 4096  # share of a device's memory by which a budget shrinks in addition to the excess
_LEVELS = 8  # of memory choices, from the leanest to the fastest
_ALL_LEVELS = (8, 3, 0)
_AHEAD = (1, 2, 4, EVERYTHING)  # of baselines, microbatch by microbatch
_LAG = (2, 0, 4, EVERYTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the parts of a batch are placed and ordered; planners and baselines differ in these.

    The microbatches are cut into blocks, and parts are level in each block; `EVERYTHING` has each microbatch in a block
    of its own and parts level over the step. The best of all `num_blocks`, `ahead`
    (microbatches by which the parts of a block come before its language model) and `lag` (by which their backwards come
    after) is taken, with the first `slack`, `num_split` (`template_of`) and `longest` (percent of a device's mean time
    in parts that an item may take before it is shared; 0: as much as leaves devices level). Then the others of these
    are tried one by one. With `light_ends` the first and last microbatches are those with least for encoders. Without
    `sequence_groups` items are not split; `is_in_turn` has no balancing.
    """

    num_blocks: tuple[int, ...] = (1, 2, 4, 8, 16, EVERYTHING)
    ahead: tuple[int, ...] = (1, 0)
    lag: tuple[int, ...] = (2, 0, EVERYTHING)
    slack: tuple[int, ...] = (STRICT,)
    num_split: tuple[int, ...] = (0,)
    longest: tuple[int, ...] = (0,)
    levels: tuple[int, ...] = _ALL_LEVELS
    num_relevels: int = 2  # times that parts are assigned again, by how long passes take in the order before
    sequence_groups: bool = True
    is_in_turn: bool = False
    light_ends: bool = False
    may_search: bool = False  # if more than one evaluation is asked for


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
        rules=Rules(
            slack=(0, 2, STRICT),
            num_split=(EVERYTHING, 8, 0),
            longest=(0, 50, 25, 12),
            light_ends=True,
            may_search=True,
        ),
        placements=(REPLICATED, DEDICATED),
        may_spread=True,
    ),
    "upfront": System(
        description="colocated, all items encoded before the language model and back-propagated behind it",
        rules=Rules(num_blocks=(1,), ahead=(EVERYTHING,), lag=(EVERYTHING,)),
        placements=(REPLICATED,),
    ),
    "stage-0": System(
        description="encoders on the first pipeline rank (Megatron-LM)",
        rules=Rules(num_blocks=(EVERYTHING,), ahead=_AHEAD, lag=(0,), sequence_groups=False),
        placements=(FIRST,),
        whole_calls=True,
    ),
    "dedicated": System(
        description="encoders on pipeline ranks of their own, items in turn (disaggregated)",
        rules=Rules(num_blocks=(EVERYTHING,), ahead=_AHEAD, lag=_LAG, sequence_groups=False, is_in_turn=True),
        placements=(DEDICATED,),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One choice of each of the options that rules leave open."""

    num_blocks: int
    ahead: int
    lag: int
    slack: int
    num_split: int
    longest: int

    @property
    def text(self) -> str:
        """When parts come, in words."""
        if self.num_blocks == 1:
            return "parts all microbatches ahead, backward last"
        blocks = "" if self.num_blocks >= EVERYTHING else f" in {self.num_blocks} blocks"
        how_far = "all microbatches" if self.ahead >= EVERYTHING else count_of(self.ahead, "microbatch", "microbatches")
        return f"parts{blocks} {how_far} ahead, backward {'last' if self.lag >= EVERYTHING else f'{self.lag} behind'}"


@dataclass(slots=True, kw_only=True, eq=False)
class ReplicaTables:
    """A replica, and what all its orders are made from, whatever the budgets: derived once."""

    profile: Profile
    layout: Layout
    replica: Replica
    _templates: dict[tuple[int, int], Template] = field(init=False, default_factory=dict)
    _devices: dict[tuple[int, int, bool], list[tuple[int, int]]] = field(init=False, default_factory=dict)

    def template(self, slack: int, num_split: int) -> Template:
        key = slack, num_split
        if key not in self._templates:
            self._templates[key] = template_of(self.profile, self.layout, self.replica, *key)
        return self._templates[key]

    def devices(
        self, groups: bool, in_turn: bool, block: int, seen: Seen | None, longest: int
    ) -> list[tuple[int, int]]:
        """The devices of parts (`assigned_parts`); kept if no order was seen."""
        key = block, longest, groups
        devices = self._devices.get(key) if seen is None else None
        if devices is None:
            devices = assigned_parts(self.profile, self.layout, self.replica, groups, in_turn, block, seen, longest)
        if seen is None:
            self._devices[key] = devices
        return devices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scheduled:
    """Orders of all replicas of a layout, and the number of blocks, `ahead` and `lag` of each."""

    layout: Layout
    tables: tuple[ReplicaTables, ...]  # by replica
    assigned: tuple[tuple[tuple[int, int], ...], ...]
    orders: tuple[Order, ...]
    settings: tuple[Setting, ...]

    @property
    def replicas(self) -> list[Replica]:
        return [each.replica for each in self.tables]

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
    try:
        scheduled = best_schedule(profile, layouts, glance(rules))
    except DoesNotFitError:
        scheduled = best_schedule(profile, layouts, rules)
    plan, scheduled = _fitting(profile, scheduled, planner, rules, options)
    shared = sum(degree > 1 for devices in scheduled.assigned for _, degree in devices)
    texts = [
        scheduled.layout.text,
        scheduled.settings[0].text,
    ]
    texts += [f"{shared} items on sequence groups"] if shared else []
    if progress is not None:
        progress(1.0)
    return replace(plan, seed=options.seed, settings="; ".join(texts))


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
    tables: Sequence[ReplicaTables] | None = None,
    settings: Sequence[Setting] | None = None,
) -> Scheduled:
    """The shortest schedule of each replica over what the rules leave open, or with the settings of an earlier one,
    under activation budgets by device."""
    if tables is None:
        refuse_weights(profile, layout)
        replicas = replicas_of(profile, layout, known, rules.light_ends)
        tables = [ReplicaTables(profile=profile, layout=layout, replica=replica) for replica in replicas]
    if budgets is None:
        budgets = [activation_budgets(profile, layout, each.replica) for each in tables]
    taken = []
    for number, (of_replica, budget) in enumerate(zip(tables, budgets, strict=True)):
        best = _best_order(of_replica, rules, budget, None if settings is None else settings[number])
        if best is None:
            needed = profile.cluster.kind.memory_bytes + 1
            raise DoesNotFitError(
                f"{profile.graph.name} does not fit: parts {layout.text} leave too little memory for the microbatches "
                f"that the language model has in flight, even if all is recomputed",
                needed,
            )
        taken.append(best)
    return Scheduled(
        layout=layout,
        tables=tuple(tables),
        assigned=tuple(tuple(each.devices) for each in taken),
        orders=tuple(each.order for each in taken),
        settings=tuple(each.setting for each in taken),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Trial:
    """An order of a replica's passes, from which devices and settings it came, and which order's times parts were
    assigned by."""

    devices: list[tuple[int, int]]
    order: Order
    setting: Setting
    seen: Seen | None


def _best_order(tables: ReplicaTables, rules: Rules, budget: Column, setting: Setting | None) -> _Trial | None:
    """The shortest order over all that the rules leave open, or with one setting. From the best order of each number of
    blocks on, parts are assigned again by how long passes take there, with what they recompute."""
    replica = tables.replica
    num_microbatches = replica.batch.segments.num_microbatches
    best: _Trial | None = None
    orders: dict[tuple[int, tuple[tuple[int, int], ...], bytes], Order | None] = {}  # settings may differ in nothing

    def attempt(setting: Setting, seen: Seen | None = None, groups: bool = rules.sequence_groups) -> _Trial | None:
        nonlocal best
        block = -(-num_microbatches // setting.num_blocks)
        level_over = EVERYTHING if setting.num_blocks == EVERYTHING else block
        devices = tables.devices(groups, rules.is_in_turn, level_over, seen, setting.longest)
        template = tables.template(setting.slack, setting.num_split)
        passes = passes_of(tables.layout, template, devices, setting.ahead, setting.lag, block)
        key = id(template), tuple(devices), np.argsort(passes.key, kind="stable").tobytes()
        if key not in orders:
            orders[key] = ordered(passes, budget, rules.levels, _LEVELS)
        order = orders[key]
        trial = None if order is None else _Trial(devices=devices, order=order, setting=setting, seen=seen)
        if trial is not None and (best is None or trial.order.makespan_ns < best.order.makespan_ns):
            best = trial
        return trial

    for num_split in rules.num_split:  # the next ones only where memory does not allow the first
        for group in [[setting]] if setting is not None else _settings(rules, num_split, num_microbatches):
            trials = [attempt(each) for each in group]
            shortest = min((each for each in trials if each), key=lambda each: each.order.makespan_ns, default=None)
            for _ in range(0 if rules.is_in_turn else rules.num_relevels):
                if shortest is not None:
                    shortest = attempt(shortest.setting, seen_in(replica, shortest.devices, shortest.order))
        if best is not None or setting is not None:
            break
    if best is None:
        return None
    if setting is None:
        for slack in rules.slack[1:]:
            attempt(replace(best.setting, slack=slack), best.seen)
        for num_split in rules.num_split[1:]:
            attempt(replace(best.setting, num_split=num_split), best.seen)
        for longest in rules.longest[1:]:
            attempt(replace(best.setting, longest=longest), best.seen)
    if any(degree > 1 for _, degree in best.devices):
        # Level work is not always a short step: the devices of a sequence group wait for each other.
        attempt(best.setting, seen_in(replica, best.devices, best.order), False)
    return best


def _settings(rules: Rules, num_split: int, num_microbatches: int) -> Iterator[list[Setting]]:
    """All timings of parts, grouped by the number of blocks."""
    for num_blocks in rules.num_blocks:
        if 1 < num_blocks < EVERYTHING and num_blocks >= num_microbatches:
            continue  # each microbatch is a block already, or there is one block
        timings = list(product(rules.ahead, rules.lag))
        yield [
            Setting(
                num_blocks=num_blocks,
                ahead=ahead,
                lag=lag,
                slack=rules.slack[0],
                num_split=num_split,
                longest=rules.longest[0],
            )
            for ahead, lag in (timings[:1] if num_blocks == 1 else timings)
        ]


def _fitting(
    profile: Profile, trial: Scheduled, planner: str, rules: Rules, options: PlanOptions
) -> tuple[Plan, Scheduled]:
    """A plan that fits with what is in flight between devices, and its schedule. A trial measures how much that is;
    then budgets shrink by the excess from attempt to attempt, as in planner `pipeline`. Little less memory can make
    another setting best, so the first attempts look at all."""
    layout, limit = trial.layout, profile.cluster.kind.memory_bytes
    num_devices = layout.num_ranks * layout.tensor_degree
    owning_ranks = tuple(sorted(owning_ranks_in(profile.graph, layout).items()))
    budgets = [activation_budgets(profile, layout, replica) for replica in trial.replicas]

    def plan_of(scheduled: Scheduled, is_trial: bool = False) -> tuple[Plan, Column]:
        """The plan of a schedule, and the peaks of all devices. A trial, or what does not fit, is not simulated."""
        plan = plan_of_orders(profile, layout, planner, scheduled.replicas, scheduled.assigned, scheduled.orders)
        program = lower(plan, profile)
        # A device holds the weights of its chains also in steps that do not use them there.
        owned = replace(program, owning_ranks=owning_ranks)
        peaks = posted_peaks(owned, profile, range(profile.cluster.num_devices))
        if is_trial or peaks.max() > limit:
            return plan, peaks
        timeline = simulate(program, profile)
        return replace(plan, makespan_s=timeline.makespan_s), np.maximum(timeline.peak_bytes(), peaks)

    def smaller(scheduled: Scheduled, peaks: Column) -> list[Column]:
        """Budgets less what the peaks exceed memory by."""
        excess, result = (peaks - limit).reshape(layout.num_replicas, num_devices), []
        for replica, budget, order in zip(scheduled.replicas, budgets, scheduled.orders, strict=True):
            over = excess[replica.number].reshape(layout.num_ranks, -1).max(axis=1).repeat(layout.tensor_degree)
            shrunk = np.minimum(budget, order.peak) - over - int(_MARGIN * limit)
            result.append(np.where(over > 0, np.maximum(1, shrunk), budget))
        return result

    scheduled = trial
    for attempt in range(_ATTEMPTS):
        plan, peaks = plan_of(scheduled, is_trial=attempt == 0)
        if peaks.max() <= limit and attempt:
            break
        budgets = smaller(scheduled, peaks)
        settings = None if attempt < _SEARCHES else scheduled.settings
        scheduled = schedule_parts(profile, layout, rules, budgets, tables=trial.tables, settings=settings)
    refuse_overfull(peaks, profile)
    for _ in range(_ATTEMPTS if rules.may_search and (options.evaluations or 1) > 1 else 0):
        searched = _searched(profile, scheduled, rules, budgets, options)
        if searched is None:
            break
        other, peaks = plan_of(searched)
        if peaks.max() <= limit:
            plan, scheduled = min((plan, scheduled), (other, searched), key=lambda each: each[0].makespan_s)
            break
        budgets = smaller(searched, peaks)
    bound_s = options.bound_s
    if bound_s is None:
        bound_s = pipeline_bound_s([profile], layout.num_ranks)
    return finished(plan, profile, bound_s, options.is_draft), scheduled


def _searched(
    profile: Profile, scheduled: Scheduled, rules: Rules, budgets: Sequence[Column], options: PlanOptions
) -> Scheduled | None:
    """The schedule with parts on other devices and at other times, as far as evaluations go, which replicas share
    evenly. None if budgets allow no order any more."""
    layout, assigned, orders = scheduled.layout, [], []
    evaluations = (options.evaluations or 1) // len(scheduled.tables)
    limit_s = options.time_limit_s
    ends = None if limit_s is None else time.monotonic() + limit_s
    for tables, budget, devices, setting in zip(
        scheduled.tables, budgets, scheduled.assigned, scheduled.settings, strict=True
    ):
        replica, template = tables.replica, tables.template(setting.slack, setting.num_split)
        num_microbatches = replica.batch.segments.num_microbatches
        block = -(-num_microbatches // setting.num_blocks)

        def order_of(
            devices: Devices,
            shifts: Column,
            template: Template = template,
            setting: Setting = setting,
            block: int = block,
            budget: Column = budget,
        ) -> Order | None:
            passes = passes_of(layout, template, devices, setting.ahead, setting.lag, block)
            if len(shifts):
                passes = replace(passes, key=passes.key + shifts)
            return ordered(passes, budget, rules.levels, _LEVELS)

        result = searched_order(
            [part.chain for part in replica.parts],
            list(devices),
            order_of,
            len(template.first),
            key_of_ns(template.makespan_ns // num_microbatches),
            evaluations=evaluations,
            seed=options.seed,
            ends=ends,
        )
        if result is None:
            return None
        assigned.append(tuple(result[0]))
        orders.append(result[1])
    return replace(scheduled, assigned=tuple(assigned), orders=tuple(orders))


def first_look(rules: Rules) -> Rules:
    """A few of what the rules leave open, for layouts beside each other."""
    num_blocks, ahead, lag = rules.num_blocks, rules.ahead, rules.lag
    return replace(
        rules,
        num_blocks=tuple(dict.fromkeys((num_blocks[0], num_blocks[len(num_blocks) // 2]))),
        ahead=tuple(dict.fromkeys((ahead[0], ahead[-1]))),
        lag=tuple(dict.fromkeys((lag[0], lag[-1]))),
        slack=rules.slack[:1],
        num_split=tuple(dict.fromkeys((rules.num_split[0], rules.num_split[-1]))),
        longest=rules.longest[:2],
        levels=(_LEVELS, 0),
    )


def glance(rules: Rules) -> Rules:
    """The first timings that the rules leave open, in two numbers of blocks: to tell hopeless layouts from others."""
    return replace(first_look(rules), ahead=rules.ahead[:1], lag=rules.lag[:1], num_relevels=0)
