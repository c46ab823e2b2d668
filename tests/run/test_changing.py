"""Tasks that end, join and come back, and modules that are frozen and thawed, during a fit on gloo processes:
the numbers of a plain PyTorch loop in one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spindle  # noqa: E402
from internals import unmeasured  # noqa: E402
from spindle.checkpoint import folder_of_step, open_checkpoint  # noqa: E402
from spindle.errors import TrainingError, WorkloadError  # noqa: E402
from spindle.plan import parse_plan  # noqa: E402
from spindle.program import Slice  # noqa: E402
from sweeps import alternating, chosen  # noqa: E402
from training_cases import CHANGES, FIRST_TASKS, changing, slow_adamw  # noqa: E402
from trainings import assert_trained, sgd, train  # noqa: E402


def changed(pool, num_ranks, name, seed=0, shards="none", optimizer=slow_adamw):
    answers = pool.run(num_ranks, train, changing(name, seed, shards, optimizer))
    assert_trained(answers)
    assert len(answers[0].tasks) == CHANGES[name].steps
    return answers[0]


@pytest.mark.parametrize(
    ("num_ranks", "shards"), chosen([(2, "all"), (3, "some")], (1, "none"), (2, "none"), (4, "some"))
)
def test_a_task_ends(pool, num_ranks, shards):
    training = changed(pool, num_ranks, "ends", num_ranks, shards)
    assert training.tasks[0] == frozenset(FIRST_TASKS)
    end = 3  # the losses of step 1 are known after the step behind it
    assert training.tasks[end - 1] == frozenset(FIRST_TASKS)
    assert training.tasks[end:] == (frozenset({"answer", "sound"}),) * (CHANGES["ends"].steps - end)
    assert training.num_profiled == 1  # nothing is tried or measured again
    assert training.num_changes == 1


@pytest.mark.parametrize(("num_ranks", "shards"), alternating([2, 3], "none", "some"))
def test_a_task_that_comes_back_finds_the_optimizer_state_of_its_modules(pool, num_ranks, shards):
    training = changed(pool, num_ranks, "ends and comes back", 3, shards)
    assert "answer" not in training.tasks[4]
    assert "answer" in training.tasks[-1]
    assert training.num_profiled == 1


def tied_modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    modules = {"first": nn.Linear(6, 6).double(), "second": nn.Linear(6, 6).double()}
    modules["second"].weight = modules["first"].weight
    return modules


def error_when_the_first_user_of_a_tied_weight_ends(rank: int, num_ranks: int) -> float:
    """The largest difference of a loss from plain PyTorch. All layers are on the last rank."""
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def adam(named):
        return torch.optim.Adam([parameter for _, parameter in named], lr=0.1)

    def on_last_rank(profile):
        lines = [f"{op.name}*{op.num_layers}@{num_ranks - 1}" for op in profile.graph.metaops]
        return parse_plan("\n".join(lines), profile)

    def on_step(step, losses):
        if step == 1:
            trainer.remove_task("first")

    tasks = []
    for name, module in tied_modules().items():
        handle = spindle.module(name, module)
        tasks.append(spindle.task(batch_size=4, name=name)(lambda batch, handle=handle: handle(batch).square().mean()))
    with unmeasured():
        planning = spindle.Planning(planner=on_last_rank)
        trainer = spindle.Trainer(tasks, optimizer=adam, planning=planning)
        loaders = {"first": [batch], "second": [batch]}
        losses = trainer.fit(loaders, steps=7, progress=False, on_step=on_step).losses
    assert {frozenset(step) for step in losses} == {frozenset(loaders), frozenset({"second"})}

    modules = tied_modules()
    optimizer = adam(list(nn.ModuleDict(modules).named_parameters()))
    errors = []
    for step in losses:
        optimizer.zero_grad()
        expected = {name: modules[name](batch).square().mean() for name in step}
        sum(expected.values()).backward()
        optimizer.step()
        errors += [abs(step[name] - float(value)) for name, value in expected.items()]
    return max(errors)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_tied_weight_keeps_its_state_when_the_first_task_that_uses_it_ends(pool, num_ranks):
    assert max(pool.run(num_ranks, error_when_the_first_user_of_a_tied_weight_ends)) < 1e-12


@pytest.mark.parametrize("num_ranks", chosen([3], 1))
def test_a_new_task_joins(pool, num_ranks):
    training = changed(pool, num_ranks, "joins", 5, "some")
    assert training.tasks[-1] == {*FIRST_TASKS, "late"}
    assert training.num_profiled == 2


@pytest.mark.parametrize(
    ("num_ranks", "seed", "optimizer", "shards"),
    chosen(
        [(1, 0, slow_adamw, "none"), (2, 1, sgd, "none"), (3, 2, slow_adamw, "some")],
        *[(2, 4, slow_adamw, "all"), (4, 3, slow_adamw, "some")],
    ),
)
def test_tasks_end_join_and_come_back_and_modules_are_frozen_in_one_fit(pool, num_ranks, seed, shards, optimizer):
    training = changed(pool, num_ranks, "all of it", seed, shards, optimizer)
    assert training.num_changes == len(CHANGES["all of it"].changes)


def trainer_of(*names, **options):
    linear = spindle.module("one", nn.Linear(2, 2))

    def make(name):
        @spindle.task(name=name, batch_size=2, per_sample_mean=True)
        def loss(batch):
            return linear(batch).square().mean()

        return loss

    tasks = {name: make(name) for name in ("a", "b", "c")}
    sgd = lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.1)  # noqa: E731
    return spindle.Trainer([tasks[name] for name in names], optimizer=sgd, **options), tasks


def test_tasks_change_between_fits():
    batches = [torch.ones(2, 2)] * 4
    with unmeasured():
        trainer, tasks = trainer_of("a", "b")
        trainer.fit({"a": batches, "b": batches}, steps=1, progress=False)
        trainer.remove_task("a")
        with pytest.raises(TrainingError, match="'a' is no task"):
            trainer.fit({"a": batches, "b": batches}, steps=1, progress=False)
        assert set(trainer.fit({"b": batches}, steps=1, progress=False).losses[0]) == {"b"}
        trainer.add_task(tasks["c"])
        assert set(trainer.fit({"b": batches, "c": batches}, steps=1, progress=False).losses[0]) == {"b", "c"}


def test_a_change_asked_for_at_the_end_is_for_the_next_fit():
    batches = [torch.ones(2, 2)] * 4
    with unmeasured():
        trainer, _ = trainer_of("a", "b")
        trainer.fit(
            {"a": batches, "b": batches},
            steps=2,
            progress=False,
            on_step=lambda step, losses: trainer.remove_task("a") if step == 1 else None,
        )
        assert set(trainer.fit({"b": batches}, steps=1, progress=False).losses[0]) == {"b"}
    assert set(trainer.state_dict()) == {"one.weight", "one.bias"}


def test_a_task_of_the_same_name_is_another_one():
    zeros, ones = [torch.zeros(2, 2)] * 9, [torch.ones(2, 2)] * 9
    with unmeasured():
        trainer, tasks = trainer_of("a", "b")

        def on_step(step, losses):
            if step == 1:
                trainer.remove_task("a")
                trainer.add_task(tasks["a"], ones)

        losses = trainer.fit({"a": zeros, "b": zeros}, steps=6, progress=False, on_step=on_step).losses
    assert "a" not in losses[3]  # its first batch is read for the step behind
    assert losses[4]["a"] != pytest.approx(losses[4]["b"])


def test_weights_of_sampling_change_with_them():
    batches = [torch.ones(2, 2)] * 4
    with unmeasured():
        trainer, tasks = trainer_of("a", "b", sampling_weights={"a": 1.0, "b": 1.0})
        trainer.remove_task("a")
        with pytest.raises(TrainingError, match="sampling_weight= requires"):
            trainer.add_task(tasks["c"])
        trainer.add_task(tasks["c"], sampling_weight=0.0)
        result = trainer.fit({"b": batches, "c": batches}, steps=2, progress=False)
    assert [set(losses) for losses in result.losses] == [{"b"}, {"b"}]


def test_changes_that_cannot_be_made_are_refused():
    trainer, tasks = trainer_of("a")
    with pytest.raises(TrainingError, match=r"no such task \(tasks: a\)"):
        trainer.remove_task("b")
    with pytest.raises(TrainingError, match="the only remaining task"):
        trainer.remove_task("a")
    with pytest.raises(WorkloadError, match="already"):
        trainer.add_task(tasks["a"])
    with pytest.raises(WorkloadError, match="expected a task"):
        trainer.add_task("b")
    with unmeasured(), pytest.raises(TrainingError, match="needs a loader"):
        trainer.fit(
            {"a": [torch.ones(2, 2)] * 3},
            steps=3,
            progress=False,
            on_step=lambda step, losses: trainer.add_task(tasks["b"]),
        )


def run_that_saves_when_a_task_has_ended(rank: int, num_ranks: int, folder: str) -> dict[str, torch.Tensor]:
    """The modules after it. The layers of the task that ends are on the last rank until an evaluation gathers them."""
    torch.manual_seed(0)
    handles = {name: spindle.module(name, nn.Linear(6, 6).double()) for name in ("first", "second")}
    tasks = [
        spindle.task(batch_size=4, name=name)(lambda batch, handle=handle: handle(batch).square().mean())
        for name, handle in handles.items()
    ]
    batches = {name: [torch.ones(4, 6, dtype=torch.float64)] for name in handles}

    def on_last_rank(profile):
        lines = [f"{op.name}*{op.num_layers}@{num_ranks - 1}" for op in profile.graph.metaops]
        return parse_plan("\n".join(lines), profile)

    def on_step(step, losses):
        if step == 0:
            trainer.remove_task("first")
        if step == 2:
            trainer.evaluate({"second": batches["second"]})

    with unmeasured():
        trainer = spindle.Trainer(
            tasks,
            optimizer=sgd,
            planning=spindle.Planning(planner=on_last_rank),
            checkpoints=spindle.Checkpoints(folder, every=1),
        )
        trainer.fit(batches, steps=5, on_step=on_step, progress=False)
    return {name: handle.module.weight.detach() for name, handle in handles.items()}


def test_weights_of_a_task_that_ended_are_saved_again_once_they_were_gathered(pool, tmp_path):
    trained = pool.run(2, run_that_saves_when_a_task_has_ended, str(tmp_path))[0]
    saved = open_checkpoint(folder_of_step(tmp_path, 5))
    for name, weight in trained.items():
        part = f"parameter/{name}.weight"
        assert (saved.read(part, Slice.whole((6, 6)).box).view("f8") == weight.numpy()).all()
