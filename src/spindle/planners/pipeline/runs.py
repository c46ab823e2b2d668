"""The order in which the calls of a microbatch pass the chains of a layout.

A run passes one chain from end to end: one call (a sub-microbatch), or several if the chain has several modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spindle.errors import PlanError
from spindle.graph import MetaGraph, MetaOp
from spindle.planners.options import Chain, Layout


@dataclass(slots=True)
class Run:
    """One pass of a microbatch through a chain, from end to end."""

    task: str
    chain: Chain
    ops: list[tuple[int, int]]  # (layer of the chain at which the op begins, op)
    feeds: dict[int, float]  # the runs whose outputs it reads → bytes


def runs_of(graph: MetaGraph, layout: Layout, tasks: Sequence[str]) -> list[Run]:
    """The runs of a batch, in the order of microbatches and flows."""
    for module in graph.modules:
        if module not in layout.modules:
            placed = ", ".join(sorted(layout.modules))
            raise PlanError(f"chunks are placed for {placed}; this batch has {module!r}, too")
    # The calls of each task, in the order of their last ops, which produce their outputs.
    calls: dict[str, dict[str, list[int]]] = {task: {} for task in tasks}
    for position in graph.order:
        op = graph.metaops[position]
        if op.task in calls:
            before = calls[op.task].pop(op.call or "", [])
            calls[op.task][op.call or ""] = [*before, position]
    runs: list[Run] = []
    run_of: dict[int, int] = {}
    for task in tasks:
        for chain, ops in _calls_in_runs(graph, layout, list(calls[task].values())):
            run_of.update(dict.fromkeys(ops, len(runs)))
            begins = dict(zip(chain.modules, np.cumsum([0, *chain.num_layers]).tolist(), strict=False))
            metaops = [(graph.metaops[op], op) for op in ops]
            by_layer = [(begins[metaop.module or ""] + metaop.first_layer, op) for metaop, op in metaops]
            runs.append(Run(task, chain, sorted(by_layer), {}))
    fed: set[tuple[int, int]] = set()
    for producer, consumer in graph.edges:
        source, target = run_of.get(producer), run_of.get(consumer)
        if source is not None and target is not None and source != target and (producer, target) not in fed:
            fed.add((producer, target))
            received = _received_bytes(graph.metaops[producer], runs[source].chain, layout)
            runs[target].feeds[source] = runs[target].feeds.get(source, 0.0) + received
    return runs


def _received_bytes(op: MetaOp, chain: Chain, layout: Layout) -> float:
    """Bytes of an op's output that each device of a tensor group receives: its own slice from a group of equal size,
    all of it from any other."""
    if op.cost is None:
        return 0.0
    is_alike = chain.tensor_degree in (0, layout.tensor_degree)
    return (op.batch_size or 1) * (op.cost.cut_bytes_at(layout.tensor_degree) if is_alike else op.cost.output_bytes)


def _calls_in_runs(
    graph: MetaGraph, layout: Layout, calls: Sequence[Sequence[int]]
) -> Iterator[tuple[Chain, list[int]]]:
    """The chain and the ops of each run of a microbatch. A run comes after those that feed it, otherwise in the order
    of chains. `calls` are lists of ops, in an order that respects the flows.

    A call of a module that is cut by itself is a run. Calls of a chain of several modules share a run as long as they
    can pass the chain together. A call needs another run if its module comes before a module that is already in the
    run, if it reads another call of its module there, or if it reads what another run computed from the run's output.
    So no run waits for itself, whatever a task calls, how often and in which order.
    """
    place_of = {
        module: (number, place)
        for number, chain in enumerate(layout.chains)
        for place, module in enumerate(chain.modules)
    }
    chain_of: list[int] = []  # these three lists are by run
    members: list[list[Sequence[int]]] = []
    feeders: list[set[int]] = []
    run_of: dict[int, int] = {}

    def place(call: Sequence[int]) -> int:
        return place_of[graph.metaops[call[0]].module or ""][1]

    def can_join(run: int, call: Sequence[int], producers: set[int]) -> bool:
        if any(place(member) > place(call) for member in members[run]):
            return False
        if any(place(member) == place(call) and not producers.isdisjoint(member) for member in members[run]):
            return False
        upstream = {run_of[producer] for producer in producers} - {run}
        pending = list(upstream)
        while pending:
            new = feeders[pending.pop()] - upstream
            upstream |= new
            pending += new
        return run not in upstream

    for call in calls:
        chain_number, _ = place_of[graph.metaops[call[0]].module or ""]
        producers = {producer for op in call for producer in graph.predecessors[op]}.difference(call)
        number = len(members)
        if len(layout.chains[chain_number].modules) > 1:
            of_chain = [run for run, of_run in enumerate(chain_of) if of_run == chain_number]
            number = next((run for run in of_chain if can_join(run, call, producers)), number)
        if number == len(members):
            chain_of.append(chain_number)
            members.append([])
            feeders.append(set())
        members[number].append(call)
        feeders[number] |= {run_of[producer] for producer in producers} - {number}
        run_of.update(dict.fromkeys(call, number))
    left = sorted(range(len(members)), key=lambda run: chain_of[run])
    while left:
        run = next(run for run in left if feeders[run].isdisjoint(left))
        left.remove(run)
        yield layout.chains[chain_of[run]], [op for call in members[run] for op in call]
