"""The four tasks of the example on shared towers, for `dynamic`: tasks that leave and come back during a fit,
or the same training started anew from a checkpoint without one of them.

Writes what it measured on rank 0. There are no checkpoints yet, so one holds the weights alone: whoever starts anew
from it loses the optimizer's state.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, StackDataset

import spindle
from spindle.plan import Plan
from spindle.planners import PlanOptions, make_plan
from spindle.profile import Profile, write_profile
from spindle.program import Program, StateSharding, lower, moves_between, state_sharding

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import four_tasks

IMPORTED = time.time()
TASKS = {
    task.name: task
    for task in (four_tasks.image_text, four_tasks.audio_text, four_tasks.image_audio, four_tasks.captioning)
}
APART = 30  # steps between changes
CHANGES = ("-captioning", "-image_audio", "+captioning", "-image_text", "+image_audio", "+image_text")
planning_s: list[float] = []


def timed_plan(profile: Profile) -> Plan:
    """Planning is part of a change; this tells how large a part. Rank 0 alone plans."""
    begin = time.perf_counter()
    plan = make_plan(profile, "wavefront", PlanOptions(seed=0))
    planning_s.append(time.perf_counter() - begin)
    return plan


def loader(name: str) -> DataLoader[Any]:
    """The same batches on every rank, because ranks take their rows from them."""
    scenes = StackDataset(**four_tasks.make_scenes(1024, seed=0))
    order = torch.Generator().manual_seed(len(name))
    return DataLoader(scenes, TASKS[name].batch_size, shuffle=True, drop_last=True, generator=order)


def trainer_of(names: list[str], profile: Path | None = None) -> spindle.Trainer:
    return spindle.Trainer(
        [TASKS[name] for name in names],
        optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3),
        planning=spindle.Planning(planner=timed_plan, profile=profile),
    )


def changing(checkpoint: Path) -> dict[str, Any]:
    """Trains, with a change every so many steps."""
    trainer = trainer_of(list(TASKS))
    held: StateSharding | None = None
    moved_bytes: list[int] = []

    def note_moves(program: Program, profile: Profile) -> None:
        """What has moved to where it is in this plan from where it was in the one before."""
        nonlocal held
        before, held = held, state_sharding(program, profile.graph, held)
        if before is not None:
            moves = moves_between(before, held, profile.graph, profile.cluster)
            moved_bytes.append(sum(move.num_bytes for move in moves))

    def on_step(step: int, losses: dict[str, float]) -> None:
        number, rest = divmod(step + 1, APART)
        if rest == 0 and number <= len(CHANGES):
            assert trainer.plan is not None
            assert trainer.profile is not None
            note_moves(lower(trainer.plan, trainer.profile), trainer.profile)
            sign, name = CHANGES[number - 1][0], CHANGES[number - 1][1:]
            if sign == "-":
                trainer.remove_task(name)
            else:
                trainer.add_task(TASKS[name], loader(name))

    steps = APART * (len(CHANGES) + 1)
    result = trainer.fit({name: loader(name) for name in TASKS}, steps=steps, progress=False, on_step=on_step)
    assert trainer.profile is not None
    note_moves(result.program, trainer.profile)
    by_rank = trainer.world.gather_objects(result.changes_s)
    begin = time.perf_counter()
    if trainer.rank == 0:
        torch.save(trainer.state_dict(), checkpoint)
    return {
        "changes": CHANGES,
        "apart": APART,
        "changes_s": [max(times_s) for times_s in zip(*by_rank, strict=True)],
        "planning_s": planning_s[1:],  # the first plan is no change's
        "moved_bytes": moved_bytes,
        "step_s": result.step_s,
        "num_parameters": sum(value.numel() for value in trainer.state_dict().values()),
        "checkpoint_s": time.perf_counter() - begin,
    }


def restarting(checkpoint: Path, launched: float, profile: Path) -> dict[str, float]:
    """Seconds from the launch to each stage, and to the loss of the first step. Layers are measured unless there is a
    profile of them, which is left for the next start."""
    stages = {"imported": IMPORTED - launched}
    names = [name for name in TASKS if f"-{name}" != CHANGES[0]]
    modules = {
        handle.name: handle.module
        for handle in vars(four_tasks).values()
        if isinstance(handle, spindle.train.ModuleHandle)
    }
    nn.ModuleDict(modules).load_state_dict(torch.load(checkpoint))
    trainer = trainer_of(names, profile if profile.exists() else None)
    loaders = {name: loader(name) for name in names}
    stages["loaded"] = time.time() - launched
    measured = trainer.prepare(loaders, progress=False)
    stages["recorded and measured"] = time.time() - launched

    def on_step(step: int, losses: dict[str, float]) -> None:
        stages["first step"] = time.time() - launched

    trainer.fit(loaders, steps=1, progress=False, on_step=on_step)
    if trainer.rank == 0:
        write_profile(profile, measured)
    return stages | {"of which planning": sum(planning_s)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--launched", type=float, help="start anew; when this was launched, by the clock")
    arguments = parser.parse_args()
    if arguments.launched is None:
        report: dict[str, Any] = changing(arguments.checkpoint)
    else:
        report = restarting(arguments.checkpoint, arguments.launched, arguments.profile)
    if planning_s:  # on rank 0
        arguments.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
