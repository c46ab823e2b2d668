"""The time that a host takes to launch work on its GPU."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from spindle.errors import ProfileError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOverhead:
    """Seconds of host time for each kind of launch, independent of how long the GPU takes.

    A host launches in program order. It waits for a message before it launches the pass that needs it, and runs at most
    `ahead` passes ahead of its GPU (`run.step.LaunchThrottle`, for ranks that share a GPU).
    """

    step_s: float  # before the first pass of a step
    task_s: float  # added to `step_s` for each task that the rank takes part in
    pass_s: float  # a forward or backward pass
    send_s: float  # a message to one other slot
    receive_s: float  # a message from one other slot
    collective_start_s: float  # to start the reduction of a gradient bucket
    collective_finish_s: float  # to wait for it and use its result
    optimizer_s: float
    ahead: int

    def __post_init__(self) -> None:
        if min(astuple(self)) < 0 or self.ahead < 1:
            raise ProfileError(f"host overheads must not be negative, and `ahead` must be at least 1, got {self}")
