"""The launcher with real processes: what ranks find, what people are told, and that nobody stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spindle.cli.main import run
from spindle.launch import ranks
from spindle.launch.failure import Failure, parse_failures, write_failure
from spindle.launch.verdict import SEEN_LATE_NS, Ending, verdict

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

LIMIT_S = 180  # until a hang is called one; on busy cores, starting Python alone may take many seconds

# What the scripts below begin with.
PRELUDE = """
import os, subprocess, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
here = Path(__file__).parent

def note(name, value):
    (here / f"{name}.half").write_text(str(value))
    (here / f"{name}.half").rename(here / name)

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)
"""
ALL_REDUCE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))  # so that all are connected
"""
# A sleeper that rank 1 starts and does not wait for.
GRANDCHILD = """
note(f"rank-{rank}", os.getpid())
if rank == 1:
    note("grandchild", subprocess.Popen(["sleep", "600"]).pid)
"""


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(PRELUDE + text)
        return path

    return write


def command(path: Path, *arguments: str, ranks: int = 2, options: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, "-m", "spindle.cli", "launch", "-n", str(ranks), *options, str(path), *arguments]


def launched(path: Path, *arguments: str, environment: dict[str, str] | None = None, **options):
    """A job from start to end: its exit code and what it said."""
    return subprocess.run(
        command(path, *arguments, **options),
        env=os.environ | (environment or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture(name="started")
def running_jobs():
    """Starts jobs that run until they are told to end. Ctrl-C and SIGHUP reach them even if the tests run in a shell's
    background or under nohup. A test that fails leaves none of them, and no open pipes, which would be an error of the
    next test."""
    jobs = []

    def reset_signals() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    def start(path: Path, *options: str) -> subprocess.Popen[str]:
        job = subprocess.Popen(
            command(path, options=options),
            env=os.environ | {"TMPDIR": str(path.parent)},  # a launcher that is killed leaves its folder
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=reset_signals,
        )
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.kill()
        job.wait()
        for pipe in (job.stdout, job.stderr):
            pipe.close()


def wait_until(true) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end_s, "this takes too long"
        time.sleep(0.02)


def noted_pid(folder: Path, name: str) -> int:
    wait_until((folder / name).exists)
    return int((folder / name).read_text())


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has asked about yet (a zombie) has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_every_rank_finds_its_place_in_the_environment(script, tmp_path):
    path = script("import json; note(f'environment-{rank}', json.dumps(dict(os.environ)))")
    done = launched(path, ranks=3)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    places = [json.loads((tmp_path / f"environment-{rank}").read_text()) for rank in range(3)]
    for rank, place in enumerate(places):
        assert (place["RANK"], place["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (place["WORLD_SIZE"], place["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert place["MASTER_ADDR"] == "127.0.0.1"
        assert int(place["OMP_NUM_THREADS"]) >= 1
        assert place["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert len({place["MASTER_PORT"] for place in places}) == 1


def test_what_the_user_has_set_stays_set(script, tmp_path):
    path = script("note(f'threads-{rank}', os.environ['OMP_NUM_THREADS'] + os.environ['GLOO_SOCKET_IFNAME'])")
    launched(path, environment={"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9"})
    assert (tmp_path / "threads-1").read_text() == "7eth9"


def test_everything_after_the_script_is_the_scripts(script):
    given = ["--steps", "3", "-n", "9", "--help", "--logs", "--", "x"]
    done = launched(script("if rank == 0: print(sys.argv[1:])"), *given, ranks=1)
    assert done.stdout.strip() == str(given)


def test_a_script_runs_as_python_would_run_it(script, tmp_path):
    (tmp_path / "neighbour.py").write_text("answer = 42")
    path = script("""
import multiprocessing

def twice(x):
    return 2 * x

if __name__ == "__main__":
    import neighbour
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # which must find `twice` in the script
        print(neighbour.answer, pool.map(twice, [1]), sys.argv, __file__, os.getcwd() in sys.path)
""")
    done = launched(path, ranks=1)
    assert done.stderr == ""
    assert done.stdout.strip() == f"42 [2] {[str(path)]} {path} False"


def test_nothing_heavy_is_loaded_before_the_script(script):
    done = launched(script("print({'torch', 'numpy', 'typer'} & set(sys.modules))"), ranks=1)
    assert done.stdout.strip() == "set()"


def test_only_rank_0_is_heard_and_the_others_go_to_logs(script, tmp_path):
    logs = tmp_path / "deep" / "logs"
    path = script("print('out', rank); print('err', rank, file=sys.stderr)")
    done = launched(path, ranks=3, options=("--logs", str(logs)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "out 0\n", "err 0\n")
    assert sorted(log.name for log in logs.iterdir()) == ["rank-1.log", "rank-2.log"]
    assert (logs / "rank-2.log").read_text() == "out 2\nerr 2\n"


@pytest.mark.parametrize("code", [0, 1])
def test_no_file_stays_behind_unless_it_was_asked_for(code, script, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = launched(script(f"print('hello'); sys.exit({code})"), environment={"TMPDIR": str(temporary)})
    assert done.returncode == code
    assert list(temporary.iterdir()) == []


def test_an_exception_on_one_rank_ends_all_and_stands_on_top(script):
    path = script("""
def explode():
    raise ValueError("boom")

if rank == 2:
    explode()
time.sleep(600)
""")
    done = launched(path, ranks=4)
    first, *lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert first == "error: rank 2 failed: ValueError: boom"
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].strip().startswith(f'File "{path}", line ')
    assert "    explode()" in lines
    assert lines[-2:] == ["ValueError: boom", "ranks 0, 1 and 3 stopped because of it"]
    assert "runpy" not in done.stderr


def test_an_exception_ends_ranks_that_wait_for_it_in_a_collective(script):
    pytest.importorskip("torch")
    done = launched(script(ALL_REDUCE + "if rank == 1: raise ValueError('boom')\ndist.all_reduce(torch.ones(1))"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 failed: ValueError: boom\nTraceback")
    assert "\nthen rank 0 failed: RuntimeError" in done.stderr


def test_a_killed_rank_is_the_cause_though_only_its_neighbours_can_speak(script):
    pytest.importorskip("torch")
    done = launched(script(ALL_REDUCE + "if rank == 1: os.kill(os.getpid(), 9)\ndist.all_reduce(torch.ones(1))"))
    assert done.returncode == 1
    first, *_, last = done.stderr.splitlines()
    assert first == "error: rank 1 was killed by SIGKILL (out of memory?)"
    assert last.startswith("then rank 0 failed: RuntimeError")


def test_the_last_words_of_a_killed_rank_are_shown(script):
    path = script("""
if rank == 1:
    for number in range(100):
        print("step", number)
    os.kill(os.getpid(), 9)
time.sleep(600)
""")
    lines = launched(path).stderr.splitlines()
    assert lines[0] == "error: rank 1 was killed by SIGKILL (out of memory?)"
    assert lines[1] == "the end of its output:"
    assert lines[2:-1] == [f"step {number}" for number in range(80, 100)]
    assert lines[-1] == "rank 0 stopped because of it"


def test_a_crash_in_native_code_says_where(script):
    done = launched(script("if rank == 1:\n    import ctypes; ctypes.string_at(0)\ntime.sleep(600)"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 was killed by SIGSEGV\n")
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "train.py" in done.stderr


@pytest.mark.parametrize(
    ("argument", "code", "summary"),
    [("3", 3, "sys.exit(3)"), ("256", 1, "sys.exit(256)"), ("'no data'", 1, "sys.exit('no data')")],
)
def test_sys_exit_gives_the_job_its_code(argument, code, summary, script):
    done = launched(script(f"if rank == 1: sys.exit({argument})"))
    assert done.returncode == code
    assert done.stderr.splitlines()[0] == f"error: rank 1 failed: {summary}"
    assert ("no data\n" in done.stderr) == ("no data" in argument)


def test_a_rank_may_end_before_the_others(script, tmp_path):
    path = script("""
if rank == 0:
    note("done", "")
    sys.exit()
wait_for("done")
time.sleep(0.2)
note("later", "")
""")
    done = launched(path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "later").exists()


def test_ranks_that_fail_alike_are_reported_once(script):
    done = launched(script("raise ValueError('boom')"), ranks=3)
    assert done.stderr.count("Traceback") == 1
    assert re.search(r"^ranks \d and \d failed the same way$", done.stderr, re.MULTILINE)


def test_a_lost_peer_is_never_the_first_cause(script):
    path = script("""
from spindle.errors import PeerLostError

if rank == 0:
    try:
        raise PeerLostError("rank 1 is gone")
    finally:
        note("lost", "")
if rank == 2:
    try:
        raise PeerLostError("rank 1 is gone")
    except PeerLostError:
        raise RuntimeError("while dealing with it")
wait_for("lost")
time.sleep(0.2)
raise ValueError("boom")
""")
    done = launched(path, ranks=3)
    assert done.stderr.startswith("error: rank 1 failed: ValueError: boom\n")
    assert done.stderr.endswith("\nranks 0 and 2 stopped because of it\n")
    assert "is gone" not in done.stderr


def test_a_users_mistake_is_its_message_and_nothing_else(script):
    done = launched(script("from spindle.errors import WorkloadError\nraise WorkloadError('no task named x')"))
    first, second = done.stderr.splitlines()
    assert first.endswith(" failed: no task named x")
    assert second.endswith(" failed the same way")


def test_a_users_mistake_shows_the_exception_that_it_comes_from(script):
    path = script("""
from spindle.errors import TrainingError

def loss():
    return 1 / 0

try:
    loss()
except ZeroDivisionError as error:
    raise TrainingError("the loss of task a failed") from error
""")
    done = launched(path, ranks=1)
    assert done.stderr.startswith("error: rank 0 failed: the loss of task a failed\nTraceback")
    assert "in loss" in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("ending", ["", "raise ValueError('boom')", "os.kill(os.getpid(), 9)"])
def test_what_a_rank_has_started_ends_with_it(ending, script, tmp_path):
    done = launched(script(f"{GRANDCHILD}\nif rank == 1:\n    {ending or 'pass'}"))
    assert (done.returncode == 0) == (ending == "")
    pid = noted_pid(tmp_path, "grandchild")
    wait_until(lambda: is_gone(pid))


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "interrupted\n"),
        (signal.SIGTERM, 143, "stopped by SIGTERM\n"),
        (signal.SIGHUP, 129, "stopped by SIGHUP\n"),
    ],
)
def test_a_signal_to_the_launcher_ends_all(number, code, said, script, tmp_path, started):
    job = started(script(GRANDCHILD + "time.sleep(600)"))
    pids = [noted_pid(tmp_path, name) for name in ("rank-0", "rank-1", "grandchild")]
    job.send_signal(number)
    out, err = job.communicate(timeout=LIMIT_S)
    assert (job.returncode, out, err) == (code, "", said)
    wait_until(lambda: all(map(is_gone, pids)))


def test_ctrl_c_lets_a_script_put_its_things_in_order(script, tmp_path, started):
    path = script("""
try:
    note(f"rank-{rank}", os.getpid())
    time.sleep(600)
except KeyboardInterrupt:
    note(f"saved-{rank}", "")
    raise
""")
    job = started(path)
    for rank in range(2):
        noted_pid(tmp_path, f"rank-{rank}")
    job.send_signal(signal.SIGINT)
    assert job.communicate(timeout=LIMIT_S) == ("", "interrupted\n")
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()


def test_ranks_that_do_not_listen_are_killed(script, tmp_path, started):
    path = script("""
import signal
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
note(f"rank-{rank}", os.getpid())
time.sleep(600)
""")
    job = started(path)
    pids = [noted_pid(tmp_path, f"rank-{rank}") for rank in range(2)]
    job.send_signal(signal.SIGUSR1)  # they might be saving a checkpoint
    time.sleep(0.5)
    assert not any(map(is_gone, pids))
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=LIMIT_S)
    assert job.returncode == 143
    assert all(map(is_gone, pids))


def test_ranks_end_with_a_launcher_that_is_killed(script, tmp_path, started):
    job = started(script("note(f'rank-{rank}', os.getpid())\ntime.sleep(600)"))
    pids = [noted_pid(tmp_path, f"rank-{rank}") for rank in range(2)]
    job.kill()
    job.communicate(timeout=LIMIT_S)
    wait_until(lambda: all(map(is_gone, pids)))


def refusal(capsys, *arguments: str) -> str:
    assert run(["launch", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_what_cannot_be_launched_is_refused_in_one_line(tmp_path, script, capsys, monkeypatch):
    pytest.importorskip("torch")
    path = str(script(""))
    assert f"{tmp_path / 'no.py'}: no such file" in refusal(capsys, "-n", "2", str(tmp_path / "no.py"))
    assert f"{tmp_path}: is a directory" in refusal(capsys, "-n", "2", str(tmp_path))
    assert "at least 1 process, got 0" in refusal(capsys, "-n", "0", path)
    assert "'--processes': expected a whole number" in refusal(capsys, "-n", "two", path)
    assert "give -n N before the script" in refusal(capsys, path, "-n", "2")
    assert f"{path}: cannot create this folder" in refusal(capsys, "-n", "2", "--logs", path, path)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'spindle-train[train]'" in refusal(capsys, "-n", "2", path)


def test_help_says_when_another_launcher_is_needed(capsys):
    assert run(["launch", "--help"]) == 0
    printed = capsys.readouterr().out
    for word in ("spindle launch", "SCRIPT", "torchrun", "gloo", "python train.py", "--logs"):
        assert word in printed
    assert run(["--help"]) == 0
    assert "spindle launch -n 4 train.py" in capsys.readouterr().out


def alone(text: str, rank: str | None = "2") -> tuple[int, str]:
    """A process with the hook but without our launcher."""
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", f"from spindle.launch.failure import install_hook\ninstall_hook()\n{text}"],
        env=environment | ({} if rank is None else {"RANK": rank}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_without_a_launcher_a_failing_process_speaks_for_itself():
    code, said = alone("raise ValueError('boom')")
    assert code == 1
    assert said.startswith("rank 2 failed:\nTraceback (most recent call last):\n")
    assert said.endswith("ValueError: boom\n")
    assert alone("raise ValueError('boom')", rank=None)[1].startswith("Traceback")


def test_without_a_launcher_lost_peers_and_users_mistakes_are_one_line():
    errors = "from spindle.errors import *\n"
    assert alone(errors + "raise PeerLostError('rank 1 is gone')") == (1, "rank 2 stopped: rank 1 is gone\n")
    assert alone(errors + "raise PlanError('not legal')") == (1, "rank 2 failed:\nerror: not legal\n")
    assert alone(errors + "raise PlanError('not legal')", rank=None) == (1, "error: not legal\n")


def test_ctrl_c_alone_is_quiet():
    assert alone("raise KeyboardInterrupt") == (130, "")


def test_a_failing_process_ends_at_once_but_says_everything_first():
    text = """
import sys, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()  # as a destructor that waits for a rank that is gone
sys.stdout.write("half a line")
raise ValueError("boom")
"""
    code, said = alone(text)
    assert code == 1
    assert said.startswith("half a line")
    assert said.endswith("ValueError: boom\n")


def test_a_report_that_cannot_be_written_is_printed_instead():
    closed = "import os; from spindle.launch.failure import report_to; ends = os.pipe(); report_to(ends[1])"
    code, said = alone(f"{closed}; os.close(ends[0])\nraise ValueError('boom')")
    assert code == 1
    assert said.endswith("ValueError: boom\n")


def own(rank: int, time_ns: int, summary: str = "ValueError: boom") -> Failure:
    return Failure(rank=rank, time_ns=time_ns, kind="own", summary=summary, text=f"Traceback\n{summary}")


def follows(rank: int, time_ns: int) -> Failure:
    return Failure(rank=rank, time_ns=time_ns, kind="follows", summary="a rank is gone", text="a rank is gone")


def ends(*codes: int, time_ns: int = 10**9, signalled: bool = False) -> list[Ending]:
    return [Ending(rank=rank, code=code, time_ns=time_ns, was_signalled=signalled) for rank, code in enumerate(codes)]


def test_reports_come_back_in_the_order_of_time_and_odd_ones_are_skipped(tmp_path):
    later, sooner = own(0, 20), follows(1, 10)
    with (tmp_path / "pipe").open("wb") as file:
        for failure in (later, sooner):
            write_failure(file.fileno(), failure)
    odd = b'{\n[]\n{"rank": 1}\n\n{"rank": "x"}\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"rank": 1, "time'
    assert parse_failures((tmp_path / "pipe").read_bytes() + odd) == (sooner, later)


def test_the_earliest_failure_of_ones_own_is_the_first_cause():
    explained = verdict(ends(1, 1, 1), [follows(2, 1), own(0, 30), own(1, 20, "OSError: disk")], lambda _: "")
    assert explained.text.splitlines() == [
        "error: rank 1 failed: OSError: disk",
        "Traceback",
        "OSError: disk",
        "then rank 0 failed: ValueError: boom",
        "rank 2 stopped because of it",
    ]


def test_a_death_long_after_a_report_is_not_the_cause():
    assert verdict(ends(1, -6), [own(0, 10**9 - 2 * SEEN_LATE_NS)], lambda _: "").text.splitlines() == [
        "error: rank 0 failed: ValueError: boom",
        "Traceback",
        "ValueError: boom",
        "then rank 1 was killed by SIGABRT",
    ]


@pytest.mark.parametrize(("code", "cause"), [(-9, 1), (-6, 0)])
def test_a_rank_that_was_killed_is_the_cause_of_errors_on_a_shared_gpu(code, cause):
    error = own(0, 10**9 - 10 * SEEN_LATE_NS + 1, "AcceleratorError: CUDA error: an illegal memory access")
    text = verdict(ends(1, code), [error], lambda _: "").text
    assert text.startswith(f"error: rank {cause} ")
    assert f"then rank {1 - cause} " in text


@pytest.mark.parametrize(
    ("code", "exits", "how"),
    [
        (0, [], ""),  # its script was over
        (
            -15,
            [Failure(rank=0, time_ns=4, kind="exits", summary="sys.exit(0)", text="", step=5)],
            " by sys.exit(0) in step 5",
        ),
    ],
)
def test_a_rank_that_left_the_others_without_an_error_is_the_cause(code, exits, how):
    endings = [*ends(code, signalled=bool(exits)), *ends(0, 1, 1)[1:]]
    explained = verdict(endings, [*exits, follows(1, 5), follows(2, 6)], lambda _: "")
    assert explained.code == 1
    assert explained.text.splitlines() == [
        f"error: rank 0 ended without an error{how}, while other ranks needed it",
        "call fit(...) on all ranks, and end it early with trainer.stop()",
        "ranks 1 and 2 stopped because of it",
    ]


def test_a_rank_that_crashes_after_its_exit_is_lost():
    exits = Failure(rank=1, time_ns=5, kind="exits", summary="sys.exit(0)", text="")
    explained = verdict(ends(0, -6), [exits], lambda _: "")
    assert explained.text == "error: rank 1 was killed by SIGABRT"


def test_an_error_of_a_thread_that_serves_other_processes_does_not_end_this_one_or_its_children():
    """As `multiprocessing.resource_sharer` does when a process of a DataLoader is gone."""
    text = """
import os, sys, threading
def serve():
    try:
        raise ConnectionResetError("gone")
    except ConnectionResetError:
        sys.excepthook(*sys.exc_info())
thread = threading.Thread(target=serve)
thread.start()
thread.join()
if os.fork() == 0:
    serve()
    os._exit(7)
print("child", os.waitstatus_to_exitcode(os.wait()[1]))
"""
    code, said = alone(text)
    assert code == 0
    assert said.count("ConnectionResetError: gone") == 2
    assert "child 7" in said


def test_a_rank_that_was_told_to_end_is_no_cause():
    endings = [*ends(-15, signalled=True), Ending(rank=1, code=3, time_ns=10**9, was_signalled=False)]
    explained = verdict(endings, [], lambda rank: f"log of {rank}")
    assert explained.code == 3
    assert explained.text.splitlines() == [
        "error: rank 1 ended with exit code 3",
        "the end of its output:",
        "log of 1",
        "rank 0 stopped because of it",
    ]


def test_a_rank_that_was_stopped_is_the_cause_before_what_came_of_it():
    because = "was stopped (SIGSTOP) for 8 s"
    stopped = Ending(rank=1, code=-9, time_ns=10**9, was_signalled=False, killed_because=because)
    explained = verdict([*ends(1, time_ns=9 * 10**9), stopped], [own(0, 9 * 10**9)], lambda rank: f"log of {rank}")
    assert explained.code == 1
    assert explained.text.splitlines() == [
        "error: rank 1 was stopped (SIGSTOP) for 8 s",
        "the end of its output:",
        "log of 1",
        "then rank 0 failed: ValueError: boom",
    ]


def test_a_rank_killed_because_it_was_stopped_may_end_between_two_polls(monkeypatch):
    monkeypatch.setattr(ranks, "STOPPED_POLL_S", 0)
    monkeypatch.setattr(ranks, "STOPPED_LIMIT_S", 0)
    job = ranks.HostRanks([0])
    job.start(0, [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"], os.environ, None)
    pid = job._processes[0].pid
    state = Path(f"/proc/{pid}/stat")
    ended_s = time.monotonic() + 60
    while state.read_text().rpartition(")")[2].split()[0] != "Z":  # a zombie: it has ended and was not waited for
        assert time.monotonic() < ended_s
        job.kill_stopped()
    job.kill_stopped()  # which finds that the rank is no longer stopped
    assert not job.running()
    (ending,) = job.endings()
    assert ending.code == -signal.SIGKILL
    assert ending.killed_because is not None
    job._processes[0].wait()


def test_a_rank_that_is_stopped_and_soon_continued_goes_on(script):
    path = script(
        """
import signal
if rank == 1:
    subprocess.Popen(["sh", "-c", f"sleep 1.2; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    )
    done = launched(path)
    assert done.returncode == 0, done.stderr
