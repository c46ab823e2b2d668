"""From tasks to MetaOps: unfold every call into its layers, then contract runs of identical ones.

§3.1 of the Spindle paper: operators i and j merge when the edge between them is the only one out of i and the only one
into j, and both have the same type and the same input size. Applied until nothing changes.
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
    """One layer of one call. `type` and `input_size` decide what it may merge with."""

    name: str
    type: object
    input_size: object


def contract(operators: Sequence[Operator], edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Runs of operators to merge, each in flow order, ordered by their first operator."""
    out_degree = [0] * len(operators)
    in_degree = [0] * len(operators)
    for producer, consumer in edges:
        out_degree[producer] += 1
        in_degree[consumer] += 1
    following: dict[int, int] = {}
    for producer, consumer in edges:
        first, second = operators[producer], operators[consumer]
        alike = first.type == second.type and first.input_size == second.input_size
        if alike and out_degree[producer] == 1 and in_degree[consumer] == 1:
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
        looped = set(range(len(operators))) - {operator for run in runs for operator in run}
        raise WorkloadError(f"the flows form a cycle through {operators[min(looped)].name}")
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where an operator stands in the workload."""

    task: str
    batch_size: int
    call: str
    module: str
    position: int
    cost: LayerCost
    parameters: tuple[int, ...]


def metagraph_of(workload: Workload) -> MetaGraph:
    """Contracts a workload's tasks into one MetaGraph."""
    parameter_position = {parameter.name: position for position, parameter in enumerate(workload.parameters)}
    modules = {module.name: module for module in workload.modules}
    operators: list[Operator] = []
    places: list[_Place] = []
    edges: list[tuple[int, int]] = []
    for task in workload.tasks:
        ends: dict[str, tuple[int, int]] = {}
        for call in task.calls:
            costs = dict(call.costs)
            first = len(operators)
            for position, layer in enumerate(modules[call.module].layers):
                cost = costs[layer.kind]
                weights = [workload.parameters[parameter_position[name]] for name in layer.parameters]
                sizes = tuple((weight.num_elements, weight.trainable) for weight in weights)
                # Layers with the same weights' sizes, batch and cost are alike; the cost stands for the input's shape.
                operators.append(
                    Operator(
                        name=f"{task.name}/{call.name}[{position}]",
                        type=(call.module, layer.kind, sizes),
                        input_size=(task.batch_size, cost),
                    )
                )
                places.append(
                    _Place(
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
            ends[call.name] = (first, len(operators) - 1)
        edges += [(ends[producer][1], ends[consumer][0]) for producer, consumer in task.flows]

    runs = [piece for run in contract(operators, edges) for piece in _cut_at_calls(run, places)]
    run_of = {operator: number for number, run in enumerate(runs) for operator in run}
    return MetaGraph(
        name=workload.name,
        metaops=tuple(_metaop([places[operator] for operator in run]) for run in runs),
        edges=tuple(dict.fromkeys((run_of[a], run_of[b]) for a, b in edges if run_of[a] != run_of[b])),
        parameters=workload.parameters,
        numerics=workload.numerics,
    )


def _cut_at_calls(run: list[int], places: list[_Place]) -> list[list[int]]:
    """A MetaOp stays inside one call: a module fed straight into itself gives two, which share parameters."""
    pieces: list[list[int]] = [[run[0]]]
    for before, operator in pairwise(run):
        if places[operator].call != places[before].call:
            pieces.append([])
        pieces[-1].append(operator)
    return pieces


def _metaop(run: list[_Place]) -> MetaOp:
    head = run[0]
    return MetaOp(
        name=f"{head.task}/{head.call}[{head.position}:{head.position + len(run)}]",
        num_layers=len(run),
        task=head.task,
        batch_size=head.batch_size,
        module=head.module,
        call=head.call,
        first_layer=head.position,
        cost=head.cost,
        parameters=tuple(place.parameters for place in run),
    )
