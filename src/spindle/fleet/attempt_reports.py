"""Turns reports of attempts into events: first step, progress, a new workload, the end, a failure, a lost node.

    Engine.poll ──▶ handle ──▶ Started, Progressed, Completed, Stopped, Failed, Occupied ──▶ Journal
    a lost node ──▶ node_lost ──▶ NodeLost, Stopped ───────────────────────────────────────────┘

Lost steps are counted from the newest checkpoint on disk. Whether a job resumes is decided by the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from spindle.checkpoint import steps_in
from spindle.display import count_of
from spindle.fleet.attempts import Attempt, Attempts
from spindle.fleet.engine import ENDED, LOST, PENDING, RUNNING, AttemptReport, Key
from spindle.fleet.events import Completed, Event, Failed, LostAttempt, NodeLost, Occupied, Progressed, Started, Stopped
from spindle.fleet.job_plans import JobPlans
from spindle.launch.agent import COMPLETED, FAILED

_POLL_S = 0.1
_WRITE_S = 2.0  # between two records of progress
_OFF = 0.1  # a step time that changes by more is passed to the scheduler at once
_NODE_GONE_S = 6.0  # until a cluster reports that a node is lost
_LATE_S = 15.0  # after the grace period, until `stop_all` stops waiting for attempts


class AttemptReports:
    """`handle` processes new reports, `node_lost` ends all attempts on a node, `stop_all` stops all attempts."""

    def __init__(self, attempts: Attempts, plans: JobPlans, notify: Callable[[str], None]) -> None:
        self.attempts, self.notify = attempts, notify
        self._journal, self._engine, self._plans = attempts.journal, attempts.engine, plans
        self._next_write_s = 0.0

    def handle(self) -> None:
        """Process the reports of all attempts."""
        for report in self._engine.poll():
            attempt = self.attempts.running.get((report.job, report.attempt))
            if attempt is not None:
                self._handle_report(attempt, report)

    def _handle_report(self, attempt: Attempt, report: AttemptReport) -> None:
        key = (report.job, report.attempt)
        now_s = self._journal.clock.now_s()
        attempt.waits_for = report.reason if report.phase == PENDING else ""
        if report.is_crowded_out and not attempt.is_stopping:
            self._crowded_out(attempt, now_s)
            return
        if report.phase in (RUNNING, ENDED):
            self._journal.confirm(attempt.start_action)
            attempt.start_action = None
        attempt.record = record = replace(
            attempt.record,
            step=attempt.record.step if report.step is None else report.step,
            step_s=report.step_s or attempt.record.step_s,
            checkpoints=report.checkpoints or attempt.record.checkpoints,
        )
        if report.phase == LOST:
            if self._waits_for_node(attempt):
                return
            self.failed(key, by_script=False, reason=report.reason or "its processes are gone")
            return
        is_ready = report.num_taken > 0 or (report.phase == RUNNING and self._reports_nothing(report.job))
        if is_ready and record.ready_s is None and not attempt.is_stopping:
            attempt.record = replace(record, ready_s=now_s)
            attempt.reported_at_s = now_s
            paused_s = None if attempt.paused_from_s is None else now_s - attempt.paused_from_s
            self._journal.record(Started(time_s=now_s, job=report.job, attempt=report.attempt, paused_s=paused_s))
        if report.phase == ENDED:
            self._ended(key, report)
        elif attempt.record.ready_s is not None and not attempt.is_stopping and attempt.replaced_s is None:
            state = self._journal.state
            job = state.find(report.job)
            if job is not None and job.attempt == report.attempt:
                self._plans.check_tasks(job, report.tasks, state.fleet)
            self._progressed(attempt, report, now_s)

    def _crowded_out(self, attempt: Attempt, now_s: float) -> None:
        """Processes outside the fleet hold devices that an attempt waits for: mark these as occupied, so that the
        scheduler places the job elsewhere."""
        nodes, job = self._engine.nodes(), attempt.record.job
        for share in attempt.record.nodes:
            num_devices = nodes[share.node].num_occupied if share.node in nodes else 0
            if num_devices:
                count = count_of(num_devices, "device")
                self.notify(f"{job}: others hold {count} of node {share.node}, which the fleet does without")
                self._journal.record(Occupied(time_s=now_s, node=share.node, num_devices=num_devices, jobs=(job,)))

    def _waits_for_node(self, attempt: Attempt) -> bool:
        """Whether an attempt that is gone may have been on a lost node, which the cluster reports some seconds later:
        then the job has not failed, and must not be started on that node again."""
        now_s = self._journal.clock.now_s()
        attempt.gone_s = now_s if attempt.gone_s is None else attempt.gone_s
        return not attempt.is_stopping and now_s - attempt.gone_s < _NODE_GONE_S

    def _reports_nothing(self, job: str) -> bool:
        """Whether a job is a command that does not use Spindle, and so reports no steps."""
        return not self._journal.store.submission(job).is_script

    def _progressed(self, attempt: Attempt, report: AttemptReport, now_s: float) -> None:
        """Pass the progress of an attempt to the scheduler: periodically, and at once when its step time becomes known
        or changes."""
        if report.step is None:
            return
        step_s = report.step_s or 0.0
        is_news = bool(step_s) and abs(step_s - attempt.reported_step_s) > _OFF * attempt.reported_step_s
        if is_news or now_s - attempt.reported_at_s >= self._journal.state.options.min_interval_s:
            attempt.reported_step_s, attempt.reported_at_s = step_s, now_s
            self._journal.record(
                Progressed(time_s=now_s, job=report.job, attempt=report.attempt, step=float(report.step), step_s=step_s)
            )

    # Ends.

    def _ended(self, key: Key, report: AttemptReport) -> None:
        job, number = key
        attempt, now_s = self.attempts.running[key], self._journal.clock.now_s()
        if report.outcome == COMPLETED:
            self._record_end(attempt, COMPLETED)
            newest = self.attempts.drop_start(job)  # the next attempt of a resized job is not needed
            event: Event = Completed(time_s=now_s, job=job, attempt=newest or number)
            self.notify(f"{job}: completed")
            self._journal.record(event, ended=(attempt.record,))
        elif report.outcome == FAILED and not attempt.is_stopping:
            self.failed(key, by_script=report.by_script, reason=report.reason)
        elif attempt.is_stopping:
            self._record_end(attempt, "stopped")
            event = Stopped(time_s=now_s, job=job, attempt=number, step=float(self._saved_step(attempt)))
            self._journal.record(event, ended=(attempt.record,))
        elif not self._waits_for_node(attempt):  # its agent was cut off, or somebody else sent a signal
            self.failed(key, by_script=False, reason=report.reason or "stopped by a signal")

    def failed(self, key: Key, *, by_script: bool, reason: str) -> None:
        """Record that an attempt has ended by itself. One that is being replaced counts as stopped."""
        job, number = key
        attempt, now_s = self.attempts.running[key], self._journal.clock.now_s()
        saved_step = self._saved_step(attempt)
        is_replaced = attempt.is_stopping or attempt.replaced_s is not None
        self._record_end(attempt, "stopped" if is_replaced else FAILED)
        if is_replaced:
            self.attempts.record_pause(job)
            event: Event = Stopped(time_s=now_s, job=job, attempt=number, step=float(saved_step))
        else:
            step = saved_step if attempt.record.step is None else attempt.record.step
            event = Failed(
                time_s=now_s,
                job=job,
                attempt=number,
                step=float(step),
                resume_step=float(saved_step),
                by_script=by_script,
                reason=reason,
            )
            self.notify(f"{job}: attempt {number} failed in step {step}, newest checkpoint {saved_step}: {reason}")
        self._journal.record(event, ended=(attempt.record,))

    def node_lost(self, name: str, *, is_expected: bool = False) -> None:
        """Record that a node is lost, with its attempts; `is_expected` if the fleet shuts down."""
        attempts, journal = self.attempts, self._journal
        keys = tuple(key for key, each in attempts.running.items() if any(s.node == name for s in each.record.nodes))
        running = {(job.name, job.attempt) for job in journal.state.jobs if job.allocation is not None}
        lost = []
        for key in keys:
            attempt = attempts.running[key]
            self._record_end(attempt, "lost")
            if key in running:
                lost.append(LostAttempt(job=key[0], step=float(self._saved_step(attempt))))
        for job, pending in list(attempts.starts.items()):
            if any(share.node == name for share in pending.action.nodes):
                attempts.drop_start(job)
        if not is_expected:
            jobs = ", ".join(job for job, _ in keys)
            self.notify(f"node {name} is lost" + (f"; its jobs resume: {jobs}" if jobs else ""))
        stopped = [(key, self._saved_step(attempts.running[key])) for key in keys if key not in running]
        ended = tuple(attempts.running[key].record for key in keys)
        journal.record(NodeLost(time_s=journal.clock.now_s(), node=name, attempts=tuple(lost)), ended=ended)
        for (job, number), step in stopped:  # they were being stopped
            journal.record(Stopped(time_s=journal.clock.now_s(), job=job, attempt=number, step=float(step)))

    def stop_all(self) -> None:
        """Stop every attempt, after a checkpoint, and wait until they have ended."""
        attempts = self.attempts
        for job in list(attempts.starts):
            attempts.drop_start(job)
        for key in attempts.running:
            self._engine.stop(key, attempts.grace_s)
        end_s = time.monotonic() + attempts.grace_s + _LATE_S
        waiting = set(attempts.running)
        while waiting and time.monotonic() < end_s:
            for report in self._engine.poll():
                key = (report.job, report.attempt)
                if key in waiting and report.phase in (ENDED, LOST, PENDING):
                    waiting.discard(key)
                    attempt = attempts.running[key]
                    attempt.record = replace(
                        attempt.record, step=report.step, checkpoints=report.checkpoints or attempt.record.checkpoints
                    )
                    if report.outcome == COMPLETED:
                        self._ended(key, report)
            time.sleep(_POLL_S)

    # Records.

    def write_progress(self) -> None:
        """Write the progress of attempts to the store every two seconds, for `status`."""
        if time.monotonic() >= self._next_write_s:
            self._next_write_s = time.monotonic() + _WRITE_S
            running = self.attempts.running
            for attempt in running.values():
                attempt.record = replace(attempt.record, saved_step=self._saved_step(attempt))
            if running:
                self._journal.store.write_attempts([attempt.record for attempt in running.values()])
            waits = {job: each.waits_for for (job, _), each in running.items() if each.waits_for}
            self._journal.store.set_waits(waits)

    def _record_end(self, attempt: Attempt, outcome: str) -> None:
        attempt.record = replace(
            attempt.record, end_s=self._journal.clock.now_s(), outcome=outcome, saved_step=self._saved_step(attempt)
        )

    def _saved_step(self, attempt: Attempt) -> int:
        """The step of a job's newest checkpoint; 0 without one."""
        folder = attempt.record.checkpoints or self._folder_of(attempt.record.job)
        try:
            return max(steps_in(Path(folder)), default=0) if folder else 0
        except OSError:
            return attempt.record.saved_step or 0

    def _folder_of(self, job: str) -> str:
        """The folder of checkpoints that earlier attempts of a job have reported."""
        return next((each.checkpoints for each in reversed(self._journal.store.attempts()) if each.job == job), "")
