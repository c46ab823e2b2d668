"""The Trainer in one process: loaders, mistakes that are explained, and what it says."""

from __future__ import annotations

import dataclasses
import inspect
import io
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rich.console import Console  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import small as worlds  # noqa: E402
import spindle  # noqa: E402
import spindle.train.reporting as reporting  # noqa: E402
from internals import guessed_profile  # noqa: E402
from preloaded import run_spindle  # noqa: E402
from spindle.cluster import SmGroups  # noqa: E402
from spindle.errors import PlanError, SpindleError, TrainingError, WorkloadError  # noqa: E402
from spindle.graph import metagraph_of  # noqa: E402
from spindle.launch import variables  # noqa: E402
from spindle.launch.capture import WorkloadCapture, active_capture, capturing  # noqa: E402
from spindle.launch.failure import failure_of  # noqa: E402
from spindle.plan import write_plan  # noqa: E402
from spindle.planners import make_plan  # noqa: E402
from spindle.profile import SmTimes, write_profile  # noqa: E402
from spindle.program import lower  # noqa: E402
from spindle.report import loss_text, read_run, run_report, step_page_data  # noqa: E402
from spindle.train.progress import Progress  # noqa: E402
from spindle.train.result import result_without_steps  # noqa: E402
from spindle.workload import read_workload  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def sgd(named):
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


def small(batch_size=4, **named):
    """A module, and a task that pulls its output to zero."""
    torch.manual_seed(0)
    encoder = spindle.module("encoder", nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))

    @spindle.task(batch_size=batch_size, **named)
    def pull(batch):
        return (encoder(batch["x"]) ** 2).mean()

    return encoder, pull


def rows(*sizes, value=1.0):
    return [{"x": torch.full((size, 3), value + number)} for number, size in enumerate(sizes)]


def fit(task, loader, steps, optimizer=sgd, **named):
    trainer = spindle.Trainer([task], optimizer=optimizer)
    return trainer, trainer.fit({"pull": loader}, steps=steps, progress=False, **named)


class Noting(torch.utils.data.Dataset):
    """Eight samples, which notes whom it was asked for."""

    def __init__(self, seen, width) -> None:
        self.seen, self.width = seen, width

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number):
        self.seen.append(number)
        return {"x": torch.full((self.width,), float(number))}


def stacked(samples):
    """Samples as a batch, by code of the user's own: it is read whole, one batch after another."""
    return {"x": torch.stack([sample["x"] for sample in samples])}


# Loaders.


def seen_by(task_options, loader, steps, **named):
    """The first value and the rows of each batch that a step was trained on."""
    seen = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            if not isinstance(x, torch._subclasses.FakeTensor):
                seen.append((x[0, 0].item(), x.shape[0]))
            return x * self.weight

    watched = spindle.module("watched", Watched())

    @spindle.task(name="pull", **task_options)
    def pull(batch):
        return watched(batch["x"]).sum()

    _, result = fit(pull, loader, steps, **named)
    return seen[-steps:], result


def test_an_exhausted_loader_starts_its_next_epoch():
    seen, _ = seen_by({"batch_size": 4}, rows(4, 4), steps=5)
    assert [value for value, _ in seen] == [1.0, 2.0, 1.0, 2.0, 1.0]


def test_a_short_last_batch_is_dropped_with_a_notice():
    seen, result = seen_by({"batch_size": 4}, rows(4, 4, 3), steps=4)
    assert seen == [(1.0, 4), (2.0, 4), (1.0, 4), (2.0, 4)]
    (notice,) = result.notices
    assert notice.startswith("task 'pull': the last batch of its loader has 3 of 4 samples and is dropped")


def test_a_short_last_batch_is_used_when_asked_for():
    seen, _ = seen_by({"batch_size": 4}, rows(4, 4, 3), steps=4, drop_last=False)
    assert seen == [(1.0, 4), (2.0, 4), (3.0, 3), (1.0, 4)]


def test_trailing_sizes_may_change_from_step_to_step():
    encoder = spindle.module("encoder", nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))

    @spindle.task(batch_size=2)
    def pull(batch):
        return encoder(batch["x"]).mean()

    _, result = fit(pull, [{"x": torch.ones(2, length, 3)} for length in (5, 2, 7)], steps=6)
    assert len(result.losses) == 6


def test_a_generator_that_gives_just_enough_is_enough():
    _, task = small()
    fit(task, (batch for batch in rows(4, 4)), steps=2)


def test_a_generator_that_ends_too_soon_is_explained():
    _, task = small()
    with pytest.raises(TrainingError, match="task 'pull': its loader yields no batch; a generator cannot start again"):
        fit(task, (batch for batch in rows(4, 4)), steps=3)


def test_what_a_rank_computes_does_not_change_how_its_loader_shuffles():
    def orders(dropout):
        torch.manual_seed(3)
        module = spindle.module("encoder", nn.Sequential(nn.Linear(1, 1), nn.Dropout(dropout)))
        seen = []

        @spindle.task(batch_size=4, name="pull")
        def pull(batch):
            return module(batch["x"]).sum()

        fit(pull, DataLoader(Noting(seen, 1), batch_size=4, shuffle=True, collate_fn=stacked), steps=8)
        return seen

    assert orders(0.0) == orders(0.5)


def test_random_layers_repeat_under_one_seed_and_differ_from_step_to_step():
    def losses(seed):
        torch.manual_seed(0)
        module = spindle.module("encoder", nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))

        @spindle.task(batch_size=4, name="pull")
        def pull(batch):
            return module(batch["x"]).sum()

        trainer = spindle.Trainer(
            [pull], optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.0), seed=seed
        )
        result = trainer.fit({"pull": [{"x": torch.ones(4, 8)}]}, steps=3, progress=False)
        return [step["pull"] for step in result.losses]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)
    assert len(set(losses(1))) == 3


# Mistakes.


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (rows(5, 5), r"no tensor of its batch has 4 rows, its batch_size; got \['x'\] \(5, 3\)"),
        (rows(4, 5), r"its loader gave a batch of 5 samples, expected 4"),
        (
            DataLoader([{"x": torch.ones(3)}] * 6, 2),
            r"2 samples, expected 4, its batch_size\. Both count the samples of",
        ),
        (rows(4, 3, 4), r"its loader gave a batch of 3 samples, expected 4"),
        ([{"x": "words"}], r"no tensor of its batch has 4 rows, its batch_size; got no tensor at all"),
        ([], r"its loader yields no batch"),
    ],
)
def test_a_wrong_batch_is_explained(loader, message):
    _, task = small()
    with pytest.raises(SpindleError, match=message) as caught:
        fit(task, loader, steps=3)
    assert "task 'pull'" in str(caught.value)


def test_an_error_in_a_loader_names_the_task_and_stays_itself(monkeypatch):
    def loader():
        yield from rows(4)
        raise OSError("disk on fire")

    _, task = small()
    with pytest.raises(OSError, match="disk on fire") as caught:
        fit(task, loader(), steps=3)
    assert caught.value.__notes__ == ["in the loader of task 'pull'"]
    monkeypatch.delenv("SPINDLE_DEBUG", raising=False)
    text = failure_of(caught.value, rank=0).text
    assert 'raise OSError("disk on fire")' in text
    assert "src/spindle" not in text
    assert re.search(
        r"OSError: disk on fire\nin the loader of task 'pull'\n\(SPINDLE_DEBUG=1 also shows \d+ lines", text
    )
    monkeypatch.setenv("SPINDLE_DEBUG", "1")
    assert "src/spindle" in failure_of(caught.value, rank=0).text


@pytest.mark.parametrize(
    ("decorate", "hint"),
    [
        (lambda kind: kind, "let it return tensors, or tuples, lists and dicts of them"),
        (dataclasses.dataclass, r"write torch.export.register_dataclass\(Answer\) once, below the class"),
    ],
)
def test_a_module_that_gives_no_nest_of_tensors_is_refused(decorate, hint):
    @decorate
    class Answer:
        pass

    class Strange(nn.Module):
        def forward(self, x):
            return Answer()

    strange = spindle.module("strange", Strange())

    @spindle.task(batch_size=4, name="pull")
    def pull(batch):
        return strange(batch["x"])

    with pytest.raises(
        WorkloadError, match=rf"module 'strange' returns an object of class Answer, .* of tensors; {hint}"
    ):
        fit(pull, rows(4), steps=1)


def test_a_loss_that_is_no_number_is_refused():
    encoder, _ = small()

    @spindle.task(batch_size=4, name="pull")
    def pull(batch):
        return encoder(batch["x"])

    with pytest.raises(TrainingError, match=r"task 'pull': its loss must be one number .*, got \(4, 2\); average"):
        fit(pull, rows(4), steps=1)


def test_a_plan_for_more_devices_than_ranks_is_refused():
    _, task = small()
    trainer = spindle.Trainer([task], optimizer=sgd)
    trainer.fit({"pull": rows(4)}, steps=1, progress=False)
    from dataclasses import replace

    other = spindle.Trainer([task], optimizer=sgd, planning=spindle.Planning(plan=replace(trainer.plan, num_devices=4)))
    with pytest.raises(PlanError, match="the plan is for 4 devices, but 1 ranks were started; start 4"):
        other.fit({"pull": rows(4)}, steps=1, progress=False)


def test_a_plan_with_lanes_runs_on_a_cpu_with_one_notice(capsys):
    torch.manual_seed(0)
    towers = {name: spindle.module(name, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))) for name in ("left", "right")}

    @spindle.task(batch_size=4)
    def left(batch):
        return (towers["left"](batch["x"]) ** 2).mean()

    @spindle.task(batch_size=4)
    def right(batch):
        return (towers["right"](batch["x"]) ** 2).mean()

    before = {name: [parameter.clone() for parameter in tower.module.parameters()] for name, tower in towers.items()}
    trained = []
    for lane in (0, 1):
        for name, tower in towers.items():
            for parameter, value in zip(tower.module.parameters(), before[name], strict=True):
                parameter.data.copy_(value)
        plan = f"left/left#0[0:2]*2@0 right/right#0[0:2]*2@0|{lane}\nleft/loss[0:1]*1@0\nright/loss[0:1]*1@0|{lane}"
        plan = plan if lane else plan.replace(" ", "\n")
        trainer = spindle.Trainer([left, right], optimizer=sgd, planning=spindle.Planning(plan=plan))
        trainer.fit({name: rows(4, 4) for name in towers}, steps=2)
        trained.append([parameter.clone() for tower in towers.values() for parameter in tower.module.parameters()])
        notices = capsys.readouterr().err
        text = "this plan has 2 lanes; on CPUs they run one after another, in the order of the plan"
        assert " ".join(notices.split()).count(text) == lane
    assert all(torch.equal(*pair) for pair in zip(*trained, strict=True))


def test_quotas_are_refused_where_there_are_no_sms(capsys):
    _, task = small()
    text = "# quotas 64 64\npull/encoder#0[0:1]*1@0\npull/encoder#0[1:2]*1@0\npull/loss[0:1]*1@0|1"
    with pytest.raises(PlanError, match=r"does not say how the SMs of .* can be split; measure with Planning\(quotas"):
        spindle.Trainer([task], optimizer=sgd, planning=spindle.Planning(plan=text)).fit(
            {"pull": rows(4)}, steps=1, progress=False
        )
    with pytest.raises(TrainingError, match=r"quotas=\(64, 64\)\): expected True or False.* part of a plan"):
        spindle.Planning(quotas=(64, 64))

    def with_sms(graph, num_devices):
        profile = guessed_profile(graph, num_devices)
        (island,) = profile.cluster.islands
        kind = dataclasses.replace(island.kind, sm_groups=SmGroups(group_sms=8, num_groups=16))
        sm_times = SmTimes(num_sms=(8, 128), forward=(2.0, 1.0), backward=(2.0, 1.0))
        curves = ((dataclasses.replace(curve, sm_times=sm_times) for curve in choices) for choices in profile.curves)
        cluster = dataclasses.replace(profile.cluster, islands=(dataclasses.replace(island, kind=kind),))
        return dataclasses.replace(profile, curves=tuple(map(tuple, curves)), cluster=cluster)

    with pytest.raises(PlanError, match=r"quotas of 64 and 64 SMs, .* and CPUs have no SMs; leave its quotas out"):
        spindle.Trainer([task], optimizer=sgd, planning=spindle.Planning(plan=text, profile=with_sms)).fit(
            {"pull": rows(4)}, steps=1, progress=False
        )
    trainer = spindle.Trainer([task], optimizer=sgd, planning=spindle.Planning(quotas=True))
    capsys.readouterr()
    trainer.fit({"pull": rows(4)}, steps=1)
    assert trainer.plan.quotas == ()
    assert "has no effect here: quotas of SMs are for one process with a GPU, and CPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda named: torch.optim.LBFGS([p for _, p in named]), "LBFGS updates all parameters together"),
        (lambda named: torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1), "that were not given to it"),
        (lambda named: None, "must return a torch optimizer, got NoneType"),
        (
            torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1),
            "expected optimizer=, a function .* got SGD; each",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_split_is_refused(optimizer, message):
    _, task = small()
    with pytest.raises(TrainingError, match=message):
        fit(task, rows(4), steps=1, optimizer=optimizer)


def test_parameters_that_the_optimizer_leaves_out_are_named():
    _, task = small()
    trainer = spindle.Trainer([task], optimizer=lambda named: sgd(named[:1]))
    trainer.fit({"pull": rows(4)}, steps=1, progress=False)
    shown = "leaves out 3 parameters that require gradients (encoder.0.bias, encoder.1.weight, encoder.1.bias): they"
    assert any(shown in notice for notice in trainer.notices)
    trainer = spindle.Trainer([task], optimizer=sgd)
    trainer.fit({"pull": rows(4)}, steps=1, progress=False)
    assert not any("leaves out" in notice for notice in trainer.notices)


def test_two_parameters_with_one_name_are_refused():
    first = spindle.module("tower", nn.Sequential(nn.Linear(8, 4)))
    second = spindle.module("tower.0", nn.Linear(8, 4))

    @spindle.task(batch_size=4)
    def both(batch):
        return (first(batch["x"]) * second(batch["x"])).mean()

    with pytest.raises(WorkloadError, match=r"two parameters are called 'tower\.0\.weight'"):
        spindle.Trainer([both], optimizer=sgd).fit({"both": [{"x": torch.ones(4, 8)}]}, steps=1, progress=False)


def test_what_a_trainer_cannot_use_is_refused_before_anything_runs():
    _, task = small()
    with pytest.raises(TrainingError, match=r"expected a list of tasks"):
        spindle.Trainer(task, optimizer=sgd)
    with pytest.raises(TrainingError, match=r"a function of the optimizer that returns a scheduler, got int"):
        spindle.Trainer([task], optimizer=sgd, lr_scheduler=3)
    with pytest.raises(TrainingError, match=r"fit\(steps=4\.0\): must be a whole number"):
        spindle.Trainer([task], optimizer=sgd).fit({"pull": rows(4)}, steps=4.0)


def test_tasks_and_loaders_must_match():
    _, task = small()
    trainer = spindle.Trainer([task], optimizer=sgd)
    with pytest.raises(TrainingError, match=r"none for 'pull'; 'push' is no task \(tasks: pull\)"):
        trainer.fit({"push": rows(4)}, steps=1, progress=False)
    with pytest.raises(WorkloadError, match="two tasks are called 'pull'"):
        spindle.Trainer([task, task], optimizer=sgd)
    with pytest.raises(WorkloadError, match=r"write @spindle\.task\(batch_size=\.\.\.\) above it"):
        spindle.Trainer([lambda batch: 0], optimizer=sgd)


def test_a_loss_that_is_not_a_number_stops_the_run():
    _, task = small()
    batches = [*rows(4, 4), {"x": torch.full((4, 3), float("nan"))}, *rows(4)]
    with pytest.raises(TrainingError, match="task 'pull': its loss is nan in step 2"):
        fit(task, batches, steps=4)


def test_an_error_in_a_layer_says_where_it_was():
    class Breaks(nn.Linear):
        def forward(self, x):
            if not isinstance(x, torch._subclasses.FakeTensor) and float(x[0, 0]) == 2.0:
                raise ArithmeticError("broken")
            return super().forward(x)

    encoder = spindle.module("encoder", nn.Sequential(Breaks(3, 3), nn.Linear(3, 2)))

    @spindle.task(batch_size=4, name="pull")
    def pull(batch):
        return encoder(batch["x"]).mean()

    with pytest.raises(ArithmeticError, match="broken") as caught:
        fit(pull, rows(4, 4), steps=3)
    assert caught.value.__notes__ == ["in step 1 on rank 0, forward of pull/encoder#0[0:1]"]


def test_an_error_on_the_first_batch_is_the_users_own():
    table = spindle.module("table", nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2)))

    @spindle.task(batch_size=2, name="pull")
    def pull(batch):
        return table(batch["t"]).mean()

    with pytest.raises(WorkloadError, match=r"calling module 'table'.*\nIndexError: index out of range"):
        fit(pull, [{"t": torch.tensor([1, 9])}], steps=1)


# Trials leave no traces, and what is the user's own stays so.


def compare_with_plain(make_module, batches, apply=lambda module, x: module(x)):
    """Losses of three steps under Spindle and in plain PyTorch."""

    def losses(spindles: bool):
        torch.manual_seed(0)
        user_module = make_module()
        handle = spindle.module("encoder", user_module) if spindles else user_module

        @spindle.task(batch_size=4, name="pull")
        def pull(batch):
            return (apply(handle, batch["x"]) ** 2).mean()

        if spindles:
            result = fit(pull, batches, steps=3)[1]
            return [step["pull"] for step in result.losses]
        optimizer, seen = sgd(user_module.named_parameters()), []
        for batch in batches:
            optimizer.zero_grad()
            loss = pull(batch)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    ours, theirs = losses(True), losses(False)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert theirs[0] != theirs[1]


class Cached(nn.Module):
    """Fills a cache in its first forward, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table, self.calls = nn.Linear(3, 3), None, 0

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(3.0)
        self.calls += 1
        return self.linear(x) * self.table / self.calls


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return -gradient


def test_what_a_module_keeps_on_itself_is_not_touched_by_trials():
    compare_with_plain(Cached, rows(4, 4, 4))


def test_a_custom_autograd_function_in_a_task_keeps_its_backward():
    compare_with_plain(
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)),
        rows(4, 4, 4),
        lambda module, x: Reversed.apply(module(x) + torch.ones(x.shape[0], 2)),
    )


def test_each_fit_shuffles_anew():
    seen = []

    _, task = small()
    trainer = spindle.Trainer([task], optimizer=sgd)
    loader = DataLoader(Noting(seen, 3), batch_size=4, shuffle=True, collate_fn=stacked)
    for _ in range(2):
        trainer.fit({"pull": loader}, steps=2, progress=False)
    assert sorted(seen[:8]) == sorted(seen[8:]) == list(range(8))
    assert seen[:8] != seen[8:]


# What it says and leaves behind.


def test_a_module_that_stays_whole_is_named_with_the_reason():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.other(self.one(x))

    single = spindle.module("single", Both())

    @spindle.task(batch_size=4, name="pull")
    def pull(batch):
        return single(batch["x"]).mean()

    _, result = fit(pull, rows(4), steps=1)
    assert result.notices == ("module 'single' runs as one layer: it has no list of two or more equal blocks",)


def test_losses_are_reported_as_they_become_known():
    reported = []
    _, task = small()
    _, result = fit(task, rows(4), steps=4, on_step=lambda step, losses: reported.append((step, losses["pull"])))
    assert reported == [(step, losses["pull"]) for step, losses in enumerate(result.losses)]


def test_a_result_prints_losses_and_predicted_beside_measured(capsys, tmp_path):
    _, task = small()
    _, result = fit(task, rows(4), steps=6)
    result.print()
    shown = capsys.readouterr().out
    for text in ("Losses over 6 steps", "pull", "predicted", "of the last 5 steps", "samples/s", "print(full=True)"):
        assert text in shown
    assert len(shown.splitlines()) <= 25
    result.print(full=True)
    shown = capsys.readouterr().out
    for text in ("Losses over 6 steps", "pull", "predicted", "measured", "encoder", "Waves"):
        assert text in shown
    result.write_trace(tmp_path / "trace.json")
    assert "pull/encoder" in (tmp_path / "trace.json").read_text()


def test_a_run_folder_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "run").touch()
    trainer = spindle.Trainer([small()[1]], optimizer=sgd, run_folder=tmp_path / "run" / "a")
    with pytest.raises(TrainingError, match=r"run_folder='.*/run/a'\): cannot be written \(Not a directory\)"):
        trainer.fit({}, steps=1)


def test_a_run_folder_holds_what_a_report_shows(tmp_path):
    _, task = small()
    trainer = spindle.Trainer([task], optimizer=sgd, run_folder=tmp_path / "run", profiler_steps=[1])
    result = trainer.fit({"pull": rows(4)}, steps=6, progress=False)
    made = read_run(tmp_path / "run")
    assert [line["step"] for line in made.steps if "loss" in line] == list(range(6))
    assert [line["loss"] for line in made.steps if "loss" in line] == [losses["pull"] for losses in result.losses]
    assert made.program.instructions == result.program.instructions
    assert made.predicted.makespan_ns == result.predicted.makespan_ns
    assert list(made.measured) == list(result.measured_steps)
    assert made.measured
    for timeline in made.measured.values():
        weights = sum(weight.nbytes for weight in trainer.state_dict().values())
        assert weights <= timeline.static_bytes[0] <= made.predicted.static_bytes[0]
        assert timeline.static_bytes[0] < timeline.peak_bytes()[0] <= made.predicted.peak_bytes()[0]
    assert made.profiler_traces == ("profiler/step-1-rank-0.json.gz",)
    assert step_page_data(run_report({"run": made})) == step_page_data(run_report({"run": read_run(tmp_path / "run")}))
    # Another training in the same folder leaves nothing of the first.
    trainer = spindle.Trainer([small()[1]], optimizer=sgd, run_folder=tmp_path / "run")
    trainer.fit({"pull": rows(4)}, steps=2, progress=False)
    assert len([line for line in read_run(tmp_path / "run").steps if "loss" in line]) == 2
    assert read_run(tmp_path / "run").profiler_traces == ()
    with pytest.raises(TrainingError, match="requires run_folder"):
        spindle.Trainer([task], optimizer=sgd, profiler_steps=[1])


def test_results_plans_and_profiles_are_short_in_a_notebook():
    _, task = small()
    trainer, result = fit(task, rows(4), steps=2)
    assert re.fullmatch(r"FitResult\(2 steps of .*s on 1 rank, planner 'wavefront'; pull [0-9.]+\)", repr(result))
    for value in (result, trainer.plan, trainer.profile):
        assert len(repr(value)) < 200
        assert value._repr_html_().startswith("<pre>")


def test_losses_of_any_size_can_be_told_apart():
    assert [loss_text(loss) for loss in (12.3456, 0.5, 0.00012345, 0.0)] == ["12.346", "0.500", "0.0001234", "0.000"]


def test_importing_spindle_needs_no_torch():
    code = "import sys, spindle, spindle.planners; assert 'torch' not in sys.modules; spindle.Trainer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_example_trains_on_two_processes():
    script = ROOT / "examples" / "four_tasks.py"
    done = run_spindle("launch", "-n", "2", str(script), "--steps", "4", environment={"COLUMNS": "100"})
    assert done.returncode == 0, done.stderr
    for text in ("image_text", "captioning", "predicted", "samples/s", "speedup"):
        assert text in done.stdout


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_losses_are_all_reported_in_order_however_late_they_arrive(monkeypatch, steps):
    """On a GPU they travel later than here."""

    def losses(behind):
        monkeypatch.setitem(reporting.LOSSES_BEHIND, "cpu", behind)
        reported = []
        _, pull = small()
        _, result = fit(pull, rows(4, 4, 4), steps, on_step=lambda step, losses: reported.append((step, losses)))
        assert reported == list(enumerate(result.losses))
        return result.losses

    assert losses(1) == losses(2)
    assert len(losses(2)) == steps


def test_another_plan_continues_from_the_weights_of_the_last():
    _, pull = small()
    trainer = spindle.Trainer([pull], optimizer=sgd)
    profile = trainer.prepare({"pull": rows(4)}, progress=False)
    assert trainer.profile is profile
    assert trainer.plan is None
    first = trainer.fit({"pull": rows(4)}, steps=2, progress=False)
    trainer.replan(planner="sequential")
    assert trainer.plan is None
    second = trainer.fit({"pull": rows(4)}, steps=2, progress=False)
    assert second.plan.planner == "sequential"
    assert trainer.profile is profile
    _, again = small()
    _, whole = fit(again, rows(4), 4)
    assert [*first.losses, *second.losses] == list(whole.losses)


@pytest.mark.parametrize("handed", ["wavefront", "sequential"])
def test_a_schedulers_plan_is_run_only_if_it_is_by_the_planner_of_the_script(handed, monkeypatch, tmp_path):
    """A plan of a cell was made from the workload that the script wrote, by another process."""
    with capturing(WorkloadCapture(output=tmp_path / "workload.json")):
        spindle.Trainer([small()[1]], optimizer=sgd).fit({"pull": rows(4)}, steps=1, progress=False)
    profile = guessed_profile(metagraph_of(read_workload(tmp_path / "workload.json")), 1)
    plan = dataclasses.replace(make_plan(profile, handed), settings="by a scheduler")
    write_plan(tmp_path / "plan.json", plan)
    write_profile(tmp_path / "profile.json", profile)
    monkeypatch.setenv(variables.PLAN, str(tmp_path / "plan.json"))
    monkeypatch.setenv(variables.PLAN_PROFILE, str(tmp_path / "profile.json"))

    def is_run(*, replan=None, **planning):
        trainer = spindle.Trainer([small()[1]], optimizer=sgd, planning=spindle.Planning(**planning))
        if replan is not None:
            trainer.replan(planner=replan)
        result = trainer.fit({"pull": rows(4)}, steps=1, progress=False)
        assert result.plan.planner == (replan or planning.get("planner", "wavefront"))
        return result.plan.settings == "by a scheduler"

    assert is_run() == (handed == "wavefront")
    assert is_run(planner="sequential") == (handed == "sequential")
    assert not is_run(planner="pipeline")
    assert not is_run(replan="paper")
    assert not is_run(planner="sequential", profile=guessed_profile)
    assert not is_run(planner=handed, memory_limit_bytes=1 << 30)


def test_another_plan_continues_with_the_optimizer_unless_it_is_to_start_anew():
    def losses(**options):
        _, pull = small()
        trainer = spindle.Trainer(
            [pull], optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9)
        )
        first = trainer.fit({"pull": rows(4)}, steps=3, progress=False)
        if options:
            trainer.replan(**options)
        return [*first.losses, *trainer.fit({"pull": rows(4)}, steps=2, progress=False).losses]

    assert losses() == losses(planner="sequential") != losses(planner="sequential", keep_optimizer=False)


# The public interface.


def test_everything_that_can_be_imported_is_described():
    text = (ROOT / "docs" / "interface.md").read_text(encoding="utf-8")
    for name in set(spindle.__all__) - {"__version__"}:
        assert f"`spindle.{name}" in text or f"`@spindle.{name}" in text, name
        assert getattr(spindle, name).__doc__, name
    for function in (spindle.module, spindle.task, spindle.Planning, spindle.Trainer):
        for argument in list(inspect.signature(function).parameters)[function is spindle.module :]:
            assert f"| `{argument}` |" in text or argument == "nn_module", (function, argument)
    methods = {name for name, _ in inspect.getmembers(spindle.Trainer) if not name.startswith("_")}
    assert all(re.search(rf"`{name}\b", text) for name in methods), methods


def test_options_of_a_trainer_are_frozen():
    degrees = {"language": 2}
    planning = spindle.Planning(tensor_parallel_degrees=degrees)
    degrees["language"] = 4
    assert planning.tensor_parallel_degrees == {"language": 2}
    with pytest.raises(dataclasses.FrozenInstanceError):
        planning.planner = "sequential"
    with pytest.raises(TrainingError, match=r"expected spindle.Planning\(...\)"):
        spindle.Trainer([small()[1]], optimizer=sgd, planning="sequential")


def test_a_planner_may_be_a_function():
    asked = []

    def planner(profile):
        asked.append(profile)
        return make_plan(profile, "sequential")

    _, pull = small()
    planning = spindle.Planning(planner=planner, profile=guessed_profile)
    trainer = spindle.Trainer([pull], optimizer=sgd, planning=planning)
    result = trainer.fit({"pull": rows(4)}, steps=2, progress=False)
    assert result.plan.planner == "sequential"
    assert [profile.graph for profile in asked] == [trainer.profile.graph]


def test_variables_of_the_environment_do_not_keep_a_script_from_training(monkeypatch, tmp_path):
    monkeypatch.setenv("SPINDLE_WORKLOAD", str(tmp_path / "workload.json"))
    monkeypatch.setenv("SPINDLE_PROFILE", str(tmp_path / "profile.json"))
    _, pull = small()
    trainer, result = fit(pull, rows(4), 2)
    assert len(result.losses) == 2
    assert math.isfinite(trainer.evaluate({"pull": rows(4)})["pull"])
    assert not list(tmp_path.iterdir())


def test_a_capture_takes_the_workload_and_ends_the_script(tmp_path):
    _, pull = small()
    reached = []
    with capturing(WorkloadCapture(output=tmp_path / "workload.json")):
        trainer = spindle.Trainer([pull], optimizer=sgd)
        reached.append(trainer.evaluate({"pull": rows(4)}))  # modules have no weights in such a run
        try:
            trainer.fit({"pull": rows(4)}, steps=2, progress=False)
        except Exception:
            reached.append("an exception that a script could catch")
        finally:
            reached.append("finally")
        reached.append("trained")
    assert math.isnan(reached[0]["pull"])
    assert reached[1:] == ["finally"]
    assert [task.name for task in read_workload(tmp_path / "workload.json").tasks] == ["pull"]
    assert active_capture() is None


def test_a_planner_that_does_not_exist_is_refused_before_anything_is_measured():
    with pytest.raises(TrainingError, match=r"planner='wavefrnt'\): no planner has that name; there are wavefront, "):
        spindle.Planning(planner="wavefrnt")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_number_of_the_step_is_shown_whatever_losses_there_are(width):
    shown = io.StringIO()
    progress = Progress(True)
    progress._console = Console(file=shown, force_terminal=True, width=width, color_system=None)
    progress.training(1200)
    progress.losses({f"a task with a long name {number}": 0.5 for number in range(6)})
    progress.step(1170, 0.1, samples=64, idle=0.5)
    progress.close()
    lines = re.split(r"[\r\n]|\x1b\[2K", shown.getvalue())
    (line, *_) = [line for line in lines if "1170" in line]
    assert line.startswith("step 1170/1200 ")
    assert len(line) <= width


def test_a_predicted_speedup_is_doubted_if_the_step_took_much_longer_than_predicted(capsys):
    profile = worlds.workload_profile({"a": ["vision", "lm"], "b": ["text", "lm"]}, num_devices=4)
    program = lower(make_plan(profile, "paper"), profile)
    result = result_without_steps(0, program.plan, profile, ())
    for factor, is_doubted in ((1, False), (5, True)):
        predicted = result.predicted
        measured = dataclasses.replace(predicted, start=factor * predicted.start, end=factor * predicted.end)
        steps = {"losses": ({"a": 1.0},), "step_s": (measured.makespan_s,), "num_samples": (1,)}
        dataclasses.replace(result, measured=measured, **steps).print()
        text = " ".join(capsys.readouterr().out.split())
        assert "as fast as one module at a time, predicted" in text
        assert ("do not rely on it: the step took 5 x as long as predicted" in text) == is_doubted
