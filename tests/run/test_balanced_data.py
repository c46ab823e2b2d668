"""Balanced data: the same steps on any number of ranks, resumed exactly, each rank decoding what it needs."""

from __future__ import annotations

import json
import re

import pytest

torch = pytest.importorskip("torch")

import internals  # noqa: E402
import spindle  # noqa: E402
from comparison import Comparison, assert_close  # noqa: E402
from trainings import modules_of, parameters_of, sgd, train_plainly  # noqa: E402
from vlm import pages, vlm  # noqa: E402

MICRO_STEPS, ROWS = 3, 2
ITEMS = {"patches": "lengths", "lengths": None}


def whole_batches(data, steps):
    """The batches of steps, decoded whole, as one process would."""
    state, decoder = data.state, data.decoder(ITEMS, "lengths")
    rows = []
    for _ in range(steps):
        microbatches, state = data.step_after(state, MICRO_STEPS, ROWS)
        rows.append([{"describe": decoder.decode(microbatch)} for microbatch in microbatches])
    return rows


def train_balanced(rank, num_ranks, steps=3, state=None, trained=None, planner="colocate"):
    """Trains on balanced data, and plainly on the same batches decoded whole."""
    workload, reference = vlm(rows=ROWS, counts=True), vlm(rows=ROWS, counts=True)
    modules, reference_modules = modules_of(workload), modules_of(reference)
    if trained is not None:
        for name, module in modules.items():
            module.load_state_dict(trained[name])
            reference_modules[name].load_state_dict(trained[name])
    data, whole = pages(), pages()
    if state is not None:
        data.load_state_dict(state)
        whole.load_state_dict(state)
    planning = spindle.Planning(planner=planner, profile=internals.guessed_profile)
    trainer = spindle.Trainer(workload.tasks, optimizer=sgd, gradient_accumulation_steps=MICRO_STEPS, planning=planning)
    result = trainer.fit({"describe": data}, steps=steps, progress=False)
    optimizer = sgd(list(torch.nn.ModuleDict(reference_modules).named_parameters()))
    expected = train_plainly(reference.tasks, optimizer, whole_batches(whole, steps))
    comparison = Comparison(adam_learning_rate=None)
    comparison.add_losses(result.losses, expected)
    comparison.add_tensors("parameter", parameters_of(modules), parameters_of(reference_modules))
    weights = {name: module.state_dict() for name, module in modules.items()}
    decoded = {name: source.decoded for name, source in data.sources.items()}
    return comparison, json.loads(json.dumps(data.state_dict())), weights, decoded


@pytest.mark.parametrize(("num_ranks", "planner"), [(1, "colocate"), (3, "colocate"), (2, "pipeline")])
def test_balanced_data_train_like_one_process(pool, num_ranks, planner):
    answers = pool.run(num_ranks, train_balanced, planner=planner)
    assert_close([answer[0] for answer in answers], 1e-9)
    assert all(answer[1] == answers[0][1] for answer in answers)


def test_a_rank_decodes_only_the_images_that_it_encodes(pool):
    answers = pool.run(3, train_balanced, steps=4)
    images = [[entry for entry in answer[3]["web"] if isinstance(entry[1], int)] for answer in answers]
    together = sum(map(len, images))
    # The first batch is decoded by all ranks, to trace the task; later images by one rank each.
    assert max(map(len, images)) < together


def test_data_resume_on_any_number_of_ranks(pool):
    numbers = [entry["draws"] for entry in _states(6)]
    _, state, weights, _ = pool.run(3, train_balanced, steps=2)[0]
    assert state["draws"] == numbers[1]
    for num_ranks in (1, 2):
        answers = pool.run(num_ranks, train_balanced, steps=2, state=state, trained=weights)
        assert_close([answer[0] for answer in answers], 1e-9)
        assert answers[0][1]["draws"] == numbers[3]
        assert answers[0][1]["step"] == 4


def _states(steps):
    data = pages()
    state = data.state
    for _ in range(steps):
        _, state = data.step_after(state, MICRO_STEPS, ROWS)
        yield data.dict_of(state)


def train_with_checkpoints(rank, num_ranks, folder, steps):
    workload = vlm(rows=ROWS, counts=True)
    data = pages()
    trainer = spindle.Trainer(
        workload.tasks,
        optimizer=sgd,
        gradient_accumulation_steps=MICRO_STEPS,
        planning=spindle.Planning(planner="colocate", profile=internals.guessed_profile),
        checkpoints=spindle.Checkpoints(folder, every=1),
    )
    result = trainer.fit({"describe": data}, steps=steps, progress=False)
    return [losses["describe"] for losses in result.losses], data.state_dict(), dict(trainer.state_dict())


def test_a_checkpoint_resumes_data_on_other_ranks(pool, tmp_path):
    whole, state, weights = pool.run(1, train_with_checkpoints, str(tmp_path / "whole"), 4)[0]
    first = pool.run(2, train_with_checkpoints, str(tmp_path / "cut"), 2)[0][0]
    resumed, resumed_state, resumed_weights = pool.run(3, train_with_checkpoints, str(tmp_path / "cut"), 4)[0]
    assert [*first, *resumed] == pytest.approx(whole, rel=1e-9)
    assert resumed_state == state
    for name, tensor in weights.items():
        assert torch.allclose(resumed_weights[name], tensor, rtol=1e-9, atol=1e-12)


def train_on_other_samples(rank, num_ranks):
    workload = vlm(rows=ROWS)
    data = pages(mix={"web": 1, "scans": lambda step: 50 * rank * step})  # the first step is the same
    planning = spindle.Planning(planner="colocate", profile=internals.guessed_profile)
    trainer = spindle.Trainer(workload.tasks, optimizer=sgd, planning=planning)
    try:
        trainer.fit({"describe": data}, steps=9, progress=False)
    except spindle.errors.TrainingError as error:
        return str(error)


def test_a_rank_with_other_samples_is_named(pool):
    answers = pool.run(2, train_on_other_samples)
    message = r"step [1-9]: the loader of task 'describe' gave rank 1 a different batch than rank 0"
    assert all(re.search(message, answer) for answer in answers)


def train_with_few_microbatches(rank, num_ranks):
    planning = spindle.Planning(planner="colocate", pipeline_parallel_degree=1, profile=internals.guessed_profile)
    trainer = spindle.Trainer(vlm(rows=ROWS).tasks, optimizer=sgd, planning=planning)
    with pytest.raises(spindle.errors.TrainingError) as raised:
        trainer.fit({"describe": pages()}, steps=1, progress=False)
    return str(raised.value)


def test_every_replica_needs_a_microbatch(pool):
    answers = pool.run(2, train_with_few_microbatches)
    assert all("needs a microbatch for each of the 2 replicas" in answer for answer in answers)


class Rows:
    """Samples of a few tokens."""

    def __len__(self):
        return 7

    def lengths(self, number):
        return 2 + number % 3

    def __getitem__(self, number):
        return {"x": torch.ones(2 + number % 3, 4)}


class States(spindle.Callback):
    def __init__(self, data):
        self.data, self.steps = data, []

    def on_step(self, record):
        self.steps.append((self.trainer.train_state().step, *(data.state_dict()["step"] for data in self.data)))


def states_in_callbacks(rank, num_ranks):
    modules = [spindle.module(name, torch.nn.Linear(4, 4)) for name in "ab"]

    def define(name, module):
        return spindle.task(batch_size=1, name=name)(lambda batch: module(batch["x"]).square().mean())

    tasks = [define(name, module) for name, module in zip("ab", modules, strict=True)]
    data = {name: spindle.data.balanced({"rows": Rows()}, max_tokens=8) for name in "ab"}
    states = States(list(data.values()))
    planning = spindle.Planning(profile=internals.guessed_profile)
    trainer = spindle.Trainer(
        tasks, optimizer=sgd, gradient_accumulation_steps=2, planning=planning, callbacks=[states]
    )
    trainer.fit(data, steps=4, progress=False)
    with pytest.raises(spindle.errors.TrainingError, match="balanced data, as of task 'a', have no end; give a loader"):
        trainer.evaluate(data)
    return states.steps, [each.state_dict()["step"] for each in data.values()]


def test_states_are_those_after_the_steps_that_are_trained_on_every_rank(pool):
    for steps, last in pool.run(2, states_in_callbacks):
        assert all(trained == first == second for trained, first, second in steps)
        assert len(steps) == 4
        assert last == [4, 4]  # also of a task whose batches another rank reads
