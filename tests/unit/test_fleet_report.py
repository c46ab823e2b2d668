"""A fleet's timeline from its recorded events, and the data of its page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import fleets
from spindle.artifact import write_artifact
from spindle.cli.main import run
from spindle.errors import InputError
from spindle.fleet import (
    Injection,
    Job,
    SchedulerOptions,
    State,
    StepTime,
    Ticked,
    Trace,
    TraceJob,
    schedule,
    simulate_fleet,
)
from spindle.fleet.event_log import EventLog, action_line, log_lines, read_event_log
from spindle.fleet.events import Resumed, Suspended
from spindle.fleet.history import timeline_of_log
from spindle.fleet.store import Store
from spindle.report import FleetReport, fleet_page_data
from spindle.timeline import unpack

MACHINES = fleets.fleet({"big": [4, 4], "small": [2]})


def trace() -> Trace:
    times = tuple(StepTime(kind="big", num_devices=count, step_s=1.0 / count) for count in (1, 2, 4, 8))
    times += (StepTime(kind="small", num_devices=2, step_s=1.5),)
    return Trace(
        name="queue",
        jobs=tuple(
            TraceJob(
                job=Job(name=f"job{number}", num_steps=30_000, requested_kind="big", requested_devices=4),
                arrival_s=500.0 * number,
                num_steps=30_000,
                times=times,
            )
            for number in range(7)
        ),
    )


@pytest.mark.parametrize("policy", ["price", "fcfs"])
def test_the_timeline_of_recorded_events_is_that_of_the_simulation(policy, tmp_path):
    options = SchedulerOptions(policy=policy)
    injection = Injection(seed=3, estimation_error=0.3, failures_per_hour=1.0, repair_s=2000.0)
    entries = []
    simulated = simulate_fleet(
        trace(), MACHINES, options, injection, lambda *entry: entries.append(entry), explains=True
    ).timeline
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(log_lines(MACHINES, options, entries)) + "\n", encoding="utf-8")
    recorded = timeline_of_log(read_event_log(path), "queue")
    assert simulated.faults, "nodes have to fail in this test"
    assert recorded.rounds == simulated.rounds
    assert recorded.waits == simulated.waits
    assert any(wait.reason for wait in recorded.waits)
    assert recorded.nodes == simulated.nodes
    for ours, theirs in zip(recorded.spans, simulated.spans, strict=True):
        same = {"lost_s": 0.0, "rate_share": 0.0}  # truth that no event has
        assert replace(ours, **same) == replace(theirs, **same)
        assert ours.lost_s == pytest.approx(theirs.lost_s, abs=2.0)
    for ours, theirs in zip(recorded.jobs, simulated.jobs, strict=True):
        assert (ours.completion_s, ours.longest_wait_s) == pytest.approx((theirs.completion_s, theirs.longest_wait_s))
        assert ours.estimates == theirs.estimates


def test_a_store_is_shown_while_its_jobs_still_run(tmp_path):
    entries = []
    options = SchedulerOptions()
    simulate_fleet(trace(), MACHINES, options, observe=lambda *entry: entries.append(entry), until_s=9000.0)
    path, page = tmp_path / "fleet.sqlite", tmp_path / "fleet.html"
    with Store.create(path, MACHINES, options) as store:
        for event, actions in entries:
            store.append(event, actions)
    assert run(["report", str(path), "-o", str(page)]) == 0
    timeline = timeline_of_log(read_event_log(path), "fleet")
    assert {job.phase for job in timeline.jobs} >= {"running"}
    assert timeline.end_s == entries[-1][0].time_s
    assert "fleet.sqlite on test" in page.read_text(encoding="utf-8")


def test_a_job_that_a_user_has_stopped_does_not_wait():
    state, entries = State(fleet=MACHINES, options=SchedulerOptions()), []
    for event in (
        fleets.submitted("a", {(MACHINES.kinds[0].name, 1): 1.0}),
        Ticked(time_s=0.0),
        Suspended(time_s=100.0, job="a"),
        Ticked(time_s=130.0),
        Resumed(time_s=400.0, job="a"),
        Ticked(time_s=430.0),
        Suspended(time_s=500.0, job="a"),
        Ticked(time_s=600.0),
    ):
        state, actions = schedule(state, event)
        entries.append((event, tuple(map(action_line, actions))))
    timeline = timeline_of_log(EventLog(fleet=MACHINES, options=state.options, entries=tuple(entries)), "fleet")
    assert [(wait.start_s, wait.end_s) for wait in timeline.waits] == [(400.0, 430.0)]
    assert timeline.jobs[0].longest_wait_s == 30.0
    assert {entry.num_waiting for entry in timeline.rounds} == {0}


def test_a_store_without_jobs_has_nothing_to_show(tmp_path, capsys):
    path = tmp_path / "fleet.sqlite"
    Store.create(path, MACHINES, SchedulerOptions()).close()
    assert run(["report", str(path), "-o", str(tmp_path / "fleet.html")]) == 2
    assert "no job was submitted yet" in capsys.readouterr().err


def test_the_same_timeline_gives_the_same_bytes_and_no_device_does_two_things_at_once():
    timeline = simulate_fleet(trace(), MACHINES, explains=True).timeline
    data = fleet_page_data(FleetReport(title="queue", timelines={"price": timeline}))
    assert data == fleet_page_data(FleetReport(title="queue", timelines={"price": timeline}))
    header, columns = unpack(data, "page")
    assert header["kind"] == "fleet"
    rank, gap, duration = (columns[f"0.{name}"] for name in ("rank", "gap", "duration"))
    same_device = rank[1:] == rank[:-1]
    assert (gap[1:][same_device] >= 0).all()
    assert (duration > 0).all()
    held = sum(span.num_devices * (round(span.end_s * 1e6) - round(span.start_s * 1e6)) for span in timeline.spans)
    assert duration.sum() == held


def test_a_damaged_timeline_is_refused_in_a_sentence(tmp_path):
    timeline = simulate_fleet(trace(), MACHINES).timeline
    for damaged, message in (
        (replace(timeline, nodes=()), "does not say which nodes"),
        (replace(timeline, nodes=timeline.nodes[1:]), "names the node 'node0'"),
        (replace(timeline, jobs=timeline.jobs[1:]), "names the job 'job0'"),
        (replace(timeline, spans=timeline.spans * 2), "of which 0 are free"),
    ):
        with pytest.raises(InputError, match=message):
            fleet_page_data(FleetReport(title="queue", timelines={"price": damaged}))


def test_the_command_writes_a_page_of_timelines_and_refuses_others(tmp_path, capsys):
    timeline = simulate_fleet(trace(), MACHINES, explains=True).timeline
    first, second, page = (str(tmp_path / name) for name in ("price.json", "again.json", "fleet.html"))
    write_artifact(Path(first), "fleet-timeline", timeline)
    write_artifact(Path(second), "fleet-timeline", timeline)
    assert run(["report", first, second, "-o", page]) == 0
    assert "queue on test" in Path(page).read_text(encoding="utf-8")
    graph = tmp_path / "graph.json"
    graph.write_text('{"spindle": "workload"}', encoding="utf-8")
    for words, message in (
        ([first, str(graph), "-o", page], "is no timeline, event log or store of a fleet"),
        ([first, first, "-o", page], "is given twice"),
        ([first, "-o", str(tmp_path / "fleet.svg")], "a report of a fleet is a page"),
    ):
        assert run(["report", *words]) != 0
        assert message in " ".join(capsys.readouterr().err.split())
