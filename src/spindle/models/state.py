"""What a module keeps beside its weights: it can be run for a trial and put back as it was.

Kept is what hangs on the module itself: its attributes (a cache that it fills in its first forward, a counter) and the
values of its buffers. What an attribute holds inside (a list that grows) is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn


def keep_state(modules: Iterable[nn.Module]) -> Callable[[], bool]:
    """Notes the state of modules. The function that it gives puts it back, and says whether attributes had changed."""
    inner = list({id(one): one for module in modules for one in module.modules()}.values())
    attributes = [(one, {**one.__dict__, "_buffers": dict(one._buffers)}) for one in inner]
    values = [(buffer, buffer.clone()) for one in inner for buffer in one._buffers.values() if buffer is not None]

    def put_back() -> bool:
        changed = False
        for one, before in attributes:
            now = {**one.__dict__, "_buffers": dict(one._buffers)}
            if now["_buffers"].keys() != before["_buffers"].keys() or any(
                now["_buffers"][name] is not buffer for name, buffer in before["_buffers"].items()
            ):
                changed = True
            rest = before.keys() - {"_buffers"}
            if now.keys() != before.keys() or any(now[name] is not before[name] for name in rest):
                changed = True
            one.__dict__.clear()
            one.__dict__.update(before)
        with torch.no_grad():
            for buffer, value in values:
                buffer.data.copy_(value)
        return changed

    return put_back
