"""Processes that wait for work: each request joins some of them to a gloo world, runs one function of `worlds` on every
rank, and leaves it again."""

from __future__ import annotations

import os
import queue
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

LIMIT_S = 120  # for one request
_MEETING = timedelta(seconds=60)  # for one operation inside it
_HEAVY = ["spindle.measure", "spindle.train"]


def forking() -> Any:
    """Starts processes as copies of one that has imported what takes seconds to import, and has done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_HEAVY)
    return context


def serve(rank: int, port: int, requests: Any, answers: Any) -> None:
    """One process of the pool."""
    import worlds

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for number, num_ranks, function, arguments in iter(requests.get, None):
        try:
            if num_ranks > 1:  # one process alone needs no process group, as in `python train.py`
                store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_MEETING)
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(f"request {number}", store),
                    rank=rank,
                    world_size=num_ranks,
                    timeout=_MEETING,
                )
            answer = getattr(worlds, function)(rank, num_ranks, *arguments)
            if num_ranks > 1:
                dist.barrier()
                dist.destroy_process_group()
            answers.put((number, rank, answer, ""))
        except BaseException as error:
            answers.put((number, rank, None, "".join(traceback.format_exception(error))))
            return  # the pool starts anew


class Pool:
    """Starts processes as requests need them, and all anew after one that failed: ranks that wait for a failed one
    would wait long."""

    def __init__(self) -> None:
        self._context = forking()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._number = 0
        self._processes: list[Any] = []
        self._requests: list[Any] = []
        self._answers = self._context.Queue()

    def run(self, num_ranks: int, function: str, *arguments: Any) -> list[Any]:
        """What `worlds.<function>(rank, num_ranks, *arguments)` gives on each rank."""
        self._start(num_ranks)
        self._number += 1
        for requests in self._requests[:num_ranks]:
            requests.put((self._number, num_ranks, function, arguments))
        answers: dict[int, Any] = {}
        limit = time.monotonic() + LIMIT_S
        while len(answers) < num_ranks:
            try:
                _, rank, answer, trouble = self._answers.get(timeout=1)
            except queue.Empty:
                dead = [rank for rank, one in enumerate(self._processes) if not one.is_alive()]
                if not dead and time.monotonic() < limit:
                    continue
                missing = sorted(set(range(num_ranks)) - set(answers))
                self.close()
                raise AssertionError(f"ranks {missing} did not answer; ended: {dead or 'none'}") from None
            if trouble:
                self.close()
                raise AssertionError(f"rank {rank} of {num_ranks}, {function}{arguments}:\n{trouble}")
            answers[rank] = answer
        return [answers[rank] for rank in range(num_ranks)]

    def _start(self, num_ranks: int) -> None:
        """Has so many processes."""
        for rank in range(len(self._processes), num_ranks):
            self._requests.append(self._context.Queue())
            arguments = (rank, self._store.port, self._requests[rank], self._answers)
            self._processes.append(self._context.Process(target=serve, args=arguments, daemon=True))
            self._processes[-1].start()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._requests, self._answers = [], [], self._context.Queue()
