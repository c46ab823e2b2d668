"""From tasks to MetaOps: unfold every call into its layers, then contract runs of identical layers.

§3.1 of the Spindle paper: operators i and j are merged if the edge between them is the only one out of i and the only
one into j, and both have the same type and the same input size; repeated until nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from spindle.errors import WorkloadError
from spindle.graph.metagraph import MetaGraph, MetaOp
from spindle.workload import LayerCost, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One layer of one call. It may be merged with an operator of the same `type` and `input_size`."""

    name: str
    type: object
    input_size: object


def contract(operators: Sequence[Operator], edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The runs of operators to merge, each in flow order, ordered by their first operator."""
    out_degree = [0] * len(operators)
    in_degree = [0] * len(operators)
    for producer, consumer in edges:
        out_degree[producer] += 1
        in_degree[consumer] += 1
    # Producer → the consumer that continues its run; degrees of one at both ends make it unique.
    following: dict[int, int] = {}
    for producer, consumer in edges:
        first, second = operators[producer], operators[consumer]
        is_same = first.type == second.type and first.input_size == second.input_size
        if is_same and out_degree[producer] == 1 and in_degree[consumer] == 1:
            following[producer] = consumer
    continued = set(following.values())
    runs = []
    for start in range(len(operators)):
        if start in continued:
            continue
        run = [start]
        while run[-1] in following:
            run.append(following[run[-1]])
        runs.append(run)
    if sum(map(len, runs)) != len(operators):
        in_cycle = set(range(len(operators))) - {operator for run in runs for operator in run}
        raise WorkloadError(f"the flows form a cycle through {operators[min(in_cycle)].name}")
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """The layer of the workload that an operator stands for."""

    task: str
    batch_size: int
    call: str
    module: str
    position: int
    cost: LayerCost
    parameters: tuple[int, ...]


def metagraph_of(workload: Workload) -> MetaGraph:
    """Contract the tasks of a workload to one MetaGraph."""
    parameter_position = {parameter.name: position for position, parameter in enumerate(workload.parameters)}
    modules = {module.name: module for module in workload.modules}
    operators: list[Operator] = []
    origins: list[_Origin] = []
    edges: list[tuple[int, int]] = []
    ends: dict[str, tuple[int, int]] = {}  # first and last layer of each call, by `task/call`
    order_edges: list[tuple[int, int]] = []
    last_with: dict[str, int] = {}  # by state: the last layer of the last call so far that changes it
    for task in workload.tasks:
        for call in task.calls:
            if call.same_as:
                ends[f"{task.name}/{call.name}"] = ends[call.same_as]
                continue
            costs = dict(call.costs)
            first = len(operators)
            for position, layer in enumerate(modules[call.module].layers):
                cost = costs[layer.kind]
                weights = [workload.parameters[parameter_position[name]] for name in layer.parameters]
                sizes = tuple((weight.num_elements, weight.trainable) for weight in weights)
                # Layers with equal parameter sizes, batch and cost are identical; equal cost implies equal input
                # shapes.
                operators.append(
                    Operator(
                        name=f"{task.name}/{call.name}[{position}]",
                        type=(call.module, layer.kind, sizes),
                        input_size=(task.batch_size, cost),
                    )
                )
                origins.append(
                    _Origin(
                        task=task.name,
                        batch_size=task.batch_size,
                        call=call.name,
                        module=call.module,
                        position=position,
                        cost=cost,
                        parameters=tuple(parameter_position[name] for name in layer.parameters),
                    )
                )
                if position:
                    edges.append((len(operators) - 2, len(operators) - 1))
            ends[f"{task.name}/{call.name}"] = (first, len(operators) - 1)
            for state in dict.fromkeys(cost.state for cost in costs.values() if cost.state):
                if state in last_with:
                    order_edges.append((last_with[state], first))
                last_with[state] = len(operators) - 1
        is_computed = {call.name: not call.same_as for call in task.calls}
        edges += [
            (ends[f"{task.name}/{producer}"][1], ends[f"{task.name}/{consumer}"][0])
            for producer, consumer in task.flows
            if is_computed[consumer]
        ]

    # Contract, then name each operator's run, so that edges between operators become edges between runs.
    runs = [piece for run in contract(operators, edges) for piece in _cut_at_calls(run, origins)]
    run_of = {operator: number for number, run in enumerate(runs) for operator in run}
    data = dict.fromkeys((run_of[a], run_of[b]) for a, b in edges if run_of[a] != run_of[b])
    return MetaGraph(
        name=workload.name,
        metaops=tuple(_metaop([origins[operator] for operator in run]) for run in runs),
        edges=tuple(data),
        order_edges=tuple((run_of[a], run_of[b]) for a, b in order_edges if (run_of[a], run_of[b]) not in data),
        parameters=workload.parameters,
        numerics=workload.numerics,
        remarks=workload.remarks,
    )


def _cut_at_calls(run: list[int], origins: list[_Origin]) -> list[list[int]]:
    """Keep a MetaOp inside one call: a module whose output feeds another call of itself gives two MetaOps."""
    pieces: list[list[int]] = [[run[0]]]
    for before, operator in pairwise(run):
        if origins[operator].call != origins[before].call:
            pieces.append([])
        pieces[-1].append(operator)
    return pieces


def _metaop(run: list[_Origin]) -> MetaOp:
    first = run[0]
    return MetaOp(
        name=f"{first.task}/{first.call}[{first.position}:{first.position + len(run)}]",
        num_layers=len(run),
        task=first.task,
        batch_size=first.batch_size,
        module=first.module,
        call=first.call,
        first_layer=first.position,
        cost=first.cost,
        parameters=tuple(origin.parameters for origin in run),
    )
