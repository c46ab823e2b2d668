"""What this machine's torch can use, and how fast its ranks talk to each other: the part of `spindle doctor` that needs
torch. A program, because a broken torch may end the process that imports it.

    python -m spindle.measure.environment       prints facts about torch and the GPUs, as one JSON object
    spindle launch -n 2 environment.py --links  rank 0 prints the link between ranks 0 and 1, as one JSON object
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from spindle.measure.cache import cache_folder


def torch_facts() -> dict[str, Any]:
    """Versions, the name and memory of each GPU, and where measured times are kept."""
    has_cuda = torch.cuda.is_available()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() * has_cuda)]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "distributed": torch.distributed.is_available(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None,  # type: ignore[no-untyped-call]
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in properties],
        "cache_folder": str(cache_folder()),
    }


def link_facts() -> dict[str, Any] | None:
    """The link between ranks 0 and 1, as the first fit would measure it. None on ranks other than 0."""
    from spindle.measure.links import measure_link
    from spindle.run import join_world

    world = join_world()
    link = measure_link(world)
    if world.rank:
        return None
    backend = "NCCL" if world.uses_nccl else "gloo"
    return {"backend": backend, "bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}


if __name__ == "__main__":
    facts = link_facts() if "--links" in sys.argv[1:] else torch_facts()
    if facts is not None:
        print(json.dumps(facts), flush=True)
