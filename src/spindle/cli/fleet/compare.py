"""`spindle fleet compare`: a trace under every policy."""

from __future__ import annotations

from typing import Annotated

import typer

from spindle.cli.fleet.options import (
    Error,
    Failures,
    Faster,
    FleetName,
    LengthError,
    Limit,
    Load,
    Objective,
    ReallocS,
    Seed,
    SlowNodes,
    Tables,
    TraceFile,
)
from spindle.cli.options import AsJson


def compare(
    trace: TraceFile,
    fleet: FleetName = "arena",
    policies: Annotated[
        str, typer.Option("--policies", metavar="A,B", help="Only these policies, in this order.", show_default=False)
    ] = "",
    objective: Objective = "jct",
    tables: Tables = None,
    load: Load = 0.9,
    faster: Faster = 1.0,
    reallocation: ReallocS = None,
    error: Error = 0.0,
    length_error: LengthError = 0.0,
    failures: Failures = 0.0,
    slow_nodes: SlowNodes = 0.0,
    seed: Seed = 0,
    jobs: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Compare all policies on one trace, in one table.

    All policies get the same jobs, estimation errors, faults and reallocation cost. Examples:

    spindle fleet compare jobs.jsonl --fleet a100x16,l40sx8

    spindle fleet compare traces/elasticflow/cluster03.csv --fleet fleet.toml --load 1.3 --error 0.1
    """
    from spindle.artifact import to_json
    from spindle.cli.fleet.inputs import excluded_note, load_trace, only_first
    from spindle.cli.fleet.tables import measures_table
    from spindle.cli.terminal import progress_bar, show, show_json
    from spindle.fleet import COMPARED, Injection, SchedulerOptions, measure_fleet, simulate_fleet
    from spindle.fleet.fleet_file import fleet_named
    from spindle.fleet.policies import policy_named

    names = tuple(name.strip() for name in policies.split(",")) if policies else COMPARED
    for name in names:
        policy_named(name)
    machines = fleet_named(fleet)
    injection = Injection(
        seed=seed,
        estimation_error=error,
        length_sigma=length_error,
        failures_per_hour=failures,
        slow_nodes=slow_nodes,
    )
    given = only_first(load_trace(trace, machines, tables, load, faster, seed), jobs)
    measures = {}
    with progress_bar(f"{given.name} under {len(names)} policies", len(names)) as report:
        for number, name in enumerate(names):
            options = SchedulerOptions(policy=name, objective=objective, realloc_s=reallocation)
            result = simulate_fleet(given, machines, options, injection)
            measures[name] = measure_fleet(result.timeline), result.round_cpu_s
            report(number + 1)
    if as_json:
        show_json(
            {
                "trace": given.name,
                "notes": list(given.notes),
                "policies": {name: to_json(entry) for name, (entry, _) in measures.items()},
            }
        )
        return
    show(measures_table(measures), *given.notes)
    if given.num_excluded:
        show(excluded_note(given))
