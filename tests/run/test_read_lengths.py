"""Balanced data whose lengths only reading tells: the same steps as with an index, on any number of ranks."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

import internals  # noqa: E402
import spindle  # noqa: E402
from trainings import modules_of, sgd  # noqa: E402
from vlm import Pages, vlm, with_processes  # noqa: E402

MICRO_STEPS, ROWS = 2, 2


class Unindexed:
    """The documents of `Pages`, as a dataset that must be read to know their lengths."""

    def __init__(self, pages, broken=None, missing=0):
        self._pages, self.broken, self.missing, self.read = pages, broken, missing, Counter()

    def __len__(self):
        return len(self._pages)

    def __getitem__(self, number):
        self.read[number] += 1
        if number == self.broken:
            raise OSError("no such page")
        _, images = self._pages.lengths(number)
        sample = self._pages[number] | {"lengths": torch.tensor(images, dtype=torch.int64)}
        return {name: value[self.missing :] if name in ("ids", "labels") else value for name, value in sample.items()}


def told(sample):
    return len(sample["ids"]), sample["lengths"]


def documents(is_indexed, lengths=told, num_workers=0, **options):
    sources = {"web": Pages("web", 140, 2), "scans": Pages("scans", 7, 4, gets_items=False)}
    if not is_indexed:
        sources = {name: Unindexed(source, **options) for name, source in sources.items()}
    return spindle.data.balanced(
        sources,
        lengths=None if is_indexed else lengths,
        max_tokens=24,
        mix={"web": 6, "scans": lambda step: 1 + step},
        seed=5,
        padding={"ids": 2},
        num_workers=num_workers,
        multiprocessing_context="fork",
    )


def train(rank, num_ranks, steps=4, state=None, trained=None, planner="colocate", broken_rank=None, **options):
    """Trains on documents; returns losses or the error, the state, weights, and what was read."""
    if rank == broken_rank:
        options["broken"] = 3
    workload, data = vlm(rows=ROWS, counts=True), documents(**options)
    modules = modules_of(workload)
    for name, module in modules.items() if trained else ():
        module.load_state_dict(trained[name])
    if state is not None:
        data.load_state_dict(state)
    planning = spindle.Planning(planner=planner, profile=internals.guessed_profile)
    trainer = spindle.Trainer(workload.tasks, optimizer=sgd, gradient_accumulation_steps=MICRO_STEPS, planning=planning)
    try:
        result = with_processes(trainer.fit, {"describe": data}, steps=steps, progress=False)
    except spindle.errors.SpindleError as error:
        return str(error)
    weights = {name: module.state_dict() for name, module in modules.items()}
    read = {name: getattr(source, "read", None) for name, source in data.sources.items()}
    return [losses["describe"] for losses in result.losses], json.loads(json.dumps(data.state_dict())), weights, read


def positions(state):
    """What a state says of samples, and not of where lengths come from."""
    drawn = {name: entry["drawn"] for name, entry in state["sources"].items()}
    return state["step"], state["draws"], drawn, state["carried"]


@pytest.mark.parametrize(
    ("num_ranks", "planner", "num_workers"),
    [(1, "colocate", 0), (2, "upfront", 2), (3, "colocate", 0), (2, "sequential", 1), (4, "wavefront", 0)],
)
def test_lengths_that_are_read_give_the_steps_of_an_index(pool, num_ranks, planner, num_workers):
    ((expected, state, weights, _),) = pool.run(1, train, is_indexed=True)
    answers = pool.run(num_ranks, train, is_indexed=False, planner=planner, num_workers=num_workers)
    for losses, ours, trained, _ in answers:
        assert losses == pytest.approx(expected, rel=1e-9)
        assert positions(ours) == positions(state)
        for name, module in weights.items():
            for key, tensor in module.items():
                assert torch.allclose(trained[name][key], tensor, rtol=1e-9, atol=1e-12)


def test_ranks_read_samples_for_their_lengths_in_shares_and_one_rank_reads_none_twice(pool):
    ((_, _, _, alone),) = pool.run(1, train, is_indexed=False)
    assert max(alone["web"].values()) == 1  # decoded from what was kept
    answers = pool.run(3, train, is_indexed=False, steps=1)
    assert all(len(read["web"]) < len(alone["web"]) for *_, read in answers)


def test_data_whose_lengths_are_read_resume_on_any_number_of_ranks(pool):
    ((_, middle, weights, _),) = pool.run(1, train, steps=2, is_indexed=True)
    ((expected, last, _, _),) = pool.run(1, train, 2, middle, weights, is_indexed=True)
    state = pool.run(3, train, steps=2, is_indexed=False)[0][1]
    assert state["seen"]
    assert positions(state) == positions(middle)
    for num_ranks in (1, 2):
        for losses, ours, _, _ in pool.run(num_ranks, train, 2, state, weights, is_indexed=False):
            assert losses == pytest.approx(expected, rel=1e-9)
            assert positions(ours) == positions(last)
    for answer in pool.run(2, train, 2, state, weights, is_indexed=False, missing=1):
        assert re.search(r"sample \d+ of '\w+' has \d+ tokens and items of .*, and had \d+ tokens", answer)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_one_rank_cannot_read_ends_all_ranks_with_its_error(pool, num_workers):
    answers = pool.run(2, train, steps=40, broken_rank=1, is_indexed=False, num_workers=num_workers, planner="upfront")
    message = r"task 'describe', rank 1: sample 3 of '\w+' could not be read for its lengths: OSError: no such page"
    assert len({*answers}) == 1
    assert re.fullmatch(message, answers[0])


def train_on_nonsense(rank, num_ranks, value):
    return train(rank, num_ranks, is_indexed=False, lengths=lambda sample: value if rank == 1 else told(sample))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("many", r"the function returned 'many'; expected its tokens, such as 812"),
        ((3, [0]), r"the function returned \(3, \[0\]\); expected at least one token, and a row of each item"),
        (1, r"'\w+' has shape \(\d+,\), expected a row for each of the 1 tokens that the function lengths= told"),
    ],
)
def test_a_function_that_tells_nonsense_is_refused(pool, value, message):
    answers = pool.run(2, train_on_nonsense, value)
    assert all(re.search(message, answer) for answer in answers)
