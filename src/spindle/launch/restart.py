"""Whether a failed job is restarted, and with how many ranks.

If a rank is lost (killed, stopped, hung), the machine may be the cause, so the job starts again with as many ranks. If
the same rank is lost again before the next checkpoint, its device or its share of memory is suspected, and the job
continues with one rank fewer. An exception in the script may come from a disk or a network; at the same step twice, it
is a bug.
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

    def __init__(self, max_restarts: int, num_processes: int, min_processes: int) -> None:
        self.num_processes, self.num_restarts_done, self.continues = num_processes, 0, True
        self._max_restarts, self._min_processes = max_restarts, min_processes
        self._last: Fault | None = None
        self._devices, self._has_dropped = _visible_devices(num_processes), False

    def environment(self) -> dict[str, str]:
        """Environment of the ranks: the restart count, under torchrun's name, and the remaining devices."""
        environment = {"TORCHELASTIC_RESTART_COUNT": str(self.num_restarts_done)} if self.num_restarts_done else {}
        if self._has_dropped and self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices)
        return environment

    def decide(self, fault: Fault) -> str:
        """Decide what happens after a fault. Returns a line that says so."""
        last, self._last = self._last, fault
        if self.num_restarts_done == self._max_restarts:
            self.continues = False
            return f"no restart is left of {self._max_restarts}"
        if last is not None and not fault.is_lost and not last.is_lost and fault.step == last.step:
            self.continues = False
            place = "before the first step" if fault.step is None else f"in step {fault.step}"
            return f"not started again: the script has failed {place} twice, which is a bug, not a machine fault"
        self.num_restarts_done += 1
        lost = ""
        if last is not None and _is_lost_again(last, fault) and self.num_processes > self._min_processes:
            self.num_processes, self._has_dropped = self.num_processes - 1, True
            del self._devices[fault.rank : fault.rank + 1]
            lost = f", without rank {fault.rank}, which was lost twice"
            self._last = None  # ranks are renumbered
        return f"restart {self.num_restarts_done} of {self._max_restarts}, with {self.num_processes} ranks{lost}"


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
