"""Races between lanes, made on purpose: one dependency is left out, and what it waited for comes late; or memory that
weight gradients read is released before they have run, and they come late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

import replay
from spindle.program import Backward, OptimizerStep
from spindle.run.composed_graph import ComposedGraph
from spindle.run.graphs import Graphs
from spindle.run.lanes import COMMUNICATION, Lanes

Edge = tuple[int, int]


@dataclass(slots=True)
class LeftOut:
    """The dependency that was left out, None where there is none between lanes; and the instruction that is late."""

    edge: Edge | None = None
    late: set[int] = field(default_factory=set)


def sole_edges(lanes: Lanes, order: Sequence[int], without: set[int]) -> list[Edge]:
    """Dependencies between lanes that no other path through lanes and dependencies implies. Those of instructions
    `without` are not among them."""
    on_lane: dict[int, list[int]] = {}
    for position in order:
        on_lane.setdefault(lanes._lane_at[position], []).append(position)
    followers: dict[int, set[int]] = {}
    for before, after in (pair for positions in on_lane.values() for pair in pairwise(positions)):
        followers.setdefault(before, set()).add(after)
    edges = [(before, after) for after, waits in lanes._waits.items() for before in waits]
    for before, after in edges:
        followers.setdefault(before, set()).add(after)

    def is_implied(edge: Edge) -> bool:
        reached, left = set[int](), [edge[0]]
        while left:
            position = left.pop()
            for follower in followers.get(position, set()) - reached:
                if (position, follower) != edge:
                    reached.add(follower)
                    left.append(follower)
        return edge[1] in reached

    return sorted(edge for edge in set(edges) if not without & set(edge) and not is_implied(edge))


@contextmanager
def edge_left_out(number: int, *, stays: bool = False, of_communication: bool = False) -> Iterator[LeftOut]:
    """Inside, one instruction does not wait for one of another lane, and nothing else makes it wait; `number` is that
    of the dependency, of those `of_communication` if only what is sent or reduced counts. The instruction not waited
    for is `late`: emulated graphs replay it as late as they can. If the dependency `stays`, the instruction is late all
    the same."""
    made, left_out = Lanes.__init__, LeftOut()

    def without(lanes: Lanes, program: Any, rank_program: Any, world: Any) -> None:
        made(lanes, program, rank_program, world)
        # All lanes are joined before the optimizer, anyway.
        optimizer = {
            position for position in rank_program.compute if isinstance(program.instructions[position], OptimizerStep)
        }
        launches = [number for number in rank_program.launches if lanes._lane_at.get(number) == COMMUNICATION]
        edges = sole_edges(lanes, [*rank_program.compute, *launches], optimizer) if lanes._waits else []
        edges = [edge for edge in edges if not of_communication or edge[1] in launches]
        if edges:
            left_out.edge = before, after = edges[number % len(edges)]
            if not stays:
                lanes._waits[after].remove(before)
            left_out.late.add(before)

    with mock.patch.object(Lanes, "__init__", without), _late_in_replays(left_out.late):
        yield left_out


@dataclass(slots=True)
class Released:
    """How often weight gradients were captured whose memory was released; and the instructions that are late."""

    count: int = 0
    late: set[int] = field(default_factory=set)


@contextmanager
def released_early(*, stays: bool = False) -> Iterator[Released]:
    """Inside, what weight gradients read is released as soon as they are captured, so that the next graph on the lane
    of their slot gets this memory (`replay.capturing` and, on a GPU, `reused_at_once` overwrite it there); and weight
    gradients with a lane of their own are late. If the memory `stays`, they are late all the same."""
    made, run, released = Lanes.__init__, Graphs.backward_weights, Released()

    def with_late(lanes: Lanes, program: Any, rank_program: Any, world: Any) -> None:
        made(lanes, program, rank_program, world)
        for position in rank_program.compute:
            match program.instructions[position]:
                case Backward(slot=slot, makes_inputs=False) if program.plan.slots[slot].has_weight_lane:
                    released.late.add(position)
                case _:
                    pass

    def run_and_release(graphs: Graphs, slot: Any, first: int, *arguments: Any) -> Any:
        left = run(graphs, slot, first, *arguments)
        parts = graphs._slots[slot.number].parts.get(first)
        if parts and left is None and not stays:
            parts.clear()
            released.count += 1
        return left

    with (
        mock.patch.object(Lanes, "__init__", with_late),
        mock.patch.object(Graphs, "backward_weights", run_and_release),
        _late_in_replays(released.late),
    ):
        yield released


@contextmanager
def _late_in_replays(late: set[int]) -> Iterator[None]:
    """Inside, emulated graphs replay these instructions as late as they can."""
    in_any_order = replay.replay_children

    def replayed(composed: ComposedGraph) -> None:
        in_any_order(composed, late)

    with mock.patch.object(replay, "replay_children", replayed):
        yield
