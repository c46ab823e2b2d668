"""Start the processes of a training script on this machine, watch and restart them, and leave none behind.

    start ──▶ watch ──▶ all exited with 0                                       ──▶ 0
      ▲            ├──▶ one failed: 2 s for the others, SIGTERM, 3 s, SIGKILL   ──▶ its code, or 1, and the verdict
      │            ├──▶ one is stopped (SIGSTOP) for 8 s, or hangs: SIGKILL, then as above ──▶ 1, and the verdict
      │            ├──▶ one saved and ended because of a signal to it: as above ──▶ 143
      │            └──▶ Ctrl-C, SIGTERM, SIGHUP: forwarded, then as above       ──▶ 130, 143, 129
      └── while restarts are left, unless a signal ended it, or the script failed at the same step twice (`restart`)

Every rank leads a session and a process group of its own, so that a signal reaches the rank's children, too. In any
case each group gets a SIGKILL at the end. Not covered: a process that a rank has moved to another session; and children
of ranks, if this launcher itself is killed by SIGKILL (`worker` ends the ranks then).
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from spindle.errors import InputError
from spindle.launch import variables
from spindle.launch.folders import locked, private_folder
from spindle.launch.mps import shared_gpu
from spindle.launch.ranks import (
    AFTER_FAILURE,
    POLL_S,
    Escalation,
    HostRanks,
    common_environment,
    end_ranks,
    folder_environment,
    log_end,
    log_path,
    make_folder,
)
from spindle.launch.restart import Fault, Restarts
from spindle.launch.verdict import Verdict, verdict

BYTES_PER_PROCESS = 128 << 20  # importing torch alone takes more

GRACE_S = 30.0  # in which ranks may save a checkpoint after SIGTERM; another signal cuts it short
STOPPED = 128 + signal.SIGTERM  # the exit code that asks a job queue to requeue the job

AFTER_SIGNAL: Mapping[int, Escalation] = {
    signal.SIGINT: ((0.0, signal.SIGINT), (2.0, signal.SIGTERM), (3.0, signal.SIGKILL)),
    signal.SIGTERM: ((0.0, signal.SIGTERM), (GRACE_S, signal.SIGKILL)),  # unless --grace says otherwise
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
    num_restarts: int = 0,
    least_processes: int | None = None,
    grace_s: float = GRACE_S,
) -> int:
    """Run a script in `num_processes` processes. Returns the exit code of the job, and prints on stderr why it is not
    0.

    Rank 0 shares this process's output. The output of other ranks goes to `rank-1.log`… in the folder `logs`, or to
    temporary files. With `share_gpu` all ranks use one GPU, through MPS. `environment` is added to that of the ranks.
    A job that fails is started again up to `num_restarts` times, with as few as `least_processes` when ranks are lost.
    After SIGTERM, ranks have `grace_s` seconds to save a checkpoint.
    Must be called in the main thread, which is the only one to receive signals.
    """
    if num_processes < 1:
        raise InputError(f"expected at least 1 process, got {num_processes}")
    max_processes = max(64, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // BYTES_PER_PROCESS)
    if num_processes > max_processes:
        raise InputError(
            f"{num_processes:,} processes do not fit in this host's memory; start at most {max_processes:,}"
        )
    min_processes = num_processes if least_processes is None else least_processes
    if not 1 <= min_processes <= num_processes or num_restarts < 0:
        raise InputError(
            f"expected --restarts of at least 0 and --least from 1 to {num_processes}, got {num_restarts} and "
            f"{min_processes}"
        )
    if not 0 <= grace_s < math.inf:
        raise InputError(f"expected --grace of at least 0 seconds, got {grace_s:g}")
    if script.suffix == ".json":
        raise InputError(f"{script}: expected a Python script; a plan is given to Planning(plan=...) in the script")
    if not script.is_file():
        raise InputError(f"{script}: {'is a directory; give a script' if script.is_dir() else 'no such file'}")
    with ExitStack() as stack:
        signals = stack.enter_context(_collected_signals())  # first, so that nothing interrupts the cleanup
        scratch = stack.enter_context(private_folder())
        log_folder = make_folder(logs or scratch / "logs")
        if logs is not None and not stack.enter_context(locked(log_folder)):
            raise InputError(f"{logs}: another running launch writes its logs here; give a different folder")
        environment = dict(environment or {})
        if num_restarts:
            environment[variables.MEMORY] = str(stack.enter_context(private_folder(in_memory=True)))
        restarts = Restarts(num_restarts, num_processes, min_processes)
        while True:
            attempt = _Attempt(
                command=[sys.executable, "-P", "-m", "spindle.launch.worker", str(script), *arguments],
                environment=environment,
                restart_environment=restarts.environment(),
                num_processes=restarts.num_processes,
                share_gpu=share_gpu,
                scratch=scratch,
                log_folder=log_folder,
                is_first=not restarts.num_restarts_done,
                grace_s=grace_s,
            )
            outcome = _run(attempt, signals)
            if isinstance(outcome, int):
                return outcome
            result, fault = outcome
            _print(result.text)
            if logs is not None and attempt.num_processes > 1:
                _print(f"the output of all ranks but 0 is in {logs}")
            decision = restarts.decide(fault)
            if num_restarts and not signals:
                _print(decision)
            if not restarts.continues or signals:
                return result.code


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One start of all processes."""

    command: Sequence[str]
    environment: Mapping[str, str]
    restart_environment: Mapping[str, str]
    num_processes: int
    share_gpu: bool
    scratch: Path
    log_folder: Path
    is_first: bool
    grace_s: float


def _run(attempt: _Attempt, signals: Sequence[int]) -> int | tuple[Verdict, Fault]:
    """Run a job once. Returns its exit code if it completed or was stopped by a signal, otherwise why it failed."""
    num_processes, log_folder = attempt.num_processes, attempt.log_folder
    with ExitStack() as stack:
        # In memory: a full disk must not keep ranks from finding each other.
        private = stack.enter_context(private_folder(in_memory=True))
        activity = make_folder(private / "activity")
        shared = stack.enter_context(shared_gpu(num_processes)) if attempt.share_gpu else {}
        job = stack.enter_context(closing(HostRanks(range(num_processes), activity)))
        common = common_environment(num_processes) | folder_environment(attempt.scratch, private, activity)
        common |= dict(attempt.restart_environment) | shared | dict(attempt.environment)
        for rank in range(num_processes):
            if signals:
                break
            log = None if rank == 0 else log_path(log_folder, rank)
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            job.start(rank, attempt.command, common | own, log, appends=not attempt.is_first)

        # Watch until all are done, one fails, or we are asked to stop.
        while job.running() and not job.failed() and not signals:
            job.kill_stopped()
            job.watch_activities()
            time.sleep(POLL_S)
        if signals:
            received = signal.Signals(signals[0])
            escalation = AFTER_SIGNAL[received]
            if received == signal.SIGTERM:
                escalation = ((0.0, signal.SIGTERM), (attempt.grace_s, signal.SIGKILL))
            end_ranks(job, escalation, signals)
            _print("interrupted" if received == signal.SIGINT else f"stopped by {received.name}")
            return 128 + received
        if not job.failed():
            job.sweep()
            return 0
        end_ranks(job, AFTER_FAILURE, signals)
        result = verdict(job.endings(), job.failures(), lambda rank: log_end(log_path(log_folder, rank)))
        if result.code == STOPPED:  # ranks got the signal themselves, saved a checkpoint and ended
            _print("stopped by SIGTERM")
            return STOPPED
        activities = job.activities().values()
        steps = [record.step for record in activities if record.step is not None]
        every = next((record.checkpoint_every for record in activities if record.checkpoint_every), None)
        step = max(steps, default=None) if result.is_lost else result.step
        return result, Fault(rank=result.rank, is_lost=result.is_lost, step=step, checkpoint_every=every)


@contextmanager
def _collected_signals() -> Iterator[list[int]]:
    """Collect the signals that ask this process to end in a list, instead of raising or ending.

    An exception could be raised between the start of a process and the assignment of its handle.
    """
    signals: list[int] = []
    before = {}
    for number in (*AFTER_SIGNAL, signal.SIGUSR1):  # job queues send it as a warning; treated like SIGTERM
        # Signals that our caller ignores (nohup, background jobs of a shell) stay ignored.
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(
                number, lambda number, _: signals.append(signal.SIGTERM if number == signal.SIGUSR1 else number)
            )
    # If the caller ignores SIGCHLD, the kernel keeps no exit codes.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: it was not set by Python
                signal.signal(number, handler)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
