"""`spindle fleet` as a stranger meets it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spindle.artifact import artifact_text
from spindle.cli.fleet.submission import Prepared, fitting
from spindle.cli.main import run
from spindle.fleet import Job, SchedulerOptions, State, arena_fleet, arena_trace, elasticflow_trace
from spindle.fleet.estimates import bound_estimates, workload_step
from spindle.fleet.fleet_file import fleet_named
from spindle.fleet.public_traces import arena_models
from spindle.fleet.store import Submission
from spindle.recipes import RECIPES

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
JOBS = [
    {"name": "a", "time_s": 0, "num_steps": 9000, "times": [["a100", 4, 1.0], ["a100", 8, 0.6], ["l40s", 4, 2.0]]},
    {"name": "b", "time_s": 9, "num_steps": 9000, "times": [["a100", 8, 0.5], ["l40s", 8, 0.9]]},
    {"name": "c", "time_s": 9, "num_steps": 900, "requested": ["a100", 1], "times": [["a100", 1, 1.0]]},
    {"name": "d", "time_s": 30, "num_steps": 90000, "times": [["l40s", 8, 1.0]], "priority": "low"},
]


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def trace(tmp_path) -> str:
    path = tmp_path / "jobs.jsonl"
    path.write_text("".join(json.dumps(job) + "\n" for job in JOBS))
    return str(path)


def test_a_trace_is_simulated_recorded_replayed_and_explained(trace, tmp_path, capsys):
    events, timeline = str(tmp_path / "events.jsonl"), str(tmp_path / "timeline.json")
    fleet = ["--fleet", "a100x8,l40sx8"]
    assert run(["fleet", "simulate", trace, *fleet, "--events", events, "-o", timeline, "--json"]) == 0
    measures = json.loads(capsys.readouterr().out)
    assert measures["num_jobs"] == 4
    assert measures["jct_mean_s"] > 0
    assert json.loads(Path(timeline).read_text())["spindle"] == "fleet-timeline"
    assert run(["fleet", "replay", events]) == 0
    assert capsys.readouterr().out.startswith("the same: ")
    assert run(["fleet", "explain", events, "d", "--at", "100"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("d is waiting: ")
    assert "What would help:" in text
    assert "a lease" in text
    assert run(["fleet", "nodes", events, "--at", "100", "--json"]) == 0
    kinds = json.loads(capsys.readouterr().out)["kinds"]
    assert [kind["kind"] for kind in kinds] == ["A100-80GB", "L40S"]
    Path(events).write_text(Path(events).read_text().replace('"num_devices":8', '"num_devices":4'))
    assert run(["fleet", "replay", events]) == 1


def test_all_policies_are_compared_in_one_table(trace, capsys):
    assert run(["fleet", "compare", trace, "--fleet", "a100x8,l40sx8", "--error", "0.1"]) == 0
    text = capsys.readouterr().out
    for name in ("price", "sia", "crius", "gavel", "backfill", "fcfs", "JCT, h: mean", "longest wait, h"):
        assert name in text


def test_a_job_is_estimated_on_every_kind_and_count(capsys):
    arguments = ["fleet", "estimate", "clip-4", "--fleet", "a100x8,h100x8", "--json"]
    assert run([*arguments, "--count", "2-8"]) == 0
    estimates = json.loads(capsys.readouterr().out)["estimates"]
    cells = [(item["cell"]["kind"], item["cell"]["num_devices"]) for item in estimates]
    assert cells == [(kind, count) for kind in ("A100-80GB", "H100-SXM") for count in (2, 3, 4, 6, 8)]
    assert all(item["grade"] == "bound" for item in estimates)
    assert run([*arguments, "--count", "8", "--kinds", "h100", "--planned"]) == 0
    (planned,) = json.loads(capsys.readouterr().out)["estimates"]
    assert planned["step_s"] >= estimates[-1]["step_s"]
    assert planned["memory_bytes"] > 0


FLEET = """
[[islands]]
kind = "a100"
num_devices = 4
link = {bytes_per_s = 1e9}
uplink = {bytes_per_s = 1e9}
[[teams]]
name = "vision"
"""


def test_what_a_trace_or_a_cell_may_have_is_said_where_it_has_something_else(tmp_path, capsys):
    path = tmp_path / "jobs.jsonl"
    path.write_text(json.dumps({**JOBS[0], "prio": "high"}))
    assert run(["fleet", "simulate", str(path), "--fleet", "a100x8,l40sx8"]) == 2
    text = capsys.readouterr().err
    assert "line 1: unknown column 'prio'; the columns are name, time_s, num_steps, times, model, requested" in text
    assert run(["fleet", "estimate", "clip-4", "--fleet", "a100x8,l40sx8", "--count", "5"]) == 2
    assert "a job may have 1, 2, 3, 4, 6, 8 of A100-80GB; 1, 2, 3, 4, 6, 8 of L40S" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"name": "a", "num_steps": 5, "times": [["a100", 4, 1.0]]}, "line 1: the column 'time_s' is missing"),
        ({"name": "a", "time_s": -1, "num_steps": 5, "times": [["a100", 4, 1.0]]}, "must not be negative, got -1"),
        ({"name": "a", "time_s": 0, "num_steps": 5}, "the column 'times' .* or 'model' is missing"),
        ({"name": "a", "time_s": 0, "num_steps": 5, "model": "gpt"}, "unknown model 'gpt'; known: none"),
        ({"name": "a", "time_s": 0, "num_steps": 0, "times": [["a100", 4, 1.0]]}, "num_steps must be at least 1"),
        ({"name": "a", "time_s": 0, "num_steps": 5, "times": [["a100", 0, 1.0]]}, "at least 1 device"),
        ({"name": "a", "time_s": 0, "num_steps": 5, "times": [["tpu", 4, 1.0]]}, "has times for tpu, the fleet has"),
        ({"name": "a", "time_s": 0, "num_steps": 5, "times": [["a100", 4, 1.0]], "team": "x"}, "unknown team 'x'"),
        ({"name": "a", "time_s": 0, "num_steps": 5, "times": [["a100", 4, 1.0]], "color": 1}, "unknown column 'color'"),
        ("[1", "line 1: not JSON"),
        ("", "has no jobs"),
    ],
)
def test_a_bad_trace_is_refused_in_one_line(line, message, tmp_path, capsys):
    path = tmp_path / "jobs.jsonl"
    path.write_text(line if isinstance(line, str) else json.dumps(line))
    _refused(["fleet", "simulate", str(path), "--fleet", "a100x8"], message, capsys)


def test_a_job_that_its_teams_limit_keeps_out_forever_is_refused(tmp_path, capsys):
    machines, path = tmp_path / "fleet.toml", tmp_path / "jobs.jsonl"
    machines.write_text(FLEET + "limits = {a100 = 2}")
    path.write_text(json.dumps(JOBS[0] | {"team": "vision", "times": [["a100", 4, 1.0]], "requested": ["a100", 4]}))
    message = "it needs at least 4 x A100-80GB, and its team 'vision' may have 2 x A100-80GB at most"
    _refused(["fleet", "simulate", str(path), "--fleet", str(machines)], message, capsys)


def test_a_trace_out_of_order_is_refused(tmp_path, capsys):
    path = tmp_path / "jobs.jsonl"
    path.write_text("".join(json.dumps(job) + "\n" for job in reversed(JOBS)))
    _refused(["fleet", "simulate", str(path), "--fleet", "a100x8,l40sx8"], "times must not decrease", capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a fleet needs at least one node"),
        ("islands = []", "a fleet needs at least one node"),
        (FLEET.replace('kind = "a100"\n', ""), r"islands\[0\].kind: unknown kind None"),
        (FLEET + "guaranteed = {h100 = 4}", "unknown kind of device 'h100'; the fleet has A100-80GB"),
        (FLEET + "guaranteed = {a100 = 8}", "guaranteed 8 devices of 'A100-80GB', the fleet has 4"),
        (
            FLEET.replace("num_devices", "shares = 5\nnum_devices"),
            r"islands\[0\].shares: a GPU is one device, or 2, 4, 8",
        ),
        (FLEET + "quota = 3", r"teams\[0\]: unknown key 'quota'"),
    ],
)
def test_a_bad_fleet_is_refused_in_one_line(text, message, trace, tmp_path, capsys):
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    _refused(["fleet", "simulate", trace, "--fleet", str(path)], message, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "TRACE", "--fleet", "a100x8", "--policy", "best"], "no policy is called 'best'; there are price"),
        (["simulate", "TRACE", "--fleet", "a100x8,l40sx8", "--objective", "fun"], "unknown objective 'fun'"),
        (["simulate", "none.jsonl", "--fleet", "a100x8"], "none.jsonl: no such file"),
        (["estimate", "clip-4", "--fleet", "a100x8", "--count", "0"], "--count: a job needs at least 1 device, got 0"),
        (["estimate", "clip-4", "--fleet", "a100x8", "--kinds", "tpu"], "unknown kind of device 'tpu'"),
        (["estimate", "clop", "--fleet", "a100x8"], "expected a training script"),
        (["estimate", "clip-4", "--fleet", "a100x8", "--profile", "a100"], "expected KIND=PROFILE.json"),
        (["estimate", "clip-4", "--fleet", "a100x8", "--profile", "tpu=TRACE"], "unknown kind of device 'tpu'"),
        (["estimate", "clip-4", "--fleet", "a100x8", "--profile", "a100=none.json"], "none.json: no such file"),
        (["estimate", "clip-4", "--fleet", "h200/3x6"], "a GPU is one device, or 2, 4, 8 shares; got 3"),
        (["estimate", "clip-4", "--fleet", "h200/8x12"], "12 devices are no whole GPUs of 8 shares each"),
        (["replay", "TRACE"], "expected a Spindle fleet-events"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_in_one_line(arguments, message, trace, capsys):
    _refused(["fleet", *(trace if word == "TRACE" else word for word in arguments)], message, capsys)


def _refused(arguments, message, capsys):
    capsys.readouterr()
    assert run(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    with pytest.raises(AssertionError, match=message):  # a readable difference where it does not match
        raise AssertionError(output.err)


def test_a_job_that_fits_nowhere_is_named_before_the_simulation(tmp_path, capsys):
    path = tmp_path / "jobs.jsonl"
    path.write_text(json.dumps({"name": "huge", "time_s": 0, "num_steps": 9, "times": [["a100", 64, 1.0]]}))
    _refused(["fleet", "simulate", str(path), "--fleet", "a100x16"], "'huge' fits in no cell.*64 x A100-80GB", capsys)


def test_a_job_without_a_time_for_what_it_requests_is_left_out_and_counted(trace, capsys):
    with Path(trace).open("a") as file:
        file.write(json.dumps({**JOBS[3], "name": "e", "requested": ["l40s", 2]}) + "\n")
    assert run(["fleet", "simulate", trace, "--fleet", "a100x8,l40sx8", "--json"]) == 0
    measures = json.loads(capsys.readouterr().out)
    assert (measures["num_jobs"], measures["num_excluded"]) == (4, 1)


def test_a_simulation_that_is_cut_says_so(trace, capsys):
    assert run(["fleet", "simulate", trace, "--fleet", "a100x8,l40sx8", "--until", "5"]) == 0
    assert "cut at 5 s: jobs that were not done by then" in capsys.readouterr().out


@pytest.fixture
def tables(tmp_path) -> Path:
    """One model on one A100, in the format of Arena's measured times."""
    (tmp_path / "optimal_iter_time_s.json").write_text(json.dumps({"bert_1.3B_64": {"1_a100_1_n_1_d": 2.0}}))
    return tmp_path


def test_a_table_of_step_times_in_another_format_is_refused(tables, capsys):
    (tables / "optimal_iter_time_s.json").write_text(json.dumps({"bert_1.3B_64": {"a100": 2.0}}))
    (tables / "part.csv").write_text("model_name\n")
    _refused(["fleet", "simulate", str(tables / "part.csv")], "bert_1.3B_64: expected seconds per step by", capsys)


def test_a_job_that_has_ended_is_explained(trace, tmp_path, capsys):
    events = str(tmp_path / "events.jsonl")
    assert run(["fleet", "simulate", trace, "--fleet", "a100x8,l40sx8", "--events", events, "--json"]) == 0
    capsys.readouterr()
    assert run(["fleet", "explain", events, "a"]) == 0
    assert capsys.readouterr().out == "a has completed: its script has ended.\n"


def test_the_csv_that_is_given_is_the_one_that_is_read(tables, capsys):
    path = tables / "part.csv"
    header = "job_id,submission_time,num_iteration,model_name,batch_size,num_gpu,gpu_type\n"
    path.write_text(header + "abc,100,50,bert_1.3B,64,1,a100\nabd,200,50,bert_1.3B,64,2,a100\n")
    assert run(["fleet", "simulate", str(path), "--json"]) == 0
    measures = json.loads(capsys.readouterr().out)
    assert (measures["num_jobs"], measures["num_excluded"]) == (1, 1)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "at two times at least, got 0"),
        ("abc,5,100,1\n", "at two times at least, got"),
        ("abc,5,100,inf\n", "line 2, num_gpu: expected a finite number that is not negative, got 'inf'"),
        ("abc,5\n", "line 2: the column 'duration' is missing"),
    ],
)
def test_a_csv_that_cannot_be_scaled_to_a_load_is_refused(lines, message, tables, capsys):
    path = tables / "cluster.csv"
    path.write_text("job_id,submission_time,duration,num_gpu\n" + lines)
    _refused(["fleet", "simulate", str(path), "--tables", str(tables)], message, capsys)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not in ../shared/traces beside the checkout")
def test_public_traces_are_read_with_what_was_drawn_said():
    trace = arena_trace(TRACES / "arena" / "sim_trace_1938jobs.csv")
    assert (len(trace.jobs), trace.num_excluded) == (1867, 71)
    models = arena_models(TRACES / "arena")
    assert sum(bool(times) for times in models.values()) == 39
    drawn = elasticflow_trace(TRACES / "elasticflow" / "cluster03.csv", TRACES / "arena", 256, 0.9, seed=1)
    assert "drawn from seed 1" in drawn.notes[0]
    load = sum(
        job.num_steps * job.job.requested_devices * _requested_s(job) for job in drawn.jobs
    ) / (256 * drawn.jobs[-1].arrival_s)  # fmt: skip
    assert load == pytest.approx(0.9, rel=0.01)
    assert arena_fleet().cluster.num_devices == 1280


def _requested_s(job):
    (step_s,) = [
        time.step_s
        for time in job.times
        if (time.kind, time.num_devices) == (job.job.requested_kind, job.job.requested_devices)
    ]
    return step_s


def test_a_deadline_is_promised_in_the_least_cell_that_meets_it():
    """The largest cell is planned first, as any job's; those whose bound is too slow are not planned at all."""
    machines = fleet_named("a100x4")
    workload = RECIPES["clip-4"].workload()
    submission = Submission(
        command=("train.py",),
        is_script=True,
        folder="/",
        logs="/logs",
        environment={},
        workload=json.loads(artifact_text("workload", workload)),
    )
    free = Job(name="a", num_steps=1000)
    bounds = bound_estimates(workload_step(workload), machines, free)
    alone_s = next(bound.step_s for bound in bounds if bound.cell.num_devices == 1)
    state = State(fleet=machines, options=SchedulerOptions(realloc_s=0.0, max_interval_s=30.0))
    job = replace(free, deadline_s=1000 * alone_s - 1.0 + 30.0)
    prepared = fitting(state, Prepared(job=job, estimates=bounds, submission=submission))
    assert [plan.cell.num_devices for plan in prepared.plans] == [4, 2]
    assert prepared.promise == "the deadline will be met, on 2 x A100-80GB or better"
    late = fitting(state, Prepared(job=replace(free, deadline_s=31.0), estimates=bounds, submission=submission))
    assert [plan.cell.num_devices for plan in late.plans] == [4]
    assert late.promise.startswith("the deadline will be missed by about")
