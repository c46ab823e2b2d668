"""The runtime on real gloo processes: the same numbers as one process. One pool of processes serves all tests."""

from __future__ import annotations

import os
import socket

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as multiprocessing  # noqa: E402

TIMEOUT_S = 120


def serve(rank: int, port: int, requests, answers) -> None:
    """One process of the pool: joins a world of the size asked for, runs a comparison in it, and leaves it."""
    import worlds

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for number, (num_ranks, planner, seed) in enumerate(iter(requests.get, None)):
        try:
            if rank < num_ranks:
                address = f"tcp://127.0.0.1:{port + number}"
                dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
                answers.put((rank, worlds.compare_step(rank, num_ranks, planner, seed)))
                dist.destroy_process_group()
            else:
                answers.put((rank, None))
        except Exception as error:
            answers.put((rank, f"{type(error).__name__}: {error}"))
            raise


class Pool:
    """Four processes that wait for work."""

    def __init__(self, size: int = 4) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.requests = [context.Queue() for _ in range(size)]
        self.answers = context.Queue()
        self.processes = [
            context.Process(target=serve, args=(rank, port, self.requests[rank], self.answers), daemon=True)
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def compare(self, num_ranks: int, planner: str, seed: int) -> list[tuple[float, float, int]]:
        for queue in self.requests:
            queue.put((num_ranks, planner, seed))
        answers = [self.answers.get(timeout=TIMEOUT_S) for _ in self.processes]
        for _, answer in answers:
            assert not isinstance(answer, str), answer
        return [answer for _, answer in sorted(answers) if answer is not None]

    def close(self) -> None:
        for queue in self.requests:
            queue.put(None)
        for process in self.processes:
            process.join(timeout=20)
            if process.is_alive():
                process.kill()


@pytest.fixture(scope="module")
def pool():
    one = Pool()
    yield one
    one.close()


def assert_same(answers: list[tuple[float, float, int]]) -> None:
    assert sum(held for *_, held in answers) > 0
    for loss_error, gradient_error, _ in answers:
        assert loss_error < 1e-9
        assert gradient_error < 1e-9


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("planner", ["wavefront", "paper", "sequential", "distmm", "task-level"])
def test_every_planners_plan_gives_the_numbers_of_one_process(pool, planner, num_ranks):
    assert_same(pool.compare(num_ranks, planner, seed=num_ranks))


@pytest.mark.parametrize("number", range(12))
def test_random_legal_plans_give_the_numbers_of_one_process(pool, number):
    assert_same(pool.compare(2 + number % 3, f"random{number}", seed=number))
