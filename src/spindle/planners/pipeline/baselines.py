"""What else pipelines do, each at its best: the same batch in the orders of others, under the same memory.

- `1f1b` and `vpp`: one chain through all modules, cut by parameters (Megatron-LM), passing ranks once or more often.
- `static`: one chain cut by time (as nnScaler cuts it), the best that holds for every batch.
- `zb-h1`: the same cut, with the gradients of weights in the bubbles, where stages keep all they need for them; what is
  recomputed for the gradients of inputs would have to stay until then, so that nothing is saved: there it is 1F1B.
- `optimus`: the language model in its own order, encoders where ranks would be idle; coarse, without sub-microbatches.
  Where its encoders run too far ahead for the memory there is, they are let in by the gate of planner `pipeline`.

How often chains pass the ranks is tried. What stages keep is the same for every microbatch, as these systems have it:
the most that fits, on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from spindle.errors import DoesNotFitError, InputError
from spindle.plan import Plan
from spindle.planners.pipeline.chains import Layout, Loads, layer_loads, layout_of, mixed_chain, separate_chains
from spindle.planners.pipeline.gates import SAFE, least_caps
from spindle.planners.pipeline.interleave import Schedule, interleave, natural_priorities
from spindle.planners.pipeline.orders import encoders_in_bubbles, interleaved, one_forward_one_backward, zero_bubble
from spindle.planners.pipeline.planner import fitting_plan
from spindle.planners.pipeline.retime import retime
from spindle.planners.pipeline.segments import Column, Segments
from spindle.planners.pipeline.stages import Batch, batches_of
from spindle.profile import Profile

BASELINES = ("1f1b", "vpp", "static", "zb-h1", "optimus")
LEVELS = 8  # of frugality, from what keeps least to what keeps all
_TURNS = (2, 3, 4)  # how often chains of vpp pass the ranks

Order = Callable[[Segments, Column], Schedule]  # of segments, in the room there is on each rank
OrderFor = Callable[[Profile, Batch], Order]
TaskVariants = list[tuple[Layout, OrderFor]]


def plan_baseline(profile: Profile, planner: str, num_ranks: int, ways: TaskVariants | None = None) -> Plan:
    """The finished plan of a baseline, the best over its own choices. The profile has whole microbatches. Layouts are
    those of `ways`, chosen on another batch, or the best for this one."""
    plans: list[Plan] = []
    refusals: list[DoesNotFitError] = []
    for layout, order_for in ways if ways is not None else baseline_ways(profile, planner, num_ranks):
        try:
            plans.append(plan_in_order(profile, layout, planner, order_for))
        except DoesNotFitError as error:
            refusals.append(error)
    if not plans:
        raise min(refusals, key=lambda one: one.needed_bytes)
    return min(plans, key=lambda plan: plan.makespan_s)


def plan_in_order(profile: Profile, layout: Layout, planner: str, order_for: OrderFor) -> Plan:
    """The finished plan of a layout and an order, in which all microbatches are kept alike."""
    batches = batches_of(profile, layout)

    def schedules(rooms: Sequence[Column], is_first: bool) -> list[Schedule]:
        return [
            kept_alike(batch.segments, order_for(profile, batch), room)
            for batch, room in zip(batches, rooms, strict=True)
        ]

    return fitting_plan(profile, layout, planner, batches, schedules)


def baseline_ways(profile: Profile, planner: str, num_ranks: int) -> TaskVariants:
    """Layouts with the order of passes on each, chosen on a batch that stands for all."""
    times, elements = layer_loads(profile), layer_loads(profile, "parameters")

    def mixed(loads: Mapping[str, Loads], turns: int, order: Callable[[Segments], Schedule]) -> tuple[Layout, OrderFor]:
        layout = layout_of(profile, num_ranks, (mixed_chain(loads, turns * num_ranks),))
        return layout, lambda profile, batch: lambda segments, room: order(segments)

    if planner == "1f1b":
        return [mixed(elements, 1, one_forward_one_backward)]
    if planner == "vpp":
        most = sum(map(len, times.values())) // num_ranks
        return [mixed(elements, turns, interleaved) for turns in _TURNS if turns <= most]
    if planner == "static":
        return [mixed(times, 1, one_forward_one_backward), mixed(times, 2, interleaved)]
    if planner == "zb-h1":
        return [mixed(times, 1, _zero_bubble_where_kept)]
    if planner != "optimus":
        raise InputError(f"no baseline is called {planner!r}; there are {', '.join(BASELINES)}")
    backbone = list(times)[-1]
    if not _is_fed_by_encoders(profile, backbone):
        raise DoesNotFitError("optimus knows encoders that feed one language model, and this model is none", 0)

    def in_bubbles(profile: Profile, batch: Batch) -> Order:
        is_backbone = np.array(
            [
                any(profile.graph.metaops[piece.op].module == backbone for some in of_pair for piece in some)
                for of_pair in batch.pieces
            ]
        )
        priority = natural_priorities(batch.segments)
        priority[np.unique(batch.segments.group[is_backbone])] += priority.max()

        def order(segments: Segments, room: Column) -> Schedule:
            free = encoders_in_bubbles(segments, is_backbone, room)
            if (free.peak <= room).all() or (least_caps(segments, SAFE) > room).any():
                return free
            gated = interleave(segments, priority, room)
            assert gated is not None
            return gated

        return order

    rounds = [{**dict.fromkeys(times, 1), backbone: turns} for turns in (1, 2)]
    return [(layout_of(profile, num_ranks, separate_chains(times, one, num_ranks)), in_bubbles) for one in rounds]


def _zero_bubble_where_kept(segments: Segments) -> Schedule:
    if (segments.choice_count > 1).any():
        return one_forward_one_backward(segments)
    return zero_bubble(segments)


def _is_fed_by_encoders(profile: Profile, backbone: str) -> bool:
    """Whether every microbatch has its one call of the backbone, whatever else it has."""
    tasks = [op.task for op in profile.graph.metaops if op.module == backbone and op.first_layer == 0]
    return sorted(tasks) == sorted(profile.graph.tasks) and backbone == "language"


def kept_alike(segments: Segments, order: Order, room: Column) -> Schedule:
    """The order of passes with stages that keep what is best of what fits, every microbatch alike; each rank for
    itself."""
    found: list[Schedule] = []
    least: Schedule | None = None
    for level in range(0, LEVELS + 1, 2):
        changed, choice = from_level(segments, level)
        schedule = order(changed, room)
        least = least or schedule
        if (schedule.peak > room).any():
            continue
        found.append(retime(segments, schedule.pair, schedule.kind, choice))
        # The order stands; ranks with room to spare keep more.
        mixed = choice.copy()
        for more in range(level + 1, LEVELS + 1):
            _, kept = from_level(segments, more)
            fits = retime(segments, schedule.pair, schedule.kind, kept).peak <= room
            mixed[:, fits] = kept[:, fits]
        found.append(retime(segments, schedule.pair, schedule.kind, mixed))
    if not found:
        assert least is not None
        rank = int(np.argmax(least.peak - room))
        needed = int(least.peak[rank])
        raise DoesNotFitError(
            f"pipeline rank {rank} would keep {needed:,} bytes of activations, and has room for {int(room[rank]):,}, "
            "even if all is recomputed",
            needed,
        )
    return min(found, key=lambda one: one.makespan_ns)


def from_level(segments: Segments, level: int) -> tuple[Segments, Column]:
    """Segments whose stages begin with a choice of this level, and which one that is of all their choices."""
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
