"""What every training script has, on gloo processes: the numbers of a plain PyTorch loop in one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spindle  # noqa: E402
from courses import unmeasured  # noqa: E402
from spindle.errors import TrainingError  # noqa: E402
from spindle.train.sampling import tasks_in_step  # noqa: E402


def follow(pool, num_ranks, name, plan="plan 1", limit=1e-9):
    answers = pool.run(num_ranks, "follow", name, plan)
    for one in answers:
        assert one.loss < limit
        assert one.parameter < limit, one.worst
        assert one.moved > 1e-3
    return answers[0]


@pytest.mark.parametrize(("num_ranks", "plan"), [(1, "plan 0"), (2, "plan 3"), (3, "plan 5")])
def test_groups_of_parameters_and_a_schedule_go_on_over_fits(pool, num_ranks, plan):
    follow(pool, num_ranks, "groups and schedule", plan)


@pytest.mark.parametrize(("num_ranks", "plan"), [(1, "plan 0"), (2, "plan 4"), (3, "plan 2")])
@pytest.mark.parametrize("name", ["clipped", "clipped rarely"])
def test_gradients_are_clipped_by_the_norm_of_all_of_them(pool, num_ranks, plan, name):
    follow(pool, num_ranks, name, plan)


@pytest.mark.parametrize(("num_ranks", "plan"), [(1, "plan 0"), (3, "plan 6")])
def test_gradients_of_several_batches_add_up(pool, num_ranks, plan):
    follow(pool, num_ranks, "accumulated", plan)


def test_they_do_when_slots_are_replayed(pool):
    for num_ranks in (1, 2):
        assert follow(pool, num_ranks, "accumulated, captured", "plan 3").captured


@pytest.mark.parametrize(("num_ranks", "plan"), [(1, "plan 0"), (2, "plan 7")])
def test_the_weight_of_a_loss_may_follow_the_step(pool, num_ranks, plan):
    follow(pool, num_ranks, "weight", plan)
    assert follow(pool, num_ranks, "weight, captured", plan).captured


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_module_is_recomputed_where_the_user_says_so(pool, num_ranks):
    recomputed = follow(pool, num_ranks, "checkpointed", "wavefront").recomputed
    assert recomputed
    assert all("vision" in op for op in recomputed)


@pytest.mark.parametrize(("num_ranks", "plan"), [(1, "plan 0"), (2, "plan 8"), (3, "plan 9")])
def test_tasks_are_drawn_for_each_step(pool, num_ranks, plan):
    tasks = follow(pool, num_ranks, "sampled", plan).tasks
    assert {frozenset({"pair"}), frozenset({"answer"})} == set(tasks)


def test_their_weights_may_follow_the_step(pool):
    tasks = follow(pool, 2, "sampled by step", "plan 3").tasks
    assert tasks == (frozenset({"pair"}),) * 3 + (frozenset({"answer"}),) * 3


def test_tasks_are_drawn_when_gradients_add_up_and_when_slots_are_replayed(pool):
    follow(pool, 2, "sampled, accumulated", "plan 3")
    assert follow(pool, 2, "sampled, captured", "plan 3").captured


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_modules_are_frozen_and_thawed_between_fits(pool, num_ranks):
    follow(pool, num_ranks, "frozen", "wavefront")


@pytest.mark.parametrize(("num_ranks", "limit"), [(1, 1e-6), (2, 2e-2)])
def test_layers_run_in_bfloat16(pool, num_ranks, limit):
    """On two ranks, sums of other parts are rounded otherwise."""
    follow(pool, num_ranks, "autocast", "plan 3", limit)
    follow(pool, num_ranks, "autocast, recomputed", "wavefront", limit)
    assert follow(pool, num_ranks, "autocast, captured", "plan 3", limit).captured


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_evaluation_gives_the_losses_of_one_process(pool, num_ranks):
    answers = pool.run(num_ranks, "evaluated")
    before = answers[0][0]  # on rank 0: other ranks take its weights, and their own are gone
    for _, after, modes in answers:
        assert max([*before.values(), *after.values()]) < 1e-9
        assert modes == [True, True, True, True, True, True, False, True]


# In one process.


def small(**options):
    torch.manual_seed(0)
    encoder = spindle.module("encoder", nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))

    @spindle.task(batch_size=4, tokens=lambda batch: batch["x"].numel())
    def pull(batch):
        return (encoder(batch["x"]) ** 2).mean()

    def sgd(named):
        return torch.optim.SGD([one for _, one in named], lr=0.1)

    return spindle.Trainer([pull], **{"optimizer": sgd, **options})


BATCHES = {"pull": [{"x": torch.ones(4, 3)}]}


def test_progress_shows_losses_rates_and_idle_time(capsys):
    with unmeasured():
        small().fit(BATCHES, steps=20)
    last = capsys.readouterr().err.splitlines()[-1]
    for text in ("step 20/20", "pull 0.", " ms", " samples/s", " tokens/s", "idle "):
        assert text in last


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 0}, r"gradient_accumulation_steps=0\): must be at least 1"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0.0\): must be above 0"),
        ({"autocast": torch.float16}, r"expected torch.bfloat16; other types need loss scaling"),
        ({"sampling_weights": {"push": 1.0}}, r"expected a weight for each task \(pull\), got push"),
        ({"sampling_weights": {"pull": 1.0}, "tasks_per_step": 2}, r"tasks_per_step=2\): must be from 1 to 1"),
    ],
)
def test_an_option_that_cannot_be_is_explained(options, message):
    with pytest.raises(TrainingError, match=message):
        small(**options)


def test_a_schedule_that_wants_a_measure_is_refused():
    trainer = small(lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with unmeasured(), pytest.raises(TrainingError, match="stepped without a measure, got ReduceLROnPlateau"):
        trainer.fit(BATCHES, steps=1, progress=False)


def test_weights_that_leave_no_task_to_draw_are_refused():
    trainer = small(sampling_weights={"pull": lambda step: 1.0 if step < 2 else 0.0})
    with unmeasured(), pytest.raises(TrainingError, match="step 2 needs 1 tasks with weights above 0"):
        trainer.fit(BATCHES, steps=4, progress=False)


def test_tasks_are_drawn_as_often_as_they_weigh():
    names = ["a", "b", "c"]
    drawn = [tasks_in_step({"a": 6.0, "b": 3.0, "c": 1.0}, names, 1, 0, step) for step in range(2000)]
    shares = [sum(name in one for one in drawn) / len(drawn) for name in names]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.03)
    pairs = [tasks_in_step({"a": 1.0, "b": 1.0, "c": 0.0}, names, 2, 0, step) for step in range(20)]
    assert pairs == [["a", "b"]] * 20
    assert drawn != [tasks_in_step({"a": 6.0, "b": 3.0, "c": 1.0}, names, 1, 1, step) for step in range(2000)]
