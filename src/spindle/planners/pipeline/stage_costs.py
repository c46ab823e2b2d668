"""The costs of a stage: its times, and its memory choices (which layers to recompute or offload)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spindle.planners.options import Layout
from spindle.planners.pipeline.rank_parameters import held_bytes, setting_in
from spindle.profile import Curve, Profile, backward_bytes, saved_bytes
from spindle.workload import LayerCost

NS = 1e9  # nanoseconds per second
MOST_CHOICES = 10  # memory choices of a stage; DIP keeps about as many


@dataclass(frozen=True, slots=True)
class StagePiece:
    """Layers `[first, last)` of an op, numbered within the op."""

    op: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One memory choice of a stage: for each piece, how many layers are recomputed and how many offloaded.

    `memory` is held from forward to backward. `copied` bytes are on the device only while they are copied to the host
    and back (`program/copies.py`). `recomputed_bytes` are held from input to weight gradients, if a backward is cut.
    """

    forward_ns: int
    backward_ns: int
    memory: int
    recomputed: tuple[int, ...]
    offloaded: tuple[int, ...]
    copied: int = 0
    recomputed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """The costs of a stage; equal for microbatches with the same sizes. Choices are in order of increasing memory."""

    weight_ns: int
    output_bytes: float
    working: int  # bytes that its backward needs while it runs
    choices: tuple[Choice, ...]

    @property
    def ends(self) -> tuple[Choice, Choice]:
        """The fastest choice and the leanest."""
        return self.choices[-1], self.choices[0]


class StageCosts:
    """Costs of stages, with equal stages costed once."""

    def __init__(self, profile: Profile, layout: Layout) -> None:
        self._profile, self._degree = profile, layout.tensor_degree
        self._setting = setting_in(profile, layout)
        # No rank keeps more bytes of activations than this. So if every stage offloads at most `_host_share` of what it
        # keeps, offloaded activations fit into host memory at any time.
        kind = profile.cluster.kind
        most_kept_bytes = kind.memory_bytes - int(held_bytes(profile, layout)[0].min())
        self._host_share = kind.host_memory_bytes / max(1, most_kept_bytes)
        self._stages: dict[object, Stage] = {}

    def stage(
        self,
        pieces: Sequence[StagePiece],
        received_bytes: float,
        tensor_degree: int | None = None,
        sequence_degree: int = 1,
        most_choices: int | None = None,
    ) -> Stage:
        """The costs of a stage on one tensor group (of the layout's degree unless another is given), or on a sequence
        group. With `most_choices`, at most that many numbers of recomputed layers are tried, and nothing is
        offloaded."""
        degree = tensor_degree or self._degree
        facts = tuple(
            (
                self._profile.graph.metaops[piece.op].cost,
                self._profile.curve(piece.op, self._setting),
                piece.last - piece.first,
                self._profile.graph.metaops[piece.op].batch_size,
            )
            for piece in pieces
        )
        key = (facts, received_bytes if pieces else 0.0, degree, sequence_degree, most_choices)
        if key not in self._stages:
            self._stages[key] = self._cost(pieces, facts, received_bytes, degree, sequence_degree, most_choices)
        return self._stages[key]

    def _cost(
        self,
        pieces: Sequence[StagePiece],
        facts: Sequence[tuple[LayerCost | None, Curve, int, int | None]],
        received_bytes: float,
        degree: int,
        sequence_degree: int,
        most_choices: int | None,
    ) -> Stage:
        """The times of a stage, and its memory choices (DIP §4.3).

        A choice recomputes some layers and offloads others. Copies overlap compute, so they are free here, and a stage
        offloads no more than can be copied during its forward pass; how long passes wait for copies is simulated with
        the whole plan. All numbers of recomputed layers are tried, each with nothing offloaded, and with as much as
        possible. Every pass takes at least 1 ns, so that passes start in the order of the flows.
        """
        if not pieces:
            return Stage(0, 0.0, 0, (Choice(0, 0, 0, (), ()),))
        # By piece: layers, forward and backward seconds of a layer, rows, and whether the user asked for recomputation
        # of the whole op, which leaves no choice.
        ops = [self._profile.graph.metaops[piece.op] for piece in pieces]
        counts = [count for _, _, count, _ in facts]
        num_devices = degree * sequence_degree
        times = [curve.times_s(num_devices) for _, curve, _, _ in facts]
        weight_times = [curve.weight_time_s(num_devices) for _, curve, _, _ in facts]
        rows = [op.batch_size or 1 for op in ops]
        is_recomputed = [self._setting.recompute[piece.op] for piece in pieces]
        # Bytes that a layer keeps from forward to backward: by default, and if it is recomputed.
        saved = [
            saved_bytes(op, count, 1, degree, recompute) // sequence_degree
            for op, count, recompute in zip(ops, rows, is_recomputed, strict=True)
        ]
        recomputed_saved = [
            saved_bytes(op, count, 1, degree, True) // sequence_degree for op, count in zip(ops, rows, strict=True)
        ]
        # Times of the stage without further recomputation.
        forward_s = sum(count * forward for count, (forward, _) in zip(counts, times, strict=True))
        backward_s = sum(
            count * (backward + forward * recompute)
            for count, (forward, backward), recompute in zip(counts, times, is_recomputed, strict=True)
        )
        weight_s = 0.0
        if None not in weight_times:
            weight_s = sum(count * (weight or 0.0) for count, weight in zip(counts, weight_times, strict=True))
        # Layers that free the most bytes per second of recomputation are recomputed first.
        gains = [
            (whole - less) / max(forward, 1e-12)
            for whole, less, (forward, _) in zip(saved, recomputed_saved, times, strict=True)
        ]
        ranking = sorted(range(len(pieces)), key=lambda number: -gains[number])

        def choice(num_recomputed: int, num_offloaded: int) -> Choice:
            recomputed, offloaded = [0] * len(pieces), [0] * len(pieces)
            for number in ranking:
                if is_recomputed[number]:
                    continue
                recomputed[number] = min(num_recomputed, counts[number])
                num_recomputed -= recomputed[number]
                offloaded[number] = min(num_offloaded, counts[number] - recomputed[number])
                num_offloaded -= offloaded[number]
            memory = sum(
                (count - on_recompute - on_host) * whole + on_recompute * less
                for count, on_recompute, on_host, whole, less in zip(
                    counts, recomputed, offloaded, saved, recomputed_saved, strict=True
                )
            )
            recompute_s = sum(count * forward for count, (forward, _) in zip(recomputed, times, strict=True))
            return Choice(
                max(1, round(forward_s * NS)),
                max(1, round((backward_s + recompute_s) * NS)) + any(offloaded),  # 1 ns makes "keep" win ties
                int(memory + received_bytes),
                tuple(recomputed),
                tuple(offloaded),
                int(sum(count * whole for count, whole in zip(offloaded, saved, strict=True))),
                sum(
                    count * (whole - less)
                    for count, whole, less in zip(recomputed, saved, recomputed_saved, strict=True)
                ),
            )

        # For each number of recomputed layers: nothing is offloaded, or as much as can be copied during the forward
        # pass and fits into host memory.
        copied_bytes = forward_s * self._profile.cluster.kind.host_bytes_per_s
        total = sum(counts)
        steps = total if most_choices is None else min(total, most_choices - 1)
        counts_recomputed = [total * number // steps for number in range(steps + 1)]
        choices = [choice(num_recomputed, 0) for num_recomputed in counts_recomputed]
        num_offloaded = total  # an upper limit, which falls as more layers are recomputed
        for num_recomputed in counts_recomputed[:-1] if most_choices is None else ():
            num_offloaded = min(num_offloaded, total - num_recomputed)
            while num_offloaded:
                candidate = choice(num_recomputed, num_offloaded)
                host_bytes = sum(count * size for count, size in zip(candidate.offloaded, saved, strict=True))
                if host_bytes <= min(copied_bytes, self._host_share * candidate.memory):
                    choices.append(candidate)
                    break
                num_offloaded -= 1
        last = ops[-1].cost
        return Stage(
            min(round(weight_s * NS), choice(0, 0).backward_ns - 1),
            0.0 if last is None else rows[-1] * last.cut_bytes_at(degree),
            max(backward_bytes(op, count, degree, True) for op, count in zip(ops, rows, strict=True))
            // sequence_degree,
            _worth_having(choices),
        )


def _worth_having(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """At most `MOST_CHOICES` Pareto-optimal choices: the leanest, the fastest, and the fastest in each of several equal
    ranges of memory in between (DIP §4.3)."""

    def time_ns(choice: Choice) -> int:
        return choice.forward_ns + choice.backward_ns

    falling: list[Choice] = []  # by increasing memory, each faster than all before
    for choice in sorted(choices, key=lambda choice: (choice.memory, time_ns(choice))):
        if not falling or time_ns(choice) < time_ns(falling[-1]):
            falling.append(choice)
    if len(falling) <= MOST_CHOICES:
        return tuple(falling)
    least, most = falling[0].memory, falling[-1].memory
    width = (most - least) / (MOST_CHOICES - 2)
    buckets: dict[int, Choice] = {}
    for choice in falling[1:-1]:  # later ones are faster
        buckets[min(int((choice.memory - least) / width), MOST_CHOICES - 3)] = choice
    return (falling[0], *(buckets[key] for key in sorted(buckets)), falling[-1])
