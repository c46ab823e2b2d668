"""Balanced data whose lengths are only known after reading: the same steps as with an index, on any number of ranks."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from unittest import mock

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


def page_lengths(sample):
    return len(sample["ids"]), sample["lengths"]


def documents(is_indexed, lengths=page_lengths, num_workers=0, **options):
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
    assert max(alone["web"].values()) == 1  # decoded from the cache
    answers = pool.run(3, train, is_indexed=False, steps=1)
    assert all(len(read["web"]) < len(alone["web"]) for *_, read in answers)


class Texts:
    """Texts of 2 to 12 tokens, 3,000 of them by default."""

    def __init__(self, num_samples=3000):
        self._num_samples, self.read = num_samples, Counter()

    def __len__(self):
        return self._num_samples

    def __getitem__(self, number):
        self.read[number] += 1
        return {"x": torch.full((2 + number % 11, 4), number / 3000, dtype=torch.float64)}


def num_rows(sample):
    return len(sample["x"])


def train_on_texts(rank, num_ranks, steps=12, max_tokens=32, num_samples=3000, **options):
    """Losses, and before which steps ranks had to wait for lengths."""
    torch.manual_seed(0)
    layer, waits = spindle.module("layer", torch.nn.Linear(4, 4).double()), []

    @spindle.task(batch_size=8)
    def regress(batch):
        return layer(batch["x"]).square().mean()

    def counting(data, state, *sizes):
        try:
            return step_after(data, state, *sizes)
        except spindle.data.UnknownLengths:
            waits.append(state.step)
            raise

    step_after = spindle.data.Balanced.step_after
    data = spindle.data.balanced({"texts": Texts(num_samples)}, max_tokens=max_tokens, **options)
    planning = spindle.Planning(profile=internals.guessed_profile)
    trainer = spindle.Trainer([regress], optimizer=sgd, gradient_accumulation_steps=4, planning=planning)
    try:
        with mock.patch.object(spindle.data.Balanced, "step_after", counting):
            result = with_processes(trainer.fit, {"regress": data}, steps=steps, progress=False)
    except spindle.errors.SpindleError as error:
        return str(error)
    return [losses["regress"] for losses in result.losses], waits


def test_only_the_first_steps_wait_for_lengths(pool):
    for _, waits in pool.run(2, train_on_texts, lengths=num_rows):
        assert waits
        assert set(waits) <= {0, 1}


@pytest.mark.parametrize("too_long", ["error", "truncate", "skip"])
def test_samples_that_are_too_long_are_treated_as_with_an_index(pool, too_long):
    options = {"steps": 2, "max_tokens": 9, "too_long": too_long}
    (expected,) = pool.run(1, train_on_texts, lengths=[2 + number % 11 for number in range(3000)], **options)
    for answer in pool.run(2, train_on_texts, lengths=num_rows, **options):
        assert answer == expected if too_long == "error" else answer[0] == pytest.approx(expected[0], rel=1e-9)
    if too_long == "skip":
        options["max_tokens"] = 1
        (answer,) = pool.run(1, train_on_texts, lengths=num_rows, **options)
        assert "all samples of 'texts' are longer than max_tokens=1" in answer


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


def train_on_fewer_texts(rank, num_ranks, **options):
    return train_on_texts(rank, num_ranks, num_samples=3000 - rank, **options)


def test_a_dataset_that_is_shorter_on_one_rank_is_refused(pool):
    answers = pool.run(2, train_on_fewer_texts, lengths=num_rows)
    assert len({*answers}) == 1
    assert "the state of the balanced data of task 'regress'" in answers[0]
    assert "2999" in answers[0]


def test_samples_read_for_their_lengths_are_read_again_for_a_later_step():
    texts = Texts()
    data = spindle.data.balanced({"texts": texts}, max_tokens=32, lengths=num_rows)
    decoder, sample = data.decoder({}, None), spindle.data.SampleNumber("texts", 5)
    (lengths,) = decoder.read_lengths([sample])
    for step, num_read in ((0, 1), (0, 1), (1, 2), (0, 3)):
        decoder.decode(spindle.data.Microbatch(((sample,),), (lengths,), lengths[0], step))
        assert texts.read[5] == num_read


class Fatal(Texts):
    """Texts of which one ends the process that reads it."""

    def __getitem__(self, number):
        if number == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(number)


def train_on_fatal_texts(rank, num_ranks):
    options = {"lengths": num_rows, "num_workers": 1, "multiprocessing_context": "fork"}
    with mock.patch(f"{__name__}.Texts", Fatal):
        return train_on_texts(rank, num_ranks, steps=100, num_samples=100, **options)


def test_a_sample_that_ends_the_process_that_reads_its_length_is_named(pool):
    answers = pool.run(2, train_on_fatal_texts)
    assert len({*answers}) == 1
    assert re.search(r"worker process 0 .* was ended by signal SIGKILL at sample 7 of 'texts'", answers[0])


def train_on_nonsense(rank, num_ranks, value):
    return train(rank, num_ranks, is_indexed=False, lengths=lambda sample: value if rank == 1 else page_lengths(sample))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("many", r"the function returned 'many'; expected its tokens, such as 812"),
        ((3, [0]), r"the function returned \(3, \[0\]\); expected at least one token, and a row of each item"),
        (1, r"'\w+' has shape \(\d+,\), expected a row for each of the 1 tokens that the function lengths= returned"),
    ],
)
def test_a_function_that_returns_nonsense_is_refused(pool, value, message):
    answers = pool.run(2, train_on_nonsense, value)
    assert all(re.search(message, answer) for answer in answers)
