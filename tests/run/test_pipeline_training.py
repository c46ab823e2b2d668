"""A Trainer with planner `pipeline`: what is accumulated becomes microbatches of one pipeline, planned in a process of
its own while the step before runs. The numbers are those of a plain PyTorch loop in one process."""

from __future__ import annotations

import os
import signal
import time

import pytest

torch = pytest.importorskip("torch")


from hypothesis import Phase, given, settings  # noqa: E402

import spindle  # noqa: E402
from spindle.errors import DoesNotFitError, TrainingError  # noqa: E402
from spindle.planners import PlanOptions, pipeline_layout  # noqa: E402
from spindle.planners.pipeline.worker import Job, answers  # noqa: E402
from spindle.train.background_planner import BackgroundPlanner  # noqa: E402
from sweeps import RUNS_ALL  # noqa: E402
from task_graphs import train_task_graph  # noqa: E402
from test_pipeline_flows import tasks_of_modules  # noqa: E402
from test_pipeline_plans import batch  # noqa: E402
from training_cases import train_named  # noqa: E402
from trainings import assert_trained  # noqa: E402


@pytest.mark.parametrize(
    ("name", "num_ranks", "plan"),
    [
        ("accumulated", 2, "pipeline"),
        ("mixed, clipped and accumulated", 3, "pipeline"),
        ("sampled, accumulated", 4, "pipeline 2"),
        ("sampled, clipped and scheduled", 3, "pipeline"),  # some ranks have no pass in some steps
        ("mixed, clipped and accumulated", 2, "pipeline 1"),
        ("tied", 2, "pipeline"),
        ("one task, accumulated", 2, "pipeline 1"),
        ("one task, accumulated", 3, "pipeline 1"),  # a replica without a microbatch
    ],
)
def test_microbatches_of_a_pipeline_give_the_numbers_of_accumulated_batches(pool, name, num_ranks, plan):
    answers = pool.run(num_ranks, train_named, name, plan)
    assert_trained(answers)
    assert all(answer.pipelined for answer in answers)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("num_layers", "tasks"),
    [
        # A tower with a head behind it, and one without.
        ({"image": 3, "head": 1, "text": 2}, [[("image", []), ("head", [0]), ("text", [])]]),
        # The first task calls as its first module what the second calls behind another.
        (
            {"m1": 1, "m3": 2, "m4": 1, "m5": 2},
            [[("m3", [])], [("m1", []), ("m5", [0]), ("m3", [0]), ("m4", [2])]],
        ),
        # Opposite orders, and a module that reads itself.
        ({"a": 2, "b": 1}, [[("a", []), ("b", [0])], [("b", []), ("a", [0]), ("a", [1])]]),
    ],
)
def test_modules_that_are_called_in_any_order_train_like_one_process(pool, num_layers, tasks, num_ranks):
    assert_trained(pool.run(num_ranks, train_task_graph, num_layers, tasks))


@settings(max_examples=40 if RUNS_ALL else 8, phases=(Phase.generate,))
@given(tasks_of_modules(min_modules=2))
def test_random_task_graphs_train_like_one_process(pool, drawn):
    tasks, num_layers = drawn
    assert_trained(pool.run(1, train_task_graph, num_layers, tasks))


@settings(max_examples=10 if RUNS_ALL else 2, phases=(Phase.generate,))
@given(tasks_of_modules(min_modules=2))
def test_random_task_graphs_train_like_one_process_on_two_ranks(pool, drawn):
    tasks, num_layers = drawn
    assert_trained(pool.run(2, train_task_graph, num_layers, tasks))


def job(number=0, evaluations=300, **named):
    profile = batch((24, 7, 0, 30, 12, 19), **named)
    layout = pipeline_layout(batch((24, 7, 0, 30, 12, 19)), 4)
    options = PlanOptions(evaluations=evaluations, layouts=(layout,))
    return Job(number=number, profile=profile, owning_ranks={}, options=options)


@pytest.fixture
def planning():
    planner = BackgroundPlanner(patience_s=1.0)
    yield planner
    planner.close()
    assert planner._process is None


def test_there_is_a_plan_before_the_search_is_over(planning):
    planning.request_plan(job(evaluations=2_000_000))
    began = time.monotonic()
    program, is_final = planning.best(0)
    assert program.plan.passes
    assert not is_final
    assert time.monotonic() - began < 100  # and not until millions were tried


def test_the_search_ends_with_a_plan_as_good_or_better(planning):
    planning.request_plan(job(evaluations=50))
    natural, _ = planning.best(0)
    limit = time.monotonic() + 100
    while not planning.best(0)[1]:
        assert time.monotonic() < limit
        time.sleep(0.01)
    best, _ = planning.best(0)
    assert best.plan.makespan_s <= natural.plan.makespan_s
    planning.keep([])
    assert not planning._answers


def test_a_step_that_comes_is_planned_before_another_is_searched():
    waiting = list(answers(job(evaluations=50), lambda: True))
    assert [answer.is_final for answer in waiting] == [False]
    alone = list(answers(job(evaluations=50), lambda: False))
    assert [answer.is_final for answer in alone] == [False, True]


def test_a_planning_process_that_ends_before_its_first_answer_costs_no_step(planning):
    planning.request_plan(job(evaluations=50))
    os.kill(planning._process.pid, signal.SIGKILL)
    with pytest.warns(UserWarning, match="has ended; it is started again"):
        program, is_final = planning.best(0)
    assert program.plan.passes
    assert not is_final
    limit = time.monotonic() + 100
    while not planning.best(0)[1]:  # the new process searches what the old one was to search
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_planning_process_that_hangs_costs_no_step(planning):
    planning.request_plan(job(evaluations=1))
    planning.best(0)
    process = planning._process
    os.kill(process.pid, signal.SIGSTOP)
    for number in range(1, 20):  # more than its pipe holds
        planning.request_plan(job(number, evaluations=1))
    with pytest.warns(UserWarning, match="has not answered for 1 s; it is started again"):
        assert planning.best(1)[0].plan.passes
    assert process.has_ended
    assert planning._process is not process


def test_without_a_planning_process_steps_run_in_their_natural_order(planning):
    for number in range(3):
        planning.request_plan(job(number, evaluations=50))
        os.kill(planning._process.pid, signal.SIGKILL)
        with pytest.warns(UserWarning, match="has ended"):
            assert planning.best(number)[0].plan.passes
    assert planning._process is None
    planning.request_plan(job(3, evaluations=50))
    program, is_final = planning.best(3)
    assert program.plan.passes
    assert is_final


def test_the_planning_process_imports_nothing_from_the_folder_of_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("queue", "pickle", "numpy"):
        (tmp_path / f"{name}.py").write_text("import os; os.mkdir('planted')")
    planner = BackgroundPlanner()
    planner.request_plan(job(evaluations=1))
    planner.best(0)
    planner.close()
    assert not (tmp_path / "planted").exists()


def test_what_does_not_fit_is_reported_by_the_planning_process(planning):
    planning.request_plan(job(saved_bytes=1e9, memory_bytes=1000))
    with pytest.raises(DoesNotFitError):
        planning.best(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"planner": "pipeline", "tensor_parallel_degrees": {"one": 2}}, "run on one device each"),
        ({"pipeline_parallel_degree": 2}, r'pipeline_parallel_degree=2\): requires planner="pipeline"'),
    ],
)
def test_settings_that_pipelines_do_not_have_are_refused(options, message):
    with pytest.raises(TrainingError, match=message):
        spindle.Planning(**options)
