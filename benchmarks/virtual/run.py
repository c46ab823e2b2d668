"""Measures every variant of every workload in the same processes, each of which runs this script:

    spindle launch --virtual-devices 8 benchmarks/virtual/run.py --output FILE.json
        [--only clip-4-16,qwen-val] [--variants wavefront,ddp-eager] [--budget-s 900] [--small]

A cell is one variant of one workload. Spindle's variants of all workloads come first: graphs inside DDP leave memory
behind. Each finished cell is in the file at once, and a run goes on with what the file lacks. On a virtual machine the
host may take cores away; a cell of which it took more than a hundredth is measured once more, and the better one kept.
 An error on all ranks alike (no memory, no plan) is the cell's result. One rank that fails alone ends the job,
because the others wait for it; a cell that has ended the job twice is left out from then on.

Every variant starts from the same weights, so the losses of all of Spindle's variants are the same but for rounding.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import spindle
from spindle.errors import PeerLostError, PlanError
from spindle.plan import Plan
from spindle.plan.text import format_plan
from spindle.planners import PlanOptions, graph_bound_s, make_plan
from spindle.profile import Profile
from spindle.profile.file import write_profile
from spindle.run import World, join_world
from spindle.train.result import FitResult

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import circumstances
from virtual import models, plain, workloads
from virtual.cells import Cells
from virtual.split import split_of
from virtual.workloads import Workload

# Behind a planner's name: the optimizer's state is sharded, or not; else the planner decides.
SHARDED, UNSHARDED = "-sharded", "-unsharded"
PLANNERS = ("wavefront", "sequential", "distmm", "task-level", "paper", f"wavefront{SHARDED}", f"wavefront{UNSHARDED}")
VARIANTS = (*PLANNERS, *plain.VARIANTS)
WARM_UP = 4  # steps; graphs are captured within them
SMALL_WARM_UP, SMALL_STEPS = 1, 3
_STOLEN = 0.01  # of the cores' time, by the machine that hosts this one
_PATIENCE_S = 30  # until a rank that failed takes the others for stuck

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The world, the results (on rank 0), and how far to go."""

    world: World
    cells: Cells | None
    output: Path
    small: bool
    begin_s: float
    budget_s: float

    def decide(self, question: Callable[[Cells], Answer]) -> Answer:
        """Rank 0's answer, on all ranks."""
        answer: Answer = self.world.broadcast_object(None if self.cells is None else question(self.cells))
        return answer

    def todo(self, workload: str, variants: list[str]) -> list[str]:
        """Variants without a result; none once time is up."""
        done = self.decide(
            lambda cells: cells.done() if self.has_time() else {f"{workload}/{variant}" for variant in variants}
        )
        return [variant for variant in variants if f"{workload}/{variant}" not in done]

    def has_time(self) -> bool:
        return time.monotonic() - self.begin_s < self.budget_s

    def note(self, change: Callable[[Cells], None]) -> None:
        if self.cells is not None:
            change(self.cells)

    def measure(self, cell: str, run: Callable[[], dict[str, Any]]) -> bool:
        """Measures a cell if there is time; whether everything is as it should be afterwards."""
        if not self.decide(lambda _: self.has_time()):
            return True
        begin_s = time.monotonic()
        self.note(lambda cells: cells.begin(cell))
        result = self._once(cell, run)
        if "error" not in result and self.decide(lambda _: result["stolen"] > _STOLEN and self.has_time()):
            free()
            again = self._once(cell, run)
            if "error" in again or again["stolen"] < result["stolen"]:
                result = again
        result["cell_s"] = time.monotonic() - begin_s
        self.note(lambda cells: cells.finish(cell, result))
        return "error" not in result

    def _once(self, cell: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        held = _allocated_bytes()
        stolen, all_of_it = host_time()
        result, error = attempt(self.world, run)
        record = {"error": error} if result is None else result
        now, all_by_now = host_time()
        record |= {"stolen": (now - stolen) / max(1, all_by_now - all_of_it), "held_bytes": held}
        if self.cells is not None:
            print(f"{time.monotonic() - self.begin_s:6.0f} s  {cell:26} {_summary(record)}", flush=True)
        return record


def attempt(world: World, run: Callable[[], Answer]) -> tuple[Answer | None, str]:
    """What a function gives on this rank, or the error that it ends with on every rank. Ends the job otherwise."""
    result: Answer | None = None
    failure: Exception | None = None
    try:
        result = run()
    except Exception as error:
        failure = error
    failed = _flags(world, failure)
    if failure is not None and all(failed):
        return None, f"{type(failure).__name__}: {failure}"  # without its frames, which hold tensors
    if failure is not None:
        raise failure
    if any(failed):
        raise PeerLostError(f"rank {failed.index(True)} failed alone")
    return result, ""


def _flags(world: World, failure: Exception | None) -> list[bool]:
    """Which ranks failed. A rank that failed does not wait for long: others may wait for it somewhere else."""
    if world.size == 1:
        return [failure is not None]
    table = [torch.zeros(1) for _ in range(world.size)]
    request = dist.all_gather(table, torch.tensor([float(failure is not None)]), group=world.control, async_op=True)
    assert request is not None
    try:
        if failure is None:
            request.wait()
        else:
            request.wait(timedelta(seconds=_PATIENCE_S))
    except RuntimeError:
        raise failure or PeerLostError("another rank is gone, noticed at the end of a cell") from None
    return [bool(flag) for flag in table]


def host_time() -> tuple[int, int]:
    """What the machine that hosts this one has taken from it so far, and all there was, in ticks of a core."""
    try:
        ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return 0, 0
    return ticks[7], sum(ticks)


def _allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def measure_plain(experiment: Experiment, name: str, variants: list[str]) -> None:
    """Torch's own variants of a workload that have no result yet."""
    for variant in experiment.todo(name, [variant for variant in variants if variant in plain.VARIANTS]):
        if variant == "ddp-graphed" and experiment.world.device.type == "cpu":
            continue
        experiment.measure(f"{name}/{variant}", partial(plain_cell, experiment, name, variant))
        free()


def plain_cell(experiment: Experiment, name: str, variant: str) -> dict[str, Any]:
    world = experiment.world
    workload = workloads.build(name, world.device, experiment.small)
    warm_up, steps = _steps(experiment, workload)
    result = plain.measure_plain(workload, variant, world, warm_up, steps)
    return asdict(result) | {
        "step_s": result.step_s[warm_up:],
        "median_s": statistics.median(result.step_s[warm_up:]),
        "peak_bytes": {"measured": result.peak_bytes},
    }


def measure_planners(experiment: Experiment, name: str, planners: list[str]) -> None:
    """Spindle's variants, all under one profile. After an error weights may be anywhere, so it starts anew."""
    left = experiment.todo(name, [planner for planner in planners if planner in PLANNERS])
    while left:
        workload = workloads.build(name, experiment.world.device, experiment.small)
        trainer = spindle.Trainer(
            workload.spindle_tasks(), optimizer=plain.make_optimizer, seed=0, name=name, cuda_graphs=True
        )
        if not prepared(experiment, trainer, workload):
            return
        is_sound = True
        while left and is_sound:
            planner = left.pop(0)
            is_sound = experiment.measure(
                f"{name}/{planner}",
                partial(planner_cell, experiment, trainer, workload, planner),
            )
            free()
        trainer.replan(keep_optimizer=False)  # lets go of the groups of its last plan
        del trainer, workload
        free()


def prepared(experiment: Experiment, trainer: spindle.Trainer, workload: Workload) -> bool:
    """Measures the workload's layers, and writes down what is known of it before any cell."""
    cell = f"{workload.name}/prepare"
    if not experiment.todo(workload.name, ["prepare"]):
        return False
    begin_s = time.monotonic()
    experiment.note(lambda cells: cells.begin(cell))
    profile, error = attempt(experiment.world, lambda: trainer.prepare(workload.batches, progress=False))
    free()
    if profile is None:
        experiment.note(lambda cells: cells.finish(cell, {"error": error}))
        return False
    experiment.note(lambda cells: cells.forget(cell))
    if experiment.cells is not None:
        write_profile(experiment.output.with_name(f"{experiment.output.stem}.{workload.name}.profile.json"), profile)
        facts = {
            "bound_s": graph_bound_s(profile),
            "parameters": models.num_parameters(workload.towers),
            "batch_sizes": {task.name: task.batch_size for task in workload.tasks},
            "device_bytes": profile.cluster.kind.memory_bytes,
            "prepare_s": time.monotonic() - begin_s,
            "notices": list(trainer.notices),
        }
        experiment.cells.describe_workload(workload.name, facts)
        print(f"{time.monotonic() - experiment.begin_s:6.0f} s  {cell:26} bound {facts['bound_s'] * 1e3:.1f} ms")
    return True


def planner_cell(experiment: Experiment, trainer: spindle.Trainer, workload: Workload, planner: str) -> dict[str, Any]:
    profile = trainer.profile
    assert profile is not None
    begin_s = time.monotonic()
    plan = shared_plan(experiment, profile, planner)
    planning_s = time.monotonic() - begin_s
    models.initialise(workload.towers, workloads.SEED)
    trainer.replan(plan=plan, keep_optimizer=False)
    warm_up, steps = _steps(experiment, workload)
    result = trainer.fit(workload.batches, steps=warm_up + steps, progress=False)
    return _described(result, profile, warm_up) | {"planning_s": planning_s}


def shared_plan(experiment: Experiment, profile: Profile, planner: str) -> Plan:
    """A planner's plan, made by rank 0. Made here, because a refusal on rank 0 must reach all ranks."""

    def make(_: Cells) -> tuple[Plan | None, str]:
        try:
            name, _, ending = planner.rpartition("-")
            if ending not in ("sharded", "unsharded"):
                name, ending = planner, ""
            shards = {"sharded": True, "unsharded": False}.get(ending)
            options = PlanOptions(seed=0, shard_optimizer=shards)
            return make_plan(profile, name, options), ""
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"

    plan, error = experiment.decide(make)
    if plan is None:
        raise PlanError(error)
    return plan


def _described(result: FitResult, profile: Profile, warm_up: int) -> dict[str, Any]:
    """Everything about a cell that a report may ask for."""
    return {
        "step_s": result.step_s[warm_up:],
        "median_s": statistics.median(result.step_s[warm_up:]),
        "warm_up_s": result.step_s[:warm_up],
        "predicted_s": result.predicted.makespan_s,
        "predicted": split_of(result.predicted).to_json(),
        "measured": None if result.measured is None else split_of(result.measured).to_json(),
        "peak_bytes": {"predicted": result.predicted.peak_bytes().tolist(), "measured": result.peak_bytes},
        "losses": result.losses[-1],
        "losses_by_step": result.losses,
        "num_rounds": result.plan.num_rounds,
        "recomputed": result.plan.recompute,
        "notices": result.notices,
        "plan": format_plan(result.plan),
    }


def _steps(experiment: Experiment, workload: Workload) -> tuple[int, int]:
    """Steps that warm up, and steps that are measured."""
    return (SMALL_WARM_UP, SMALL_STEPS) if experiment.small else (WARM_UP, workload.num_steps)


def _summary(result: dict[str, Any]) -> str:
    if "error" in result:
        return result["error"].splitlines()[0][:100]
    predicted = f", predicted {result['predicted_s'] * 1e3:.1f} ms" if "predicted_s" in result else ""
    return f"{result['median_s'] * 1e3:.1f} ms{predicted}, {result['stolen']:.1%} stolen"


def free() -> None:
    """Gives memory that nothing holds any more back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()


def about(world: World, small: bool) -> dict[str, Any]:
    """What is measured on."""
    facts: dict[str, Any] = {"ranks": world.size, "torch": torch.__version__, "small": small}
    facts["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        facts |= {"device": properties.name, "multiprocessors_per_rank": properties.multi_processor_count}
    facts_now = circumstances()
    return facts | {"commit": facts_now["commit"]} | ({} if "device" in facts else {"device": facts_now["hardware"]})


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures variants of workloads.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default=",".join(workloads.NAMES), help="workloads")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no cell after so many seconds")
    parser.add_argument("--small", action="store_true", help="tiny towers, to try it out")
    options = parser.parse_args(arguments)
    options.only, options.variants = options.only.split(","), options.variants.split(",")
    for chosen, known in ((options.only, workloads.NAMES), (options.variants, VARIANTS)):
        for name in chosen:
            if name not in known:
                parser.error(f"there is no {name!r}; choose from {', '.join(known)}")
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    begin_s = time.monotonic()
    world = join_world()
    experiment = Experiment(
        world=world,
        cells=Cells(options.output) if world.rank == 0 else None,
        output=options.output,
        small=options.small,
        begin_s=begin_s,
        budget_s=options.budget_s,
    )
    experiment.note(lambda cells: cells.describe(about(world, options.small)))
    for measure in (measure_planners, measure_plain):
        for name in options.only:
            measure(experiment, name, options.variants)


if __name__ == "__main__":
    main(sys.argv[1:])
