"""`verify` refuses every program that differs from a correct one in a way that matters.

Programs of random legal plans (tensor parallelism, rounds, recomputation, sharded optimizers) and of pipelines with
split backwards are changed in one place. Each kind of mutation must be refused, whatever the program and the place.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import small
from random_plans import random_plan_text
from spindle.errors import ProgramError
from spindle.plan import INPUT, WEIGHT, parse_plan
from spindle.planners import PlanOptions, make_plan
from spindle.profile import Profile
from spindle.program import (
    Backward,
    Exchange,
    Flows,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    Program,
    SyncGradients,
    format_program,
    lower,
    verify,
)
from spindle.program.instructions import COMPUTE, SYNC, TRANSFER
from spindle.program.program import lane_from_pairs
from test_pipeline_plans import batch

TASKS = ({"x": ["vision", "lm"], "y": ["audio", "lm"]}, {"x": ["vision"], "y": ["text", "vision"]}, {"x": ["lm", "lm"]})


@cache
def random_program(seed: int) -> tuple[Profile, Program]:
    """A verified program; every sixth is a pipeline's."""
    choose = random.Random(seed)
    if seed % 6 == 5:
        profile = batch(
            [choose.randint(1, 20) for _ in range(3)], num_devices=choose.choice((1, 2, 3)), language_layers=6
        )
        plan = make_plan(profile, choose.choice(("pipeline", "1f1b")), PlanOptions(evaluations=2))
    else:
        profile = small.workload_profile(choose.choice(TASKS), choose.randint(2, 6), choose.choice((2, 8)))
        degrees = {"vision": choose.choice((1, 2))} if profile.cluster.num_devices % 2 == 0 else {}
        degrees = {
            name: degree for name, degree in degrees.items() if name in {op.module for op in profile.graph.metaops}
        }
        header = "# optimizer sharded\n" * choose.randint(0, 1)
        plan = parse_plan(header + random_plan_text(profile, seed, degrees=degrees), profile)
    program = lower(plan, profile)
    verify(program, profile)
    return profile, program


# Changes of columns.


def with_lists(program: Program, lane: int, lists: list[list[int]]) -> Program:
    """The program with these instruction numbers by rank on one lane."""
    ranks = np.repeat(np.arange(program.num_ranks), [len(numbers) for numbers in lists])
    numbers = np.array([number for numbers in lists for number in numbers], dtype=np.int64)
    lanes = list(program.lanes)
    lanes[lane] = lane_from_pairs(program.num_ranks, numbers, ranks)
    return replace(program, lanes=tuple(lanes))


def lists_of(program: Program, lane: int) -> list[list[int]]:
    return [program.lanes[lane].of_rank(rank).tolist() for rank in range(program.num_ranks)]


def without(program: Program, dropped: Callable[[Instruction], bool]) -> Program:
    """The program without some instructions, on all ranks; the numbers of the others follow."""
    left = [number for number, instruction in enumerate(program.instructions) if not dropped(instruction)]
    number_of = {old: new for new, old in enumerate(left)}
    for lane in range(len(program.lanes)):
        lists = [
            [number_of[number] for number in numbers if number in number_of] for numbers in lists_of(program, lane)
        ]
        program = with_lists(program, lane, lists)
    buckets = [
        replace(bucket, after=tuple(number_of[after] for after in bucket.after if after in number_of))
        for bucket in program.buckets
    ]
    instructions = tuple(program.instructions[number] for number in left)
    return replace(program, instructions=instructions, buckets=tuple(buckets))


def with_instruction(program: Program, number: int, instruction: Instruction) -> Program:
    instructions = list(program.instructions)
    instructions[number] = instruction
    return replace(program, instructions=tuple(instructions))


def with_item(items: tuple, number: int, **changes) -> tuple:
    return (*items[:number], replace(items[number], **changes), *items[number + 1 :])


def pick(choose: random.Random, items):
    """Any of the items; the program has no place for this mutation if there are none."""
    items = list(items)
    assume(items)
    return choose.choice(items)


def pick_instance(program: Program, choose: random.Random, lanes=range(3)) -> tuple[int, int, int]:
    """A lane, a rank, and a position in its list."""
    return pick(
        choose,
        [
            (lane, rank, position)
            for lane in lanes
            for rank, numbers in enumerate(lists_of(program, lane))
            for position in range(len(numbers))
        ],
    )


def pick_instruction(program: Program, choose: random.Random, *kinds: type) -> int:
    return pick(
        choose, [number for number, instruction in enumerate(program.instructions) if isinstance(instruction, kinds)]
    )


def pick_flows(program: Program, choose: random.Random) -> tuple[int, str, Flows, int]:
    """A message: its link, direction, all messages of that direction, and its index among them."""
    link, direction, flows = pick(
        choose,
        [
            (number, direction, getattr(link, direction))
            for number, link in enumerate(program.links)
            for direction in ("forward", "backward")
            if len(getattr(link, direction).source)
        ],
    )
    return link, direction, flows, choose.randrange(len(flows.source))


def with_flow(program: Program, choose: random.Random, column: str, value: Callable[[Flows, int], int]) -> Program:
    link, direction, flows, place = pick_flows(program, choose)
    changed = getattr(flows, column).copy()
    changed[place] = value(flows, place)
    flows = replace(flows, **{column: changed})
    return replace(program, links=with_item(program.links, link, **{direction: flows}))


# Mutations.


def drop_on_a_rank(program, choose):
    lane, rank, position = pick_instance(program, choose)
    lists = lists_of(program, lane)
    del lists[rank][position]
    return with_lists(program, lane, lists)


def drop_on_all_ranks(program, choose):
    instruction = program.instructions[pick_instruction(program, choose, Forward, Backward, Exchange)]
    return without(program, lambda candidate: candidate == instruction)


def run_twice(program, choose):
    lane, rank, position = pick_instance(program, choose)
    lists = lists_of(program, lane)
    lists[rank].insert(choose.randint(0, len(lists[rank])), lists[rank][position])
    return with_lists(program, lane, lists)


def list_twice(program, choose):
    instruction = pick(choose, program.instructions)
    return replace(program, instructions=(*program.instructions, instruction))


def reorder_passes(program, choose):
    rank, numbers = pick(choose, [item for item in enumerate(lists_of(program, COMPUTE)) if len(item[1]) > 1])
    lists = lists_of(program, COMPUTE)
    first, second = choose.sample(range(len(numbers)), 2)
    lists[rank][first], lists[rank][second] = numbers[second], numbers[first]
    return with_lists(program, COMPUTE, lists)


def reorder_communication(program, choose):
    """Two operations that two ranks take part in, in another order on one of them."""
    lane = choose.choice((TRANSFER, SYNC))
    lists = lists_of(program, lane)
    rank, first, second = pick(
        choose,
        [
            (rank, first, second)
            for rank, numbers in enumerate(lists)
            for peer, peer_numbers in enumerate(lists)
            if rank != peer
            for first in range(len(numbers))
            for second in range(first)
            if {numbers[first], numbers[second]} <= set(peer_numbers)
        ],
    )
    lists[rank][first], lists[rank][second] = lists[rank][second], lists[rank][first]
    return with_lists(program, lane, lists)


def run_on_a_rank_that_is_no_member(program, choose):
    lane = choose.randrange(3)
    lists = lists_of(program, lane)
    rank, number = pick(
        choose,
        [
            (rank, number)
            for rank in range(program.num_ranks)
            for number in sorted({number for numbers in lists for number in numbers} - set(lists[rank]))
        ],
    )
    lists[rank].insert(choose.randint(0, len(lists[rank])), number)
    return with_lists(program, lane, lists)


def run_on_another_lane(program, choose):
    lane, rank, position = pick_instance(program, choose)
    lists = lists_of(program, lane)
    number = lists[rank].pop(position)
    program = with_lists(program, lane, lists)
    wrong_lane = choose.choice([other_lane for other_lane in range(3) if other_lane != lane])
    lists = lists_of(program, wrong_lane)
    lists[rank].insert(choose.randint(0, len(lists[rank])), number)
    return with_lists(program, wrong_lane, lists)


def leave_a_member_out_of_a_bucket(program, choose):
    bucket = pick(choose, range(len(program.buckets)))
    absent = choose.choice(program.buckets[bucket].ranks.tolist())
    ranks = np.array([rank for rank in program.buckets[bucket].ranks.tolist() if rank != absent])
    collectives = (SyncGradients(bucket=bucket), GatherParameters(bucket=bucket))
    lists = lists_of(program, SYNC)
    lists[absent] = [number for number in lists[absent] if program.instructions[number] not in collectives]
    return replace(with_lists(program, SYNC, lists), buckets=with_item(program.buckets, bucket, ranks=ranks))


def leave_a_rank_out_of_a_slot(program, choose):
    slot, shape = pick(choose, [item for item in enumerate(program.slots) if len(item[1].ranks) > 1])
    return replace(program, slots=with_item(program.slots, slot, ranks=shape.ranks[:-1], bounds=shape.bounds[:-1]))


def exchange_two_ranks_of_a_slot(program, choose):
    slot, shape = pick(choose, [item for item in enumerate(program.slots) if len(item[1].ranks) > 1])
    first, second = choose.sample(range(len(shape.ranks)), 2)
    ranks = shape.ranks.copy()
    ranks[first], ranks[second] = shape.ranks[second], shape.ranks[first]
    return replace(program, slots=with_item(program.slots, slot, ranks=ranks))


def change_the_first_row_of_a_message(program, choose):
    shift = choose.choice((-1, 1))
    return with_flow(program, choose, "first", lambda flows, place: flows.first[place] + shift)


def change_the_last_row_of_a_message(program, choose):
    shift = choose.choice((-1, 1))
    return with_flow(program, choose, "last", lambda flows, place: flows.last[place] + shift)


def change_the_receiver_of_a_message(program, choose):
    ranks = range(-1, program.num_ranks + 1)
    return with_flow(
        program,
        choose,
        "destination",
        lambda flows, place: pick(choose, [rank for rank in ranks if rank != flows.destination[place]]),
    )


def change_the_sender_of_a_message(program, choose):
    link, direction, flows, place = pick_flows(program, choose)
    source = program.links[link].producer if direction == "forward" else program.links[link].consumer
    strangers = set(range(program.num_ranks)) - set(program.slots[source].ranks.tolist())
    changed = flows.source.copy()
    changed[place] = pick(choose, sorted(strangers))
    return replace(program, links=with_item(program.links, link, **{direction: replace(flows, source=changed)}))


def repeat_a_message(program, choose):
    link, direction, flows, place = pick_flows(program, choose)
    columns = {name: np.append(getattr(flows, name), getattr(flows, name)[place]) for name in Flows.__slots__}
    return replace(program, links=with_item(program.links, link, **{direction: replace(flows, **columns)}))


def lose_a_message(program, choose):
    link, direction, flows, place = pick_flows(program, choose)
    columns = {name: np.delete(getattr(flows, name), place) for name in Flows.__slots__}
    return replace(program, links=with_item(program.links, link, **{direction: replace(flows, **columns)}))


def send_without_a_receiver(program, choose):
    link, direction, flows, place = pick_flows(program, choose)
    number = program.instructions.index(Exchange(link=link, backward=direction == "backward"))
    lists = lists_of(program, TRANSFER)
    lists[int(flows.destination[place])].remove(number)
    return with_lists(program, TRANSFER, lists)


def change_the_size_of_a_message(program, choose):
    link = pick(choose, range(len(program.links)))
    links = with_item(program.links, link, bytes_per_row=program.links[link].bytes_per_row + 8)
    return replace(program, links=links)


def swap_forward_and_backward_on_a_rank(program, choose):
    slot = choose.randrange(len(program.slots))
    forward = program.instructions.index(Forward(slot=slot))
    backward = pick(
        choose,
        [
            number
            for number, instruction in enumerate(program.instructions)
            if isinstance(instruction, Backward) and instruction.slot == slot
        ],
    )
    rank = choose.choice(program.slots[slot].ranks.tolist())
    lists = lists_of(program, COMPUTE)
    swapped = {forward: backward, backward: forward}
    lists[rank] = [swapped.get(number, number) for number in lists[rank]]
    return with_lists(program, COMPUTE, lists)


def send_activations_backward(program, choose):
    number = pick_instruction(program, choose, Exchange)
    exchange = program.instructions[number]
    return with_instruction(program, number, replace(exchange, backward=not exchange.backward))


def exchange_both_directions_of_a_link(program, choose):
    number = pick(choose, [number for number, link in enumerate(program.links) if len(link.forward.source)])
    link = program.links[number]
    return replace(program, links=with_item(program.links, number, forward=link.backward, backward=link.forward))


def drop_a_gradient_reduction(program, choose):
    number = pick_instruction(program, choose, SyncGradients)
    return without(program, lambda instruction: instruction == program.instructions[number])


def drop_a_gather_of_parameters(program, choose):
    number = pick_instruction(program, choose, GatherParameters)
    return without(program, lambda instruction: instruction == program.instructions[number])


def drop_a_bucket(program, choose):
    assume(program.buckets)
    last = len(program.buckets) - 1
    collectives = (SyncGradients(bucket=last), GatherParameters(bucket=last))
    return replace(without(program, lambda instruction: instruction in collectives), buckets=program.buckets[:last])


def drop_the_optimizer_step(program, choose):
    return without(program, lambda instruction: isinstance(instruction, OptimizerStep))


def drop_the_optimizer_step_of_a_rank(program, choose):
    step = program.instructions.index(OptimizerStep())
    lists = lists_of(program, COMPUTE)
    pick(choose, [numbers for numbers in lists if step in numbers]).remove(step)
    return with_lists(program, COMPUTE, lists)


def reduce_gradients_early(program, choose):
    bucket = pick(choose, range(len(program.buckets)))
    return replace(program, buckets=with_item(program.buckets, bucket, after=program.buckets[bucket].after[:-1]))


def leave_a_parameter_out_of_a_bucket(program, choose):
    bucket = pick(choose, range(len(program.buckets)))
    parameters = program.buckets[bucket].parameters[:-1]
    return replace(program, buckets=with_item(program.buckets, bucket, parameters=parameters))


def change_the_size_of_a_bucket(program, choose):
    bucket = pick(choose, range(len(program.buckets)))
    num_bytes = program.buckets[bucket].num_bytes + 2
    return replace(program, buckets=with_item(program.buckets, bucket, num_bytes=num_bytes))


def run_layers_of_another_op(program, choose):
    """The op of another task or microbatch, if there are several."""
    ops = {shape.op for shape in program.slots}
    slot, op = pick(choose, [(slot, op) for slot, shape in enumerate(program.slots) for op in sorted(ops - {shape.op})])
    return replace(program, slots=with_item(program.slots, slot, op=op))


def run_another_slot(program, choose):
    number = pick_instruction(program, choose, Forward, Backward)
    slots = set(range(-1, len(program.slots) + 1)) - {program.instructions[number].slot}
    return with_instruction(program, number, replace(program.instructions[number], slot=pick(choose, sorted(slots))))


def link_another_slot(program, choose):
    link = pick(choose, range(len(program.links)))
    end = choose.choice(("producer", "consumer"))
    slots = sorted(set(range(len(program.slots))) - {getattr(program.links[link], end)})
    return replace(program, links=with_item(program.links, link, **{end: pick(choose, slots)}))


def change_the_layers_of_a_backward(program, choose):
    number = pick_instruction(program, choose, Backward)
    instruction = program.instructions[number]
    end = choose.choice(("first", "last"))
    changed = replace(instruction, **{end: getattr(instruction, end) + choose.choice((-1, 1))})
    return with_instruction(program, number, changed)


def exchange_two_backward_chunks(program, choose):
    """First layers first: the gradient that a later chunk needs would not be there."""
    first, second = pick(
        choose,
        [
            (number - 1, number)
            for number in range(1, len(program.instructions))
            if all(isinstance(chunk, Backward) for chunk in program.instructions[number - 1 : number + 1])
            and program.instructions[number - 1].slot == program.instructions[number].slot
            and program.instructions[number - 1].part == program.instructions[number].part
        ],
    )
    instructions = list(program.instructions)
    instructions[first], instructions[second] = instructions[second], instructions[first]
    return replace(program, instructions=tuple(instructions))


def compute_the_wrong_gradients(program, choose):
    number = pick_instruction(program, choose, Backward)
    part = choose.choice(sorted({INPUT, WEIGHT} - {program.instructions[number].part}))
    return with_instruction(program, number, replace(program.instructions[number], part=part))


def cut_the_batch_into_too_many_parts(program, choose):
    slot = choose.randrange(len(program.slots))
    bounds = program.slots[slot].bounds
    return replace(program, slots=with_item(program.slots, slot, bounds=np.append(bounds, bounds[-1])))


def change_the_batch_of_a_slot(program, choose):
    slot = pick(choose, [slot for slot, shape in enumerate(program.slots) if is_fed_or_feeds(program, slot)])
    return replace(program, slots=with_item(program.slots, slot, bounds=program.slots[slot].bounds * 2))


def is_fed_or_feeds(program: Program, slot: int) -> bool:
    return any(slot in (link.producer, link.consumer) for link in program.links)


def name_a_link_or_bucket_that_does_not_exist(program, choose):
    number = pick_instruction(program, choose, Exchange, SyncGradients, GatherParameters)
    instruction = program.instructions[number]
    field = "link" if isinstance(instruction, Exchange) else "bucket"
    count = len(program.links) if field == "link" else len(program.buckets)
    return with_instruction(program, number, replace(instruction, **{field: count}))


PASS = r"[FBIW]\d+(\[\d+:\d+\])?"
ANY = rf"({PASS}|[XYSG]\d+|U)"
LAYERS = r"slot \d+ \(\S+\) (covers layers|has no forward)|is a pass that the plan does not have|is listed 2 times"
NOT_REDUCED = r"the gradient of \S+ is not reduced (once over exactly the ranks that hold it|after every backward)"
ROWS = r"link \d+: (rank -?\d+ (needs|sends)|there is no rank)"

MUTATIONS = {
    drop_on_a_rank: rf"rank \d takes part in {ANY} but does not run it|rank \d runs no optimizer step",
    drop_on_all_ranks: rf"{LAYERS}|link \d+ needs one exchange",
    run_twice: rf"rank \d runs {ANY} twice",
    list_twice: rf"{ANY} is listed 2 times",
    reorder_passes: r"deadlock|runs .* before .*, its plan has them in the opposite order",
    reorder_communication: r"deadlock|launch communication in different orders",
    run_on_a_rank_that_is_no_member: rf"rank \d runs ({ANY} but takes no part in it|an optimizer step and has nothing)",
    run_on_another_lane: rf"{ANY} is on the (compute|transfer|sync) lane, expected",
    leave_a_member_out_of_a_bucket: NOT_REDUCED,
    leave_a_rank_out_of_a_slot: r"slot \d+ \(\S+\) is on ranks .*, expected",
    exchange_two_ranks_of_a_slot: r"slot \d+ \(\S+\) is on ranks .*, expected",
    change_the_first_row_of_a_message: ROWS,
    change_the_last_row_of_a_message: ROWS,
    change_the_receiver_of_a_message: ROWS,
    change_the_sender_of_a_message: ROWS,
    repeat_a_message: ROWS,
    lose_a_message: ROWS,
    send_without_a_receiver: r"rank \d takes part in [XY]\d+ but does not run it",
    change_the_size_of_a_message: r"link \d+ has .* bytes per row, expected",
    swap_forward_and_backward_on_a_rank: "deadlock",
    send_activations_backward: r"link \d+ needs one exchange|is listed 2 times",
    exchange_both_directions_of_a_link: ROWS,
    drop_a_gradient_reduction: r"bucket \d+ needs one reduction of its gradients",
    drop_a_gather_of_parameters: r"bucket \d+ needs one gather of its parameters",
    drop_a_bucket: NOT_REDUCED,
    drop_the_optimizer_step: r"rank \d runs no optimizer step",
    drop_the_optimizer_step_of_a_rank: r"rank \d runs no optimizer step",
    reduce_gradients_early: NOT_REDUCED,
    leave_a_parameter_out_of_a_bucket: NOT_REDUCED,
    change_the_size_of_a_bucket: r"bucket \d+ has \d+ bytes of gradients, expected \d+",
    run_layers_of_another_op: r"slot \d+ runs layers of \S+, expected \S+",
    run_another_slot: rf"{LAYERS}|is of slot -?\d+; the program has \d+",
    link_another_slot: r"there is (no|an unnecessary) link from slot \d+ to slot \d+|there are 2 links",
    change_the_layers_of_a_backward: LAYERS,
    exchange_two_backward_chunks: LAYERS,
    compute_the_wrong_gradients: LAYERS,
    change_the_batch_of_a_slot: r"slots of task \S+ have batches of \d+, \d+ rows",
    cut_the_batch_into_too_many_parts: r"slot \d+ \(\S+\): bounds .* do not cut a batch into \d+",
    name_a_link_or_bucket_that_does_not_exist: r"needs one|needs no",
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
@given(data=st.data())
def test_every_mutation_of_a_program_is_refused(mutate, data):
    profile, program = random_program(data.draw(st.integers(0, 59)))
    mutated = mutate(program, random.Random(data.draw(st.integers(0, 1_000_000))))
    with pytest.raises(ProgramError, match=MUTATIONS[mutate]):
        verify(mutated, profile)


@pytest.mark.parametrize("seed", range(12))
def test_a_program_comes_back_from_a_message_as_it_was(seed):
    profile, program = random_program(seed)
    received = pickle.loads(pickle.dumps(program))
    assert received.plan == program.plan
    assert format_program(received, profile) == format_program(program, profile)
    verify(received, profile)
