"""Virtual devices without a GPU: what ranks are told, what is refused, and that MPS never stays behind.

A program of our own stands in for NVIDIA's: it makes a daemon and a server that know how to end, or how not to. This is
a test of our cleaning up, not of MPS.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spindle.cli.main import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
torch = pytest.importorskip("torch")  # without which nothing is launched

LIMIT_S = 20

# Like NVIDIA's: -d leaves a daemon behind, which starts a server in a session of its own; without it, words on stdin go
# to the daemon. What the daemon of a folder has started is noted where STAND_IN says.
CONTROL = r"""
import os, signal, subprocess, sys, time
from pathlib import Path

pipe = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
mode = os.environ.get("STAND_IN_MODE", "")
if sys.argv[1:] == ["-d"]:
    if mode == "broken":
        sys.exit("Cannot find\nMPS control daemon process")
    os.mkfifo(pipe / "control")
    if os.fork():
        while not (pipe / "listening").exists():
            time.sleep(0.01)
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(os.environ["STAND_IN"], "a") as notes:
        print(os.getpid(), server.pid, pipe.parent, os.environ["CUDA_VISIBLE_DEVICES"], file=notes)
    (pipe / "listening").touch()
    while True:
        words = (pipe / "control").read_text()
        if "quit" in words and mode != "deaf":
            server.kill()
            server.wait()
            sys.exit(0)
elif (pipe / "control").exists():
    (pipe / "control").write_text(sys.stdin.read())
"""
SLEEPER = """
import json, os, time
from pathlib import Path
here = Path(__file__).parent
rank = os.environ["RANK"]
(here / f"half-{rank}").write_text(json.dumps(dict(os.environ)))
(here / f"half-{rank}").rename(here / f"rank-{rank}")
"""


class Stage:
    """A folder with stand-ins and a script, and what they noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs, self.temporary, self.notes = folder / "programs", folder / "temporary", folder / "notes"
        self.programs.mkdir()
        self.temporary.mkdir()
        self.put("nvidia-smi", "print('GPU 0: A card (UUID: GPU-1)')")
        self.put("nvidia-cuda-mps-control", CONTROL)

    def put(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)

    def environment(self, **more: str) -> dict[str, str]:
        own = {"PATH": f"{self.programs}:{os.environ['PATH']}", "TMPDIR": str(self.temporary)}
        return os.environ | own | {"STAND_IN": str(self.notes)} | more

    def start(self, text: str, *, devices: int = 2, **more: str) -> subprocess.Popen[str]:
        script = self.folder / "train.py"
        script.write_text(SLEEPER + text)
        return subprocess.Popen(
            [sys.executable, "-m", "spindle.cli", "launch", "--virtual-devices", str(devices), str(script)],
            env=self.environment(**more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def finish(self, text: str, **options) -> tuple[int, str]:
        job = self.start(text, **options)
        out, err = job.communicate(timeout=LIMIT_S)
        return job.returncode, out + err

    def started(self) -> tuple[list[int], Path, str]:
        """Processes of the stand-in, its folder, the GPU it was given."""
        (line,) = self.notes.read_text().splitlines()
        daemon, server, folder, gpu = line.split()
        return [int(daemon), int(server)], Path(folder), gpu

    def rank(self, number: int) -> dict[str, str]:
        path = self.folder / f"rank-{number}"
        wait_until(path.exists)
        return json.loads(path.read_text())

    def expect_nothing_left(self) -> None:
        pids, folder, _ = self.started()
        wait_until(lambda: all(map(is_gone, pids)))
        wait_until(lambda: not folder.exists())


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def wait_until(true) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end_s, "this takes too long"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def keeper_of(pid: int) -> int:
    """Whoever has adopted a daemon."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_every_rank_gets_its_share_and_nothing_stays(stage):
    assert stage.finish("", devices=3) == (0, "")
    _, folder, gpu = stage.started()
    for number in range(3):
        environment = stage.rank(number)
        assert (environment["RANK"], environment["WORLD_SIZE"], environment["SPINDLE_VIRTUAL_DEVICES"]) == (
            str(number),
            "3",
            "3",
        )
        assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "33"
        assert environment["CUDA_MPS_PIPE_DIRECTORY"] == str(folder / "pipe")
        assert environment["CUDA_MPS_LOG_DIRECTORY"] == str(folder / "log")
        assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert gpu == "0"
    stage.expect_nothing_left()
    assert list(stage.temporary.iterdir()) == []


def test_of_several_gpus_the_first_that_the_user_shows_is_shared(stage):
    stage.finish("", CUDA_VISIBLE_DEVICES="3,1")
    assert stage.started()[2] == "3"
    assert stage.rank(1)["CUDA_VISIBLE_DEVICES"] == "0"  # as the daemon numbers them


@pytest.mark.parametrize("ending", ["raise ValueError('boom')", "os.kill(os.getpid(), 9)"])
def test_nothing_stays_after_a_rank_that_fails(ending, stage):
    code, said = stage.finish(f"if rank == '1': {ending}\ntime.sleep(600)")
    assert code == 1
    assert said.startswith("error: rank 1 ")
    stage.expect_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_after_a_launcher_that_is_stopped_or_killed(number, stage):
    job = stage.start("time.sleep(600)")
    stage.rank(1)
    pids, _, _ = stage.started()
    assert not any(map(is_gone, pids))
    job.send_signal(number)
    job.communicate(timeout=LIMIT_S)
    stage.expect_nothing_left()


def test_a_daemon_that_does_not_listen_is_killed_with_its_server_and_nothing_else(stage):
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    text = "import sys, spindle.launch.mps as mps; mps.QUIT_S = 0.3; sys.exit(mps.supervise())"
    environment = stage.environment(STAND_IN_MODE="deaf", CUDA_VISIBLE_DEVICES="0")
    keeper = subprocess.Popen(
        [sys.executable, "-c", text], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert keeper.stdout.readline().startswith("ready ")
    keeper.communicate(timeout=LIMIT_S)
    stage.expect_nothing_left()
    assert keeper.returncode == 0
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_nothing_stays_when_the_keeper_itself_is_killed(stage):
    job = stage.start("time.sleep(600)")
    stage.rank(1)
    os.kill(keeper_of(stage.started()[0][0]), signal.SIGKILL)
    job.terminate()
    job.communicate(timeout=LIMIT_S)
    stage.expect_nothing_left()


def refusal(capsys, *options: str) -> str:
    assert run(["launch", *options, __file__]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_what_cannot_work_here_is_refused_with_what_to_do(stage, capsys, monkeypatch):
    empty = stage.folder / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    said = refusal(capsys, "--virtual-devices", "2")
    assert "no nvidia-smi on the PATH" in said
    assert "spindle launch -n N" in said
    monkeypatch.setenv("PATH", str(stage.programs))
    stage.put("nvidia-smi", "import sys; sys.exit('NVIDIA-SMI has failed')")
    assert "nvidia-smi -L says: NVIDIA-SMI has failed" in refusal(capsys, "--virtual-devices", "2")
    stage.put("nvidia-smi", "print('GPU 0: A card (UUID: GPU-1)')")
    (stage.programs / "nvidia-cuda-mps-control").unlink()
    said = refusal(capsys, "--virtual-devices", "2")
    assert "no nvidia-cuda-mps-control on the PATH" in said
    assert "nvidia-compute-utils" in said
    assert "1 to 48 virtual devices, got 49" in refusal(capsys, "--virtual-devices", "49")
    assert "not both" in refusal(capsys, "--virtual-devices", "2", "-n", "2")


def test_a_daemon_that_does_not_start_is_reported_in_one_line(stage):
    code, said = stage.finish("", STAND_IN_MODE="broken")
    assert code == 2
    assert said == (
        "error: MPS cannot be started: nvidia-cuda-mps-control -d ended with exit code 1: "
        "Cannot find MPS control daemon process\n"
    )
    assert list(stage.temporary.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="it does")
def test_a_rank_whose_torch_sees_no_gpu_says_so(stage):
    code, said = stage.finish("from spindle.run.world import join_world; join_world()", devices=1)
    assert code == 1
    assert "sees no GPU for this virtual device" in said
