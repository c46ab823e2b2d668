"""Callbacks and writers: what they are told, on which ranks, and what they cost."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import tempfile
import time
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import numpy  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import spindle  # noqa: E402
from backends import on_gpu, rank_device  # noqa: E402
from internals import guessed_profile  # noqa: E402
from spindle.cluster import cluster_named  # noqa: E402
from spindle.errors import TrainingError  # noqa: E402
from spindle.fleet import Cell, Fleet  # noqa: E402
from spindle.fleet.estimates import bound_estimate, planned_estimate, workload_step  # noqa: E402
from spindle.graph import metagraph_of  # noqa: E402
from spindle.launch import variables  # noqa: E402
from spindle.profile import roofline_profile  # noqa: E402
from spindle.report import read_run, run_report, step_page_data  # noqa: E402
from spindle.run import HostCopy  # noqa: E402
from spindle.train import reporting  # noqa: E402
from spindle.train.utilization import flops_per_sample, peak_flops  # noqa: E402
from spindle.workload import read_workload  # noqa: E402
from training_cases import normal_batch, pairs_and_answers, two_towers  # noqa: E402
from trainings import train_plainly  # noqa: E402


class Recording(spindle.Callback):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.plans: list[Any] = []
        self.steps: list[spindle.StepRecord] = []
        self.evaluations: list[spindle.EvaluationRecord] = []
        self.results: list[Any] = []

    def on_plan(self, plan):
        self.plans.append(plan)

    def on_step(self, record):
        self.steps.append(record)

    def on_evaluate(self, record):
        self.evaluations.append(record)

    def on_end(self, result):
        self.results.append(result)


class OnRank0(Recording):
    rank_0_only = True

    def on_step(self, record):
        super().on_step(record)
        if record.step == 2:
            with pytest.raises(TrainingError, match="evaluate: all ranks must call it, but the callback OnRank0 runs"):
                self.trainer.evaluate({})


class Evaluating(spindle.Callback):
    """Calls what all ranks must call, and ends the fit."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def on_step(self, record):
        if record.step == 1:
            self.state = self.trainer.state_dict()
            self.losses = self.trainer.evaluate(self.batches)
        if record.step == 3:
            self.trainer.stop()


def in_groups(named):
    """Two groups with learning rates of their own; a rank may hold parameters of one of them alone."""
    named = list(named)
    vision = [parameter for name, parameter in named if name.startswith("vision")]
    rest = [parameter for name, parameter in named if not name.startswith("vision")]
    groups = [{"params": vision, "lr": 0.02, "name": "vision"}, {"params": rest, "lr": 0.05}]
    return torch.optim.SGD([group for group in groups if group["params"]])


def halved(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def estimated_step_s(report: Path, num_ranks: int) -> float:
    """What a fleet estimates for a step of a job that reports this workload."""
    workload = read_workload(report)
    profile = guessed_profile(metagraph_of(workload), num_ranks)
    kind, machines = profile.cluster.kind.name, Fleet(cluster=profile.cluster)
    step_on = workload_step(workload, measured={kind: profile})
    bound = bound_estimate(step_on, machines, Cell(kind=kind, num_devices=num_ranks))
    estimate = planned_estimate(step_on, machines, bound)
    assert bound.step_s <= estimate.step_s
    return estimate.step_s


def record_steps(rank: int, num_ranks: int, planning: dict[str, Any], **options: Any) -> Any:
    """What callbacks are told of a fit, and the gradient norms and losses of a plain loop."""
    modules = two_towers()
    references = {name: deepcopy(module).to(rank_device()) for name, module in modules.items()}
    tasks = pairs_and_answers()({name: spindle.module(name, module) for name, module in modules.items()})
    batches = {task.name: [normal_batch(task.name, number) for number in range(20)] for task in tasks}
    recording, on_rank_0, evaluating = Recording(), OnRank0(), Evaluating(batches)
    seen = []
    trainer = spindle.Trainer(
        tasks,
        optimizer=in_groups,
        lr_scheduler=halved,
        planning=spindle.Planning(profile=guessed_profile, **planning),
        callbacks=[recording, on_rank_0, evaluating],
        **options,
    )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "workload.json"
        with mock.patch.dict(os.environ, {variables.WORKLOAD_REPORT: str(report)}):
            result = trainer.fit(
                batches, steps=15, progress=False, on_step=lambda step, losses: seen.append((step, losses))
            )
        if rank == 0 and "shard_optimizer" not in planning:
            assert recording.steps[-1].predicted_s == pytest.approx(estimated_step_s(report, num_ranks), rel=0.02)
    assert [(record.step, record.losses) for record in recording.steps] == seen == list(enumerate(result.losses))
    assert [record.step_s for record in recording.steps] == pytest.approx(result.step_s, rel=1e-9)
    assert recording.results == [result]
    assert recording.plans[0].planner == trainer.plan.planner
    if planning.get("planner") is None and options.get("gradient_accumulation_steps") == 2:
        # of two micro-steps and one update
        assert 1 < recording.steps[0].predicted_s / result.predicted.makespan_s < 2
    assert recording.evaluations[0].losses == evaluating.losses
    assert evaluating.state.keys() == nn.ModuleDict(modules).state_dict().keys()
    if num_ranks > 1:
        assert len(on_rank_0.steps) == (len(result.losses) if rank == 0 else 0)
    norms = []

    def note_norm(optimizer: Any, *_: Any) -> None:
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        norms.append(float(nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])))

    optimizer = in_groups(nn.ModuleDict(references).named_parameters())
    optimizer.register_step_pre_hook(note_norm)
    count = options.get("gradient_accumulation_steps", 1)
    steps = [
        [{name: some[step * count + number] for name, some in batches.items()} for number in range(count)]
        for step in range(len(result.losses))
    ]
    plain_tasks = pairs_and_answers()(references)
    expected = train_plainly(plain_tasks, optimizer, steps, scheduler=halved)
    records = [dataclasses.replace(record, plan=None) for record in recording.steps]
    return records, norms, expected


@pytest.mark.parametrize(
    ("num_ranks", "planning", "options"),
    [
        (1, {}, {}),
        (3, {}, {"max_grad_norm": 1e6, "gradient_accumulation_steps": 2}),  # which clips nothing
        (2, {"shard_optimizer": True}, {"gradient_accumulation_steps": 2}),
        (2, {"planner": "pipeline"}, {"gradient_accumulation_steps": 2}),
    ],
)
def test_step_records_are_those_of_one_process_on_all_ranks(pool, num_ranks, planning, options):
    answers = pool.run(num_ranks, record_steps, planning, **options)
    records, norms, expected = answers[0]
    assert 4 <= len(records) <= 8  # the fit was stopped after the record of step 3
    for number, record in enumerate(records):
        assert record.step == number
        assert record.losses == pytest.approx(expected[number], rel=1e-9)
        assert record.loss == pytest.approx(record.losses["pair"] + 0.5 * record.losses["answer"])
        assert record.grad_norm == pytest.approx(norms[number], rel=1e-9)
        factor = 0.5 ** (number // 2)
        assert record.learning_rates == pytest.approx({"vision": 0.02 * factor, "1": 0.05 * factor})
        num_samples = 12 * options.get("gradient_accumulation_steps", 1)
        assert record.samples_per_s == pytest.approx(num_samples / record.step_s)
        assert record.predicted_s > 0
        assert record.tokens_per_s is None
        assert on_gpu() or record.mfu is record.peak_bytes is None
    assert any(record.idle is not None for record in records) or len(records) < 6
    for other_records, _, _ in answers[1:]:
        assert other_records == records


def train_in_folder(rank: int, num_ranks: int, folder: str, planning: dict[str, Any], **options: Any) -> list[int]:
    """A fit that writes a run folder; returns the steps that it has measured."""
    tasks = pairs_and_answers()({name: spindle.module(name, module) for name, module in two_towers().items()})
    batches = {task.name: [normal_batch(task.name, number) for number in range(8)] for task in tasks}
    planning = spindle.Planning(profile=guessed_profile, **planning)
    trainer = spindle.Trainer(tasks, optimizer=in_groups, planning=planning, run_folder=folder, **options)
    return list(trainer.fit(batches, steps=4, progress=False).measured_steps)


@pytest.mark.parametrize(
    ("planning", "options"),
    [({"shard_optimizer": True}, {}), ({"planner": "pipeline"}, {"gradient_accumulation_steps": 2})],
)
def test_a_run_folder_has_the_measured_steps_of_all_ranks(pool, tmp_path, planning, options):
    measured, *_ = pool.run(2, train_in_folder, str(tmp_path / "run"), planning, **options)
    run = read_run(tmp_path / "run")
    assert list(run.measured) == measured != []
    assert run.program.num_ranks == 2
    for timeline in run.measured.values():
        for rank in range(2):
            assert (timeline.end - timeline.start)[timeline.rank == rank].sum() > 0
        if not options:
            # Memory was read in a step of its own, on every rank.
            assert (timeline.peak_bytes() > timeline.static_bytes).all()
            assert (timeline.static_bytes > 0).all()
    assert [line["step"] for line in run.steps if "loss" in line] == [0, 1, 2, 3]
    assert step_page_data(run_report({"run": run}))


# In one process.


def small(**options):
    torch.manual_seed(0)
    encoder = spindle.module("encoder", nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))

    @spindle.task(batch_size=4, tokens=lambda batch: batch["x"].numel())
    def pull(batch):
        return encoder(batch["x"]).square().mean()

    def sgd(named):
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)

    planning = spindle.Planning(profile=guessed_profile)
    return spindle.Trainer([pull], optimizer=sgd, planning=planning, **options)


LOADERS = {"pull": [{"x": torch.full((4, 3), float(number))} for number in range(1, 5)]}


class Raising(spindle.Callback):
    def on_step(self, record):
        raise ArithmeticError(f"this callback is broken in step {record.step}")


def test_an_error_in_a_callback_ends_the_fit():
    recording = Recording()
    with pytest.raises(ArithmeticError, match="broken in step 0"):
        small(callbacks=[recording, Raising()]).fit(LOADERS, steps=4, progress=False)
    assert recording.results == [None]


CHANGES = {
    "in place": lambda weight: weight.mul_(0.9),
    "of its data": lambda weight: weight.data.mul_(0.9),
    "by other data": lambda weight: setattr(weight, "data", weight.data * 0.9),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_a_callback_changes_are_refused(change):
    """It is called a step late: a teacher that follows a student would be one step behind that of a plain loop."""
    linear = nn.Linear(4, 2)
    tower = spindle.module("tower", linear)

    @spindle.task(batch_size=4)
    def pull(batch):
        return tower(batch["x"]).square().mean()

    class Teaching(spindle.Callback):
        def on_step(self, record):
            with torch.no_grad():
                CHANGES[change](linear.weight)

    def trained(*callbacks, **options):
        trainer = spindle.Trainer(
            [pull],
            optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1),
            planning=spindle.Planning(profile=guessed_profile),
            callbacks=callbacks,
        )
        trainer.fit({"pull": [{"x": torch.ones(4, 4)}]}, steps=3, progress=False, **options)

    with pytest.raises(TrainingError, match=r"on_step has changed the weight 'tower.weight', .* one or two steps late"):
        trained(Teaching())
    with pytest.raises(TrainingError, match=r"on_step has changed the weight 'tower.weight'"):
        trained(on_step=lambda step, losses: Teaching().on_step(None))


def test_a_callback_may_have_functions_of_the_user_and_steps_may_be_an_integer_of_numpy():
    seen = []

    class Reporting(spindle.Callback):
        def __init__(self, on_report):
            self.on_report = on_report

        def on_step(self, record):
            self.on_report(record.step)

    trainer = small(callbacks=[Reporting(seen.append)])
    trainer.fit(LOADERS, steps=numpy.int64(2), progress=False)
    assert seen == [0, 1]


class Misspelt(spindle.Callback):
    def on_step_end(self, record):
        pass


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([Recording], r"expected objects of classes derived from spindle.Callback, got .*; give an instance of it"),
        (Recording(), r"expected a list of callbacks, got one Recording"),
        ([Misspelt()], r"Misspelt.on_step_end would never be called: a spindle.Callback has on_plan, on_step"),
        ([print], r"expected objects of classes derived from spindle.Callback, got <built-in function print>"),
    ],
)
def test_what_is_no_callback_is_refused(callbacks, message):
    with pytest.raises(TrainingError, match=message):
        small(callbacks=callbacks)


class DataDependent(TorchDispatchMode):
    """Counts operations whose result goes to the host: on a GPU each would wait for it."""

    OPERATIONS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.OPERATIONS:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_callbacks_read_nothing_from_a_device_that_losses_do_not_wait_for(monkeypatch):
    """On a GPU, waiting is done in `HostCopy.tolist` alone: for the values of a step whose losses are read."""
    events: list[str] = []

    class Noting(HostCopy):
        def __init__(self, values: torch.Tensor) -> None:
            super().__init__(values)
            events.append("copy")

        def tolist(self) -> list[float]:
            events.append("read")
            return super().tolist()

    monkeypatch.setitem(reporting.LOSSES_BEHIND, "cpu", reporting.LOSSES_BEHIND["cuda"])
    monkeypatch.setattr("spindle.run.executor.HostCopy", Noting)
    monkeypatch.setattr("spindle.train.optimizer.HostCopy", Noting)

    def observed(callbacks):
        trainer = small(callbacks=callbacks, max_grad_norm=1.0)
        trainer.fit(LOADERS, steps=2, progress=False)
        events.clear()
        with DataDependent() as mode:
            trainer.fit(LOADERS, steps=6, progress=False)
        return mode.names, list(events)

    names, plain_events = observed([])
    names_with_callbacks, events_with_callbacks = observed([Recording(), Recording()])
    assert names_with_callbacks == names
    assert plain_events[:6] == ["copy", "copy", "read", "copy", "read", "copy"]
    assert events_with_callbacks == [event for event in plain_events for _ in range(2)]  # losses, and the gradient norm


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_callbacks_do_not_synchronize_with_a_gpu():
    def num_synchronizations(callbacks):
        trainer = small(callbacks=callbacks)
        trainer.fit(LOADERS, steps=8, progress=False)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer.fit(LOADERS, steps=8, progress=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(warning.message) for warning in caught)

    assert num_synchronizations([Recording()]) == num_synchronizations([])


def test_utilization_is_of_the_peak_of_all_gpus():
    trainer = small()
    trainer.fit(LOADERS, steps=1, progress=False)
    graph = trainer.profile.graph
    # Two matrix products forward; backward both of them for weights, and one for the input of the second layer.
    assert flops_per_sample(graph) == {"pull": 2 * (9 + 6) + 2 * (9 + 6) + 2 * 6}
    assert peak_flops(trainer.profile) is None
    assert peak_flops(roofline_profile(graph, cluster_named("h100x16"))) == 16 * 989e12


# Writers.


def test_several_writers_write_at_once_and_over_several_fits(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines, recording = tmp_path / "logs" / "run.jsonl", Recording()
    writers = [spindle.JSONLines(lines), spindle.TensorBoard(tmp_path / "events", every=2)]
    trainer = small(callbacks=[*writers, recording])
    trainer.fit(LOADERS, steps=3, progress=False)
    trainer.evaluate(LOADERS)
    trainer.fit(LOADERS, steps=2, progress=False)

    entries = [json.loads(line) for line in lines.read_text().splitlines()]
    plan, *steps = [entry for entry in entries if not any(key.startswith("evaluate/") for key in entry)]
    assert plan["plan"] == trainer.plan.planner
    assert [entry["step"] for entry in steps] == [0, 1, 2, 3, 4]
    for entry, record in zip(steps, recording.steps, strict=True):
        assert entry["loss"] == entry["losses/pull"] == record.loss
        assert entry["lr/0"] == 0.1
        for name in ("grad_norm", "step_s", "predicted_s", "samples_per_s", "tokens_per_s"):
            assert entry[name] == getattr(record, name)
        assert "mfu" not in entry
    (evaluation,) = [entry for entry in entries if "evaluate/losses/pull" in entry]
    assert evaluation["step"] == 3

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert {"loss", "losses/pull", "lr/0", "grad_norm", "step_s", "evaluate/losses/pull"} <= set(
        events.Tags()["scalars"]
    )
    shown = [(event.step, event.value) for event in events.Scalars("loss")]
    assert shown == [(record.step, pytest.approx(record.loss)) for record in recording.steps if record.step % 2 == 0]
    assert [event.step for event in events.Scalars("evaluate/losses/pull")] == [3]
    assert "plan" in events.Tags()["tensors"]


def test_a_fit_that_fails_leaves_what_was_written(tmp_path):
    with pytest.raises(ArithmeticError):
        small(callbacks=[spindle.JSONLines(tmp_path / "run.jsonl"), Raising()]).fit(LOADERS, steps=4, progress=False)
    assert [json.loads(line)["step"] for line in (tmp_path / "run.jsonl").read_text().splitlines()] == [0, 0]


def test_numbers_that_json_cannot_have_are_null(tmp_path):
    writer = spindle.JSONLines(tmp_path / "run.jsonl")
    writer.write(3, {"loss": math.nan, "grad_norm": math.inf, "step_s": 0.5})
    entry = json.loads((tmp_path / "run.jsonl").read_text())
    assert (entry["loss"], entry["grad_norm"], entry["step_s"]) == (None, None, 0.5)
    writer.flush()
    with pytest.raises(TrainingError, match=r"JSONLines\(every=0\): must be at least 1"):
        spindle.JSONLines(tmp_path / "run.jsonl", every=0)


@pytest.mark.filterwarnings("default")  # those of the library are its own
def test_weights_and_biases_is_written_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    writer = spindle.WeightsAndBiases(mode="offline", dir=str(tmp_path), project="spindle")
    trainer = small(callbacks=[writer])
    trainer.fit(LOADERS, steps=3, progress=False)
    losses = trainer.evaluate(LOADERS)
    import wandb

    assert wandb.run.summary["evaluate/losses/pull"] == losses["pull"]
    wandb.finish()
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    for _ in range(100):  # the process that writes may be behind
        if b"losses/pull" in written.read_bytes():
            break
        time.sleep(0.1)
    assert b"losses/pull" in written.read_bytes()


@pytest.mark.filterwarnings("default")
def test_mlflow_is_written_to_a_folder(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    from mlflow.store.tracking.file_store import FileStore

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    log_batch = FileStore.log_batch

    def log_the_first_step_last(store, run_id, metrics, params, tags):
        # MLflow writes from several threads, in any order.
        if any(metric.step == 0 for metric in metrics):
            time.sleep(0.5)
        log_batch(store, run_id, metrics, params, tags)

    monkeypatch.setattr(FileStore, "log_batch", log_the_first_step_last)
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    recording = Recording()
    trainer = small(callbacks=[spindle.MLflow(run_name="first"), recording])
    trainer.fit(LOADERS, steps=3, progress=False)
    run = mlflow.active_run()
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "losses/pull")
    assert sorted((entry.step, entry.value) for entry in history) == [(r.step, r.loss) for r in recording.steps]
    mlflow.end_run()


@pytest.mark.parametrize(("writer", "library"), [("WeightsAndBiases", "wandb"), ("MLflow", "mlflow")])
def test_a_library_that_is_missing_is_named_with_the_extra_that_has_it(writer, library, monkeypatch):
    monkeypatch.setattr("spindle.train.writers.find_spec", lambda name: None)
    message = re.escape(f"spindle.{writer} needs {library}: pip install 'spindle-train[{library}]'")
    with pytest.raises(ImportError, match=message):
        getattr(spindle, writer)()
