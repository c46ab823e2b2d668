"""What rank 0 writes into a run's folder, and when: see `spindle.report.run_folder` for what is in it.

Everything of a plan is written when there is one, so that the folder of a job that is killed can be read; measured
timelines come at the end of a fit. Lines of steps are those of `JSONLines`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from spindle.errors import TrainingError
from spindle.program import format_program, lower
from spindle.report import PROFILER, STEPS, write_run
from spindle.run import World
from spindle.simulate import simulate
from spindle.train.analyze import AnalyzedWorkload
from spindle.train.config import TrainConfig
from spindle.train.plan import PlannedWorkload
from spindle.train.result import FitResult


class RunFolder:
    """The folder of a run, written by rank 0."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    @staticmethod
    def of(config: TrainConfig, world: World) -> RunFolder | None:
        return None if config.run_folder is None or world.rank else RunFolder(config.run_folder, config.name)

    def make(self) -> None:
        """Create the folder before anything takes time. Raises a TrainingError if it cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._folder).close()
        except OSError as error:
            raise TrainingError(
                f"Trainer(run_folder={str(self._folder)!r}): cannot be written ({error.strerror})"
            ) from None

    def write_plan(
        self, planned: PlannedWorkload, workload: AnalyzedWorkload, *, is_new: bool, notices: Sequence[str]
    ) -> None:
        """Write a plan in place of the previous one. With `is_new`, no step was trained yet, so the step lines of an
        earlier run in this folder are removed."""
        if is_new:
            for old in (self._folder / STEPS, *(self._folder / PROFILER).glob("step-*")):
                old.unlink(missing_ok=True)
        write_run(
            self._folder,
            self._name,
            planned.program,
            planned.profile,
            simulate(planned.program, planned.profile),
            {},
            workload=workload.bound.workload,
            notices=notices,
        )

    def write_result(self, result: FitResult) -> None:
        """Write the steps that a fit has measured, with their program. In a pipeline, each step has its own program."""
        if result.measured_steps and _follows_from_plan(result):
            write_run(
                self._folder,
                self._name,
                result.program,
                result.profile,
                result.predicted,
                result.measured_steps,
                notices=result.notices,
            )


@contextmanager
def profiled_step(config: TrainConfig, world: World, step: int) -> Iterator[None]:
    """A context in which torch profiles this rank and writes a trace into the run folder, if this step is to be
    profiled."""
    if config.run_folder is None or step not in config.profiler_steps:
        yield
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        yield
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
    folder = config.run_folder / PROFILER
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"step-{step}-rank-{world.rank}.json.gz"))


def _follows_from_plan(result: FitResult) -> bool:
    """Whether readers can derive the program of the measured steps from the plan. For a loader's short last batch they
    cannot."""
    program, profile = result.program, result.profile
    lowered = lower(result.plan, profile, owning_ranks=dict(program.owning_ranks) or None)
    is_same = lowered.instructions == program.instructions
    return is_same and format_program(lowered, profile) == format_program(program, profile)
