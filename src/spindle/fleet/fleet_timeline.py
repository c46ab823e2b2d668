"""What happened to a fleet, and how good it was."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from spindle.fleet.cells import Estimate
from spindle.fleet.events import NodeShare
from spindle.fleet.fleet import Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpan:
    """One attempt of a job: devices from `start_s` to `end_s`, training since `ready_s` (`end_s` if it never did).

    `rate_share` is its true rate over the best that the job could have; `lost_s` of its training was lost to a fault.
    `estimated_step_s` is what the scheduler expected when it started, `step_s` what was measured; 0 where unknown.
    """

    job: str
    attempt: int
    kind: str
    num_devices: int
    nodes: tuple[NodeShare, ...]
    start_s: float
    ready_s: float
    end_s: float
    rate_share: float
    lost_s: float = 0.0
    estimated_step_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job from arrival to completion. `alone_s` is how long it takes in the cell that it requested; `estimates` are
    what was known of its cells at the end."""

    name: str
    arrival_s: float
    completion_s: float
    alone_s: float
    requested_devices: int
    longest_wait_s: float
    num_reallocations: int
    team: str = ""
    phase: str = "completed"
    estimates: tuple[Estimate, ...] = ()

    @property
    def jct_s(self) -> float:
        return self.completion_s - self.arrival_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """A round: jobs waiting after it, its utility and bound, prices by kind."""

    time_s: float
    num_waiting: int
    utility: float
    bound: float
    prices: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A time in which a job had no devices, and why, as of the first round that gave it none."""

    job: str
    start_s: float
    end_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    name: str
    kind: str
    num_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A node that was lost, and when it was back."""

    node: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTimeline:
    """A whole trace under a policy, or the recorded life of a fleet; the same trace, policy and seed give the same
    bytes. `nodes` are in the fleet's order, which also numbers kinds: prices of rounds are in that order."""

    trace: str
    policy: str
    fleet: str
    num_devices: int
    notes: tuple[str, ...] = ()
    num_excluded: int
    last_arrival_s: float
    jobs: tuple[JobRecord, ...] = ()
    spans: tuple[JobSpan, ...] = ()
    rounds: tuple[RoundRecord, ...] = ()
    faults: tuple[Fault, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    waits: tuple[Wait, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node.kind for node in self.nodes))

    @property
    def end_s(self) -> float:
        return max((job.completion_s for job in self.jobs), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMeasures:
    """Figures of a timeline. `throughput` is the sum of normalised rates, on average until the last arrival; `fairness`
    the finish-time fairness (Themis): completion time over that with an equal share of the fleet."""

    jct_mean_s: float
    jct_median_s: float
    jct_p99_s: float
    makespan_s: float
    throughput: float
    longest_wait_s: float
    fairness_mean: float
    fairness_worst: float
    num_reallocations: int
    realloc_device_h: float
    fault_device_h: float
    num_rounds: int
    num_jobs: int
    num_excluded: int


def node_records(fleet: Fleet) -> tuple[NodeRecord, ...]:
    return tuple(
        NodeRecord(name=name, kind=fleet.kinds[kind].name, num_devices=size)
        for name, kind, size in zip(fleet.node_names, fleet.kind_of_node, fleet.size_of_node, strict=True)
    )


def waits_of(
    jobs: Iterable[JobRecord],
    spans: Iterable[JobSpan],
    reasons: Mapping[tuple[str, float], str],
    pauses: Iterable[tuple[str, float, float]] = (),
) -> tuple[Wait, ...]:
    """The times without devices of every job, from arrival to its end; `reasons` by job and beginning. In a pause (job,
    start, end) a user has stopped it, so it does not wait."""
    begins = {job.name: job.arrival_s for job in jobs}
    waits = []
    others = (*((span.job, span.start_s, span.end_s) for span in spans), *pauses)
    for name, start_s, end_s in sorted(others, key=lambda other: other[1]):
        since_s = begins[name]
        if start_s > since_s:
            waits.append(Wait(job=name, start_s=since_s, end_s=start_s, reason=reasons.get((name, since_s), "")))
        begins[name] = end_s
    for job in jobs:
        since_s = begins[job.name]
        if job.completion_s > since_s:
            reason = reasons.get((job.name, since_s), "")
            waits.append(Wait(job=job.name, start_s=since_s, end_s=job.completion_s, reason=reason))
    return tuple(sorted(waits, key=lambda wait: (wait.start_s, wait.job)))


def measure_fleet(timeline: FleetTimeline) -> FleetMeasures:
    """The figures of a timeline. Every job counts: simulations run until all are done."""
    jct = np.array([job.jct_s for job in timeline.jobs])
    fairness = _fairness(timeline)
    window_s = max(timeline.last_arrival_s, 1.0)
    trained = sum(
        span.rate_share * max(0.0, min(span.end_s, window_s) - min(span.ready_s, window_s)) for span in timeline.spans
    )
    return FleetMeasures(
        jct_mean_s=float(jct.mean()),
        jct_median_s=float(np.median(jct)),
        jct_p99_s=float(np.percentile(jct, 99)),
        makespan_s=max(job.completion_s for job in timeline.jobs),
        throughput=trained / window_s,
        longest_wait_s=max(job.longest_wait_s for job in timeline.jobs),
        fairness_mean=float(fairness.mean()),
        fairness_worst=float(fairness.max()),
        num_reallocations=sum(job.num_reallocations for job in timeline.jobs),
        realloc_device_h=sum(span.num_devices * (span.ready_s - span.start_s) for span in timeline.spans) / 3600,
        fault_device_h=sum(span.num_devices * span.lost_s for span in timeline.spans) / 3600,
        num_rounds=len(timeline.rounds),
        num_jobs=len(timeline.jobs),
        num_excluded=timeline.num_excluded,
    )


def _fairness(timeline: FleetTimeline) -> np.ndarray:
    """Completion time over that on a fleet of 1/n of the devices, n being the mean number of jobs meanwhile."""
    changes = sorted([(job.arrival_s, 1) for job in timeline.jobs] + [(job.completion_s, -1) for job in timeline.jobs])
    times, areas, counts = [0.0], [0.0], [0]
    for time_s, change in changes:
        areas.append(areas[-1] + counts[-1] * (time_s - times[-1]))
        times.append(time_s)
        counts.append(counts[-1] + change)

    def area(time_s: float) -> float:
        position = bisect_right(times, time_s) - 1
        return areas[position] + counts[position] * (time_s - times[position])

    ratios = []
    for job in timeline.jobs:
        num_jobs = (area(job.completion_s) - area(job.arrival_s)) / max(job.jct_s, 1e-9)
        contention = max(1.0, job.requested_devices * num_jobs / timeline.num_devices)
        ratios.append(job.jct_s / max(job.alone_s * contention, 1e-9))
    return np.array(ratios)
