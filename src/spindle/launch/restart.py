"""Whether a failed job is restarted, and with how many ranks.

A rank that is lost (killed, stopped, hung) may be the machine's fault, so the job starts again with as many ranks. If
the same rank is lost again before there can be another checkpoint, its device or its share of memory is suspected, and
the job goes on with one rank fewer. An error of the script's own may come from a disk or a network; at the same step
twice, it is a bug.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a job failed: an error of a rank's own code in a step, or the loss of a rank."""

    rank: int
    is_lost: bool
    step: int | None  # None before the first step
    checkpoint_every: int | None = None  # steps between checkpoints, if the script writes any


class Restarts:
    """Counts the restarts of a job, and decides with how many ranks it starts again."""

    def __init__(self, most: int, num_processes: int, least: int) -> None:
        self.num_processes, self.num_done, self.goes_on = num_processes, 0, True
        self._most, self._least = most, least
        self._last: Fault | None = None
        self._devices, self._has_dropped = _visible_devices(num_processes), False

    def environment(self) -> dict[str, str]:
        """Environment of the ranks: the restart count, under torchrun's name, and the remaining devices."""
        environment = {"TORCHELASTIC_RESTART_COUNT": str(self.num_done)} if self.num_done else {}
        if self._has_dropped and self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices)
        return environment

    def decide(self, fault: Fault) -> str:
        """Decide what happens after a fault. Returns a line that says so."""
        last, self._last = self._last, fault
        if self.num_done == self._most:
            self.goes_on = False
            return f"no restart is left of {self._most}"
        if last is not None and not fault.is_lost and not last.is_lost and fault.step == last.step:
            self.goes_on = False
            place = "before the first step" if fault.step is None else f"in step {fault.step}"
            return f"not started again: the script has failed {place} twice, which is a bug, not a machine fault"
        self.num_done += 1
        lost = ""
        if last is not None and _is_lost_again(last, fault) and self.num_processes > self._least:
            self.num_processes, self._has_dropped = self.num_processes - 1, True
            del self._devices[fault.rank : fault.rank + 1]
            lost = f", without rank {fault.rank}, which was lost twice"
            self._last = None  # ranks are renumbered
        return f"restart {self.num_done} of {self._most}, with {self.num_processes} ranks{lost}"


def _is_lost_again(last: Fault, fault: Fault) -> bool:
    """Whether the same rank was lost twice within one checkpoint interval."""
    if not (last.is_lost and fault.is_lost and last.rank == fault.rank):
        return False
    every = fault.checkpoint_every
    return every is None or (fault.step or 0) - (last.step or 0) < every


def _visible_devices(num_processes: int) -> list[str]:
    """The devices of ranks, as CUDA_VISIBLE_DEVICES names them. Empty if that is empty."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return list(map(str, range(num_processes)))
    return [name.strip() for name in given.split(",")][:num_processes] if given.strip() else []
