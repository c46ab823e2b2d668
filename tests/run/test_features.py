"""What every training script has, on gloo processes: the numbers of a plain PyTorch loop in one process."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spindle  # noqa: E402
from comparison import Comparison, assert_close  # noqa: E402
from internals import unmeasured  # noqa: E402
from spindle.errors import TrainingError  # noqa: E402
from spindle.train.sampling import tasks_in_step  # noqa: E402
from spindle.train.task import Mean  # noqa: E402
from sweeps import chosen  # noqa: E402
from training_cases import WIDTH, normal_batch, pairs_and_answers, train_named, two_towers  # noqa: E402
from trainings import LEARNING_RATE, adamw, assert_trained, sgd  # noqa: E402


def trained(pool, num_ranks, name, plan="plan 1", limit=1e-9):
    answers = pool.run(num_ranks, train_named, name, plan)
    assert_trained(answers, limit)
    return answers[0]


@pytest.mark.parametrize(("num_ranks", "plan"), chosen([(1, "plan 0"), (3, "plan 5")], (2, "plan 3")))
def test_parameter_groups_and_a_schedule_continue_over_fits(pool, num_ranks, plan):
    trained(pool, num_ranks, "groups and schedule", plan)


@pytest.mark.parametrize(
    ("name", "num_ranks", "plan"),
    chosen(
        [("clipped", 1, "plan 0"), ("clipped rarely", 2, "plan 4"), ("clipped", 3, "plan 2")],
        *[("clipped rarely", 1, "plan 0"), ("clipped", 2, "plan 4"), ("clipped rarely", 3, "plan 2")],
    ),
)
def test_gradients_are_clipped_by_the_norm_of_all_of_them(pool, num_ranks, plan, name):
    trained(pool, num_ranks, name, plan)


@pytest.mark.parametrize(("num_ranks", "plan"), chosen([(3, "plan 6")], (1, "plan 0")))
def test_gradients_of_several_batches_add_up(pool, num_ranks, plan):
    trained(pool, num_ranks, "accumulated", plan)


def test_gradients_of_several_batches_add_up_when_slots_are_replayed(pool):
    for num_ranks in chosen([2], 1):
        assert trained(pool, num_ranks, "accumulated, captured", "plan 3").captured


@pytest.mark.parametrize(("num_ranks", "plan"), chosen([(2, "plan 7")], (1, "plan 0")))
def test_the_weight_of_a_loss_may_depend_on_the_step(pool, num_ranks, plan):
    trained(pool, num_ranks, "weight", plan)
    assert trained(pool, num_ranks, "weight, captured", plan).captured


@pytest.mark.parametrize("num_ranks", chosen([3], 1))
def test_a_module_is_recomputed_where_the_user_says_so(pool, num_ranks):
    recomputed = trained(pool, num_ranks, "checkpointed", "wavefront").recomputed
    assert recomputed
    assert all("vision" in op for op in recomputed)


@pytest.mark.parametrize(("num_ranks", "plan"), chosen([(3, "plan 9")], (1, "plan 0"), (2, "plan 8")))
def test_tasks_are_drawn_for_each_step(pool, num_ranks, plan):
    tasks = trained(pool, num_ranks, "sampled", plan).tasks
    assert {frozenset({"pair"}), frozenset({"answer"})} == set(tasks)


def test_sampling_weights_may_depend_on_the_step(pool):
    tasks = trained(pool, 2, "sampled by step", "plan 3").tasks
    assert tasks == (frozenset({"pair"}),) * 3 + (frozenset({"answer"}),) * 3


def test_tasks_are_drawn_when_gradients_add_up_and_when_slots_are_replayed(pool):
    trained(pool, 2, "sampled, accumulated", "plan 3")
    assert trained(pool, 2, "sampled, captured", "plan 3").captured


@pytest.mark.parametrize("num_ranks", chosen([3], 1))
def test_modules_are_frozen_and_thawed_between_fits(pool, num_ranks):
    trained(pool, num_ranks, "frozen", "wavefront")


@pytest.mark.parametrize(("num_ranks", "limit"), [(1, 1e-6), (2, 2e-2)])
def test_layers_run_in_bfloat16(pool, num_ranks, limit):
    """On two ranks, sums of other parts are rounded otherwise."""
    trained(pool, num_ranks, "autocast", "plan 3", limit)
    trained(pool, num_ranks, "autocast, recomputed", "wavefront", limit)
    answer = trained(pool, num_ranks, "autocast, captured", "plan 3", limit)
    assert answer.captured, answer.notices


def evaluate(rank: int, num_ranks: int) -> tuple[Comparison, list[bool]]:
    """Losses before and after training, compared with those of a plain loop; and which parts are in training mode."""
    torch.manual_seed(rank)  # ranks start with weights of their own: those of rank 0 count
    modules = {
        "vision": nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)).double(),
        "text": nn.Sequential(nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH)).double(),
        "head": nn.Linear(WIDTH, 2).double(),
    }
    modules["text"][1].eval()
    tasks = pairs_and_answers()({name: spindle.module(name, module) for name, module in modules.items()})
    batches = {task.name: [normal_batch(task.name, number) for number in range(5)] for task in tasks}
    batches["answer"].append({key: leaf[:3] for key, leaf in batches["answer"][0].items()})
    comparison = Comparison()
    with unmeasured():
        trainer = spindle.Trainer(tasks, optimizer=sgd)
        before = trainer.evaluate(batches)
        if rank == 0:  # other ranks take its weights, and their own are gone
            comparison.add_losses([before], [evaluate_plainly(batches, modules)])
        trainer.fit({name: some[:5] for name, some in batches.items()}, steps=3, progress=False)
        after = trainer.evaluate(batches, steps=4)
    expected = evaluate_plainly({name: some[:4] for name, some in batches.items()}, modules)
    comparison.add_losses([after], [expected])
    assert all(abs(before[name] - after[name]) > 1e-6 for name in before)
    return comparison, [part.training for module in modules.values() for part in module.modules()]


def evaluate_plainly(batches, modules) -> dict[str, float]:
    copies = {name: deepcopy(module).cpu().eval() for name, module in modules.items()}
    losses = {}
    with torch.no_grad():
        for task in pairs_and_answers()(copies):
            parts = [task(batch) for batch in batches[task.name]]
            if isinstance(parts[0], Mean):
                losses[task.name] = float(sum(part.total for part in parts) / sum(part.count for part in parts))
            else:
                losses[task.name] = float(sum(parts) / len(parts))
    return losses


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_evaluation_gives_the_losses_of_one_process(pool, num_ranks):
    answers = pool.run(num_ranks, evaluate)
    assert_close([comparison for comparison, _ in answers], kinds=("loss",))
    for _, modes in answers:
        assert modes == [True, True, True, True, True, True, False, True]


def evaluate_and_stop(rank: int, num_ranks: int, planning: dict[str, Any]) -> tuple[Comparison, int]:
    """A fit that evaluates, takes weights and stops in `on_step`, and one after it, compared with a plain loop."""
    comparison = Comparison(adam_learning_rate=LEARNING_RATE)
    modules = two_towers()
    references = deepcopy(modules)
    tasks = pairs_and_answers()({name: spindle.module(name, module) for name, module in modules.items()})
    batches = {task.name: [normal_batch(task.name, number) for number in range(5)] for task in tasks}
    in_fit: list[tuple[dict[str, float], dict[str, torch.Tensor]]] = []

    def on_step(step: int, _: dict[str, float]) -> None:
        if step == 1:
            in_fit.append((trainer.evaluate(batches), trainer.state_dict()))
        if step == 3 and rank == num_ranks - 1:  # one rank's wish is enough
            trainer.stop()

    with unmeasured():
        trainer = spindle.Trainer(tasks, optimizer=adamw, planning=spindle.Planning(**planning))
        result = trainer.fit(batches, steps=20, progress=False, on_step=on_step)
        again = trainer.fit(batches, steps=2, progress=False)
    ((losses, state),) = in_fit
    then = nn.ModuleDict(deepcopy(references))
    then.load_state_dict(state)
    comparison.add_losses([losses], [evaluate_plainly(batches, then)])
    num_steps = len(result.losses)
    expected = train_plainly(references, batches, [*(number % 5 for number in range(num_steps)), 0, 1])
    comparison.add_losses([*result.losses, *again.losses], expected)
    parameters = dict(nn.ModuleDict(modules).named_parameters())
    comparison.add_tensors("parameter", parameters, dict(nn.ModuleDict(references).named_parameters()))
    return comparison, num_steps


def train_plainly(modules, batches, numbers) -> list[dict[str, float]]:
    tasks = pairs_and_answers()(modules)
    optimizer = adamw(nn.ModuleDict(modules).named_parameters())
    losses = []
    for number in numbers:
        values = {task.name: task(batches[task.name][number]) for task in tasks}
        values = {name: loss.total / loss.count if isinstance(loss, Mean) else loss for name, loss in values.items()}
        optimizer.zero_grad()
        sum(task.weight * values[task.name] for task in tasks).backward()
        optimizer.step()
        losses.append({name: float(loss) for name, loss in values.items()})
    return losses


@pytest.mark.parametrize(
    ("num_ranks", "planning"),
    [
        (1, {}),
        (3, {}),
        (2, {"shard_optimizer": True}),
        (2, {"planner": "pipeline"}),
    ],
)
def test_a_fit_is_evaluated_and_stopped_in_on_step(pool, num_ranks, planning):
    answers = pool.run(num_ranks, evaluate_and_stop, planning)
    assert_close([comparison for comparison, _ in answers])
    (num_steps,) = {num_steps for _, num_steps in answers}
    assert 4 <= num_steps <= 8  # after the losses of step 3 are known


def read_on_one_rank(rank: int, num_ranks: int, *, differs: str) -> str:
    """What a fit says whose plan lets one rank read, when another rank's loader differs."""
    torch.manual_seed(0)
    encoder = spindle.module("encoder", nn.Linear(3, 2).double(), whole_batch=True)
    task = spindle.task(batch_size=4, name="pull")(lambda batch: encoder(batch["x"]).square().mean())
    batches = [{"x": torch.full((4, 3), float(number), dtype=torch.float64)} for number in range(4)]
    if rank == 1:
        batches = batches[::-1] if differs == "values" else batches[:2]
    with unmeasured():
        trainer = spindle.Trainer([task], optimizer=sgd)
        try:
            trainer.fit({"pull": batches}, steps=2, progress=False)
        except TrainingError as error:
            return str(error)
    return ""


def test_other_data_on_a_rank_that_does_not_read_is_noticed(pool):
    for said in pool.run(2, read_on_one_rank, differs="values"):
        assert "the loader of task 'pull' gave rank 1 a different batch than rank 0" in said
    for said in pool.run(2, read_on_one_rank, differs="length"):
        assert "the length of the loader of task 'pull'" in said
        assert "rank 1" in said


# In one process.


def small(**options):
    torch.manual_seed(0)
    encoder = spindle.module("encoder", nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))

    @spindle.task(batch_size=4, tokens=lambda batch: batch["x"].numel())
    def pull(batch):
        return (encoder(batch["x"]) ** 2).mean()

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
        ({"autocast": torch.float64}, r"expected torch.bfloat16 or torch.float16"),
        ({"sampling_weights": {"push": 1.0}}, r"expected a weight for each task \(pull\), got push"),
        ({"sampling_weights": {"pull": 1.0}, "tasks_per_step": 2}, r"tasks_per_step=2\): must be from 1 to 1"),
    ],
)
def test_an_option_that_cannot_be_is_explained(options, message):
    with pytest.raises(TrainingError, match=message):
        small(**options)


def test_a_schedule_of_a_metric_is_stepped_with_it():
    made = []

    def optimizer(named):
        made.append(sgd(named))
        return made[-1]

    trainer = small(
        optimizer=optimizer, lr_scheduler=lambda of: torch.optim.lr_scheduler.ReduceLROnPlateau(of, patience=0)
    )
    with pytest.raises(TrainingError, match="no learning-rate scheduler before the first step"):
        trainer.step_lr_scheduler(1.0)
    with unmeasured():
        trainer.fit(BATCHES, steps=4, progress=False)
        rate = made[-1].param_groups[0]["lr"]
        trainer.fit(BATCHES, steps=4, progress=False, on_step=lambda step, losses: trainer.step_lr_scheduler(1.0))
    assert made[-1].param_groups[0]["lr"] == pytest.approx(rate * 0.1**3)  # not with the first metric


def rates_of_plateau(rank, num_ranks):
    """The learning rates after metrics that do not improve, of which the last is known under another plan."""
    made = []

    def optimizer(named):
        made.append(sgd(named))
        return made[-1]

    trainer = small(
        optimizer=optimizer, lr_scheduler=lambda of: torch.optim.lr_scheduler.ReduceLROnPlateau(of, patience=1)
    )
    with unmeasured():
        graph = trainer.prepare(BATCHES, progress=False).graph
        rates = []
        for devices in ("0", "0,1", "1", "0"):
            places = [devices[0] if "loss" in op.name else devices for op in graph.metaops]
            lines = [f"{op.name}*{op.num_layers}@{place}" for op, place in zip(graph.metaops, places, strict=True)]
            trainer.replan(plan="\n".join(lines))
            trainer.fit(BATCHES, steps=1, progress=False)
            trainer.step_lr_scheduler(1.0)
            rates.append([group["lr"] for group in made[-1].param_groups] if str(rank) in devices else [])
    return rates


def test_a_schedule_of_a_metric_goes_on_under_another_plan(pool):
    for rank, (first, second, third, fourth) in enumerate(pool.run(2, rates_of_plateau)):
        rate = sgd([("w", torch.nn.Parameter(torch.ones(1)))]).param_groups[0]["lr"]
        assert first == ([pytest.approx(rate)] if rank == 0 else [])
        assert second == [pytest.approx(rate)]
        assert third == ([pytest.approx(rate * 0.1)] if rank == 1 else [])
        assert fourth == ([pytest.approx(rate * 0.1)] if rank == 0 else [])


def test_schedules_without_a_metric_step_by_themselves():
    trainer = small(lr_scheduler=lambda of: torch.optim.lr_scheduler.StepLR(of, 2))
    with unmeasured():
        trainer.fit(BATCHES, steps=1, progress=False)
    with pytest.raises(TrainingError, match="made no ReduceLROnPlateau"):
        trainer.step_lr_scheduler(1.0)


def test_there_is_nothing_to_stop_between_fits():
    with pytest.raises(TrainingError, match="there is no fit to end"):
        small().stop()


def test_a_distributed_sampler_is_refused():
    dataset = torch.utils.data.TensorDataset(torch.ones(8, 3))
    sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=2, rank=0)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
    with pytest.raises(TrainingError, match="DistributedSampler, which gives each rank different samples"):
        small().fit({"pull": loader}, steps=1, progress=False)


def test_weights_that_leave_no_task_to_draw_are_refused():
    trainer = small(sampling_weights={"pull": lambda step: 1.0 if step < 2 else 0.0})
    with unmeasured(), pytest.raises(TrainingError, match="step 2 needs 1 tasks with weights above 0"):
        trainer.fit(BATCHES, steps=4, progress=False)


def test_tasks_are_drawn_as_often_as_they_weigh():
    names = ["a", "b", "c"]
    drawn = [tasks_in_step({"a": 6.0, "b": 3.0, "c": 1.0}, names, 1, 0, step) for step in range(2000)]
    shares = [sum(name in step for step in drawn) / len(drawn) for name in names]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.03)
    pairs = [tasks_in_step({"a": 1.0, "b": 1.0, "c": 0.0}, names, 2, 0, step) for step in range(20)]
    assert pairs == [["a", "b"]] * 20
    assert drawn != [tasks_in_step({"a": 6.0, "b": 3.0, "c": 1.0}, names, 1, 1, step) for step in range(2000)]
