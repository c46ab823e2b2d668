"""Balanced data: the same steps on any number of ranks, resumed exactly, each rank decoding what it needs."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import internals  # noqa: E402
import spindle  # noqa: E402
from comparison import Comparison, assert_close  # noqa: E402
from spindle.plan import parse_plan  # noqa: E402
from spindle.planners import choose_colocation  # noqa: E402
from spindle.train import plan  # noqa: E402
from spindle.train.balanced_feed import BalancedFeed, _BalancedLoad  # noqa: E402
from sweeps import RUNS_ALL  # noqa: E402
from trainings import modules_of, parameters_of, sgd, train_plainly  # noqa: E402
from vlm import Pages, pages, random_parts, vlm, with_processes  # noqa: E402

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


def train_balanced(rank, num_ranks, steps=3, state=None, trained=None, planner="colocate", **options):
    """Trains on balanced data, and plainly on the same batches decoded whole."""
    workload, reference = vlm(rows=ROWS, counts=True), vlm(rows=ROWS, counts=True)
    modules, reference_modules = modules_of(workload), modules_of(reference)
    if trained is not None:
        for name, module in modules.items():
            module.load_state_dict(trained[name])
            reference_modules[name].load_state_dict(trained[name])
    data, whole = pages(**options), pages()
    if state is not None:
        data.load_state_dict(state)
        whole.load_state_dict(state)
    planning = spindle.Planning(planner=planner, profile=internals.guessed_profile)
    trainer = spindle.Trainer(workload.tasks, optimizer=sgd, gradient_accumulation_steps=MICRO_STEPS, planning=planning)
    result = with_processes(trainer.fit, {"describe": data}, steps=steps, progress=False)
    optimizer = sgd(list(torch.nn.ModuleDict(reference_modules).named_parameters()))
    expected = train_plainly(reference.tasks, optimizer, whole_batches(whole, steps))
    comparison = Comparison(adam_learning_rate=None)
    comparison.add_losses(result.losses, expected)
    comparison.add_tensors("parameter", parameters_of(modules), parameters_of(reference_modules))
    weights = {name: module.state_dict() for name, module in modules.items()}
    decoded = {name: source.decoded for name, source in data.sources.items()}
    assert multiprocessing.active_children() == []
    return comparison, json.loads(json.dumps(data.state_dict())), weights, decoded


@pytest.mark.parametrize(
    ("num_ranks", "planner", "num_workers"),
    [
        (1, "colocate", 0),
        (3, "colocate", 0),
        (2, "pipeline", 0),
        (3, "wavefront", 0),  # a static plan
        (1, "sequential", 1),
        (2, "sequential", 2),  # every slot has rows on both ranks
        (2, "upfront", 2),  # encoders stand whole on both ranks: programs are known a step ahead
        (3, "upfront", 1),
        (2, "pipeline", 1),
    ],
)
def test_balanced_data_train_like_one_process(pool, num_ranks, planner, num_workers):
    answers = pool.run(num_ranks, train_balanced, steps=5, planner=planner, num_workers=num_workers)
    assert_close([answer[0] for answer in answers], 1e-9)
    assert all(answer[1] == answers[0][1] for answer in answers)


def train_and_note_batches(rank, num_ranks):
    """What the layout was chosen on: the ops of a batch, by batch."""
    batches = []

    def choose(*arguments):
        batches.extend(each[0].graph.metaops for each in (arguments[1], *arguments[-1]))
        return choose_colocation(*arguments)

    with mock.patch.object(plan, "choose_colocation", choose):
        comparison = train_balanced(rank, num_ranks)[0]
    return comparison, batches


def test_a_layout_is_chosen_for_the_mixes_that_come(pool):
    answers = pool.run(2, train_and_note_batches)
    assert_close([answer[0] for answer in answers], 1e-9)
    first, last = answers[0][1]  # the batch of step 0, and one with as many scans as in the last step
    assert first != last
    assert answers[1][1] == []  # rank 0 chooses


def train_balanced_on_sequence_groups(rank, num_ranks, seed):
    with random_parts(seed, sequence_degree=2) as planned:
        return train_balanced(rank, num_ranks)[0], planned


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_balanced_data_on_sequence_groups_train_like_one_process(pool, num_ranks):
    answers = pool.run(num_ranks, train_balanced_on_sequence_groups, num_ranks)
    assert_close([answer[0] for answer in answers], 1e-9)
    assert 2 in answers[0][1]  # rank 0 plans


def test_a_rank_decodes_only_the_images_that_it_encodes(pool):
    answers = pool.run(3, train_balanced, steps=4)
    images = [[entry for entry in answer[3]["web"] if isinstance(entry[1], int)] for answer in answers]
    together = sum(map(len, images))
    # The first batch is decoded by all ranks, to trace the task; later images by one rank each.
    assert max(map(len, images)) < together


class Texts:
    """Texts of 2 to 6 tokens; counts what was decoded."""

    def __init__(self):
        self.decoded = []

    def __len__(self):
        return 31

    def lengths(self, number):
        return 2 + number % 5

    def get_fields(self, number, names):
        generator = torch.Generator().manual_seed(number)
        self.decoded += [(number, name) for name in names]
        return {name: torch.randn(2 + number % 5, 4, generator=generator, dtype=torch.float64) for name in ("x", "y")}

    def __getitem__(self, number):
        return self.get_fields(number, ("x", "y"))


def on_all_ranks(profile):
    """The plan whose modules stand on all ranks, the rows of a batch divided among them; the second on the last one."""
    text = ""
    for op in profile.graph.metaops:
        last = profile.cluster.num_devices - 1
        text += f"{op.name}*{op.num_layers}@{last if op.module == 'right' else f'0-{last}'}\n"
    return parse_plan(text, profile)


def train_on_texts(rank, num_ranks, steps=4, num_workers=0):
    torch.manual_seed(0)
    left, right = (spindle.module(name, torch.nn.Linear(4, 4).double()) for name in ("left", "right"))

    @spindle.task(batch_size=5)
    def match(batch):
        scores = (left(batch["x"]) * right(batch["y"])).sum((1, 2))
        return spindle.mean(scores.square().sum(), scores.shape[0])

    data = spindle.data.balanced(
        {"texts": Texts()}, max_tokens=9, num_workers=num_workers, multiprocessing_context="fork"
    )
    planning = spindle.Planning(planner=on_all_ranks, profile=internals.guessed_profile)
    trainer = spindle.Trainer([match], optimizer=sgd, gradient_accumulation_steps=2, planning=planning)
    result = with_processes(trainer.fit, {"match": data}, steps=steps, progress=False)
    return [losses["match"] for losses in result.losses], data.sources["texts"].decoded


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(2, 0), (3, 0), (3, 2)])
def test_in_a_static_plan_a_rank_decodes_only_the_rows_and_entries_that_it_reads(pool, num_ranks, num_workers):
    ((expected, whole),) = pool.run(1, train_on_texts)
    answers = pool.run(num_ranks, train_on_texts, num_workers=num_workers)
    for losses, _ in answers:
        assert losses == pytest.approx(expected, rel=1e-9)
    if not num_workers:
        # The first step is read whole, because its loss is checked; then the last rank alone reads `y`.
        assert all(len(decoded) < len(whole) for _, decoded in answers)
        assert all(name == "x" for _, decoded in answers[:-1] for _, name in decoded[-5:])
        assert {name for _, name in answers[-1][1][-5:]} == {"x", "y"}


def ahead_of_time(rank, num_ranks, **options):
    """How many batches were asked for before they were taken, and how many were not, beside the numbers."""
    counts = {True: 0, False: 0}
    take = BalancedFeed._result_of

    def counting(feed, number, wanted):
        counts[wanted in feed._requests.get(number, {})] += 1
        return take(feed, number, wanted)

    start = _BalancedLoad.start

    def starting(load, wanted):
        # What a step itself starts is not ahead of it.
        if sys._getframe(1).f_code.co_name != "_with_values":
            start(load, wanted)

    with mock.patch.object(BalancedFeed, "_result_of", counting), mock.patch.object(_BalancedLoad, "start", starting):
        answer = train_balanced(rank, num_ranks, steps=6, num_workers=2, **options)
    return answer[0], counts


@pytest.mark.parametrize(("num_ranks", "planner"), [(1, "sequential"), (2, "upfront")])
def test_worker_processes_decode_ahead_what_a_rank_needs(pool, num_ranks, planner):
    answers = pool.run(num_ranks, ahead_of_time, planner=planner, multiprocessing_context="fork")
    assert_close([answer[0] for answer in answers], 1e-9)
    # Of the batches and the tokens of six steps, those of the first step, or of the first two, are not ahead.
    assert all(counts[True] >= 4 * MICRO_STEPS and counts[False] < counts[True] for _, counts in answers)


class Broken(Pages):
    """Documents of which one cannot be decoded."""

    def __init__(self, how):
        super().__init__("web", 13, 2)
        self.how = how

    def get_fields(self, number, names):
        if number == 5 and multiprocessing.current_process().name.startswith("decoding"):
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("no such page")
        return super().get_fields(number, names)


def train_on_broken(rank, num_ranks, how, num_workers=1):
    data = spindle.data.balanced({"web": Broken(how)}, max_tokens=24, padding={"ids": 2}, num_workers=num_workers)
    planning = spindle.Planning(planner="sequential", profile=internals.guessed_profile)
    trainer = spindle.Trainer(vlm(rows=ROWS).tasks, optimizer=sgd, planning=planning)
    with pytest.raises(spindle.errors.TrainingError) as raised:
        with_processes(trainer.fit, {"describe": data}, steps=9, progress=False)
    return str(raised.value), "".join(getattr(raised.value, "__notes__", ())), multiprocessing.active_children()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"sample 5 of 'web' could not be decoded: OSError: no such page"),
        ("kill", r"worker process 0 of its balanced data \(pid \d+\) was ended by signal SIGKILL at sample 5 of 'web'"),
    ],
)
def test_a_sample_that_a_worker_cannot_decode_is_named(pool, how, message):
    ((text, notes, children),) = pool.run(1, train_on_broken, how)
    assert re.search(message, text)
    assert ("in get_fields" in notes) == (how == "raise")
    assert children == []


class Rows:
    """Samples of a few tokens."""

    def __len__(self):
        return 7

    def lengths(self, number):
        return 2 + number % 3

    def __getitem__(self, number):
        return {"x": torch.ones(2 + number % 3, 4)}


class Drawing(Rows):
    """Samples that draw random numbers."""

    def __getitem__(self, number):
        return {"x": torch.rand(2 + number % 3, 4) + random.random() + np.random.rand()}


def drawn(num_workers):
    data = spindle.data.balanced({"rows": Drawing()}, max_tokens=8, seed=3)
    decoder = data.decoder({}, None)
    microbatches, state = data.step_after(data.state, 3, 2)
    before = torch.get_rng_state()
    if num_workers:
        workers = spindle.data.DecodeWorkers(decoder, num_workers, "fork", "look")
        requests = [workers.ask(microbatch, spindle.data.WHOLE) for microbatch in microbatches]
        batches = [workers.take(request)["x"].clone() for request in reversed(requests)][::-1]
        workers.close()
    else:
        batches = [decoder.decode(microbatch)["x"] for microbatch in microbatches]
    assert torch.equal(torch.get_rng_state(), before)
    following, _ = data.step_after(state, 3, 2)
    assert [microbatch.step for microbatch in following] == [1, 1, 1]
    return torch.stack(batches)


def test_random_numbers_of_a_sample_do_not_depend_on_the_process_that_decodes_it():
    first = drawn(0)
    torch.rand(7), random.random()
    assert torch.equal(first, drawn(0))
    assert torch.equal(first, drawn(2))


class Cropping(Rows):
    """Samples with three images each, of which each draws random numbers."""

    def lengths(self, number):
        return 2 + number % 3, [2, 1, 3]

    def get_items(self, number, names, items):
        return {"patches": torch.cat([torch.rand((2, 1, 3)[item], 3) + np.random.rand() for item in items])}


def test_random_numbers_of_an_item_do_not_depend_on_which_others_a_rank_decodes():
    data = spindle.data.balanced({"rows": Cropping()}, max_tokens=8, seed=3)
    microbatches, _ = data.step_after(data.state, 1, 1)
    lengths = microbatches[0].item_lengths
    whole = data.decoder(ITEMS, "lengths").decode(microbatches[0])["patches"].split(lengths)
    for items in ((1,), (2, 0), (len(lengths) - 1, 1, 2)):
        decoder = data.decoder(ITEMS, "lengths")
        for _ in range(2):
            decoded = decoder.decode(microbatches[0], spindle.data.Wanted((), items))
            assert decoded["lengths"].tolist() == [lengths[item] for item in items]
            assert torch.equal(decoded["patches"], torch.cat([whole[item] for item in items]))


def orphaned(pipe):
    workers = spindle.data.DecodeWorkers(
        spindle.data.balanced({"rows": Rows()}, max_tokens=8).decoder({}, None), 2, "fork", "look"
    )
    longer = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    longer.start()  # has copies of all descriptors that were open
    pipe.send(([process.pid for process in workers._processes], longer.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_with_the_process_that_started_them():
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    multiprocessing.get_context("fork").Process(target=orphaned, args=(theirs,)).start()
    pids, longer = ours.recv()
    try:
        ends = time.monotonic() + 60
        while time.monotonic() < ends and any(_is_running(pid) for pid in pids):
            time.sleep(0.05)
        assert not any(_is_running(pid) for pid in pids)
        assert _is_running(longer)
    finally:
        os.kill(longer, signal.SIGKILL)


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


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


def train_with_checkpoints(rank, num_ranks, folder, steps, planner="colocate", num_workers=0):
    workload = vlm(rows=ROWS, counts=True)
    # a mix for the four steps, and for one more, which is read ahead
    data = pages(num_workers=num_workers, mix={"web": 3, "scans": lambda step: (1, 2, 3, 4, 5)[step]})
    trainer = spindle.Trainer(
        workload.tasks,
        optimizer=sgd,
        gradient_accumulation_steps=MICRO_STEPS,
        planning=spindle.Planning(planner=planner, profile=internals.guessed_profile),
        checkpoints=spindle.Checkpoints(folder, every=1, keep=None),
    )
    result = with_processes(trainer.fit, {"describe": data}, steps=steps, progress=False)
    return [losses["describe"] for losses in result.losses], data.state_dict(), dict(trainer.state_dict())


def test_a_checkpoint_resumes_data_on_other_ranks(pool, tmp_path):
    whole, state, weights = pool.run(1, train_with_checkpoints, str(tmp_path / "whole"), 4)[0]
    first = pool.run(2, train_with_checkpoints, str(tmp_path / "cut"), 2)[0][0]
    resumed, resumed_state, resumed_weights = pool.run(3, train_with_checkpoints, str(tmp_path / "cut"), 4)[0]
    assert [*first, *resumed] == pytest.approx(whole, rel=1e-9)
    assert resumed_state == state
    for name, tensor in weights.items():
        assert torch.allclose(resumed_weights[name], tensor, rtol=1e-9, atol=1e-12)


def test_stopped_after_any_step_data_and_a_sharded_optimizer_resume_on_1_to_6_ranks(pool, tmp_path):
    steps = 4
    whole, state, weights = pool.run(1, train_with_checkpoints, str(tmp_path / "whole"), steps)[0]
    for step, num_ranks in [(2, 5)] if not RUNS_ALL else product(range(1, steps), range(1, 7)):
        folder = tmp_path / f"{step} {num_ranks}"
        pool.run(4, train_with_checkpoints, str(folder), step, planner="upfront", num_workers=1)
        options = {"planner": "upfront" if num_ranks % 2 else "sequential", "num_workers": num_ranks % 3}
        for losses, ended, trained in pool.run(num_ranks, train_with_checkpoints, str(folder), steps, **options):
            assert losses == pytest.approx(whole[step:], rel=1e-9)
            assert ended == state  # as many samples drawn, the same carried over
            for name, tensor in weights.items():
                assert torch.allclose(trained[name], tensor, rtol=1e-9, atol=1e-12)


def train_until_a_task_ends(rank, num_ranks):
    head = spindle.module("head", torch.nn.Linear(4, 4).double())
    batch = {"x": torch.ones(ROWS, 4, dtype=torch.float64)}
    plain = spindle.task(batch_size=ROWS, name="plain")(lambda batch: head(batch["x"]).square().mean())
    planning = spindle.Planning(planner="colocate", profile=internals.guessed_profile)
    trainer = spindle.Trainer(
        [*vlm(rows=ROWS, counts=True).tasks, plain],
        optimizer=sgd,
        gradient_accumulation_steps=MICRO_STEPS,
        planning=planning,
    )

    def on_step(step, losses):
        if "plain" in losses and step == 0:
            trainer.remove_task("plain")

    loaders = {"describe": pages(), "plain": [batch] * MICRO_STEPS}
    return [sorted(losses) for losses in trainer.fit(loaders, steps=4, on_step=on_step, progress=False).losses]


def test_a_task_may_end_beside_colocated_encoders(pool):
    for tasks in pool.run(2, train_until_a_task_ends):
        assert tasks[0] == ["describe", "plain"]
        assert tasks[-1] == ["describe"]


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
