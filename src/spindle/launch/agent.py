"""An agent: the ranks of one attempt of a job on one node, for a scheduler elsewhere.

    listen ──▶ start ──▶ watch (a thread) ──▶ all exited with 0                ──▶ completed
                              ├──▶ stop was asked for, or the agent is cut off ──▶ stopped, or completed
                              └──▶ a rank failed, was killed or hangs          ──▶ failed, with the verdict

The agent decides nothing. It starts ranks with torchrun's variables, reports their progress, and ends them on request,
or if it cannot reach its cluster for 20 s, because another attempt may then have been started elsewhere. Ranks may also
be prepared while their devices are not free yet, and begin later (`standby`). Knows neither Ray nor Slurm.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from spindle.launch import standby, variables
from spindle.launch.folders import private_folder
from spindle.launch.node_memory import keep_memory, node_memory, remove_memory
from spindle.launch.ranks import (
    AFTER_FAILURE,
    HostRanks,
    common_environment,
    end_ranks,
    folder_environment,
    log_end,
    log_path,
    make_folder,
)
from spindle.launch.verdict import verdict

COMPLETED, STOPPED, FAILED = "completed", "stopped", "failed"
CUT_OFF_S = 20.0  # seconds without an answer of the cluster, after which an agent stops its ranks
STANDBY_S = 300.0  # seconds after which ranks that have not begun are ended, because their scheduler is gone
_PING_S = 2.0
_POLL_S = 0.05
_RECORD_S = "1"  # seconds between records of ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePart:
    """What one node runs of an attempt: `num_ranks` of `world_size` ranks, from `first_rank` on. Rank 0 listens on
    `address` and `port`, which are empty where all ranks are on one node. `plan` and `profile` are files as text.
    `memory` names the job on this node, on which its next attempt finds checkpoints in memory; empty: none are kept."""

    attempt: int
    command: tuple[str, ...]
    is_script: bool
    folder: str
    logs: str
    environment: Mapping[str, str]
    first_rank: int
    num_ranks: int
    world_size: int
    node_rank: int
    secret: str
    address: str = ""
    port: int = 0
    plan: str = ""
    profile: str = ""
    grace_s: float = 30.0
    memory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """The progress of a node's ranks. `is_ready`: ranks that were prepared could begin. `step` is the number of steps
    that are done, `num_taken` those of this attempt; `tasks` is a digest of what they train.

    Once they have ended: `outcome` says how, `is_own` whether the script raised an exception, `is_cause` whether the
    failure began on this node, at `failed_at` (seconds since the epoch).
    """

    is_started: bool = False
    is_ready: bool = False
    step: int | None = None
    num_taken: int = 0
    step_s: float | None = None
    checkpoints: str = ""
    tasks: str = ""
    outcome: str = ""
    is_own: bool = False
    is_cause: bool = False
    failed_at: float = 0.0
    reason: str = ""


class Agent:
    """Starts and watches ranks. `start` and `prepare` must be called from the main thread: ranks die with the thread
    that starts them. `is_connected` says whether the cluster answers. With `parent`, the process that started the
    agent, ranks are stopped at once when that is gone."""

    def __init__(self, is_connected: Callable[[], bool] = lambda: True, parent: int | None = None) -> None:
        self._is_connected, self._parent = is_connected, parent
        self._listening: socket.socket | None = None
        self._latest = PartReport()
        self._is_started = False
        self._standby: Path | None = None  # the folder of ranks that were prepared
        self._begin_variables: dict[str, str] | None = None  # the variables with which they begin
        self._stopping: float | None = None  # seconds of grace
        self._reason = ""
        self._thread: threading.Thread | None = None
        self._memory: Path | None = None  # for checkpoints, which outlives this agent

    @property
    def report(self) -> PartReport:
        return replace(self._latest, is_started=self._is_started)

    def listen(self, address: str) -> int:
        """Bind the port at which the ranks of all nodes find each other."""
        if self._listening is None:
            self._listening = socket.create_server((address, 0), backlog=1024)
        return int(self._listening.getsockname()[1])

    def start(self, part: NodePart) -> None:
        """Start the ranks. Once."""
        if self._thread is None:
            self._start_ranks(part)
            self._is_started = True

    def prepare(self, part: NodePart) -> None:
        """Start the ranks, which wait until they may begin. Once."""
        if self._thread is None:
            self._start_ranks(part, is_standby=True)

    def begin(self, environment: Mapping[str, str]) -> None:
        """Let the ranks that were prepared begin, with the variables that name their devices."""
        self._begin_variables, self._is_started = dict(environment), True

    def _start_ranks(self, part: NodePart, *, is_standby: bool = False) -> None:
        stack = ExitStack()
        try:
            scratch = stack.enter_context(private_folder())
            private = stack.enter_context(private_folder(in_memory=True))
            activity = make_folder(private / "activity")
            ranks = range(part.first_rank, part.first_rank + part.num_ranks)
            host = HostRanks(ranks, activity, is_whole=_is_whole(part))
            stack.callback(host.close)
            logs = make_folder(Path(part.logs))
            environment = self._environment(part, scratch, private, activity)
            if is_standby:
                self._standby = make_folder(private / "standby")
                environment[variables.STANDBY] = str(self._standby)
            else:
                environment |= self._memory_environment(part, stack)
            command = list(part.command)
            if part.is_script:
                command = [sys.executable, "-P", "-m", "spindle.launch.worker", *command]
            descriptors = [] if self._listening is None else [self._listening.fileno()]
            for local, rank in enumerate(ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(local)}
                passed = descriptors if rank == 0 and descriptors else []
                if not _is_whole(part):
                    own[variables.LISTENING] = str(passed[0]) if passed else ""
                log = log_path(logs, rank)
                if not is_standby:
                    _begin_log(log, part)
                host.start(rank, command, environment | own, log, True, folder=part.folder, pass_fds=passed)
            if self._listening is not None:
                self._listening.close()
        except BaseException:
            stack.close()
            raise
        self._thread = threading.Thread(target=self._watch, args=(part, host, stack), daemon=True)
        self._thread.start()

    def _memory_environment(self, part: NodePart, stack: ExitStack) -> dict[str, str]:
        """The variable that names the memory in which an earlier attempt, which has ended, may have left
        checkpoints."""
        if part.memory and _is_whole(part):  # ranks of several nodes do not see each other's
            self._memory = stack.enter_context(node_memory(part.memory, part.attempt))
        return {} if self._memory is None else {variables.MEMORY: str(self._memory)}

    def stop(self, grace_s: float, reason: str = "") -> None:
        """End the ranks, after a checkpoint within `grace_s` seconds."""
        if self._stopping is None or grace_s < self._stopping:
            self._stopping, self._reason = grace_s, self._reason or reason

    def _environment(self, part: NodePart, scratch: Path, private: Path, activity: Path) -> dict[str, str]:
        common = common_environment(part.num_ranks, part.world_size, part.address or "127.0.0.1", part.port or None)
        common |= folder_environment(scratch, private, activity)
        common = {name: value for name, value in common.items() if not name.startswith("RAY_")}
        if part.num_ranks < part.world_size:
            del common[variables.STORE]
            common["GROUP_RANK"] = str(part.node_rank)  # as torchrun numbers nodes
        common |= {
            variables.SECRET: part.secret,
            variables.ATTEMPT: str(part.attempt),
            variables.WORKLOAD_REPORT: str(workload_report(part.logs)),
            variables.RECORD_S: _RECORD_S,
        }
        if part.plan:
            for variable, text in ((variables.PLAN, part.plan), (variables.PLAN_PROFILE, part.profile)):
                path = private / f"{variable.lower()}.json"
                path.write_text(text)
                common[variable] = str(path)
        return common | dict(part.environment)

    def _watch(self, part: NodePart, host: HostRanks, stack: ExitStack) -> None:
        """Watch the ranks until they have ended, and end them."""
        with stack:
            ping_s = seen_s = begin_s = time.monotonic()
            waiting = self._standby
            while host.running() and not host.failed() and self._stopping is None:
                host.kill_stopped()
                host.watch_activities()
                self._note_progress(host)
                now_s = time.monotonic()
                if waiting is not None and self._begin_variables is not None:
                    self._begin_standby(part, waiting, stack)
                    waiting = None
                elif waiting is not None:
                    self._latest = replace(self._latest, is_ready=standby.are_ready(waiting, host.ranks))
                    if now_s - begin_s > STANDBY_S:
                        self.stop(0.0, f"its ranks were not started within {STANDBY_S:.0f} s")
                if self._parent is not None and os.getppid() != self._parent:
                    self.stop(part.grace_s, "the process that runs this node is gone")
                if now_s - ping_s > _PING_S:
                    ping_s = now_s
                    if self._is_connected():
                        seen_s = time.monotonic()
                    elif now_s - seen_s > CUT_OFF_S:
                        self.stop(part.grace_s, f"cut off from the cluster for {CUT_OFF_S:.0f} s")
                time.sleep(_POLL_S)
            if self._stopping is not None:
                end_ranks(host, ((0.0, signal.SIGTERM), (self._stopping, signal.SIGKILL)))
            elif host.failed():
                end_ranks(host, AFTER_FAILURE)
            else:
                host.sweep()
            self._note_progress(host)
            last = self._ending(part, host)
            was_killed = any(ending.code == -signal.SIGKILL for ending in host.endings())
            (keep_memory if last.outcome == FAILED or was_killed else remove_memory)(self._memory)
        self._latest = last

    def _begin_standby(self, part: NodePart, folder: Path, stack: ExitStack) -> None:
        assert self._begin_variables is not None
        for rank in range(part.first_rank, part.first_rank + part.num_ranks):
            _begin_log(log_path(Path(part.logs), rank), part)
        try:
            standby.begin(folder, self._begin_variables | self._memory_environment(part, stack))
        except OSError as error:  # no space: the ranks go on waiting, and are ended
            self.stop(0.0, f"its ranks could not be started ({error.strerror})")

    def _note_progress(self, host: HostRanks) -> None:
        activities = host.activities().values()
        if not activities:
            return
        steps = [activity.step for activity in activities if activity.step is not None]
        times_s = [activity.step_s for activity in activities if activity.step_s is not None]
        self._latest = replace(
            self._latest,
            step=max(steps, default=self._latest.step),
            num_taken=max(activity.num_taken for activity in activities),
            step_s=max(times_s, default=None),
            checkpoints=next((activity.checkpoints for activity in activities if activity.checkpoints), ""),
            tasks=next((activity.tasks for activity in activities if activity.tasks), ""),
        )

    def _ending(self, part: NodePart, host: HostRanks) -> PartReport:
        if not host.failed():
            return replace(self._latest, outcome=COMPLETED)
        if self._stopping is not None:
            return replace(self._latest, outcome=STOPPED, reason=self._reason)
        result = verdict(host.endings(), host.failures(), lambda rank: _own_log_end(part, rank))
        if result.code == 128 + signal.SIGTERM:  # not sent by this agent
            return replace(self._latest, outcome=STOPPED, reason="its ranks were stopped by a signal")
        with suppress(OSError), log_path(Path(part.logs), result.rank).open("a") as log:
            log.write(f"{result.text}\n")  # ranks have reported it, and printed nothing
        own = [failure for failure in host.failures() if failure.kind == "own"]
        follows = not own and any(failure.kind == "follows" for failure in host.failures())
        earliest_ns = min((failure.time_ns for failure in own), default=time.monotonic_ns())
        return replace(
            self._latest,
            outcome=FAILED,
            is_own=not result.is_lost,
            is_cause=not follows,
            failed_at=time.time() - (time.monotonic_ns() - earliest_ns) / 1e9,
            step=self._latest.step if result.step is None else result.step,
            reason=result.text,
        )


def _is_whole(part: NodePart) -> bool:
    """Whether a node has all ranks."""
    return part.num_ranks == part.world_size


def _own_log_end(part: NodePart, rank: int) -> str:
    """The last lines of a rank's output, without those of attempts before."""
    lines = log_end(log_path(Path(part.logs), rank)).splitlines()
    begins = [number for number, line in enumerate(lines, 1) if line.startswith("--- attempt ")]
    return "\n".join(lines[begins[-1] if begins else 0 :])


def workload_report(logs: str) -> Path:
    """The file to which a job writes what it trains, beside its logs."""
    return Path(logs) / "workload.json"


def _begin_log(log: Path, part: NodePart) -> None:
    """A line between the output of two attempts."""
    with suppress(OSError), log.open("ab") as file:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"--- attempt {part.attempt}, {part.world_size} ranks, {stamp}, {os.uname().nodename}\n".encode())
