"""Signals that ask a job to end: all ranks obey them after the same step. A second one ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGUSR1)  # a queue sends either, some time before it kills


class NoticedSignals:
    """The first signal that came."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None

    def notice(self, number: int, frame: FrameType | None) -> None:
        if self.first is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.first = self.first or signal.Signals(number)


@contextmanager
def noticed_signals() -> Iterator[NoticedSignals]:
    """Inside, signals that ask to end are noticed, unless the script has handlers of its own. Only the main thread
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
