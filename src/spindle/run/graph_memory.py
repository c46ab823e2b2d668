"""Memory pools of CUDA graphs, and captures that allocate from them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch


class _Pool:
    """A memory pool that graphs share."""

    def __init__(self, reserves: bool) -> None:
        """With `reserves`, the pool starts as one block as large as the peak of activations so far. Blocks that are
        allocated one by one fragment, because what one round frees is too small for a tensor of the next."""
        self.handle: Any = torch.cuda.graph_pool_handle()
        self._anchor: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        num_bytes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        try:
            # An empty graph, even if nothing is reserved: torch counts the graphs of a pool, and there must be one as
            # long as gradients are in it.
            with capturing(self._anchor, self.handle):
                if num_bytes > 0 and reserves:
                    torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        except RuntimeError:  # not in one block
            torch.cuda.synchronize()
            self.handle, self._anchor = torch.cuda.graph_pool_handle(), None


class GraphMemory:
    """The memory pools of all graphs of a rank, one per lane.

    A step replays one set of graphs, from its first forward to its last backward, so sets may share memory that is free
    between pieces. What a set keeps is its own.
    """

    def __init__(self, num_lanes: int = 1, *, has_weight_lanes: bool = False) -> None:
        self.num_lanes = num_lanes
        self._reserves = num_lanes == 1  # memory that one stream reserves cannot be used by others
        self.has_weight_lanes = has_weight_lanes
        self._pools: dict[int, _Pool] = {}

    def of_lane(self, lane: int) -> Any:
        """The pool of a lane."""
        if lane not in self._pools:
            self._pools[lane] = _Pool(self._reserves)
        return self._pools[lane].handle

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph, lane: int) -> Iterator[None]:
        """Capture the current stream with memory of a lane."""
        pool = self.of_lane(lane)
        with own_workspaces() if self.has_weight_lanes else nullcontext(), capturing(graph, pool):
            yield

    def new_graph(self) -> torch.cuda.CUDAGraph:
        """A graph for a pass. With several lanes the graph object is kept, so that it can become a child of a region's
        graph."""
        return torch.cuda.CUDAGraph(keep_graph=self.num_lanes > 1)

    def renew(self) -> None:
        """Start new pools, because a failed capture does not return its memory."""
        torch.cuda.synchronize()
        self.release()
        self._reserves = False

    def release(self) -> None:
        """Release the pools when no graph is left."""
        self._pools.clear()


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, draws_from: torch.Generator | None = None) -> Iterator[None]:
    """Capture the current stream, which must not be the default one, into a graph with memory from this pool.

    A failed capture leaves its registered generators unusable, so torch's default generator is not registered. Random
    numbers are drawn from another generator, which is registered; drawing from the default one ends the capture.
    """
    collects = gc.isenabled()
    gc.disable()  # freeing memory of another graph would end the capture
    generator, unknown = default_generator(), torch.Generator(device="cuda")
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(draws_from or torch.Generator(device="cuda"))  # registered by capture_begin
    try:
        # other threads (transfers) use the GPU at the same time
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        if draws_from is None:
            generator.graphsafe_set_state(unknown)
        try:
            yield
        finally:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a layer may consist of views only
                    graph.capture_end()
            except Exception:
                # otherwise torch's allocator stays in capture mode and defers frees of other streams' memory
                device = torch.cuda.current_device()
                for end in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                    with suppress(Exception):
                        getattr(torch._C, end)(device, pool)
                raise
    finally:
        generator.graphsafe_set_state(state)
        if collects:
            gc.enable()


@contextmanager
def own_workspaces() -> Iterator[None]:
    """A context in which cuBLAS allocates new workspaces, in the memory of the graph that is being captured."""
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch._C._cuda_clearCublasWorkspaces()


def is_memory_half_used() -> bool:
    """Whether this process has reserved more than half of the memory that it may use."""
    if not torch.cuda.is_available():
        return False
    device = torch.cuda.current_device()
    limit = torch.cuda.mem_get_info()[1] * torch.cuda.get_per_process_memory_fraction(device)
    return torch.cuda.memory_reserved(device) > 0.5 * limit


def default_generator() -> torch.Generator:
    """Torch's default generator of this device."""
    return torch.cuda.default_generators[torch.cuda.current_device()]
