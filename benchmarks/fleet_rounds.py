"""One round of the fleet scheduler: python benchmarks/fleet_rounds.py

1,280 devices of 4 kinds with 200 and 1,000 jobs, whose cells are those of Arena's table (needs `../shared/traces`
beside the checkout) or any number of devices; then 10,000 devices of 8 kinds with 5,000 jobs. Utility over the LP bound
(HiGHS) of the same round, and CPU time of a whole round with placement: the first one, in which every job is placed,
and warm ones after 5 % of the running jobs have ended and as many have arrived. What numba and scipy have imported is
kept out of Python's full garbage collections, one of which would take 90 ms of a round.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from common import ROOT, markdown, publish
from spindle.cluster import Cluster, DeviceKind
from spindle.fleet import (
    Cell,
    Completed,
    Estimate,
    Estimated,
    Event,
    Fleet,
    Job,
    JobState,
    Plan,
    SchedulerOptions,
    Started,
    State,
    Stop,
    Submitted,
    Ticked,
    arena_fleet,
    schedule,
)
from spindle.fleet.public_traces import arena_models
from spindle.fleet.rounds import round_of
from spindle.fleet.utility import utilities

ARENA = ROOT.parent / "shared" / "traces" / "arena"
NUM_SEEDS = 5
CHURN = 0.05
ROUND_S = 300.0


def large_fleet() -> Fleet:
    """10,000 devices of 8 kinds: 1,250 each in nodes of 2 or 10."""
    islands = []
    base = arena_fleet().cluster.islands[0]
    for number in range(8):
        kind: DeviceKind = replace(base.kind, name=f"kind{number}")
        size = 10 if number % 2 else 2
        islands += [replace(base, kind=kind, num_devices=size)] * (1250 // size)
    return Fleet(cluster=Cluster(name="8 kinds", islands=tuple(islands)))


def any_cells(fleet: Fleet, random: np.random.Generator, most: int = 128) -> tuple[Estimate, ...]:
    """Cells of every size: a rate of n^a, with a speed for each kind."""
    exponent = random.uniform(0.5, 1.0)
    estimates = []
    for number, kind in enumerate(fleet.kinds):
        speed = random.uniform(0.3, 1.0)
        for count in fleet.counts(number):
            if count <= most:
                cell = Cell(kind=kind.name, num_devices=count)
                estimates.append(Estimate(cell=cell, step_s=1 / (speed * count**exponent)))
    return tuple(estimates)


class Arrivals:
    """Jobs with drawn lengths, whose cells are Arena's or any."""

    def __init__(self, fleet: Fleet, cells: str, seed: int) -> None:
        self.fleet, self.cells = fleet, cells
        self.random = np.random.default_rng(seed)
        self.models = [times for times in arena_models(ARENA).values() if times] if cells == "arena" else []
        self.number = 0

    def next(self, time_s: float) -> Submitted:
        if self.cells == "arena":
            times = self.models[self.random.integers(len(self.models))]
            estimates = tuple(
                Estimate(cell=Cell(kind=entry.kind, num_devices=entry.num_devices), step_s=entry.step_s)
                for entry in times
            )
        else:
            estimates = any_cells(self.fleet, self.random)
        best_s = min(estimate.step_s for estimate in estimates)
        hours = float(np.exp(self.random.normal(1.5, 1.5)))
        self.number += 1
        job = Job(name=f"job{self.number}", num_steps=max(1, int(3600 * hours / best_s)))
        return Submitted(time_s=time_s, job=job, estimates=estimates)


def lp_bound(state: State) -> float:
    """The largest utility of a fractional allocation, by HiGHS."""
    given = round_of(state)
    columns = given.columns
    utility = utilities(columns, state.options, state.now_s)
    cells = np.arange(len(utility))
    rows = np.concatenate([columns.job_of_cell, columns.num_jobs + columns.kind])
    values = np.concatenate([np.ones(len(cells)), columns.count])
    shape = (columns.num_jobs + columns.num_kinds, len(cells))
    matrix = coo_array((values, (rows, np.concatenate([cells, cells]))), shape=shape).tocsr()
    limits = np.concatenate([np.ones(columns.num_jobs), given.capacity[: columns.num_kinds]])
    result = linprog(-utility, A_ub=matrix, b_ub=limits, method="highs")
    if not result.success:
        sys.exit(f"fleet_rounds: HiGHS: {result.message}")
    return -float(result.fun)


def after_event(state: State, event: Event) -> State:
    """The state after an event whose actions take no time."""
    state, actions = schedule(state, event)
    for action in actions:
        if not isinstance(action, Stop | Plan):
            state, _ = schedule(state, Started(time_s=event.time_s, job=action.job, attempt=action.attempt))
    return state


def timed_round(state: State, time_s: float, with_bound: bool) -> tuple[State, dict[str, float]]:
    state = replace_now(state, time_s)
    bound = lp_bound(state) if with_bound else 0.0
    begin_s = time.process_time()
    after, _ = schedule(state, Ticked(time_s=time_s))
    cpu_s = time.process_time() - begin_s
    after = after_event(state, Ticked(time_s=time_s))
    assert after.last_round is not None
    return after, {
        "cpu_s": cpu_s,
        "of_lp": after.last_round.utility / bound if with_bound else 1.0,
        "of_bound": after.last_round.utility / after.last_round.bound,
    }


def replace_now(state: State, time_s: float) -> State:
    columns = state.columns
    state = replace(state, now_s=time_s)
    object.__setattr__(state, "columns", columns)
    return state


def measure(fleet: Fleet, cells: str, num_jobs: int, seed: int, with_bound: bool) -> list[dict[str, Any]]:
    arrivals = Arrivals(fleet, cells, seed)
    state = State(fleet=fleet, options=SchedulerOptions(realloc_s=120.0))
    for _ in range(num_jobs):
        state = after_event(state, arrivals.next(0.0))
    state, first = timed_round(state, 0.0, with_bound)
    warm = []
    for number in range(1, 4):
        now_s = number * ROUND_S
        running = [job for job in state.jobs if job.allocation is not None]
        for job in running[:: max(1, int(1 / CHURN))]:
            state = after_event(state, Completed(time_s=now_s, job=job.name, attempt=job.attempt))
        for _ in range(num_jobs - len(state.jobs)):
            state = after_event(state, arrivals.next(now_s))
        state, figures = timed_round(state, now_s, with_bound)
        warm.append({"round": "warm", **figures})
    return [{"round": "first", **first}, *warm]


def lazy_planning(num_jobs: int, seed: int) -> dict[str, float]:
    """Plans per job until no new cell is chosen, and the utility over that with every cell planned.

    A planned step is 1.01 to 1.43 times its bound, as on our recipes.
    """
    fleet = arena_fleet()
    arrivals, random = Arrivals(fleet, "any", seed), np.random.default_rng(seed + 1000)
    lazy = State(fleet=fleet, options=SchedulerOptions(realloc_s=120.0))
    full = lazy
    planned: dict[tuple[str, Cell], Estimate] = {}
    for _ in range(num_jobs):
        submitted = arrivals.next(0.0)
        truth = tuple(
            replace(estimate, step_s=estimate.step_s * random.uniform(1.01, 1.43)) for estimate in submitted.estimates
        )
        planned |= {(submitted.job.name, estimate.cell): estimate for estimate in truth}
        bounds = tuple(replace(estimate, grade="bound") for estimate in submitted.estimates)
        lazy, _ = schedule(lazy, replace(submitted, estimates=bounds))
        full, _ = schedule(full, replace(submitted, estimates=truth))
    num_plans, now_s, starts = 0, 0.0, {}
    for _ in range(50):
        # Jobs start only when planning has settled, so that both fleets are asked the same question.
        after, actions = schedule(replace_now(lazy, now_s), Ticked(time_s=now_s))
        plans = [action for action in actions if isinstance(action, Plan)]
        if not plans:
            break
        num_plans += len(plans)
        now_s += ROUND_S
        for plan in plans:
            estimate = planned[plan.job, plan.cell]
            lazy, _ = schedule(lazy, Estimated(time_s=now_s, job=plan.job, estimates=(estimate,)))
        lazy = replace(lazy, last_round_s=None, next_round_s=now_s)
    starts = {job.name: job.allocation.cell for job in after.jobs if job.allocation is not None}
    full, _ = schedule(replace_now(full, now_s), Ticked(time_s=now_s))
    best = {job.name: job.allocation.cell for job in full.jobs if job.allocation is not None}
    given = round_of(State(fleet=fleet, options=full.options, now_s=now_s, jobs=unallocated(full)))
    utility = utilities(given.columns, full.options, now_s)

    def worth(cells: dict[str, Cell]) -> float:
        total = 0.0
        for row, job in enumerate(given.columns.jobs):
            if job.name in cells:
                wanted = cells[job.name]
                kind = fleet.kind_number(wanted.kind)
                for cell in range(given.columns.first[row], given.columns.first[row + 1]):
                    if given.columns.kind[cell] == kind and given.columns.count[cell] == wanted.num_devices:
                        total += float(utility[cell])
        return total

    num_cells = len(planned) / num_jobs
    return {"plans_per_job": num_plans / num_jobs, "cells_per_job": num_cells, "of_full": worth(starts) / worth(best)}


def unallocated(state: State) -> tuple[JobState, ...]:
    return tuple(replace(job, allocation=None, phase="waiting", attempt=0, num_reallocations=0) for job in state.jobs)


def main() -> None:
    worlds = [(arena_fleet(), cells, num_jobs, True) for cells in ("arena", "any") for num_jobs in (200, 1000)]
    worlds.append((large_fleet(), "any", 5000, False))
    rows, results = [], []
    for fleet, cells, num_jobs, with_bound in worlds:
        if cells == "arena" and not ARENA.is_dir():
            print(
                "fleet_rounds: Arena's cells skipped, there is no ../shared/traces beside the checkout", file=sys.stderr
            )
            continue
        measure(fleet, cells, 20, 0, False)  # compiles
        gc.collect()
        gc.freeze()
        num_seeds = NUM_SEEDS if with_bound else 1
        entries = [entry for seed in range(num_seeds) for entry in measure(fleet, cells, num_jobs, seed, with_bound)]
        num_devices = fleet.cluster.num_devices
        results.append({"num_devices": num_devices, "cells": cells, "num_jobs": num_jobs, "rounds": entries})
        for kind in ("first", "warm"):
            chosen = [entry for entry in entries if entry["round"] == kind]
            of_lp = [entry["of_lp"] for entry in chosen]
            of_bound = [entry["of_bound"] for entry in chosen]
            cpu_s = [1e3 * entry["cpu_s"] for entry in chosen]
            rows.append(
                [f"{num_devices:,}", cells, f"{num_jobs:,}", kind]
                + ([f"{mean(of_lp):.4f}", f"{min(of_lp):.4f}"] if with_bound else ["-", "-"])
                + [f"{mean(of_bound):.4f}", f"{mean(cpu_s):.1f}", f"{max(cpu_s):.1f}"]
            )
            print(rows[-1], file=sys.stderr, flush=True)
    header = ["devices", "cells", "jobs", "round", "of LP bound, mean", "least", "of own bound", "CPU, ms", "most, ms"]
    lazy_rows, lazy_results = [], []
    for num_jobs in (200, 1000):
        entries = [lazy_planning(num_jobs, seed) for seed in range(NUM_SEEDS)]
        lazy_results.append({"num_jobs": num_jobs, "seeds": entries})
        of_full = [entry["of_full"] for entry in entries]
        plans = mean(entry["plans_per_job"] for entry in entries)
        num_cells = f"{entries[0]['cells_per_job']:.0f}"
        lazy_rows.append([f"{num_jobs:,}", num_cells, f"{plans:.2f}", f"{mean(of_full):.4f}", f"{min(of_full):.4f}"])
        print(lazy_rows[-1], file=sys.stderr, flush=True)
    lazy_header = ["jobs", "cells per job", "plans per job", "utility over planning every cell, mean", "least"]
    table = "\n".join(
        [
            markdown(header, rows),
            "\nLazy planning on 1,280 devices, plans simulated as 1.01 to 1.43 times their bound:\n",
            markdown(lazy_header, lazy_rows),
        ]
    )
    publish("fleet_rounds", {"worlds": results, "lazy": lazy_results}, table)


if __name__ == "__main__":
    main()
