"""The measured plans of `virtual.json` in the present simulator: python benchmarks/virtual/resimulate.py

Profiles and measured times are the stored ones; no GPU is needed. The stored profiles have no host overhead, so it is
that of a machine on which a kernel takes `--launch-us` microseconds to launch (8.2 to 9.5 were measured; 0: no hosts).
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from spindle.measure.host import overhead_from
from spindle.plan import parse_plan
from spindle.profile import read_profile
from spindle.program import lower
from spindle.simulate import simulate

BENCHMARKS = Path(__file__).resolve().parent.parent
TELLING = 0.02  # by which two measured plans must differ to be in an order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch-us", type=float, default=8.2)
    options = parser.parse_args()
    host = overhead_from(options.launch_us * 1e-6) if options.launch_us else None
    cells = json.loads((BENCHMARKS / "results" / "virtual.json").read_text(encoding="utf-8"))["cells"]
    times_s: dict[str, dict[str, tuple[float, float]]] = {}  # by workload and planner: predicted, measured
    for cell, result in cells.items():
        if "plan" not in result:
            continue
        workload, planner = cell.split("/")
        profile = replace(read_profile(BENCHMARKS / "profiles" / f"h200x8-{workload}.json"), host=host)
        plan = parse_plan(result["plan"], profile)
        predicted_s = simulate(lower(plan, profile), profile).makespan_s
        times_s.setdefault(workload, {})[planner] = predicted_s, result["median_s"]
    errors = [predicted / measured - 1 for plans in times_s.values() for predicted, measured in plans.values()]
    print(
        f"{len(errors)} plans: mean error {statistics.mean(map(abs, errors)):.1%}, largest {max(map(abs, errors)):.1%}"
    )
    for workload, plans in times_s.items():
        for (first, a), (second, b) in combinations(plans.items(), 2):
            if (a[0] - b[0]) * (a[1] - b[1]) < 0 and abs(a[1] / b[1] - 1) > TELLING:
                print(f"{workload}: {first} and {second} are measured the other way round, {a[1] / b[1] - 1:+.1%}")


if __name__ == "__main__":
    main()
