"""Starts the processes of a training script on this machine, watches them, and never leaves one behind.

    start ──▶ watch ──▶ all ended with 0                                        ──▶ 0
                   ├──▶ one failed: 2 s for the others, SIGTERM, 3 s, SIGKILL   ──▶ its code, or 1, and the verdict
                   ├──▶ one is stopped (SIGSTOP) for 8 s: SIGKILL, then as above ──▶ 1, and the verdict
                   └──▶ Ctrl-C, SIGTERM, SIGHUP: passed on, then as above       ──▶ 130, 143, 129

Every rank leads a session and a process group of its own, so that a signal reaches what the rank has started, too.
Whatever the way out, each group gets a SIGKILL at the end. Left out: a process that a rank has put into yet another
session, and, when this launcher itself dies by SIGKILL, what the ranks have started (`worker` ends the ranks).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from spindle.errors import InputError
from spindle.launch.failure import FOLDER_VARIABLE, read_failures
from spindle.launch.mps import shared_gpu
from spindle.launch.verdict import Ending, verdict
from spindle.launch.worker import LAUNCHER_VARIABLE

POLL_S = 0.02
LAST_WORDS_S = 0.2
STOPPED_LIMIT_S = 8.0  # a rank that is stopped for longer has failed: the others would wait for it without end
STOPPED_POLL_S = 0.5
REAP_S = 5.0
LOG_END_LINES = 20
LOG_END_BYTES = 1 << 16

# How ranks are told to end: wait so long, then send this to those that are left.
Ladder = tuple[tuple[float, signal.Signals], ...]
AFTER_FAILURE: Ladder = ((2.0, signal.SIGTERM), (3.0, signal.SIGKILL))
AFTER_SIGNAL: Mapping[int, Ladder] = {
    signal.SIGINT: ((0.0, signal.SIGINT), (2.0, signal.SIGTERM), (3.0, signal.SIGKILL)),
    signal.SIGTERM: ((0.0, signal.SIGTERM), (3.0, signal.SIGKILL)),
    signal.SIGHUP: ((0.0, signal.SIGTERM), (3.0, signal.SIGKILL)),
}


def launch(
    script: Path,
    arguments: Sequence[str],
    num_processes: int,
    logs: Path | None = None,
    *,
    share_gpu: bool = False,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Runs a script in so many processes and returns the exit code of the job; says on stderr why it is not 0.

    Rank 0 writes where this process writes. What other ranks write goes to `rank-1.log`… in the folder `logs`, or into
    files that are gone at the end. With `share_gpu` all ranks use one GPU, through MPS. They find `environment`
    in theirs. Must be called in the main thread, the only one that signals reach.
    """
    if num_processes < 1:
        raise InputError(f"expected at least 1 process, got {num_processes}")
    if not script.is_file():
        raise InputError(f"{script}: {'is a directory; give a script' if script.is_dir() else 'no such file'}")
    with ExitStack() as stack:
        signals = stack.enter_context(_noted_signals())  # first, so that nothing can interrupt the cleaning up
        scratch = Path(stack.enter_context(_scratch_folder()))
        failures = _made_folder(scratch / "failures")
        log_folder = _made_folder(logs or scratch / "logs")
        shared = stack.enter_context(shared_gpu(num_processes)) if share_gpu else {}
        job = stack.enter_context(closing(_Job()))

        common = _common_environment(num_processes, failures) | shared | dict(environment or {})
        command = [sys.executable, "-P", "-m", "spindle.launch.worker", str(script), *arguments]
        for rank in range(num_processes):
            if signals:
                break
            log = None if rank == 0 else _log_path(log_folder, rank)
            job.start(rank, command, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, log)

        while job.running() and not job.failed() and not signals:
            job.kill_stopped()
            time.sleep(POLL_S)
        if signals:
            asked = signal.Signals(signals[0])
            _end(job, AFTER_SIGNAL[asked], signals)
            _say("interrupted" if asked == signal.SIGINT else f"stopped by {asked.name}")
            return 128 + asked
        if not job.failed():
            job.sweep()
            return 0
        _end(job, AFTER_FAILURE, signals)
        found = verdict(job.endings(), read_failures(failures), lambda rank: _log_end(_log_path(log_folder, rank)))
        _say(found.text)
        if logs is not None and num_processes > 1:
            _say(f"the output of all ranks but 0 is in {logs}")
        return found.code


class _Job:
    """The processes of one launch, while they start and end. Signals go only to groups that are surely its own."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._endings: dict[int, Ending] = {}
        self._stopped_since_ns: dict[int, int] = {}
        self._killed_after_s: dict[int, float] = {}  # how long ranks that we killed for it had been stopped
        self._looked_ns = 0
        self._told = False

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path | None) -> None:
        """Starts one rank. Without a log it shares input, output and errors with this process."""
        try:
            if log is None:
                process = subprocess.Popen(command, env=environment, start_new_session=True)
            else:
                with log.open("wb") as file:
                    process = subprocess.Popen(
                        command,
                        env=environment,
                        start_new_session=True,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
        except OSError as error:
            raise InputError(f"rank {rank} cannot be started ({error})") from error
        self._processes[rank] = process

    def running(self) -> bool:
        """Whether any rank has not ended yet, as of now."""
        for rank, process in self._processes.items():
            if rank not in self._endings and (code := _exit_code(process)) is not None:
                stopped_s = self._killed_after_s.get(rank)
                time_ns = time.monotonic_ns() if stopped_s is None else self._stopped_since_ns[rank]
                told = self._told and stopped_s is None
                self._endings[rank] = Ending(rank=rank, code=code, time_ns=time_ns, told=told, stopped_s=stopped_s)
        return len(self._endings) < len(self._processes)

    def kill_stopped(self) -> None:
        """Kills ranks that have been stopped for too long, by SIGSTOP or a terminal; not those in a debugger.

        By SIGKILL, the only signal that ends a stopped process.
        """
        now_ns = time.monotonic_ns()
        if now_ns - self._looked_ns < STOPPED_POLL_S * 1e9:
            return
        self._looked_ns = now_ns
        for rank, process in self._processes.items():
            if rank in self._endings or not _is_stopped(process.pid):
                self._stopped_since_ns.pop(rank, None)
                continue
            stopped_s = (now_ns - self._stopped_since_ns.setdefault(rank, now_ns)) / 1e9
            if stopped_s > STOPPED_LIMIT_S and rank not in self._killed_after_s:
                self._killed_after_s[rank] = stopped_s
                _signal_group(process, signal.SIGKILL)

    def failed(self) -> bool:
        return any(ending.code != 0 for ending in self._endings.values())

    def endings(self) -> tuple[Ending, ...]:
        return tuple(self._endings[rank] for rank in sorted(self._endings))

    def tell(self, number: signal.Signals) -> None:
        """Sends a signal to every rank that has not ended, and to what it has started."""
        self._told = True
        for rank, process in self._processes.items():
            if rank not in self._endings:
                _signal_group(process, number)

    def sweep(self) -> None:
        """Asks what the ranks have left behind to end, and gives it a moment before `close`.

        Python's tracker of shared memory needs it: it heeds no signal, and cleans up when the last process that a rank
        has started is gone.
        """
        for process in self._processes.values():
            _signal_group(process, signal.SIGTERM)
        time.sleep(LAST_WORDS_S)

    def close(self) -> None:
        """Kills whatever is left in any group, then lets go of the leaders."""
        for process in self._processes.values():
            _signal_group(process, signal.SIGKILL)
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel; it ends when it comes back
                process.wait(timeout=REAP_S)


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """How a process has ended, if it has, leaving it a zombie.

    A zombie keeps its number. As long as we do not reap it, no other process or group can have this number, and a
    signal to its group reaches what the rank has left behind or nobody.
    """
    if not hasattr(os, "waitid"):  # macOS: reaped here and now, so its group is killed here and now
        code = process.poll()
        if code is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        return code
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped (T), not traced (t). Only Linux says."""
    try:
        # The name, in parentheses, may hold anything; after it comes the state.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Sends a signal to the group that a process of ours leads, unless we have reaped it: then it leads none."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _end(job: _Job, ladder: Ladder, signals: Sequence[int]) -> None:
    """Ends all ranks, gently first. A further signal to this process takes the next step at once."""
    for wait_s, number in ladder:
        _wait(job, wait_s, signals)
        if not job.running():
            break
        job.tell(number)
    _wait(job, REAP_S, ())
    job.sweep()


def _wait(job: _Job, limit_s: float, signals: Sequence[int]) -> None:
    num_signals, end_s = len(signals), time.monotonic() + limit_s
    while job.running() and len(signals) == num_signals and time.monotonic() < end_s:
        time.sleep(POLL_S)


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """The signals that ask this process to end, in a list instead of as exceptions or as its end.

    An exception could come between the start of a process and the moment we know of it.
    """
    signals: list[int] = []
    before = {}
    for number in AFTER_SIGNAL:
        # What our caller ignores (nohup, a shell's background jobs) we ignore as well.
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, lambda number, _: signals.append(number))
    # Where the caller ignores the ends of its children, the kernel would keep no exit codes for us.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            if handler is not None:  # else it was not Python that had set it
                signal.signal(number, handler)


def _common_environment(num_processes: int, failures: Path) -> dict[str, str]:
    """What all ranks find in their environment: the names torchrun gives, and where to report a failure."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    defaults = {
        "GLOO_SOCKET_IFNAME": loopback,  # else gloo asks for the host's name, which may lead anywhere
        "OMP_NUM_THREADS": str(max(1, _num_usable_cores() // num_processes)),
        # A rank whose peer has gone says so in pages of C++ frames, before we can tell the first cause.
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }
    return (
        defaults
        | os.environ
        | {
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            FOLDER_VARIABLE: str(failures),
            LAUNCHER_VARIABLE: str(os.getpid()),
        }
    )


def _num_usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _free_port() -> int:
    """A port that was free a moment ago. Rank 0 binds it later; the system hands out others until it comes round."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _scratch_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="spindle-launch-", ignore_cleanup_errors=True)
    except OSError as error:
        raise InputError(f"no temporary folder can be made ({error.strerror}); set TMPDIR to a folder") from error


def _made_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made a folder ({error.strerror})") from error
    return folder


def _log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _log_end(path: Path) -> str:
    """The last lines of a log, as a terminal would show them; nothing if there is no log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_END_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    # A progress bar writes over its own line: what comes after the last return is what one would see.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip().split("\n")]
    return "\n".join(lines[-LOG_END_LINES:])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
