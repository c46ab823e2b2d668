"""Which layers are on which pipeline rank: chosen once, before training, and kept for every batch.

A chain is one module, or several in a row, cut into P·K chunks of consecutive layers; chunk c is on rank c mod P,
so that a chain passes all ranks K times. With a chain for each module (DIP §4.1), every rank has a part of each module;
other systems cut one chain through all modules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from spindle.errors import PlanError
from spindle.graph import MetaGraph
from spindle.planners.options import Chain, Layout, PlanOptions
from spindle.profile import Profile

Loads = NDArray[np.float64]


def layout_of(profile: Profile, num_ranks: int, chains: Sequence[Chain], shards_optimizer: bool = False) -> Layout:
    """The layout of these chains on the devices of a profile."""
    degree = tensor_degree_of(profile)
    num_replicas, rest = divmod(profile.cluster.num_devices, num_ranks * degree)
    if num_replicas < 1 or rest:
        raise PlanError(
            f"{num_ranks} pipeline ranks of {degree} devices need a multiple of {num_ranks * degree} devices, got "
            f"{profile.cluster.num_devices}"
        )
    return Layout(
        num_ranks=num_ranks,
        num_replicas=num_replicas,
        tensor_degree=degree,
        chains=tuple(chains),
        shards_optimizer=shards_optimizer,
    )


def tensor_degree_of(profile: Profile) -> int:
    """The tensor degree that all ops of a pipeline have in common; parts may have another one."""
    degrees = sorted(
        {
            curve.tensor_degree
            for op, curves in zip(profile.graph.metaops, profile.curves, strict=True)
            for curve in curves
            if not op.items
        }
    )
    if len(degrees) > 1:
        raise PlanError(f"a pipeline needs one tensor degree for all modules, got {', '.join(map(str, degrees))}")
    return degrees[0]


def pipeline_ranks_of(profile: Profile, options: PlanOptions) -> int:
    """The number of pipeline ranks: as given, or one for each tensor group."""
    return options.pipeline_ranks or max(1, profile.cluster.num_devices // tensor_degree_of(profile))


def layer_counts(graph: MetaGraph) -> dict[str, int]:
    """The number of layers of each module, in a topological order of the flows of all tasks.

    Flows between modules may form a cycle: two tasks call modules in opposite orders, or a task calls a module again
    after another. The next module is always the one that needs the fewest of those left, so the modules of a cycle come
    before those that they feed, and only flows inside a cycle may go backward. Ties go by the order of the graph.
    """
    counts: dict[str, int] = {}
    for position in graph.order:
        op = graph.metaops[position]
        if op.module is None:
            raise PlanError(f"a pipeline cuts modules into chunks, but op {op.name!r} belongs to no module")
        counts[op.module] = max(counts.get(op.module, 0), op.first_layer + op.num_layers)
    feeders = _feeders(graph)
    order: list[str] = []
    left = list(counts)
    while left:
        order.append(min(left, key=lambda module: _num_needed(module, feeders, left)))
        left.remove(order[-1])
    return {module: counts[module] for module in order}


def _feeders(graph: MetaGraph) -> dict[str, set[str]]:
    """Module → the other modules whose outputs its calls read, in any task."""
    feeders: dict[str, set[str]] = {module: set() for module in graph.modules}
    for producer, consumer in graph.edges:
        source, target = graph.metaops[producer].module, graph.metaops[consumer].module
        assert source is not None
        assert target is not None
        if source != target:
            feeders[target].add(source)
    return feeders


def _num_needed(module: str, feeders: Mapping[str, set[str]], among: Collection[str]) -> int:
    """How many of the modules `among` a module needs, directly or through others, itself included."""
    needed, pending = {module}, [module]
    while pending:
        new = feeders[pending.pop()].intersection(among) - needed
        needed |= new
        pending += new
    return len(needed)


def layer_loads(profile: Profile, weight_of: str = "time") -> dict[str, Loads]:
    """The load of each layer of each module, over all calls of a batch: seconds, or number of parameters."""
    setting, graph = profile.default_setting, profile.graph
    loads = {module: np.zeros(count) for module, count in layer_counts(graph).items()}
    seen: set[tuple[str, int]] = set()
    for position, op in enumerate(graph.metaops):
        assert op.module is not None
        for layer in range(op.num_layers):
            place = op.first_layer + layer
            if weight_of == "time":
                curve = profile.curve(position, setting)
                loads[op.module][place] += curve.layer_s(curve.num_devices[0])
            elif (op.module, place) not in seen:
                seen.add((op.module, place))
                loads[op.module][place] = sum(
                    graph.parameters[parameter].num_elements for parameter in op.parameters[layer]
                )
    return loads


def modules_in_rows(graph: MetaGraph) -> list[tuple[str, ...]]:
    """Modules grouped into rows. Each is a row of its own, except modules of one layer that others feed (a loss): these
    are appended to the row of the last module that feeds them, where their input is produced."""
    counts, feeders = layer_counts(graph), _feeders(graph)
    calls: dict[tuple[str, str], set[str]] = {}
    for op in graph.metaops:
        calls.setdefault((op.module or "", op.task), set()).add(op.call or "")
    most = {module: max(len(names) for (name, _), names in calls.items() if name == module) for module in counts}
    row_of: dict[str, list[str]] = {}
    for module in counts:
        before = [feeder for feeder in row_of if feeder in feeders[module]]
        # If the feeder is called several times for a microbatch, there is no single place after it.
        if counts[module] == 1 and before and most[module] == most[before[-1]] == 1:
            row_of[module] = row_of[before[-1]]
        else:
            row_of[module] = []
        row_of[module].append(module)
    return list(dict.fromkeys(map(tuple, row_of.values())))


def mixed_chain(loads: Mapping[str, Loads], num_chunks: int) -> Chain:
    """One chain through all modules, cut so that its heaviest chunk is as light as possible."""
    all_loads = np.concatenate(list(loads.values()))
    counts = tuple(map(len, loads.values()))
    return Chain(modules=tuple(loads), num_layers=counts, bounds=lightest_cuts(all_loads, num_chunks))


def lightest_cuts(loads: Loads, num_chunks: int) -> tuple[int, ...]:
    """Cut layers into `num_chunks` consecutive chunks whose heaviest is as light as possible, and the others as even as
    that allows.

    Bisection over the largest weight of a chunk; then the chunks are cut as close to equal shares as it allows.
    """
    ends = np.concatenate([[0.0], np.cumsum(loads)])
    low, high = max(float(loads.max(initial=0.0)), ends[-1] / num_chunks), float(ends[-1])
    for _ in range(60):
        middle = (low + high) / 2
        if len(_fill(ends, middle)) - 1 <= num_chunks:
            high = middle
        else:
            low = middle
    most = high * (1 + 1e-12)
    # From the end: the earliest position of each cut from which the remaining layers still fit into its chunks.
    latest = [len(loads)]
    for _ in range(num_chunks - 1):
        latest.append(int(np.searchsorted(ends, ends[latest[-1]] - most - 1e-30)))
    latest.reverse()  # the earliest start of each chunk
    bounds = [0]
    for chunk in range(1, num_chunks):
        reach = int(np.searchsorted(ends, ends[bounds[-1]] + most, side="right")) - 1
        share = ends[bounds[-1]] + (ends[-1] - ends[bounds[-1]]) / (num_chunks - chunk + 1)
        nearest = int(np.searchsorted(ends, share))
        if nearest > bounds[-1] and share - ends[nearest - 1] <= ends[min(nearest, len(loads))] - share:
            nearest -= 1
        bounds.append(min(max(nearest, latest[chunk - 1] if chunk - 1 < len(latest) else 0, bounds[-1]), reach))
    return (*bounds, len(loads))


def _fill(ends: Loads, most: float) -> list[int]:
    """Cuts such that every chunk takes as many layers as fit into the weight `most`."""
    cuts = [0]
    while cuts[-1] < len(ends) - 1:
        cuts.append(int(np.searchsorted(ends, ends[cuts[-1]] + most * (1 + 1e-12), side="right")) - 1)
    return cuts


def separate_chains(
    loads: Mapping[str, Loads], rounds: Mapping[str, int], num_ranks: int, rows: Sequence[tuple[str, ...]] = ()
) -> tuple[Chain, ...]:
    """A chain for each module, or each row of modules, with work as equal as possible between ranks. A chain passes all
    ranks as often as `rounds` says for its first module.

    Each chain is first cut by itself; then cuts move by a layer as long as that makes the heaviest rank lighter, or
    keeps it as it is and makes the chunks of a chain more equal.
    """
    load_of_row = {
        row: np.concatenate([loads[module] for module in row]) for row in rows or [(module,) for module in loads]
    }
    chains: dict[tuple[str, ...], list[int]] = {}
    for row, load in load_of_row.items():
        num_chunks = min(rounds[row[0]], max(1, len(load) // num_ranks)) * num_ranks
        chains[row] = list(lightest_cuts(load, num_chunks))
    ends = {row: np.concatenate([[0.0], np.cumsum(load)]) for row, load in load_of_row.items()}

    def weights() -> tuple[float, float]:
        ranks = np.zeros(num_ranks)
        uneven = 0.0
        for row, bounds in chains.items():
            chunks = np.diff(ends[row][bounds])
            ranks += chunks.reshape(-1, num_ranks).sum(axis=0)
            uneven += float((chunks**2).sum()) * len(chunks)
        return float(ranks.max()), uneven

    best = weights()
    improved = True
    while improved:
        improved = False
        for bounds in chains.values():
            for cut in range(1, len(bounds) - 1):
                for step in (-1, 1):
                    bounds[cut] += step
                    if bounds[cut - 1] < bounds[cut] < bounds[cut + 1]:
                        moved = weights()
                        if moved[0] < best[0] * (1 - 1e-9) or (
                            moved[0] <= best[0] * (1 + 1e-9) and moved[1] < best[1] * (1 - 1e-9)
                        ):
                            best, improved = moved, True
                            continue
                    bounds[cut] -= step
    return tuple(
        Chain(modules=row, num_layers=tuple(len(loads[module]) for module in row), bounds=tuple(bounds))
        for row, bounds in chains.items()
    )
