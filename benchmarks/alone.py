"""Benchmarks that share a GPU while they prepare and have it to themselves while they measure.

Most of a benchmark's time goes into tracing, compiling and capturing, on one core. With `SPINDLE_ALONE=FOLDER` in the
environment of several processes, they prepare at the same time; what one runs `with alone():` is measured while the
others are stopped (SIGSTOP). Without the variable, nothing happens.

    export SPINDLE_ALONE=$(mktemp -d)
    python lanes.py --only pair --output pair.json & python lanes.py --only clip-4-2 --output clip.json & wait
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

DRAIN_S = 0.3  # kernels that a stopped process has launched still run
MOST_S = 45.0  # a stopped process may hold a lock that the measuring one waits for


def join() -> None:
    """Be one of the processes that are stopped while another measures."""
    if folder := os.environ.get("SPINDLE_ALONE"):
        (Path(folder) / str(os.getpid())).touch()


@contextmanager
def alone() -> Iterator[None]:
    """Not to be nested."""
    folder = os.environ.get("SPINDLE_ALONE")
    if folder is None:
        yield
        return
    join()
    with (Path(folder) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [int(path.name) for path in Path(folder).iterdir() if path.name.isdigit()]
        others = [process for process in others if process != os.getpid()]
        limit = threading.Timer(MOST_S, _give_up, [others])
        limit.daemon = True
        try:
            _signal(others, signal.SIGSTOP)
            limit.start()
            time.sleep(DRAIN_S)
            yield
        finally:
            limit.cancel()
            _signal(others, signal.SIGCONT)


def measured_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        with alone():
            return function(*arguments, **options)

    return run


def _give_up(others: list[int]) -> None:
    print(f"not alone: a measurement takes more than {MOST_S:g} s", flush=True)
    faulthandler.dump_traceback(all_threads=True)
    _signal(others, signal.SIGCONT)


def _signal(processes: list[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
