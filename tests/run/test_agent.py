"""Agents: ranks of one node, started, watched, reported and ended for a scheduler elsewhere."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spindle.launch import agent as agents
from spindle.launch.agent import COMPLETED, FAILED, STOPPED, Agent, NodePart, PartReport

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
LIMIT_S = 120  # until a hang is called one, on busy cores


def part(tmp_path, code: str, **fields: object) -> NodePart:
    """Two ranks that run a program."""
    command = (sys.executable, "-c", f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{code}")
    values = {"attempt": 3, "first_rank": 0, "num_ranks": 2, "world_size": 2, "node_rank": 0, "secret": "s", **fields}
    return NodePart(
        command=command, is_script=False, folder=str(tmp_path), logs=str(tmp_path / "logs"), environment={}, **values
    )


def ended(agent: Agent) -> PartReport:
    end_s = time.monotonic() + LIMIT_S
    while not agent.report.outcome:
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return agent.report


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 2 * LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def wait_for(path) -> None:
    wait_until(path.exists)


def test_ranks_get_torchruns_variables_and_end(tmp_path):
    agent = Agent()
    names = "RANK LOCAL_RANK WORLD_SIZE GROUP_RANK SPINDLE_ATTEMPT SPINDLE_SECRET"
    agent.start(
        part(
            tmp_path, f"print(*(os.environ.get(n) for n in '{names}'.split()))", first_rank=2, world_size=4, node_rank=1
        )
    )
    assert agent.report.is_started
    assert ended(agent).outcome == COMPLETED
    assert (tmp_path / "logs" / "rank-3.log").read_text().splitlines()[1:] == ["3 1 4 1 3 s"]


def test_a_rank_that_fails_ends_the_others_with_a_verdict(tmp_path):
    agent = Agent()
    agent.start(part(tmp_path, "sys.exit('broken') if rank else time.sleep(60)"))
    report = ended(agent)
    assert (report.outcome, report.is_own, report.is_cause) == (FAILED, False, True)
    assert "rank 1 ended with exit code 1" in report.reason
    assert "broken" in report.reason  # the end of its output


SAVING = """
def save(number, frame):
    open(f"saved-{rank}", "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
open(f"up-{rank}", "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize("reason", ["told", "cut off", "its parent is gone"])
def test_ranks_are_stopped_after_a_checkpoint(reason, tmp_path, monkeypatch):
    monkeypatch.setattr(agents, "_PING_S", 0.05)
    monkeypatch.setattr(agents, "CUT_OFF_S", 0.2)
    connected = [True]
    agent = Agent(is_connected=lambda: connected[0], parent=os.getppid())
    agent.start(part(tmp_path, SAVING))
    for rank in range(2):
        wait_for(tmp_path / f"up-{rank}")
    if reason == "told":
        agent.stop(LIMIT_S)
    elif reason == "cut off":
        connected[0] = False
    else:
        monkeypatch.setattr(agents.os, "getppid", lambda: 1)
    report = ended(agent)
    assert report.outcome == STOPPED
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()
    assert report.reason.startswith({"told": "", "cut off": "cut off", "its parent is gone": "the process"}[reason])


def test_ranks_that_ignore_the_signal_are_killed_after_the_grace_period(tmp_path):
    agent = Agent()
    agent.start(part(tmp_path, "signal.signal(15, signal.SIG_IGN)\nopen(f'up-{rank}', 'w').close()\ntime.sleep(60)"))
    for rank in range(2):
        wait_for(tmp_path / f"up-{rank}")
    agent.stop(0.2)
    assert ended(agent).outcome == STOPPED


def standby_part(tmp_path, **fields: object) -> NodePart:
    """Two ranks of a script, which writes what it was told to begin with."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nrank = os.environ['RANK']\nhad = {'torch', 'spindle.train'} <= sys.modules.keys()\n"
        "print(rank, had, os.environ['CUDA_VISIBLE_DEVICES'], 'SPINDLE_STANDBY' in os.environ, __file__)\n"
    )
    return replace(part(tmp_path, "", **fields), command=(str(script),), is_script=True)


def test_ranks_on_standby_import_what_takes_long_and_run_the_script_once_they_may(tmp_path):
    agent = Agent()
    agent.prepare(standby_part(tmp_path))
    wait_until(lambda: agent.report.is_ready)
    assert not agent.report.is_started
    log = tmp_path / "logs" / "rank-1.log"
    assert "script.py" not in log.read_text()
    agent.begin({"CUDA_VISIBLE_DEVICES": "4,6"})
    assert agent.report.is_started
    assert ended(agent).outcome == COMPLETED
    begun, said = log.read_text().splitlines()[-2:]
    assert begun.startswith("--- attempt 3, 2 ranks")
    assert said == f"1 True 4,6 False {tmp_path / 'script.py'}"


@pytest.mark.parametrize("reason", ["told", "nobody has them begin", "a rank dies"])
def test_ranks_on_standby_end_without_running_the_script(reason, tmp_path, monkeypatch):
    agent = Agent()
    agent.prepare(standby_part(tmp_path))
    wait_until(lambda: agent.report.is_ready)
    if reason == "told":
        agent.stop(LIMIT_S)
    elif reason == "a rank dies":
        children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
        # Tests before this one may have left others, such as the resource tracker of multiprocessing.
        ranks = [pid for pid in children if b"spindle.launch.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(ranks[0]), signal.SIGKILL)
    else:
        monkeypatch.setattr(agents, "STANDBY_S", 0.0)
    report = ended(agent)
    assert report.outcome == (FAILED if reason == "a rank dies" else STOPPED)
    assert "script.py" not in (tmp_path / "logs" / "rank-0.log").read_text()
