"""The harness of the GPU tests: what a later run skips, what it selects, and which error a result carries."""

from __future__ import annotations

import math
import random
import tarfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

import gpu.all as harness
from comparison import Comparison
from gpu import lanes, lease, results, steps
from gpu.results import FAILED, PASSED, Result
from pool import Pool, largest_error

RESULT = Result(
    test="test_run.py::test_a",
    part="data-parallel",
    backend="nccl",
    graphs="on",
    ranks="3",
    error=2e-15,
    verdict=PASSED,
    time_s=1.5,
    sources="now",
    commit="",
    device="H200",
)


def test_a_later_run_skips_what_passed_last_on_the_same_sources(tmp_path):
    path = tmp_path / "folder" / "results.jsonl"
    for changes in (
        {},
        {"test": "test_run.py::test_b", "verdict": FAILED},
        {"test": "test_run.py::test_c", "sources": "before"},
        {"backend": "ipc"},
        {"backend": "ipc", "verdict": FAILED},
    ):
        results.append(path, replace(RESULT, **changes))
    with path.open("a") as file:
        file.write('{"test": "cut off when the le')
    recorded = results.read([path, tmp_path / "missing.jsonl"])
    assert len(recorded) == 5
    assert results.passed_keys(recorded, "now") == {("test_run.py::test_a", "nccl", "on")}


def item(name: str, file: str = "test_run.py", fixtures: tuple[str, ...] = ("pool",), **parameters: int):
    callspec = SimpleNamespace(params=parameters)
    return SimpleNamespace(path=Path(file), name=name, fixturenames=fixtures, callspec=callspec)


def test_tests_of_the_pool_are_selected_by_part_and_ordered_by_ranks(tmp_path):
    plugin = harness.Harness(
        ["zero1", "data-parallel"], RESULT, {("test_run.py::test_a", "nccl", "on")}, tmp_path / "file", math.inf
    )
    items = [
        item("test_a"),
        item("test_b", num_ranks=4),
        item("test_c", num_ranks=2),
        item("test_without_ranks", fixtures=()),
        item("test_a_rank_that_fails_is_reported_at_once"),
        item("test_d", "test_sharded.py"),
        item("test_e", "test_tensor.py"),
    ]
    plugin.pytest_collection_modifyitems(items)
    assert [chosen.name for chosen in items] == ["test_d", "test_c", "test_b"]


def test_every_part_names_test_files_that_exist():
    files = [file for part in harness.PARTS.values() for file in part.files]
    assert all((harness.RUN_TESTS / file).is_file() for file in files)


def test_tables_show_errors_and_failures():
    failed = replace(RESULT, test="test_run.py::test_b", verdict=FAILED, error=None, message="E   assert 1 < 0\nmore")
    text = results.markdown([RESULT, failed], {"test_memory": "counted on CPUs"})
    assert "| test_run.py::test_a | nccl | 3 | 2.0e-15 | passed |" in text
    assert "- `test_run.py::test_b`: assert 1 < 0" in text
    assert results.summary_lines([RESULT, failed]) == [
        "data-parallel on nccl: 1 passed, 1 failed, largest error 2.0e-15, 3 s"
    ]


@dataclass
class Answer:
    comparison: Comparison
    moved: float = 5.0


def answer(**errors: float) -> Answer:
    return Answer(comparison=Comparison(largest={kind: (error, "a") for kind, error in errors.items()}))


def test_the_largest_error_of_an_answer_is_found_in_its_fields_or_its_nest():
    assert largest_error([answer(loss=1e-12, gradient=3e-11), answer(loss=2e-13, gradient=0.0)]) == 3e-11
    assert largest_error(({"a": 1e-9}, {"b": 4e-9}, [True, False])) == 4e-9
    assert math.isnan(largest_error([answer(loss=math.nan, gradient=1.0)]))
    assert largest_error(["printed", None]) is None


def hang_on_rank(rank: int, num_ranks: int, hanging: int | None) -> None:
    """Runs a barrier on all ranks but one, which sleeps."""
    if rank == hanging:
        time.sleep(600)
    dist.barrier()


def test_a_request_that_hangs_ends_with_the_tracebacks_of_all_ranks_and_a_new_pool(monkeypatch):
    pool = Pool()
    try:
        pool.run(2, hang_on_rank, None)
        monkeypatch.setenv("SPINDLE_TEST_LIMIT_S", "2")
        with pytest.raises(AssertionError, match=r"ranks \[0, 1\] did not answer within 2 s") as caught:
            pool.run(2, hang_on_rank, 1)
        assert "rank 0:" in str(caught.value)
        assert str(caught.value).count("in hang_on_rank") == 2
        pool.run(2, hang_on_rank, None)
    finally:
        pool.close()


def test_free_memory_of_a_pool_is_taken_where_its_stream_can_get_it(monkeypatch):
    def segment(kind, pool, stream, *blocks):
        blocks = [{"size": size, "state": state} for size, state in blocks]
        return {"segment_type": kind, "segment_pool_id": pool, "stream": stream, "blocks": blocks}

    free, used = "inactive", "active_allocated"
    segments = [
        segment("small", (0, 1), 7, (512, free), (1024, used), (2048, free)),
        segment("large", (0, 1), 7, (3 << 20, free), (1 << 20, free), (4 << 20, "active_awaiting_free")),
        segment("large", (0, 1), 8, (5 << 20, free)),
        segment("small", (0, 2), 7, (4096, free)),
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    assert lanes.free_blocks((0, 1)) == [512, 2048, 3 << 20]


def step(name: str, command: str, *, alone: bool = False, minutes: float = 1.0) -> steps.Step:
    return steps.Step(name=name, command=command, minutes=minutes, alone=alone, answers="", rehearsal=command)


def test_a_lease_goes_on_where_the_last_one_ended(tmp_path, capsys):
    note = "sh -c 'date +%s.%N >> {results}/{name}; {0}; date +%s.%N >> {results}/{name}'"
    made = [
        step("first", note.replace("{0}", "sleep 0.5")),
        step("second", note.replace("{0}", "sleep 0.5")),
        step("alone", note.replace("{0}", "true"), alone=True),
        step("fails", "sh -c 'echo as expected; echo; echo broken >&2; exit 3'"),
        step("long", note.replace("{0}", "sleep 60"), minutes=0.02, alone=True),
    ]
    lease.Lease(tmp_path / "folder").run(made, time.monotonic() + 60)
    answers = capsys.readouterr().out
    assert "failed   fails: broken\n    $ sh -c" in answers
    assert "\n    as expected\n" in answers
    assert "cut off  long" in answers
    times = {
        name: (tmp_path / "folder" / "results" / name).read_text().split() for name in ("first", "second", "alone")
    }
    begins, ends = ({name: float(of[place]) for name, of in times.items()} for place in (0, 1))
    assert max(begins["first"], begins["second"]) < min(ends["first"], ends["second"])
    assert begins["alone"] >= max(ends["first"], ends["second"])
    assert lease.pack(tmp_path / "folder", tmp_path / "out" / lease.ARCHIVE) == []
    with tarfile.open(tmp_path / "out" / lease.ARCHIVE) as archive:
        archive.extractall(tmp_path / "next", filter="data")
    later = lease.Lease(tmp_path / "next")
    assert [one.name for one in made if not later.is_over(one)] == ["long"]
    later.run([*made[:4], step("long", "true")], time.monotonic() + 60)
    assert later.is_over(made[4])
    assert (tmp_path / "next" / "results" / "first").read_text().split() == times["first"]


@pytest.mark.parametrize("failing", [(), (0,), (1,), (2,)])
def test_a_step_of_several_commands_fails_if_one_of_them_does(failing, tmp_path):
    wait_for_each_other = 'touch {results}/%d; timeout 30 sh -c "until test -e {results}/%d; do sleep 0.01; done"'
    commands = [
        f"( {wait_for_each_other % (number, (number + 1) % 3)} && {'false' if number in failing else 'true'} )"
        for number in range(3)
    ]
    of_a_lease = lease.Lease(tmp_path)
    of_a_lease.run([step("several", steps.side_by_side(*commands))], time.monotonic() + 60)
    assert of_a_lease.entries["several"]["verdict"] == (lease.FAILED if failing else lease.DONE)


def test_a_step_of_a_lease_that_used_up_its_budget_goes_on_in_the_next_call(tmp_path):
    command = "sh -c 'echo {seconds} >> {results}/budgeted; exec sleep {seconds}'"
    budgeted = step("budgeted", command, minutes=0.1)
    of_a_lease = lease.Lease(tmp_path)
    of_a_lease.run([budgeted], time.monotonic() + 60)
    assert of_a_lease.entries["budgeted"]["verdict"] == lease.CUT
    of_a_lease.run([step("budgeted", "true {seconds} {results}", minutes=0.1)], time.monotonic() + 60)
    assert of_a_lease.is_over(budgeted)


def test_what_is_too_large_for_the_archive_of_a_lease_does_not_cost_what_matters(tmp_path, monkeypatch):
    made = lease.Lease(tmp_path / "folder")
    made.run([step("first", "sh -c 'echo 1 > {results}/first'")], time.monotonic() + 60)
    (made.folder / "cache" / "inductor").mkdir(parents=True)
    (made.folder / "cache" / "inductor" / "code").write_bytes(random.Random(0).randbytes(20_000))
    monkeypatch.setattr(lease, "MAX_ARCHIVE_BYTES", 10_000)
    archive = tmp_path / "out" / lease.ARCHIVE
    assert lease.pack(made.folder, archive) == ["cache/inductor", "cache/triton"]
    with tarfile.open(archive) as packed:
        assert {"steps.json", "results/first", "logs/first.log"} <= set(packed.getnames())
    assert [each.name for each in archive.parent.iterdir()] == [lease.ARCHIVE]


def test_no_step_of_a_lease_begins_without_time(tmp_path):
    late = lease.Lease(tmp_path)
    late.run([step("late", "true")], time.monotonic() + lease.LEAST_S / 2)
    assert late.entries == {}


def test_the_list_of_a_lease_is_the_one_that_people_read():
    names = [known.name for known in steps.STEPS]
    assert len(set(names)) == len(names)
    readme = Path(lease.HERE / "README.md").read_text()
    assert f"<!-- steps -->\n{steps.table()}\n<!-- end of steps -->" in readme
    assert f"<!-- calls -->\n{steps.calls_table()}\n<!-- end of calls -->" in readme


def test_calls_of_a_lease_have_all_steps_for_as_long_as_they_take():
    calls = steps.calls()
    for known in steps.STEPS:
        assert sum(minutes for call in calls for name, minutes in call if name == known.name) == known.minutes


def test_a_shorter_step_takes_the_time_that_is_too_short_for_the_next_one(tmp_path):
    made = lease.Lease(tmp_path)
    long = replace(step("long", "true", minutes=9), least_minutes=2)
    made.run([long, step("short", "true")], time.monotonic() + 60)
    assert list(made.entries) == ["short"]
    made.run([long, step("short", "true")], time.monotonic() + 180)
    assert list(made.entries) == ["short", "long"]
