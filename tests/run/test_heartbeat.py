"""The heartbeat between ranks: who is lost, and who merely left, has not begun, or takes its time."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pool import forking  # noqa: E402
from spindle.launch.activity import Activity  # noqa: E402
from spindle.run import join_world  # noqa: E402
from spindle.run.heartbeat import Heartbeat, _state_and_start, _this_process  # noqa: E402
from test_launch import is_gone, wait_until  # noqa: E402

INTERVAL_S, LIMIT_S = 0.02, 0.4
SILENT_S = 5 * LIMIT_S  # for a host with one rank


class Ranks:
    """Heartbeats of several ranks in this process, on one store; and what they say when a rank is lost."""

    def __init__(self, hosts: str, waiting: Sequence[str] = ()) -> None:
        """`hosts` has a letter for the host of each rank; `waiting` what each waits for, where ranks are watched."""
        self.waiting = waiting
        self.master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.said: queue.Queue[str] = queue.Queue()
        self.beats = [self._heartbeat(rank, hosts) for rank in range(len(hosts))]

    def _heartbeat(self, rank: int, hosts: str) -> Heartbeat:
        _, pid, started = _this_process().split()
        return Heartbeat(
            None,
            dist.TCPStore("127.0.0.1", self.master.port, is_master=False),
            rank,
            len(hosts),
            LIMIT_S,
            interval_s=INTERVAL_S,
            end=lambda error: self.said.put(f"{rank}: {error}"),
            process=f"{hosts[rank]} {pid} {started}",
            activity=lambda: self._activity(rank),
        )

    def _activity(self, rank: int) -> Activity:
        return Activity(
            num_records=time.monotonic_ns(),
            num_events=1,
            step=3 if self.waiting else None,
            longest_step_s=1e-3,
            phase="",
            waiting=self.waiting[rank] if self.waiting else "",
            where="train.py:3 in loss",
        )

    def start(self) -> None:
        for beat in self.beats:
            beat.start()
        time.sleep(5 * INTERVAL_S)

    def freeze(self, *ranks: int) -> None:
        """Ends the threads of ranks without a goodbye."""
        for rank in ranks:
            self.beats[rank]._leaving.set()


@pytest.fixture
def ranks():
    made = Ranks("ABC")
    yield made
    made.freeze(0, 1, 2)


def test_a_rank_that_others_wait_for_ends_by_itself_and_is_named_by_the_others(monkeypatch):
    monkeypatch.setenv("SPINDLE_HUNG_S", "0.3")
    made = Ranks("AAA", ("exchanging tensors", "", "exchanging headers"))
    made.start()
    said = [made.said.get(timeout=10) for _ in range(3)]
    made.freeze(0, 1, 2)
    text = r"rank 1 has made no progress for 0 s, in step 3 \(train.py:3 in loss\)"
    assert re.match(f"1: {text}", said[0])
    assert all(re.match(f"[012]: {text}", line) for line in said[1:])


def test_a_host_that_is_silent_is_lost_to_the_one_before_it(ranks):
    ranks.start()
    ranks.freeze(2)
    assert ranks.said.get(timeout=10) == "1: rank 2 has not answered for 2 s"


def test_nobody_is_lost_while_all_beat_and_when_they_leave(ranks):
    ranks.start()
    time.sleep(1.2 * SILENT_S)
    ranks.beats[2].leave()
    ranks.beats[1].leave()
    time.sleep(1.2 * SILENT_S)
    ranks.beats[0].leave()
    assert ranks.said.empty()


def test_a_rank_that_has_left_has_no_thread_that_could_abort_its_exit(ranks):
    before = set(threading.enumerate())
    ranks.start()
    for beat in reversed(ranks.beats):
        beat.leave()
    assert set(threading.enumerate()) <= before


def test_behind_a_host_that_left_the_next_one_is_watched(ranks):
    ranks.start()
    ranks.beats[1].leave()
    time.sleep(5 * INTERVAL_S)
    ranks.freeze(2)
    assert ranks.said.get(timeout=10).startswith("0: rank 2 has not answered")


def test_a_rank_that_has_not_begun_is_waited_for(ranks):
    ranks.beats[0].start()
    time.sleep(1.2 * SILENT_S)
    assert ranks.said.empty()


def test_a_host_beats_as_long_as_one_of_its_ranks_does():
    ranks = Ranks("ABB")
    ranks.start()
    ranks.freeze(2)
    time.sleep(1.2 * SILENT_S)
    assert ranks.said.empty()
    ranks.freeze(1)
    assert ranks.said.get(timeout=10) == "0: the host of ranks 1, 2 has not answered for 0 s"
    ranks.freeze(0)


def test_a_store_that_is_gone_ends_the_others_but_not_after_rank_0_said_goodbye():
    ranks = Ranks("AB")
    ranks.beats[1].start()
    time.sleep(5 * INTERVAL_S)
    del ranks.master
    assert "the store of the process group, on rank 0's host, is gone" in ranks.said.get(timeout=10)
    ranks.freeze(0, 1)
    ranks = Ranks("AB")
    ranks.start()
    ranks.beats[0].leave()
    time.sleep(5 * INTERVAL_S)
    del ranks.master
    time.sleep(LIMIT_S)
    assert ranks.said.empty()
    ranks.freeze(0, 1)


HOLDING = """
import ctypes, sys, time
import torch.distributed as dist
from spindle.run.heartbeat import Heartbeat

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
Heartbeat(None, store, 1, 2, interval_s=0.02).start()
print("begun", flush=True)
sys.stdin.readline()
ctypes.PyDLL(None).sleep(int(sys.argv[2]))  # which keeps Python's lock
print("free", flush=True)
time.sleep(60)
"""


def test_a_rank_that_holds_pythons_lock_is_not_lost_and_one_that_is_stopped_is():
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", master.port, is_master=False)
    said: queue.Queue[str] = queue.Queue()
    heartbeat = Heartbeat(None, client, 0, 2, LIMIT_S, interval_s=INTERVAL_S, end=lambda error: said.put(str(error)))
    command = [sys.executable, "-c", HOLDING, str(master.port), "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            heartbeat.start()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "free\n"
            assert said.empty()
            process.send_signal(signal.SIGSTOP)
            assert said.get(timeout=10) == "rank 1 has not answered for 0 s"
            time.sleep(5 * INTERVAL_S)
            assert _state_and_start(process.pid)[0] != "T"  # continued, so that it can be ended
        finally:
            heartbeat._leaving.set()
            process.kill()


def test_a_process_is_told_from_others_by_its_host_its_number_and_its_start():
    host, pid, started = _this_process().split()
    assert host
    assert int(pid) > 0
    assert int(started) > 0


def agent(rank_pid: object) -> None:
    """What torchrun's agent does: start a rank, and wait for it. The rank joins the world."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "any", "WORLD_SIZE": "1"}
    pid = os.fork()
    if pid == 0:
        join_world()
        rank_pid.put(os.getpid())
        time.sleep(600)
    os.waitpid(pid, 0)


def test_ranks_end_with_the_agent_of_torchrun():
    context = forking()
    rank_pid = context.Queue()
    process = context.Process(target=agent, args=(rank_pid,), daemon=True)
    process.start()
    pid = rank_pid.get(timeout=60)
    process.kill()
    process.join()
    wait_until(lambda: is_gone(pid))
