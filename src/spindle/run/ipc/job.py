"""One operation of a group, from its call until it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from spindle.run.ipc.event_poller import event_poller
from spindle.run.ipc.memory_backend import MemoryBackend


class Job:
    """An operation as its caller sees it: over when it is carried out, or put on a stream, or has failed."""

    def __init__(
        self,
        name: str,
        tensors: list[torch.Tensor],
        medium: MemoryBackend,
        timeout_s: float,
        note_end: Callable[[list[Callable[[], None]]], None],
        wake: Callable[[], None],
    ) -> None:
        self.name, self.tensors, self.medium = name, tensors, medium
        self.deadline_s = time.monotonic() + timeout_s
        self.error: RuntimeError | None = None
        self.done: Any = None
        self._called = medium.moment()
        self._begun = self._is_watched = False
        self._wake = wake
        self._over = False
        self._callbacks: list[Callable[[], None]] = []
        self._note_end = note_end  # takes what is to be called, which must not be in the middle of anything
        self._lock = threading.Lock()

    def begin(self) -> None:
        """What follows on the medium comes after what the caller had started. Only the first time counts."""
        if not self._begun:
            self._begun = True
            self.medium.after(self._called, self.tensors)

    def is_due(self) -> bool:
        """Whether what the caller had started is over, so that nothing of this has to wait for it on a stream.

        If it is not, those who carry out jobs will be woken when it is.
        """
        if self._begun or self.medium.is_past(self._called):
            return True
        if not self._is_watched:
            self._is_watched = True
            event_poller().watch(lambda: self.medium.is_past(self._called), self._wake)
        return False

    def finish(self, error: RuntimeError | None = None) -> None:
        if error is None:
            self.done = self.medium.done()
        self.error, self.tensors = error, []
        with self._lock:
            self._over = True
        self._note_end(self._callbacks)

    def is_over(self) -> bool:
        return self._over

    def when_over(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as bytes, unseen by autograd."""
    return tensor.data.view(-1).view(torch.uint8)
