"""Small torch workloads for tests, and one rank's part of running them. Imported by every process of the pool."""

from __future__ import annotations

import os
import random
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from io import StringIO
from itertools import islice
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import spindle
from backends import graphs_enabled, graphs_on_any_device, rank_device, to_device
from budgets import train_within
from changing import change
from combined import combine
from courses import evaluated, follow, read_by_towers_alone, read_samples, unmeasured
from differences import changing_alone, differing
from microbatches import against_torch, run_pipeline, train_shared_in_passes
from scenes import SCENES
from spindle.cluster import Link, cluster_named
from spindle.graph import MetaGraph, metagraph_of
from spindle.measure import machine, overlap
from spindle.measure.p2p_latency import measure_p2p_latency
from spindle.measure.rank_sync import RankSync
from spindle.measure.timing import Work
from spindle.plan import Plan, check, parse_plan
from spindle.planners import PlanOptions, make_plan
from spindle.profile import Profile, roofline_profile
from spindle.program import lower, verify
from spindle.run import Executor, OpCode, World, held_parameters
from spindle.run.pytrees import signature_of
from spindle.train import Bound, FitResult, bind, code_of, mean, module, probe, task, trace_all, trace_broadcast
from spindle.train.record import handles_of, parameter_names, record_all
from spindle.train.task import ModuleHandle
from tensors import refusal_of, train_shared
from zoo import Block, Tower, Workload, one_kind, random_workload

__all__ = [
    "Block",
    "Tower",
    "against_torch",
    "batches",
    "change",
    "changing_alone",
    "combine",
    "differing",
    "evaluated",
    "everything",
    "follow",
    "read_by_towers_alone",
    "read_samples",
    "refusal_of",
    "run_pipeline",
    "train_shared",
    "train_shared_in_passes",
    "train_within",
]


def everything():
    """Shared, frozen, tied and twice-called modules; branching flows; whole-batch, token-mean, per-sample losses."""
    torch.manual_seed(0)
    vision, text = module("vision", Tower(4, 8, 3).double()), module("text", Tower(3, 8, 2).double())
    language = module("lm", Tower(8, 8, 3).double())
    head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    head[0].weight = language.module.blocks[0].linear.weight  # tied
    head = module("head", head)
    frozen = module("frozen", Tower(8, 8, 2).double())
    for parameter in frozen.module.parameters():
        parameter.requires_grad_(False)

    @task(batch_size=7)
    def contrast(batch):
        a = F.normalize(vision(batch["x"]), dim=-1)
        b = F.normalize(text(batch["y"]), dim=-1)
        return F.cross_entropy(a @ b.T * 5, torch.arange(a.shape[0], device=a.device))

    @task(batch_size=5, weight=0.5)
    def question(batch):
        seen = vision(batch["x"])
        answer = head(language(seen + text(batch["y"]))) + frozen(seen)
        loss = ((answer - batch["z"]) ** 2).mean(-1)
        return mean((loss * batch["m"]).sum(), batch["m"].sum())

    @task(batch_size=4, per_sample_mean=True)
    def plain(batch):
        return (language(language(batch["z"])) ** 2).mean()

    return [contrast, question, plain]


def batches(seed: int):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kept = (torch.rand(5, generator=generator) > 0.4).double()
    kept[0] = 1.0
    return {
        "contrast": {"x": normal(7, 4), "y": normal(7, 3)},
        "question": {"x": normal(5, 4), "y": normal(5, 3), "z": normal(5, 8), "m": kept},
        "plain": {"z": normal(4, 8)},
    }


def workload_named(name: str, dtype: torch.dtype = torch.float64, weights: int | None = None) -> Workload:
    """`everything`, a scene, `hf T5`, `random 12`, or `in-place tokens`: a module of one kind under one loss."""
    if name == "everything":
        return Workload(tasks=everything(), batches=batches)
    if name in SCENES:
        return SCENES[name]()
    if name.startswith("hf "):
        return import_module("hugging").WORKLOADS[name]()  # which takes a while to import
    kind, _, last = name.rpartition(" ")
    if kind == "random":
        return random_workload(int(last), dtype, weights)
    return one_kind(kind, last, dtype=dtype)


# One process, plain PyTorch.


def plain_losses(tasks, step_batches) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The losses of tasks, by calling their functions, and what is minimised."""
    losses = {}
    for one in tasks:
        result = one(step_batches[one.name])
        losses[one.name] = result.total / result.count if isinstance(result, tuple) else result
    return losses, sum(one.weight * losses[one.name] for one in tasks)


def handles_in(workload: Workload) -> dict[str, ModuleHandle]:
    return handles_of(record_all(workload.tasks, workload.batches(0)))


def unique_parameters(handles: Mapping[str, ModuleHandle]) -> dict[str, nn.Parameter]:
    """Every parameter of modules once, under its first name."""
    names = parameter_names(handles)
    return {names[id(one)]: one for handle in handles.values() for one in handle.module.parameters()}


def floor_of(tensors: Sequence[torch.Tensor]) -> float:
    """DESIGN's first promise: below this norm an error is not taken relative to its own tensor."""
    return 1e-3 * float(torch.stack([one.norm() for one in tensors]).norm()) / len(tensors) ** 0.5


def error_of(ours: torch.Tensor, theirs: torch.Tensor, floor: float) -> float:
    return float((ours - theirs).norm() / max(float(theirs.norm()), floor))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A step of one process; a gradient is None where PyTorch leaves none."""

    losses: dict[str, float]
    gradients: dict[str, torch.Tensor | None]


@cache
def reference(name: str, step: int) -> Reference:
    workload = workload_named(name)
    handles = handles_in(workload)
    nn.ModuleList([one.module for one in handles.values()]).to(rank_device())
    losses, total = plain_losses(workload.tasks, to_device(workload.batches(step)))
    total.backward()
    gradients = {path: parameter.grad for path, parameter in unique_parameters(handles).items()}
    return Reference(
        losses={task_name: loss.item() for task_name, loss in losses.items()},
        gradients={path: None if one is None else one.cpu() for path, one in gradients.items()},
    )


# Plans.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A workload traced and bound, with its weights as they were made."""

    workload: Workload
    bound: Bound
    graph: MetaGraph
    code: list[OpCode]
    weights: dict[str, torch.Tensor]

    def profile(self, num_ranks: int) -> Profile:
        return roofline_profile(self.graph, cluster_named(f"cpux{num_ranks}"))


_READY: dict[tuple[str, str], Ready] = {}  # what this process has seen


def ready(name: str, device: str = "cpu") -> Ready:
    if (name, device) not in _READY:
        workload = workload_named(name)
        examples = to_device(workload.batches(0), device)
        traced = trace_all(workload.tasks, examples, torch.device(device))
        _READY[name, device] = _bound(name, workload, traced, probe(traced, examples))
    return _READY[name, device]


def ready_on_all(rank: int, num_ranks: int, name: str, device: str) -> Ready:
    """The same on all ranks: what rank 0 has traced, as the Trainer hands it to the others."""
    if num_ranks > 1:
        known = [False] * num_ranks
        dist.all_gather_object(known, (name, device) in _READY)
        if not all(known):
            box: list[Any] = [None]
            if rank == 0:
                found = ready(name, device).bound
                box = [(trace_broadcast._message_of(list(found.tasks.values())), found.facts)]
            dist.broadcast_object_list(box, src=0)
            if not known[rank] and rank:
                (chains, messages), facts = box[0]
                workload = workload_named(name)
                examples = to_device(workload.batches(0), device)
                recorded = record_all(workload.tasks, examples)
                nn.ModuleList([one.module for one in handles_of(recorded).values()]).to(device)
                world = World(rank, num_ranks, torch.device(device))
                traced = trace_broadcast._rebuild(recorded, examples, chains, messages, world)
                _READY[name, device] = _bound(name, workload, traced, facts)
    return ready(name, device)


def _bound(name: str, workload: Workload, traced: Sequence[Any], facts: Any) -> Ready:
    bound = bind(name, traced, facts)
    graph = metagraph_of(bound.workload)
    return Ready(
        workload=workload,
        bound=bound,
        graph=graph,
        code=[code_of(bound, op) for op in graph.metaops],
        weights={path: parameter.detach().clone() for path, parameter in bound.parameters.items()},
    )


def random_plan_text(profile: Profile, planner: str) -> str:
    """Some legal plan: ops cut anywhere, on any devices in any order, as the flows allow; some rounds, some recomputed.

    `plan 3` is one, `plan 3 recomputed` the same with everything recomputed. Starts are far apart, so that the plan is
    legal under any profile of the workload.
    """
    choose = random.Random(int(planner.split()[1]))
    graph = profile.graph
    tasks = choose.sample(graph.tasks, len(graph.tasks))
    num_rounds = choose.choice((1, 1, min(2, len(tasks)), len(tasks)))
    round_of = {name: number * num_rounds // len(tasks) for number, name in enumerate(tasks)}
    share = choose.choice((0.0, 0.0, 0.7))
    recomputed = [op for op in graph.metaops if choose.random() < share]
    lines = [f"# recompute {op.name}" for op in (graph.metaops if planner.endswith("recomputed") else recomputed)]
    wave = 0
    for round_number in range(num_rounds):
        left = {
            position: op.num_layers for position, op in enumerate(graph.metaops) if round_of[op.task] == round_number
        }
        while left:
            able = [one for one in left if not any(source in left for source in graph.predecessors[one])]
            free = choose.sample(range(profile.cluster.num_devices), profile.cluster.num_devices)
            slots = []
            for position in choose.sample(able, choose.randint(1, len(able))):
                counts = [count for count in profile.curves[position][0].num_devices if count <= len(free)]
                if not counts:
                    break
                count, layers = choose.choice(counts), choose.randint(1, left[position])
                devices, free = free[:count], free[count:]
                slots.append(
                    f"{graph.metaops[position].name}*{layers}@{','.join(map(str, devices))}~{round_number}^{wave}000"
                )
                left[position] -= layers
                if not left[position]:
                    del left[position]
            lines.append(" ".join(slots))
            wave += 1
    return "\n".join(lines)


def plan_of(one: Ready, planner: str, num_ranks: int) -> tuple[Plan, Profile]:
    """The plan of a planner, or a random one. Rank 0's, on all ranks."""
    profile = one.profile(num_ranks)
    if planner.startswith("plan "):
        return parse_plan(random_plan_text(profile, planner), profile), profile
    return of_rank_0(num_ranks, lambda: make_plan(profile, planner, PlanOptions(evaluations=1_000))), profile


def of_rank_0(num_ranks: int, make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on all ranks: cores are fewer than ranks."""
    box = [make() if num_ranks == 1 or dist.get_rank() == 0 else None]
    if num_ranks > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


# One rank's part.


def fail_on_rank(rank: int, num_ranks: int, failing: int | None) -> None:
    """All ranks meet, but for one that raises."""
    if rank == failing:
        raise ValueError(f"what rank {rank} says")
    dist.barrier()


def hang_on_rank(rank: int, num_ranks: int, hanging: int | None) -> None:
    """Runs a barrier on all ranks, but for one that sleeps."""
    if rank == hanging:
        time.sleep(600)
    dist.barrier()


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far a rank is from the reference, at most; which gradients it compared, of which there are; how many layers
    the longest module has."""

    loss: float
    gradient: float
    worst: str
    captured: int  # slots, in CUDA graphs
    without_graph: dict[str, str]
    compared: frozenset[str]
    expected: frozenset[str]
    most_layers: int


STEPS_WITH_REPLAY = 6  # one that checks losses, two launched one by one, one captured, two replayed


@contextmanager
def chunks_of(num_bytes: float) -> Iterator[None]:
    """Backward is handed on in chunks of this size."""
    lowering: Any = import_module("spindle.program.lower")  # the package's own `lower` is the function
    before, lowering.CHUNK_BYTES = lowering.CHUNK_BYTES, num_bytes
    try:
        yield
    finally:
        lowering.CHUNK_BYTES = before


def steps_alike(workload: Workload, count: int) -> list[int]:
    """Numbers of steps whose batches have the shapes of the first."""
    first = {task_name: signature_of(batch) for task_name, batch in workload.batches(0).items()}
    alike = (
        number
        for number in range(1000)
        if {task_name: signature_of(batch) for task_name, batch in workload.batches(number).items()} == first
    )
    return list(islice(alike, count))


def compare_replayed(rank: int, num_ranks: int, name: str, planner: str, steps: int, chunk_bytes: float) -> Errors:
    """Runs steps of a plan as on a GPU: launched one by one, then captured, then replayed."""
    with graphs_on_any_device():
        return compare_steps(rank, num_ranks, name, planner, steps, chunk_bytes, captures=True)


def compare_steps(
    rank: int,
    num_ranks: int,
    name: str,
    planner: str,
    steps: int,
    chunk_bytes: float = 64e6,
    device: str | None = None,
    captures: bool = False,
) -> Errors:
    """Runs steps of a plan. What this rank does not hold is not a number, so that it cannot help.

    Steps to capture have batches of the same shapes. On a GPU all steps are, unless graphs are off.
    """
    device = str(rank_device()) if device is None else device
    if device != "cpu":
        captures = graphs_enabled()
        steps = max(steps, STEPS_WITH_REPLAY) if captures else steps
    one = ready_on_all(rank, num_ranks, name, device)
    plan, profile = plan_of(one, planner, num_ranks)
    check(plan, profile)
    with chunks_of(chunk_bytes):
        program = lower(plan, profile)
    verify(program, profile)
    names = [parameter.name for parameter in one.graph.parameters]
    reached = one.bound.facts.reached
    assert reached is not None
    executor = Executor(
        program,
        one.graph,
        one.code,
        [one.bound.parameters[path] for path in names],
        one.bound.batch_axes,
        World(rank, num_ranks, torch.device(device)),
        reached={
            task_name: frozenset(number for number, path in enumerate(names) if path in paths)
            for task_name, paths in reached.items()
        },
    )
    executor.graph_cache.is_enabled = captures
    held = {names[number] for number in executor.held}
    for path, parameter in one.bound.parameters.items():
        parameter.data.copy_(one.weights[path] if path in held else torch.tensor(torch.nan))
        parameter.grad = None
    loss_error, gradient_error, worst = 0.0, 0.0, ""
    for number in steps_alike(one.workload, steps) if captures else range(steps):
        step_batches = to_device(one.workload.batches(number), device)
        signatures = {task_name: signature_of(batch) for task_name, batch in step_batches.items()}
        losses, _ = executor.step(number, step_batches, signatures, check_losses=number == 0)
        parts = torch.tensor(losses.tolist(), dtype=torch.float64)
        if num_ranks > 1:
            dist.all_reduce(parts)
        expected = of_rank_0(num_ranks, lambda number=number: reference(name, number))
        for task_name, ours in zip(one.graph.tasks, parts.tolist(), strict=True):
            theirs = expected.losses[task_name]
            loss_error = max(loss_error, abs(ours - theirs) / max(abs(theirs), 1e-3))
        floor = floor_of([gradient for gradient in expected.gradients.values() if gradient is not None])
        for path in held:
            ours, theirs = one.bound.parameters[path].grad, expected.gradients[path]
            assert (ours is None) == (theirs is None), f"step {number}: {path}: {ours} where one process has {theirs}"
            if theirs is not None:
                error = error_of(ours.cpu(), theirs, floor)
                if not error <= gradient_error:
                    gradient_error, worst = error, f"{path} in step {number}"
    return Errors(
        loss=loss_error,
        gradient=gradient_error,
        worst=worst,
        captured=executor.num_captured,
        without_graph=dict(executor.without_graph),
        compared=frozenset(path for path in held if expected.gradients[path] is not None),
        expected=frozenset(path for path, gradient in expected.gradients.items() if gradient is not None),
        most_layers=max(len(handle.chain.layers) for handle in one.bound.handles.values()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """How far a rank is from plain PyTorch after training, at most."""

    loss: float
    parameter: float
    worst: str
    buffer: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a workload is trained, by Spindle and by plain PyTorch alike."""

    name: str
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float64
    fits: tuple[int, ...] = (3,)
    short_rows: int | None = None  # of the second of two batches that the loaders have
    own_weights: bool = False  # ranks start with weights of their own
    shards: bool = False  # the optimizer


LEARNING_RATE = 0.05


def make_optimizer(kind: str, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in named]
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.3)


def loaders_of(workload: Workload, training: Training, first: int, steps: int) -> dict[str, list[Any]]:
    """The batches of so many steps; with short ones, those of an epoch, which starts again after two."""
    if training.short_rows is None:
        return {
            one.name: [workload.batches(step)[one.name] for step in range(first, first + steps)]
            for one in workload.tasks
        }

    def cut(batch: dict, size: int) -> dict:
        rows = min(size, training.short_rows or size)
        return {
            key: leaf[:rows] if isinstance(leaf, torch.Tensor) and len(leaf) == size else leaf
            for key, leaf in batch.items()
        }

    return {
        one.name: [workload.batches(0)[one.name], cut(workload.batches(1)[one.name], one.batch_size)]
        for one in workload.tasks
    }


def train_plainly(
    workload: Workload, parameters: Mapping[str, nn.Parameter], training: Training
) -> list[dict[str, float]]:
    """One process, without Spindle; leaves the weights in the modules."""
    trainable = [(path, one) for path, one in parameters.items() if one.requires_grad]
    optimizer = make_optimizer(training.optimizer, trainable)
    steps = sum(training.fits)
    loaders = loaders_of(workload, training, 0, steps)
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        step_batches = {name: loader[step % len(loader)] for name, loader in loaders.items()}
        losses, total = plain_losses(workload.tasks, to_device(step_batches))
        total.backward()
        optimizer.step()
        history.append({name: loss.item() for name, loss in losses.items()})
    return history


def train(rank: int, num_ranks: int, training: Training, planner: str) -> Trained:
    """Trains through the public interface, and compares with plain PyTorch.

    A profile is measured only where the plan depends on it.
    """
    with unmeasured() if planner.startswith("plan ") else nullcontext():
        return train_measured(rank, num_ranks, training, planner)


def train_measured(rank: int, num_ranks: int, training: Training, planner: str) -> Trained:
    ours = workload_named(training.name, training.dtype, 100 + rank if training.own_weights and rank else None)
    recorded = record_all(ours.tasks, ours.batches(0))
    handles = handles_of(recorded)
    parameters = unique_parameters(handles)
    shapes = {path: one.shape for path, one in parameters.items()}
    filled: list[set[str]] = []

    def with_memory() -> set[str]:
        return {path for path, one in parameters.items() if one.shape == shapes[path]}

    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer = make_optimizer(training.optimizer, named)
        # And no copies, to measure with; a part of a parameter lies where the parameter does.
        if all(
            parameters[path].untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for path, one in named
        ):
            optimizer.register_step_post_hook(lambda *_: filled.append(with_memory()))
        return optimizer

    planning = spindle.Planning(planner=planner, shard_optimizer=training.shards or None)
    if planner.startswith("plan "):
        text = of_rank_0(num_ranks, lambda: random_plan_text(ready(training.name).profile(num_ranks), planner))
        planning = spindle.Planning(plan=text, shard_optimizer=training.shards or None)
    trainer = spindle.Trainer(ours.tasks, optimizer=make, planning=planning)
    history: list[dict[str, float]] = []
    for number, steps in enumerate(training.fits):
        loaders = loaders_of(ours, training, sum(training.fits[:number]), steps)
        result = trainer.fit(loaders, steps=steps, drop_last=training.short_rows is None, progress=False)
        history += result.losses
        check_memory(result, rank, num_ranks, filled, with_memory())
    nn.ModuleList([one.module for one in handles.values()]).cpu()
    theirs = workload_named(training.name, training.dtype)
    their_handles = handles_in(theirs)
    trained = unique_parameters(their_handles)
    # On the same device: Hugging Face models compute positions in float32, in which devices differ.
    their_modules = nn.ModuleList([one.module for one in their_handles.values()]).to(rank_device())
    expected = train_plainly(theirs, trained, training)
    their_modules.cpu()
    loss = max(
        abs(mine[name] - value) / max(abs(value), 1e-3)
        for mine, yours in zip(history, expected, strict=True)
        for name, value in yours.items()
    )
    # A user's own modules, and fresh ones that load what was trained.
    fresh_handles = handles_in(workload_named(training.name, training.dtype, 99))
    nn.ModuleDict({name: handle.module for name, handle in fresh_handles.items()}).load_state_dict(trainer.state_dict())
    parameter, worst = 0.0, ""
    floor = floor_of([one.detach() for one in trained.values()])
    for found in (parameters, unique_parameters(fresh_handles)):
        for path, one in trained.items():
            error = trained_error(training, found[path].detach(), one.detach(), floor)
            if not error <= parameter:
                parameter, worst = error, path
    # Of modules that are called once: where they are called more often, ranks do not meet.
    calls = [call.handle.name for one in recorded for call in one.calls]
    once = [name for name in handles if calls.count(name) == 1]
    return Trained(
        loss=loss,
        parameter=parameter,
        worst=worst,
        buffer=buffer_error(training, [(handles[name], their_handles[name]) for name in once]),
    )


def train_unmeasured(rank: int, num_ranks: int, training: Training, planner: str) -> Trained:
    """The same, from guessed times."""
    with unmeasured():
        return train(rank, num_ranks, training, planner)


def trained_error(training: Training, ours: torch.Tensor, theirs: torch.Tensor, floor: float) -> float:
    """Under Adam, with DESIGN's absolute floor: it makes steps of gradients that are zero in exact arithmetic."""
    error = error_of(ours, theirs, floor)
    if training.optimizer == "adamw":
        error = min(error, 1e-9 * float((ours - theirs).abs().max()) / (1e-6 * LEARNING_RATE))
    return error


def check_memory(result: FitResult, rank: int, num_ranks: int, filled: list[set[str]], after: set[str]) -> None:
    """A rank has the parameters of its slots, and those that no slot uses; every rank has all of them afterwards."""
    names = [one.name for one in result.graph.parameters]
    held = [{names[one] for one in held_parameters(result.program, result.graph, each)} for each in range(num_ranks)]
    expected = held[rank] | (set(names) - set().union(*held))
    assert all(one == expected for one in filled)
    if not result.plan.shard_optimizer:  # else all elements that it holds may be others' to update
        assert bool(filled) == any(result.graph.parameters[names.index(path)].trainable for path in held[rank])
    assert after == set(names)


def buffer_error(training: Training, pairs: Sequence[tuple[ModuleHandle, ModuleHandle]]) -> float:
    errors = [
        trained_error(training, one.double(), other.double(), 1e-3)
        for ours, theirs in pairs
        for one, other in zip(ours.module.buffers(), theirs.module.buffers(), strict=True)
    ]
    return max(errors, default=0.0)


def printed_by(rank: int, num_ranks: int, script: str, *arguments: str) -> str:
    """What a training script prints, run in the world of these ranks."""
    with redirect_stdout(StringIO()) as printed, mock.patch.object(sys, "argv", [script, *arguments]):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def sums_beside_compute(rank: int, num_ranks: int, failing: int | None = None) -> overlap.Overlap:
    """What is found about sums beside compute; on a rank that fails, the work does not run."""
    layer, x = torch.nn.Linear(64, 64, device=rank_device()), torch.randn(32, 64, device=rank_device())

    def run() -> torch.Tensor:
        if rank == failing:
            raise ValueError("not here")
        return layer(x)

    world = World(rank, num_ranks, rank_device())
    work = Work(run=run, leaves=(), parameters=tuple(layer.parameters()), device=world.device)
    link = Link(bytes_per_s=1e12, latency_s=1e-5, collective_s=1e-4)
    with mock.patch.multiple(overlap, _SMALL=1 << 12, _LARGE=1 << 18):
        return overlap.measure_overlap(work, RankSync(world, enabled=True), world, link, torch.float32)


def islands_of_nodes(rank: int, num_ranks: int, nodes: tuple[int, ...]) -> list[int]:
    """Devices of the islands that are found, on ranks of these nodes of torchrun."""
    world = World(rank, num_ranks, rank_device())
    with mock.patch.dict(os.environ, {"GROUP_RANK": str(nodes[rank])}):
        return [island.num_devices for island in machine._cluster(world, torch.float32).islands]


def hand_over_beside_compute(rank: int, num_ranks: int, failing: int | None = None, runs: int = 0) -> float | None:
    """What is found about hand-overs; on a rank that fails, the work does not run more often than so."""
    layer, x = torch.nn.Linear(64, 64, device=rank_device()), torch.randn(32, 64, device=rank_device())
    ran = 0

    def run() -> torch.Tensor:
        nonlocal ran
        ran += 1
        if rank == failing and ran > runs:
            raise ValueError("not here")
        return layer(x)

    world = World(rank, num_ranks, rank_device())
    work = Work(run=run, leaves=(), parameters=tuple(layer.parameters()), device=world.device)
    return measure_p2p_latency(work, world)


def launching_in_order(rank: int, num_ranks: int, function: str, *arguments: Any) -> Any:
    """One of the functions here, with communication launched as under NCCL: in one order on all ranks, and each
    exchange as a whole."""
    with mock.patch.object(World, "launches_in_order", True):
        return globals()[function](rank, num_ranks, *arguments)
