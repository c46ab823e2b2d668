"""The ranks of a job on this host: started, watched and ended.

Every rank leads a session and a process group of its own, so that a signal reaches the rank's children, too. Ranks die
with the thread that started them: start them from a main thread.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from spindle.errors import InputError
from spindle.launch import variables
from spindle.launch.activity import Activity, HangDetector, SlownessDetector, hung_limit_s, read_activities
from spindle.launch.failure import Failure, parse_failures
from spindle.launch.verdict import Ending

POLL_S = 0.02
SWEEP_S = 0.2
# Seconds; a rank that is stopped for longer counts as failed, because the others would wait for it forever.
STOPPED_LIMIT_S = 8.0
STOPPED_POLL_S = 0.5
HUNG_POLL_S = 1.0
REAP_S = 5.0
MAX_TEMPORARY_BYTES = 70  # the largest number of bytes in the path of a folder for temporary files
LOG_END_LINES = 20
LOG_END_BYTES = 1 << 16

# How ranks are ended: pairs of seconds to wait, and a signal to those that still run.
Escalation = tuple[tuple[float, signal.Signals], ...]
AFTER_FAILURE: Escalation = ((2.0, signal.SIGTERM), (3.0, signal.SIGKILL))


class HostRanks:
    """The processes of these ranks. Signals are sent only to process groups that certainly belong to them. `is_whole`
    is False if the job has ranks on other hosts, too."""

    def __init__(self, ranks: Sequence[int], activity: Path | None = None, *, is_whole: bool = True) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.ranks, self._activity = ranks, activity
        self._hangs = HangDetector(len(ranks), hung_limit_s(), sees_all=is_whole)
        self._slow = SlownessDetector()
        self._reports: dict[int, int] = {}  # descriptors of pipes
        self._reported: dict[int, bytes] = {}
        self._endings: dict[int, Ending] = {}
        self._stopped_since_ns: dict[int, int] = {}
        self._killed: dict[int, tuple[int, str]] = {}  # ranks that were stopped or hung: since when, and why
        self._last_stopped_poll_ns = self._last_hung_poll_ns = time.monotonic_ns()
        self._has_signalled = False

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None,
        appends: bool = False,
        *,
        folder: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start one rank, in `folder`. Without a log it shares stdin, stdout and stderr with this process."""
        with ExitStack() as stack:
            try:
                reports, reporting = os.pipe()
                stack.callback(os.close, reporting)
                os.set_blocking(reports, False)
                self._reports[rank], self._reported[rank] = reports, b""
                file = None if log is None else stack.enter_context(log.open("ab" if appends else "wb"))
                self._processes[rank] = subprocess.Popen(
                    command,
                    env=dict(environment) | {variables.REPORTS: str(reporting)},
                    pass_fds=(reporting, *pass_fds),
                    cwd=folder,
                    start_new_session=True,
                    stdin=None if file is None else subprocess.DEVNULL,
                    stdout=file,
                    stderr=None if file is None else subprocess.STDOUT,
                )
            except OSError as error:
                raise InputError(f"rank {rank} cannot be started ({error})") from error

    def running(self) -> bool:
        """Whether any rank is still running. Records the endings of those that are not."""
        self._read_reports()
        for rank, process in self._processes.items():
            if rank not in self._endings and (code := _exit_code(process)) is not None:
                time_ns, because = self._killed.get(rank, (time.monotonic_ns(), None))
                was_signalled = self._has_signalled and because is None
                self._endings[rank] = Ending(
                    rank=rank, code=code, time_ns=time_ns, was_signalled=was_signalled, killed_because=because
                )
        return len(self._endings) < len(self._processes)

    def _read_reports(self) -> None:
        """Read what ranks have reported, so that no pipe fills up."""
        for rank, descriptor in self._reports.items():
            with suppress(BlockingIOError):
                while data := os.read(descriptor, 1 << 16):
                    self._reported[rank] += data

    def failures(self) -> tuple[Failure, ...]:
        """What ranks have reported about themselves."""
        self._read_reports()
        failures = [failure for data in self._reported.values() for failure in parse_failures(data)]
        return tuple(sorted(failures, key=lambda failure: (failure.time_ns, failure.rank)))

    def kill_stopped(self) -> None:
        """Kill ranks that have been stopped for too long, by SIGSTOP or a terminal, but not those in a debugger.
        SIGKILL is the only signal that ends a stopped process."""
        now_ns = time.monotonic_ns()
        if now_ns - self._last_stopped_poll_ns < STOPPED_POLL_S * 1e9:
            return
        self._last_stopped_poll_ns = now_ns
        for rank, process in self._processes.items():
            if rank in self._endings or not _is_stopped(process.pid):
                self._stopped_since_ns.pop(rank, None)
                continue
            since_ns = self._stopped_since_ns.setdefault(rank, now_ns)
            stopped_s = (now_ns - since_ns) / 1e9
            if stopped_s > STOPPED_LIMIT_S and rank not in self._killed:
                self._killed[rank] = since_ns, f"was stopped (SIGSTOP) for {stopped_s:.0f} s"
                _signal_group(process, signal.SIGKILL)

    def watch_activities(self) -> None:
        """Kill ranks that hang and report slow ones, from what all ranks record."""
        now_ns = time.monotonic_ns()
        elapsed_s = (now_ns - self._last_hung_poll_ns) / 1e9
        if self._activity is None or elapsed_s < HUNG_POLL_S:
            return
        self._last_hung_poll_ns = now_ns
        # if this process was stopped, too, that time does not count
        activities = self.activities()
        for notice in self._slow.notices(activities):
            print(f"note: {notice}", file=sys.stderr, flush=True)
        for rank, because in self._hangs.hung(activities, min(elapsed_s, 2 * HUNG_POLL_S)).items():
            if rank not in self._killed and rank not in self._endings:
                self._killed[rank] = now_ns, because
                _signal_group(self._processes[rank], signal.SIGKILL)

    def activities(self) -> dict[int, Activity]:
        """The last record of each rank that has written one."""
        return {} if self._activity is None else read_activities(self._activity, self.ranks)

    def failed(self) -> bool:
        return any(ending.code != 0 for ending in self._endings.values())

    def endings(self) -> tuple[Ending, ...]:
        return tuple(self._endings[rank] for rank in sorted(self._endings))

    def signal_running(self, number: signal.Signals) -> None:
        """Send a signal to every running rank and its children.

        SIGTERM goes to the ranks only, because a rank that saves a checkpoint first needs its DataLoader workers;
        `sweep` ends them later.
        """
        self._has_signalled = True
        for rank, process in self._processes.items():
            if rank in self._endings:
                continue
            if number == signal.SIGTERM and process.returncode is None:
                os.kill(process.pid, number)  # at worst a zombie, not reaped yet
            else:
                _signal_group(process, number)

    def sweep(self) -> None:
        """Send SIGTERM to processes that the ranks have left behind, and give them a moment before `close`.

        Python's shared memory tracker needs that moment: it ignores signals, and cleans up when the last child of a
        rank is gone.
        """
        for process in self._processes.values():
            _signal_group(process, signal.SIGTERM)
        time.sleep(SWEEP_S)

    def close(self) -> None:
        """Kill whatever is left in any group, then reap the ranks."""
        for process in self._processes.values():
            _signal_group(process, signal.SIGKILL)
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):  # stuck in a system call; it ends when the call returns
                process.wait(timeout=REAP_S)
        for descriptor in self._reports.values():
            os.close(descriptor)
        self._reports.clear()


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a process, if it has ended. The process stays a zombie.

    A zombie keeps its pid. As long as it is not reaped, no other process or group can get this pid, so a signal to its
    group reaches the rank's children or nobody.
    """
    if not hasattr(os, "waitid"):  # macOS: `poll` reaps the process, so its group must be killed now
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
    """Whether a process is stopped (T), not traced (t). Known on Linux only."""
    try:
        # The name, in parentheses, may contain anything; the state comes after it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to the process group of one of our processes, unless it has been reaped."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def end_ranks(ranks: HostRanks, escalation: Escalation, signals: Sequence[int] = ()) -> None:
    """End all ranks, gently first. Another signal to this process, in `signals`, skips the current wait."""
    for wait_s, number in escalation:
        _wait(ranks, wait_s, signals)
        if not ranks.running():
            break
        ranks.signal_running(number)
    _wait(ranks, REAP_S, ())
    ranks.sweep()


def _wait(ranks: HostRanks, limit_s: float, signals: Sequence[int]) -> None:
    num_signals, end_s = len(signals), time.monotonic() + limit_s
    while ranks.running() and len(signals) == num_signals and time.monotonic() < end_s:
        time.sleep(POLL_S)


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def log_end(path: Path) -> str:
    """The last lines of a log, as a terminal would show them; empty if there is no log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_END_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    # a progress bar overwrites its line, so only the text after the last carriage return is visible
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip().split("\n")]
    return "\n".join(lines[-LOG_END_LINES:])


def common_environment(
    num_processes: int, world_size: int | None = None, address: str = "127.0.0.1", port: int | None = None
) -> dict[str, str]:
    """The environment of the `num_processes` ranks of this host, of all ranks unless `world_size` says otherwise: the
    variables that torchrun sets, and how to talk to this launcher. Ranks find each other at `address` and `port`."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    defaults = {
        "OMP_NUM_THREADS": str(max(1, _num_usable_cores() // num_processes)),
        # a rank that loses a peer prints pages of C++ frames, above the first cause that we print
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }
    if address.startswith("127."):
        defaults["GLOO_SOCKET_IFNAME"] = loopback  # otherwise gloo resolves the host name, which may be any address
    return (
        defaults
        | os.environ
        | {
            "WORLD_SIZE": str(num_processes if world_size is None else world_size),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": address,  # for scripts that make a process group of their own
            "MASTER_PORT": str(_free_port() if port is None else port),
            variables.LAUNCHER: str(os.getpid()),
            variables.SECRET: secrets.token_hex(32),
        }
    )


def folder_environment(scratch: Path, private: Path, activity: Path) -> dict[str, str]:
    """The environment that names folders of a launcher: for temporary files, and in memory."""
    folders = {variables.STORE: str(private / "store"), variables.ACTIVITY: str(activity)}
    # Removed with everything that loaders of killed ranks leave in it. Paths of sockets have at most 107 bytes.
    temporary = scratch / "tmp"
    if len(os.fsencode(temporary)) <= MAX_TEMPORARY_BYTES:
        folders["TMPDIR"] = str(make_folder(temporary))
    return folders


def _num_usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _free_port() -> int:
    """A port that was free a moment ago. Rank 0 binds it later; the system hands out other ports in between."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot create this folder ({error.strerror})") from error
    return folder
