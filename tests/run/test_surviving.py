"""Jobs whose ranks fail, hang or are lost: what is reported, what is left behind, and how they start again."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spindle.launch.activity import LIMIT_S, LOADING, ON_STEP, Activity, HangDetector, Recorder, SlownessDetector
from spindle.launch.folders import PREFIX
from spindle.launch.restart import Fault, Restarts
from test_launch import PRELUDE, is_gone, launched, noted_pid, running_jobs, wait_until  # noqa: F401  (a fixture)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

ATTEMPT = PRELUDE + "attempt = int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0))\n"


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(ATTEMPT + text)
        return path

    return write


def lines_of(done) -> list[str]:
    return [line for line in done.stderr.splitlines() if not line.startswith(("Traceback", " "))]


def test_a_job_that_loses_a_rank_starts_again_with_as_many(script, tmp_path):
    path = script("""
note(f"{attempt}-{rank}-{os.environ['WORLD_SIZE']}-{os.environ['SPINDLE_SECRET'][:8]}", "")
if attempt == 0 and rank == 1:
    os.kill(os.getpid(), 9)
if attempt == 0:
    time.sleep(600)
print("trained", rank)
""")
    logs = tmp_path / "logs"
    done = launched(path, ranks=3, options=("--restarts", "3", "--least", "2", "--logs", str(logs)))
    assert (done.returncode, done.stdout) == (0, "trained 0\n"), done.stderr
    lines = lines_of(done)
    assert lines[0] == "error: rank 1 was killed by SIGKILL (out of memory?)"
    assert lines[-1] == "restart 1 of 3, with 3 ranks"
    notes = [file.name.split("-") for file in tmp_path.glob("*-*-3-*")]
    assert {tuple(words[:2]) for words in notes} == {(attempt, rank) for attempt in "01" for rank in "012"}
    secrets = {words[0]: words[3] for words in notes}
    assert len({(words[0], words[3]) for words in notes}) == 2  # each start has a secret of its own
    assert secrets["0"] != secrets["1"]
    assert (logs / "rank-2.log").read_text() == "trained 2\n"


def test_a_rank_that_is_lost_twice_is_left_out_down_to_the_least(script):
    path = script("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(600)")
    done = launched(path, ranks=3, options=("--restarts", "3", "--least", "2"))
    assert done.returncode == 1
    assert [line for line in lines_of(done) if "restart" in line] == [
        "restart 1 of 3, with 3 ranks",
        "restart 2 of 3, with 2 ranks, without rank 1, which was lost twice",
        "restart 3 of 3, with 2 ranks",
        "no restart is left of 3",
    ]


def test_an_error_of_the_scripts_own_at_the_same_step_twice_ends_the_job(script):
    path = script("""
from spindle.launch.activity import recorder
recorder.begin(0)
for step in range(7):
    recorder.step_done(step)
    if rank == 0 and step == (3 if attempt == 0 else 5):
        raise ValueError("boom")
if rank == 1: time.sleep(600)
""")
    done = launched(path, options=("--restarts", "5"))
    assert done.returncode == 1
    assert lines_of(done)[-1] == (
        "not started again: the script has failed in step 5 twice, which is a bug, not a machine fault"
    )
    assert done.stderr.count("error: rank 0 failed: ValueError: boom") == 3


def test_a_signal_ends_a_job_that_would_start_again(script, started, tmp_path):
    job = started(script("note(f'rank-{rank}', os.getpid())\ntime.sleep(600)"), "--restarts", "3")
    pids = [noted_pid(tmp_path, f"rank-{rank}") for rank in range(2)]
    job.send_signal(signal.SIGTERM)
    assert job.communicate(timeout=90) == ("", "stopped by SIGTERM\n")
    assert job.returncode == 143
    assert all(map(is_gone, pids))


def test_which_faults_lead_to_fewer_ranks(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    lost = Fault(rank=1, is_lost=True, step=100, checkpoint_every=50)
    restarts = Restarts(9, 3, 1)
    assert restarts.decide(lost) == "restart 1 of 9, with 3 ranks"
    # Another checkpoint was written meanwhile; then it was not.
    assert restarts.decide(replace(lost, step=160)) == "restart 2 of 9, with 3 ranks"
    assert "CUDA_VISIBLE_DEVICES" not in restarts.environment()
    assert "with 2 ranks, without rank 1" in restarts.decide(replace(lost, step=170))
    assert restarts.environment() == {"TORCHELASTIC_RESTART_COUNT": "3", "CUDA_VISIBLE_DEVICES": "4,6"}
    # Ranks have other numbers now.
    assert restarts.decide(replace(lost, step=171)) == "restart 4 of 9, with 2 ranks"
    # An error of the script's own between two losses.
    assert restarts.decide(Fault(rank=1, is_lost=False, step=171)) == "restart 5 of 9, with 2 ranks"
    assert restarts.decide(replace(lost, step=172)) == "restart 6 of 9, with 2 ranks"


def test_no_gpu_is_shown_to_ranks_from_which_all_were_hidden(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    restarts = Restarts(2, 3, 1)
    for _ in range(2):
        restarts.decide(Fault(rank=0, is_lost=True, step=None))
    assert restarts.num_processes == 2
    assert "CUDA_VISIBLE_DEVICES" not in restarts.environment()


@pytest.mark.parametrize(
    ("options", "message"), [(("--least", "3"), "--least from 1 to 2"), (("--restarts", "-1"), "0")]
)
def test_restarts_that_cannot_be_are_refused(options, message, script):
    done = launched(script(""), options=options)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_cause_is_told_though_no_file_can_be_written(script):
    path = script("""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as on a full disk
if rank == 1:
    raise ValueError("boom" + "!" * 100_000)  # more than a pipe holds
time.sleep(600)
""")
    done = launched(path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 failed: ValueError: boom!!!")


@pytest.fixture
def temporary():
    """A folder with a short name: sockets in it have names of up to 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_temporary_files_of_killed_ranks_are_removed_and_so_are_folders_of_killed_launchers(
    script, temporary, tmp_path
):
    abandoned, running, others = (temporary / f"{PREFIX}{name}" for name in ("abandoned", "running", "new"))
    for folder in (abandoned, running, others):
        folder.mkdir(parents=True)
        (folder / "log").write_text("")
        if folder is not others:
            os.utime(folder, (time.time() - 3600,) * 2)
    lock = os.open(running, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    path = script("""
import tempfile
note(f"folder-{rank}", tempfile.mkdtemp())
if rank == 1: os.kill(os.getpid(), 9)
time.sleep(600)
""")
    assert launched(path, environment={"TMPDIR": str(temporary)}).returncode == 1
    os.close(lock)
    assert sorted(temporary.iterdir()) == sorted([running, others])
    assert not Path((tmp_path / "folder-1").read_text()).exists()


def test_the_folder_of_a_killed_launcher_in_memory_can_be_removed_by_the_next(script, started, tmp_path):
    job = started(script("note(f'store-{rank}', os.environ['SPINDLE_STORE'])\ntime.sleep(600)"))
    wait_until((tmp_path / "store-1").exists)
    folder = Path((tmp_path / "store-1").read_text()).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    job.kill()
    job.communicate(timeout=20)
    os.utime(folder, (time.time() - 3600,) * 2)
    assert launched(script("")).returncode == 0
    assert not folder.exists()


def test_logs_of_a_launch_that_is_running_are_not_overwritten(script, started, tmp_path):
    logs = tmp_path / "logs"
    job = started(script("note(f'rank-{rank}', os.getpid())\ntime.sleep(600)"), "--logs", str(logs))
    noted_pid(tmp_path, "rank-1")
    done = launched(script(""), options=("--logs", str(logs)))
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=20)
    assert done.returncode == 2
    assert done.stderr == f"error: {logs}: another running launch writes its logs here; give a different folder\n"
    assert launched(script(""), options=("--logs", str(logs))).returncode == 0


def activity(**changes) -> Activity:
    record = Activity(
        num_records=1, num_events=5, step=3, longest_step_s=0.5, phase="", waiting="", where="train.py:3 in loss"
    )
    return replace(record, **changes)


def after(detector: HangDetector, seconds: int, *activities: Activity) -> dict[int, str]:
    """What is detected in so many seconds, in which ranks record and do nothing else."""
    hung: dict[int, str] = {}
    for second in range(seconds):
        records = {
            rank: replace(activity, num_records=activity.num_records + second) if activity.num_records else activity
            for rank, activity in enumerate(activities)
        }
        hung = detector.hung(records, 1.0) or hung
    return hung


def test_the_rank_that_others_wait_for_hangs_and_is_told_with_its_place():
    waiting, busy = activity(waiting="exchanging tensors"), activity()
    assert after(HangDetector(2, LIMIT_S), 60, waiting, busy) == {}
    assert after(HangDetector(2, LIMIT_S), 62, waiting, busy) == {
        1: "has made no progress for 61 s, in step 3 (train.py:3 in loss) (SPINDLE_HUNG_S sets the limit)"
    }


@pytest.mark.parametrize(
    ("activities", "seconds"),
    [
        ((activity(longest_step_s=10.0), activity()), 200),  # twenty of the longest steps
        ((activity(phase=ON_STEP), activity(waiting="exchanging headers")), 600),
        ((activity(phase=LOADING), activity(waiting="exchanging headers")), 600),
        ((activity(step=None), activity()), 10_000),  # planning
        ((activity(longest_step_s=0.0, is_first_step=True), activity()), 600),  # which may compile
        ((activity(), activity(is_first_step=True, waiting="exchanging tensors")), 600),
        ((activity(),), 10_000),  # a rank that has not begun
    ],
)
def test_ranks_that_may_be_busy_do_not_hang(activities, seconds):
    assert after(HangDetector(2, LIMIT_S), seconds, *activities) == {}


def test_the_first_step_after_a_change_of_plan_is_watched_with_more_patience():
    recorder = Recorder()
    recorder.begin(0)
    recorder.step_done(1)
    recorder.pause()
    assert recorder.activity().step is None
    recorder.resume()
    assert (recorder.activity().step, recorder.activity().is_first_step) == (1, True)
    hung = after(HangDetector(2, LIMIT_S), 602, recorder.activity(), activity(waiting="exchanging tensors"))
    assert list(hung) == [0]
    recorder.step_done(2)
    recorder.resume()
    assert not recorder.activity().is_first_step


def test_ranks_that_all_wait_for_each_other_hang_together():
    hung = after(HangDetector(2, LIMIT_S), 62, *[activity(waiting="exchanging tensors")] * 2)
    assert list(hung) == [0, 1]
    assert "(exchanging tensors, train.py:3 in loss)" in hung[0]


def test_a_rank_that_no_longer_records_hangs_whatever_it_waited_for():
    mute = activity(waiting="exchanging tensors", num_records=0)
    hung = after(HangDetector(2, LIMIT_S), 63, activity(waiting="exchanging tensors"), mute)
    assert list(hung) == [1]
    assert "its threads do not run" in hung[1]


def test_a_rank_that_is_slower_than_predicted_is_named_once_with_its_host_and_factor():
    detector = SlownessDetector()
    activities = {rank: activity(slowness=slowness, host="a") for rank, slowness in enumerate((1.9, 2.0, 3.0, None))}
    assert detector.notices({**activities, 2: activity(slowness=2.5, host="b")}) == []
    assert detector.notices({**activities, 2: activity(slowness=3.0, host="b")}) == [
        "rank 2 on b computes 1.54 times as long as predicted, relative to the other ranks"
    ]
    assert detector.notices(activities) == []


def test_a_job_that_goes_on_does_not_hang():
    detector = HangDetector(2, LIMIT_S)
    for number in range(1000):
        assert detector.hung({0: activity(num_events=number // 50), 1: activity()}, 1.0) == {}


def test_a_hung_rank_is_named_with_its_line_and_the_job_starts_again(script):
    path = script("""
import spindle.launch.activity as activity
activity.RECORD_S = 0.1
recorder = activity.recorder
recorder.start()
recorder.begin(0)
for step in range(3):
    time.sleep(0.01)
    recorder.step_done(step)
if attempt == 0:
    recorder.waiting = "exchanging tensors" if rank == 0 else ""
    time.sleep(600)
""")
    done = launched(path, options=("--restarts", "1"), environment={"SPINDLE_HUNG_S": "1"})
    assert done.returncode == 0, done.stderr
    line = path.read_text().splitlines().index("    time.sleep(600)") + 1
    first, *_, last = lines_of(done)
    assert first.startswith("error: rank 1 has made no progress for ")
    assert f"in step 2 ({path}:{line} in <module>)" in first
    assert last == "restart 1 of 1, with 2 ranks"
