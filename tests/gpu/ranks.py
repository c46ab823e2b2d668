"""What `virtual_devices` runs on every rank: `ranks.py PART [FILE]`, under `spindle launch --virtual-devices`."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import checks
import torch
import torch.distributed as dist

from spindle.run.world import World, join_world

TOWER_STEPS = 8
SIZES = (4, 1 << 20, 64 << 20, 256 << 20)


def run_checks(world: World) -> None:
    share = torch.cuda.get_device_properties(world.device).multi_processor_count
    if world.rank == 0:
        print(f"{world.size} ranks of {share} multiprocessors each", flush=True)
    for check in checks.CHECKS:
        begin_s = time.monotonic()
        check(world.device)
        torch.cuda.synchronize()
        dist.barrier()
        if world.rank == 0:
            print(f"{check.__name__}: {time.monotonic() - begin_s:.2f} s", flush=True)
    limit = torch.cuda.get_device_properties(world.device).total_memory // world.size
    said = ""
    try:
        torch.empty(limit, dtype=torch.uint8, device=world.device)
    except torch.OutOfMemoryError as error:
        said = str(error)
    assert "memory" in said, "a rank may take more than its share of the memory"


def run_towers(world: World) -> None:
    """Ten tasks over towers as deep as CLIP's, in float32: the weights of one process, whatever the plan. Gradients are
    such that others read them where they stand, messages have megabytes.

    Losses would not show it: towers that nobody has trained give all samples nearly the same place.
    """
    sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
    import spindle
    from spindle.planners import PlanOptions, make_plan
    from virtual import models, workloads

    smaller = models.small_sizes

    def deep(sizes: models.Sizes) -> models.Sizes:
        return replace(
            smaller(sizes), num_layers=sizes.num_layers, width=256 if sizes.width > 768 else 128, num_heads=4
        )

    models.small_sizes, workloads._dtype = deep, lambda device: torch.float32
    if world.device.type == "cuda":
        workloads._length = lambda tokens, small: tokens
    workload = workloads.build("clip-10-16", world.device, small=True)
    before = _weights(workload)
    _train_alone(workload)
    expected = _weights(workload)
    trainer = spindle.Trainer(workload.spindle_tasks(), optimizer=_make_sgd, name="towers")
    trainer.prepare(workload.batches, progress=False)
    for what in ("wavefront", "paper", "task-level", "sequential", "wavefront sharded", "sequential sharded"):
        planner, _, sharded = what.partition(" ")
        models.initialise(workload.towers, workloads.SEED)
        plan = None
        if sharded:
            plan = make_plan(trainer.profile, planner, PlanOptions(seed=0, shard_optimizer=True))
        trainer.replan(planner=planner, plan=plan, keep_optimizer=False)
        result = trainer.fit(workload.batches, steps=TOWER_STEPS, progress=False)
        assert result.plan.shard_optimizer == bool(sharded)
        errors = {
            name: float((moved - expected[name]).norm() / (expected[name] - before[name]).norm())
            for name, moved in _weights(workload).items()
        }
        if world.rank == 0:
            print(what, " ".join(f"{name} {error:.1e}" for name, error in errors.items()), flush=True)
        assert all(error < 1e-3 for error in errors.values()), (what, errors)


def _make_sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.01, momentum=0.9)


def _weights(workload: Any) -> dict[str, torch.Tensor]:
    """Of each tower, as one vector."""
    return {
        name: torch.cat([parameter.detach().flatten() for parameter in tower.parameters()])
        for name, tower in workload.towers.items()
    }


def _train_alone(workload: Any) -> None:
    """The same steps by this rank alone, in plain PyTorch."""
    parameters = [
        (name, parameter) for tower in workload.towers.values() for name, parameter in tower.named_parameters()
    ]
    optimizer = _make_sgd(parameters)
    for number in range(TOWER_STEPS):
        optimizer.zero_grad()
        for task in workload.tasks:
            batches = workload.batches[task.name]
            task.loss(workload.towers, batches[number % len(batches)]).backward()
        optimizer.step()
    optimizer.zero_grad()


def kill_waiting(world: World) -> None:
    """A rank ends while the others wait for it on the host."""
    dist.all_reduce(torch.ones(1000, device=world.device))
    torch.cuda.synchronize()
    dist.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    expect_loss(lambda: dist.all_reduce(torch.ones(1 << 20, device=world.device)))


def kill_on_stream(world: World) -> None:
    """A rank ends when others' streams already wait for its mark, behind a kernel that takes long."""
    x = torch.ones(1000, device=world.device)
    dist.all_reduce(x)
    dist.barrier()
    if world.rank == 1:
        torch.cuda._sleep(20_000_000_000)
    work = dist.all_reduce(x, async_op=True)
    dist.barrier(group=world.control)
    if world.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    def use() -> None:
        work.wait()
        torch.cuda.synchronize()  # returns when the mark is given up
        dist.all_reduce(x)

    expect_loss(use)


def expect_loss(call: Callable[[], Any]) -> None:
    begin_s, said = time.monotonic(), ""
    try:
        call()
    except RuntimeError as error:
        said = str(error)
    print(f"noticed {time.monotonic() - begin_s:.3f} s: {said}", flush=True)
    assert "rank 1" in said
    time.sleep(600)  # until the launcher ends us


def sleep(world: World) -> None:
    dist.all_reduce(torch.ones(1000, device=world.device))
    torch.cuda.synchronize()
    dist.barrier()
    if world.rank == 0:
        print("asleep", flush=True)
    time.sleep(600)


def seconds(world: World, call: Callable[[], None], repeats: int) -> float:
    """The median over repeats of the time until the last rank is done."""
    slowest = []
    for repeat in range(repeats + 1):
        torch.cuda.synchronize()
        dist.barrier(group=world.control)
        begin_s = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - begin_s])
        dist.all_reduce(took, dist.ReduceOp.MAX, group=world.control)
        if repeat:
            slowest.append(float(took))
    return statistics.median(slowest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    what: str
    backend: str
    bytes: int
    ms: float
    gb_per_s: float  # of those bytes, counted once


def measure_size(world: World, num_bytes: int) -> Iterator[Measurement]:
    rank, num_ranks, gloo = world.rank, world.size, world.control
    count = num_bytes // 4
    x, host = torch.ones(count, device=world.device), torch.ones(count)
    y = torch.empty_like(x)
    mine = torch.ones(max(1, count // num_ranks), device=world.device)
    parts = [torch.empty_like(mine) for _ in range(num_ranks)]

    def there_and_back(tensor: torch.Tensor, group: Any = None) -> None:
        """Between ranks 0 and 1; the others look on."""
        if rank == 0:
            dist.send(tensor, 1, group=group)
            dist.recv(tensor, 1, group=group)
        elif rank == 1:
            dist.recv(tensor, 0, group=group)
            dist.send(tensor, 0, group=group)

    def shift() -> None:
        works = [dist.irecv(y, (rank - 1) % num_ranks), dist.isend(x, (rank + 1) % num_ranks)]
        for work in works:
            work.wait()

    def ten() -> None:
        for work in [dist.all_reduce(x, async_op=True) for _ in range(10)]:
            work.wait()

    def through_host() -> None:
        copy = x.cpu()
        dist.all_reduce(copy, group=gloo)
        x.copy_(copy)

    many, few = (20, 10) if num_bytes <= 1 << 20 else (7, 2)
    for what, backend, call, repeats, times in (
        ("one way, 0 to 1", "spindle_ipc", lambda: there_and_back(x), many, 2),
        ("one way, 0 to 1", "gloo, host", lambda: there_and_back(host, gloo), few, 2),
        ("one way, in a row", "spindle_ipc", lambda: [there_and_back(x) for _ in range(20)], 3, 40),
        ("one way, in a row", "gloo, host", lambda: [there_and_back(host, gloo) for _ in range(5)], 2, 10),
        ("each to the next", "spindle_ipc", shift, many, 1),
        ("all-reduce", "spindle_ipc", lambda: dist.all_reduce(x), many, 1),
        ("all-reduce, in a row", "spindle_ipc", lambda: [dist.all_reduce(x) for _ in range(20)], 3, 20),
        ("all-reduce, ten at once", "spindle_ipc", ten, 3, 10),
        ("all-reduce", "gloo, host", lambda: dist.all_reduce(host, group=gloo), few, 1),
        ("all-reduce", "gloo, copied", through_host, few, 1),
        ("all-gather of the whole", "spindle_ipc", lambda: dist.all_gather(parts, mine), many, 1),
    ):
        time_s = seconds(world, call, repeats) / times
        yield Measurement(
            what=what, backend=backend, bytes=num_bytes, ms=time_s * 1e3, gb_per_s=num_bytes / time_s / 1e9
        )


def measure(world: World, file: str) -> None:
    results = []
    for num_bytes in SIZES:
        for result in measure_size(world, num_bytes):
            results.append(asdict(result))
            if world.rank == 0:
                rate = f"{result.ms:9.3f} ms {result.gb_per_s:8.2f} GB/s"
                print(f"{result.what:24} {result.backend:12} {result.bytes:>11} B {rate}", flush=True)
    if world.rank == 0:
        properties = torch.cuda.get_device_properties(world.device)
        about = {
            "gpu": properties.name,
            "ranks": world.size,
            "multiprocessors_per_rank": properties.multi_processor_count,
            "torch": torch.__version__,
            "method": "float32; median over repeats of the time until the slowest rank is synchronised",
        }
        Path(file).write_text(json.dumps({"about": about, "measured": results}))


if __name__ == "__main__":
    part, *rest = sys.argv[1:]
    faulthandler.dump_traceback_later(140)  # where it hangs, should it; looking at a thread that runs may crash it
    {
        "checks": run_checks,
        "towers": run_towers,
        "kill_waiting": kill_waiting,
        "kill_on_stream": kill_on_stream,
        "sleep": sleep,
        "measure": measure,
    }[part](join_world(), *rest)
