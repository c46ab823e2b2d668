"""One thread that polls CUDA events on behalf of all process groups of a process.

Nothing wakes a host thread when an event completes, so events have to be polled. If the thread of every group did, they
would take the GIL from each other and from the code that launches kernels.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache

_POLL_S = 1e-4

Pending = tuple[Callable[[], bool], Callable[[], None]]  # whether it is ready, and what to call then


class EventPoller:
    def __init__(self) -> None:
        self._new: list[Pending] = []
        self._has_new = threading.Event()
        threading.Thread(target=self._run, name="spindle event poller", daemon=True).start()

    def watch(self, is_ready: Callable[[], bool], callback: Callable[[], None]) -> None:
        """Call `callback` once, soon after `is_ready()` has become true or has raised."""
        self._new.append((is_ready, callback))
        self._has_new.set()

    def _run(self) -> None:
        pending: list[Pending] = []
        while True:
            if not pending:
                self._has_new.wait()
                self._has_new.clear()
            while self._new:
                pending.append(self._new.pop(0))
            unready = []
            for is_ready, callback in pending:
                if not _is_ready_or_failed(is_ready):
                    unready.append((is_ready, callback))
                    continue
                with suppress(Exception):  # one callback must not end the thread
                    callback()
            pending = unready
            if pending:
                time.sleep(_POLL_S)


def _is_ready_or_failed(is_ready: Callable[[], bool]) -> bool:
    try:
        return is_ready()
    except Exception:  # the thread that waits will query the event itself, and can report the error
        return True


@cache
def event_poller() -> EventPoller:
    """The event poller of this process."""
    return EventPoller()
