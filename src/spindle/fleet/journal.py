"""Write-ahead journal of a live fleet: events and the scheduler's actions are stored before they are executed.

    record ──▶ schedule ──▶ store (an event and its actions, atomically) ──▶ state ──▶ execute ──▶ confirm

An event becomes part of the state when it is in the store. While the store cannot be written, events are queued in
order, and nothing is executed. This module knows no engine: it calls `execute` and `discard`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from spindle.artifact import to_json
from spindle.errors import FleetError, StoreError
from spindle.fleet.engine import Key
from spindle.fleet.event_log import latest_state
from spindle.fleet.events import Action, Event
from spindle.fleet.scheduler import schedule
from spindle.fleet.store import AttemptRecord, Store, StoredPlan, Submission

_WARN_INTERVAL_S = 30.0  # between two messages about a store that cannot be written
_SNAPSHOT_EVENTS = 500  # between two snapshots of the state


class FleetClock:
    """Seconds since the origin of a store. Never decreases: the system's clock is read once, at the start."""

    def __init__(self, origin_unix_s: float, last_s: float) -> None:
        self._base_s = max(last_s, time.time() - origin_unix_s)
        self._start_s = time.monotonic()

    def now_s(self) -> float:
        return round(self._base_s + time.monotonic() - self._start_s, 6)


@dataclass(frozen=True, slots=True)
class _Unsaved:
    """An event that is not in the store yet."""

    event: Event
    submission: Submission | None = None
    plans: tuple[StoredPlan, ...] = ()
    answers: tuple[tuple[int, str], ...] = ()
    ended: tuple[AttemptRecord, ...] = ()


class Journal:
    """`state` is the scheduler's state after all stored events, `clock` the fleet's clock. `execute` is called with
    each new action and its number, `discard` with each attempt that an event has ended."""

    def __init__(
        self,
        store: Store,
        notify: Callable[[str], None],
        execute: Callable[[int, Action], None],
        discard: Callable[[Key], None],
    ) -> None:
        self.store, self.notify = store, notify
        self._execute, self._discard = execute, discard
        self.state = latest_state(store)
        self.clock = FleetClock(store.origin_unix_s, self.state.now_s)
        self._unsaved: deque[_Unsaved] = deque()
        self._executed: deque[tuple[int, float]] = deque()  # actions to be confirmed
        self._num_new = 0  # events since the last snapshot
        self._next_warning_s = 0.0

    @property
    def is_behind(self) -> bool:
        """Whether events are queued because the store could not be written."""
        return bool(self._unsaved)

    def record(
        self,
        event: Event,
        *,
        submission: Submission | None = None,
        plans: tuple[StoredPlan, ...] = (),
        answers: tuple[tuple[int, str], ...] = (),
        ended: tuple[AttemptRecord, ...] = (),
    ) -> None:
        """Store an event with the scheduler's actions, then execute them. `ended` are the attempts that the event
        ends."""
        self._unsaved.append(_Unsaved(event, submission, plans, answers, ended))
        self.save()

    def save(self) -> bool:
        """Store the queued events, and execute their actions. Returns False if the store cannot be written."""
        while self._unsaved:
            entry = self._unsaved[0]
            try:
                state, actions = schedule(self.state, entry.event)
            except FleetError:  # inconsistent: the caller reports it to the user
                self._unsaved.popleft()
                raise
            try:
                numbers = self.store.append(
                    entry.event,
                    actions,
                    submission=entry.submission,
                    plans=entry.plans,
                    answers=entry.answers,
                    attempts=entry.ended,
                )
            except StoreError as error:
                self.warn(error)
                return False
            self._unsaved.popleft()
            self.state = state
            self._num_new += 1
            for record in entry.ended:
                self._discard((record.job, record.attempt))
            for number, action in zip(numbers, actions, strict=True):
                self._execute(number, action)
        return True

    def confirm(self, number: int | None) -> None:
        """Queue the confirmation of an executed action, which `write_executed` stores."""
        if number is not None:
            self._executed.append((number, self.clock.now_s()))

    def write_executed(self) -> None:
        while self._executed:
            self.store.confirm(*self._executed[0])
            self._executed.popleft()

    def write_snapshot(self) -> None:
        """Store the state if there have been many events since the last snapshot."""
        if self._num_new >= _SNAPSHOT_EVENTS:
            self.store.write_snapshot(json.dumps(to_json(self.state)))
            self._num_new = 0

    def warn(self, error: StoreError) -> None:
        """Report that the store cannot be written, at most every 30 s."""
        if time.monotonic() >= self._next_warning_s:
            self._next_warning_s = time.monotonic() + _WARN_INTERVAL_S
            self.notify(f"ERROR: {error}. Nothing is reallocated until it can be written again; jobs train on.")
