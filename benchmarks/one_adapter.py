"""What if an A800 host had one 400 Gb/s adapter, 50 GB/s, instead of four? python benchmarks/one_adapter.py

The paper's cells again with that uplink and the fit as it is; prints the numbers that docs/recipes.md quotes.
"""

from __future__ import annotations

from dataclasses import replace

from cells import geometric_mean
from paper_cells import CELLS
from spindle.cluster import PRESETS, uniform_cluster
from spindle.graph import metagraph_of
from spindle.planners import make_plan
from spindle.profile import roofline_profile
from spindle.recipes import RECIPES

ISLAND = replace(PRESETS["a800"], uplink=replace(PRESETS["a800"].uplink, bytes_per_s=50e9))


def main() -> None:
    ratios = {}
    for cell in CELLS:
        recipe = RECIPES[cell.recipe]
        cluster = uniform_cluster("one adapter", ISLAND, cell.num_devices)
        plan = make_plan(roofline_profile(metagraph_of(recipe.workload()), cluster, recipe.roofline))
        ratios[cell.recipe, cell.num_devices] = plan.makespan_s / plan.bound_s
        print(f"{cell.recipe} on {cell.num_devices}: {plan.makespan_s / plan.bound_s:.3f}", flush=True)
    several = [ratio for (_, count), ratio in ratios.items() if count > ISLAND.num_devices]
    print(
        f"all {len(ratios)}: {geometric_mean(list(ratios.values())):.4f}, several hosts: {geometric_mean(several):.4f}"
    )


if __name__ == "__main__":
    main()
