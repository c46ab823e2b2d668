"""Checkpoints in a node's memory, from attempt to attempt."""

from __future__ import annotations

import os

import pytest

from spindle.launch import node_memory as module
from spindle.launch.node_memory import keep_memory, node_memory, remove_memory


@pytest.fixture(autouse=True)
def shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    return tmp_path


def files(folder) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_the_next_attempt_takes_over_what_the_last_one_left():
    with node_memory("job", 1) as first:
        (first / "checkpoint").touch()
        keep_memory(first)
    with node_memory("job", 2) as second:
        assert files(second) == {"checkpoint"}
        assert not first.exists()
        remove_memory(second)
    with node_memory("job", 3) as third:
        assert files(third) == set()


def test_an_attempt_that_others_came_after_is_not_taken_over():
    with node_memory("job", 1) as first:
        (first / "checkpoint").touch()
    with node_memory("job", 3) as third:
        assert files(third) == set()
    assert not first.exists()


def test_an_attempt_whose_agent_still_runs_is_not_taken_over():
    with node_memory("job", 1) as first:
        (first / "checkpoint").touch()
        with node_memory("job", 2) as second:
            assert files(second) == set()
        assert files(first) == {"checkpoint"}
    with node_memory("job", 3) as third:
        assert files(third) == set()
    assert not first.exists()


def test_what_an_old_attempt_still_writes_is_read_by_nobody():
    with node_memory("job", 1) as first:
        pass
    with node_memory("job", 2):
        first.mkdir()
        (first / "late").touch()
    with node_memory("job", 3) as third:
        assert files(third) == set()


def test_other_jobs_keep_theirs_for_an_hour(shared_memory):
    with node_memory("job", 1) as own, node_memory("other", 1) as other:
        (other / "checkpoint").touch()
    with node_memory("job", 2):
        assert files(other) == {"checkpoint"}
    os.utime(other, (0, 0))
    with node_memory("job", 3):
        assert not other.exists()
    assert own is not None


def test_a_folder_that_others_can_enter_is_not_used(shared_memory):
    parent = shared_memory / f"spindle-memory-{os.getuid()}"
    parent.mkdir(mode=0o700)
    parent.chmod(0o755)
    with node_memory("job", 1) as folder:
        assert folder is None
