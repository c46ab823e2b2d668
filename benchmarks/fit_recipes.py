"""Fit the recipes to the paper's DeepSpeed times: python benchmarks/fit_recipes.py

Unknown for each workload are the share of peak that its layers reach (efficiency) and the fixed cost of a layer
(overhead). Both are chosen to minimise the squared relative error of the simulated `sequential` plan against the
paper's DeepSpeed milliseconds at all its cluster sizes; no other column of the paper is used. Writes
src/spindle/recipes/fitted.json and the tables of docs/recipes.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from common import ROOT, write_between
from paper_cells import CELLS, Cell
from spindle.artifact import write_artifact
from spindle.cluster import cluster_named
from spindle.graph import MetaGraph, metagraph_of
from spindle.planners import make_plan
from spindle.profile import Roofline, roofline_profile
from spindle.recipes import RECIPES, Fit, Fits, FittedCell, Recipe
from spindle.recipes.recipe import FITS_KIND

EFFICIENCY = (0.15, 0.6)  # limits, as shares of peak
OVERHEAD_MS = (0.3, 5.0)  # per layer, both passes


def sequential_ms(graph: MetaGraph, cell: Cell, roofline: Roofline) -> float:
    profile = roofline_profile(graph, cluster_named(f"a800x{cell.num_devices}"), roofline)
    return make_plan(profile, "sequential").makespan_s * 1e3


def fit_recipe(recipe: Recipe, cells: Sequence[Cell]) -> Fit:
    """The efficiency and overhead with the least squared relative error, rounded for the file."""
    graph = metagraph_of(recipe.workload())

    def roofline_at(x: np.ndarray) -> Roofline:
        return Roofline(efficiency=float(x[0]), overhead_s=float(x[1]) * 1e-3)

    def residuals(x: np.ndarray) -> list[float]:
        return [sequential_ms(graph, cell, roofline_at(x)) / cell.deepspeed_ms - 1 for cell in cells]

    bounds = np.array([EFFICIENCY, OVERHEAD_MS]).T
    solution = least_squares(residuals, [0.35, 1.5], bounds=bounds, diff_step=1e-3).x
    efficiency, overhead_ms = (round(float(value), 3) for value in solution)
    roofline = Roofline(efficiency=efficiency, overhead_s=overhead_ms * 1e-3)
    predicted = [sequential_ms(graph, cell, roofline) for cell in cells]
    return Fit(
        recipe=recipe.name,
        efficiency=efficiency,
        overhead_s=round(overhead_ms * 1e-3, 6),
        cells=tuple(
            FittedCell(
                num_devices=cell.num_devices,
                paper_ms=cell.deepspeed_ms,
                predicted_ms=round(ms, 1),
                residual_percent=round((ms / cell.deepspeed_ms - 1) * 100, 1),
            )
            for cell, ms in zip(cells, predicted, strict=True)
        ),
    )


def fit_table(fits: Fits) -> str:
    lines = [
        "| recipe | efficiency | overhead per layer | devices | paper ms | model ms | residual |",
        "|---|---|---|---|---|---|---|",
    ]
    for fit in fits.fits:
        for cell in fit.cells:
            lines.append(
                f"| {fit.recipe} | {fit.efficiency:.3f} | {fit.overhead_s * 1e3:.2f} ms | {cell.num_devices} "
                f"| {cell.paper_ms:.0f} | {cell.predicted_ms:.0f} | {cell.residual_percent:+.1f} % |"
            )
    return "\n".join(lines)


def batch_table() -> str:
    lines = ["| recipe | parameters | batch sizes |", "|---|---|---|"]
    for recipe in RECIPES.values():
        batches = ", ".join(f"{task} {size}" for task, size in recipe.batch_sizes)
        lines.append(f"| {recipe.name} | {recipe.workload().num_parameters / 1e9:.2f}B | {batches} |")
    return "\n".join(lines)


def main() -> None:
    names = dict.fromkeys(cell.recipe for cell in CELLS)
    fits = Fits(
        fits=tuple(fit_recipe(RECIPES[name], [cell for cell in CELLS if cell.recipe == name]) for name in names)
    )
    write_artifact(ROOT / "src/spindle/recipes/fitted.json", FITS_KIND, fits)
    docs = ROOT / "docs/recipes.md"
    for name, table in {"batch table": batch_table(), "fit table": fit_table(fits)}.items():
        write_between(docs, name, table)
        print(table, end="\n\n")


if __name__ == "__main__":
    main()
