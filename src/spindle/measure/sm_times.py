"""How long layers take on some of a GPU's SMs, and how much they slow down copies on the others.

Each point is captured on a stream with that many SMs, after a warm-up there: libraries may choose other kernels for
fewer SMs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spindle.cluster import SmGroups
from spindle.measure.contention import slowdown_of_pair
from spindle.measure.timing import Graphed, Work, medians, warm_up
from spindle.profile import SmTimes
from spindle.run import own_workspaces, partitions

STEP_SMS = 16  # SMs between measured numbers
_MIN_TIMING_S = 0.01  # the least duration of each timing
_MIN_REPEATS, _MAX_REPEATS = 6, 200
_LAUNCH_BOUND = (1.0, 1.0)  # pressure of a layer without graphs: the host launches one kernel after another


def measure_sm_times(works: Sequence[Work], groups: SmGroups) -> SmTimes:
    """Times of a layer on 16, 32, 48, ... SMs relative to those on all, and its pressure on memory, measured with
    copies of it."""
    with own_workspaces():  # these would stay, one for each stream
        return _sm_times(works, groups)


def _sm_times(works: Sequence[Work], groups: SmGroups) -> SmTimes:
    whole_s = _passes_s(works[0], None)
    forward, backward = [1.0], [1.0]
    counts = measured_sms(groups)
    for count in reversed(counts):
        part_s = _passes_s(works[0], partitions((count,))[0].stream)
        forward.insert(0, _ratio(part_s[0], whole_s[0]))
        backward.insert(0, _ratio(part_s[1], whole_s[1]))
    return SmTimes(
        num_sms=(*counts, groups.num_sms),
        forward=tuple(forward),
        backward=tuple(backward),
        pressure=_pressure(works[:2], groups),
    )


def measured_sms(groups: SmGroups) -> list[int]:
    """The numbers of SMs on which layers are measured: 16, 32, 48, ..., in whole groups, less than all."""
    step = -(-STEP_SMS // groups.group_sms) * groups.group_sms
    return [count for count in range(step, groups.num_groups * groups.group_sms + 1, step) if count < groups.num_sms]


def _ratio(part_s: float, whole_s: float) -> float:
    return min(1024.0, max(1e-3, part_s / whole_s)) if part_s > 0 and whole_s > 0 else 1.0  # views take no time


def _passes_s(work: Work, stream: torch.cuda.Stream | None) -> tuple[float, float]:
    """Forward and backward seconds on the SMs of a stream; None for all SMs."""
    passes = warm_up(work, stream)
    with torch.cuda.stream(stream):
        once_s = max(sum(medians(passes, 1, work.device)), 1e-6)
        num_repeats = min(_MAX_REPEATS, max(_MIN_REPEATS, round(_MIN_TIMING_S / once_s)))
        seconds = medians(passes, num_repeats, work.device)
    del passes
    torch.cuda.empty_cache()  # the memory of a graph cannot be reused by the next one
    return seconds


def _pressure(works: Sequence[Work], groups: SmGroups) -> tuple[float, float]:
    """The slowdown minus one, of forward and backward, of two copies on one half of the SMs each."""
    half = groups.num_groups // 2 * groups.group_sms
    streams = [partition.stream for partition in partitions((half, half))]
    copies = [warm_up(work, stream) for work, stream in zip(works, streams, strict=True)]
    graphed = [passes for passes in copies if isinstance(passes, Graphed)]
    if len(graphed) < len(copies):
        return _LAUNCH_BOUND
    return (
        min(16.0, slowdown_of_pair([passes.forward for passes in graphed], streams)),
        min(16.0, slowdown_of_pair([passes.backward for passes in graphed], streams)),
    )
