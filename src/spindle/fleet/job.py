"""A job: what is submitted to a fleet, and what it accepts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from spindle.errors import FleetError

# Weights of a job's utility. Urgent jobs are allocated before all others, so theirs counts only among themselves.
PRIORITIES: Mapping[str, float] = MappingProxyType({"low": 0.25, "normal": 1.0, "high": 4.0, "urgent": 4.0})
DEFAULT_TEAM = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training script with its arguments, or any command with step times given by hand.

    `num_steps` is its length: the `steps` of its `fit`; None where it has none. `kinds` and `min_devices` to
    `max_devices` are what it accepts; no kinds means any, 0 means no limit. `requested_kind` and `requested_devices`
    are what policies of fixed requests (fcfs, backfill, gavel, crius) start from. `state_bytes` is the size of its
    checkpoint. `deadline_s` is on the clock of events.
    """

    name: str
    command: tuple[str, ...] = ()
    team: str = DEFAULT_TEAM
    priority: str = "normal"
    num_steps: int | None = None
    deadline_s: float | None = None
    kinds: tuple[str, ...] = ()
    min_devices: int = 1
    max_devices: int = 0
    requested_kind: str = ""
    requested_devices: int = 0
    state_bytes: int = 0

    def __post_init__(self) -> None:
        where = f"job {self.name!r}"
        if not self.name:
            raise FleetError("a job needs a name, got an empty one")
        if self.priority not in PRIORITIES:
            raise FleetError(f"{where}: unknown priority {self.priority!r}; expected one of {', '.join(PRIORITIES)}")
        if self.num_steps is not None and self.num_steps < 1:
            raise FleetError(f"{where}: num_steps must be at least 1, got {self.num_steps}; leave it out if unknown")
        if self.min_devices < 1:
            raise FleetError(f"{where}: a job needs at least 1 device, got a count of {self.min_devices}")
        if self.max_devices and self.max_devices < self.min_devices:
            raise FleetError(
                f"{where}: expected a count from small to large, got {self.min_devices} to {self.max_devices}"
            )
        if self.requested_devices < 0 or self.state_bytes < 0:
            raise FleetError(
                f"{where}: requested_devices and state_bytes must not be negative, got {self.requested_devices} "
                f"and {self.state_bytes}"
            )
        if self.deadline_s is not None and not math.isfinite(self.deadline_s):
            raise FleetError(f"{where}: the deadline must be a finite time in seconds, got {self.deadline_s}")

    @property
    def weight(self) -> float:
        return PRIORITIES[self.priority]

    @property
    def is_urgent(self) -> bool:
        return self.priority == "urgent"

    def accepts(self, kind: str, num_devices: int) -> bool:
        """Whether a cell of this kind and size is one that the job may run in."""
        if self.kinds and kind not in self.kinds:
            return False
        return self.min_devices <= num_devices and (not self.max_devices or num_devices <= self.max_devices)


def read_counts(text: str) -> tuple[int, int]:
    """The least and the largest number of devices of `4` or `1-16`; 1 and 0 (no limit) of an empty text."""
    if not text:
        return 1, 0
    match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", text)
    if match is None:
        raise FleetError(f"--count: expected a number or a range of devices (4, or 1-16), got {text!r}")
    least, most = int(match[1]), int(match[2] or match[1])
    if least < 1:
        raise FleetError(f"--count: a job needs at least 1 device, got {text}")
    if most < least:
        raise FleetError(f"--count: expected the smaller number first (1-16), got {text}")
    return least, most
