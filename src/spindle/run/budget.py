"""A memory limit on tensors for devices whose allocator has none: counts bytes as tensors are created and freed.

Every operation is intercepted, so this is for tests, not for speed. Workspaces inside kernels are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spindle.errors import OverBudgetError


class Budget(TorchDispatchMode):
    """Counts the bytes of tensors created inside its `with` block, and raises if the count exceeds the limit."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes, self.num_bytes, self.peak_bytes = limit_bytes, 0, 0
        self._recent_peak_bytes = 0
        self._known: dict[int, weakref.finalize[Any, Any]] = {}

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were created earlier."""
        for tensor in tensors:
            self._note(tensor)

    def read(self) -> tuple[int, int]:
        """The highest count since the last call, and the current one."""
        peak_bytes, self._recent_peak_bytes = self._recent_peak_bytes, self.num_bytes
        return max(peak_bytes, self.num_bytes), self.num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or tensor.device.type == "meta":
            return
        num_bytes = storage.nbytes()
        self._known[key] = weakref.finalize(storage, self._free, key, num_bytes)
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        self._recent_peak_bytes = max(self._recent_peak_bytes, self.num_bytes)
        if self.limit_bytes is not None and self.num_bytes > self.limit_bytes:
            raise OverBudgetError(
                f"{self.num_bytes:,} bytes of tensors are held, {self.num_bytes - self.limit_bytes:,} over this rank's "
                f"limit of {self.limit_bytes:,} bytes"
            )

    def _free(self, key: int, num_bytes: int) -> None:
        self._known.pop(key, None)
        self.num_bytes -= num_bytes


def limit_gpu_memory(limit_bytes: int | None, device: torch.device) -> None:
    """Limit torch's caching allocator on a GPU."""
    if limit_bytes is not None:
        share = limit_bytes / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(share, torch.cuda.get_per_process_memory_fraction(device)), device
        )
