"""Whole traces under every policy: python benchmarks/fleet_traces.py [--seeds N] [--only TEXT] [--limit N] [--report]

Arena's 1,867 jobs on 1,280 devices with arrivals x 1, x 2 and x 3, and ElasticFlow's clusters 03 and 06 on 256 devices
at loads of 0.9 and 1.3: 10 % mean error of estimates, 120 s per reallocation, run until all jobs are done. Seeds draw
the errors, and for ElasticFlow models and kinds, too. Then what else may go wrong, on Arena x 2.

Needs `../shared/traces` beside the checkout. Runs are kept in benchmarks/results/fleet_traces.jsonl, and one that is
there is not repeated; remove the file to measure again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

from common import RESULTS, ROOT, circumstances, markdown
from spindle.artifact import write_atomically
from spindle.fleet import Injection, SchedulerOptions, Trace, arena_fleet, measure_fleet, simulate_fleet
from spindle.fleet.public_traces import arena_trace, elasticflow_trace

TRACES = ROOT.parent / "shared" / "traces"
RUNS = RESULTS / "fleet_traces.jsonl"
POLICIES = ("price", "sia", "crius", "weighted-sia", "gavel", "backfill", "fcfs")
WORLDS = ("arena x1", "arena x2", "arena x3", "03 at 0.9", "03 at 1.3", "06 at 0.9", "06 at 1.3")
ELASTIC_DEVICES = 256
# Of simulated time, where nodes fail: a policy that restarts a job from its request may never finish it.
UNTIL_S = 10_000 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    world: str
    policy: str
    seed: int
    variant: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    injection: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.world}|{self.policy}|{self.variant}|{self.seed}"


def runs(num_seeds: int) -> list[Run]:
    """All runs, those first that the goals are about; two seeds of everything that matters before five of it."""

    def tier(run: Run) -> int:
        if not run.variant and run.policy in ("price", "sia", "crius"):
            return 0 if run.seed < 2 else 2
        return 1 if run.seed == 0 else 3

    return sorted(_all_runs(num_seeds), key=tier)


def _all_runs(num_seeds: int) -> Iterator[Run]:
    for seed in range(num_seeds):
        for world in WORLDS:
            for policy in POLICIES:
                if seed == 0 or policy != "fcfs" or "arena" not in world:  # fcfs uses no estimates
                    yield Run(world=world, policy=policy, seed=seed)
        for world in WORLDS[:3]:
            yield Run(world=world, policy="price", seed=seed, variant="throughput", options={"objective": "throughput"})
        for variant, injection in (
            ("lengths off by sigma 1", {"length_sigma": 1.0}),
            ("no lengths", {"lengths": False}),
        ):
            for world in WORLDS[:3]:
                yield Run(world=world, policy="price", seed=seed, variant=variant, injection=injection)
        for policy in ("price", "sia", "crius"):
            for error in (0.0, 0.2, 0.4):
                yield Run(
                    world="arena x2",
                    policy=policy,
                    seed=seed,
                    variant=f"{100 * error:.0f} % error",
                    injection={"estimation_error": error},
                )
            yield Run(
                world="arena x2",
                policy=policy,
                seed=seed,
                variant="a node failure every hour",
                injection={"failures_per_hour": 1.0},
            )
            yield Run(
                world="arena x2",
                policy=policy,
                seed=seed,
                variant="5 % of nodes 1.5 times slower",
                injection={"slow_nodes": 0.05},
            )
            for cost_s in (0.0, 30.0, 600.0):
                yield Run(
                    world="arena x2",
                    policy=policy,
                    seed=seed,
                    variant=f"{cost_s:.0f} s per reallocation",
                    options={"realloc_s": cost_s},
                )


@cache
def trace_of(world: str, seed: int) -> Trace:
    if world.startswith("arena"):
        return arena_trace(TRACES / "arena" / "sim_trace_1938jobs.csv").faster(float(world.split("x")[1]))
    cluster, load = world.split(" at ")
    path = TRACES / "elasticflow" / f"cluster{cluster}.csv"
    return elasticflow_trace(path, TRACES / "arena", ELASTIC_DEVICES, float(load), seed)


def measured(run: Run) -> dict[str, Any]:
    fleet = arena_fleet() if run.world.startswith("arena") else arena_fleet(ELASTIC_DEVICES // 4)
    options = SchedulerOptions(**{"policy": run.policy, "realloc_s": 120.0, **run.options})
    injection = Injection(**{"seed": run.seed, "estimation_error": 0.1, **run.injection})
    until_s = UNTIL_S if injection.failures_per_hour else math.inf
    result = simulate_fleet(trace_of(run.world, run.seed), fleet, options, injection, until_s=until_s)
    rounds_s = sorted(result.round_cpu_s)
    return {
        "key": run.key,
        **asdict(measure_fleet(result.timeline)),
        "num_unfinished": len(result.state.jobs),
        "cpu_s": result.cpu_s,
        "round_mean_s": mean(rounds_s),
        "round_p95_s": rounds_s[int(0.95 * len(rounds_s))],
    }


def recorded() -> dict[str, dict[str, Any]]:
    if not RUNS.exists():
        return {}
    entries = (json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines())
    return {entry["key"]: entry for entry in entries}


def hours(value_s: float) -> str:
    return f"{value_s / 3600:.1f}"


def spread(values: list[float], digits: int = 3) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def unfinished(entries: dict[int, dict[str, Any]]) -> str:
    most = max((entry.get("num_unfinished", 0) for entry in entries.values()), default=0)
    return f"; {most} of its jobs not done after {UNTIL_S / 3600:,.0f} h" if most else ""


def report(results: dict[str, dict[str, Any]]) -> str:
    def of(world: str, policy: str, variant: str = "") -> dict[int, dict[str, Any]]:
        prefix = f"{world}|{policy}|{variant}|"
        return {int(key[len(prefix) :]): entry for key, entry in results.items() if key.startswith(prefix)}

    def ratios(figure: str, world: str, policies: tuple[str, str], variants: tuple[str, str] = ("", "")) -> list[float]:
        ours, theirs = of(world, policies[0], variants[0]), of(world, policies[1], variants[1])
        return [ours[seed][figure] / theirs[seed][figure] for seed in sorted(ours.keys() & theirs.keys())]

    parts = ["Mean JCT of `price` over that of others; mean (least–most) of seeds.\n"]
    header = ["trace", "seeds", "sia", "crius", "weighted-sia", "gavel", "p99 over sia's", "longest wait, h"]
    rows = []
    for world in WORLDS:
        ours = of(world, "price")
        if ours:
            rows.append(
                [world, str(len(ours))]
                + [spread(ratios("jct_mean_s", world, ("price", name))) for name in header[2:6]]
                + [spread(ratios("jct_p99_s", world, ("price", "sia")))]
                + [hours(max(entry["longest_wait_s"] for entry in ours.values()))]
            )
    parts.append(markdown(header, rows))
    against = [ratio for world in WORLDS for ratio in ratios("jct_mean_s", world, ("price", "weighted-sia"))]
    if against:
        parts.append(f"\nOver weighted-sia, geometric mean of all: {geometric_mean(against):.3f}.\n")
    header = ["trace", "policy", "seeds", "JCT mean, h", "median", "p99", "makespan, h", "sum of s", "longest wait, h"]
    header += ["fairness mean", "worst", "reallocations", "device-h in them", "CPU s per trace", "round p95, ms"]
    rows = []
    for world in WORLDS:
        for policy in POLICIES:
            entries = list(of(world, policy).values())
            if entries:
                rows.append(
                    [world, policy, str(len(entries))]
                    + [hours(mean(entry[name] for entry in entries)) for name in
                       ("jct_mean_s", "jct_median_s", "jct_p99_s", "makespan_s")]
                    + [f"{mean(entry['throughput'] for entry in entries):.1f}"]
                    + [hours(max(entry["longest_wait_s"] for entry in entries))]
                    + [f"{mean(entry['fairness_mean'] for entry in entries):.2f}"]
                    + [f"{max(entry['fairness_worst'] for entry in entries):.1f}"]
                    + [f"{mean(entry['num_reallocations'] for entry in entries):.0f}"]
                    + [f"{mean(entry['realloc_device_h'] for entry in entries):.0f}"]
                    + [f"{mean(entry['cpu_s'] for entry in entries):.1f}"]
                    + [f"{1e3 * mean(entry['round_p95_s'] for entry in entries):.1f}"]
                )  # fmt: skip
    parts.append(markdown(header, rows))
    rows = [
        [world, spread(ratios("throughput", world, ("price", "sia"), ("throughput", "")))]
        for world in WORLDS[:3]
        if of(world, "price", "throughput")
    ]
    parts.append("\n`--objective throughput`: sum of normalised rates until the last arrival, over Sia's.\n")
    parts.append(markdown(["trace", "price over sia"], rows))
    parts.append("\nWhat else may go wrong; mean JCT of `price` over that of others under the same injection.\n")
    rows = []
    for variant in ("lengths off by sigma 1", "no lengths"):  # neither Sia nor Crius uses lengths
        for world in WORLDS[:3]:
            if of(world, "price", variant):
                rows.append(
                    [f"{variant}, {world}"]
                    + [spread(ratios("jct_mean_s", world, ("price", name), (variant, ""))) for name in ("sia", "crius")]
                )
    variants = sorted({key.split("|")[2] for key in results if key.startswith("arena x2|sia|")} - {""})
    for variant in variants:
        rows.append(
            [f"{variant}, arena x2"]
            + [
                spread(ratios("jct_mean_s", "arena x2", ("price", name), (variant, variant)))
                + unfinished(of("arena x2", name, variant))
                for name in ("sia", "crius")
            ]
        )
    parts.append(markdown(["injected", "over sia", "over crius"], rows))
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="only runs whose key contains this")
    parser.add_argument("--report", action="store_true", help="only write the tables of what was run")
    parser.add_argument("--limit", type=int, default=10_000, help="at most so many runs")
    arguments = parser.parse_args()
    if not arguments.report and not (TRACES / "arena").is_dir():
        sys.exit(f"fleet_traces: skipped, there is no {Path('..', 'shared', 'traces')} beside the checkout")
    done = recorded()
    if not arguments.report:
        missing = [run for run in runs(arguments.seeds) if run.key not in done and arguments.only in run.key]
        if missing:
            whole = arena_trace(TRACES / "arena" / "sim_trace_1938jobs.csv")
            few = replace(whole, jobs=whole.jobs[:5])
            for policy in POLICIES:  # loads compiled loops
                simulate_fleet(few, arena_fleet(), SchedulerOptions(policy=policy))
        for run in missing[: arguments.limit]:
            print(run.key, end=" ", file=sys.stderr, flush=True)
            about = circumstances()
            entry = {"commit": about["commit"], "hardware": about["hardware"], **measured(run)}
            print(f"{entry['jct_mean_s'] / 3600:.2f} h, {entry['cpu_s']:.1f} s", file=sys.stderr, flush=True)
            with RUNS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        done = recorded()
    num_runs = Counter(entry["commit"] for entry in done.values())
    commits = ", ".join(f"{commit} ({number})" for commit, number in num_runs.most_common())
    hardware = "; ".join(sorted({entry["hardware"] for entry in done.values()}))
    notes = (
        "Models, batch sizes, counts and kinds of Arena's jobs were drawn by its authors; for ElasticFlow's clusters "
        "models and kinds are drawn from the seed. 71 jobs of Arena request what its table does not have: left out.\n\n"
        f"Commits (runs): {commits}; {hardware}. CPU times on shared machines."
    )
    text = report(done)
    write_atomically(RESULTS / "fleet_traces.md", f"{text}\n\n{notes}\n")
    print(text)


if __name__ == "__main__":
    main()
