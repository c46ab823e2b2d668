"""A rank on standby: started before its devices are free, while an earlier attempt of its job still trains on them.

    agent ──▶ rank: imports torch and Spindle ──▶ ready ──▶ waits ──▶ begins: runs the script
                                                              ▲
    agent: the devices are free ── their variables ───────────┘

No user code runs before the rank begins, so a script never runs twice at once. No device is touched either, because
only then is it known which ones the rank gets.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from spindle.launch.folders import avoid_foreign_inductor_cache

_WARM_UP = "spindle.train.warm_up", "warm_up"  # by its name: this package knows nothing of training
_POLL_S = 0.01
_BEGIN = "begin.json"
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def wait_to_begin(folder: Path) -> None:
    """In a rank: import what takes long, and wait until it may begin. Adds the variables that it begins with to the
    environment."""
    avoid_foreign_inductor_cache()
    with suppress(ImportError), _without_initializing_cuda():  # the script meets the error again, and says so
        module, function = _WARM_UP
        getattr(importlib.import_module(module), function)()
    (folder / f"{os.environ['RANK']}.ready").touch()
    while not (folder / _BEGIN).exists():
        time.sleep(_POLL_S)
    os.environ.update(json.loads((folder / _BEGIN).read_text()))


@contextmanager
def _without_initializing_cuda() -> Iterator[None]:
    """A context in which torch asks NVML whether there are GPUs. Asking CUDA would fix CUDA_VISIBLE_DEVICES for
    this process."""
    before = os.environ.get(_NVML_CHECK)
    os.environ[_NVML_CHECK] = "1"
    try:
        yield
    finally:
        del os.environ[_NVML_CHECK]
        if before is not None:
            os.environ[_NVML_CHECK] = before


def are_ready(folder: Path, ranks: Iterable[int]) -> bool:
    """Whether all of these ranks have imported everything, and wait."""
    return all((folder / f"{rank}.ready").exists() for rank in ranks)


def begin(folder: Path, environment: Mapping[str, str]) -> None:
    """Let the ranks of a folder begin, with these variables in addition to their own."""
    part = folder / f"{_BEGIN}.part"
    part.write_text(json.dumps(dict(environment)))
    part.rename(folder / _BEGIN)
