"""What happened to a fleet, and how good it was."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from spindle.fleet.events import NodeShare


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpan:
    """One attempt of a job: devices from `start_s` to `end_s`, training since `ready_s` (`end_s` if it never did).

    `rate_share` is its true rate over the best that the job could have; `lost_s` of its training was lost to a fault.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job from arrival to completion. `alone_s` is how long it takes in the cell that it requested."""

    name: str
    arrival_s: float
    completion_s: float
    alone_s: float
    requested_devices: int
    longest_wait_s: float
    num_reallocations: int

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
class Fault:
    """A node that was lost, and when it was back."""

    node: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTimeline:
    """A whole trace under a policy; the same trace, policy and seed give the same bytes."""

    trace: str
    policy: str
    fleet: str
    num_devices: int
    notes: tuple[str, ...]
    num_excluded: int
    last_arrival_s: float
    jobs: tuple[JobRecord, ...]
    spans: tuple[JobSpan, ...]
    rounds: tuple[RoundRecord, ...]
    faults: tuple[Fault, ...] = ()


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
