"""Processes that wait for work: each request runs one function on every rank of a process group.

The process group stays for the next request when that has as many ranks: under NCCL it takes a second or two to make.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from comparison import Comparison

LIMIT_S = 300.0  # for one request, also on busy cores, unless SPINDLE_TEST_LIMIT_S says otherwise
START_S = 60.0  # more, for one that new processes serve
_TIMEOUT = timedelta(seconds=240)  # of one operation inside it
_LEAVE = None  # instead of a function: destroy the process group


def forking() -> Any:
    """Starts processes as copies of one that has imported what takes seconds to import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    # It does not take over `sys.path`, and would go on without a module that it does not find.
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()
    return context


def serve(
    rank: int, port: int, requests: Any, answers: Any, traces: str, environment: dict[str, str], backend: str
) -> None:
    """One process of the pool. Writes the tracebacks of all its threads to the file `traces` on SIGUSR1.

    The process that it is a copy of may have been started in another environment.
    """
    os.environ.clear()
    os.environ |= environment
    number = 0
    try:
        import backends

        # A Trainer asks whether objects are frozen: they are, and counting them takes 25 ms.
        with open(traces, "w") as file, mock.patch.object(gc, "get_freeze_count", return_value=1):
            faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
            torch.set_num_threads(1)
            backends.prepare_rank(rank)
            gc.freeze()
            for number, num_ranks, function, arguments, options in iter(requests.get, None):
                if function is _LEAVE:
                    dist.destroy_process_group()
                    continue
                if (num_ranks > 1 or backend) and not dist.is_initialized():  # else one process needs none
                    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
                    store = dist.PrefixStore(f"request {number}", store)
                    backends.init_process_group(store, rank, num_ranks, _TIMEOUT, backend)
                answer = function(rank, num_ranks, *arguments, **options)
                gc.collect()  # what holds a process group, or memory of the GPU
                if backends.on_gpu():
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
                if backend:
                    if dist.is_initialized():
                        dist.destroy_process_group()
                elif num_ranks > 1:
                    dist.all_reduce(torch.zeros(1))  # on the host, whatever the backend
                    backends.leave_subgroups()
                answers.put((number, rank, answer, ""))
                del answer
                gc.freeze()  # modules and caches: a later collection would traverse them again, for 0.25 s
    except BaseException as error:
        # The pool starts anew.
        answers.put((number, rank, None, "".join(traceback.format_exception(error))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of `Pool.run`: its ranks, and the largest error that its answers report, if they report any."""

    num_ranks: int
    error: float | None


class Pool:
    """Starts processes as requests need them, and all anew after one that failed: ranks that wait for a failed one
    would wait long. With a backend of its own, every request gets a new process group of that backend."""

    def __init__(self, backend: str = "") -> None:
        import backends

        self._backend = backend
        self._context = forking()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._number = 0
        self._group_size = 0  # ranks of the process group that the last request left
        self._processes: list[Any] = []
        self._requests: list[Any] = []
        self._answers = self._context.Queue()
        self._traces: tempfile.TemporaryDirectory[str] | None = None
        self._max_ranks = backends.max_ranks()
        self.log: list[Request] = []

    def run(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *arguments: Any,
        silent: Collection[int] = (),
        **options: Any,
    ) -> list[Any]:
        """What `function(rank, num_ranks, *arguments, **options)` gives on each rank. Processes of ranks that are
        `silent` end without an answer."""
        num_ranks = min(num_ranks, self._max_ranks)
        self.log.append(Request(num_ranks=num_ranks, error=None))
        limit_s = float(os.environ.get("SPINDLE_TEST_LIMIT_S", LIMIT_S))
        limit = time.monotonic() + limit_s + (START_S if len(self._processes) < num_ranks else 0.0)
        self._start(num_ranks)
        self._number += 1
        if self._group_size != num_ranks:
            self._send(self._group_size, _LEAVE, (), {})
            self._group_size = num_ranks if num_ranks > 1 and not self._backend else 0
        self._send(num_ranks, function, arguments, options)
        answers: dict[int, Any] = dict.fromkeys(silent)
        while len(answers) < num_ranks:
            try:
                number, rank, answer, trouble = self._answers.get(timeout=1)
            except queue.Empty:
                dead = [
                    rank
                    for rank, process in enumerate(self._processes)
                    if not process.is_alive() and rank not in silent
                ]
                if not dead and time.monotonic() < limit:
                    continue
                missing = sorted(set(range(num_ranks)) - set(answers))
                stacks = self._stacks(missing)
                self.close()
                raise AssertionError(
                    f"ranks {missing} did not answer within {limit_s:g} s; ended: {dead or 'none'}\n{stacks}"
                ) from None
            if trouble:
                self.close()
                raise AssertionError(f"rank {rank} of {num_ranks}, {function.__name__}{arguments}:\n{trouble}")
            if number == self._number:
                answers[rank] = answer
        for rank in silent:
            self._processes[rank].join(timeout=20)
        in_order = [answers[rank] for rank in range(num_ranks)]
        self.log[-1] = Request(num_ranks=num_ranks, error=largest_error(in_order))
        return in_order

    def _send(self, num_ranks: int, *request: Any) -> None:
        for requests in self._requests[:num_ranks]:
            requests.put((self._number, num_ranks, *request))

    def _start(self, num_ranks: int) -> None:
        """Starts the processes of these ranks that do not run."""
        for rank in range(num_ranks):
            if rank == len(self._processes):
                self._processes.append(None)
                self._requests.append(None)
            if self._processes[rank] is None or not self._processes[rank].is_alive():
                self._requests[rank] = self._context.Queue()
                queues = self._requests[rank], self._answers
                trace, environment = str(self._trace_path(rank)), dict(os.environ)
                arguments = (rank, self._store.port, *queues, trace, environment, self._backend)
                self._processes[rank] = self._context.Process(target=serve, args=arguments, daemon=True)
                self._processes[rank].start()

    def _trace_path(self, rank: int) -> Path:
        if self._traces is None:
            self._traces = tempfile.TemporaryDirectory(prefix="spindle-pool-")
        return Path(self._traces.name) / f"rank-{rank}"

    def _stacks(self, ranks: list[int]) -> str:
        """Where these ranks are."""
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(1)
        texts = {rank: self._trace_path(rank) for rank in ranks if self._trace_path(rank).exists()}
        return "\n".join(f"rank {rank}:\n{path.read_text(errors='replace')}" for rank, path in texts.items())

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(timeout=20)  # one that is stuck in the kernel ends when it comes back
        self._processes, self._requests, self._answers = [], [], self._context.Queue()
        self._group_size = 0
        if self._traces is not None:
            self._traces.cleanup()
            self._traces = None


def largest_error(answer: Any) -> float | None:
    """The largest error in an answer: of a comparison in its fields, or any number of a nest. A NaN is the largest."""
    if isinstance(answer, float):
        return answer
    if isinstance(answer, Comparison):
        parts: Any = [error for error, _ in answer.largest.values()]
    elif is_dataclass(answer):
        parts = [value for field in fields(answer) if isinstance(value := getattr(answer, field.name), Comparison)]
    elif isinstance(answer, dict):
        parts = answer.values()
    else:
        parts = answer if isinstance(answer, list | tuple) else ()
    errors = [error for error in map(largest_error, parts) if error is not None]
    return max(errors, key=lambda error: (math.isnan(error), error), default=None)
