"""`spindle fleet replay`: the same events, the same actions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from spindle.cli.fleet.options import STORE, EventsFile, StoreFile
from spindle.cli.options import AsJson

if TYPE_CHECKING:
    from spindle.fleet import State


def replay(events: EventsFile = None, store: StoreFile = STORE, as_json: AsJson = False) -> None:
    """Feed recorded events to the scheduler again, and check that it takes the same actions.

    They must be equal byte for byte. Otherwise the exit code is 1: the events come from another version of the
    scheduler, or the log was edited. Example:

    spindle fleet replay events.jsonl
    """
    import typer

    from spindle.cli.terminal import show, show_json
    from spindle.display import count_of
    from spindle.fleet.event_log import read_event_log
    from spindle.fleet.event_log import replay as replay_log

    result = replay_log(read_event_log(events or store))
    if as_json:
        show_json(
            {
                "events": result.num_events,
                "actions": result.num_actions,
                "is_same": not result.difference,
                "difference": result.difference,
            }
        )
    elif result.difference:
        show(f"different: {result.difference}")
    else:
        counts = f"{count_of(result.num_events, 'event')}, {count_of(result.num_actions, 'action')}"
        show(f"the same: {counts}")
    if result.difference:
        raise typer.Exit(1)


def state_at(path: Path, time_s: float | None) -> State:
    """The scheduler's state after the events of a log, up to a time; None: all of them, and of a live fleet now."""
    import time
    from dataclasses import replace as changed

    from spindle.errors import InputError
    from spindle.fleet.event_log import latest_state, read_event_log
    from spindle.fleet.event_log import replay as replay_log
    from spindle.fleet.state import evolve
    from spindle.fleet.store import Store, is_store

    if time_s is None and is_store(path):
        with Store.open(path) as store:
            state = latest_state(store)
            return evolve(state, now_s=max(state.now_s, time.time() - store.origin_unix_s))
    log = read_event_log(path)
    if time_s is not None:
        entries = tuple(entry for entry in log.entries if entry[0].time_s <= time_s)
        if not entries:
            first_s = log.entries[0][0].time_s if log.entries else 0.0
            raise InputError(f"--at: expected a time from {first_s:g} s on, when the events begin, got {time_s:g}")
        log = changed(log, entries=entries)
    result = replay_log(log)
    if result.difference:
        raise InputError(f"{path}: this scheduler would not have acted so: {result.difference}")
    return result.state
