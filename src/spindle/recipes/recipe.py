"""A recipe: one of the paper's workloads, with the roofline and the batch sizes that were fitted to its measurements.

The fits lie in `fitted.json` beside this file; `benchmarks/fit_recipes.py` writes it. They are read when first asked
for, not at import.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources

from spindle.artifact import artifact_from_json
from spindle.errors import WorkloadError
from spindle.profile import Roofline
from spindle.workload import Workload

FITS_KIND = "recipe-fits"


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCell:
    """DeepSpeed's step on so many devices, in the paper and in our model, beside two bounds on any other plan's step.

    The bounds contain the same optimizer and exposed synchronisation as the prediction. The first divides the least
    device seconds by the devices; the second is the paper's C*, level by level.
    """

    num_devices: int
    num_micro_steps: int
    paper_ms: float
    predicted_ms: float
    residual_percent: float
    area_bound_ms: float
    level_bound_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the fit found for one recipe."""

    recipe: str
    efficiency: float
    overhead_s: float
    batch_sizes: tuple[tuple[str, int], ...]
    cells: tuple[FittedCell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    fits: tuple[Fit, ...]


@functools.cache
def read_fits() -> Mapping[str, Fit]:
    """The fits by recipe name."""
    file = resources.files("spindle.recipes") / "fitted.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    return {fit.recipe: fit for fit in artifact_from_json(data, "fitted.json", FITS_KIND, Fits).fits}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A workload of the paper as a value.

    `fitted_as` names the recipe whose fit this one uses (its own, but for models the paper only simulated), with
    batches `batch_factor` times as large. On fewer than `whole_batch_devices` the batch is worked through in equal
    micro-steps, so that a device always sees the same rows at a time.
    """

    name: str
    description: str
    chosen: tuple[str, ...]
    build: Callable[[Mapping[str, int]], Workload]
    fitted_as: str
    batch_factor: int = 1
    whole_batch_devices: int = 1

    @property
    def fit(self) -> Fit:
        return read_fits()[self.fitted_as]

    @property
    def roofline(self) -> Roofline:
        return Roofline(efficiency=self.fit.efficiency, overhead_s=self.fit.overhead_s)

    @property
    def batch_sizes(self) -> dict[str, int]:
        """Samples of each task in one whole step."""
        return {task: size * self.batch_factor for task, size in self.fit.batch_sizes}

    def workload(self, batch_scale: float | Fraction = 1) -> Workload:
        """The workload with every batch so many times as large, which must give whole numbers."""
        return self.build(scaled(self.name, self.batch_sizes, batch_scale))

    def num_micro_steps(self, num_devices: int) -> int:
        """How many micro-steps make one step on so many devices."""
        return max(1, self.whole_batch_devices // num_devices)

    def workload_on(self, num_devices: int) -> Workload:
        """The workload of one micro-step; a step is `num_micro_steps` of these, then one synchronisation and update."""
        return self.workload(Fraction(1, self.num_micro_steps(num_devices)))


def scaled(name: str, batch_sizes: Mapping[str, int], batch_scale: float | Fraction) -> dict[str, int]:
    """Batch sizes times a factor."""
    result = {task: size * Fraction(batch_scale) for task, size in batch_sizes.items()}
    for task, size in result.items():
        if size.denominator != 1 or size < 1:
            raise WorkloadError(
                f"recipe {name!r}: batch_scale={batch_scale} makes the batch of {task!r} {float(size):g} samples; "
                f"it is {batch_sizes[task]} and must stay a whole number of at least 1"
            )
    return {task: int(size) for task, size in result.items()}
