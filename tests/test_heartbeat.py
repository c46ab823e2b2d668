"""The heartbeat between ranks: who is lost, and who merely left, has not begun, or takes its time."""

from __future__ import annotations

import queue
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from spindle.run.heartbeat import Heartbeat, _this_process  # noqa: E402

INTERVAL_S, LIMIT_S = 0.02, 1.0


class Ranks:
    """Heartbeats of several ranks in this process, on one store; and what they say when a rank is lost."""

    def __init__(self, size: int) -> None:
        self.master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self.master.port
        self.said: queue.Queue[str] = queue.Queue()
        self.beats = [self._heartbeat(rank, size) for rank in range(size)]

    def _heartbeat(self, rank: int, size: int) -> Heartbeat:
        client = dist.TCPStore("127.0.0.1", self.port, is_master=False)
        return Heartbeat(
            None,
            client,
            rank,
            size,
            LIMIT_S,
            interval_s=INTERVAL_S,
            end=lambda error: self.said.put(f"{rank}: {error}"),
        )

    def freeze(self, rank: int) -> None:
        """Ends a rank's threads without a goodbye."""
        self.beats[rank]._leaving.set()

    def leave(self) -> None:
        for beat in self.beats:
            beat._leaving.set()


@pytest.fixture
def ranks():
    made = Ranks(3)
    yield made
    made.leave()


def test_a_rank_whose_counter_stands_still_is_lost_to_the_one_before_it(ranks):
    for beat in ranks.beats:
        beat.start()
    time.sleep(5 * INTERVAL_S)
    ranks.freeze(2)
    assert ranks.said.get(timeout=10) == "1: rank 2 has not answered for 1 s"


def test_nobody_is_lost_while_all_beat_and_when_they_leave(ranks):
    for beat in ranks.beats:
        beat.start()
    time.sleep(2 * LIMIT_S)
    for rank in (2, 1, 0):
        ranks.beats[rank].leave()
        time.sleep(LIMIT_S)
    assert ranks.said.empty()


def test_behind_a_rank_that_left_the_next_one_is_watched(ranks):
    for beat in ranks.beats:
        beat.start()
    ranks.beats[1].leave()
    time.sleep(5 * INTERVAL_S)
    ranks.freeze(2)
    assert ranks.said.get(timeout=10).startswith("0: rank 2 has not answered")


def test_a_rank_that_has_not_begun_is_waited_for(ranks):
    ranks.beats[0].start()
    time.sleep(2 * LIMIT_S)
    assert ranks.said.empty()


def test_a_store_that_is_gone_ends_the_others_but_not_after_rank_0_said_goodbye():
    ranks = Ranks(2)
    ranks.beats[1].start()
    time.sleep(5 * INTERVAL_S)
    del ranks.master
    assert "the store of the process group, on rank 0's host, is gone" in ranks.said.get(timeout=10)
    ranks.leave()
    ranks = Ranks(2)
    for beat in ranks.beats:
        beat.start()
    ranks.beats[0].leave()
    time.sleep(5 * INTERVAL_S)
    del ranks.master
    time.sleep(LIMIT_S)
    assert ranks.said.empty()
    ranks.leave()


def test_a_process_is_told_from_others_by_its_host_its_number_and_its_start():
    host, pid, started = _this_process().split()
    assert host
    assert int(pid) > 0
    assert int(started) > 0
