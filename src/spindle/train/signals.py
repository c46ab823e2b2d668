"""Signals that ask a job to end: all ranks stop after the same step. A later signal ends the process at once.

A signal to all processes of a job reaches a rank twice, the second time from its launcher: repeats are ignored for some
seconds.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGUSR1)  # job queues send one of them some time before SIGKILL
_REPEAT_S = 5.0  # seconds after the first signal during which further signals count as repeats


class NoticedSignals:
    """The first signal that the process has received."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._first_s = 0.0
        self._process = os.getpid()

    def notice(self, number: int, frame: FrameType | None) -> None:
        is_forked = os.getpid() != self._process  # a DataLoader worker inherits the handlers of its parent
        if self.first is None and not is_forked:
            self.first, self._first_s = signal.Signals(number), time.monotonic()
        elif is_forked or time.monotonic() - self._first_s > _REPEAT_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def noticed_signals() -> Iterator[NoticedSignals]:
    """A context in which signals to end are noted, unless the script has handlers of its own. Only the main thread
    receives signals."""
    noticed, before = NoticedSignals(), {}
    if threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, noticed.notice)
    try:
        yield noticed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
