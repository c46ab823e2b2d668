"""Modules that their calls change (running statistics, queues, counters): their calls in a step run in the order of the
script on one device, so that they find what one process finds."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spindle  # noqa: E402
from comparison import Comparison, assert_close  # noqa: E402
from internals import guessed_profile  # noqa: E402
from random_plans import plan_text_named  # noqa: E402
from spindle.errors import PlanError, WorkloadError  # noqa: E402
from spindle.plan import check, parse_plan  # noqa: E402
from spindle.planners import PLANNERS, make_plan, planners_of  # noqa: E402
from sweeps import spread  # noqa: E402
from trainings import sgd  # noqa: E402

ROWS, STEPS, WIDTH = 6, 3, 8


class Counter(nn.Module):
    """Has another number in every call, as a plain attribute."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Queue(nn.Module):
    """Compares with what earlier calls were given; the queue is a buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rows", torch.zeros(4, WIDTH))

    def forward(self, x):
        x = self.linear(x)
        similar = x @ self.rows.T
        self.rows = torch.cat([x.detach().mean(0, keepdim=True), self.rows[:-1]])
        return x + similar @ torch.ones(4, WIDTH, dtype=x.dtype, device=x.device)


def spectral() -> nn.Module:
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), norm(nn.Linear(WIDTH, WIDTH)))


def normalising() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def tower(num_layers: int = 2) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers)))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "spectral": spectral,
    "normalising": normalising,
    "queue": Queue,
    "counter": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Counter()),
}


def twice(call: Callable[..., Any]) -> list[tuple[str, Callable[[Any], Any]]]:
    """Called on what two towers make of unequal work, so that the second call could come first."""

    def pair(batch):
        late = call("shared", call("long", batch["x"]))
        soon = call("shared", batch["x"] - 1)
        return (late - call("short", soon)).square().mean()

    return [("pair", pair)]


def in_two_tasks(call: Callable[..., Any]) -> list[tuple[str, Callable[[Any], Any]]]:
    def first(batch):
        return call("shared", call("long", batch["x"])).square().mean()

    def second(batch):
        return (call("short", call("shared", batch["x"])) - batch["x"]).square().mean()

    return [("first", first), ("second", second)]


def through_a_composite(call: Callable[..., Any]) -> list[tuple[str, Callable[[Any], Any]]]:
    """The second call is that of a module which has the first one's module inside."""

    def pair(batch):
        return (call("shared", call("long", batch["x"])) - call("holder", batch["x"])).square().mean()

    return [("pair", pair)]


def modules_named(kind: str) -> dict[str, nn.Module]:
    shared = MODULES[kind]()
    holder = nn.Sequential(shared, nn.Tanh())
    return nn.ModuleDict({"shared": shared, "long": tower(5), "short": tower(1), "holder": holder}).double()


def batch_of(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))}


def trainer_of(modules: Any, make_tasks: Any, **options: Any) -> spindle.Trainer:
    handles = {name: spindle.module(name, modules[name]) for name in modules}
    functions = make_tasks(lambda name, *args: handles[name](*args))
    tasks = [spindle.task(batch_size=ROWS, name=name)(function) for name, function in functions]
    planning = options.pop("planning", spindle.Planning(profile=guessed_profile))
    return spindle.Trainer(tasks, optimizer=sgd, planning=planning, **options)


def loaders_of(make_tasks: Any) -> dict[str, Any]:
    return {name: [batch_of(number) for number in range(STEPS)] for name, _ in make_tasks(None)}


def train(rank: int, num_ranks: int, kind: str, make_tasks: Any, plan: str) -> tuple[Comparison, list[str]]:
    torch.manual_seed(0)
    modules = modules_named(kind)
    plain = deepcopy(modules)
    trainer = trainer_of(modules, make_tasks)
    loaders = loaders_of(make_tasks)
    profile = trainer.prepare(loaders, progress=False)
    if plan in PLANNERS:
        trainer.replan(plan=make_plan(profile, plan))
    else:
        trainer.replan(plan=plan_text_named(profile, plan))
    losses = trainer.fit(loaders, steps=STEPS, progress=False).losses
    functions = make_tasks(lambda name, *args: plain[name](*args))
    optimizer = sgd(list(plain.named_parameters()))
    expected = []
    for number in range(STEPS):
        optimizer.zero_grad()
        values = {name: function(batch_of(number)) for name, function in functions}
        torch.stack(list(values.values())).sum().backward()
        optimizer.step()
        expected.append({name: value.item() for name, value in values.items()})
    comparison = Comparison()
    comparison.add_losses(losses, expected)
    used = {op.module.split(".")[0] for op in profile.graph.metaops if op.module}
    for name in used & set(modules):
        for what in ("parameter", "buffer"):
            ours, theirs = (dict(getattr(each[name], f"named_{what}s")()) for each in (modules, plain))
            comparison.add_tensors(what, ours, theirs, f" of {name}")
    return comparison, trainer.notices


@pytest.mark.parametrize(
    ("kind", "make_tasks", "num_ranks"),
    spread(product([*MODULES], [twice, in_two_tasks, through_a_composite], [1, 2, 3]), 5),
)
def test_calls_that_change_a_module_find_what_they_find_in_one_process(pool, kind, make_tasks, num_ranks):
    for plan in ("plan 1", "plan 2 recomputed", "plan 3", "wavefront"):
        answers = pool.run(num_ranks, train, kind, make_tasks, plan)
        assert_close([comparison for comparison, _ in answers])
    notices = [text for text in answers[0][1] if "is changed by each of its calls in a step" in text]
    assert bool(notices) == (num_ranks > 1)


@pytest.mark.parametrize("planner", [name for name in planners_of(False) if name not in ("exhaustive", "wavefront")])
def test_every_planner_keeps_the_order_of_calls_that_change_a_module(pool, planner):
    for make_tasks in (twice, in_two_tasks):
        answers = pool.run(2, train, "spectral", make_tasks, planner)
        assert_close([comparison for comparison, _ in answers])


def profile_of(kind: str, make_tasks: Any, num_devices: int = 1, **options: Any) -> Any:
    trainer = trainer_of(modules_named(kind), make_tasks, **options)
    trainer.prepare(loaders_of(make_tasks), progress=False)
    return guessed_profile(trainer.profile.graph, num_devices), trainer


def test_a_plan_that_moves_a_call_to_another_device_or_place_is_refused():
    profile, _ = profile_of("spectral", in_two_tasks, num_devices=2)

    def text(*modules: tuple[str, str, int]) -> str:
        """Whole calls by task, module and device, in this order."""
        return "\n".join(
            f"{op.name}*{op.num_layers}@{device}"
            for task, module, device in modules
            for op in profile.graph.metaops
            if (op.task, op.module) == (task, module)
        )

    begin, end = (
        ("first", "long", 0),
        (("first", "loss.first", 0), ("second", "short", 0), ("second", "loss.second", 0)),
    )
    ours, theirs = ("first", "shared", 0), ("second", "shared", 0)
    check(parse_plan(text(begin, ours, theirs, *end), profile), profile)
    with pytest.raises(
        PlanError, match=r"change the same state of 'shared' .* got device 0 lane 0 and device 1 lane 0"
    ):
        check(parse_plan(text(begin, ours, ("second", "shared", 1), *end), profile), profile)
    with pytest.raises(
        PlanError, match=r"second/shared#0.* runs before first/shared#0.*, which changes its state first"
    ):
        check(parse_plan(text(begin, theirs, ours, *end), profile), profile)


def test_a_module_that_a_step_calls_once_may_be_spread_over_devices():
    def once(call):
        return [("only", lambda batch: call("shared", batch["x"]).square().mean())]

    profile, _ = profile_of("spectral", once)
    assert not profile.graph.order_edges
    assert all(op.cost is None or not op.cost.state for op in profile.graph.metaops)


@pytest.mark.parametrize("kind", ["spectral", "queue", "counter"])
def test_a_pipeline_refuses_a_module_whose_outputs_follow_from_the_order_of_its_calls(kind):
    planning = spindle.Planning(planner="pipeline", profile=guessed_profile)
    with pytest.raises(WorkloadError, match=r"module 'shared' is changed by each of its 2 calls in a step .*wavefront"):
        profile_of(kind, in_two_tasks, planning=planning)


def test_a_pipeline_says_which_running_statistics_follow_its_own_order():
    planning = spindle.Planning(planner="pipeline", profile=guessed_profile)
    _, trainer = profile_of("normalising", in_two_tasks, planning=planning)
    (notice,) = [text for text in trainer.notices if "running statistics of module 'shared'" in text]
    assert "in the order in which they run" in notice


def test_planners_of_pipelines_refuse_a_workload_with_an_order_of_calls():
    profile, _ = profile_of("spectral", twice, num_devices=2)
    with pytest.raises(PlanError, match=r"planner 'pipeline': pair/shared#1.* runs behind pair/shared#0"):
        make_plan(profile, "pipeline")


class Taught(nn.Module):
    """A student, and a teacher of buffers that follows it."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, deepcopy(student)
        for part in list(self.teacher.modules()):
            for name, parameter in list(part.named_parameters(recurse=False)):
                delattr(part, name)
                part.register_buffer(name, parameter.detach().clone())

    def forward(self, x):
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.buffers(), self.student.parameters(), strict=True):
                theirs.lerp_(ours, 0.1)
            target = self.teacher(x + 0.1)
        return (self.student(x) - target).square().mean()


def taught(call: Callable[..., Any]) -> list[tuple[str, Callable[[Any], Any]]]:
    return [("teach", lambda batch: call("shared", batch["x"]))]


MODULES["taught"] = lambda: Taught(tower(3))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_momentum_teacher_in_buffers_is_that_of_one_process(pool, num_ranks):
    assert_close([comparison for comparison, _ in pool.run(num_ranks, train, "taught", taught, "plan 1")])
