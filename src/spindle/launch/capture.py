"""Run a script for its workload (`spindle plan`) or its profile (`spindle profile`) instead of training.

A capture is an object that the worker enters around the script. The first fit of a Trainer inside delivers the workload
or profile, and the script ends there. Nothing heavy is imported here: a script may still set variables that torch and
numpy read when they are imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

_WORKLOAD, _PROFILE, _FRESH = "SPINDLE_WORKLOAD", "SPINDLE_PROFILE", "SPINDLE_PROFILE_FRESH"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadCapture:
    """The workload of a script whose modules have no weights is written to `output`, with the number of steps of its
    first fit; nothing is measured."""

    output: Path

    def environment(self) -> dict[str, str]:
        return {_WORKLOAD: str(self.output)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCapture:
    """The layers of a script are measured, and the profile is written to `output`."""

    output: Path
    fresh: bool = False  # measure again what is in the cache

    def environment(self) -> dict[str, str]:
        return {_PROFILE: str(self.output), _FRESH: "1" if self.fresh else ""}


Capture = WorkloadCapture | ProfileCapture


class Captured(BaseException):
    """Ends a script once its workload or profile is captured.

    The script's own `finally` and `with` blocks run, and its `except Exception` does not stop it. A script that
    continues anyway is ended again in its next fit.
    """


_active: ContextVar[Capture | None] = ContextVar("capture", default=None)


def active_capture() -> Capture | None:
    """The capture that this code runs under, if any."""
    return _active.get()


@contextmanager
def capturing(capture: Capture | None) -> Iterator[None]:
    """Run a script under a capture, up to its first fit; without one, run all of it."""
    token = _active.set(capture)
    try:
        with suppress(Captured):
            yield
    finally:
        _active.reset(token)


def requested_capture() -> Capture | None:
    """The capture that a launcher has requested of this process, if any."""
    if workload := os.environ.get(_WORKLOAD):
        return WorkloadCapture(output=Path(workload))
    if profile := os.environ.get(_PROFILE):
        return ProfileCapture(output=Path(profile), fresh=bool(os.environ.get(_FRESH)))
    return None
