"""A recipe: one of the paper's workloads, with the roofline that was fitted to its measurements.

The fits are in `fitted.json` next to this file, which `benchmarks/fit_recipes.py` writes. They are read on first use,
not at import.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources

from spindle.artifact import artifact_from_json
from spindle.errors import WorkloadError
from spindle.profile import Roofline
from spindle.workload import Workload

FITS_KIND = "recipe-fits"


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCell:
    """DeepSpeed's step time on a number of devices: in the paper, and of our simulated `sequential` plan."""

    num_devices: int
    paper_ms: float
    predicted_ms: float
    residual_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The result of the fit for one recipe."""

    recipe: str
    efficiency: float
    overhead_s: float
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

    `chosen` says what is ours and not the paper's; `fitted_as` names the recipe whose fit is used: its own, except for
    models that the paper only simulated.
    """

    name: str
    description: str
    chosen: tuple[str, ...]
    batch_sizes: tuple[tuple[str, int], ...]
    build: Callable[[Mapping[str, int]], Workload]
    fitted_as: str

    @property
    def roofline(self) -> Roofline:
        fit = read_fits()[self.fitted_as]
        return Roofline(efficiency=fit.efficiency, overhead_s=fit.overhead_s)

    def workload(self, batch_scale: int = 1) -> Workload:
        """The workload with every batch `batch_scale` times as large, for clusters larger than the paper's."""
        if batch_scale < 1:
            raise WorkloadError(
                f"recipe {self.name!r}: batch_scale must be a whole number of at least 1, got {batch_scale}"
            )
        return self.build({task: size * batch_scale for task, size in self.batch_sizes})
