"""Programs of random lane plans, against a plain interpreter: `verify` misses no deadlock and invents none."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import small
from random_plans import contended, random_lane_plan
from spindle.errors import ProgramError
from spindle.plan import BACKWARD, INPUT, WEIGHT, check, format_plan, parse_plan
from spindle.profile import Profile
from spindle.program import (
    Backward,
    Exchange,
    Forward,
    GatherParameters,
    Instruction,
    OptimizerStep,
    Program,
    SyncGradients,
    format_program,
    lower,
    parse_program,
    verify,
)
from spindle.program.program import lane_from_pairs
from spindle.simulate import simulate
from sweeps import RUNS_ALL

TASKS = (
    {"first": ["vision", "head"], "second": ["text", "head"], "third": ["audio"]},
    {"first": ["vision"], "second": ["text", "vision"]},
    {"first": ["head", "head"], "second": ["audio", "text"]},
)
NUM_PLANS = 10_000 if RUNS_ALL else 120


class Interpreter:
    """Runs a program rank by rank and lane by lane, without time: what an instruction needs is read from the plan's
    slots, links and buckets, in words, and not from the graph of instances that `verify` executes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lanes = [
            [list(lane.of_rank(rank).tolist()) for lane in program.lanes] for rank in range(program.num_ranks)
        ]
        self.has = [{program.instructions[number] for lane in lanes for number in lane} for lanes in self.lanes]
        self.started: list[set[Instruction]] = [set() for _ in range(program.num_ranks)]
        self.done: list[set[Instruction]] = [set() for _ in range(program.num_ranks)]
        self.backward: dict[int, list[Backward]] = {}
        for instruction in program.instructions:
            if isinstance(instruction, Backward):
                self.backward.setdefault(instruction.slot, []).append(instruction)

    def runs_to_the_end(self) -> bool:
        heads = [[0] * len(lanes) for lanes in self.lanes]
        is_moving = True
        while is_moving:
            is_moving = False
            for rank, lanes in enumerate(self.lanes):
                for lane, numbers in enumerate(lanes):
                    if heads[rank][lane] == len(numbers):
                        continue
                    instruction = self.program.instructions[numbers[heads[rank][lane]]]
                    if instruction not in self.started[rank]:
                        needs = self.has[rank].intersection(self.needs(instruction))
                        if not needs <= self.done[rank]:
                            continue
                        self.started[rank].add(instruction)
                        is_moving = True
                    if all(instruction in self.started[peer] for peer in self.peers(instruction, rank)):
                        self.done[rank].add(instruction)
                        heads[rank][lane] += 1
                        is_moving = True
        return self.done == self.has

    def peers(self, instruction: Instruction, rank: int) -> Iterator[int]:
        """The ranks without which an instruction does not end on this one."""
        match instruction:
            case Exchange(link=number, backward=is_backward):
                link = self.program.links[number]
                flows = link.backward if is_backward else link.forward
                for source, destination in zip(flows.source.tolist(), flows.destination.tolist(), strict=True):
                    if rank in (source, destination):
                        yield destination if rank == source else source
            case SyncGradients(bucket=number) | GatherParameters(bucket=number):
                yield from self.program.buckets[number].ranks.tolist()
            case Forward(slot=slot) | Backward(slot=slot):
                shape = self.program.slots[slot]
                if shape.gang:
                    yield from shape.ranks.tolist()
            case OptimizerStep():
                pass

    def needs(self, instruction: Instruction) -> Iterator[Instruction]:
        """What must be done on a rank before an instruction starts there, if the rank has it."""
        links = list(enumerate(self.program.links))
        match instruction:
            case Forward(slot=slot):
                for number, link in links:
                    if link.consumer == slot:
                        yield from (Exchange(link=number, backward=False), Forward(slot=link.producer))
                for number, bucket in enumerate(self.program.buckets):
                    users = (self.program.instructions[after] for after in bucket.after)
                    if any(isinstance(user, Backward) and user.slot == slot for user in users):
                        yield GatherParameters(bucket=number)
            case Backward(slot=slot, part=part):
                chunks = [chunk for chunk in self.backward[slot] if chunk.part == part]
                before = chunks[: chunks.index(instruction)]
                yield from before
                if part == WEIGHT:
                    yield replace(instruction, part=INPUT)
                    return
                yield Forward(slot=slot)
                for number, link in links if not before else ():
                    if link.producer == slot:
                        yield Exchange(link=number, backward=True)
                        yield from (chunk for chunk in self.backward[link.consumer] if chunk.part != WEIGHT)
            case Exchange(link=number, backward=False):
                yield Forward(slot=self.program.links[number].producer)
            case Exchange(link=number, backward=True):
                consumer = self.program.links[number].consumer
                yield from (chunk for chunk in self.backward[consumer] if chunk.part != WEIGHT)
            case SyncGradients(bucket=number):
                yield from (self.program.instructions[after] for after in self.program.buckets[number].after)
            case OptimizerStep():
                for chunks in self.backward.values():
                    yield from chunks
                yield from (SyncGradients(bucket=number) for number in range(len(self.program.buckets)))
            case GatherParameters():
                pass


def random_lane_program(seed: int) -> tuple[Program, Profile]:
    choose = random.Random(seed)
    profile = contended(small.workload_profile(choose.choice(TASKS), num_devices=choose.randint(1, 4)))
    plan = random_lane_plan(profile, f"plan {seed} {choose.choice(('', 'weight '))}lanes")
    plan = replace(plan, shard_optimizer=choose.random() < 0.3)
    check(plan, profile)
    return lower(plan, profile), profile


def disordered(program: Program, seed: int) -> Program:
    """The program with two neighbours on a lane of a rank swapped: often it still runs, in another order."""
    choose = random.Random(seed)
    places = [
        (lane, rank)
        for lane, columns in enumerate(program.lanes)
        for rank in range(program.num_ranks)
        if len(columns.of_rank(rank)) > 1
    ]
    lane, rank = choose.choice(places)
    lists = [program.lanes[lane].of_rank(number).tolist() for number in range(program.num_ranks)]
    first = choose.randrange(len(lists[rank]) - 1)
    lists[rank][first : first + 2] = reversed(lists[rank][first : first + 2])
    ranks = np.repeat(np.arange(program.num_ranks), [len(numbers) for numbers in lists])
    lanes = list(program.lanes)
    numbers = np.array([number for numbers in lists for number in numbers], dtype=np.int64)
    lanes[lane] = lane_from_pairs(program.num_ranks, numbers, ranks)
    return replace(program, lanes=tuple(lanes))


def deadlocks(program: Program, profile: Profile) -> bool:
    """What `verify` says. It may refuse a program for another reason: an order that is not the plan's, for example."""
    try:
        verify(program, profile)
    except ProgramError as error:
        return str(error).startswith("deadlock")
    return False


def test_verify_and_a_plain_interpreter_find_the_same_deadlocks():
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for seed in range(NUM_PLANS):
        program, profile = random_lane_program(seed)
        if seed % 2:
            program = disordered(program, seed)
        else:
            verify(program, profile)
        is_stuck = not Interpreter(program).runs_to_the_end()
        assert deadlocks(program, profile) == is_stuck, f"seed {seed}"
        verdicts[bool(seed % 2), is_stuck] += 1
    assert verdicts[False, True] == 0
    assert min(verdicts[True, True], verdicts[True, False]) > NUM_PLANS // 40  # both happen


@pytest.mark.parametrize("seed", range(8))
def test_weight_lanes_survive_their_text_forms(seed):
    choose = random.Random(seed)
    profile = contended(small.workload_profile(choose.choice(TASKS), num_devices=choose.randint(1, 4)))
    plan = random_lane_plan(profile, f"plan {seed} weight lanes")
    assert parse_plan(format_plan(plan), profile).slots == plan.slots
    program = lower(plan, profile)
    text = format_program(program, profile)
    assert format_program(parse_program(text, profile), profile) == text
    assert simulate(program, profile).makespan_s > 0
    parts = {instruction.part for instruction in program.instructions if isinstance(instruction, Backward)}
    assert (WEIGHT in parts) == any(slot.has_weight_lane for slot in plan.slots)
    assert BACKWARD in parts or all(slot.has_weight_lane for slot in plan.slots)
