"""How near the bound are plans of random graphs? python benchmarks/random_graphs.py [instances per cluster size]

4 to 12 ops on 1 to 3 levels, 4 to 32 layers, batches of 16 to 128, layers of a + b * ceil(batch / n) ms with a from 0.3
to 1.5 and b from 0.03 to 0.4, on every n up to min(devices, batch). Folded time over the LP bound, beside the paper's
algorithm and the sequential plan. Once with batches that are powers of two, once with any: the paper's algorithm uses
only divisors of the batch, and is helpless where it is prime.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from typing import Any

import numpy as np

from common import markdown, publish
from spindle.cluster import PRESETS, uniform_cluster
from spindle.plan import slots_per_op
from spindle.planners import make_plan
from spindle.profile import Profile, abstract_profile


def random_graph(generator: np.random.Generator, num_devices: int, powers_of_two: bool) -> dict[str, Any]:
    num_ops = int(generator.integers(4, 13))
    num_levels = int(generator.integers(1, 4))
    # Every level has an op; an op below the first takes data from one to three ops of the level above.
    levels = sorted([*range(num_levels), *generator.integers(0, num_levels, num_ops - num_levels).tolist()])
    ops, edges = [], []
    for number, level in enumerate(levels):
        batch = int(2 ** generator.integers(4, 8)) if powers_of_two else int(generator.integers(16, 129))
        layers = int(generator.integers(4, 33))
        a, b = generator.uniform(0.3, 1.5), generator.uniform(0.03, 0.4)
        times = {str(n): (a + b * math.ceil(batch / n)) * 1e-3 for n in range(1, min(num_devices, batch) + 1)}
        ops.append({"name": f"op{number}", "layers": layers, "batch": batch, "time_s": times})
        above = [position for position, its_level in enumerate(levels) if its_level == level - 1]
        if above:
            chosen = generator.choice(above, size=min(len(above), int(generator.integers(1, 4))), replace=False)
            edges += [[f"op{position}", f"op{number}"] for position in sorted(chosen.tolist())]
    return {"ops": ops, "edges": edges}


def random_profile(generator: np.random.Generator, num_devices: int, powers_of_two: bool = True) -> Profile:
    graph = random_graph(generator, num_devices, powers_of_two)
    return abstract_profile(graph, uniform_cluster(f"{num_devices} devices", PRESETS["a800"], num_devices))


def main(num_instances: int) -> None:
    make_plan(random_profile(np.random.default_rng(1), 8))  # compile first
    rows, data = [], []
    for powers_of_two, num_devices in itertools.product((True, False), (8, 16, 32)):
        generator = np.random.default_rng(num_devices)
        ratios, paper_ratios, sequential_ratios, slots, seconds = [], [], [], [], []
        for number in range(num_instances):
            print(f"\r{num_devices} devices: {number + 1}/{num_instances}", end="", file=sys.stderr, flush=True)
            profile = random_profile(generator, num_devices, powers_of_two)
            began = time.perf_counter()
            plan = make_plan(profile)
            seconds.append(time.perf_counter() - began)
            ratios.append(plan.folded_s / plan.bound_s)
            paper_ratios.append(make_plan(profile, "paper").folded_s / plan.bound_s)
            sequential_ratios.append(make_plan(profile, "sequential").folded_s / plan.bound_s)
            slots.append(slots_per_op(plan))
        print(file=sys.stderr)
        worse = sum(ours > paper + 1e-9 for ours, paper in zip(ratios, paper_ratios, strict=True))
        rows.append(
            [
                "powers of two" if powers_of_two else "any",
                str(num_devices),
                f"{np.mean(ratios):.4f}",
                f"{np.quantile(ratios, 0.9):.4f}",
                f"{np.max(ratios):.4f}",
                f"{np.mean(slots):.2f}",
                f"{np.mean(paper_ratios):.3f}",
                f"{np.mean(sequential_ratios):.3f}",
                str(worse),
                f"{np.median(seconds):.2f}",
            ]
        )
        about = {"powers_of_two": powers_of_two, "num_devices": num_devices}
        data.append(about | {"wavefront": ratios, "paper": paper_ratios, "slots_per_op": slots})
    header = [
        "batches",
        "devices",
        "wavefront / bound, mean",
        "p90",
        "worst",
        "slots per op",
        "paper / bound",
        "sequential / bound",
    ]
    header += ["worse than paper", "planning s, median"]
    table = f"{num_instances} random graphs in each row.\n\n" + markdown(header, rows)
    publish("random_graphs", {"num_instances": num_instances, "cells": data}, table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
