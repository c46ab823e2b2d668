"""Captured slots on gloo processes, replayed without CUDA: the numbers of one process, step after step."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import zoo  # noqa: E402

STEPS = 7  # one that checks losses, two launched one by one, one captured, three replayed
SMALL_CHUNKS = 1.0


def assert_same(answers, *, allowed=("random", "counts")) -> None:
    worst = max(answers, key=lambda one: one.gradient)
    assert worst.gradient < 1e-9, worst.worst
    assert max(one.loss for one in answers) < 1e-9
    assert sum(one.captured for one in answers) > 0
    for one in answers:
        for slot, reason in one.without_graph.items():
            assert any(word in reason for word in allowed), (slot, reason)


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_every_kind_of_module_gives_the_same_when_replayed(pool, kind):
    number = list(zoo.KINDS).index(kind)
    loss = zoo.LOSSES[number % len(zoo.LOSSES)]
    chunk_bytes = SMALL_CHUNKS if number % 2 else 64e6
    answers = pool.run(1 + number % 3, "compare_replayed", f"{kind} {loss}", f"plan {number}", STEPS, chunk_bytes)
    # Which expert a sample goes to is asked for on the way: that cannot be captured, and goes on as before.
    assert_same(answers, allowed=("random", "counts", *(("capturing",) if kind == "experts" else ())))


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5, 7])  # 6 has hardly two batches of the same shapes
def test_random_workloads_under_random_plans_do(pool, seed):
    chunk_bytes = SMALL_CHUNKS if seed % 2 else 64e6
    assert_same(pool.run(1 + seed % 4, "compare_replayed", f"random {seed}", f"plan {seed}", STEPS, chunk_bytes))


def test_what_is_recomputed_does(pool):
    assert_same(pool.run(2, "compare_replayed", "tower tokens", "plan 3 recomputed", STEPS, SMALL_CHUNKS))


def test_what_is_recomputed_and_cannot_be_captured_does(pool):
    answers = pool.run(2, "compare_replayed", "experts tokens", "plan 3 recomputed", STEPS, SMALL_CHUNKS)
    assert_same(answers, allowed=("random", "counts", "capturing"))
    assert any("middle" in slot for one in answers for slot in one.without_graph)


def test_a_module_that_replaces_its_buffers_keeps_nobody_else_from_being_captured(pool):
    answers = pool.run(1, "compare_replayed", "counters", "plan 1", 9, 64e6)
    assert_same(answers, allowed=("replaces its buffers",))
    assert all("counting" in slot for slot in answers[0].without_graph)
    assert answers[0].without_graph
