"""Requests of users to the scheduler: commands and answers are rows of the store."""

from __future__ import annotations

import time
from typing import Any

from spindle.errors import FleetError
from spindle.fleet.store import Store

JOINED = "joined "  # prefix of the answer to a submission that was added to another job


def request(store: Store, body: dict[str, Any], limit_s: float = 60.0) -> bool:
    """Send a command to the scheduler. Returns True if it was carried out, False if no scheduler runs: the next one
    will carry it out."""
    return ask(store, body, limit_s) is not None


def ask(store: Store, body: dict[str, Any], limit_s: float = 60.0) -> str | None:
    """The scheduler's answer to a command; None if no scheduler runs: the next one will carry it out."""
    answer = wait_for_answer(store, store.request(body), limit_s)
    if answer is not None and answer.startswith("error: "):
        raise FleetError(answer.removeprefix("error: "))
    return answer


def wait_for_answer(store: Store, number: int, limit_s: float = 60.0) -> str | None:
    """The scheduler's answer to a command; None if there is no scheduler, or it takes too long."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        answer = store.answer(number)
        if answer is not None:
            return answer
        if not store.has_scheduler():
            return store.answer(number)
        time.sleep(0.05)
    return None
