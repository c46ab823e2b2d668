"""Encoders in parts on the language model's devices: plans, orders, sequence groups, recipes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spindle.cluster import cluster_named
from spindle.errors import DoesNotFitError, InputError, PlanError, ProgramError, WorkloadError
from spindle.plan import check, format_plan, parse_plan
from spindle.planners import (
    PLANNERS,
    Chain,
    Layout,
    PlanOptions,
    choose_colocation,
    compare_placements,
    make_plan,
    pipeline_bound,
)
from spindle.planners.colocate.choose import _closest
from spindle.planners.colocate.columns import (
    EVERYTHING,
    Seen,
    activation_budgets,
    assigned_parts,
    passes_of,
    replicas_of,
    template_of,
)
from spindle.planners.colocate.layouts import layouts_with
from spindle.planners.colocate.order import BACKWARD, FORWARD, WEIGHT, Passes, ordered
from spindle.planners.options import DEDICATED, FIRST, REPLICATED, SPREAD
from spindle.profile import Collective
from spindle.profile.operators import sequence_shares
from spindle.program import COMPUTE, Backward, Forward, copies_in, launches_collectives, lower, verify
from spindle.recipes import (
    MODELS,
    OMNI_DATA,
    OMNI_MODELS,
    BatchOptions,
    MultimodalModel,
    batch_profile,
    emulator,
    omni_sequences,
    parse_mix,
    parts_profile,
    slowest_replica,
    step_of,
)
from spindle.recipes.multimodal import language_chain, vit_chain
from spindle.report import comparison_figure, module_load_lines, module_loads, placement_lines, step_balance
from spindle.report.drawing import Box
from spindle.simulate import simulate
from spindle.workload import LANGUAGE, VISION, Microbatch, items_in_parts

SMALL = MultimodalModel(
    name="small",
    description="a ViT of 4 layers and a language model of 6",
    chains=(vit_chain(4, 256, 1024, 8, 512), language_chain(6, 512, 1024, 8, 1000)),
    tensor_degree=2,
    num_stages=2,
    cluster_name="h800x4",
)
SEMU = emulator(cluster_named("h800x8"))


def microbatches(*images):
    """Sequences of 1,024 tokens with images of these patches."""
    return [
        Microbatch(instances=(*(((VISION, tuple(lengths)),) if lengths else ()), (LANGUAGE, (1024,))))
        for lengths in images
    ]


def profiled(batch, cluster="h800x4", part_tokens=1, memory_gib=None):
    machines = cluster_named(cluster)
    if memory_gib is not None:
        islands = tuple(
            replace(island, kind=replace(island.kind, memory_bytes=int(memory_gib * 2**30)))
            for island in machines.islands
        )
        machines = replace(machines, islands=islands)
    return parts_profile(SMALL, batch, part_tokens, machines, SEMU)


def planned(profile, layout, planner="colocate", evaluations=None):
    """A finished plan, checked and verified again."""
    plan = make_plan(profile, planner, PlanOptions(layouts=(layout,), evaluations=evaluations))
    check(plan, profile)
    program = lower(plan, profile)
    verify(program, profile)
    timeline = simulate(program, profile)
    assert timeline.makespan_s == pytest.approx(plan.makespan_s)
    assert plan.makespan_s >= plan.bound_s * (1 - 1e-9)
    assert timeline.peak_bytes().max() <= profile.cluster.kind.memory_bytes
    return plan, program


images = st.lists(st.lists(st.integers(16, 6000), max_size=5), min_size=1, max_size=5)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(images, st.sampled_from([1, 2000]), st.sampled_from(["h800x4", "h800x8"]), st.data())
def test_random_layouts_and_items_have_plans_without_deadlock(lengths, part_tokens, cluster, data):
    profile = profiled(microbatches(*lengths), cluster, part_tokens)
    layouts = layouts_with(profile, 2, (REPLICATED, FIRST, DEDICATED))
    if not any(lengths):
        assert layouts == ()
        assert make_plan(profile, "colocate", PlanOptions(evaluations=3, pipeline_ranks=2)).planner == "colocate"
        return
    layout, evaluations = data.draw(st.sampled_from(layouts)), data.draw(st.sampled_from([None, 20]))
    plan, _ = planned(profile, layout, evaluations=evaluations)
    # Every item is encoded once, whatever the parts.
    for number, of_microbatch in enumerate(lengths):
        ops = [op for op in profile.graph.metaops if op.microbatch == number and op.module == VISION]
        items = [item for op in ops if op.first_layer == 0 for item in op.items]
        assert sorted(items) == list(range(len(of_microbatch)))
    again = make_plan(profile, "colocate", PlanOptions(layouts=(layout,), evaluations=evaluations))
    assert again == plan
    unsearched = make_plan(profile, "colocate", PlanOptions(layouts=(layout,)))
    assert plan.makespan_s <= unsearched.makespan_s


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(images, st.floats(0.15, 1.0))
def test_at_any_memory_there_is_a_plan_that_fits_or_a_refusal(lengths, memory_gib):
    profile = profiled(microbatches(*lengths, [64]), memory_gib=memory_gib)
    layout = layouts_with(profile, 2, (REPLICATED,))[0]
    with suppress(DoesNotFitError):
        planned(profile, layout)
        planned(profile, layout, evaluations=20)


def test_a_search_on_request_shortens_steps_of_colocate_alone():
    generator = np.random.default_rng(3)
    profile = profiled(microbatches(*generator.integers(100, 5000, (12, 3)).tolist()))
    layout = layouts_with(profile, 2, (REPLICATED,))[0]
    for planner in ("colocate", "upfront"):
        unsearched, _ = planned(profile, layout, planner)
        searched, _ = planned(profile, layout, planner, evaluations=200)
        assert (searched.makespan_s < unsearched.makespan_s) == (planner == "colocate")
    assert searched == unsearched  # a baseline is what its rules say


@pytest.mark.parametrize("planner", ["upfront", "stage-0", "dedicated", "colocate"])
def test_every_system_has_a_plan_that_says_where_encoders_stand(planner):
    step_profiles = [profiled(microbatches([500, 900], [], [3000], [64] * 5), part_tokens=size) for size in (None, 1)]
    whole = batch_profile(SMALL, microbatches([500, 900], [], [3000], [64] * 5), None, SMALL.cluster, SEMU)
    profile, layout = choose_colocation(planner, step_profiles, [whole], 2)
    plan, _ = planned(profile, layout, planner)
    assert plan.planner == planner
    placements = {"upfront": "replicated on all ranks", "stage-0": "on the first rank", "dedicated": "of its own"}
    assert placements.get(planner, "") in plan.settings
    on = {device for slot in plan.slots if "/vision" in slot.op for device in slot.devices}
    if planner in ("stage-0", "dedicated"):
        assert on <= {0, 1}
        others = {device for slot in plan.slots if "/language" in slot.op for device in slot.devices}
        assert others == ({2, 3} if planner == "dedicated" else {0, 1, 2, 3})


def test_a_figure_has_parts_inside_the_rows_of_their_rank():
    profile = profiled(microbatches([500, 900], [300] * 6, [3000]))
    layout = next(each for each in layouts_with(profile, 2, (REPLICATED,)) if each.chains[0].tensor_degree == 1)
    plan, _ = planned(profile, layout)
    boxes = [each for each in comparison_figure([(plan, profile)]).shapes if isinstance(each, Box) and each.title]
    height = {name: {each.height for each in boxes if f"/{name}" in each.title} for name in ("vision", "language")}
    (of_stages,), of_parts = height["language"], height["vision"]
    assert min(of_parts) == of_stages / 2  # one of the two devices of a rank
    assert len({each.y for each in boxes}) <= 4
    for number, one in enumerate(boxes):
        for other in boxes[:number]:
            width = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            rows = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert min(width, rows) < 0.01, (one.title, other.title)


def test_a_layout_that_does_not_fit_the_first_batch_is_not_chosen_because_it_fits_the_others():
    inf = np.inf
    lengths = np.array([[inf, 1.0, 1.1], [1.0, inf, inf], [1.0, inf, inf]])  # by batch and layout
    assert _closest(lengths, np.ones(3), 1.2) == [1, 2]
    assert _closest(lengths[[1, 2]], np.ones(2), 1.2) == [0]
    assert _closest(np.array([[inf, inf], [inf, 1.0]]), np.ones(2), 1.2) == [1]


def test_a_layout_for_several_batches_has_the_shortest_worst_step():
    batches = microbatches([500], [], [700], [], [], [64]), microbatches(*[[16000]] * 6)

    def steps_at(memory_gib, with_others):
        """The layout, and the steps of both batches with it."""
        light, heavy = (
            [profiled(batch, memory_gib=memory_gib, part_tokens=size) for size in (None, 1)] for batch in batches
        )
        _, layout = choose_colocation("colocate", light, [], 2, other_batches=[heavy] if with_others else ())
        steps = []
        for _, profile in (light, heavy):
            with suppress(DoesNotFitError):
                steps.append(make_plan(profile, "colocate", PlanOptions(layouts=(layout,))).makespan_s)
        return layout, steps

    (_, (light_s, heavy_s)), (_, (other_light_s, other_heavy_s)) = (steps_at(0.3, each) for each in (False, True))
    assert heavy_s > 1.03 * other_heavy_s
    assert light_s < other_light_s < 1.02 * light_s
    # A batch for which no layout has memory decides nothing, though encoders alone on a rank look as if they had.
    (layout, alone), (_, (with_other,)) = steps_at(0.2, True), steps_at(0.2, False)
    assert layout.chains[0].placement == REPLICATED
    assert alone == [pytest.approx(with_other, rel=0.02)]


def test_a_schedule_that_loses_nothing_is_taken():
    """On one rank there is no bubble, so no layout has less to lose."""
    in_parts = [profiled(microbatches(*[[500]] * 4), "h800x2", part_tokens=size) for size in (None, 1)]
    profile, layout = choose_colocation("colocate", in_parts, [], 1)
    assert profile is in_parts[1]
    assert layout.chains[0].placement == REPLICATED


def test_one_rank_has_none_for_encoders_alone():
    in_parts = [profiled(microbatches([500], [500]), "h800x2", part_tokens=size) for size in (None, 1)]
    with pytest.raises(PlanError, match=r"'dedicated': encoders need a rank .*a pipeline of one rank has none"):
        choose_colocation("dedicated", in_parts, [], 1)


def test_upfront_encodes_everything_before_the_language_model_starts():
    profile = profiled(microbatches([500, 900], [700], [3000]))
    layout = layouts_with(profile, 2, (REPLICATED,))[0]
    plan, _ = planned(profile, layout, "upfront")
    first_language = {}
    for place, pass_ in enumerate(plan.passes):
        slot = plan.slots[pass_.slot]
        for device in slot.devices:
            if "/language" in slot.op:
                first_language.setdefault(device, place)
            elif pass_.kind == "forward":
                assert device not in first_language


def test_text_alone_has_no_parts_and_fewer_items_than_devices_leave_some_without():
    profile = profiled(microbatches([], [800], []), "h800x8")
    layout = next(layout for layout in layouts_with(profile, 2, (REPLICATED,)) if layout.chains[0].tensor_degree == 1)
    plan, _ = planned(profile, layout)
    assert {slot.op.split("/")[0] for slot in plan.slots if "/vision" in slot.op} == {"m01"}
    assert {device for slot in plan.slots if "/vision" in slot.op for device in slot.devices} < set(range(8))


def test_a_long_item_goes_to_a_sequence_group_and_links_carry_slices():
    profile = profiled(microbatches([16000], [64], [64], [64]))
    layout = next(layout for layout in layouts_with(profile, 2, (REPLICATED,)) if layout.chains[0].tensor_degree == 1)
    plan, program = planned(profile, layout)
    shared = [slot for slot in plan.slots if slot.sequence_degree > 1]
    assert shared
    assert all("m00/vision" in slot.op for slot in shared)
    for link in program.links:
        producer, consumer = program.slots[link.producer], program.slots[link.consumer]
        if producer.sequence_degree > 1 and consumer.sequence_degree == 1:
            cost = profile.graph.metaops[producer.op].cost
            arrived = {}
            flows = link.forward
            rows = zip(flows.destination.tolist(), (flows.last - flows.first).tolist(), strict=True)
            for rank, count in rows:
                arrived[rank] = arrived.get(rank, 0) + count * link.bytes_per_row
            # Every member of the language model's group has all tokens: its own slices and those of the others.
            own = cost.output_bytes / producer.sequence_degree
            for rank in consumer.ranks.tolist():
                held = own if rank in producer.ranks else 0
                assert arrived.get(rank, 0) + held == pytest.approx(cost.output_bytes)
    assert parse_plan(format_plan(plan), profile).slots == plan.slots


def test_members_of_a_sequence_group_run_its_passes_in_one_order():
    """Attention exchanges tokens inside them, so a member that runs two items the other way round would hang all."""
    profile = profiled(microbatches([30000], [16000], [64]))
    layout = next(layout for layout in layouts_with(profile, 2, (REPLICATED,)) if layout.chains[0].tensor_degree == 1)
    plan, program = planned(profile, layout)
    slots_of = {}  # by part that is shared
    for number, slot in enumerate(plan.slots):
        if slot.sequence_degree > 1:
            slots_of.setdefault(slot.op.partition("[")[0], []).append(number)
    pairs = combinations(slots_of.values(), 2)
    devices = [set(slot.devices) for slot in plan.slots]
    shared, rank = next(
        (pair, *both) for pair in pairs if (both := sorted(devices[pair[0][0]] & devices[pair[1][0]])[:1])
    )
    assert all(launches_collectives(program, Forward(slot=slot)) for numbers in shared for slot in numbers)
    lane = program.lanes[COMPUTE]
    order = lane.of_rank(rank).tolist()
    first, second = (
        [order.index(program.instructions.index(Forward(slot=slot))) for slot in numbers] for numbers in shared
    )
    places = sorted((*first, *second))
    swapped = [order[place] for place in sorted(second) + sorted(first)]
    changed = lane.instructions.copy()
    changed[lane.starts[rank] + np.array(places)] = swapped
    lanes = list(program.lanes)
    lanes[COMPUTE] = replace(lane, instructions=changed)
    with pytest.raises(ProgramError, match="deadlock: "):
        verify(replace(program, lanes=tuple(lanes)), profile)


def test_sequence_groups_lie_inside_an_island_and_are_whole():
    profile = profiled(microbatches([16000], [64]), "h800x16")
    layout = next(layout for layout in layouts_with(profile, 2, (REPLICATED,)) if layout.chains[0].tensor_degree == 1)
    plan = make_plan(profile, "colocate", PlanOptions(layouts=(layout,)))
    slot = next(slot for slot in plan.slots if slot.sequence_degree > 1)

    def changed(**fields):
        return replace(plan, slots=tuple(replace(each, **fields) if each is slot else each for each in plan.slots))

    with pytest.raises(PlanError, match=r"sequence group \[7, 8.* spans two islands"):
        check(changed(devices=(7, 8, *range(9, 7 + len(slot.devices)))), profile)
    with pytest.raises(PlanError, match=r"expected whole sequence groups of 3"):
        check(changed(sequence_degree=3), profile)
    with pytest.raises(PlanError, match=r"not allowed on 3 devices, only on 1, 2, 4, 8: .* divide its heads"):
        check(changed(sequence_degree=3, devices=(0, 1, 2)), profile)


def test_no_assignment_of_parts_beats_the_bound():
    """Every assignment of three parts to four devices, with every look-ahead."""
    profile = profiled(microbatches([900, 300], [1500]))
    layout = next(layout for layout in layouts_with(profile, 2, (REPLICATED,)) if layout.chains[0].tensor_degree == 1)
    (replica,) = replicas_of(profile, layout)
    budgets = activation_budgets(profile, layout, replica)
    template = template_of(profile, layout, replica)
    bound_ns = 1e9 * pipeline_bound(profile, 2).bound_s
    lengths = {}
    for devices in product(range(4), repeat=3):
        where = [(device, 1) for device in devices]
        lengths[devices] = min(
            ordered(passes_of(layout, template, where, ahead, 0), budgets, (8,), 8).makespan_ns
            for ahead in (1, EVERYTHING)
        )
    assert min(lengths.values()) >= bound_ns * 0.999  # without the optimizer, which the bound counts, too
    chosen = tuple(device for device, _ in assigned_parts(profile, layout, replica, groups=False))
    assert lengths[chosen] <= 1.25 * min(lengths.values())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_passes_are_ordered_as_they_wait_and_hold_no_more_than_they_may(data):
    num_devices, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    first = [data.draw(st.integers(0, num_devices - 1)) for _ in range(count)]
    width = [data.draw(st.integers(1, num_devices - at)) for at in first]
    needs = [(2 * entity + 1, 2 * entity, 0) for entity in range(count)]
    for entity in range(1, count):
        for before in data.draw(st.sets(st.integers(0, entity - 1), max_size=2)):
            needs += [(2 * entity, 2 * before, 3), (2 * before + 1, 2 * entity + 1, 3)]
    column = st.lists(st.integers(1, 50), min_size=count, max_size=count)
    forward, backward, memory = (np.array(data.draw(column))[:, None] for _ in range(3))
    caps = np.full(num_devices, data.draw(st.integers(1, 400)))
    passes = Passes(
        first=np.array(first),
        count=np.array(width),
        is_part=np.ones(count, dtype=bool),
        needs=np.array(needs),
        key=np.array(data.draw(st.lists(st.integers(0, 99), min_size=2 * count, max_size=2 * count))),
        place_held=np.zeros(2 * count, dtype=np.int64),
        foresees=data.draw(st.booleans()),
        split=np.zeros(0, dtype=np.int64),
        weight_ns=np.zeros(0, dtype=np.int64),
        choice_forward_ns=forward,
        choice_backward_ns=backward,
        choice_memory=memory,
        choice_copied=np.zeros_like(memory),
        choice_recomputed=np.zeros_like(memory),
        choice_count=np.ones(count, dtype=np.int64),
        num_devices=num_devices,
    )
    order = ordered(passes, caps, (0,), 8)
    if order is None:
        held = np.zeros(num_devices)
        for entity in range(count):
            held[first[entity] : first[entity] + width[entity]] += memory[entity]
        assert (held > caps).any()
        return
    assert sorted(order.passes.tolist()) == list(range(2 * count))
    assert (order.peak <= caps).all()
    time = np.stack([forward[:, 0], backward[:, 0]], axis=1).ravel()
    for later, earlier, gap in needs:
        assert order.start_ns[later] >= order.start_ns[earlier] + time[earlier] + gap
    for one, other in product(range(2 * count), repeat=2):
        ends = set(range(first[one // 2], first[one // 2] + width[one // 2]))
        if one < other and ends & set(range(first[other // 2], first[other // 2] + width[other // 2])):
            begun = sorted([(order.start_ns[one], one), (order.start_ns[other], other)])
            assert begun[0][0] + time[begun[0][1]] <= begun[1][0]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_offloaded_activations_count_while_they_are_copied(data):
    """Against the places that the executor copies at."""
    count = data.draw(st.integers(1, 9))
    live, sequence = [], []
    while len(sequence) < 2 * count:  # any order of forwards, and of backwards behind them
        begun = (len(sequence) + len(live)) // 2
        if begun < count and (not live or data.draw(st.booleans())):
            live.append(begun)
            sequence.append(2 * begun)
        else:
            sequence.append(2 * live.pop(data.draw(st.integers(0, len(live) - 1))) + 1)
    table = st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=count, max_size=count)
    memory, copied = (np.array(data.draw(table)) for _ in range(2))
    memory = np.sort(memory, axis=1)
    key = np.empty(2 * count, dtype=np.int64)
    key[sequence] = np.arange(2 * count)
    passes = Passes(
        first=np.zeros(count, dtype=np.int64),
        count=np.ones(count, dtype=np.int64),
        is_part=np.zeros(count, dtype=bool),
        needs=np.array([(later, earlier, 0) for earlier, later in pairwise(sequence)]),
        key=key,
        place_held=key,
        foresees=data.draw(st.booleans()),
        split=np.zeros(0, dtype=np.int64),
        weight_ns=np.zeros(0, dtype=np.int64),
        choice_forward_ns=np.full((count, 3), 5),
        choice_backward_ns=np.tile([9, 8, 7], (count, 1)),
        choice_memory=memory,
        choice_copied=copied,
        choice_recomputed=np.zeros_like(copied),
        choice_count=np.full(count, 3),
        num_devices=1,
    )

    def held(choice):
        kept, away = memory[np.arange(count), choice], copied[np.arange(count), choice]
        instructions = [
            Backward(slot=number // 2, first=0, last=1) if number % 2 else Forward(slot=number // 2)
            for number in sequence
        ]
        at_host = {entry.slot: range(entry.released, entry.fetched) for entry in copies_in(instructions, away.tolist())}
        return max(
            sum(
                kept[entity] + away[entity] * (place not in at_host.get(entity, ()))
                for entity in range(count)
                if sequence.index(2 * entity) <= place <= sequence.index(2 * entity + 1)
            )
            for place in range(2 * count)
        )

    cap = data.draw(st.integers(0, 60))
    order = ordered(passes, np.array([cap]), (0,), 8)
    if order is None:
        assert held(np.zeros(count, dtype=np.int64)) > cap
        return
    assert order.passes.tolist() == sequence
    assert order.peak.tolist() == [held(order.choice)]
    assert order.peak[0] <= cap


def most_stages_held(profile, layout, replica, template):
    """By pipeline rank: the most stages at once between their forwards and their last passes; and the stages that are
    cut."""
    segments = replica.batch.segments
    devices = assigned_parts(profile, layout, replica, groups=False)
    passes = passes_of(layout, template, devices, 1, 2)
    order = ordered(passes, activation_budgets(profile, layout, replica), (8,), 8)
    held, most = np.zeros(segments.num_ranks, dtype=int), np.zeros(segments.num_ranks, dtype=int)
    for stage, kind in zip(passes.entity[order.passes].tolist(), passes.kind[order.passes].tolist(), strict=True):
        if stage < segments.num_pairs * segments.num_ranks:
            is_last = kind == WEIGHT or (kind == BACKWARD and stage not in order.split)
            held[stage % segments.num_ranks] += (kind == FORWARD) - is_last
            most = np.maximum(most, held)
    assert not held.any()
    return most, order.split


@pytest.mark.parametrize("num_split", [0, 2, EVERYTHING])
@pytest.mark.parametrize("slack", [0, 2])
def test_ranks_keep_few_microbatches_and_cut_the_last_backwards(slack, num_split):
    profile = profiled(microbatches([900], [300] * 3, [], [4000], [64], [500, 500]), part_tokens=2000)
    for layout in layouts_with(profile, 2, (REPLICATED,)):
        (replica,) = replicas_of(profile, layout)
        strict, _ = most_stages_held(profile, layout, replica, template_of(profile, layout, replica))
        template = template_of(profile, layout, replica, slack, num_split)
        relaxed, cut = most_stages_held(profile, layout, replica, template)
        assert (relaxed <= strict + slack).all()
        assert len(cut) == min(6, num_split) * replica.batch.segments.num_pairs // 6 * 2


def test_plans_cut_backwards_of_the_language_model_alone():
    profile = profiled(microbatches(*[[900] * 4] * 6))
    layout = next(layout for layout in layouts_with(profile, 2, (REPLICATED,)) if layout.chains[0].tensor_degree == 1)
    plan, _ = planned(profile, layout)
    cut = {pass_.slot for pass_ in plan.passes if pass_.kind == "weight"}
    assert cut
    assert all("/language" in plan.slots[slot].op for slot in cut)


def test_the_first_and_last_microbatches_have_least_for_encoders():
    profile = profiled(microbatches([900], [300] * 3, [], [4000], [64], [500, 500]))
    layout = layouts_with(profile, 2, (REPLICATED,))[0]
    (natural,), (replica,) = (replicas_of(profile, layout, light_ends=way) for way in (False, True))
    first_op = {part.pieces[0].op: part.microbatch for part in natural.parts}
    number = {first_op[part.pieces[0].op]: part.microbatch for part in replica.parts}
    assert number == {0: 1, 1: 2, 3: 3, 4: 5, 5: 4}  # the third, without images, is the first
    assert (replica.batch.segments.microbatch[:2] != natural.batch.segments.microbatch[:2]).any()


def test_parts_go_where_less_is_recomputed():
    profile = profiled(microbatches(*[[900] * 4] * 6))
    layout = next(layout for layout in layouts_with(profile, 2, (REPLICATED,)) if layout.chains[0].tensor_degree == 1)
    (replica,) = replicas_of(profile, layout)
    segments = replica.batch.segments
    stage_ns = segments.forward_ns + segments.backward_ns
    fastest, leanest = replica.parts[0].stages[1].ends
    part_ns = leanest.forward_ns + leanest.backward_ns
    assert part_ns > fastest.forward_ns + fastest.backward_ns

    def parts_on_first_rank(extra_ns, block):
        slower = stage_ns + np.array([extra_ns // segments.num_pairs, 0])
        devices = assigned_parts(profile, layout, replica, block=block, seen=Seen(stage_ns=slower, recomputed=1024))
        return sum(device < 2 for device, _ in devices)

    for block in (EVERYTHING, 3, 1):
        # Four parts' time on each of two devices is eight parts: half of them go to the other rank.
        assert parts_on_first_rank(4 * part_ns, block) == parts_on_first_rank(0, block) - 4


def test_a_report_says_how_level_modules_are_and_what_other_placements_take():
    batch = microbatches([500, 900, 700, 800], [], [3000], [16000])
    profile = profiled(batch)
    layout = next(layout for layout in layouts_with(profile, 2, (REPLICATED,)) if layout.chains[0].tensor_degree == 1)
    plan, _ = planned(profile, layout)
    program = lower(plan, profile)
    balance = step_balance(simulate(program, profile), program, profile.graph)
    assert 1 <= balance.together <= max(balance.parts, balance.others)
    whole = batch_profile(SMALL, batch, None, cluster_named("h800x4"), SEMU)
    spread = make_plan(whole, "static", PlanOptions(pipeline_ranks=2))
    assert step_balance(simulate(lower(spread, whole), whole), lower(spread, whole), whole.graph) is None
    loads = {load.module: load for load in module_loads(plan, profile)}
    assert loads["vision"].num_parts == 6
    assert loads["vision"].num_shared >= 1
    assert 1 <= loads["vision"].imbalance < 2
    assert loads["language"].num_parts == 0
    lines = module_load_lines(list(loads.values()))
    assert any(line.startswith("vision: ") and "in 6 parts" in line for line in lines)
    compared = compare_placements([profiled(batch, part_tokens=None), profile], 2)
    texts = {text for text, _, _ in compared}
    assert "vision replicated on all ranks at tensor degree 1" in texts
    assert "vision on ranks of its own (1) at tensor degree 2" in texts
    first = placement_lines(compared, "")[0]
    assert str(min((time_s, text) for text, time_s, _ in compared)[1]) in first
    assert placement_lines([("vision elsewhere", None, "too large")], "") == [
        "does not fit: vision elsewhere (too large)."
    ]


def test_members_of_a_sequence_group_share_the_work_and_exchange_tokens_for_heads():
    block = SMALL.chains[0].shapes(((4096, 1),))[1][0]
    whole = block.operators(1)
    shared = sequence_shares(whole, 4)
    for part in ("forward", "input", "weight"):
        ours, theirs = (sum(operator.flops for operator in getattr(each, part)) for each in (shared, whole))
        assert 4 * ours == pytest.approx(theirs)
    exchanged = [
        operator for operator in shared.forward if isinstance(operator, Collective) and operator.num_members == 4
    ]
    # Queries, keys and values one way, the output the other: each member keeps a quarter of its quarter.
    assert [operator.kind for operator in exchanged] == ["all_to_all", "all_to_all"]
    tensor_bytes = 2 * 4096 * 256
    assert [operator.network_bytes for operator in exchanged] == [
        pytest.approx(count * tensor_bytes * 3 / 16) for count in (3, 1)
    ]
    assert SEMU.layer(block, 1, 4).forward_s > SEMU.layer(block, 1).forward_s / 4
    assert sequence_shares(whole, 1) is whole


def test_a_layout_says_what_it_cannot_have():
    chain = Chain(modules=("vision",), num_layers=(4,), bounds=(0, 4), placement=REPLICATED, tensor_degree=1)
    spread = Chain(modules=("language",), num_layers=(4,), bounds=(0, 2, 4))
    with pytest.raises(PlanError, match=r"spread, replicated, first, dedicated, got 'everywhere'"):
        replace(chain, placement="everywhere")
    with pytest.raises(PlanError, match=r"tensor degree 3, which does not divide the 4 devices"):
        Layout(num_ranks=2, num_replicas=1, tensor_degree=4, chains=(replace(chain, tensor_degree=3), spread))
    with pytest.raises(PlanError, match=r"dedicated chains need ranks of their own"):
        Layout(num_ranks=2, num_replicas=1, tensor_degree=4, chains=(replace(chain, placement=DEDICATED), spread))
    assert spread.placement == SPREAD


def test_items_share_parts_of_about_so_many_tokens():
    assert items_in_parts([100, 5000, 300, 200], 600) == ((0, 2, 3), (1,))
    assert items_in_parts([], 600) == ()
    assert items_in_parts([10, 20], 1) == ((0,), (1,))
    with pytest.raises(WorkloadError, match="at least one token"):
        items_in_parts([1], 0)


@pytest.mark.parametrize("name", OMNI_DATA)
def test_tokens_are_mixed_as_asked_and_replicas_keep_the_order_of_their_sequences(name):
    model, data = OMNI_MODELS[name], OMNI_DATA[name]
    sequences = omni_sequences(model, 64, data.sequence_tokens, (7, 3), np.random.default_rng(0))
    encoded = sum(-(-patches // 16) for sequence in sequences for patches in sequence.tokens_of(VISION))
    encoded += 375 * sum(len(sequence.tokens_of("audio")) for sequence in sequences)
    assert encoded / (64 * data.sequence_tokens) == pytest.approx(0.7, abs=0.07)
    assert bool(sequences[0].tokens_of("audio")) == (name == "omni-b-audio")
    slowest = slowest_replica(model, sequences, 4, balanced=True)
    assert [sequence for sequence in sequences if sequence in slowest] == list(slowest)
    work = [sum(len(each.tokens_of(VISION)) for each in slowest_replica(model, sequences, 4, way)) for way in (0, 1)]
    assert min(work) > 0


@pytest.mark.parametrize(
    ("name", "weights", "devices"),
    [("omni-a", 13.4e9, 64), ("omni-b", 73e9, 128), ("omni-c", 81e9, 256), ("omni-d", 188e9, 512)],
)
def test_sizes_of_the_recipes(name, weights, devices):
    model, data = OMNI_MODELS[name], OMNI_DATA[name]
    assert model.num_parameters == pytest.approx(weights, rel=0.04)
    assert model.tensor_degree * model.num_stages * data.num_replicas == devices
    assert name in MODELS


@pytest.mark.parametrize("text", ["7", "7:3:1", "a:b", "0:0", "-1:3", ""])
def test_a_mix_that_is_none_is_refused(text):
    with pytest.raises(InputError, match="a mix"):
        parse_mix(text)


def test_a_mix_is_for_omni_recipes_alone():
    with pytest.raises(InputError, match=r"a mix is for omni-a.*; vlm-s has data of its own"):
        step_of(MODELS["vlm-s"], MODELS["vlm-s"].cluster, BatchOptions(mix="7:3"))


def test_colocated_planners_are_in_the_registry():
    assert [name for name, planner in PLANNERS.items() if planner.takes_parts] == [
        "colocate",
        "upfront",
        "stage-0",
        "dedicated",
    ]
