"""The harness of the GPU tests: what a later run skips, what it selects, and which error a result carries."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

import gpu.all as harness
from comparison import Comparison
from gpu import results
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
