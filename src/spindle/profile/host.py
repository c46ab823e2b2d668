"""What the host of a rank takes to give its GPU work."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from spindle.errors import ProfileError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOverhead:
    """Seconds of a host's own time for each thing that it launches, whatever the GPU takes for it.

    A host launches in the order of its program. It waits for messages before it launches what needs them, and stays
    at most `ahead` passes ahead of its GPU, as ranks do that share one (`run.step.Pace`).
    """

    step_s: float  # before the first pass of a step
    task_s: float  # likewise, for each task that the rank has a part in
    pass_s: float  # a forward or backward pass
    send_s: float  # what a pass sends to one other slot
    receive_s: float  # what a pass receives from one other slot
    collective_start_s: float  # to start the synchronisation of a bucket
    collective_finish_s: float  # to take over its result
    optimizer_s: float
    ahead: int

    def __post_init__(self) -> None:
        if min(astuple(self)) < 0 or self.ahead < 1:
            raise ProfileError(f"the overhead of a host must not be negative, and it is at least one ahead: {self}")
