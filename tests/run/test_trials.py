"""Trials of a sweep: each trains what it would alone, and a frozen module that they share runs once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR  # noqa: E402
from torch.utils.data import Dataset, default_collate  # noqa: E402

import internals  # noqa: E402
import spindle  # noqa: E402
from comparison import Comparison, assert_close  # noqa: E402
from internals import guessed_profile  # noqa: E402
from programs import loss_value  # noqa: E402
from random_plans import random_plan_text  # noqa: E402
from resuming import drop_newest  # noqa: E402
from spindle.errors import SpindleError, TrainingError, WorkloadError  # noqa: E402
from spindle.plan import check, parse_plan  # noqa: E402
from spindle.planners import PLANNERS, make_plan  # noqa: E402

WIDTH, ROWS, STEPS = 6, 8, 6


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.2, momentum=0.9)


def adamw(named: Any) -> torch.optim.Optimizer:
    # With a small eps Adam would blow up the rounding errors of gradients that are all but zero.
    return torch.optim.AdamW([parameter for _, parameter in named], lr=0.03, eps=1e-3, weight_decay=0.1)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return StepLR(optimizer, 2, 0.5)


OPTIONS: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": sgd, "max_grad_norm": 0.05},
    "adamw": {"optimizer": adamw, "lr_scheduler": halving, "max_grad_norm": 2.0},
    "pairs": {"optimizer": sgd, "max_grad_norm": None},
}
TRIALS = tuple(OPTIONS)


def encoder() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers).double().requires_grad_(False).eval()


def head_of(trial: str) -> nn.Module:
    torch.manual_seed(10 + TRIALS.index(trial))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()


def task_of(trial: str, vision: Any, head: Any) -> Any:
    """A task with a loss over tokens, one with a loss of each sample and a metric, and one over pairs of samples."""

    def momentum(batch: Any) -> Any:
        errors = F.cross_entropy(head(vision(batch["x"] * 2)), batch["y"], reduction="none")
        return spindle.mean((errors * batch["mask"]).sum(), batch["mask"].sum())

    def adamw(batch: Any) -> Any:
        logits = head(vision(batch["x"] * 2))
        right = (logits.argmax(-1) == batch["y"]).double()
        return spindle.result(F.cross_entropy(logits, batch["y"]), accuracy=right)

    def pairs(batch: Any) -> Any:
        out = F.normalize(head(vision(batch["x"] * 2)), dim=-1)
        return F.cross_entropy(out @ out.T, torch.arange(out.shape[0], device=out.device))

    function = {"momentum": momentum, "adamw": adamw, "pairs": pairs}[trial]
    return spindle.task(batch_size=ROWS, name=trial, per_sample_mean=trial == "adamw")(function)


class Samples(Dataset):
    """Samples that draw random numbers."""

    def __len__(self) -> int:
        return 5 * ROWS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        x = torch.sin(torch.arange(WIDTH, dtype=torch.float64) * (number + 1))
        sample = {"x": x + 0.1 * torch.rand(WIDTH, dtype=torch.float64)}
        return sample | {
            "y": torch.tensor(number % 3),
            "mask": torch.tensor(float(number % 4 > 0), dtype=torch.float64),
        }


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    return [default_collate([Samples()[ROWS * step + row] for row in range(ROWS)]) for step in range(4)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One start of a script with these trials."""

    trials: tuple[str, ...] = TRIALS
    steps: int = STEPS
    plan: int | None = None  # the seed of a random plan
    planning: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # of the Trainer
    reads: str = "list"
    folder: str | None = None
    captures: bool = False  # CUDA graphs, or what stands for them on a CPU
    ends: Mapping[int, str] = field(default_factory=dict)  # trials, when the losses of a step are known


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    losses: tuple[dict[str, float], ...]
    state: dict[str, torch.Tensor]
    notices: tuple[str, ...]
    ops: tuple[str, ...]
    devices: int  # that slots of the encoder are on


def run(rank: int, num_ranks: int, sweep: Sweep) -> Ran:
    torch.manual_seed(rank)  # what ranks draw by themselves must not matter
    vision = spindle.module("vision", encoder())
    trials = [
        spindle.Trial(task_of(name, vision, spindle.module(f"head_{name}", head_of(name))), **OPTIONS[name])
        for name in sweep.trials
    ]
    checkpoints = None if sweep.folder is None else spindle.Checkpoints(sweep.folder, every=3)
    planning = spindle.Planning(profile=guessed_profile, **sweep.planning)
    trainer = spindle.Trainer(trials, planning=planning, checkpoints=checkpoints, **sweep.options)
    loader: Any = batches() if sweep.reads == "list" else Samples()
    if sweep.plan is not None:
        profile = trainer.prepare(loader, progress=False)
        trainer.replan(plan=random_plan_text(profile, sweep.plan, has_rounds=False))

    def on_step(step: int, losses: dict[str, float]) -> None:
        if step in sweep.ends:
            trainer.remove_task(sweep.ends[step])

    with internals.capturing() if sweep.captures else nullcontext():
        result = trainer.fit(loader, steps=sweep.steps, progress=False, on_step=on_step)
    state = {name: value.clone() for name, value in trainer.state_dict().items()}
    ops = tuple(op.name for op in result.graph.metaops)
    used = {device for slot in result.plan.slots if "vision" in slot.op for device in slot.devices}
    return Ran(losses=result.losses, state=state, notices=result.notices, ops=ops, devices=len(used))


def train_plainly(trial: str, steps: int, accumulated: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What a person would write for one trial."""
    vision, head, options = encoder(), head_of(trial), OPTIONS[trial]
    task, loader, history = task_of(trial, vision, head), batches(), []
    optimizer = options["optimizer"](list(head.named_parameters()))
    scheduler = options["lr_scheduler"](optimizer) if "lr_scheduler" in options else None
    for step in range(steps):
        optimizer.zero_grad()
        losses = []
        for number in range(accumulated):
            loss = loss_value(task(loader[(step * accumulated + number) % len(loader)]))
            (loss / accumulated).backward()
            losses.append(loss.item())
        if options["max_grad_norm"] is not None:
            nn.utils.clip_grad_norm_(head.parameters(), options["max_grad_norm"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        history.append(sum(losses) / accumulated)
    named = {"vision": vision, f"head_{trial}": head}
    return history, nn.ModuleDict(named).state_dict()


def compared(ran: Ran, trial: str, losses: list[float], state: Mapping[str, torch.Tensor]) -> Comparison:
    comparison = Comparison()
    ours = [{trial: row[trial]} for row in ran.losses if trial in row]
    comparison.add_losses(ours, [{trial: loss} for loss in losses])
    comparison.add_tensors("parameter", {name: ran.state[name] for name in state}, state)
    return comparison


@pytest.mark.parametrize(
    ("num_ranks", "sweep"),
    [
        (1, Sweep()),
        (2, Sweep(plan=3, planning={"shard_optimizer": True}, captures=True)),
        (3, Sweep(plan=5, options={"gradient_accumulation_steps": 2})),
        (3, Sweep(planning={"planner": "task-level", "shard_optimizer": False})),
    ],
)
def test_each_trial_of_a_sweep_trains_as_in_plain_pytorch(pool, num_ranks, sweep):
    answers = pool.run(num_ranks, run, sweep)
    for trial in TRIALS:
        losses, state = train_plainly(trial, STEPS, sweep.options.get("gradient_accumulation_steps", 1))
        assert_close([compared(ran, trial, losses, state) for ran in answers], 1e-9)
        moved = max(
            float((state[f"head_{trial}.{name}"] - value).norm()) for name, value in head_of(trial).state_dict().items()
        )
        assert moved > 1e-3
    # The encoder is in the step once.
    assert [name for name in answers[0].ops if "vision" in name] == ["momentum/vision#0[0:3]"]
    assert "module 'vision' runs once for trials momentum, adamw and pairs" in answers[0].notices
    assert sweep.plan is None or answers[0].devices > 1


def test_a_sweep_that_is_cut_and_resumed_has_the_numbers_of_each_trial_alone(pool, tmp_path):
    folder = str(tmp_path / "sweep")
    options = {"options": {"ema": 0.9}, "reads": "dataset"}
    pool.run(3, run, Sweep(folder=folder, steps=5, **options))
    assert drop_newest(tmp_path / "sweep") == 3
    answers = pool.run(2, run, Sweep(folder=folder, plan=4, **options))
    assert len(answers[0].losses) == STEPS - 3
    for trial in TRIALS:
        (alone,) = pool.run(1, run, Sweep(trials=(trial,), **options))
        losses = [row[trial] for row in alone.losses[3:]]
        assert_close([compared(ran, trial, losses, alone.state) for ran in answers], 1e-9)


def test_trials_end_and_the_others_go_on(pool):
    # First the one whose call of the encoder is that of all.
    answers = pool.run(2, run, Sweep(plan=1, ends={0: "momentum", 3: "pairs"}))
    lengths = {trial: sum(trial in row for row in answers[0].losses) for trial in TRIALS}
    assert lengths["momentum"] < lengths["pairs"] < lengths["adamw"] == STEPS
    for trial, steps in lengths.items():
        losses, state = train_plainly(trial, steps)
        assert_close([compared(ran, trial, losses, state) for ran in answers], 1e-9)
    assert [name for name in answers[0].ops if "vision" in name] == ["adamw/vision#0[0:3]"]


def diverging(rank: int, num_ranks: int) -> tuple[tuple[dict[str, float], ...], dict[str, torch.Tensor], list[str]]:
    vision = spindle.module("vision", encoder())
    trials = []
    for name in ("momentum", "adamw"):
        head = spindle.module(f"head_{name}", head_of(name))
        trials.append(spindle.Trial(task_of(name, vision, head), **OPTIONS[name]))
    head = spindle.module("head_wild", head_of("pairs"))

    @spindle.task(batch_size=ROWS)
    def wild(batch):
        return head(vision(batch["x"])).square().mean()

    def leaping(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for _, parameter in named], lr=1e60)

    planning = spindle.Planning(profile=guessed_profile)
    trainer = spindle.Trainer([spindle.Trial(wild, leaping), *trials], planning=planning)

    def on_step(step: int, losses: dict[str, float]) -> None:
        for name in losses:
            if not math.isfinite(losses[name]):
                trainer.remove_task(name)  # it has ended by itself

    result = trainer.fit(batches(), steps=STEPS + 4, progress=False, on_step=on_step)
    return result.losses, {name: value.clone() for name, value in trainer.state_dict().items()}, trainer.notices


def test_a_trial_that_diverges_ends_and_the_others_go_on(pool):
    for losses, state, notices in pool.run(2, diverging):
        assert "wild" in losses[0]
        assert "wild" not in losses[-1]
        assert any("trial 'wild' has ended, and the others go on: its loss is" in notice for notice in notices)
        for trial in ("momentum", "adamw"):
            expected, weights = train_plainly(trial, STEPS + 4)
            ran = Ran(losses=losses, state=state, notices=(), ops=(), devices=1)
            assert_close([compared(ran, trial, expected, weights)], 1e-9)


# What is the same call, and what is not.


def two_trials(vision: nn.Module, scales: tuple[Any, Any] = (1.0, 1.0), names: str = "ab") -> list[Any]:
    handle = spindle.module("vision", vision)
    trials = []
    for number, name in enumerate(names):
        torch.manual_seed("ab".index(name))
        head = spindle.module(f"head_{name}", nn.Linear(WIDTH, 3).double())
        scale = scales["ab".index(name)]

        def loss(batch: Any, head: Any = head, scale: Any = scale) -> Any:
            return head(handle(batch["x"] * scale)).square().mean()

        trials.append(spindle.Trial(spindle.task(batch_size=ROWS, name=name)(loss), (sgd, adamw)[number % 2]))
    return trials


def fitted(trials: list[Any]) -> tuple[spindle.Trainer, Any]:
    trainer = spindle.Trainer(trials, planning=spindle.Planning(profile=guessed_profile))
    return trainer, trainer.fit(batches(), steps=4, progress=False)


def dropping() -> nn.Module:
    return nn.Sequential(*encoder(), nn.Dropout(0.5)).train()


def twice(trial: str, vision: nn.Module, scales: tuple[Any, Any]) -> tuple[Any, Any]:
    """A trial in a sweep and alone."""
    sweep, alone = two_trials(deepcopy(vision), scales), two_trials(deepcopy(vision), scales)
    number = "ab".index(trial)
    return fitted(sweep), fitted([alone[number]])


@pytest.mark.parametrize(
    ("vision", "scales", "reason"),
    [
        (dropping, (1.0, 1.0), "it draws random numbers; .eval() on it stops dropout"),
        (encoder, (1.0, 2.0), "its calls are not known to be the same"),
        (encoder, (2, 2.0), "its calls are not known to be the same"),  # equal, and not the same for whole numbers
        (encoder, (torch.ones(()), torch.ones(())), "its calls are not known to be the same"),  # one may change later
    ],
)
def test_calls_that_may_differ_run_in_each_trial(vision, scales, reason):
    for trial in "ab":
        (sweep, result), (alone, expected) = twice(trial, vision(), scales)
        assert {op.task for op in result.graph.metaops if op.module == "vision"} == {"a", "b"}
        assert f"module 'vision' is frozen, and runs in each of the trials that call it: {reason}" in sweep.notices
        assert [row[trial] for row in result.losses] == [row[trial] for row in expected.losses]
        assert all(torch.equal(sweep.state_dict()[name], value) for name, value in alone.state_dict().items())


def test_modules_in_a_row_are_shared_as_far_as_they_are_frozen():
    vision = spindle.module("vision", encoder())
    neck = spindle.module("neck", nn.Linear(WIDTH, WIDTH).double().requires_grad_(False))
    trials = []
    for name in "ab":
        head = spindle.module(f"head_{name}", nn.Linear(WIDTH, WIDTH).double())

        @spindle.task(batch_size=ROWS, name=name)
        def loss(batch, head=head):
            seen = neck(vision(batch["x"]))
            return neck(head(seen.relu()) + vision(batch["x"] + 1)).square().mean()  # the last call has a gradient

        trials.append(spindle.Trial(loss, sgd))
    _, result = fitted(trials)
    calls = [f"{op.task}/{op.call}" for op in result.graph.metaops]
    assert [call for call in calls if call.startswith("b/")] == ["b/head_b#0", "b/neck#1", "b/loss"]
    sources = {
        calls[position]: {calls[producer] for producer in producers}
        for position, producers in enumerate(result.graph.predecessors)
        if calls[position].startswith("b/")
    }
    assert sources == {
        "b/head_b#0": {"a/neck#0"},
        "b/neck#1": {"a/vision#1", "b/head_b#0"},
        "b/loss": {"b/neck#1"},
    }


def of_one_size(rank: int, num_ranks: int, names: tuple[str, ...]) -> Ran:
    """Trials of which the first runs on whole batches alone."""
    vision = spindle.module("vision", encoder())
    trials = []
    for number, name in enumerate(names):
        torch.manual_seed("ab".index(name))
        head = spindle.module(f"head_{name}", nn.Linear(WIDTH, ROWS).double())

        @spindle.task(batch_size=ROWS, name=name, per_sample_mean=name == "b")
        def loss(batch, head=head, name=name):
            out = head(vision(batch["x"]))
            return (out.reshape(ROWS, ROWS).T if name == "a" else out).square().mean()

        trials.append(spindle.Trial(loss, (sgd, adamw)[number % 2] if len(names) > 1 else {"a": sgd, "b": adamw}[name]))
    trainer = spindle.Trainer(trials, planning=spindle.Planning(profile=guessed_profile))
    profile = trainer.prepare(batches(), progress=False)
    trainer.replan(plan=random_plan_text(profile, 2, has_rounds=False))
    result = trainer.fit(batches(), steps=4, progress=False)
    state = {name: value.clone() for name, value in trainer.state_dict().items()}
    return Ran(
        losses=result.losses, state=state, notices=(), ops=tuple(op.name for op in result.graph.metaops), devices=1
    )


def test_a_call_on_whole_batches_is_not_that_of_a_trial_that_divides_them(pool):
    answers = pool.run(2, of_one_size, ("a", "b"))
    assert {name.split("/")[0] for name in answers[0].ops if "vision" in name} == {"a", "b"}
    for trial in "ab":
        (alone,) = pool.run(1, of_one_size, (trial,))
        losses = [row[trial] for row in alone.losses]
        assert_close([compared(ran, trial, losses, alone.state) for ran in answers], 1e-9)


def test_every_planner_but_those_of_pipelines_plans_a_sweep():
    _, result = fitted(two_trials(encoder()))
    profile = guessed_profile(result.graph, 4)
    for name, planner in PLANNERS.items():
        if planner.is_pipeline:
            with pytest.raises(SpindleError, match="trials of a sweep"):
                make_plan(profile, name)
        elif name != "exhaustive":
            assert make_plan(profile, name).makespan_s > 0
    # A module and what it feeds are not planned in different rounds.
    *before, last = random_plan_text(profile, 1, has_rounds=False).splitlines()
    with pytest.raises(SpindleError, match="runs in rounds"):
        check(parse_plan("\n".join([*before, last.replace("~0", "~1")]), profile), profile)


# What is refused.


def with_batch_norm() -> list[Any]:
    vision = nn.Sequential(*encoder(), nn.BatchNorm1d(WIDTH).double()).requires_grad_(False).train()
    return two_trials(vision)


def tied() -> list[Any]:
    trials = two_trials(encoder())
    shared = nn.Linear(WIDTH, WIDTH).double()
    heads = [spindle.module(name, nn.Sequential(nn.Identity(), shared)) for name in ("first", "second")]
    vision = spindle.module("vision", encoder())
    for number, head in enumerate(heads):

        def loss(batch: Any, head: Any = head) -> Any:
            return head(vision(batch["x"])).square().mean()

        trials[number] = spindle.Trial(spindle.task(batch_size=ROWS, name="ab"[number])(loss), sgd)
    return trials


def other_batch_size() -> list[Any]:
    first, second = two_trials(encoder())
    task = spindle.task(batch_size=ROWS // 2, name="b")(second.task.function)
    return [first, spindle.Trial(task, sgd)]


def with_task() -> list[Any]:
    first, second = two_trials(encoder())
    return [first, second.task]


@pytest.mark.parametrize(
    ("trials", "options", "message"),
    [
        (lambda: two_trials(encoder().requires_grad_(True)), {}, r"both train 'vision.0.0.weight': freeze it"),
        (tied, {}, r"train 'second.1.weight', which is tied to 'first.1.weight': freeze it"),
        (with_batch_norm, {}, r"call module 'vision', which keeps something .*module.eval\(\)"),
        (lambda: two_trials(encoder(), names="aa"), {}, r"two tasks are called 'a'"),
        (other_batch_size, {}, r"'b' has batch_size=4, 'a' 8; give all tasks"),
        (with_task, {}, r"either tasks or spindle.Trial\(task, optimizer\), got both"),
        (lambda: two_trials(encoder()), {"optimizer": sgd}, r"optimizer=...\): each trial has its own"),
        (lambda: two_trials(encoder()), {"max_grad_norm": 1.0}, r"max_grad_norm=...\): each trial has its own"),
        (lambda: two_trials(encoder()), {"autocast": torch.float16}, r"use torch.bfloat16"),
        (lambda: two_trials(encoder()), {"sampling_weights": {"a": 1.0}}, r"has all trials"),
        (
            lambda: two_trials(encoder()),
            {"planning": spindle.Planning(planner="pipeline")},
            r"a pipeline does not share calls between",
        ),
        (lambda: [trial.task for trial in two_trials(encoder())], {}, r"expected optimizer="),
    ],
)
def test_trials_that_would_not_train_as_alone_are_refused(trials, options, message):
    def train() -> None:
        planning = {"planning": spindle.Planning(profile=guessed_profile)}
        spindle.Trainer(trials(), **planning | options).fit(batches(), steps=1, progress=False)

    with pytest.raises((TrainingError, WorkloadError), match=message):
        train()


def test_trials_read_the_same_batches():
    trainer = spindle.Trainer(two_trials(encoder()), planning=spindle.Planning(profile=guessed_profile))
    with pytest.raises(TrainingError, match=r"read the same batches, got 2 loaders for a, b; give one"):
        trainer.fit({"a": batches(), "b": batches()}, steps=1)
    loader = batches()
    trainer.fit({"a": loader, "b": loader}, steps=1, progress=False)
    trainer.remove_task("b")
    assert trainer.fit(loader, steps=1, progress=False).losses[0].keys() == {"a"}
    with pytest.raises(TrainingError, match=r"trial 'a': a batch has other entries .* all have one form"):
        trainer.fit([{"x": loader[0]["x"]}, *loader], steps=6, progress=False)
    with pytest.raises(TrainingError, match="begin together"):
        trainer.add_task(two_trials(encoder())[0].task)


# What a script sees of it.


def test_numbers_of_a_sweep_are_those_of_its_trials():
    records = []

    class Noting(spindle.Callback):
        def on_step(self, record: spindle.StepRecord) -> None:
            records.append(record)

    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return ReduceLROnPlateau(optimizer, patience=0, factor=0.1)

    first, second = two_trials(encoder())
    trials = [spindle.Trial(first.task, sgd, lr_scheduler=plateau), second]
    planning = spindle.Planning(profile=guessed_profile)
    trainer = spindle.Trainer(trials, planning=planning, callbacks=[Noting()])
    trainer.fit(batches(), steps=2, progress=False)
    assert records[0].learning_rates == {"a/0": 0.2, "b/0": 0.03}
    assert records[0].grad_norms.keys() == {"a", "b"}
    assert records[0].grad_norm == pytest.approx(sum(norm**2 for norm in records[0].grad_norms.values()) ** 0.5)
    for _ in range(2):
        trainer.step_lr_scheduler(1.0, trial="a")
    with pytest.raises(TrainingError, match="one of a, b"):
        trainer.step_lr_scheduler(1.0)
    trainer.fit(batches(), steps=1, progress=False)
    assert records[-1].learning_rates == {"a/0": pytest.approx(0.02), "b/0": 0.03}
    means = trainer.evaluate(batches())
    assert means.keys() == {"a", "b"}
    assert means == pytest.approx({name: sum(evaluated(name, trainer)) / 4 for name in "ab"})


def evaluated(name: str, trainer: spindle.Trainer) -> list[float]:
    """Losses of a trial's weights, loaded into plain PyTorch."""
    vision, head = encoder(), nn.Linear(WIDTH, 3).double()
    state = {key: value for key, value in trainer.state_dict().items() if key.startswith(("vision.", f"head_{name}."))}
    nn.ModuleDict({"vision": vision, f"head_{name}": head}).load_state_dict(state)
    with torch.no_grad():
        return [head(vision(batch["x"])).square().mean().item() for batch in batches()]
