"""What a rank holds in memory during a fit: limited, counted, and freed when a plan ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from spindle.run import Budget, ReadBytes, limit_gpu_memory
from spindle.train.garbage import collect_all
from spindle.train.runtime import RankRuntime
from spindle.train.session import TrainSession
from spindle.train.update import Update


class FitMemory:
    """One rank's memory: limited and counted by torch's allocator on a GPU, or by a `Budget` on a CPU with a limit."""

    def __init__(self, session: TrainSession) -> None:
        self._device, limit = session.world.device, session.config.planning.memory_limit_bytes
        self._limit_bytes = limit
        self._budget = Budget(limit) if limit is not None and self._device.type == "cpu" else None
        self._peak_bytes = 0  # on a GPU: the peak before the allocator's statistic was reset

    def start(self) -> None:
        """Start a fit, once parameters are scattered."""
        if self._device.type == "cuda":
            limit_gpu_memory(self._limit_bytes, self._device)
            self.free()
            self._peak_bytes = 0
            torch.cuda.reset_peak_memory_stats(self._device)

    def start_plan(self, runtime: RankRuntime, update: Update) -> None:
        """Count weights, gradients, optimizer state, and the CUDA graphs of an earlier fit against the memory limit."""
        self._peak_bytes = max(self._peak_bytes, runtime.steps.main.graph_cache.peak_bytes)
        if self._budget is not None:
            self._budget.adopt(_resident_tensors(runtime, update))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A context in which tensors are counted, if there is a limit."""
        with self._budget or nullcontext():
            yield

    @contextmanager
    def read(self, runtime: RankRuntime, update: Update) -> Iterator[ReadBytes]:
        """A context in which this rank's memory can be read. On a CPU, every operation is counted, so a step takes
        longer in it."""
        if self._device.type == "cuda":
            yield self._read_allocator
            return
        budget = self._budget
        if budget is None:
            budget = Budget()
            budget.adopt(_resident_tensors(runtime, update))
        with budget:
            yield budget.read

    def _read_allocator(self) -> tuple[int, int]:
        counts = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        self._peak_bytes = max(self._peak_bytes, counts["peak"])
        torch.cuda.reset_peak_memory_stats(self._device)
        return counts["peak"], counts["current"]

    def free(self) -> None:
        """Free what tracing has left, or the CUDA graphs of a dropped plan."""
        if self._device.type == "cuda":
            collect_all()
            torch.cuda.empty_cache()

    @property
    def peak_bytes(self) -> int:
        """The most memory that this rank has held in this fit; 0 if that is not counted."""
        if self._budget is not None:
            return self._budget.peak_bytes
        if self._device.type != "cuda":
            return 0
        # This reads only one statistic; `max_memory_allocated` flattens all of them, which takes longer.
        peak: int = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["peak"]
        return max(peak, self._peak_bytes)


def _resident_tensors(runtime: RankRuntime, update: Update) -> Iterator[torch.Tensor]:
    """The tensors that stay on this rank from step to step: weights, buffers, gradients and optimizer state."""
    yield from runtime.weights.parameters
    for handle in runtime.workload.bound.handles.values():
        yield from handle.module.buffers()
    yield from runtime.steps.gradient_tensors()
    yield from update.tensors()
