"""Recorded events and actions, as lines of JSON or in the store of a live fleet, and their replay.

The first line says which fleet and which options; then every event is followed by the actions that it led to. `replay`
feeds the events to the scheduler again and compares its actions with the recorded ones, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spindle.artifact import artifact_from_json, from_json, json_value, read_text_file, to_json
from spindle.errors import InputError
from spindle.fleet.events import Action, Event, action_json, event_from_json, event_json
from spindle.fleet.fleet import Fleet
from spindle.fleet.scheduler import schedule
from spindle.fleet.state import SchedulerOptions, State
from spindle.fleet.store import Store, is_store

_KIND = "fleet-events"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    fleet: Fleet
    options: SchedulerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLog:
    """Events with the text of the actions that were recorded behind each."""

    fleet: Fleet
    options: SchedulerOptions
    entries: tuple[tuple[Event, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """`difference` is the first place where the scheduler answered differently, or empty."""

    state: State
    num_events: int
    num_actions: int
    difference: str = ""


def action_line(action: Action) -> str:
    return json.dumps(action_json(action), separators=(",", ":"))


def log_lines(
    fleet: Fleet, options: SchedulerOptions, entries: Iterable[tuple[Event, tuple[Action, ...]]]
) -> Iterator[str]:
    header = {"spindle": _KIND, "version": 1, "fleet": to_json(fleet), "options": to_json(options)}
    yield json.dumps(header, separators=(",", ":"))
    for event, actions in entries:
        yield json.dumps(event_json(event), separators=(",", ":"))
        yield from map(action_line, actions)


def store_log(store: Store) -> EventLog:
    """The events of a live fleet so far."""
    return EventLog(fleet=store.fleet, options=store.options, entries=tuple(store.entries()))


def latest_state(store: Store) -> State:
    """The scheduler's state after all events of a store: replayed from its newest snapshot on, where there is one that
    this version can read. Refuses events to which this scheduler would not have answered as recorded."""
    number, text = store.snapshot()
    state = State(fleet=store.fleet, options=store.options)
    if text:
        try:
            state = from_json(State, json_value(text), f"{store.path}: snapshot after event {number}")
        except InputError:  # a state of another version; all events are still there
            number = 0
    log = EventLog(fleet=store.fleet, options=store.options, entries=tuple(store.entries(after=number)))
    result = replay(log, state)
    if result.difference:
        raise InputError(
            f"{store.path}: its events were recorded by another version of the scheduler, which acted differently: "
            f"{result.difference}; start a new fleet with another --store"
        )
    return result.state


def read_event_log(path: Path) -> EventLog:
    """The events of a file of lines, or of the store of a live fleet."""
    if is_store(path):
        with Store.open(path) as store:
            return store_log(store)
    if not path.exists():
        raise InputError(
            f"{path}: no such file; expected the store of a live fleet (spindle fleet up), or events that `spindle "
            "fleet simulate --events` wrote"
        )
    lines = [line for line in read_text_file(path).splitlines() if line.strip()]
    if not lines:
        raise InputError(f"{path}: is empty; expected the events of a fleet, one JSON object per line")
    header = artifact_from_json(_object(lines[0], f"{path}, line 1"), f"{path}, line 1", _KIND, _Header)
    entries: list[tuple[Event, list[str]]] = []
    last_s = 0.0
    for number, line in enumerate(lines[1:], 2):
        where = f"{path}, line {number}"
        data = _object(line, where)
        if "action" in data:
            if not entries:
                raise InputError(f"{where}: an action before the first event")
            entries[-1][1].append(line)
            continue
        event = event_from_json(data, where)
        if event.time_s < last_s:
            raise InputError(f"{where}: times must not decrease, got {event.time_s:g} s after {last_s:g} s")
        last_s = event.time_s
        entries.append((event, []))
    complete = tuple((event, tuple(actions)) for event, actions in entries)
    return EventLog(fleet=header.fleet, options=header.options, entries=complete)


def replay(log: EventLog, state: State | None = None) -> ReplayResult:
    """Feed the events to the scheduler, from a state on; stops at the first answer that differs from the recorded
    one."""
    state = State(fleet=log.fleet, options=log.options) if state is None else state
    num_actions = 0
    for number, (event, recorded) in enumerate(log.entries, 1):
        state, actions = schedule(state, event)
        lines = tuple(map(action_line, actions))
        num_actions += len(lines)
        if lines != recorded:
            difference = (
                f"event {number} ({type(event).__name__} at {event.time_s:g} s): recorded "
                f"{' '.join(recorded) or 'no action'}, the scheduler answers {' '.join(lines) or 'none'}"
            )
            return ReplayResult(state=state, num_events=number, num_actions=num_actions, difference=difference)
    return ReplayResult(state=state, num_events=len(log.entries), num_actions=num_actions)


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        data = json_value(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error.msg})") from error
    if not isinstance(data, dict):
        raise InputError(f"{where}: expected a JSON object")
    return data
