"""Tuned baselines: the same batch in the orders of other systems, under the same memory.

Every baseline is tuned by simulation over the number of virtual stages (how often chains pass the ranks), over cuts by
parameters (as in Megatron-LM) and by time (as in nnScaler), over the order of microbatches and over recomputation. All
of these are timed as columns of numbers, which takes 10 to 80 ms each; the best two become plans. As in these systems,
stages keep the same activations for every microbatch: as many as fit on each rank.

If stages recompute anything, `zb-h1` is 1F1B: activations recomputed for input gradients would have to stay until the
weight gradients, so recomputation would save no memory. `optimus` is its coarse-grained variant, without
sub-microbatches; if its encoders run too far ahead for the available memory, the gate of planner `pipeline` holds them
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from spindle.errors import DoesNotFitError, PlanError
from spindle.plan import Plan
from spindle.planners.options import Layout, PlanOptions, Progress
from spindle.planners.pipeline.chains import layer_loads, layout_of, mixed_chain, pipeline_ranks_of, separate_chains
from spindle.planners.pipeline.gates import SAFE, least_caps
from spindle.planners.pipeline.interleave import Schedule, interleave, natural_priorities
from spindle.planners.pipeline.orders import encoders_in_bubbles, interleaved, one_forward_one_backward, zero_bubble
from spindle.planners.pipeline.planner import fitting_plan
from spindle.planners.pipeline.retime import retime
from spindle.planners.pipeline.segments import Column, Segments, table_of
from spindle.planners.pipeline.stages import Batch, batches_of
from spindle.profile import Profile

LEVELS = 8  # levels of memory choices: 0 keeps the least activations, LEVELS keeps all
_NUM_LAYOUTS = 4  # layouts that are kept, chosen on a representative batch
_NUM_PLANS, _NEARLY = 2, 1.01  # the number of settings that become plans, if within this factor of the best
_COARSE_LEVELS, _FINE_LEVELS = (0, LEVELS // 2, LEVELS), tuple(range(0, LEVELS + 1, 2))

NATURAL, FALLING, RISING = "natural", "falling", "rising"  # orders of microbatches: as they come, or by their work
_ORDER_TEXT = {
    NATURAL: "microbatches in natural order",
    FALLING: "microbatches sorted, longest first",
    RISING: "microbatches sorted, shortest first",
}

Order = Callable[[Segments, Column], Schedule]  # (segments, activation budget of each rank) → schedule
OrderFor = Callable[[Profile, Layout, Batch], Order]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A baseline: the layouts it may have on a number of pipeline ranks, its order of passes on a layout, and the
    orders of microbatches that it is tuned over."""

    description: str
    layouts: Callable[[Profile, int], list[Layout]]
    order: OrderFor
    microbatch_orders: tuple[str, ...] = (NATURAL, FALLING, RISING)


def plan_baseline(planner: str, profile: Profile, options: PlanOptions, progress: Progress | None = None) -> Plan:
    """Make the best plan of a baseline over its settings. The profile has whole microbatches."""
    baseline = BASELINES[planner]
    layouts = options.layouts or baseline_layouts(planner, profile, pipeline_ranks_of(profile, options))
    ranking = _ranking(baseline, profile, layouts, baseline.microbatch_orders)
    plans: list[Plan] = []
    refusals: list[DoesNotFitError] = []
    for makespan_ns, layout, microbatch_order in ranking:
        if plans and makespan_ns > _NEARLY * ranking[0][0]:
            break
        try:
            plan = plan_in_order(profile, layout, planner, baseline.order, microbatch_order, options.bound_s)
        except DoesNotFitError as error:
            refusals.append(error)
            continue
        plans.append(replace(plan, settings=f"{layout.text}; {_ORDER_TEXT[microbatch_order]}"))
        if len(plans) == _NUM_PLANS:
            break
    if not plans:
        raise min(refusals, key=lambda refusal: refusal.needed_bytes)
    return min(plans, key=lambda plan: plan.makespan_s)


def baseline_layouts(planner: str, profile: Profile, num_ranks: int) -> tuple[Layout, ...]:
    """The best layouts of a baseline, best first, tuned on a representative batch."""
    baseline = BASELINES[planner]
    layouts = {layout.chains: layout for layout in reversed(baseline.layouts(profile, num_ranks))}
    if not layouts:
        raise PlanError(f"{planner} gives every one of {num_ranks} pipeline ranks two chunks, which needs more layers")
    ranking = _ranking(baseline, profile, list(layouts.values()), baseline.microbatch_orders)
    return tuple({layout.chains: layout for _, layout, _ in ranking}.values())[:_NUM_LAYOUTS]


def _ranking(
    baseline: Baseline, profile: Profile, layouts: Sequence[Layout], microbatch_orders: Sequence[str]
) -> list[tuple[int, Layout, str]]:
    """Settings (layout, order of microbatches) that fit, with the length of their schedules, shortest first."""
    ranking: list[tuple[int, Layout, str]] = []
    refusals: list[DoesNotFitError] = []
    for layout in layouts:
        try:
            batches = batches_of(profile, layout)
        except DoesNotFitError as error:
            refusals.append(error)
            continue
        budgets = [batch.activation_budget for batch in batches]
        for microbatch_order in microbatch_orders:
            try:
                schedules = _schedules(profile, layout, baseline.order, batches, microbatch_order, _COARSE_LEVELS)(
                    budgets, True
                )
            except DoesNotFitError as error:
                refusals.append(error)
                continue
            ranking.append((max(schedule.makespan_ns for schedule in schedules), layout, microbatch_order))
    if not ranking:
        raise min(refusals, key=lambda refusal: refusal.needed_bytes)
    return sorted(ranking, key=lambda settings: settings[0])


def plan_in_order(
    profile: Profile,
    layout: Layout,
    planner: str,
    order_for: OrderFor,
    microbatch_order: str = NATURAL,
    bound_s: float | None = None,
) -> Plan:
    """The plan of a layout and an order of passes, with the same memory choices for all microbatches."""
    batches = batches_of(profile, layout)
    schedules = _schedules(profile, layout, order_for, batches, microbatch_order)
    return fitting_plan(profile, layout, planner, batches, schedules, bound_s)


def _schedules(
    profile: Profile,
    layout: Layout,
    order_for: OrderFor,
    batches: Sequence[Batch],
    microbatch_order: str,
    levels: Sequence[int] = _FINE_LEVELS,
) -> Callable[[Sequence[Column], bool], list[Schedule]]:
    """The function that schedules the replicas of a layout under given activation budgets, for `fitting_plan`."""
    ordered = [with_microbatches_in(batch, microbatch_order) for batch in batches]

    def schedules(activation_budgets: Sequence[Column], is_trial: bool) -> list[Schedule]:
        return [
            kept_alike(batch.segments, order_for(profile, layout, batch), activation_budget, levels)
            for batch, activation_budget in zip(ordered, activation_budgets, strict=True)
        ]

    return schedules


def with_microbatches_in(batch: Batch, microbatch_order: str) -> Batch:
    """The batch with its microbatches renumbered by work: the time of all passes, where other systems count FLOPs."""
    if microbatch_order == NATURAL:
        return batch
    segments = batch.segments
    work = np.zeros(segments.num_microbatches, dtype=np.int64)
    np.add.at(work, segments.microbatch, (segments.forward_ns + segments.backward_ns).sum(axis=1))
    ranking = np.argsort(work if microbatch_order == RISING else -work, kind="stable")
    number = np.empty_like(ranking)
    number[ranking] = np.arange(len(ranking))
    return replace(batch, segments=replace(segments, microbatch=number[segments.microbatch]))


def _mixed_layouts(profile: Profile, num_ranks: int, rounds: Sequence[int]) -> list[Layout]:
    """One chain through all modules, cut by time or by parameters, that passes the ranks `rounds` times."""
    layouts = []
    for cut_by in ("time", "parameters"):
        loads = layer_loads(profile, cut_by)
        most = max(1, sum(map(len, loads.values())) // num_ranks)
        layouts += [
            replace(layout_of(profile, num_ranks, (mixed_chain(loads, count * num_ranks),)), cut_by=cut_by)
            for count in rounds
            if count <= most
        ]
    return layouts


def _optimus_layouts(profile: Profile, num_ranks: int) -> list[Layout]:
    """Layouts with every module cut by itself; encoders and backbone pass the ranks up to four times."""
    backbone = _backbone_of(layer_loads(profile))
    _refuse_without_encoders(profile, backbone)
    layouts = []
    for cut_by in ("time", "parameters"):
        loads = layer_loads(profile, cut_by)
        for encoder_rounds, backbone_rounds in product(range(1, 5), range(1, 5)):
            rounds = {**dict.fromkeys(loads, encoder_rounds), backbone: backbone_rounds}
            layout = layout_of(profile, num_ranks, separate_chains(loads, rounds, num_ranks))
            layouts.append(replace(layout, cut_by=cut_by))
    return layouts


def _backbone_of(modules: Mapping[str, object]) -> str:
    """The last module of the flow, which all others feed."""
    return list(modules)[-1]


def _refuse_without_encoders(profile: Profile, backbone: str) -> None:
    """Raise a DoesNotFitError if Optimus does not apply: its backbone must be called once by every microbatch and hold
    most of the weights."""
    calls = [op.task for op in profile.graph.metaops if op.module == backbone and op.first_layer == 0]
    elements = {module: float(loads.sum()) for module, loads in layer_loads(profile, "parameters").items()}
    if sorted(calls) != sorted(profile.graph.tasks) or 2 * elements[backbone] < sum(elements.values()):
        raise DoesNotFitError(
            "optimus supports only encoders that feed one backbone with most of the weights, called once for each "
            f"microbatch; {backbone} is not such a module",
            0,
        )


def _in_turn(profile: Profile, layout: Layout, batch: Batch) -> Order:
    """1F1B, or interleaved 1F1B if chains pass the ranks more than once."""
    is_plain = all(layout.rounds_of(chain) == 1 for chain in layout.chains)
    return lambda segments, activation_budget: (one_forward_one_backward if is_plain else interleaved)(segments)


def _zero_bubble_where_kept(profile: Profile, layout: Layout, batch: Batch) -> Order:
    def order(segments: Segments, activation_budget: Column) -> Schedule:
        keeps_less = (segments.choice_count > 1).any()
        return one_forward_one_backward(segments) if keeps_less else zero_bubble(segments)

    return order


def _in_bubbles(profile: Profile, layout: Layout, batch: Batch) -> Order:
    """The backbone in its own order, and encoders where ranks would be idle."""
    backbone = layout.chains[-1].modules[-1]
    is_backbone = np.array(
        [
            any(profile.graph.metaops[piece.op].module == backbone for pieces in of_pair for piece in pieces)
            for of_pair in batch.pieces
        ]
    )
    priority = natural_priorities(batch.segments)
    priority[np.unique(batch.segments.group[is_backbone])] += priority.max()

    def order(segments: Segments, activation_budget: Column) -> Schedule:
        free = encoders_in_bubbles(segments, is_backbone, activation_budget)
        if (free.peak <= activation_budget).all() or (least_caps(segments, SAFE) > activation_budget).any():
            return free
        gated = interleave(segments, priority, activation_budget)
        assert gated is not None
        return gated

    return order


def _mixed(rounds: Iterable[int]) -> Callable[[Profile, int], list[Layout]]:
    return lambda profile, num_ranks: _mixed_layouts(profile, num_ranks, tuple(rounds))


BASELINES: Mapping[str, Baseline] = {
    "optimus": Baseline(
        description="the backbone in 1F1B order, encoders in its bubbles (Optimus)",
        layouts=_optimus_layouts,
        order=_in_bubbles,
    ),
    "zb-h1": Baseline(
        description="1F1B, weight gradients in the bubbles (ZB-H1)",
        layouts=_mixed(range(1, 2)),
        order=_zero_bubble_where_kept,
    ),
    "static": Baseline(
        description="1F1B or interleaved 1F1B, up to 4 virtual stages, microbatches as they come (nnScaler)",
        layouts=_mixed(range(1, 5)),
        order=_in_turn,
        microbatch_orders=(NATURAL,),
    ),
    "static-sorted": Baseline(
        description="static, with microbatches sorted by their work",
        layouts=_mixed(range(1, 5)),
        order=_in_turn,
        microbatch_orders=(FALLING, RISING),
    ),
    "vpp": Baseline(
        description="interleaved 1F1B, 2 to 12 virtual stages (Megatron-LM)",
        layouts=_mixed(range(2, 13)),
        order=_in_turn,
    ),
    "1f1b": Baseline(description="1F1B (Megatron-LM)", layouts=_mixed(range(1, 2)), order=_in_turn),
}


def kept_alike(
    segments: Segments, order: Order, activation_budget: Column, levels: Sequence[int] = _FINE_LEVELS
) -> Schedule:
    """The best schedule with the same memory choices for every microbatch: the fastest that fit, for each rank by
    itself. The order of passes is made with the memory choices of each of `levels`."""
    schedules: list[Schedule] = []
    least: Schedule | None = None
    table = table_of(segments)
    for level in levels:
        changed, choice = from_level(segments, level)
        schedule = order(changed, activation_budget)
        least = least or schedule
        if (schedule.peak > activation_budget).any():
            continue
        schedules.append(retime(segments, schedule.pair, schedule.kind, choice, table))
        # With the order fixed, ranks with memory to spare keep more.
        mixed = choice.copy()
        for more in range(level + 1, LEVELS + 1):
            _, richer = from_level(segments, more)
            fits = retime(segments, schedule.pair, schedule.kind, richer, table).peak <= activation_budget
            mixed[:, fits] = richer[:, fits]
        schedules.append(retime(segments, schedule.pair, schedule.kind, mixed, table))
    if not schedules:
        assert least is not None
        rank = int(np.argmax(least.peak - activation_budget))
        needed, budget = int(least.peak[rank]), int(activation_budget[rank])
        raise DoesNotFitError(
            f"pipeline rank {rank} would keep {needed:,} bytes of activations even if all layers are recomputed, and "
            f"has a budget of {budget:,}",
            needed,
        )
    return min(schedules, key=lambda schedule: schedule.makespan_ns)


def from_level(segments: Segments, level: int) -> tuple[Segments, Column]:
    """The segments without memory choices below a level, and the choice of that level for each stage."""
    count = segments.choice_count
    dropped = (count - 1) * level // LEVELS
    width = segments.choice_memory.shape[1]
    places = np.minimum(dropped[:, None] + np.arange(width), (count - 1)[:, None])
    forward, backward, memory = (
        np.take_along_axis(table, places, axis=1)
        for table in (segments.choice_forward_ns, segments.choice_backward_ns, segments.choice_memory)
    )
    changed = replace(
        segments,
        forward_ns=forward[segments.choice_of, 0],
        backward_ns=backward[segments.choice_of, 0],
        memory=memory[segments.choice_of, 0],
        choice_forward_ns=forward,
        choice_backward_ns=backward,
        choice_memory=memory,
        choice_count=count - dropped,
    )
    return changed, dropped[segments.choice_of]
