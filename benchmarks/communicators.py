"""Count the NCCL communicators that a rank needs: python benchmarks/communicators.py

For wavefront plans of the paper's workloads: one for all transfers, one for each set of ranks that reduces gradients or
losses, one for each tensor-parallel group, as `run/world.py` creates them.
"""

from __future__ import annotations

from collections import Counter

from spindle.cluster import cluster_named
from spindle.graph import metagraph_of
from spindle.planners import PlanOptions, make_plan
from spindle.profile import roofline_profile
from spindle.program import Program, lower
from spindle.recipes import RECIPES


def most_per_rank(program: Program) -> int:
    collectives = {tuple(bucket.ranks.tolist()) for bucket in program.buckets}
    collectives |= {tuple(shape.ranks.tolist()) for shape in program.slots if shape.gang and len(shape.ranks) > 1}
    tensor_parallel: set[tuple[int, ...]] = set()
    for shape in program.slots:
        ranks, degree = shape.ranks.tolist(), shape.tensor_degree
        if degree > 1:
            tensor_parallel |= {tuple(ranks[first : first + degree]) for first in range(0, len(ranks), degree)}
    counts = Counter(rank for group in (*collectives, *tensor_parallel) for rank in group)
    return 1 + max(counts.values(), default=0)


if __name__ == "__main__":
    for name in ("clip-10", "ofasys-7", "qwen-val-3"):
        for num_devices in (8, 64):
            recipe = RECIPES[name]
            cluster = cluster_named(f"a800x{num_devices}")
            profile = roofline_profile(metagraph_of(recipe.workload()), cluster, recipe.roofline)
            plan = make_plan(profile, "wavefront", PlanOptions(evaluations=2000))
            print(f"{name} on {num_devices}: {most_per_rank(lower(plan, profile))} communicators per rank", flush=True)
