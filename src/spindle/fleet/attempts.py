"""Attempts of jobs: those that the engine runs, and starts that wait.

    Start, Stop, Resize ──▶ execute ──▶ stop ──────────────────▶ Engine
                               └─────▶ starts ──▶ start_pending ─┘

A start waits until the job's previous attempt is gone. If the next attempt of a resized job can be prepared, the
previous one continues to train until the next one is ready (`replace`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from spindle.errors import FleetError, StoreError
from spindle.fleet.engine import AttemptStart, Engine, EngineLostError, Key
from spindle.fleet.events import Resize, Start, Stop
from spindle.fleet.journal import Journal
from spindle.fleet.store import AttemptRecord

_WARN_INTERVAL_S = 30.0  # between two messages about a job that cannot be started
_STANDBY_S = 120.0  # after which a resize no longer waits for ranks on standby


@dataclass(slots=True)
class Attempt:
    """An attempt that the engine runs. `reported_step_s` is the last step time that was passed to the scheduler."""

    record: AttemptRecord
    start_action: int | None = None  # not confirmed yet
    stop_action: int | None = None
    is_stopping: bool = False
    replaced_s: float | None = None  # when the scheduler resized the job: the next attempt is prepared meanwhile
    paused_from_s: float | None = None  # when the previous attempt, which had continued to train, was stopped
    reported_step_s: float = 0.0
    reported_at_s: float = 0.0
    waits_for: str = ""
    gone_s: float | None = None  # when it was found to have ended without a stop


@dataclass(slots=True)
class Pending:
    """A start that waits until the job's previous attempt is gone. It may be prepared meanwhile."""

    number: int
    action: Start | Resize
    is_prepared: bool = False
    paused_from_s: float | None = None


class Attempts:
    """`running` are the attempts that the engine runs, `starts` by job those that wait. A job that is stopped has
    `grace_s` to save a checkpoint."""

    def __init__(self, journal: Journal, engine: Engine, grace_s: float, notify: Callable[[str], None]) -> None:
        self.journal, self.engine, self.grace_s, self.notify = journal, engine, grace_s, notify
        self.running: dict[Key, Attempt] = {}
        self.starts: dict[str, Pending] = {}
        self._next_warning_s = 0.0

    # Actions.

    def execute(self, number: int, action: Start | Stop | Resize) -> None:
        match action:
            case Start():
                self.starts[action.job] = Pending(number, action)
            case Stop():
                self.stop_action(number, action)
            case Resize():
                self.drop_start(action.job)
                self.starts[action.job] = Pending(number, action)
                for (job, _), attempt in self.running.items():
                    if job == action.job and attempt.replaced_s is None:
                        attempt.replaced_s = self.journal.clock.now_s()
            case _:
                assert_never(action)

    def stop_action(self, number: int, action: Stop) -> None:
        key = (action.job, action.attempt)
        pending = self.starts.get(action.job)
        if pending is not None and pending.action.attempt == action.attempt:  # not started yet
            self.drop_start(action.job)
        elif key in self.running:
            self.stop(key, number)
            return
        self.journal.confirm(number)

    def stop(self, key: Key, number: int | None = None) -> None:
        """Stop an attempt after a checkpoint; `number` is that of the action."""
        attempt = self.running[key]
        attempt.is_stopping, attempt.stop_action = True, number
        self.engine.stop(key, self.grace_s)

    def discard(self, key: Key) -> None:
        """Remove an attempt that has ended, and free its resources."""
        attempt = self.running.pop(key, None)
        self.engine.discard(key)
        if attempt is not None:
            self.journal.confirm(attempt.start_action)
            self.journal.confirm(attempt.stop_action)

    # Starts.

    def start_pending(self) -> None:
        """Start jobs whose earlier attempts are gone."""
        busy = {job for job, _ in self.running}
        for job, pending in list(self.starts.items()):
            if job in busy:
                continue
            action = pending.action
            start = self._attempt_start(action)
            record = self.new_record(action)
            self.journal.store.write_attempts([record])
            try:
                self.engine.start(start)
            except (EngineLostError, StoreError):
                raise
            except FleetError as error:  # retried in the next iteration
                self._warn(job, error)
                continue
            del self.starts[job]
            self.running[job, action.attempt] = Attempt(
                record=record, start_action=pending.number, paused_from_s=pending.paused_from_s
            )
            nodes = ", ".join(f"{share.num_devices} of {share.node}" for share in action.nodes)
            self.notify(f"{job}: attempt {action.attempt} on {action.cell.text} ({nodes})")

    def drop_start(self, job: str) -> int | None:
        """Drop a start that still waits. Returns the number of its attempt, or None."""
        pending = self.starts.pop(job, None)
        if pending is None:
            return None
        if pending.is_prepared:
            self.engine.discard((job, pending.action.attempt))
        self.journal.confirm(pending.number)
        return pending.action.attempt

    def new_record(self, action: Start | Resize) -> AttemptRecord:
        return AttemptRecord(
            job=action.job,
            attempt=action.attempt,
            cell=action.cell,
            nodes=action.nodes,
            start_s=self.journal.clock.now_s(),
        )

    def _attempt_start(self, action: Start | Resize) -> AttemptStart:
        store = self.journal.store
        plan, profile = store.plan(action.job, action.cell) or ("", "")
        return AttemptStart(
            job=action.job,
            attempt=action.attempt,
            nodes=action.nodes,
            submission=store.submission(action.job),
            grace_s=self.grace_s,
            plan=plan,
            profile=profile,
        )

    def _warn(self, job: str, error: FleetError) -> None:
        if time.monotonic() >= self._next_warning_s:
            self._next_warning_s = time.monotonic() + _WARN_INTERVAL_S
            self.notify(f"{job} cannot be started now, and is tried again: {error}")

    # Replacing one attempt of a job by the next.

    def replace(self) -> None:
        """Stop attempts of resized jobs: at once, or, if the next attempt can be prepared, when that is ready."""
        for (job, number), attempt in list(self.running.items()):
            if attempt.replaced_s is None or attempt.is_stopping:
                continue
            pending = self.starts.get(job)
            if pending is None or not self._waits_for_standby(attempt, pending):
                self.record_pause(job)
                self.stop((job, number))

    def record_pause(self, job: str) -> None:
        """Record when a job that trained while its next attempt was prepared stops training."""
        pending = self.starts.get(job)
        if pending is not None and pending.is_prepared and pending.paused_from_s is None:
            pending.paused_from_s = self.journal.clock.now_s()

    def _waits_for_standby(self, attempt: Attempt, pending: Pending) -> bool:
        """Prepare the attempt that replaces this one, and return whether this one continues to train until that is
        ready."""
        is_leaving = any(share.node in self.journal.state.unavailable for share in attempt.record.nodes)
        assert attempt.replaced_s is not None
        is_late = self.journal.clock.now_s() - attempt.replaced_s > _STANDBY_S
        if is_leaving or is_late or attempt.record.ready_s is None:
            return False
        if not pending.is_prepared:
            pending.is_prepared = self.engine.prepare(self._attempt_start(pending.action))
            return pending.is_prepared
        is_ready = self._is_ready(pending)
        return is_ready is None or (is_ready and self._waits_for_others(pending.action))

    def _is_ready(self, pending: Pending) -> bool | None:
        """Whether a prepared attempt is ready; None while that is unknown."""
        return self.engine.is_prepared((pending.action.job, pending.action.attempt)) if pending.is_prepared else False

    def _waits_for_others(self, action: Start | Resize) -> bool:
        """Whether other jobs still have devices of this attempt. Jobs whose own next attempt is ready do not count:
        they may be waiting for this one."""
        fleet = self.journal.state.fleet
        sizes = dict(zip(fleet.node_names, fleet.size_of_node, strict=True))
        left = {share.node: sizes[share.node] - share.num_devices for share in action.nodes}
        for (job, _), attempt in self.running.items():
            pending = self.starts.get(job)
            leaves = pending is not None and not attempt.is_stopping and self._is_ready(pending)
            for share in attempt.record.nodes if job != action.job and not leaves else ():
                if share.node in left:
                    left[share.node] -= share.num_devices
        return any(number < 0 for number in left.values())
