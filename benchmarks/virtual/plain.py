"""What a user would do today: torch's DDP over all ranks, one task after another, without Spindle.

Towers, losses, batches and optimizer are those of the workload. Every rank takes its part of each task's rows. A
contrastive loss is then over these rows alone, which is not the loss of the whole batch: it is cheaper, because
nothing is gathered, and favours these variants a little.

A step runs forward and backward task by task, so that the activations of one task at a time are alive. Gradients add up
under `no_sync()` until the last task, whose backward synchronises all of them. DDP finds the towers that this task does
not use (`find_unused_parameters`): they are ready before that backward begins, so the task with most parameters comes
last, and its towers stand first in the wrapped module, because DDP reduces its buckets from the end. The other way, one
sum of all losses with one backward, overlaps no more and does not fit in memory from CLIP-10 at 32 samples on.
Gradients live in DDP's buckets (`gradient_as_bucket_view`) and are zeroed in place, which saves a copy.

    ddp-eager     as it is
    ddp-graphed   every tower with blocks behind `make_graphed_callables`, one graph for each shape of its input
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spindle.run import World
from spindle.train.task import Mean
from virtual.workloads import Batch, Task, Towers, Workload

VARIANTS = ("ddp-eager", "ddp-graphed")
LEARNING_RATE = 1e-4
_SPARE_BYTES = 1 << 30  # for what a step takes beside state and graphs
_WARM_UP_ITERATIONS = 3  # before a capture; DDP's 11 are for captures that hold its collectives, ours come before it

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainResult:
    """Seconds of each step, the slowest rank's; losses of the last step, means over ranks; largest memory by rank."""

    step_s: tuple[float, ...]
    losses: dict[str, float]
    peak_bytes: tuple[int, ...]
    num_graphs: int
    num_eager: int  # calls for whose graph there was no memory left


def make_optimizer(named: Named) -> torch.optim.Optimizer:
    """AdamW with its state in the type of the weights; for Spindle's variants, too."""
    parameters = [parameter for _, parameter in named]
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=parameters[0].is_cuda)


def measure_plain(workload: Workload, variant: str, world: World, warm_up: int, steps: int) -> PlainResult:
    """Trains for some steps and times them."""
    batches = _parts(workload, world)
    tasks = in_order(workload)
    graphs = _Graphs(workload.towers)
    if variant == "ddp-graphed":
        world.barrier()  # nothing may be on its way between ranks while graphs are captured
        graphs.capture(tasks, batches)
    wrapped = _wrapped(workload.towers, graphs.towers(), tasks, world)
    optimizer = make_optimizer(list(wrapped.named_parameters()))
    losses: dict[str, Tensor] = {}
    step_s = []
    for number in range(warm_up + steps):
        if number == warm_up and world.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begin = _clock(world)
        losses = _step(wrapped, optimizer, tasks, {name: few[number % len(few)] for name, few in batches.items()})
        step_s.append(_ended(world) - begin)
    slowest_s = [max(times) for times in zip(*_from_all(world, step_s), strict=True)]
    by_rank = _from_all(world, {name: float(loss) for name, loss in losses.items()})
    return PlainResult(
        step_s=tuple(slowest_s),
        losses={
            task.name: sum(rank_losses[task.name] for rank_losses in by_rank) / world.size for task in workload.tasks
        },
        peak_bytes=_peak_bytes(world, bool(graphs.captured)),
        num_graphs=len(graphs.captured),
        num_eager=graphs.num_eager,
    )


def in_order(workload: Workload) -> list[Task]:
    """The tasks in the order in which they run: that with most parameters last."""

    def weight(task: Task) -> int:
        return sum(parameter.numel() for name in task.towers for parameter in workload.towers[name].parameters())

    return sorted(workload.tasks, key=weight)


class Together(nn.Module):
    """All towers as one module, whose forward is one task's loss."""

    def __init__(self, towers: Mapping[str, nn.Module], called: Towers, tasks: list[Task]) -> None:
        super().__init__()
        names = dict.fromkeys((*tasks[-1].towers, *towers))
        self.all_towers = nn.ModuleDict({name: towers[name] for name in names})
        self._called, self._tasks = called, {task.name: task for task in tasks}

    def forward(self, task: str, batch: Batch) -> Tensor:
        loss = self._tasks[task].loss(self._called, batch)
        return loss.total / loss.count if isinstance(loss, Mean) else loss


def _wrapped(towers: Mapping[str, nn.Module], called: Towers, tasks: list[Task], world: World) -> nn.Module:
    together = Together(towers, called, tasks)
    for parameter in together.parameters():
        # A first gradient would otherwise be a graph's own buffer, which its next replay writes over.
        parameter.grad = torch.zeros_like(parameter)
    if world.size == 1:
        return together
    uses_all = set(tasks[-1].towers) == set(towers)
    return DistributedDataParallel(together, find_unused_parameters=not uses_all, gradient_as_bucket_view=True)


def _step(
    wrapped: nn.Module, optimizer: torch.optim.Optimizer, tasks: list[Task], batches: Mapping[str, Batch]
) -> dict[str, Tensor]:
    losses = {}
    optimizer.zero_grad(set_to_none=False)
    for task in tasks:
        is_last = task is tasks[-1]
        alone = wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) and not is_last else nullcontext()
        with alone:
            loss = wrapped(task.name, batches[task.name])
            loss.backward()
        losses[task.name] = loss.detach()
    optimizer.step()
    return losses


def _parts(workload: Workload, world: World) -> dict[str, list[Batch]]:
    """This rank's rows of every batch."""
    parts = {}
    for task in workload.tasks:
        if task.batch_size % world.size:
            raise ValueError(f"task {task.name!r}: {task.batch_size} samples do not split over {world.size} ranks")
        share = task.batch_size // world.size
        rows = slice(world.rank * share, (world.rank + 1) * share)
        parts[task.name] = [{key: value[rows] for key, value in batch.items()} for batch in workload.batches[task.name]]
    return parts


Shapes = tuple[tuple[int, ...], ...]


@contextmanager
def _captures_beside_transfers() -> Iterator[None]:
    """Inside, a capture minds what its own thread does alone: the thread that moves data uses the GPU, too."""
    begin = torch.cuda.graph.__init__
    before = begin.__defaults__
    begin.__defaults__ = tuple("thread_local" if value == "global" else value for value in before or ())
    try:
        yield
    finally:
        begin.__defaults__ = before


class _Call(nn.Module):
    """A tower at one shape of its input: what is graphed, while the tower itself stays as it is."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, *inputs: Tensor) -> Any:
        return self.tower(*inputs)


@dataclass(slots=True)
class _Graphs:
    """Graphs of towers by the shapes of their inputs.

    Each holds its activations and a gradient of every parameter for good, so a task uses the graphs of another that has
    the same shapes, and where memory ends the rest stays eager. Towers without blocks (look-ups of words) stay eager:
    a task may call them twice, and a graph's second forward writes over the first.
    """

    modules: Mapping[str, nn.Module]
    captured: dict[tuple[str, Shapes], Callable[..., Any]] = field(default_factory=dict)
    num_eager: int = 0

    def capture(self, tasks: list[Task], batches: Mapping[str, list[Batch]]) -> None:
        inputs: dict[tuple[str, Shapes], tuple[Tensor, ...]] = {}
        kept_bytes: dict[tuple[str, Shapes], int] = {}
        for task in tasks:
            task.loss(self._noting(inputs, kept_bytes), batches[task.name][0])
        for key, sample in inputs.items():
            tower = self.modules[key[0]]
            gradients = sum(parameter.numel() * parameter.element_size() for parameter in tower.parameters())
            if kept_bytes[key] + gradients > self._free_bytes():
                self.num_eager += 1
                continue
            # A pool for each: the activations of two towers are alive at once, in whatever order they run.
            with _captures_beside_transfers():
                self.captured[key] = torch.cuda.make_graphed_callables(
                    _Call(tower), sample, num_warmup_iters=_WARM_UP_ITERATIONS
                )

    def towers(self) -> Towers:
        """Towers to call: a graph where there is one for these shapes."""
        return {name: self._replaying(name, tower) for name, tower in self.modules.items()}

    def _replaying(self, name: str, tower: nn.Module) -> Callable[..., Any]:
        return lambda *inputs: self.captured.get((name, _shapes(inputs)), tower)(*inputs)

    def _noting(
        self, inputs: dict[tuple[str, Shapes], tuple[Tensor, ...]], kept_bytes: dict[tuple[str, Shapes], int]
    ) -> Towers:
        """Towers that note what they are called with, and how much they keep for backward."""

        def noting(name: str, tower: nn.Module) -> Callable[..., Any]:
            def call(*tensors: Tensor) -> Any:
                before = torch.cuda.memory_allocated()
                result = tower(*tensors)
                key = (name, _shapes(tensors))
                if key not in inputs and hasattr(tower, "blocks"):
                    inputs[key] = tuple(
                        tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors
                    )
                    kept_bytes[key] = torch.cuda.memory_allocated() - before
                return result

            return call

        return {name: noting(name, tower) for name, tower in self.modules.items()}

    def _free_bytes(self) -> int:
        """What is left of this rank's share beside a gradient and two moments of every parameter, still to come."""
        torch.cuda.empty_cache()
        share = torch.cuda.get_device_properties().total_memory * torch.cuda.get_per_process_memory_fraction()
        parameters = {id(parameter): parameter for tower in self.modules.values() for parameter in tower.parameters()}
        to_come = 3 * sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
        return int(share) - torch.cuda.memory_reserved() - to_come - _SPARE_BYTES


def _shapes(inputs: tuple[Tensor, ...]) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in inputs)


def _clock(world: World) -> float:
    """The time at which all ranks begin a step."""
    _ended(world)
    world.barrier()
    return time.perf_counter()


def _ended(world: World) -> float:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_bytes(world: World, graphed: bool) -> tuple[int, ...]:
    """The largest memory of each rank. What a graph keeps between its forward and backward counts as reserved alone."""
    if world.device.type != "cuda":
        return ()
    most = torch.cuda.max_memory_reserved() if graphed else torch.cuda.max_memory_allocated()
    return tuple(_from_all(world, most))


def _from_all(world: World, value: Any) -> list[Any]:
    """What every rank has, on all of them."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value, group=world.control)
    return values
