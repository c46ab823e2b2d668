"""Cells, and estimates of their step times.

A Cell fixes the kind, the number of devices and the number of pipeline stages of a job, and leaves the plan inside open
(Crius, §2.1; the paper's current name is "grid"). An Estimate is the step time of a cell at one of three grades:

    bound       no plan is faster; optimistic, a few milliseconds of CPU time
    planned     the simulated step of the plan that the job would run
    measured    median of the steps that it did run there

A better grade replaces a worse one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spindle.errors import FleetError

if TYPE_CHECKING:
    from spindle.fleet.fleet import Fleet
    from spindle.fleet.job import Job

GRADES = ("bound", "planned", "measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Where one job may run: `num_devices` of one kind, on the fewest nodes that hold them."""

    kind: str
    num_devices: int
    num_stages: int = 1

    def __post_init__(self) -> None:
        if self.num_devices < 1 or self.num_stages < 1:
            raise FleetError(
                f"a cell has at least 1 device and 1 stage, got {self.num_devices} devices of {self.kind!r} and "
                f"{self.num_stages} stages"
            )

    @property
    def text(self) -> str:
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        return f"{self.num_devices} x {self.kind}{stages}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Step time and peak memory of a cell. `fits` is False where no plan fits into memory: the cell has utility 0.

    `memory_bytes` is 0 while unknown.
    """

    cell: Cell
    step_s: float
    grade: str = "planned"
    memory_bytes: int = 0
    fits: bool = True

    def __post_init__(self) -> None:
        if self.grade not in GRADES:
            raise FleetError(
                f"an estimate of {self.cell.text}: expected a grade of {', '.join(GRADES)}, got {self.grade!r}"
            )
        if not (math.isfinite(self.step_s) and self.step_s > 0):
            raise FleetError(f"an estimate of {self.cell.text}: step_s must be finite and above 0, got {self.step_s}")

    @property
    def rank(self) -> int:
        """0 for a bound, 2 for a measurement."""
        return GRADES.index(self.grade)


def check_limits(fleet: Fleet, job: Job, cells: Iterable[Cell]) -> None:
    """Refuse a job that would wait forever, because its team may have none of the cells that it could run in."""
    least: dict[str, Cell] = {}
    for cell in cells:
        if fleet.is_within_limit(job.team, cell.kind, cell.num_devices):
            return
        if cell.kind not in least or cell.num_devices < least[cell.kind].num_devices:
            least[cell.kind] = cell
    if least:
        limits = ", ".join(f"{limit.num_devices} x {limit.kind}" for limit in fleet.team(job.team).limits)
        raise FleetError(
            f"job {job.name!r} can never start: it needs at least {' or '.join(cell.text for cell in least.values())}, "
            f"and its team {job.team!r} may have {limits} at most; let it accept fewer devices (--count) or another "
            "kind (--kinds), or raise the limit"
        )


def better(old: Iterable[Estimate], new: Iterable[Estimate]) -> tuple[Estimate, ...]:
    """Estimates of one job, one for each kind and count, in order of kind and count.

    A grade is replaced by an equal or better one. Of several stage counts the fastest that fits stays: a planned cell
    gives way to a bound only where the bound is faster, because it may turn out to be better.
    """
    best: dict[tuple[str, int, int], Estimate] = {}
    for estimate in (*old, *new):
        key = (estimate.cell.kind, estimate.cell.num_devices, estimate.cell.num_stages)
        if key not in best or estimate.rank >= best[key].rank:
            best[key] = estimate
    fastest: dict[tuple[str, int], Estimate] = {}
    for (kind, count, _), estimate in best.items():
        current = fastest.get((kind, count))
        if current is None or (not estimate.fits, estimate.step_s) < (not current.fits, current.step_s):
            fastest[kind, count] = estimate
    return tuple(fastest[key] for key in sorted(fastest))
