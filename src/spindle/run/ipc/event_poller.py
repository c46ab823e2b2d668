"""Has our GPU got to what somebody waits for? One thread looks on behalf of all groups of a process.

A GPU wakes nobody, so somebody has to look again and again. If every group's thread did, they would keep the
interpreter from each other and from the code that launches work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache

_TICK_S = 1e-4

Waiting = tuple[Callable[[], bool], Callable[[], None]]  # whether it is time, and whom to tell


class EventPoller:
    def __init__(self) -> None:
        self._new: list[Waiting] = []
        self._some = threading.Event()
        threading.Thread(target=self._run, name="spindle ticker", daemon=True).start()

    def watch(self, is_time: Callable[[], bool], tell: Callable[[], None]) -> None:
        """Calls `tell` once, soon after `is_time()` has become true, or has failed."""
        self._new.append((is_time, tell))
        self._some.set()

    def _run(self) -> None:
        waiting: list[Waiting] = []
        while True:
            if not waiting:
                self._some.wait()
                self._some.clear()
            while self._new:
                waiting.append(self._new.pop(0))
            still = []
            for is_time, tell in waiting:
                if not _is_time(is_time):
                    still.append((is_time, tell))
                    continue
                with suppress(Exception):  # the others must still be looked after
                    tell()
            waiting = still
            if waiting:
                time.sleep(_TICK_S)


def _is_time(ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except Exception:  # whoever waits will ask, too, and can say what failed
        return True


@cache
def event_poller() -> EventPoller:
    """This process's."""
    return EventPoller()
