"""The work of one pipelined step as columns of numbers, on which the search of planner `pipeline` works.

A *pair* is a (sub-)microbatch on one chunk of a module at every rank: its forward segment passes ranks 0 to P-1, its
backward segment ranks P-1 to 0. Segments know no layers, parameters or devices; `stages` makes pairs from a profile,
and slots of a plan from pairs.

Pairs are numbered so that a predecessor comes before its successors. Within one microbatch, the forward of a pair on
rank 0 waits for the forward of each predecessor on rank P-1, and the backward of a predecessor on rank P-1 waits for
the backward of all its successors on rank 0. A pair without successors turns around on rank P-1 when its forward is
done.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from spindle.errors import WorkloadError

Column = NDArray[np.int64]

# Directions, and kinds of passes. A backward pass is whole, or cut into an input pass and a weight pass.
FORWARD, BACKWARD, INPUT, WEIGHT = 0, 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """n pairs on P ranks. Times are in nanoseconds, memory in bytes or any other unit. Columns are read-only copies."""

    num_ranks: int
    microbatch: Column  # [n]
    group: Column  # [n]: (microbatch, modality); its forward and its backward have a priority each
    forward_ns: Column  # [n, P], with the leanest memory choice
    backward_ns: Column  # [n, P], input and weight part together
    weight_ns: Column  # [n, P]: the part of backward_ns for weight gradients, which may run later; 0: not split
    memory: Column  # [n, P]: held from the start of the forward to the end of the backward
    hop_ns: Column  # [n]: from one rank to the next, each direction
    predecessor_starts: Column  # [n + 1]: where each pair's predecessors begin
    predecessors: Column
    wrap_ns: Column  # aligned with `predecessors`: from rank P-1 to rank 0, each direction
    choice_of: Column  # [n, P]: row of the tables of memory choices
    choice_forward_ns: Column  # [rows, S], by increasing memory; the columns above have entry 0
    choice_backward_ns: Column
    choice_memory: Column
    choice_count: Column  # [rows]

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name == "num_ranks":
                continue
            column = np.array(getattr(self, field.name), dtype=np.int64, order="C")
            if column.size and column.min() < 0:
                raise WorkloadError(f"segments: {field.name} has a negative entry, {column.min()}")
            column.setflags(write=False)
            object.__setattr__(self, field.name, column)
        self._check_shapes()
        self._check_predecessors()
        self._check_choices()

    @property
    def num_pairs(self) -> int:
        return len(self.microbatch)

    @property
    def num_microbatches(self) -> int:
        return int(self.microbatch.max()) + 1

    @property
    def num_groups(self) -> int:
        return int(self.group.max()) + 1

    def _check_shapes(self) -> None:
        pairs, ranks = len(self.microbatch), self.num_ranks
        if ranks < 1 or pairs < 1:
            raise WorkloadError(f"segments need a rank and a pair at least, got {ranks} ranks and {pairs} pairs")
        rows, most = self.choice_memory.shape
        edges = len(self.predecessors)
        per_stage = ("forward_ns", "backward_ns", "weight_ns", "memory", "choice_of")
        expected: dict[str, tuple[int, ...]] = dict.fromkeys(per_stage, (pairs, ranks))
        expected |= dict.fromkeys(("choice_forward_ns", "choice_backward_ns"), (rows, most))
        expected |= {"microbatch": (pairs,), "group": (pairs,), "hop_ns": (pairs,), "choice_count": (rows,)}
        expected |= {"predecessor_starts": (pairs + 1,), "wrap_ns": (edges,)}
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                raise WorkloadError(f"segments: {name} has shape {getattr(self, name).shape}, expected {shape}")
        if (self.weight_ns > self.backward_ns).any():
            raise WorkloadError("segments: weight_ns is part of backward_ns and cannot be larger")
        for name in ("microbatch", "group"):
            column = getattr(self, name)
            if len(np.unique(column)) != column.max() + 1:
                raise WorkloadError(f"segments: {name} has to number from 0 without gaps")
        first_of_group = np.zeros(int(self.group.max()) + 1, dtype=np.int64)
        first_of_group[self.group] = self.microbatch
        if (first_of_group[self.group] != self.microbatch).any():
            raise WorkloadError("segments: a group belongs to one microbatch")

    def _check_predecessors(self) -> None:
        starts = self.predecessor_starts
        if starts[0] != 0 or starts[-1] != len(self.predecessors) or (np.diff(starts) < 0).any():
            raise WorkloadError("segments: predecessor_starts do not cut predecessors into one part per pair")
        of_pair = np.repeat(np.arange(self.num_pairs), np.diff(starts))
        if (self.predecessors >= of_pair).any():
            raise WorkloadError("segments: predecessors come before their successors, and have smaller numbers")
        if (self.microbatch[self.predecessors] != self.microbatch[of_pair]).any():
            raise WorkloadError("segments: predecessors belong to the same microbatch")
        if len(np.unique(self.predecessors * self.num_pairs + of_pair)) != len(of_pair):
            raise WorkloadError("segments: a pair names a predecessor twice")

    def _check_choices(self) -> None:
        rows, most = self.choice_memory.shape
        if (self.choice_of >= rows).any() or (self.choice_count < 1).any() or (self.choice_count > most).any():
            raise WorkloadError("segments: every stage needs a row of memory choices, every row one choice at least")
        for name, table in (
            ("forward_ns", self.choice_forward_ns),
            ("backward_ns", self.choice_backward_ns),
            ("memory", self.choice_memory),
        ):
            if (table[self.choice_of, 0] != getattr(self, name)).any():
                raise WorkloadError(f"segments: {name} is not that of the leanest memory choice, entry 0")
        unused = np.arange(1, most) >= self.choice_count[:, None]
        if ((np.diff(self.choice_memory, axis=1) < 0) & ~unused).any():
            raise WorkloadError("segments: memory choices come by rising memory")


# Segments for the compiled loops: the same columns, and edges in both directions.
Table = namedtuple(
    "Table",
    [
        "microbatch",
        "group",
        "hop_ns",
        "predecessor_starts",
        "predecessors",
        "predecessor_wrap",
        "successor_starts",
        "successors",
        "successor_wrap",
        "serial_starts",  # per microbatch: where its part of the serial passes begins
        "serial_pair",  # passes in an order in which one microbatch can run alone
        "serial_direction",
        "has_one_end",  # per microbatch: whether one pair comes after all others
    ],
)


def table_of(segments: Segments) -> Table:
    """The arrays for the compiled loops: writable copies, so that each loop is compiled for one signature."""
    pairs = segments.num_pairs
    of_pair = np.repeat(np.arange(pairs), np.diff(segments.predecessor_starts))
    by_predecessor = np.argsort(segments.predecessors, kind="stable")
    counts = np.bincount(segments.predecessors, minlength=pairs)
    starts, pair, direction = _serial_passes(segments)
    return Table(
        microbatch=segments.microbatch.copy(),
        group=segments.group.copy(),
        hop_ns=segments.hop_ns.copy(),
        predecessor_starts=segments.predecessor_starts.copy(),
        predecessors=segments.predecessors.copy(),
        predecessor_wrap=segments.wrap_ns.copy(),
        successor_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        successors=of_pair[by_predecessor].astype(np.int64),
        successor_wrap=segments.wrap_ns[by_predecessor].copy(),
        serial_starts=starts,
        serial_pair=pair,
        serial_direction=direction,
        has_one_end=np.bincount(segments.microbatch[counts == 0]) == 1,
    )


def _serial_passes(segments: Segments) -> tuple[Column, Column, Column]:
    """For each microbatch, an order in which it can run alone with little memory: one pair without successors after
    another, each after the forwards that it needs, and every backward as early as possible."""
    pairs = segments.num_pairs
    starts = segments.predecessor_starts
    before = [segments.predecessors[starts[pair] : starts[pair + 1]].tolist() for pair in range(pairs)]
    waiting = np.bincount(segments.predecessors, minlength=pairs)
    passes: list[list[tuple[int, int]]] = [[] for _ in range(segments.num_microbatches)]
    is_done = [False] * pairs

    def run_forward(pair: int) -> None:
        stack = [pair]
        while stack:
            current = stack[-1]
            missing = [predecessor for predecessor in before[current] if not is_done[predecessor]]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if not is_done[current]:
                is_done[current] = True
                passes[segments.microbatch[current]].append((current, FORWARD))

    for pair in np.flatnonzero(waiting == 0).tolist():
        run_forward(pair)
        returning = [pair]
        while returning:
            current = returning.pop()
            passes[segments.microbatch[current]].append((current, BACKWARD))
            for predecessor in before[current]:
                waiting[predecessor] -= 1
                if waiting[predecessor] == 0:
                    returning.append(predecessor)
    flat = np.array([entry for of_one in passes for entry in of_one], dtype=np.int64)
    lengths = [len(of_one) for of_one in passes]
    return np.cumsum([0, *lengths]).astype(np.int64), flat[:, 0].copy(), flat[:, 1].copy()


def footprints(segments: Segments) -> Column:
    """The memory of all pairs of a microbatch together, with the leanest choices. [M, P]"""
    sums = np.zeros((segments.num_microbatches, segments.num_ranks), dtype=np.int64)
    np.add.at(sums, segments.microbatch, segments.memory)
    return sums


def serial_peaks(segments: Segments) -> Column:
    """The most memory that a microbatch holds when it runs alone, with the leanest choices. [M, P]

    If one pair ends each microbatch (an encoder before a language model), this is its footprint, and no schedule needs
    less. If several pairs end it, they may run one after another, which needs less.
    """
    table = table_of(segments)
    peaks = np.zeros((segments.num_microbatches, segments.num_ranks), dtype=np.int64)
    for microbatch in range(segments.num_microbatches):
        part = slice(table.serial_starts[microbatch], table.serial_starts[microbatch + 1])
        signs = np.where(table.serial_direction[part] == FORWARD, 1, -1)[:, None]
        peaks[microbatch] = np.cumsum(signs * segments.memory[table.serial_pair[part]], axis=0).max(axis=0)
    return peaks
