"""Simulates a whole trace under a policy.

The scheduler is the real one; this module replaces the engine and the machines. It knows the true step times. The
scheduler only gets estimates, and measurements after the 20th step of an attempt. A reallocation holds
the new devices for its cost before training goes on. Every run continues until all jobs are done.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from spindle.errors import FleetError
from spindle.fleet.cells import Cell, Estimate, check_limits
from spindle.fleet.events import (
    Action,
    Completed,
    Event,
    LostAttempt,
    NodeJoined,
    NodeLost,
    NodeShare,
    Plan,
    Progressed,
    Resize,
    Start,
    Started,
    Stop,
    Stopped,
    Submitted,
    Ticked,
)
from spindle.fleet.explain import WaitReasons
from spindle.fleet.fleet import Fleet
from spindle.fleet.fleet_timeline import (
    Fault,
    FleetTimeline,
    JobRecord,
    JobSpan,
    RoundRecord,
    node_records,
    waits_of,
)
from spindle.fleet.job import Job
from spindle.fleet.leases import Due, are_guaranteed, check_wait, precedes_leases, record_due_jobs
from spindle.fleet.scheduler import schedule
from spindle.fleet.state import WAITING, JobState, SchedulerOptions, State
from spindle.fleet.trace import Injection, Trace, TraceJob

_MEASURED_AFTER = 20  # steps
_NEVER = math.inf


@dataclass(slots=True)
class _Run:
    """The true state of a job."""

    trace: TraceJob
    times: dict[tuple[str, int], float]
    best_rate: float
    step: float = 0.0
    attempt: int = 0
    start_s: float = 0.0
    ready_s: float = _NEVER
    step_s: float = 0.0
    estimated_step_s: float = 0.0
    cell: Cell | None = None
    nodes: tuple[NodeShare, ...] = ()
    waiting_since_s: float = 0.0
    longest_wait_s: float = 0.0
    num_reallocations: int = 0
    completion_s: float = _NEVER

    def step_at(self, time_s: float) -> float:
        return self.step + max(0.0, time_s - self.ready_s) / self.step_s if self.cell else self.step


@dataclass(slots=True)
class SimulatedFleet:
    """The result: the timeline, the scheduler's last state, and the CPU time of each round in seconds."""

    timeline: FleetTimeline
    state: State
    round_cpu_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


def simulate_fleet(
    trace: Trace,
    fleet: Fleet,
    options: SchedulerOptions = SchedulerOptions(),  # noqa: B008
    injection: Injection = Injection(),  # noqa: B008
    observe: Callable[[Event, tuple[Action, ...]], None] | None = None,
    until_s: float = _NEVER,
    explains: bool = False,
) -> SimulatedFleet:
    """Simulate a trace. `observe` is called with every event and the scheduler's answer. With `until_s` the run is cut
    there, and jobs that are not done count as completed at that time. With `explains` the timeline says why jobs
    waited."""
    begin_s = time.process_time()
    simulation = _Simulation(trace, fleet, options, injection, observe)
    simulation.reasons = WaitReasons() if explains else None
    simulation.run(until_s)
    timeline = simulation.timeline(min(until_s, simulation.state.now_s))
    return SimulatedFleet(
        timeline=timeline,
        state=simulation.state,
        round_cpu_s=simulation.round_cpu_s,
        cpu_s=time.process_time() - begin_s,
    )


class _Simulation:
    def __init__(
        self,
        trace: Trace,
        fleet: Fleet,
        options: SchedulerOptions,
        injection: Injection,
        observe: Callable[[Event, tuple[Action, ...]], None] | None,
    ) -> None:
        self.trace, self.fleet, self.options, self.injection = trace, fleet, options, injection
        self.observe = observe
        self.state = State(fleet=fleet, options=options)
        self.queue: list[tuple[float, int, Event]] = []
        self.number = 0
        self.runs: dict[str, _Run] = {}
        self.spans: list[JobSpan] = []
        self.rounds: list[RoundRecord] = []
        self.faults: list[Fault] = []
        self.round_cpu_s: list[float] = []
        self.reasons: WaitReasons | None = None
        self.num_left = 0
        self.last_event_s = 0.0
        self.down: set[str] = set()
        self.due_jobs: dict[str, Due] = {}
        self.has_ahead = any(job.job.is_urgent or job.job.deadline_s is not None for job in trace.jobs)
        self.ahead_s = 0.0  # in which jobs that go ahead of leases have held devices
        # Lost nodes may take what a lease would need.
        self.checks_waits = are_guaranteed(options) and not injection.failures_per_hour
        self.slow = _slow_nodes(fleet, injection)
        self._submit_all()
        self.failures = random.Random(f"failures {injection.seed}")
        if injection.failures_per_hour:
            self._plan_failure(0.0)

    def _submit_all(self) -> None:
        kinds = {kind.name for kind in self.fleet.kinds}
        for position, job in enumerate(self.trace.jobs):
            times = {(time.kind, time.num_devices): time.step_s for time in job.times if time.kind in kinds}
            estimates = _estimates(job, kinds, self.injection, position)
            reported = _reported(job, self.injection, position)
            if not estimates:
                raise FleetError(
                    f"trace {self.trace.name!r}: job {job.job.name!r} has times for "
                    f"{', '.join(sorted({time.kind for time in job.times}))}, the fleet has {', '.join(sorted(kinds))}"
                )
            cells = [estimate.cell for estimate in estimates if self._may_run(reported, estimate.cell)]
            check_limits(self.fleet, reported, cells)
            if not cells:
                raise FleetError(
                    f"trace {self.trace.name!r}: job {reported.name!r} fits in no cell of the fleet: it has times for "
                    f"{', '.join(estimate.cell.text for estimate in estimates)}, and accepts "
                    f"{', '.join(reported.kinds) or 'any kind'}, {reported.min_devices} to "
                    f"{reported.max_devices or 'any number of'} devices"
                )
            self.runs[job.job.name] = _Run(
                trace=job, times=times, best_rate=1 / min(times.values()), waiting_since_s=job.arrival_s
            )
            self._push(Submitted(time_s=job.arrival_s, job=reported, estimates=estimates))
            self.num_left += 1

    def _may_run(self, job: Job, cell: Cell) -> bool:
        return job.accepts(cell.kind, cell.num_devices) and self.fleet.can_hold(
            self.fleet.kind_number(cell.kind), cell.num_devices
        )

    def _push(self, event: Event) -> None:
        self.number += 1
        heapq.heappush(self.queue, (event.time_s, self.number, event))

    def run(self, until_s: float) -> None:
        while self.num_left:
            next_s = self.queue[0][0] if self.queue else _NEVER
            tick_s = self.state.next_round_s if self.state.next_round_s is not None else _NEVER
            if min(next_s, tick_s) == _NEVER or min(next_s, tick_s) > until_s:
                if min(next_s, tick_s) == _NEVER:
                    raise FleetError(
                        f"policy {self.options.policy!r} leaves {self.num_left} jobs of trace {self.trace.name!r} "
                        "waiting forever: nothing more would happen"
                    )
                return
            if next_s <= tick_s:
                event = heapq.heappop(self.queue)[2]
                if self._apply(event):
                    self._send(event)
            else:
                self._tick(max(tick_s, self.state.now_s))
        # Outdated events of stopped attempts may stay in the queue.

    def _tick(self, time_s: float) -> None:
        before_s = time.process_time()
        self._send(Ticked(time_s=time_s))
        self.round_cpu_s.append(time.process_time() - before_s)
        report = self.state.last_round
        assert report is not None
        waiting = sum(job.allocation is None for job in self.state.jobs)
        self.rounds.append(
            RoundRecord(
                time_s=time_s,
                num_waiting=waiting,
                utility=report.utility,
                bound=report.bound,
                prices=tuple(price.value for price in report.prices),
            )
        )
        if self.reasons is not None:
            self.reasons.note(self.state)
        if self.checks_waits:
            record_due_jobs(self.state, self.due_jobs, self.ahead_s)
        idle = len(self.rounds) > 1 and waiting == len(self.state.jobs) and not self.queue and not self.down
        if idle and self.options.starvation_s + 2 * 86400 < time_s - self.last_event_s:
            raise FleetError(
                f"policy {self.options.policy!r} starts none of {waiting} waiting jobs of trace {self.trace.name!r} on "
                "an empty fleet; their requests may not fit it"
            )

    def _send(self, event: Event) -> None:
        """Send an event to the scheduler, and execute its actions."""
        if not isinstance(event, Ticked):
            self.last_event_s = event.time_s
        if self.has_ahead and any(precedes_leases(job) and job.allocation is not None for job in self.state.jobs):
            self.ahead_s += max(0.0, event.time_s - self.state.now_s)
        self.state, actions = schedule(self.state, event)
        if self.observe is not None:
            self.observe(event, actions)
        stopped: list[Event] = []
        for action in actions:
            match action:
                case Start():
                    self._start(action, event.time_s)
                case Stop():
                    stopped.append(self._stop(action.job, event.time_s))
                case Resize():
                    stopped.append(self._stop(action.job, event.time_s))
                    self._start(action, event.time_s)
                case Plan():
                    raise AssertionError("every cell of a trace is planned")
        for answer in stopped:
            self._send(answer)

    def _apply(self, event: Event) -> bool:
        """Apply an event to the machines. Returns False if it is outdated."""
        match event:
            case Started():
                return self._started(event)
            case Progressed():
                return self.runs[event.job].attempt == event.attempt
            case Completed():
                return self._completed(event)
            case NodeLost():
                return self._node_lost(event)
            case NodeJoined():
                self.down.discard(event.node)
                return True
            case _:
                return True

    def _start(self, action: Start | Resize, time_s: float) -> None:
        run = self.runs[action.job]
        run.attempt, run.cell, run.nodes = action.attempt, action.cell, action.nodes
        run.start_s, run.ready_s = time_s, _NEVER
        run.step_s = run.times[action.cell.kind, action.cell.num_devices]
        if any(share.node in self.slow for share in action.nodes):
            run.step_s *= self.injection.slow_factor
        known = self.state.find(action.job)
        run.estimated_step_s = known.step_s(action.cell) if known is not None else 0.0
        run.num_reallocations += 1
        if isinstance(action, Start):
            wait_s = time_s - run.waiting_since_s
            run.longest_wait_s = max(run.longest_wait_s, wait_s)
            due = self.due_jobs.pop(action.job, None)
            if self.checks_waits:
                check_wait(self.options, due, wait_s, self.ahead_s, self._cost_s(run), action.job)
        cost_s = self._cost_s(run)
        self._push(Started(time_s=time_s + cost_s, job=action.job, attempt=action.attempt))

    def _cost_s(self, run: _Run) -> float:
        if self.options.realloc_s is not None:
            return self.options.realloc_s
        return self.options.base_realloc_s + run.trace.job.state_bytes / self.fleet.storage_bytes_per_s

    def _started(self, event: Started) -> bool:
        run = self.runs[event.job]
        if run.attempt != event.attempt:
            return False
        run.ready_s = event.time_s
        end_s = event.time_s + (run.trace.num_steps - run.step) * run.step_s
        self._push(Completed(time_s=end_s, job=event.job, attempt=event.attempt))
        known_s = event.time_s + _MEASURED_AFTER * run.step_s
        if known_s < end_s:
            step = run.step + _MEASURED_AFTER
            self._push(Progressed(time_s=known_s, job=event.job, attempt=event.attempt, step=step, step_s=run.step_s))
        return True

    def _leave(self, name: str, time_s: float, lost_s: float = 0.0) -> None:
        """Give back the devices of a job."""
        run = self.runs[name]
        assert run.cell is not None
        run.step = run.step_at(time_s) - lost_s / run.step_s
        self.spans.append(
            JobSpan(
                job=name,
                attempt=run.attempt,
                kind=run.cell.kind,
                num_devices=run.cell.num_devices,
                nodes=run.nodes,
                start_s=run.start_s,
                ready_s=min(run.ready_s, time_s),
                end_s=time_s,
                rate_share=1 / (run.step_s * run.best_rate),
                lost_s=lost_s,
                estimated_step_s=run.estimated_step_s,
                step_s=run.step_s if run.ready_s + _MEASURED_AFTER * run.step_s <= time_s else 0.0,
            )
        )
        run.cell, run.nodes, run.attempt = None, (), -1
        run.waiting_since_s = time_s

    def _stop(self, name: str, time_s: float) -> Event:
        run = self.runs[name]
        attempt = run.attempt
        self._leave(name, time_s)
        return Stopped(time_s=time_s, job=name, attempt=attempt, step=run.step)

    def _completed(self, event: Completed) -> bool:
        run = self.runs[event.job]
        if run.attempt != event.attempt:
            return False
        self._leave(event.job, event.time_s)
        run.completion_s = event.time_s
        self.num_left -= 1
        return True

    def _plan_failure(self, time_s: float) -> None:
        """Nodes fail at random times, whatever runs on them."""
        at_s = time_s + self.failures.expovariate(self.injection.failures_per_hour / 3600)
        node = self.failures.choice(self.fleet.node_names)
        self._push(NodeLost(time_s=at_s, node=node))

    def _node_lost(self, event: NodeLost) -> bool:
        self._plan_failure(event.time_s)
        if event.node in self.down:
            return False
        self.down.add(event.node)
        back_s = event.time_s + self.injection.repair_s
        self.faults.append(Fault(node=event.node, start_s=event.time_s, end_s=back_s))
        self._push(NodeJoined(time_s=back_s, node=event.node))
        lost = []
        for name, run in self.runs.items():
            if run.cell is not None and any(share.node == event.node for share in run.nodes):
                trained_s = max(0.0, event.time_s - run.ready_s)
                self._leave(name, event.time_s, lost_s=math.fmod(trained_s, self.injection.checkpoint_s))
                lost.append(LostAttempt(job=name, step=run.step))
        if lost:
            self._send(replace(event, attempts=tuple(lost)))
            return False
        return True

    def timeline(self, end_s: float) -> FleetTimeline:
        for name, run in self.runs.items():
            if run.completion_s == _NEVER:
                if run.cell is not None:
                    self._leave(name, end_s)
                run.longest_wait_s = max(run.longest_wait_s, end_s - run.waiting_since_s)
                run.completion_s = max(end_s, run.trace.arrival_s)
        known = {job.name: job for job in (*self.state.jobs, *self.state.ended)}
        jobs = tuple(_record(name, run, known.get(name)) for name, run in self.runs.items())
        spans = tuple(sorted(self.spans, key=lambda span: (span.start_s, span.job)))
        return FleetTimeline(
            trace=self.trace.name,
            policy=self.options.policy,
            fleet=self.fleet.cluster.name,
            num_devices=self.fleet.cluster.num_devices,
            notes=self.trace.notes,
            num_excluded=self.trace.num_excluded,
            last_arrival_s=self.trace.jobs[-1].arrival_s,
            jobs=jobs,
            spans=spans,
            rounds=tuple(self.rounds),
            faults=tuple(self.faults),
            nodes=node_records(self.fleet),
            waits=waits_of(jobs, spans, self.reasons.reasons) if self.reasons is not None else (),
        )


def _record(name: str, run: _Run, known: JobState | None) -> JobRecord:
    job = run.trace.job
    requested_s = run.times.get((job.requested_kind, job.requested_devices), min(run.times.values()))
    return JobRecord(
        name=name,
        arrival_s=run.trace.arrival_s,
        completion_s=run.completion_s,
        alone_s=run.trace.num_steps * requested_s,
        requested_devices=max(1, job.requested_devices),
        longest_wait_s=run.longest_wait_s,
        num_reallocations=run.num_reallocations,
        team=job.team,
        phase=known.phase if known is not None else WAITING,
        estimates=known.estimates if known is not None else (),
    )


def _estimates(job: TraceJob, kinds: set[str], injection: Injection, position: int) -> tuple[Estimate, ...]:
    """Truth with a normal error in the logarithm, whose mean absolute value is the one asked for."""
    generator = random.Random(f"estimates {injection.seed} {position}")
    sigma = injection.estimation_error * math.sqrt(math.pi / 2)
    estimates = []
    for entry in job.times:
        error = generator.gauss(0.0, sigma) if sigma else 0.0
        if entry.kind in kinds:
            cell = Cell(kind=entry.kind, num_devices=entry.num_devices)
            estimates.append(Estimate(cell=cell, step_s=entry.step_s * math.exp(error)))
    return tuple(estimates)


def _reported(job: TraceJob, injection: Injection, position: int) -> Job:
    """The job with the length that its user reports."""
    if not injection.lengths:
        return replace(job.job, num_steps=None)
    if not injection.length_sigma:
        return job.job
    generator = random.Random(f"lengths {injection.seed} {position}")
    factor = math.exp(generator.gauss(0.0, injection.length_sigma))
    return replace(job.job, num_steps=max(1, round(job.num_steps * factor)))


def _slow_nodes(fleet: Fleet, injection: Injection) -> frozenset[str]:
    generator = random.Random(f"slow {injection.seed}")
    return frozenset(name for name in fleet.node_names if generator.random() < injection.slow_nodes)
