"""Batches that lack a modality, or samples, hang the tools people use. Here they give the numbers of one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import courses  # noqa: E402
from spindle.errors import TrainingError  # noqa: E402
from spindle.train import task_variants  # noqa: E402


def follow(pool, num_ranks, name, plan="wavefront"):
    answers = pool.run(num_ranks, "follow", name, plan)
    for one in answers:
        assert one.loss < 1e-9
        assert one.parameter < 1e-9, one.worst
        assert one.moved > 1e-3
    return answers[0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_deepspeed_7170_text_only_batches_among_others(pool, num_ranks):
    """Under ZeRO-3, ranks with images wait for the vision tower's weights, which ranks without do not gather."""
    follow(pool, num_ranks, "text only")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_deepspeed_7170_images_that_come_after_the_plan(pool, num_ranks):
    assert follow(pool, num_ranks, "text first").tasks == (frozenset({"caption"}),) * 5


def test_transformers_37186_a_vision_tower_that_is_not_called_gets_no_gradient(pool):
    """Not zeros either: momentum and weight decay leave it alone, as in one process."""
    follow(pool, 2, "images never again")


@pytest.mark.parametrize(("num_ranks", "plan"), [(2, "plan 3"), (3, "wavefront")])
def test_transformers_37186_a_modality_without_rows(pool, num_ranks, plan):
    follow(pool, num_ranks, "empty images", plan)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_qwen3_vl_126_any_number_of_images_or_none(pool, num_ranks):
    follow(pool, num_ranks, "any number of images")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_task_without_a_batch_has_no_part_in_the_step(pool, num_ranks):
    assert follow(pool, num_ranks, "no batch").tasks[:2] == (frozenset({"caption", "look"}), frozenset({"look"}))


def test_a_first_batch_without_samples_tells_nothing(pool):
    follow(pool, 2, "no batch first")


@pytest.mark.parametrize(("num_ranks", "plan"), [(2, "plan 1"), (3, "plan 2"), (3, "plan 3")])
def test_a_task_may_have_fewer_samples_than_there_are_devices(pool, num_ranks, plan):
    follow(pool, num_ranks, "few samples", plan)


def test_mixed_batches_add_up_and_are_clipped_together(pool):
    follow(pool, 3, "mixed, clipped and accumulated")


def test_mixed_batches_are_replayed(pool):
    assert follow(pool, 2, "mixed, captured").captured


def test_a_branch_on_shapes_may_go_either_way(pool):
    for num_ranks in (1, 2):
        follow(pool, num_ranks, "by length")


def test_too_many_ways_are_explained(monkeypatch):
    monkeypatch.setattr(task_variants, "_MOST_VARIANTS", 2)
    with pytest.raises(TrainingError, match=r"task 'caption': its batches take more than 2 variants, the last"):
        courses.follow(0, 1, "text only", "wavefront")
