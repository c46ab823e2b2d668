"""Checkpoints of one process: what is in them, what happens to damaged ones, which fits and tasks they resume."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import signal
import threading
from dataclasses import fields, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spindle  # noqa: E402
from internals import guessed_profile, unmeasured  # noqa: E402
from random_plans import contended, random_lane_plan  # noqa: E402
from resuming import LOADERS, Run, Waves, run, stacked  # noqa: E402
from spindle.checkpoint import (  # noqa: E402
    claim,
    finish,
    folder_of_step,
    newest_attempt,
    open_checkpoint,
    partial_folder,
    remove_unfinished,
    write_part,
)
from spindle.cli.main import run as run_cli  # noqa: E402
from spindle.errors import CheckpointError, SupersededError, TrainingError  # noqa: E402
from spindle.train import saving  # noqa: E402
from spindle.train.checkpoint_content import planning_text  # noqa: E402

torch.set_num_threads(1)
BATCHES = [stacked([Waves()[number] for number in range(first, first + 4)]) for first in range(0, 20, 4)]


def trainer_of(
    folder, tasks=("pull", "push"), *, every=2, keep=3, seed=0, size=8, profile=guessed_profile, planning=None
):
    """A Trainer of two modules with a tied weight; `extra` is a further task with a module of its own."""
    torch.manual_seed(0)
    modules = {name: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, size)).double() for name in ("a", "b", "c")}
    modules["b"][0].weight = modules["a"][0].weight
    a, b, c = (spindle.module(name, module) for name, module in modules.items())

    @spindle.task(batch_size=4)
    def pull(batch):
        return a(batch["x"]).square().mean()

    @spindle.task(batch_size=4)
    def push(batch):
        return (b(batch["x"]) - 1).square().mean()

    @spindle.task(batch_size=4)
    def extra(batch):
        return (c(batch["x"]) - 2).square().mean()

    known = {task.name: task for task in (pull, push, extra)}
    trainer = spindle.Trainer(
        [known[name] for name in tasks],
        optimizer=lambda named: torch.optim.Adam([parameter for _, parameter in named], lr=0.01),
        planning=planning or spindle.Planning(profile=profile),
        checkpoints=spindle.Checkpoints(folder, every=every, keep=keep) if isinstance(folder, Path) else folder,
        seed=seed,
    )
    return trainer, modules


def fit(trainer, steps, tasks=("pull", "push"), **options):
    return trainer.fit(dict.fromkeys(tasks, BATCHES), steps=steps, progress=False, **options)


def same(state, expected):
    return state.keys() == expected.keys() and all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints of steps 3 and 4, and the weights after 4 steps."""
    folder = tmp_path_factory.mktemp("saved")
    for steps in (3, 4):
        trainer, _ = trainer_of(folder, every=None)
        fit(trainer, steps)
    return folder, trainer.state_dict()


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "runs")
    return tmp_path / "runs"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize("loader", LOADERS)
def test_each_kind_of_loader_goes_on_with_the_same_samples(tmp_path, loader):
    loaders = (loader, "generator" if loader == "list" else "list")
    whole = run(0, 1, Run(steps=16, loaders=loaders))  # the loader reads six batches in 11 steps, two epochs of most
    run(0, 1, Run(steps=11, loaders=loaders, folder=str(tmp_path)))
    resumed = run(0, 1, Run(steps=16, loaders=loaders, folder=str(tmp_path)))
    assert resumed.losses == whole.losses[11:]
    assert same(resumed.state, whole.state)


def slower_profile(graph, num_devices):
    profile = guessed_profile(graph, num_devices)
    curves = (tuple(curve.scaled(2.0) for curve in choices) for choices in profile.curves)
    return replace(profile, curves=tuple(curves))


def test_a_resumed_run_plans_from_the_profile_that_the_script_gives_now(tmp_path):
    trainer, _ = trainer_of(tmp_path)
    fit(trainer, 2)
    measured = trainer.profile
    for profile in (slower_profile, replace(measured, curves=slower_profile(measured.graph, 1).curves)):
        resumed, _ = trainer_of(tmp_path, profile=profile)
        fit(resumed, 4)
        assert resumed.profile.curves == slower_profile(measured.graph, 1).curves
        shutil.rmtree(folder_of_step(tmp_path, 4))
    with unmeasured():
        resumed, _ = trainer_of(tmp_path, profile=None)
        fit(resumed, 4)
    assert resumed.profile.curves == measured.curves


def test_a_saved_plan_is_only_reused_with_the_same_planning_options(tmp_path):
    trainer, _ = trainer_of(tmp_path)
    fit(trainer, 2)
    other = replace(trainer.plan, slots=trainer.plan.slots[::-1])
    file = tmp_path / "plan.json"
    texts = set()
    options = [
        {},
        {"planner": "sequential"},
        {"plan": trainer.plan},
        {"plan": other},
        {"plan": file},
        {"profile": guessed_profile},
        {"profile": slower_profile},
        {"profile": trainer.profile},
        {"tensor_parallel_degrees": {"a": 2}},
        {"sequence_parallel_degrees": {"a": 1}},
        {"pipeline_parallel_degree": 1, "planner": "pipeline"},
        {"shard_optimizer": True},
        {"memory_limit_bytes": 1},
        {"lanes": 1},
        {"quotas": True},
    ]
    assert {field.name for field in fields(spindle.Planning)} == set().union(*options)
    for each in options:
        texts.add(planning_text(spindle.Planning(**each)))
    for contents in ("one", "two"):
        file.write_text(contents)
        texts.add(planning_text(spindle.Planning(plan=file)))
    assert len(texts) == len(options) + 2


def test_a_loader_that_collates_reads_no_sample_again(tmp_path):
    fetched = []
    for steps in (6, 7):
        torch.manual_seed(steps)
        trainer, _ = trainer_of(tmp_path, ["pull"])
        dataset = Waves(400)
        trainer.fit({"pull": torch.utils.data.DataLoader(dataset, 4, collate_fn=stacked)}, steps=steps, progress=False)
        fetched.append(dataset.num_fetched)
    assert fetched == [24, 4]


def test_fits_that_are_over_return_at_once_and_later_ones_go_on(tmp_path):
    def script(folder, *, last):
        trainer, modules = trainer_of(folder)
        first = fit(trainer, 3)
        with torch.no_grad():
            modules["a"][2].bias.add_(torch.rand(1).double())  # what a script does between fits
        second = fit(trainer, last)
        return first, second, trainer.state_dict()

    *_, expected = script(None, last=5)
    script(tmp_path, last=2)
    first, second, state = script(tmp_path, last=5)
    assert first.losses == ()
    assert len(second.losses) == 3
    assert same(state, expected)
    repr(first), first.print()  # a result without steps can be shown


def test_a_fit_that_was_stopped_is_over(tmp_path):
    trainer, _ = trainer_of(tmp_path)
    fit(trainer, 9, on_step=lambda step, _: trainer.stop() if step == 1 else None)
    trainer, _ = trainer_of(tmp_path)
    assert fit(trainer, 9).losses == ()
    assert len(fit(trainer, 2).losses) == 2


def test_a_signal_after_the_last_header_ends_the_job_and_its_repeat_is_ignored(tmp_path):
    trainer, _ = trainer_of(tmp_path, every=None)

    def on_step(step, losses):
        for _ in range(2 if step == 2 else 0):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        fit(trainer, 3, on_step=on_step)
    assert ended.value.code == 143
    trainer, _ = trainer_of(tmp_path, every=None)
    assert len(fit(trainer, 4).losses) == 1


def test_on_step_may_save_and_what_it_changed_is_resumed(tmp_path):
    def script(folder, steps, called):
        trainer, modules = trainer_of(folder, ["pull", "push", "extra"], every=None)

        def on_step(step, losses):
            called.append(step)
            if step == 1:
                trainer.remove_task("extra")
                modules["b"][2].requires_grad_(False)
                trainer.replan()
            if step == 3 and folder is not None:
                trainer.save()

        result = fit(trainer, steps, ["pull", "push", "extra"], on_step=on_step)
        return result, trainer.state_dict()

    _, expected = script(None, 9, [])
    script(tmp_path, 7, called := [])
    assert called == list(range(7))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-6", "step-7"]
    shutil.rmtree(tmp_path / "step-7")
    result, state = script(tmp_path, 9, called := [])
    assert called == list(range(6, 9))
    assert result.losses[0].keys() == {"pull", "push"}
    assert same(state, expected)


def test_a_task_that_had_ended_joins_again_after_resuming(tmp_path):
    def script(steps, change):
        trainer, modules = trainer_of(tmp_path)
        again = spindle.module("b", modules["b"])

        @spindle.task(batch_size=4)
        def push(batch):
            return (again(batch["x"]) - 1).square().mean()

        return fit(trainer, steps, on_step=lambda step, losses: change(trainer, push, step))

    script(4, lambda trainer, push, step: trainer.remove_task("push") if step == 1 else None)
    resumed = script(8, lambda trainer, push, step: trainer.add_task(push, BATCHES) if step == 4 else None)
    assert resumed.losses[0].keys() == {"pull"}
    assert resumed.losses[-1].keys() == {"pull", "push"}


def test_a_module_that_the_first_batch_does_not_reach_is_resumed(tmp_path):
    def script(steps):
        torch.manual_seed(0)
        both, image = (spindle.module(name, nn.Linear(3, 3)) for name in ("both", "image"))

        @spindle.task(batch_size=4)
        def describe(batch):
            seen = image(batch["pixels"]) if "pixels" in batch else 0
            return (both(batch["x"]) + seen).square().mean()

        trainer = spindle.Trainer(
            [describe],
            optimizer=lambda named: torch.optim.Adam([parameter for _, parameter in named], lr=0.1),
            planning=spindle.Planning(profile=guessed_profile),
            checkpoints=spindle.Checkpoints(tmp_path, every=None),
        )
        x = torch.ones(4, 3)
        batches = {"describe": [{"x": x}, {"x": x, "pixels": x}, {"x": x}]}
        trainer.fit(batches, steps=steps, progress=False)
        return trainer.state_dict(), {f"image.{path}": value for path, value in image.module.state_dict().items()}

    trained, _ = script(3)
    for steps in (3, 4):  # a fit that is over, and one whose only step has no pixels
        state, image = script(steps)
        assert state.keys() == trained.keys()
        assert same(image, {name: trained[name] for name in image})


def test_a_fit_that_is_over_had_a_plan_with_lanes(tmp_path):
    def script():
        def on_lanes(profile):
            return random_lane_plan(contended(profile), "plan 0 lanes")

        trainer, _ = trainer_of(tmp_path, planning=spindle.Planning(planner=on_lanes, profile=guessed_profile))
        return fit(trainer, 2)

    assert script().plan.num_lanes > 1
    over = script()
    assert over.losses == ()
    assert over.predicted.makespan_s > 0


class Pair(nn.Module):
    """A composite: two towers, one with running statistics; its own parameter is a part that has its name."""

    def __init__(self, *, is_scaled):
        super().__init__()
        self.left, self.right = (
            nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)), *last)
            for last in ((), (nn.BatchNorm1d(8),))
        )
        self.scale = nn.Parameter(torch.ones(())) if is_scaled else 1.0

    def forward(self, x, y):
        return (self.left(x) * self.scale - self.right(y)).square().mean(1)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_an_opened_composite_is_saved_and_resumed_again_and_again(tmp_path, is_scaled):
    def script(folder, steps):
        torch.manual_seed(0)
        model = Pair(is_scaled=is_scaled).double()
        pair = spindle.module("pair", model)

        @spindle.task(batch_size=4)
        def match(batch):
            return pair(x=batch["x"], y=batch["x"].flip(1)).mean()

        trainer = spindle.Trainer(
            [match],
            optimizer=lambda named: torch.optim.Adam([parameter for _, parameter in named], lr=0.01),
            planning=spindle.Planning(profile=guessed_profile),
            checkpoints=None if folder is None else spindle.Checkpoints(folder),
        )

        def on_step(step, losses):
            if step == 1:
                model.left[0].requires_grad_(False)
                model.right[2].eval()
                trainer.replan()

        result = trainer.fit({"match": BATCHES}, steps=steps, on_step=on_step, progress=False)
        return result, trainer.state_dict(), model

    expected, weights, _ = script(None, 8)
    assert "pair.left" in {metaop.module for metaop in expected.profile.graph.metaops}
    for done, steps in ((0, 3), (3, 5), (5, 8)):
        result, state, model = script(tmp_path, steps)
        assert result.losses == expected.losses[done:steps]
        assert not any("could not be written" in notice for notice in result.notices)
    assert same(state, weights)
    assert not model.left[0][0].weight.requires_grad
    assert not model.right[2].training
    assert model.training


def test_a_new_task_starts_fresh_and_a_missing_one_is_refused(tmp_path):
    trainer, _ = trainer_of(tmp_path)
    fit(trainer, 4)
    trained = trainer.state_dict()
    trainer, modules = trainer_of(tmp_path, ["pull", "push", "extra"])
    fresh = {name: value.clone() for name, value in modules["c"].state_dict().items()}
    more = fit(trainer, 5, ["pull", "push", "extra"])
    assert more.losses[0].keys() == {"pull", "push", "extra"}
    state = open_checkpoint(folder_of_step(tmp_path, 4))
    assert "parameter/c.0.weight" not in state.tensors
    assert (trained["a.0.weight"] - trainer.state_dict()["a.0.weight"]).abs().max() < 0.02  # one step further
    assert (fresh["0.weight"] - modules["c"][0].weight).abs().max() < 0.02
    trainer, _ = trainer_of(tmp_path, ["pull", "extra"])
    with pytest.raises(CheckpointError, match=r"a training with the task 'push', which this script does not have"):
        fit(trainer, 6, ["pull", "extra"])
    # Ended on purpose, its module stays in later checkpoints.
    trainer, _ = trainer_of(tmp_path, ["pull", "push", "extra"])
    trainer.remove_task("extra")
    with pytest.raises(CheckpointError, match="'extra'"):
        fit(trainer, 6)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"seed": 1}, "a training with seed=0, but this one has seed=1"),
        ({"size": 9}, r"parameter 'a.2.weight' was saved as float64 \[8, 8\], here it is float64 \[9, 8\]"),
    ],
)
def test_another_training_is_refused(copy, change, problem):
    trainer, _ = trainer_of(copy, **change)
    with pytest.raises(CheckpointError, match=problem):
        fit(trainer, 6)


def test_a_loader_of_another_length_is_refused(copy):
    trainer, _ = trainer_of(copy)
    with pytest.raises(CheckpointError, match="'push': the length of its loader was 5 when the checkpoint was saved"):
        trainer.fit({"pull": BATCHES, "push": BATCHES[:3]}, steps=6, progress=False)


# Damage.


def damaged(folder):
    """The folder with one file cut, overwritten or with a flipped bit, each in turn."""
    newest = folder_of_step(folder)
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        changed = [content[: len(content) * tenth // 10] for tenth in range(10)] + [content + b"x"]
        for place in range(0, len(content), max(1, len(content) // 23)):
            changed.append(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        for number, bytes_ in enumerate(changed):
            path.write_bytes(bytes_)
            yield path, number
        path.unlink()
        yield path, -1
        path.write_bytes(content)


def read_all(folder):
    open_checkpoint(folder).check()


def test_every_cut_and_every_flipped_bit_is_noticed_and_its_file_is_named(copy):
    newest = folder_of_step(copy)
    read_all(newest)
    for path, number in damaged(copy):
        with pytest.raises(CheckpointError) as caught:
            read_all(newest)
        assert path.name in str(caught.value) or path.name == "state.json", number
    read_all(newest)


@pytest.mark.parametrize("file", ["rank-0.bin", "profile.json"])
def test_the_last_good_checkpoint_is_taken(copy, file):
    path = folder_of_step(copy) / file
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    trainer, _ = trainer_of(copy)
    fit(trainer, 4)
    assert any("step-4" in notice and "trying an older checkpoint" in notice for notice in trainer.notices)
    assert any("step-3: 3 steps of 4" in notice for notice in trainer.notices)
    read_all(folder_of_step(copy, 4))  # saved again
    for data in copy.glob("step-*/*.bin"):
        data.unlink()
    trainer, _ = trainer_of(copy)
    with pytest.raises(CheckpointError, match=r"none of its 2 checkpoints can be read\. .*is missing"):
        fit(trainer, 5)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("version", 2, "format 2 was written by another version of Spindle; this one reads format 1"),
        ("spindle", "plan", "not the state of a Spindle checkpoint"),
    ],
)
def test_another_format_is_refused_in_a_sentence(copy, field, value, problem):
    path = folder_of_step(copy) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(path.parent)


@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [
        ("amsgrad", -1, r"the optimizer's amsgrad is -1 in the saved state, and False in this script"),
        ("amsgrad", True, r"amsgrad is on in the saved state, which has no max_exp_avg_sq"),
        ("lr", "fast", r"the optimizer's lr is 'fast' in the saved state"),
        ("betas", {"tuple": [0.9]}, r"the optimizer's betas is \(0\.9,\) in the saved state"),
    ],
)
def test_settings_of_an_optimizer_that_cannot_be_are_refused(copy, setting, value, problem):
    path = folder_of_step(copy) / "state.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    for group in body["groups"]:
        assert setting in group["settings"]
        group["settings"][setting] = value
    text = json.dumps(body)
    digest = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(f'{text[:-1]},"sha256":"{digest}"}}\n')
    with pytest.raises(CheckpointError, match=problem):
        fit(trainer_of(copy)[0], 5)


class Planted:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_no_file_is_unpickled(copy, tmp_path):
    mark = tmp_path / "mark"
    newest = folder_of_step(copy)
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        path.write_bytes(pickle.dumps(Planted(mark)) + b"\0" * max(0, len(content) - 200))
        with pytest.raises(CheckpointError):
            read_all(newest)
        path.write_bytes(content)
    trainer, _ = trainer_of(copy)
    fit(trainer, 5)
    assert not mark.exists()


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_training(tmp_path, capsys):
    (tmp_path / "step-2.part").write_text("a file where a folder should be")
    trainer, _ = trainer_of(tmp_path)
    assert len(fit(trainer, 3).losses) == 3
    assert any("the checkpoint of step 2 could not be written" in notice for notice in trainer.notices)
    assert capsys.readouterr().err.startswith("warning: the checkpoint of step 2 could not be written")  # no progress
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-2.part", "step-3"]


def test_what_an_earlier_run_left_unfinished_is_removed(copy):
    (copy / "step-5.part").mkdir()
    (copy / "step-5.part" / "rank-0.bin").write_bytes(b"half")
    (copy / "step-1.removed").mkdir()
    trainer, _ = trainer_of(copy, keep=1)
    fit(trainer, 6)
    assert [path.name for path in copy.glob("step-*")] == ["step-6"]


def test_settings_that_json_does_not_have_are_refused_by_name(tmp_path):
    def with_function(named):
        optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
        optimizer.param_groups[0]["rule"] = stacked
        return optimizer

    tower = spindle.module("tower", nn.Linear(8, 8).double())

    @spindle.task(batch_size=4)
    def pull(batch):
        return tower(batch["x"]).square().mean()

    trainer = spindle.Trainer(
        [pull],
        optimizer=with_function,
        planning=spindle.Planning(profile=guessed_profile),
        checkpoints=spindle.Checkpoints(tmp_path),
    )
    with pytest.raises(TrainingError, match=r"the optimizer's setting 'rule' of parameter 'tower\.weight'"):
        fit(trainer, 1, ["pull"])


# The command line.


def test_the_command_line_lists_checks_and_exports(saved, copy, tmp_path, capsys):
    assert run_cli(["checkpoints", str(copy), "--check"]) == 0
    assert capsys.readouterr().out.count("complete") == 2
    target = tmp_path / "model.safetensors"
    assert run_cli(["export", str(copy), "-o", str(target)]) == 0
    weights = pytest.importorskip("safetensors.torch").load_file(target)
    assert same(weights, saved[1])
    _, modules = trainer_of(None)
    nn.ModuleDict({name: modules[name] for name in "ab"}).load_state_dict(weights)
    (path,) = folder_of_step(copy, 3).glob("*.bin")
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    assert run_cli(["checkpoints", str(copy)]) == 0
    capsys.readouterr()
    assert run_cli(["checkpoints", str(copy), "--check", "--json"]) == 1
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["complete"]) for row in listed] == [(3, False), (4, True)]
    assert run_cli(["export", str(copy), "--step", "3", "-o", str(target)]) == 2
    assert run_cli(["checkpoints", str(tmp_path / "none")]) == 2


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_newest_checkpoint_may_be_in_memory(tmp_path, monkeypatch):
    """A launcher that may start ranks again has a folder for them; here it is an ordinary one."""
    folder, memory = tmp_path / "runs", tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("SPINDLE_MEMORY", str(memory))
    whole = run(0, 1, Run(steps=7))
    run(0, 1, Run(steps=6, folder=str(folder), every=None, memory_every=5))
    assert [path.name for path in memory.glob("*/step-*")] == ["step-5"]
    shutil.rmtree(folder / "step-6")  # as if the job had been killed before
    resumed = run(0, 1, Run(steps=7, folder=str(folder), every=None, memory_every=5))
    assert any("step-5: 5 steps of 7" in notice for notice in resumed.notices)
    assert resumed.losses == whole.losses[5:]
    assert same(resumed.state, whole.state)


class Signalling(Waves):
    """Sends SIGTERM, if it is to, while a fit reads its first batch."""

    is_sending = False

    def __getitem__(self, number):
        if self.is_sending and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            self.is_sending = False
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(number)


def test_a_signal_right_after_resuming_from_memory_still_saves_on_disk(tmp_path, monkeypatch):
    folder, memory = tmp_path / "runs", tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("SPINDLE_MEMORY", str(memory))

    def start(steps, *, is_sending):
        trainer, _ = trainer_of(spindle.Checkpoints(folder, memory_every=5), ["pull"])
        dataset = Signalling()
        dataset.is_sending = is_sending
        trainer.fit({"pull": dataset}, steps=steps, progress=False)

    start(6, is_sending=False)
    shutil.rmtree(folder / "step-6")  # as if the job had been killed before
    with pytest.raises(SystemExit):
        start(7, is_sending=True)
    assert [path.name for path in folder.glob("step-*")] == ["step-5"]


def test_counts_and_scales_are_those_of_the_ranks_that_updated_most(copy):
    state = replace(open_checkpoint(folder_of_step(copy, 4)).state, step=9, num_ranks=3, num_updates=0)
    extras = [{"num_updates": 0, "loss_scale": 1}, {"num_updates": 9, "loss_scale": 2, "lr_scheduler": 3}]
    for rank, extra in enumerate([*extras, extras[0]]):
        write_part(partial_folder(copy, 9), rank, memoryview(b""), [], {"extra": extra})
    saved = open_checkpoint(finish(copy, state, {})).state
    assert (saved.num_updates, saved.extra) == (9, {"loss_scale": 2, "lr_scheduler": 3})


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_of_another_shape_is_refused_unless_it_is_a_cache(tmp_path, persistent):
    def start(size, steps):
        torch.manual_seed(0)
        module = nn.Linear(8, 8).double()
        module.register_buffer("cache", torch.zeros(size), persistent=persistent)
        handle = spindle.module("linear", module)

        @spindle.task(batch_size=4)
        def pull(batch):
            return handle(batch["x"]).square().mean()

        trainer = spindle.Trainer(
            [pull],
            optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.01),
            planning=spindle.Planning(profile=guessed_profile),
            checkpoints=spindle.Checkpoints(tmp_path),
        )
        return fit(trainer, steps, ["pull"])

    start(3, 1)
    if persistent:
        with pytest.raises(CheckpointError, match=r"buffer 'linear.cache' was saved with the shape \[3\]"):
            start(4, 2)
    else:
        assert not any("could not be written" in notice for notice in start(4, 2).notices)


def test_with_memory_every_1_each_step_begins_with_its_state_saved_however_slow_the_disk_is(tmp_path, monkeypatch):
    folder, memory, disk_is_done, in_memory = tmp_path / "runs", tmp_path / "memory", threading.Event(), []
    memory.mkdir()
    monkeypatch.setenv("SPINDLE_MEMORY", str(memory))
    finish_at_once = saving.finish

    def slow_finish(target, *arguments):
        assert target != folder or disk_is_done.wait(60)
        return finish_at_once(target, *arguments)

    monkeypatch.setattr(saving, "finish", slow_finish)

    class Watching(torch.optim.SGD):
        def step(self, closure=None):
            in_memory.append([path.name for path in memory.glob("*/step-*")])
            if len(in_memory) == 6:
                disk_is_done.set()
            return super().step(closure)

    tower = spindle.module("tower", nn.Linear(8, 8).double())

    @spindle.task(batch_size=4)
    def pull(batch):
        return tower(batch["x"]).square().mean()

    trainer = spindle.Trainer(
        [pull],
        optimizer=lambda named: Watching([parameter for _, parameter in named], lr=0.1),
        planning=spindle.Planning(profile=guessed_profile),
        checkpoints=spindle.Checkpoints(folder, every=2, memory_every=1),
    )
    fit(trainer, 6, ["pull"])
    assert in_memory == [[], *([f"step-{step}"] for step in range(1, 6))]
    assert [path.name for path in folder.glob("step-*.part")] == []
    assert (folder / "step-6").exists()


# Attempts.


def test_an_attempt_that_comes_back_after_a_newer_one_began_commits_nothing(tmp_path, monkeypatch):
    """As on a node that was cut off: it stops in the middle of a step, and goes on once a newer attempt is done."""
    monkeypatch.setenv("SPINDLE_ATTEMPT", "1")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            trainer, _ = trainer_of(tmp_path)
            fit(trainer, 40, on_step=lambda step, _: os.kill(os.getpid(), signal.SIGSTOP) if step == 4 else None)
        except SupersededError as error:
            code = 7 if "attempt 2 of this job saves" in str(error) else 1
        finally:
            os._exit(code)
    try:
        assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
        monkeypatch.setenv("SPINDLE_ATTEMPT", "2")
        trainer, _ = trainer_of(tmp_path)
        fit(trainer, 9)
        expected = {path: path.read_bytes() for path in tmp_path.rglob("step-*/*")}
    finally:
        os.kill(child, signal.SIGCONT)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert {path: path.read_bytes() for path in tmp_path.rglob("step-*/*")} == expected
    assert [path.name for path in tmp_path.glob("*.part*")] == []


def test_older_attempts_are_refused_and_starts_without_a_number_go_on_with_the_newest(copy, monkeypatch):
    monkeypatch.setenv("SPINDLE_ATTEMPT", "8")
    fit(trainer_of(copy)[0], 5)
    monkeypatch.setenv("SPINDLE_ATTEMPT", "7")
    with pytest.raises(
        CheckpointError, match="attempt 8 of this job saves its checkpoints there, so this one, attempt 7"
    ):
        fit(trainer_of(copy)[0], 6)
    monkeypatch.delenv("SPINDLE_ATTEMPT")
    assert len(fit(trainer_of(copy)[0], 6).losses) == 1
    assert newest_attempt(copy) == 8
    for text in ("0", "-1", "1.5", "x", "9" * 400, "²"):
        monkeypatch.setenv("SPINDLE_ATTEMPT", text)
        with pytest.raises(CheckpointError, match="expected a whole number from 1 in SPINDLE_ATTEMPT"):
            fit(trainer_of(copy)[0], 7)


def test_attempts_that_overlap_write_apart_and_only_the_newest_can_rename(copy):
    state = replace(open_checkpoint(folder_of_step(copy, 4)).state, step=9, num_ranks=1)

    def write(attempt):
        write_part(partial_folder(copy, 9, attempt), 0, memoryview(b""), [], {"extra": {"attempt": attempt}})

    assert claim(copy, {"SPINDLE_ATTEMPT": "1"}) == 1
    write(1)
    assert claim(copy, {"SPINDLE_ATTEMPT": "2"}) == 2
    write(2)
    with pytest.raises(SupersededError):
        finish(copy, state, {}, 1)
    assert open_checkpoint(finish(copy, state, {}, 2)).state.extra["attempt"] == 2


def test_what_an_older_attempt_has_checked_but_not_renamed_when_a_newer_one_begins_is_lost(copy, monkeypatch):
    state = replace(open_checkpoint(folder_of_step(copy, 4)).state, step=9, num_ranks=1)
    write_part(partial_folder(copy, 9, 1), 0, memoryview(b""), [], {})

    def check_then_newer_begins(folder, attempt):
        claim(folder, {"SPINDLE_ATTEMPT": "2"})
        remove_unfinished(folder)

    monkeypatch.setattr("spindle.checkpoint.files.check_newest", check_then_newer_begins)
    with pytest.raises(FileNotFoundError):
        finish(copy, state, {}, 1)
    assert sorted(path.name for path in copy.glob("step-*")) == ["step-3", "step-4"]


def test_a_part_that_cannot_be_written_in_memory_is_reported_and_leaves_nothing(tmp_path, monkeypatch):
    folder, memory = tmp_path / "runs", tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("SPINDLE_MEMORY", str(memory))
    write_whole_part, num_written = saving.write_part, 0

    def write_part_once(partial, *arguments):
        nonlocal num_written
        if folder not in partial.parents:
            num_written += 1
            if num_written == 2:
                raise OSError(28, "No space left on device")
        write_whole_part(partial, *arguments)

    monkeypatch.setattr(saving, "write_part", write_part_once)
    trainer, _ = trainer_of(spindle.Checkpoints(folder, memory_every=1), ["pull"])
    assert len(fit(trainer, 4, ["pull"]).losses) == 4
    assert [notice for notice in trainer.notices if "in memory could not be written" in notice]
    assert [path.name for path in memory.glob("*/*")] == ["step-4"]
