"""Measure the time that a host takes to launch work on its GPU.

Each pass, message and collective of a step takes some host time, whatever it computes. This measures the launch of one
kernel while all ranks launch kernels. The parts of a step take fixed multiples of it, which were measured with timers
in the executor (benchmarks/virtual/host_overhead.py; experiments/LOG.md, "Host overhead").
"""

from __future__ import annotations

import statistics
import time

import torch

from spindle.measure.rank_sync import RankSync
from spindle.profile import HostOverhead
from spindle.run import MAX_AHEAD, World, on_compute_stream

_KERNELS, _ROUNDS = 200, 15


def measure_host_overhead(world: World) -> HostOverhead | None:
    """Measure the host overhead. All ranks call it, and get the same result.

    None if ranks do not share a GPU: a host then runs ahead of its GPU, and costs no time unless passes are very short.
    """
    if not world.shares_gpu:
        return None
    launches_s = RankSync(world, enabled=True).all_gather(_launch_s(world.device))
    return overhead_from(statistics.median(seconds for (seconds,) in launches_s))


def overhead_from(launch_s: float) -> HostOverhead:
    """The overhead on a machine on which launching a kernel takes this long."""
    return HostOverhead(
        step_s=100 * launch_s,
        task_s=70 * launch_s,
        pass_s=38 * launch_s,
        send_s=56 * launch_s,
        receive_s=25 * launch_s,
        collective_start_s=105 * launch_s,
        collective_finish_s=19 * launch_s,
        optimizer_s=88 * launch_s,
        ahead=MAX_AHEAD + 1,  # the event that a host waits for is recorded after the previous pass
    )


def _launch_s(device: torch.device) -> float:
    """Host seconds to launch one small kernel. The queue of a GPU has room for many."""
    with on_compute_stream(device):
        value = torch.zeros(1, device=device)
        rounds_s = []
        for _ in range(_ROUNDS):
            begin_s = time.perf_counter()
            for _ in range(_KERNELS):
                value.add_(1.0)
            rounds_s.append((time.perf_counter() - begin_s) / _KERNELS)
            torch.cuda.synchronize(device)
    return statistics.median(rounds_s)
