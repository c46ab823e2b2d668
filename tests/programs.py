"""Programs of random and planned plans, run by an `Executor` on every rank and compared with one process."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import islice
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from backends import graphs_enabled, graphs_on_any_device, rank_device, to_device
from comparison import Comparison
from random_plans import contended, plan_text_named, random_lane_plan
from spindle.cluster import cluster_named
from spindle.graph import MetaGraph, metagraph_of
from spindle.plan import Plan, check, parse_plan
from spindle.planners import PlanOptions, make_plan
from spindle.profile import Profile, roofline_profile
from spindle.program import Program, lower, verify
from spindle.run import Executor, OpCode, World, graph_cache
from spindle.run.pytrees import signature_of
from spindle.train import BoundWorkload, bind, code_of, probe, trace_all, trace_broadcast
from spindle.train.record import handles_of, record_all, root_handles
from spindle.train.task import Mean, TaskResult
from workloads import handles_in, unique_parameters, workload_named
from zoo import Workload

_launch_order: Any = import_module("spindle.program.launch_order")  # the package's own name is the function

STEPS_WITH_REPLAY = 6  # one that checks losses, two launched one by one, one captured, two replayed

# One process, plain PyTorch.


def loss_value(result: torch.Tensor | Mean | TaskResult) -> torch.Tensor:
    """The loss that a task's function stands for."""
    loss = result.loss if isinstance(result, TaskResult) else result
    return loss.total / loss.count if isinstance(loss, Mean) else loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A step of one process; a gradient is None where PyTorch leaves none."""

    losses: dict[str, float]
    gradients: dict[str, torch.Tensor | None]


@cache
def reference(name: str, step: int) -> Reference:
    workload = workload_named(name)
    handles = handles_in(workload)
    nn.ModuleList([handle.module for handle in root_handles(handles).values()]).to(rank_device())
    batches = to_device(workload.batches(step))
    losses = {task.name: loss_value(task(batches[task.name])) for task in workload.tasks}
    torch.stack([task.weight * losses[task.name] for task in workload.tasks]).sum().backward()
    gradients = {path: parameter.grad for path, parameter in unique_parameters(handles).items()}
    return Reference(
        losses={task_name: loss.item() for task_name, loss in losses.items()},
        gradients={path: None if gradient is None else gradient.cpu() for path, gradient in gradients.items()},
    )


# Workloads, traced and bound.


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWorkload:
    """A workload traced and bound, with its weights as they were made."""

    workload: Workload
    bound: BoundWorkload
    graph: MetaGraph
    code: list[OpCode]
    weights: dict[str, torch.Tensor]

    def profile(self, num_ranks: int) -> Profile:
        return roofline_profile(self.graph, cluster_named(f"cpux{num_ranks}"))


_TRACED: dict[tuple[str, str], TracedWorkload] = {}  # by name and device: a process of the pool serves many tests


def traced_workload(name: str, device: str = "cpu") -> TracedWorkload:
    if (name, device) not in _TRACED:
        workload = workload_named(name)
        examples = to_device(workload.batches(0), device)
        traced = trace_all(workload.tasks, examples, torch.device(device))
        _TRACED[name, device] = _bind(name, workload, traced, probe(traced, examples))
    return _TRACED[name, device]


def traced_on_rank_0(rank: int, num_ranks: int, name: str, device: str) -> TracedWorkload:
    """The workload as rank 0 has traced it, sent to the other ranks as the Trainer does."""
    if num_ranks > 1:
        has_it = [False] * num_ranks
        dist.all_gather_object(has_it, (name, device) in _TRACED)
        if not all(has_it):
            box: list[Any] = [None]
            if rank == 0:
                bound = traced_workload(name, device).bound
                box = [(trace_broadcast._message_of(list(bound.tasks.values())), bound.facts)]
            dist.broadcast_object_list(box, src=0)
            if not has_it[rank] and rank:
                (chains, messages), facts = box[0]
                workload = workload_named(name)
                examples = to_device(workload.batches(0), device)
                recorded = record_all(workload.tasks, examples)
                nn.ModuleList([handle.module for handle in root_handles(handles_of(recorded)).values()]).to(device)
                world = World(rank, num_ranks, torch.device(device))
                traced = trace_broadcast._rebuild(recorded, examples, chains, messages, world)
                _TRACED[name, device] = _bind(name, workload, traced, facts)
    return traced_workload(name, device)


def _bind(name: str, workload: Workload, traced: Sequence[Any], facts: Any) -> TracedWorkload:
    bound = bind(name, traced, facts)
    graph = metagraph_of(bound.workload)
    return TracedWorkload(
        workload=workload,
        bound=bound,
        graph=graph,
        code=[code_of(bound, op) for op in graph.metaops],
        weights={path: parameter.detach().clone() for path, parameter in bound.parameters.items()},
    )


# Plans.


def plan_named(traced: TracedWorkload, name: str, num_ranks: int) -> tuple[Plan, Profile]:
    """The plan of a planner, made on rank 0, or a random one."""
    profile = traced.profile(num_ranks)
    if name.startswith("plan ") and name.endswith("lanes"):
        profile = contended(profile)
        return random_lane_plan(profile, name), profile
    if name.startswith("plan "):
        return parse_plan(plan_text_named(profile, name), profile), profile
    return made_on_rank_0(num_ranks, lambda: make_plan(profile, name, PlanOptions(evaluations=1_000))), profile


def made_on_rank_0(num_ranks: int, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on all ranks: cores are fewer than ranks."""
    box = [make() if num_ranks == 1 or dist.get_rank() == 0 else None]
    if num_ranks > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


# One rank's part.


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one rank reports of the steps it ran."""

    comparison: Comparison
    captured: int  # slots, in CUDA graphs
    without_graph: dict[str, str]
    has_step_graph: bool  # whether whole steps are one graph
    region_sizes: list[int]  # how many passes are launched together, where they are not
    most_layers: int  # of a module


@contextmanager
def chunks_of(num_bytes: float) -> Iterator[None]:
    """Inside, a slot's backward is cut into instructions of this many bytes of gradients."""
    lowering: Any = import_module("spindle.program.lower")  # the package's own `lower` is the function
    before, lowering.CHUNK_BYTES = lowering.CHUNK_BYTES, num_bytes
    try:
        yield
    finally:
        lowering.CHUNK_BYTES = before


def steps_alike(workload: Workload, count: int) -> list[int]:
    """Numbers of steps whose batches have the shapes of the first."""
    first = {task: signature_of(batch) for task, batch in workload.batches(0).items()}
    alike = (
        number
        for number in range(1000)
        if {task: signature_of(batch) for task, batch in workload.batches(number).items()} == first
    )
    return list(islice(alike, count))


@contextmanager
def interleaved(program: Program, seed: int) -> Iterator[None]:
    """Inside, an executor of this program runs its compute lanes in a random order that respects them and what data
    needs. All ranks follow one order of all instructions, because a host that waits for a message launches no other
    lane meanwhile."""
    choose, count = random.Random(seed), len(program.instructions)
    followers: dict[int, list[int]] = defaultdict(list)
    num_needs = [0] * count
    for before, after in zip(*_launch_order._edges(program), strict=True):
        followers[before].append(after)
        num_needs[after] += 1
    ready = [number for number in range(count) if num_needs[number] == 0]
    place: dict[int, int] = {}
    while ready:
        number = ready.pop(choose.randrange(len(ready)))
        place[number] = len(place)
        for follower in followers[number]:
            num_needs[follower] -= 1
            if num_needs[follower] == 0:
                ready.append(follower)
    in_order = Program.compute_of_rank

    def shuffled(of: Program, rank: int) -> list[int]:
        return sorted(in_order(of, rank), key=place.__getitem__)

    with mock.patch.object(Program, "compute_of_rank", shuffled):
        yield


def executor_of(
    traced: Any,
    planner: str,
    rank: int,
    num_ranks: int,
    device: str,
    chunk_bytes: float = 64e6,
    order: int | None = None,
) -> Executor:
    """One rank's executor of a plan; with `order`, in a random interleaving of its lanes."""
    plan, profile = plan_named(traced, planner, num_ranks)
    check(plan, profile)
    with chunks_of(chunk_bytes):
        program = lower(plan, profile)
    verify(program, profile)
    with nullcontext() if order is None else interleaved(program, order):
        return _executor(traced, program, rank, num_ranks, device)


def _executor(traced: Any, program: Program, rank: int, num_ranks: int, device: str) -> Executor:
    names = [parameter.name for parameter in traced.graph.parameters]
    reached = traced.bound.facts.reached
    assert reached is not None
    return Executor(
        program,
        traced.graph,
        traced.code,
        [traced.bound.parameters[path] for path in names],
        traced.bound.batch_axes,
        World(rank, num_ranks, torch.device(device)),
        reached={
            task: frozenset(number for number, path in enumerate(names) if path in paths)
            for task, paths in reached.items()
        },
    )


def compare_steps(
    rank: int,
    num_ranks: int,
    name: str,
    planner: str,
    steps: int,
    chunk_bytes: float = 64e6,
    *,
    captures: bool = False,
    device: str | None = None,
    order: int | None = None,
    step_graphs: bool = True,
    regions: bool = True,
) -> Run:
    """Runs steps of a plan. Parameters that this rank does not hold are NaN, so that they cannot help. With `order`,
    lanes run in a random interleaving.

    With `captures`, steps have batches of the same shapes and run as on a GPU: launched one by one, then captured, then
    replayed. On a GPU all do, unless graphs are off.
    """
    device = str(rank_device()) if device is None else device
    if device != "cpu":
        captures = graphs_enabled()
        steps = max(steps, STEPS_WITH_REPLAY) if captures else steps
    traced = traced_on_rank_0(rank, num_ranks, name, device)
    with mock.patch.multiple(graph_cache, STEP_GRAPHS=step_graphs, REGIONS=regions):
        executor = executor_of(traced, planner, rank, num_ranks, device, chunk_bytes, order)
    names = [parameter.name for parameter in traced.graph.parameters]
    executor.graph_cache.is_enabled = captures
    held = {names[number] for number in executor.held}
    for path, parameter in traced.bound.parameters.items():
        parameter.data.copy_(traced.weights[path] if path in held else torch.tensor(torch.nan))
        parameter.grad = None
    comparison = Comparison()
    history, expected_history = [], []
    with graphs_on_any_device() if captures and device == "cpu" else nullcontext():
        for place, number in enumerate(steps_alike(traced.workload, steps) if captures else range(steps)):
            batches = to_device(traced.workload.batches(number), device)
            signatures = {task: signature_of(batch) for task, batch in batches.items()}
            # The first replay on a GPU is timed, pass by pass.
            timed = place < STEPS_WITH_REPLAY - 1
            losses, _ = executor.step(number, batches, signatures, check_losses=number == 0, timed=timed)
            summed = torch.tensor(losses.tolist(), dtype=torch.float64)
            if num_ranks > 1:
                dist.all_reduce(summed)
            expected = made_on_rank_0(num_ranks, lambda number=number: reference(name, number))
            history.append(dict(zip(traced.graph.tasks, summed.tolist(), strict=True)))
            expected_history.append(expected.losses)
            gradients = {path: traced.bound.parameters[path].grad for path in held}
            comparison.add_tensors("gradient", gradients, expected.gradients, f" in step {number}")
    comparison.add_losses(history, expected_history)
    return Run(
        comparison=comparison,
        captured=executor.graph_cache.num_captured,
        without_graph=dict(executor.graph_cache.refused),
        has_step_graph=executor.graph_cache.has_step_graph,
        region_sizes=executor.graph_cache.region_sizes,
        most_layers=max(len(handle.chain.layers) for handle in traced.bound.handles.values()),
    )
