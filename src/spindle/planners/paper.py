"""Planner `paper`: the ASPLOS'25 algorithm, level by level, in waves with a barrier between them (§3.3-3.4, Alg. 1).

Where the paper is silent the rules are those of the authors' released planner: whole-cluster tuples first, align before
extending, leftovers return with their own number of devices, equal neighbouring waves merge. Numbers of devices are
divisors of an op's batch, where it carries one; where a batch is not a power of two, so that its divisors are few, also
every integer, which the released planner has as an option: the better of the two counts. Extension is on (their
default has it off).
"""

from __future__ import annotations

from dataclasses import dataclass

from spindle.planners.allocate import Allocation, allocate
from spindle.planners.problem import Choices, Problem, Timed, choices_of

_SLACK = 1e-9  # a wave is often an exact multiple of a layer's time


@dataclass(slots=True)
class _Tuple:
    """Layers of an op that still have to run, on a number of devices."""

    op: int
    num_devices: int
    layers: int


@dataclass(slots=True)
class _Entry:
    """A tuple in the wave that is being built. It may have been widened, and runs some of its layers."""

    source: _Tuple
    num_devices: int
    layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Ops (numbered in the problem) with their devices and layers, which all start together."""

    time_s: float
    entries: tuple[tuple[int, int, int], ...]  # (op, num_devices, layers)


def paper_waves(problem: Problem, divisors_only: bool = True) -> tuple[list[float], list[Wave]]:
    """C* of each level, and the waves of all levels in order."""
    choices = _choices(problem, divisors_only)
    optima, waves = [], []
    for level in sorted(set(problem.levels)):
        ops = [op for op in range(problem.num_ops) if problem.levels[op] == level]
        optimum_s, allocations = allocate(
            [choices[op] for op in ops], [problem.num_layers[op] for op in ops], problem.num_devices
        )
        optima.append(optimum_s)
        waves += _schedule(problem, choices, dict(zip(ops, allocations, strict=True)), optimum_s)
    return optima, waves


def schedule_paper(problem: Problem) -> list[Timed]:
    """The waves as timed pieces: all pieces of a wave start together."""
    batch_sizes = [problem.profile.graph.metaops[op].batch_size for op in problem.ops]
    rules = (True, False) if any(size is not None and size & (size - 1) for size in batch_sizes) else (True,)
    schedules = [_timed(problem, divisors_only) for divisors_only in rules]
    return min(schedules, key=lambda timed: max(piece.end_s for piece in timed))


def _timed(problem: Problem, divisors_only: bool) -> list[Timed]:
    _, waves = paper_waves(problem, divisors_only)
    choices = _choices(problem, divisors_only)
    timed: list[Timed] = []
    start_s = 0.0
    for number, wave in enumerate(waves):
        for op, num_devices, layers in wave.entries:
            layer_s = choices[op].time_on(num_devices)
            timed.append(
                Timed(
                    op=problem.ops[op],
                    num_layers=layers,
                    num_devices=num_devices,
                    start_s=start_s,
                    end_s=start_s + layers * layer_s,
                    wave=number,
                )
            )
        start_s += wave.time_s
    return timed


def _choices(problem: Problem, divisors_only: bool) -> list[Choices]:
    return [choices_of(problem.profile, problem.setting, op, divisors_only) for op in problem.ops]


def _whole_tuples(op: int, num_layers: int, allocation: Allocation) -> list[_Tuple]:
    """Round to whole layers. The remainder goes to the tuple with fewer devices."""
    *_, (n_high, layers_high) = allocation.tuples
    if len(allocation.tuples) == 1:
        return [_Tuple(op, n_high, num_layers)]
    high = min(num_layers, round(layers_high))
    return [
        candidate
        for candidate in (_Tuple(op, allocation.tuples[0][0], num_layers - high), _Tuple(op, n_high, high))
        if candidate.layers
    ]


def _schedule(
    problem: Problem, choices: list[Choices], allocations: dict[int, Allocation], optimum_s: float
) -> list[Wave]:
    pool = [
        whole_tuple_
        for op, allocation in allocations.items()
        for whole_tuple_ in _whole_tuples(op, problem.num_layers[op], allocation)
    ]
    waves: list[Wave] = []
    while pool:
        entries = _propose(choices, pool, problem.num_devices)
        wave_s = _shorten_to_shortest(choices, entries)
        wave_s = _extend(problem, choices, entries, pool, wave_s, optimum_s)
        content = tuple((entry.source.op, entry.num_devices, entry.layers) for entry in entries)
        for entry in entries:
            entry.source.layers -= entry.layers
        pool = [candidate for candidate in pool if candidate.layers]
        previous = waves[-1] if waves else None
        if previous and {entry[:2] for entry in previous.entries} == {entry[:2] for entry in content}:
            layers_before = {entry[0]: entry[2] for entry in previous.entries}
            merged = tuple((op, count, layers + layers_before[op]) for op, count, layers in content)
            waves[-1] = Wave(time_s=previous.time_s + wave_s, entries=merged)
        else:
            waves.append(Wave(time_s=wave_s, entries=content))
    return waves


def _propose(choices: list[Choices], pool: list[_Tuple], num_devices: int) -> list[_Entry]:
    """Fill the cluster: most devices first, then longest; one tuple of an op at a time."""

    def size(candidate: _Tuple) -> tuple[int, float]:
        return (-candidate.num_devices, -choices[candidate.op].time_on(candidate.num_devices) * candidate.layers)

    entries: list[_Entry] = []
    free = num_devices
    for candidate in sorted(pool, key=size):
        if candidate.num_devices <= free and all(entry.source.op != candidate.op for entry in entries):
            entries.append(_Entry(candidate, candidate.num_devices))
            free -= candidate.num_devices
    return entries


def _shorten_to_shortest(choices: list[Choices], entries: list[_Entry]) -> float:
    """Shorten all entries to about the shortest one. Returns the duration of the wave."""

    def layer_s(entry: _Entry) -> float:
        return choices[entry.source.op].time_on(entry.num_devices)

    shortest_s = min(layer_s(entry) * entry.source.layers for entry in entries)
    wave_s = max(layer_s(entry) * max(1, int(shortest_s / layer_s(entry) + 0.5 + _SLACK)) for entry in entries)
    for entry in entries:
        entry.layers = min(entry.source.layers, int(wave_s / layer_s(entry) + _SLACK))
    return max(layer_s(entry) * entry.layers for entry in entries)


def _extend(
    problem: Problem, choices: list[Choices], entries: list[_Entry], pool: list[_Tuple], wave_s: float, optimum_s: float
) -> float:
    """Give idle devices to the op with the most work left after this wave, then to the longest entry in it."""

    def layer_s(entry: _Entry, num_devices: int) -> float:
        return choices[entry.source.op].time_on(num_devices)

    def left_s(entry: _Entry) -> float:
        op = entry.source.op
        layers = sum(candidate.layers for candidate in pool if candidate.op == op) - entry.layers
        return layers * optimum_s / problem.num_layers[op]

    def grow(entry: _Entry, free: int) -> int:
        """The next allowed number of devices if it fits, otherwise 0."""
        counts = choices[entry.source.op].num_devices
        wider = counts[counts > entry.num_devices]
        return int(wider[0]) if len(wider) and wider[0] - entry.num_devices <= free else 0

    while free := problem.num_devices - sum(entry.num_devices for entry in entries):
        unfinished = sorted(
            (entry for entry in entries if entry.layers < entry.source.layers), key=lambda entry: -left_s(entry)
        )
        by_time = sorted(entries, key=lambda entry: -entry.layers * layer_s(entry, entry.num_devices))
        chosen = next((entry for entry in [*unfinished, *by_time] if grow(entry, free)), None)
        if chosen is None:
            break
        chosen.num_devices = grow(chosen, free)
        chosen.layers = min(chosen.source.layers, int(wave_s / layer_s(chosen, chosen.num_devices) + _SLACK))
    return max(entry.layers * layer_s(entry, entry.num_devices) for entry in entries)
