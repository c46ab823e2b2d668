"""`spindle fleet simulate`: a trace under one policy."""

from __future__ import annotations

from pathlib import Path
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
    PolicyName,
    ReallocS,
    Seed,
    SlowNodes,
    Tables,
    TraceFile,
)
from spindle.cli.options import AsJson


def simulate(
    trace: TraceFile,
    fleet: FleetName = "arena",
    policy: PolicyName = "price",
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
    until: Annotated[
        float | None,
        typer.Option(
            "--until", metavar="SECONDS", help="Stop at this time, for use with `explain`.", min=0, show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="TIMELINE.json",
            help="Write the timeline here, for `spindle report`.",
            show_default=False,
        ),
    ] = None,
    events: Annotated[
        Path | None,
        typer.Option(
            "--events",
            metavar="EVENTS.jsonl",
            help="Write all events and the scheduler's actions here, for `replay`, `explain` and `nodes`.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a trace of jobs on a fleet under a policy, until all jobs are done.

    The policy only sees estimates, never the true step times. A .jsonl trace has one job per line, by time:

    {"name": "a", "time_s": 0, "num_steps": 1000, "requested": ["a100", 4], "times": [["a100", 4, 2.5], ["l40s", 8, 6]]}

    with the seconds of a step for each kind and number of devices, and optionally team, priority, deadline_s, kinds,
    min_devices and max_devices. Examples:

    spindle fleet simulate jobs.jsonl --fleet a100x16,l40sx8

    spindle fleet simulate traces/arena/sim_trace_1938jobs.csv --policy sia --faster 2 --error 0.1
    """
    from spindle.artifact import to_json, write_artifact, write_atomically
    from spindle.cli.fleet.inputs import excluded_note, load_trace, only_first
    from spindle.cli.fleet.tables import measures_table
    from spindle.cli.terminal import notice, refuse_outputs, show, show_json
    from spindle.fleet import Injection, SchedulerOptions, measure_fleet, simulate_fleet
    from spindle.fleet.event_log import log_lines
    from spindle.fleet.fleet_file import fleet_named
    from spindle.fleet.policies import policy_named

    refuse_outputs(output, events, inputs=(trace, fleet))
    policy_named(policy)
    machines = fleet_named(fleet)
    options = SchedulerOptions(policy=policy, objective=objective, realloc_s=reallocation)
    injection = Injection(
        seed=seed,
        estimation_error=error,
        length_sigma=length_error,
        failures_per_hour=failures,
        slow_nodes=slow_nodes,
    )
    given = only_first(load_trace(trace, machines, tables, load, faster, seed), jobs)
    entries: list = []  # type: ignore[type-arg]
    observe = (lambda event, actions: entries.append((event, actions))) if events is not None else None
    until_s = float("inf") if until is None else until
    result = simulate_fleet(given, machines, options, injection, observe, until_s, explains=output is not None)
    measures = measure_fleet(result.timeline)
    if output is not None:
        write_artifact(output, "fleet-timeline", result.timeline)
    if events is not None:
        write_atomically(events, "\n".join(log_lines(machines, options, entries)) + "\n")
    if as_json:
        show_json({"trace": given.name, "policy": policy, "notes": list(given.notes), **to_json(measures)})
        return
    show(measures_table({policy: (measures, result.round_cpu_s)}), *given.notes)
    if given.num_excluded:
        show(excluded_note(given))
    if until is not None:
        show(f"cut at {until:g} s: jobs that were not done by then count as completed at that time")
    if output is not None:
        notice(f"wrote {output}")
