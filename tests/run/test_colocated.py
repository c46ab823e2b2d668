"""A Trainer with planner `colocate`: items of microbatches are encoded in parts on any rank. The numbers are those of a
plain PyTorch loop in one process."""

from __future__ import annotations

from itertools import permutations

import pytest

torch = pytest.importorskip("torch")

import internals  # noqa: E402
import spindle  # noqa: E402
from sweeps import RUNS_ALL  # noqa: E402
from trainings import assert_trained, sgd, train  # noqa: E402
from vlm import random_parts, vlm_training  # noqa: E402


def train_vlm(rank, num_ranks, plan="colocate", degree=None, **options):
    return train(rank, num_ranks, vlm_training(**options), plan, pipeline_parallel_degree=degree)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {"counts": True}),
        (5, {"images": "few"}),  # fewer images than ranks, ranks without a part
        (2, {"images": "steps without", "micro_steps": 2}),
        (3, {"plan": "stage-0", "images": "equal", "mean": False}),
        (3, {"plan": "dedicated"}),
        (2, {"plan": "upfront", "images": "one long"}),
        (2, {"degree": 1, "micro_steps": 4}),  # two replicas of a pipeline of one rank
        (4, {"degree": 2, "images": "one long"}),
        (2, {"freezes": ("vision",)}),
        (2, {"freezes": ("vision", "projector")}),
        (3, {"audio": True}),  # a projector that two encoders share
        (2, {"plan": "pipeline", "counts": True}),
        (1, {"plan": "wavefront", "counts": True}),
    ],
)
def test_a_vision_language_model_trains_like_one_process(pool, num_ranks, options):
    assert_trained(pool.run(num_ranks, train_vlm, **options))


def train_randomly(rank, num_ranks, seed, degree, **options):
    with random_parts(seed):
        return train_vlm(rank, num_ranks, "colocate", degree, **options)


@pytest.mark.parametrize(
    ("num_ranks", "degree", "options"),
    [
        (2, 2, {}),
        (3, 3, {"counts": True}),
        (4, 2, {"images": "one long"}),
        (5, 5, {"audio": True}),
        (6, 3, {"freezes": ("vision",)}),
    ],
)
def test_random_layouts_parts_and_devices_give_the_same_numbers(pool, num_ranks, degree, options):
    for seed in range(4 if RUNS_ALL else 1):
        assert_trained(pool.run(num_ranks, train_randomly, 10 * num_ranks + seed, degree, **options))


def test_a_module_whose_items_see_each_other_runs_whole(pool):
    answers = pool.run(2, train_vlm, is_per_item=False)
    assert_trained(answers)
    assert any("items of vision#0 in task 'describe' run together" in notice for notice in answers[0].notices)


def test_without_items_there_is_nothing_to_colocate(pool):
    assert_trained(pool.run(2, train_vlm, images="none"))
    with pytest.raises(AssertionError, match=r'planner="stage-0"\): places the modules that read items alone'):
        pool.run(2, train_vlm, plan="stage-0", images="none")


class Appended(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def train_appended(rank, num_ranks):
    """Images as further rows of a sequence, whose length therefore follows from them."""
    torch.manual_seed(0)
    vision = spindle.module("vision", torch.nn.Linear(4, 4))
    language = spindle.module("language", Appended())

    @spindle.task(batch_size=1, items={"patches": "lengths"})
    def describe(batch):
        images = vision(batch["patches"])
        return language(torch.cat([batch["text"], images[None]], dim=1)).square().mean()

    def batch(*lengths):
        return {
            "text": torch.ones(1, 3, 4),
            "patches": torch.ones(sum(lengths), 4),
            "lengths": torch.tensor(lengths),
        }

    batches = [batch(*lengths) for lengths in [*permutations((1, 2, 3)), (2, 4, 5), (1, 1, 1)]]
    planning = spindle.Planning(planner="stage-0", profile=internals.guessed_profile)
    trainer = spindle.Trainer([describe], optimizer=sgd, gradient_accumulation_steps=2, planning=planning)
    result = trainer.fit({"describe": batches}, steps=4, progress=False)
    return [losses["describe"] for losses in result.losses]


def test_shapes_that_follow_from_rows_of_items_are_inferred_anew(pool):
    (alone,) = pool.run(1, train_appended)
    for losses in pool.run(2, train_appended):
        assert losses == pytest.approx(alone, rel=1e-5)
