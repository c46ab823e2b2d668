"""The data of the report's page of a fleet: every device over time, by job, under one policy or several.

The page is that of steps: a device is a rank, and what it does for one attempt of a job is a span of `KINDS`. Times are
whole microseconds, so that months fit into what JavaScript counts exactly. `page/fleet.js` reads the rest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spindle.display import count_of
from spindle.errors import InputError
from spindle.fleet import GRADES, FleetMeasures, FleetTimeline, JobSpan, measure_fleet
from spindle.report.page_data import VERSION
from spindle.report.palette import COLOURS
from spindle.timeline import Column, pack

KINDS = ("training", "reallocation", "lost", "down")
CLASSES = (*KINDS, "idle")
_PHASES = 3  # spans of an attempt: training, reallocation, lost
_SHARE = 1_000_000  # utilities, prices and rates are whole millionths


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """Timelines of one fleet by name; the first two are compared when the page opens."""

    title: str
    timelines: Mapping[str, FleetTimeline]


def fleet_page_data(report: FleetReport) -> bytes:
    """The packed data of a page of kind `fleet`: the same bytes for the same report."""
    timelines = report.timelines
    for name, timeline in timelines.items():
        if not timeline.nodes:
            raise InputError(f"{name}: does not say which nodes the fleet has; write it again with this version")
        _refuse_unknown_names(name, timeline)
    jobs = list(dict.fromkeys(job.name for timeline in timelines.values() for job in timeline.jobs))
    number_of = {name: number for number, name in enumerate(jobs)}
    teams = list(dict.fromkeys(job.team for timeline in timelines.values() for job in timeline.jobs))
    columns: dict[str, Column] = {}
    headers = []
    for number, (name, timeline) in enumerate(timelines.items()):
        team_of = {job.name: teams.index(job.team) for job in timeline.jobs}
        headers.append(_timeline_header(name, timeline, number_of))
        made = {
            **_span_columns(timeline),
            **_attempt_columns(timeline, number_of),
            **_round_columns(timeline),
            **_job_columns(timeline, number_of, team_of),
        }
        columns |= {f"{number}.{key}": column for key, column in made.items()}
    header = {
        "spindle": "report",
        "version": VERSION,
        "kind": "fleet",
        "unit": 1e-6,
        "title": report.title,
        "kinds": KINDS,
        "classes": CLASSES,
        "groups": jobs,
        "tasks": [team or "no team" for team in teams],
        "colours": COLOURS,
        "programs": [],
        "timelines": headers,
        "curves": [],
        "steps": None,
        "assumptions": _assumptions(timelines),
        "attachments": [],
        "grades": GRADES,
    }
    return pack(header, columns)


def _refuse_unknown_names(where: str, timeline: FleetTimeline) -> None:
    if not timeline.jobs:
        raise InputError(f"{where}: has no jobs yet, so there is nothing to show")
    jobs, nodes = {job.name for job in timeline.jobs}, {node.name for node in timeline.nodes}
    for named, known, what in (
        ((span.job for span in timeline.spans), jobs, "job"),
        ((wait.job for wait in timeline.waits), jobs, "job"),
        ((fault.node for fault in timeline.faults), nodes, "node"),
        ((share.node for span in timeline.spans for share in span.nodes), nodes, "node"),
    ):
        unknown = next((name for name in named if name not in known), None)
        if unknown is not None:
            raise InputError(f"{where}: names the {what} {unknown!r}, which it does not describe; is it damaged?")


def _timeline_header(name: str, timeline: FleetTimeline, number_of: Mapping[str, int]) -> dict[str, Any]:
    num_devices = sum(node.num_devices for node in timeline.nodes)
    reasons = list(dict.fromkeys(wait.reason for wait in timeline.waits))
    positions = {reason: position for position, reason in enumerate(reasons)}
    return {
        "name": name,
        "measured": False,
        "program": 0,
        "planner": timeline.policy,
        "workload": timeline.trace,
        "cluster": timeline.fleet,
        "numRanks": num_devices,
        "numSpans": 0,
        "makespan": _micros(timeline.end_s),
        "bound": 0,
        "memoryLimit": 0,
        "settings": "",
        "nodes": [[node.name, node.kind, node.num_devices] for node in timeline.nodes],
        "measures": _measures(measure_fleet(timeline)),
        "reasons": reasons,
        "waits": [
            [number_of[wait.job], _micros(wait.start_s), _micros(wait.end_s), positions[wait.reason]]
            for wait in timeline.waits
        ],
        "faults": [[fault.node, _micros(fault.start_s), _micros(fault.end_s)] for fault in timeline.faults],
        "cells": {
            str(number_of[job.name]): [
                [
                    timeline.kinds.index(estimate.cell.kind) if estimate.cell.kind in timeline.kinds else -1,
                    estimate.cell.num_devices,
                    estimate.cell.num_stages,
                    estimate.step_s,
                    estimate.rank if estimate.fits else -1,
                ]
                for estimate in job.estimates
            ]
            for job in timeline.jobs
        },
        "phases": sorted({job.phase for job in timeline.jobs}),
    }


def _measures(measures: FleetMeasures) -> dict[str, float]:
    return {
        "jctMean": measures.jct_mean_s,
        "jctMedian": measures.jct_median_s,
        "jctP99": measures.jct_p99_s,
        "makespan": measures.makespan_s,
        "throughput": measures.throughput,
        "longestWait": measures.longest_wait_s,
        "fairnessWorst": measures.fairness_worst,
        "reallocations": measures.num_reallocations,
        "reallocationHours": measures.realloc_device_h,
        "lostHours": measures.fault_device_h,
        "rounds": measures.num_rounds,
    }


def _micros(time_s: float) -> int:
    return round(time_s * 1e6)


def _span_columns(timeline: FleetTimeline) -> dict[str, Column]:
    """What each device does, in the order of the page's rows. The instruction of a span is 3 x its attempt + the
    number of its kind; behind them come the times in which nodes are down, one for each fault."""
    first, position = {}, 0
    for node in timeline.nodes:
        first[node.name] = position
        position += node.num_devices
    sizes = {node.name: node.num_devices for node in timeline.nodes}
    spans: list[tuple[int, int, int, int]] = []  # rank, start, end, instruction
    for attempt, (span, devices) in enumerate(zip(timeline.spans, _devices(timeline), strict=True)):
        start, ready, end = _micros(span.start_s), _micros(span.ready_s), _micros(span.end_s)
        lost = max(ready, end - _micros(span.lost_s))
        parts = ((start, ready, 1), (ready, lost, 0), (lost, end, 2))
        for name, device in devices:
            spans += [(first[name] + device, begin, finish, attempt * _PHASES + kind) for begin, finish, kind in parts]
    for number, fault in enumerate(timeline.faults):
        instruction = len(timeline.spans) * _PHASES + number
        down = _micros(fault.start_s), min(_micros(fault.end_s), _micros(timeline.end_s))
        spans += [(first[fault.node] + device, *down, instruction) for device in range(sizes[fault.node])]
    rows = np.array([span for span in spans if span[2] > span[1]], dtype=np.int64).reshape(-1, 4)
    rank, start, end, instruction = rows[np.lexsort((rows[:, 1], rows[:, 0]))].T
    before = np.concatenate([[0], end[:-1]]) if len(end) else end
    return {"rank": rank, "instruction": instruction, "gap": start - before, "duration": end - start}


def _devices(timeline: FleetTimeline) -> list[list[tuple[str, int]]]:
    """The devices of each attempt: the lowest free ones of its nodes, because a timeline only has their number."""
    free: dict[str, list[int]] = {node.name: list(range(node.num_devices)) for node in timeline.nodes}
    leaving: list[tuple[float, int]] = []
    taken: list[list[tuple[str, int]]] = []
    for number, span in enumerate(timeline.spans):
        while leaving and leaving[0][0] <= span.start_s:
            for node, device in taken[heapq.heappop(leaving)[1]]:
                heapq.heappush(free[node], device)
        taken.append(list(_lowest(span, free)))
        heapq.heappush(leaving, (span.end_s, number))
    return taken


def _lowest(span: JobSpan, free: Mapping[str, list[int]]) -> Iterable[tuple[str, int]]:
    for share in span.nodes:
        if len(free.get(share.node, ())) < share.num_devices:
            raise InputError(
                f"attempt {span.attempt} of job {span.job!r} takes {count_of(share.num_devices, 'device')} of node "
                f"{share.node!r} at {span.start_s:g} s, of which {len(free.get(share.node, ()))} are free; is the "
                "timeline damaged?"
            )
        for _ in range(share.num_devices):
            yield share.node, heapq.heappop(free[share.node])


def _attempt_columns(timeline: FleetTimeline, number_of: Mapping[str, int]) -> dict[str, Column]:
    spans = timeline.spans
    kinds = {kind: number for number, kind in enumerate(timeline.kinds)}
    return {
        "attempt.job": _ints(number_of[span.job] for span in spans),
        "attempt.number": _ints(span.attempt for span in spans),
        "attempt.kind": _ints(kinds.get(span.kind, -1) for span in spans),
        "attempt.devices": _ints(span.num_devices for span in spans),
        "attempt.start": _ints(_micros(span.start_s) for span in spans),
        "attempt.ready": _ints(_micros(span.ready_s) for span in spans),
        "attempt.end": _ints(_micros(span.end_s) for span in spans),
        "attempt.lost": _ints(_micros(span.lost_s) for span in spans),
        "attempt.estimated": _ints(_micros(span.estimated_step_s) for span in spans),
        "attempt.step": _ints(_micros(span.step_s) for span in spans),
        "attempt.rate": _ints(round(span.rate_share * _SHARE) for span in spans),
    }


def _round_columns(timeline: FleetTimeline) -> dict[str, Column]:
    rounds = timeline.rounds
    columns = {
        "round.time": _ints(_micros(entry.time_s) for entry in rounds),
        "round.waiting": _ints(entry.num_waiting for entry in rounds),
        "round.utility": _ints(round(entry.utility * _SHARE) for entry in rounds),
        "round.bound": _ints(round(entry.bound * _SHARE) for entry in rounds),
    }
    if any(entry.prices for entry in rounds):
        for kind in range(len(timeline.kinds)):
            columns[f"round.price.{kind}"] = _ints(
                round(entry.prices[kind] * _SHARE) if kind < len(entry.prices) else 0 for entry in rounds
            )
    return columns


def _job_columns(
    timeline: FleetTimeline, number_of: Mapping[str, int], team_of: Mapping[str, int]
) -> dict[str, Column]:
    jobs = timeline.jobs
    phases = sorted({job.phase for job in jobs})
    return {
        "job.number": _ints(number_of[job.name] for job in jobs),
        "job.team": _ints(team_of[job.name] for job in jobs),
        "job.phase": _ints(phases.index(job.phase) for job in jobs),
        "job.arrival": _ints(_micros(job.arrival_s) for job in jobs),
        "job.completion": _ints(_micros(job.completion_s) for job in jobs),
        "job.wait": _ints(_micros(job.longest_wait_s) for job in jobs),
        "job.reallocations": _ints(job.num_reallocations for job in jobs),
    }


def _ints(values: Iterable[int]) -> Column:
    return np.fromiter(values, dtype=np.int64)


def _assumptions(timelines: Mapping[str, FleetTimeline]) -> Sequence[str]:
    lines: dict[str, None] = {}
    for name, timeline in timelines.items():
        lines |= dict.fromkeys(f"{note[:1].upper()}{note[1:]}." for note in timeline.notes)
        if timeline.num_excluded:
            left_out = count_of(timeline.num_excluded, "job")
            lines[f"{left_out} left out: there is no step time for what is requested."] = None
        unfinished = sum(job.phase not in ("completed", "failed") for job in timeline.jobs)
        if unfinished:
            lines[f"{name}: {count_of(unfinished, 'job')} not done at the end; they count as completed there."] = None
        if any(entry.bound for entry in timeline.rounds):
            lines["The bound of a round is on the sum of utilities of any allocation; prices are per device."] = None
        if timeline.waits and not any(wait.reason for wait in timeline.waits):
            lines["No wait lasted until the round after it."] = None
    lines["A wait is explained as of the first round that left the job without devices."] = None
    lines[
        "Timelines have counts of devices for each node; which devices of a node an attempt had is drawn, not known."
    ] = None
    return list(lines)
