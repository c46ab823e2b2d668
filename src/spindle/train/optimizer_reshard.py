"""What ranks keep of a parameter's optimizer state: cut for one that updates a part, joined, and handed on to another
plan's ranks.

What an optimizer keeps for a parameter is tensors of the parameter's shape, which are cut as it is, and the rest (the
number of steps), which belongs to all parts alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from spindle.run import World
from spindle.run.shards import Span
from spindle.run.weights import Shard
from spindle.run.world import Message

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank updates of a parameter, and its shape: a shard of a tensor group, a span of what it holds, both, or
    all of it."""

    shape: tuple[int, ...]
    shard: Shard | None = None
    span: Span | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Which of how many shards."""
        return (0, 1) if self.shard is None else (self.shard.place, self.shard.size)

    @property
    def stretch(self) -> tuple[int, int]:
        """The elements, among those of its shard."""
        return (0, prod(self.shape)) if self.span is None else (self.span.first, self.span.last)

    def of(self, state: State) -> dict[str, Any]:
        """What belongs to this part of what is kept for the whole parameter."""
        if self.shard is not None:
            shard, dims = self.shard, len(self.shape)
            state = {
                key: shard.of(value) if isinstance(value, torch.Tensor) and value.dim() == dims > 0 else value
                for key, value in state.items()
            }
        if self.span is None:
            return dict(state)
        span = self.span
        return {key: cut(value, span) if _has_shape(value, span.shape) else value for key, value in state.items()}


def cut(value: torch.Tensor, span: Span) -> torch.Tensor:
    return value.reshape(-1)[span.first : span.last].reshape(span.part_shape).clone()


def joined(states: Sequence[Mapping[str, tuple[Part, State]]]) -> dict[str, dict[str, Any]]:
    """States by parameter, from those of its parts on all ranks."""
    found: dict[str, dict[int, list[tuple[Part, State]]]] = {}  # by name and place in a tensor group
    for one in states:
        for name, (part, state) in one.items():
            found.setdefault(name, {}).setdefault(part.place[0], []).append((part, state))
    result = {}
    for name, places in found.items():
        shards = []
        for _, entries in sorted(places.items()):
            spans = [(part.span, state) for part, state in entries if part.span is not None]
            shards.append(joined_spans(spans) if spans else dict(entries[0][1]))
        state, (first, _) = shards[0], places[min(places)][0]
        if first.shard is not None:
            dim = first.shard.dim
            state = {
                key: torch.cat([shard[key] for shard in shards], dim=dim)
                if isinstance(value, torch.Tensor) and value.dim() > dim
                else value
                for key, value in state.items()
            }
        result[name] = state
    return result


def joined_spans(parts: Sequence[tuple[Span, State]]) -> dict[str, Any]:
    """What is kept for a parameter, from what is kept for all its spans."""
    in_order = sorted(parts, key=lambda entry: entry[0].first)
    whole = dict(in_order[0][1])
    for key in whole:
        values = [state.get(key) for _, state in in_order]
        if all(_has_shape(value, span.part_shape) for value, (span, _) in zip(values, in_order, strict=True)):
            whole[key] = torch.cat([value.reshape(-1) for value in values if value is not None])
            whole[key] = whole[key].reshape(in_order[0][0].shape)
    return whole


def on_host(state: State) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def sizes_of(parts: Sequence[Mapping[str, Part]], name: str) -> set[int]:
    """The sizes of the tensor groups in which a parameter has parts."""
    return {part[name].place[1] for part in parts if name in part}


@dataclass(frozen=True, slots=True)
class Described:
    """A state without its large tensors: the types of these, and the rest as it is."""

    cut: tuple[tuple[str, torch.dtype], ...]
    rest: dict[str, Any]

    @staticmethod
    def of(part: Part, state: State) -> Described:
        # A parameter of one number has states of one number, as the count of its steps is, which may be elsewhere.
        large = {key: value.dtype for key, value in state.items() if part.shape and _has_shape(value, part.shape)}
        return Described(
            tuple(sorted(large.items())), on_host({key: one for key, one in state.items() if key not in large})
        )


@dataclass(frozen=True, slots=True)
class _Move:
    """Elements `[first, last)` of a shard's state, from one rank to another, or to itself."""

    name: str
    source: int
    to: int
    first: int
    last: int


def exchanged(
    world: World,
    offers: Sequence[Mapping[str, tuple[Part, Described]]],
    wishes: Sequence[Mapping[str, Part]],
    states: Mapping[str, State],
    left_out: Collection[str],
) -> dict[str, dict[str, Any]]:
    """The states that this rank wishes for, from its own and from those of other ranks; all ranks have the same offers
    and wishes before them. What ranks send each other goes in one message for each type."""
    rank = world.rank
    moves = [move for move in _moves(offers, wishes) if move.name not in left_out]
    streams: dict[tuple[int, int, torch.dtype], list[tuple[_Move, str]]] = {}
    for move in moves:
        for key, dtype in offers[move.source][move.name][1].cut:
            if move.source != move.to and rank in (move.source, move.to):
                streams.setdefault((move.source, move.to, dtype), []).append((move, key))
    arrived: dict[tuple[_Move, str], torch.Tensor] = {}
    sends, receives = [], []
    for (source, to, dtype), some in streams.items():
        sizes = [move.last - move.first for move, _ in some]
        if rank == source:
            flat = torch.cat([_taken(states, offers, move, key).to(world.device) for move, key in some])
            sends.append(Message(flat, to))
        else:
            flat = torch.empty(sum(sizes), dtype=dtype, device=world.device)
            receives.append(Message(flat, source))
            arrived |= dict(zip(some, torch.split(flat, sizes), strict=True))
    world.exchange(sends, receives)
    found: dict[str, dict[str, Any]] = {}
    mine: dict[str, list[_Move]] = {}
    for move in moves:
        if move.to == rank:
            mine.setdefault(move.name, []).append(move)
    for name, ours in mine.items():
        part, described = wishes[rank][name], offers[ours[0].source][name][1]
        if name in offers[rank] and offers[rank][name][0] == part:
            found[name] = dict(states[name])
            continue
        found[name] = dict(described.rest)
        for key, _ in described.cut:
            pieces = [
                _taken(states, offers, move, key).to(world.device) if move.source == rank else arrived[move, key]
                for move in ours
            ]
            found[name][key] = torch.cat(pieces).view(part.shape)
    return found


def _taken(
    states: Mapping[str, State], offers: Sequence[Mapping[str, tuple[Part, Described]]], move: _Move, key: str
) -> torch.Tensor:
    """What a move takes of this rank's own."""
    begin = offers[move.source][move.name][0].stretch[0]
    value: torch.Tensor = states[move.name][key]
    return value.reshape(-1)[move.first - begin : move.last - begin]


def _moves(
    offers: Sequence[Mapping[str, tuple[Part, Described]]], wishes: Sequence[Mapping[str, Part]]
) -> Iterator[_Move]:
    """Who gets what from whom: from itself where it can, else from whoever has sent least so far."""
    num_sent = [0] * len(offers)
    for name in sorted(frozenset[str]().union(*wishes)):
        for to, wish in enumerate(wishes):
            if name not in wish:
                continue
            have = {
                source: offer[name][0].stretch
                for source, offer in enumerate(offers)
                if name in offer and offer[name][0].place == wish[name].place
            }
            first, last = wish[name].stretch
            while have:
                here = [source for source, (begin, end) in have.items() if begin <= first < end or begin == end == last]
                assert here, f"nobody has the state of {name} from element {first} on"
                source = min(here, key=lambda one: (one != to, num_sent[one]))
                end = min(last, have[source][1])
                yield _Move(name, source, to, first, end)
                num_sent[source] += source != to
                first = end
                if first >= last:
                    break


def _has_shape(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == torch.Size(shape)
