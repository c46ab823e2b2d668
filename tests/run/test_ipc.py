"""Our backend of torch.distributed with real processes, over shared memory of the host."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpu import checks
from pool import Pool
from spindle.errors import PeerLostError
from spindle.run.ipc import collectives, transport
from spindle.run.ipc.memory_backend import HostMemoryBackend
from spindle.run.ipc.process_group import BACKEND
from spindle.run.ipc.shm_control import ShmControl
from spindle.run.world import peers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes share memory in this way on Linux")


def on_host(rank: int, num_ranks: int, check: Callable[[torch.device], None]) -> None:
    check(torch.device("cpu"))


@pytest.fixture(scope="module")
def pool():
    pool = Pool(BACKEND)
    yield pool
    pool.close()


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_on_three_ranks(check, pool):
    pool.run(3, on_host, check)


def one_that_reads_late(device: torch.device) -> None:
    """A rank that reads others' memory late finds it as it was."""
    rank, size = dist.get_rank(), 1 << 18  # one chunk, so that no other follows
    places, copy_all = HostMemoryBackend.place_of, collectives._copy_all
    exported = []

    def noted(backend: HostMemoryBackend, tensor: torch.Tensor) -> Any:
        exported.append(places(backend, tensor))
        return exported[-1]

    def late(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        time.sleep(0.1 if rank == 1 else 0)
        copy_all(targets, sources)

    HostMemoryBackend.place_of, collectives._copy_all = noted, late
    try:
        ours = torch.zeros(size).share_memory_()
        for _ in range(3):
            ours.fill_(rank + 1)
            dist.all_reduce(ours)
            total = ours.clone()
            ours.fill_(-1)
            assert torch.equal(total, torch.full((size,), 6.0))
    finally:
        HostMemoryBackend.place_of, collectives._copy_all = places, copy_all
    assert all(place is not None for place in exported)
    assert len(exported) == 3


def one_that_maps_late(device: torch.device) -> None:
    attach = HostMemoryBackend.attach

    def late(backend: HostMemoryBackend, *arguments: Any) -> torch.Tensor:
        time.sleep(0.3 if dist.get_rank() == 1 else 0)
        return attach(backend, *arguments)

    HostMemoryBackend.attach = late
    try:
        ours = torch.ones(1000)
        dist.all_reduce(ours)  # after which the first rank leaves
        assert ours.tolist() == [2] * 1000
    finally:
        HostMemoryBackend.attach = attach


def test_a_rank_that_leaves_waits_for_those_who_still_read_from_it(pool):
    pool.run(2, on_host, one_that_maps_late)


def test_memory_that_others_read_stays_as_it_is(pool):
    pool.run(3, on_host, one_that_reads_late)


def collectives_that_wait_for_their_device(device: torch.device) -> None:
    """As on a GPU that is not yet as far as its caller is: ranks are there at different times, and one job waits
    behind another."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    before = HostMemoryBackend.is_event_done
    try:
        for late in (*range(num_ranks), None):
            until_s = time.monotonic() + (0.05 if late in (rank, None) else 0.0)
            HostMemoryBackend.is_event_done = lambda self, event, until_s=until_s: time.monotonic() > until_s
            tensors = [torch.full((1000,), float(rank + number)) for number in range(3)]
            requests = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            if late == rank:
                time.sleep(0.1)  # while the thread does it
            for number, (tensor, request) in enumerate(zip(tensors, requests, strict=True)):
                request.wait()
                expected = sum(peer + number for peer in range(num_ranks))
                assert torch.equal(tensor, torch.full((1000,), float(expected)))
                assert time.monotonic() > until_s
    finally:
        HostMemoryBackend.is_event_done = before


def devices_that_get_there_between_two_looks(device: torch.device) -> None:
    """Nobody sleeps for what has come true meanwhile."""
    before, look_s = HostMemoryBackend.is_event_done, transport._CHECK_S
    transport._CHECK_S = 1000.0
    try:
        for number, looks in enumerate(range(1, 6)):
            answers = itertools.chain([False] * looks, itertools.repeat(True))
            HostMemoryBackend.is_event_done = lambda self, event, answers=answers: next(answers)
            ours = torch.full((1000,), float(number))
            dist.all_reduce(ours)
            assert ours.tolist() == [number * dist.get_world_size()] * 1000
    finally:
        HostMemoryBackend.is_event_done, transport._CHECK_S = before, look_s


def test_devices_get_there_between_two_looks(pool):
    pool.run(3, on_host, devices_that_get_there_between_two_looks)


def threads_while_another_works(device: torch.device) -> None:
    """The thread does not look again and again while whoever waits is at it: it would take the interpreter away."""
    is_event_done, signal, sleep = HostMemoryBackend.is_event_done, HostMemoryBackend.signal, ShmControl.sleep
    num_sleeps = 0

    def counted(self: Any, *arguments: Any, **named: Any) -> None:
        nonlocal num_sleeps
        num_sleeps += 1
        sleep(self, *arguments, **named)

    def slow(self: Any) -> int:
        time.sleep(0.2)
        return signal(self)

    until_s = time.monotonic() + 0.1
    HostMemoryBackend.is_event_done = lambda self, event: time.monotonic() > until_s
    HostMemoryBackend.signal, ShmControl.sleep = slow, counted
    try:
        request = dist.all_reduce(torch.ones(1000), async_op=True)
        time.sleep(0.02)  # so that the thread looks after it
        request.wait()
    finally:
        HostMemoryBackend.is_event_done, HostMemoryBackend.signal, ShmControl.sleep = is_event_done, signal, sleep
    assert num_sleeps < 100, num_sleeps


def test_threads_sleep_while_another_works(pool):
    pool.run(2, on_host, threads_while_another_works)


def test_collectives_wait_for_their_device_on_the_host(pool):
    pool.run(3, on_host, collectives_that_wait_for_their_device)


def messages_that_wait_for_their_device(device: torch.device) -> None:
    """One that waits does not hold up another, and nothing is read or written before its time."""
    rank, before, event = dist.get_rank(), HostMemoryBackend.is_event_done, HostMemoryBackend.record_event
    begin_s = time.monotonic()
    late_s = {"send": begin_s + 0.3, "recv": begin_s + 0.1}
    moments = iter(range(100))
    HostMemoryBackend.record_event = lambda self: next(moments)
    # The first call of each rank is late, the second is not.
    HostMemoryBackend.is_event_done = lambda self, event: (
        event > 0 or time.monotonic() > late_s["send" if rank == 0 else "recv"]
    )
    try:
        ours = [torch.full((100_000,), float(10 * rank + number)) for number in range(2)]
        call = dist.isend if rank == 0 else dist.irecv
        first, second = (call(tensor, 1 - rank, tag=number) for number, tensor in enumerate(ours))
        second.wait()
        if rank == 1:
            assert torch.equal(ours[1], torch.full((100_000,), 1.0))
            assert torch.equal(ours[0], torch.full((100_000,), 10.0)), "the first one is not yet to be written to"
        ours[0].fill_(5.0) if rank == 0 else None  # until its time comes, the sender may still write to it
        first.wait()
        if rank == 1:
            assert torch.equal(ours[0], torch.full((100_000,), 5.0))
    finally:
        HostMemoryBackend.is_event_done, HostMemoryBackend.record_event = before, event


def test_messages_wait_for_their_device_on_the_host(pool):
    pool.run(2, on_host, messages_that_wait_for_their_device)


def memory_that_is_freed(device: torch.device) -> None:
    (ours,) = [value for value in gc.get_objects() if isinstance(value, transport.Transport) and not value._leaving]
    summed = torch.ones(1 << 19).share_memory_()
    for _ in range(3):
        dist.all_reduce(summed)
    assert len(ours._segments._placed) == dist.get_world_size() - 1
    dist.barrier()
    del summed
    end_s = time.monotonic() + 20
    while ours._segments._placed:
        assert time.monotonic() < end_s, "the others' memory is still held"
        time.sleep(0.05)


def test_memory_that_its_owner_frees_is_let_go(pool):
    pool.run(3, on_host, memory_that_is_freed)


@pytest.mark.parametrize("check", [checks.check_all_reduce, checks.check_messages, checks.check_ddp])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_on_two_and_four_ranks(check, num_ranks, pool):
    pool.run(num_ranks, on_host, check)


def alone(device: torch.device) -> None:
    ours = torch.ones(3)
    dist.all_reduce(ours)
    dist.barrier()
    assert ours.tolist() == [1, 1, 1]


def test_a_group_of_one(pool):
    pool.run(1, on_host, alone)


def survive_a_killed_rank(device: torch.device) -> None:
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(1))
    if rank == 2:
        time.sleep(1)  # until the others are through with the first
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s = time.monotonic()
    meet = (lambda: dist.all_reduce(torch.ones(1 << 20))) if rank == 0 else (lambda: dist.recv(torch.ones(1), 2))
    expected = r"noticed while testing: rank 2 \(process \d+\) has ended"
    with pytest.raises(PeerLostError, match=expected), peers("testing"):
        meet()
    assert time.monotonic() - begin_s < 20
    with pytest.raises(RuntimeError, match="rank 2"):
        dist.barrier()


def test_a_killed_rank_is_an_error_on_the_others_within_seconds(pool):
    pool.run(3, on_host, survive_a_killed_rank, silent=(2,))


def go_on_without_one(device: torch.device) -> None:
    rank = dist.get_rank()
    rest = dist.new_group([0, 1])
    if rank == 2:
        dist.send(torch.full((300_000,), 7.0), 0)  # still read when its sender is about to leave
        return
    if rank == 0:
        time.sleep(0.2)
        buffer = torch.zeros(300_000)
        dist.recv(buffer, 2)
        assert buffer.eq(7).all()
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=rest)
        time.sleep(0.1)
    with pytest.raises(RuntimeError, match=r"rank 2 .* has left the group"):
        dist.barrier()


def test_ranks_continue_without_one_that_has_left(pool):
    pool.run(3, on_host, go_on_without_one)


def fail_in_backward(device: torch.device) -> None:
    """An error must come out of DDP as an error, though DDP waits for it in C++."""
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    loss = model(torch.ones(2, 4)).sum()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="rank 1"):
        loss.backward()


def test_ddp_raises_when_a_rank_is_gone(pool):
    pool.run(2, on_host, fail_in_backward, silent=(1,))


def leave_work_behind(device: torch.device) -> None:
    work = dist.irecv(torch.ones(1), 1 - dist.get_rank())
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="left the group"):
        work.wait()


def test_an_operation_that_no_rank_will_finish_is_an_error_after_leaving(pool):
    pool.run(2, on_host, leave_work_behind)


def shared_files() -> set[str]:
    paths = [f"/proc/self/fd/{file}" for file in os.listdir("/proc/self/fd")]
    return {path for path in paths if os.path.islink(path) and "spindle-" in os.readlink(path)}


def leave_no_file(device: torch.device) -> None:
    before = shared_files()
    dist.all_reduce(torch.ones(100_000))
    made = shared_files() - before
    assert made
    dist.destroy_process_group()
    gc.collect()
    assert not made & shared_files()


def test_no_memory_stays_behind(pool):
    pool.run(2, on_host, leave_no_file)


def wait_with_a_limit(device: torch.device) -> None:
    if dist.get_rank() == 0:
        work = dist.irecv(torch.ones(1), 1)
        with pytest.raises(RuntimeError, match="recv has not finished"):
            work.wait(timedelta(seconds=0.1))
        assert not work.is_completed()
        dist.send(torch.ones(1), 1)
        assert work.wait()
        assert work.is_completed()
    else:
        dist.recv(torch.ones(1), 0)
        dist.send(torch.ones(1), 0)


def test_waiting_may_have_a_limit(pool):
    pool.run(2, on_host, wait_with_a_limit)
