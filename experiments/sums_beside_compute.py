"""How far off would predictions have been, had sums been measured beside compute?

    python experiments/sums_beside_compute.py

Simulates the plans of `benchmarks/results/virtual.json` again, under the profiles they were made with: as these are,
and with what an all-reduce was seen to take in a step.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

from spindle.plan import Plan, parse_plan
from spindle.profile import Profile
from spindle.profile.file import read_profile
from spindle.program import lower
from spindle.simulate import simulate

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def seen_in_steps(profile: Profile) -> Profile:
    """2.5 ms for an all-reduce beside its bytes, which take three times as long beside compute."""
    (island,) = profile.cluster.islands
    island = replace(island, link=replace(island.link, collective_s=2.5e-3))
    cluster = replace(profile.cluster, islands=(island,))
    return replace(profile, cluster=cluster, overlap=1.1, exchange_overlap=3.0)


def as_measured_alone(profile: Profile) -> Profile:
    """One number stood for both directions then."""
    return replace(profile, exchange_overlap=profile.overlap)


def step_s(plan: Plan, profile: Profile) -> float:
    return simulate(lower(plan, profile), profile).makespan_s


def main() -> None:
    cells = json.loads((BENCHMARKS / "results" / "virtual.json").read_text())["cells"]
    errors: dict[str, list[float]] = {"as predicted then": [], "simulated again": [], "with sums beside compute": []}
    for name, cell in cells.items():
        if "plan" not in cell:
            continue
        profile = read_profile(BENCHMARKS / "profiles" / f"h200x8-{name.partition('/')[0]}.json")
        plan = parse_plan(cell["plan"], profile)
        found = (cell["predicted_s"], *(step_s(plan, change(profile)) for change in (as_measured_alone, seen_in_steps)))
        for entries, predicted_s in zip(errors.values(), found, strict=True):
            entries.append(abs(predicted_s / cell["median_s"] - 1))
    for what, entries in errors.items():
        print(
            f"{what}: mean error {statistics.mean(entries):.1%} over {len(entries)} plans, largest {max(entries):.1%}"
        )


if __name__ == "__main__":
    main()
