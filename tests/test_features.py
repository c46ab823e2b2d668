"""What every training script has, on gloo processes: the numbers of a plain PyTorch loop in one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pool import Pool  # noqa: E402


@pytest.fixture(scope="module")
def pool():
    one = Pool()
    yield one
    one.close()


def follow(pool, num_ranks, name, plan="plan 1", limit=1e-9):
    answers = pool.run(num_ranks, "follow", name, plan)
    for one in answers:
        assert one.loss < limit
        assert one.parameter < limit, one.worst
        assert one.moved > 1e-3
    return answers[0]


@pytest.mark.parametrize(("num_ranks", "plan"), [(1, "plan 0"), (2, "plan 3"), (3, "plan 5")])
def test_groups_of_parameters_and_a_schedule_go_on_over_fits(pool, num_ranks, plan):
    follow(pool, num_ranks, "groups and schedule", plan)


@pytest.mark.parametrize(("num_ranks", "plan"), [(1, "plan 0"), (2, "plan 4"), (3, "plan 2")])
@pytest.mark.parametrize("name", ["clipped", "clipped rarely"])
def test_gradients_are_clipped_by_the_norm_of_all_of_them(pool, num_ranks, plan, name):
    follow(pool, num_ranks, name, plan)


@pytest.mark.parametrize(("num_ranks", "plan"), [(1, "plan 0"), (3, "plan 6")])
def test_gradients_of_several_batches_add_up(pool, num_ranks, plan):
    follow(pool, num_ranks, "accumulated", plan)


def test_they_do_when_slots_are_replayed(pool):
    for num_ranks in (1, 2):
        assert follow(pool, num_ranks, "accumulated, captured", "plan 3").captured


@pytest.mark.parametrize(("num_ranks", "plan"), [(1, "plan 0"), (2, "plan 7")])
def test_the_weight_of_a_loss_may_follow_the_step(pool, num_ranks, plan):
    follow(pool, num_ranks, "weight", plan)
    assert follow(pool, num_ranks, "weight, captured", plan).captured


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_module_is_recomputed_where_the_user_says_so(pool, num_ranks):
    recomputed = follow(pool, num_ranks, "checkpointed", "wavefront").recomputed
    assert recomputed
    assert all("vision" in op for op in recomputed)


@pytest.mark.parametrize(("num_ranks", "plan"), [(1, "plan 0"), (2, "plan 8"), (3, "plan 9")])
def test_tasks_are_drawn_for_each_step(pool, num_ranks, plan):
    tasks = follow(pool, num_ranks, "sampled", plan).tasks
    assert {frozenset({"pair"}), frozenset({"answer"})} == set(tasks)


def test_their_weights_may_follow_the_step(pool):
    tasks = follow(pool, 2, "sampled by step", "plan 3").tasks
    assert tasks == (frozenset({"pair"}),) * 3 + (frozenset({"answer"}),) * 3


def test_tasks_are_drawn_when_gradients_add_up_and_when_slots_are_replayed(pool):
    follow(pool, 2, "sampled, accumulated", "plan 3")
    assert follow(pool, 2, "sampled, captured", "plan 3").captured


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_modules_are_frozen_and_thawed_between_fits(pool, num_ranks):
    follow(pool, num_ranks, "frozen", "wavefront")


@pytest.mark.parametrize(("num_ranks", "limit"), [(1, 1e-6), (2, 2e-2)])
def test_layers_run_in_bfloat16(pool, num_ranks, limit):
    """On two ranks, sums of other parts are rounded otherwise."""
    follow(pool, num_ranks, "autocast", "plan 3", limit)
