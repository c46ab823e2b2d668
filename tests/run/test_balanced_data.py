"""Balanced data: the same steps on any number of ranks, resumed exactly, each rank decoding what it needs."""

from __future__ import annotations

import json

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
