"""One operation of a process group, from its call until it is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from spindle.run.ipc.event_poller import event_poller
from spindle.run.ipc.memory_backend import MemoryBackend


class Job:
    """An operation as its caller sees it: done when it was executed, was enqueued on a stream, or has failed."""

    def __init__(
        self,
        name: str,
        tensors: list[torch.Tensor],
        backend: MemoryBackend,
        timeout_s: float,
        on_done: Callable[[list[Callable[[], None]]], None],
        wake: Callable[[], None],
    ) -> None:
        self.name, self.tensors, self.backend = name, tensors, backend
        self.deadline_s = time.monotonic() + timeout_s
        self.error: RuntimeError | None = None
        self.done_event: Any = None
        self._called = backend.record_event()  # after the work that the caller enqueued before the call
        self._begun = self._is_watched = False
        self._wake = wake
        self._done = False
        self._callbacks: list[Callable[[], None]] = []
        self._on_done = on_done  # takes the callbacks; it calls them outside of its own critical section
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Order the backend's work after what the caller had enqueued. Only the first call has an effect."""
        if not self._begun:
            self._begun = True
            self.backend.wait_event(self._called, self.tensors)

    def is_ready(self) -> bool:
        """Whether what the caller had enqueued is done, so that no stream has to wait for it.

        If it is not, the event poller wakes the transport when it is.
        """
        if self._begun or self.backend.is_event_done(self._called):
            return True
        if not self._is_watched:
            self._is_watched = True
            event_poller().watch(lambda: self.backend.is_event_done(self._called), self._wake)
        return False

    def finish(self, error: RuntimeError | None = None) -> None:
        if error is None:
            self.done_event = self.backend.record_done()
        self.error, self.tensors = error, []
        with self._lock:
            self._done = True
        self._on_done(self._callbacks)

    def is_done(self) -> bool:
        return self._done

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's memory as bytes, without autograd."""
    return tensor.data.view(-1).view(torch.uint8)
