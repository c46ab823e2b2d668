"""A training that is disturbed at named points of its course, and goes on. Run by tests/faults.py.

surviving.py KIND FOLDER STEPS MEMORY_EVERY

FOLDER/faults.json lists faults that happen one after the other, each once: fault N leaves FOLDER/fault-N.json with its
time and step. Points are reached by functions of Spindle that this script wraps; the product knows nothing of them.
Every start appends to FOLDER/events.jsonl how far it got, and when.
"""

from __future__ import annotations

# ruff: noqa: E402  (the first line takes the time before anything is imported)
import time

START_S = time.time()

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

KIND, FOLDER, STEPS, MEMORY_EVERY = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
EVERY = 4 if MEMORY_EVERY else 2
RANK = int(os.environ["RANK"])
FAULTS = json.loads((FOLDER / "faults.json").read_text())
GAP = 2  # steps between the fault before and the next
(FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))


def event(name: str, **values: Any) -> None:
    entry = {"start": START_S, "rank": RANK, "event": name, "time_s": time.time(), "cpu_s": time.process_time()}
    with suppress(OSError), (FOLDER / "events.jsonl").open("a") as file:  # a full disk
        file.write(json.dumps({**entry, **values}) + "\n")


event("started")

import torch
import torch.distributed as dist
from torch import nn

import spindle
from spindle.checkpoint import files
from spindle.checkpoint.files import steps_in
from spindle.cluster import cluster_named
from spindle.launch.activity import recorder
from spindle.plan import format_plan
from spindle.profile import roofline_profile
from spindle.run import Staging, Weights, shards, syncs
from spindle.train import background_planner, resume, saving, session, trainer

event("imported")
SIZE, ROWS = 12, 6
_, *REST = background_planner.BackgroundPlanner.__init__.__defaults__
background_planner.BackgroundPlanner.__init__.__defaults__ = (3.0, *REST)  # until a planning process is given up
torch.set_num_threads(1)


def mark(number: int) -> Path:
    return FOLDER / f"fault-{number}.json"


def armed_fault() -> tuple[int, dict[str, Any]] | None:
    """The first fault that has not happened, if it is its turn."""
    for number, fault in enumerate(FAULTS):
        if mark(number).exists():
            continue
        if number == 0 or fault["recovering"]:
            return number, fault
        before = json.loads(mark(number - 1).read_text() or "{}")
        return (number, fault) if (recorder.step or 0) >= before.get("step", STEPS) + GAP else None
    return None


def reach(point: str) -> None:
    """Something goes wrong here, if this is the point and the rank of the next fault."""
    armed = armed_fault()
    if armed is None or armed[1]["point"] != point or armed[1]["at"] != RANK:
        return
    number, fault = armed
    if not fault["recovering"] and (recorder.step or 0) < 3:
        return
    if fault["action"] in ("cut", "flip") and len(undamaged_steps()) < 2:
        return  # with the last good checkpoint everything would be lost
    try:
        descriptor = os.open(mark(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:  # another thread of this rank was faster
        return
    os.write(
        descriptor,
        json.dumps({"time_s": time.time(), "step": recorder.step or 0, "newest": newest_step(number)}).encode(),
    )
    os.close(descriptor)
    match fault["action"]:
        case "KILL" | "STOP" | "TERM" as name:
            for pid in sorted(map(pid_of, fault["targets"]), key=lambda pid: pid == os.getpid()):
                os.kill(pid, signal.Signals[f"SIG{name}"])
        case "hang":
            time.sleep(3600)
        case "raise":
            raise OSError("this file is broken, once")
        case "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            (FOLDER / "full").touch()
        case "cut" | "flip" as damage:
            step = undamaged_steps()[-1]
            (FOLDER / f"damaged-{step}").touch()
            newest = FOLDER / "saved" / f"step-{step}"
            names = sorted(path.name for path in newest.iterdir())
            path = newest / names[fault["file"] % len(names)]
            content = bytearray(path.read_bytes())
            place = len(content) * fault["tenth"] // 10
            if damage == "cut":
                del content[place:]
            else:
                content[place] ^= 0x20
            path.write_bytes(content)
            os.kill(os.getpid(), signal.SIGKILL)


def newest_step(number: int) -> int:
    """The newest complete checkpoint that outlives a fault. SIGTERM ends the job and its memory, after a checkpoint on
    disk, for which a full disk has no room and a rank that has not joined yet has nothing to save."""
    is_full = (FOLDER / "full").exists()
    loses_memory = any(
        fault["action"] == "TERM" and (is_full or fault["recovering"])
        for fault in FAULTS[number : number + 2]
        if fault is FAULTS[number] or fault["recovering"]
    )
    memory = [] if loses_memory else list(Path(os.environ["SPINDLE_MEMORY"]).glob("checkpoints-*"))
    return max([*undamaged_steps(), *(step for folder in memory for step in steps_in(folder))], default=0)


def undamaged_steps() -> list[int]:
    """The checkpoints on disk, without those that faults have damaged."""
    return [step for step in steps_in(FOLDER / "saved") if not (FOLDER / f"damaged-{step}").exists()]


def pid_of(target: int | str) -> int:
    if target == "launcher":
        return int(os.environ["FAULTS_LAUNCHER"])
    if target == "planner":
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        words = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        return next(pid for pid, command in words.items() if b"spindle.planners.pipeline.worker" in command)
    return int((FOLDER / f"pid-{target}").read_text())


def reaching(place: Any, name: str, point: str, *, done: str = "") -> None:
    """From now on `place.name` reaches a point when it is called, and an event when it returns."""
    function = getattr(place, name)

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        reach(point)
        result = function(*arguments, **options)
        if done:
            event(done)
        return result

    setattr(place, name, call)


reaching(trainer, "join_world", "joining", done="joined")
reaching(session, "plan_workload", "replanning", done="planned")
reaching(session, "make_update", "loading", done="loaded")
reaching(resume.ResumedTensors, "read", "loading")
reaching(dist, "all_reduce", "sync")
reaching(syncs, "start_reduce_scatter", "sync")
for name in ("isend", "irecv"):
    reaching(dist, name, "transfer")
reaching(shards, "start_all_gather", "gather")
reaching(Weights, "gather_parameters", "gather")
reaching(Staging, "copy", "staging")
reaching(saving, "write_part", "writing")
reaching(files, "sync_folder", "renaming")  # between the index and the new name
reaching(files, "_remove", "removing")


class Reaching(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        reach("backward")
        return gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if recorder.step is not None:  # not while it is traced
            reach("forward")
        return x + self.down(torch.tanh(Reaching.apply(self.up(x))))


class AdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        reach("update")
        return super().step(closure)


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": torch.sin(torch.arange(SIZE, dtype=torch.float64) * (number + 1))}


class Batches:
    """An iterable. What raises in a dataset is asked again; here it ends the job."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(7):
            reach("reading")
            yield {"x": torch.cos(torch.arange(ROWS * SIZE, dtype=torch.float64) * (number + 1)).view(ROWS, SIZE)}


torch.manual_seed(0)
STYLE = {"*.up": "colwise", "*.down": "rowwise"} if KIND == "tensor" else None


def blocks(count: int) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(count))).double()


towers = [spindle.module(name, blocks(1)) for name in ("image", "text", "audio")]
head = spindle.module("head", blocks(3), tensor_parallel=STYLE)


def task_of(number: int) -> Any:
    def loss(batch: Any) -> Any:
        return (head(towers[number](batch["x"])) - number).square().mean()

    return spindle.task(batch_size=ROWS, name=f"task{number}", per_sample_mean=True)(loss)


def guessed(graph: Any, num_devices: int) -> Any:
    return roofline_profile(graph, cluster_named(f"cpux{num_devices}"))


# Every rank sends, receives and synchronizes.
WAVES = """
task0/image#0[0:1]*1@0 task1/text#0[0:1]*1@1 task2/audio#0[0:1]*1@2
task0/head#0[0:3]*3@1 task1/head#0[0:3]*3@2 task2/head#0[0:3]*3@0
task0/loss[0:1]*1@1 task1/loss[0:1]*1@2 task2/loss[0:1]*1@0
"""
PLANS: dict[str, dict[str, Any]] = {
    "planned": {},
    "wavefront": {"plan": WAVES, "shard_optimizer": False},
    "sharded": {"plan": WAVES, "shard_optimizer": True},
    "tensor": {"tensor_parallel_degrees": {"head": 2}},
    "pipeline": {"planner": "pipeline"},
}


if __name__ == "__main__":
    trainer_ = spindle.Trainer(
        [task_of(number) for number in range(3)],
        optimizer=lambda named: AdamW([parameter for _, parameter in named] or [torch.zeros(1)], lr=0.01, eps=1e-3),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500),
        max_grad_norm=1.0,
        ema=0.9,
        gradient_accumulation_steps=2 if KIND == "pipeline" else 1,
        planning=spindle.Planning(profile=guessed, **PLANS[KIND]),
        checkpoints=spindle.Checkpoints(FOLDER / "saved", every=EVERY, keep=2, memory_every=MEMORY_EVERY or None),
    )
    first_step = recorder.step_done
    is_first = True

    def step_done(step: int) -> None:
        global is_first
        first_step(step)
        if is_first:
            event("first step", step=step)
            is_first = False

    recorder.step_done = step_done  # type: ignore[method-assign]

    def on_step(step: int, losses: dict[str, float]) -> None:
        time.sleep(0.01)  # as long as a checkpoint takes to be written
        if (FOLDER / "full").exists() and step % 4 == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        if step % 6 == 1:
            trainer_.state_dict()
        if step % 6 == 4:
            trainer_.replan(plan=PLANS[KIND].get("plan"))

    loaders = {"task0": Samples(), "task1": Batches(), "task2": Batches()}
    result = trainer_.fit(loaders, steps=STEPS, progress=False, on_step=on_step)
    state = {f"{ema} {name}": value for ema in (False, True) for name, value in trainer_.state_dict(ema=ema).items()}
    if RANK == 0:
        if os.environ.get("FAULTS_SHOW"):
            print(format_plan(result.plan), *trainer_.notices, sep="\n")
        torch.save(state, FOLDER / "final.pt")
    event("done")
