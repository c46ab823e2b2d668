"""The timeline of a fleet from recorded events: of a log, or of the store of a live fleet.

The events are replayed through the scheduler, and the timeline follows from the changes of its state. Times are those
of events. Rates are relative to the best rate that the job's estimates allow.
"""

from __future__ import annotations

from dataclasses import replace

from spindle.fleet.event_log import EventLog
from spindle.fleet.events import Event, NodeJoined, NodeLost, Progressed, Resumed, Started, Suspended, Ticked
from spindle.fleet.explain import WaitReasons
from spindle.fleet.fleet_timeline import (
    Fault,
    FleetTimeline,
    JobRecord,
    JobSpan,
    RoundRecord,
    node_records,
    waits_of,
)
from spindle.fleet.scheduler import schedule
from spindle.fleet.state import COMPLETED, FAILED, WAITING, JobState, State


def timeline_of_log(log: EventLog, name: str) -> FleetTimeline:
    """The timeline of recorded events; jobs that have not ended count until the last event."""
    history = History(State(fleet=log.fleet, options=log.options))
    for event, _ in log.entries:
        history.add(event)
    return history.timeline(name)


class History:
    """Follows the events of a fleet one by one; `timeline` can be called at any time."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.open: dict[str, JobSpan] = {}
        self.spans: list[JobSpan] = []
        self.rounds: list[RoundRecord] = []
        self.faults: dict[str, Fault] = {}
        self.ended_faults: list[Fault] = []
        self.ended_s: dict[str, float] = {}
        self.paused: dict[str, float] = {}  # jobs that a user has stopped, since when
        self.pauses: list[tuple[str, float, float]] = []
        self.reasons = WaitReasons()

    def add(self, event: Event) -> None:
        before = self.state
        self.state, _ = schedule(before, event)
        now_s = self.state.now_s
        if self.state.jobs is not before.jobs:
            self._follow(before, now_s)
        match event:
            case Started() if self._is_open(event.job, event.attempt):
                self.open[event.job] = replace(self.open[event.job], ready_s=now_s)
            case Progressed() if self._is_open(event.job, event.attempt) and event.step_s:
                self.open[event.job] = replace(self.open[event.job], step_s=event.step_s)
            case Suspended():
                self.paused.setdefault(event.job, now_s)
            case Resumed() if event.job in self.paused:
                self.pauses.append((event.job, self.paused.pop(event.job), now_s))
            case NodeLost() if event.node not in self.faults:
                self.faults[event.node] = Fault(node=event.node, start_s=now_s, end_s=now_s)
            case NodeJoined() if event.node in self.faults:
                self.ended_faults.append(replace(self.faults.pop(event.node), end_s=now_s))
            case Ticked() if self.state.last_round is not before.last_round:
                self._round(now_s)
            case _:
                pass

    def _is_open(self, job: str, attempt: int) -> bool:
        return job in self.open and self.open[job].attempt == attempt

    def _follow(self, before: State, now_s: float) -> None:
        """End the spans of jobs that have released their devices, and begin spans of jobs that got devices."""
        old = {job.name: job for job in before.jobs}
        current = {job.name: job for job in self.state.jobs}
        for name, job in old.items():
            new = current.get(name)
            if new is job:
                continue
            if name in self.open and (new is None or new.allocation is None or new.attempt != job.attempt):
                self._close(job, new, now_s)
            if new is None:
                self.ended_s[name] = now_s
        for name, job in current.items():
            if job.allocation is not None and name not in self.open:
                self._begin(job, now_s)

    def _begin(self, job: JobState, now_s: float) -> None:
        assert job.allocation is not None
        cell = job.allocation.cell
        step_s = job.step_s(cell) if job.estimate(cell) is not None else 0.0
        best_s = min((job.step_s(estimate.cell) for estimate in job.estimates if estimate.fits), default=step_s)
        self.open[job.name] = JobSpan(
            job=job.name,
            attempt=job.attempt,
            kind=cell.kind,
            num_devices=cell.num_devices,
            nodes=job.allocation.nodes,
            start_s=now_s,
            ready_s=float("inf"),
            end_s=now_s,
            rate_share=best_s / step_s if step_s else 0.0,
            estimated_step_s=step_s,
        )

    def _close(self, before: JobState, after: JobState | None, now_s: float) -> None:
        self.spans.append(self._closed(before, after, now_s))
        del self.open[before.name]

    def _closed(self, before: JobState, after: JobState | None, now_s: float) -> JobSpan:
        """The open span of a job, ended. `lost_s`: from the step that it had reached back to the one from which it
        resumes."""
        span = self.open[before.name]
        step_s = span.step_s or span.estimated_step_s
        lost_steps = max(0.0, before.step_at(now_s) - after.step) if after is not None else 0.0
        trained_s = max(0.0, now_s - min(span.ready_s, now_s))
        lost_s = min(trained_s, lost_steps * step_s)
        return replace(span, ready_s=min(span.ready_s, now_s), end_s=now_s, lost_s=lost_s)

    def _round(self, now_s: float) -> None:
        report = self.state.last_round
        assert report is not None
        self.rounds.append(
            RoundRecord(
                time_s=now_s,
                num_waiting=sum(job.phase == WAITING for job in self.state.jobs),
                utility=report.utility,
                bound=report.bound,
                prices=tuple(price.value for price in report.prices),
            )
        )
        self.reasons.note(self.state)

    def timeline(self, name: str) -> FleetTimeline:
        state, end_s = self.state, self.state.now_s
        current = {job.name: job for job in state.jobs}
        still_open = [self._closed(current[job], None, end_s) for job in self.open]
        spans = tuple(sorted([*self.spans, *still_open], key=lambda span: (span.start_s, span.job)))
        known = sorted((*state.jobs, *state.ended), key=lambda job: job.arrival_s)
        jobs = tuple(self._record(job) for job in known)
        pauses = [*self.pauses, *((job, start_s, end_s) for job, start_s in self.paused.items())]
        waits = waits_of(jobs, spans, self.reasons.reasons, pauses)
        longest: dict[str, float] = {}
        for wait in waits:
            longest[wait.job] = max(longest.get(wait.job, 0.0), wait.end_s - wait.start_s)
        faults = [*self.ended_faults, *(replace(fault, end_s=end_s) for fault in self.faults.values())]
        return FleetTimeline(
            trace=name,
            policy=state.options.policy,
            fleet=state.fleet.cluster.name,
            num_devices=state.fleet.cluster.num_devices,
            notes=(),
            num_excluded=0,
            last_arrival_s=max((job.arrival_s for job in jobs), default=0.0),
            jobs=tuple(replace(job, longest_wait_s=longest.get(job.name, 0.0)) for job in jobs),
            spans=spans,
            rounds=tuple(self.rounds),
            faults=tuple(sorted(faults, key=lambda fault: fault.start_s)),
            nodes=node_records(state.fleet),
            waits=waits,
        )

    def _record(self, job: JobState) -> JobRecord:
        requested = next(
            (
                job.step_s(estimate.cell)
                for estimate in job.estimates
                if (estimate.cell.kind, estimate.cell.num_devices)
                == (job.job.requested_kind, job.job.requested_devices)
            ),
            min((job.step_s(estimate.cell) for estimate in job.estimates), default=0.0),
        )
        has_ended = job.phase in (COMPLETED, FAILED)
        return JobRecord(
            name=job.name,
            arrival_s=job.arrival_s,
            completion_s=self.ended_s.get(job.name, self.state.now_s) if has_ended else self.state.now_s,
            alone_s=(job.job.num_steps or job.step) * requested,
            requested_devices=max(1, job.job.requested_devices),
            longest_wait_s=0.0,
            num_reallocations=job.num_reallocations,
            team=job.job.team,
            phase=job.phase,
            estimates=job.estimates,
        )
