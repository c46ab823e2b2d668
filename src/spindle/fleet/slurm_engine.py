"""Slurm executes actions: a start is an `sbatch`, a stop `scancel --signal=TERM`, a report what `squeue` and files say.

    <folder>/<job>-<attempt>/   batch.sh    the script that was submitted
                                activity/   what ranks are doing (`launch.activity`)
                                failures/   why they failed (`launch.failure`)
                                exit        the exit code of `srun`, once it has ended

The attempt is named in the comment of the Slurm job, so the next scheduler finds it whenever the last one died.
The folder must be on a file system that all nodes share. While the controller does not answer, nothing changes: jobs
train on.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spindle.artifact import write_atomically
from spindle.cluster import Cluster, Island
from spindle.errors import FleetError, InputError
from spindle.fleet.engine import ENDED, LOST, PENDING, RUNNING, AttemptReport, AttemptStart, Key, NodeStatus
from spindle.fleet.fleet import Fleet
from spindle.launch import variables
from spindle.launch.activity import HangDetector, hung_limit_s, read_activities
from spindle.launch.agent import COMPLETED, FAILED, STOPPED, workload_report
from spindle.launch.failure import parse_failures
from spindle.launch.ranks import log_end, log_path
from spindle.launch.slurm_rank import REPORTS_FOLDER

_COMMAND_S = 20.0  # until a command of Slurm is given up
_POLL_S = 1.0  # between two calls of squeue
_GONE_S = 15.0  # until an attempt that squeue does not list, and that left no exit code, is lost
_EXPLAINED_S = 60.0  # after which it is explained why an attempt is pending
_SIGNAL_S = 120  # before a time limit
_UP = ("idle", "mixed", "allocated", "completing", "planned", "reserved")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScript:
    """What a batch script asks of Slurm: so many `devices` of a kind on each node, with a rank for each device."""

    name: str
    command: tuple[str, ...]
    devices: tuple[int, ...]
    kind: str = ""
    nodelist: tuple[str, ...] = ()
    folder: str = ""
    output: str = ""
    comment: str = ""
    is_script: bool = True
    exit_file: str = ""
    exports: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        is_even = len(set(self.devices)) == 1
        prefix = f"{self.kind}:" if self.kind else ""
        output = self.output.replace("%", "%%")  # which would begin a pattern
        requests = {"job-name": self.name, "nodes": str(len(self.devices))}
        if is_even:
            requests |= {"ntasks-per-node": str(self.devices[0]), "gpus-per-node": f"{prefix}{self.devices[0]}"}
        else:  # Slurm puts as many ranks on a node as it takes GPUs there
            requests |= {"ntasks": str(sum(self.devices)), "gpus-per-task": f"{prefix}1"}
        requests["signal"] = f"TERM@{_SIGNAL_S}"
        requests |= {"nodelist": ",".join(self.nodelist)} if self.nodelist else {}
        requests |= {"comment": self.comment} if self.comment else {}
        requests |= {"chdir": self.folder} if self.folder else {}
        requests |= {"output": f"{output}.batch", "open-mode": "append"} if self.output else {}
        # sbatch reads quotes as a shell does.
        lines = [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in requests.items()]
        lines = ["#!/bin/bash", *lines, "#SBATCH --no-requeue", ""]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.exports.items()]
        lines.append(f"export {variables.SECRET}=$(head -c 32 /dev/urandom | base64)")
        worker = [sys.executable, "-P", "-m", "spindle.launch.slurm_rank"] if self.is_script else []
        options = ["--kill-on-bad-exit=1"]
        options += [] if is_even else ["--gpu-bind=none"]  # as elsewhere, a rank sees all GPUs of its node
        options += [f"--output={output}/rank-%t.log", "--open-mode=append"] if self.output else []
        lines.append(f"srun {shlex.join(options)} {shlex.join([*worker, *self.command])}")
        if self.exit_file:
            exit_file = shlex.quote(self.exit_file)
            lines += ["code=$?", f"echo $code > {exit_file}.part && mv {exit_file}.part {exit_file}", "exit $code"]
        return "\n".join(lines) + "\n"


def slurm(*command: str) -> str:
    """The output of a command of Slurm."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S)
    except FileNotFoundError:
        raise InputError(f"{command[0]} is not installed; --engine slurm needs Slurm's commands") from None
    except subprocess.TimeoutExpired:
        raise FleetError(f"{command[0]} has not answered for {_COMMAND_S:.0f} s") from None
    if answer.returncode:
        raise FleetError(f"{command[0]}: {(answer.stderr.strip() or answer.stdout.strip()).splitlines()[-1]}")
    return answer.stdout


def slurm_nodes() -> dict[str, tuple[str, int, str]]:
    """Nodes by name: the kind and number of their GPUs, and their state."""
    found = {}
    for line in slurm("sinfo", "--Node", "--noheader", "--format=%N|%G|%T").splitlines():
        name, gres, state = line.strip().split("|")
        match = re.search(r"gpu:(?:([A-Za-z][\w.-]*):)?(\d+)", gres)
        found[name] = (match[1] or "", int(match[2]), state) if match else ("", 0, state)
    return found


def slurm_fleet(described: Fleet | None) -> Fleet:
    """The nodes of a Slurm cluster that have GPUs, of the kinds that its configuration names."""
    from spindle.fleet.machines import preset_of

    islands, names = [], []
    for name, (kind, count, _) in slurm_nodes().items():
        if not count:
            continue
        if not kind:
            raise InputError(f"Slurm's node {name} has GPUs without a type; name it in gres.conf (Type=a100)")
        known = {} if described is None else {each.kind.name: each for each in described.cluster.islands}
        island: Island = known.get(kind) or preset_of(kind, f"Slurm's node {name}, {kind}")
        # Slurm's name of the kind, which `--gpus-per-node` needs.
        islands.append(replace(island, num_devices=count, kind=replace(island.kind, name=kind)))
        names.append(name)
    if not islands:
        raise InputError("Slurm has no node with GPUs; see GresTypes in slurm.conf, and gres.conf")
    teams = () if described is None else described.teams
    return Fleet(cluster=Cluster(name="slurm", islands=tuple(islands)), node_names=tuple(names), teams=teams)


@dataclass(slots=True)
class _SlurmAttempt:
    folder: Path
    logs: str
    num_ranks: int
    slurm_id: str
    is_script: bool
    hangs: HangDetector
    seen_s: float = 0.0
    pending_s: float | None = None
    grace_s: float | None = None  # it was asked to stop
    kill_s: float | None = None  # when its grace is over, which begins with the signal
    hung: str = ""
    state: str = "PENDING"
    reason: str = ""


class SlurmEngine:
    """Submits, signals and watches Slurm jobs."""

    def __init__(self, fleet_id: str, fleet: Fleet, *, folder: Path) -> None:
        self._prefix, self._fleet, self._folder = f"spindle/{fleet_id}/", fleet, folder / "slurm"
        self._attempts: dict[Key, _SlurmAttempt] = {}
        self._discarded: set[str] = set()  # Slurm jobs to be cancelled, until squeue lists them no more
        self._nodes: dict[str, NodeStatus] = {}
        self._next_poll_s = self._next_nodes_s = self._polled_s = 0.0
        slurm_nodes()  # refuses early

    def nodes(self) -> Mapping[str, NodeStatus]:
        if time.monotonic() >= self._next_nodes_s:
            self._next_nodes_s = time.monotonic() + 2 * _POLL_S
            with suppress(FleetError):  # the controller is away; nodes are not, as far as is known
                found = {}
                for name, (_, _, state) in slurm_nodes().items():
                    plain = state.rstrip("*~#!%$@^-+")
                    if state.endswith("*") or plain.startswith(("down", "fail", "unknown", "power")):
                        continue
                    drains = plain.startswith(("drain", "maint", "reboot"))
                    if drains or plain.startswith(_UP):
                        found[name] = NodeStatus(identity=name, drain_s=float(_SIGNAL_S) if drains else None)
                self._nodes = found
        return self._nodes

    def adopt(self) -> Sequence[Key]:
        queued = self._queued()
        for path in sorted(self._folder.glob("*/attempt.json")):
            data = json.loads(path.read_text())
            if data["prefix"] != self._prefix:
                continue
            key = (data["job"], data["attempt"])
            slurm_id = data["slurm_id"] or queued.get(key, "")
            if slurm_id or (path.parent / "exit").exists():  # otherwise its scheduler died before sbatch
                self._attempts[key] = self._known(path.parent, {**data, "slurm_id": slurm_id})
        for key in queued.keys() - self._attempts.keys():  # discarded while the controller was away
            data = {"logs": "", "num_ranks": 1, "slurm_id": queued[key], "is_script": False}
            self._attempts[key] = self._known(self._attempt_folder(key), data)
        self._poll_queue(is_forced=True)
        return list(self._attempts)

    def _attempt_folder(self, key: Key) -> Path:
        return self._folder / f"{key[0]}-{key[1]}"

    def _known(self, folder: Path, data: Mapping[str, Any]) -> _SlurmAttempt:
        return _SlurmAttempt(
            folder=folder,
            logs=data["logs"],
            num_ranks=data["num_ranks"],
            slurm_id=data["slurm_id"],
            is_script=data["is_script"],
            hangs=HangDetector(data["num_ranks"], hung_limit_s()),
            seen_s=time.monotonic(),
        )

    def start(self, start: AttemptStart) -> None:
        key = (start.job, start.attempt)
        folder = self._attempt_folder(key)
        for name in ("activity", "failures"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        logs = Path(start.submission.logs)
        logs.mkdir(parents=True, exist_ok=True)
        exports = {
            variables.ATTEMPT: str(start.attempt),
            variables.ACTIVITY: str(folder / "activity"),
            variables.RECORD_S: "1",
            variables.WORKLOAD_REPORT: str(workload_report(start.submission.logs)),
            REPORTS_FOLDER: str(folder / "failures"),
            **start.submission.environment,
        }
        if start.plan:
            for variable, text in ((variables.PLAN, start.plan), (variables.PLAN_PROFILE, start.profile)):
                (folder / f"{variable}.json").write_text(text)
                exports[variable] = str(folder / f"{variable}.json")
        kind = self._fleet.kinds[self._fleet.kind_of_node[self._fleet.node_number(start.nodes[0].node)]].name
        batch = BatchScript(
            name=start.job,
            command=start.submission.command,
            devices=tuple(share.num_devices for share in start.nodes),
            kind=kind,
            nodelist=tuple(share.node for share in start.nodes),
            folder=start.submission.folder,
            output=str(logs),
            comment=f"{self._prefix}{start.job}/{start.attempt}",
            is_script=start.submission.is_script,
            exit_file=str(folder / "exit"),
            exports=exports,
        )
        (folder / "batch.sh").write_text(batch.text)
        data = {
            "prefix": self._prefix,
            "job": start.job,
            "attempt": start.attempt,
            "logs": str(logs),
            "num_ranks": sum(share.num_devices for share in start.nodes),
            "slurm_id": "",
            "is_script": start.submission.is_script,
        }
        write_atomically(folder / "attempt.json", json.dumps(data))
        # It may be queued already: sbatch did not answer in time, or the scheduler died before it could note the id.
        slurm_id = self._queued().get(key) or slurm("sbatch", "--parsable", str(folder / "batch.sh")).partition(";")[0]
        data["slurm_id"] = slurm_id.strip()
        write_atomically(folder / "attempt.json", json.dumps(data))
        self._attempts[key] = self._known(folder, data)

    def _queued(self) -> dict[Key, str]:
        """Slurm's job ids of this fleet's attempts, from their comments."""
        queued = {}
        for line in slurm("squeue", "--noheader", "--format=%i|%k").splitlines():
            slurm_id, _, comment = line.strip().partition("|")
            job, _, attempt = comment.removeprefix(self._prefix).rpartition("/")
            if comment.startswith(self._prefix) and attempt.isdigit():
                queued[job, int(attempt)] = slurm_id
        return queued

    def stop(self, key: Key, grace_s: float) -> None:
        attempt = self._attempts.get(key)
        if attempt is not None and attempt.grace_s is None:
            attempt.grace_s = grace_s
            self._signal(attempt)

    def _signal(self, attempt: _SlurmAttempt) -> None:
        """SIGTERM to the ranks, whose grace begins then. While the controller is away, the next poll tries again."""
        assert attempt.grace_s is not None
        with suppress(FleetError):
            steps = slurm("squeue", "--steps", f"--jobs={attempt.slurm_id}", "--noheader", "--format=%i").split()
            if any(step.partition(".")[2].isdigit() for step in steps):  # beside `batch` and `extern`
                slurm("scancel", "--signal=TERM", attempt.slurm_id)
            else:  # it has no ranks yet
                slurm("scancel", attempt.slurm_id)
            attempt.kill_s = time.monotonic() + attempt.grace_s

    def discard(self, key: Key) -> None:
        attempt = self._attempts.pop(key, None)
        if attempt is not None:
            self._discarded.add(attempt.slurm_id)
            with suppress(FleetError):
                slurm("scancel", attempt.slurm_id)
            shutil.rmtree(attempt.folder, ignore_errors=True)

    def poll(self) -> Sequence[AttemptReport]:
        self._poll_queue()
        return [self._report(key, attempt) for key, attempt in list(self._attempts.items())]

    def _poll_queue(self, *, is_forced: bool = False) -> None:
        now_s = time.monotonic()
        if now_s < self._next_poll_s and not is_forced:
            return
        self._next_poll_s = now_s + _POLL_S
        try:
            lines = slurm("squeue", "--noheader", "--format=%i|%T|%r").splitlines()
        except FleetError:
            for attempt in self._attempts.values():
                attempt.seen_s = now_s  # as far as is known
            return
        queue = {number: (state, reason) for number, state, reason in (line.strip().split("|", 2) for line in lines)}
        self._discarded &= queue.keys()
        for slurm_id in self._discarded:
            if queue[slurm_id][0] != "COMPLETING":
                with suppress(FleetError):
                    slurm("scancel", slurm_id)
        elapsed_s, self._polled_s = min(now_s - self._polled_s, 2 * _POLL_S), now_s
        for attempt in self._attempts.values():
            entry = queue.get(attempt.slurm_id)
            if entry is None:
                attempt.state = "GONE"
                continue
            attempt.seen_s, (attempt.state, attempt.reason) = now_s, entry
            if attempt.grace_s is not None and attempt.kill_s is None:
                self._signal(attempt)
            if attempt.kill_s is not None and now_s > attempt.kill_s:
                with suppress(FleetError):
                    slurm("scancel", "--signal=KILL", "--full", attempt.slurm_id)
            if attempt.state == "RUNNING" and attempt.is_script and not attempt.hung:
                activities = read_activities(attempt.folder / "activity", range(attempt.num_ranks))
                for rank, text in attempt.hangs.hung(activities, elapsed_s).items():
                    attempt.hung = f"rank {rank} {text}"
                if attempt.hung:
                    with suppress(FleetError):
                        slurm("scancel", "--signal=KILL", attempt.slurm_id)

    def _report(self, key: Key, attempt: _SlurmAttempt) -> AttemptReport:
        activities = read_activities(attempt.folder / "activity", range(attempt.num_ranks)).values()
        steps = [activity.step for activity in activities if activity.step is not None]
        times_s = [activity.step_s for activity in activities if activity.step_s is not None]
        report = AttemptReport(
            job=key[0],
            attempt=key[1],
            phase=RUNNING,
            step=max(steps, default=None),
            num_taken=max((activity.num_taken for activity in activities), default=0),
            step_s=max(times_s, default=None),
            checkpoints=next((activity.checkpoints for activity in activities if activity.checkpoints), ""),
            tasks=next((activity.tasks for activity in activities if activity.tasks), ""),
        )
        with suppress(OSError, ValueError):
            return self._ended(report, attempt, int((attempt.folder / "exit").read_text()))
        if attempt.state == "PENDING":
            now_s = time.monotonic()
            attempt.pending_s = now_s if attempt.pending_s is None else attempt.pending_s
            waits = f"Slurm leaves it pending ({attempt.reason}): its devices are occupied by others"
            is_long = now_s - attempt.pending_s > _EXPLAINED_S
            return replace(report, phase=PENDING, reason=waits if is_long else "Slurm has not started it yet")
        if attempt.state == "GONE":
            if attempt.grace_s is not None:
                return replace(report, phase=ENDED, outcome=STOPPED)
            if time.monotonic() - attempt.seen_s > _GONE_S:
                return replace(report, phase=LOST, reason=attempt.hung or "Slurm has ended it, or its node is gone")
        return report

    def _ended(self, report: AttemptReport, attempt: _SlurmAttempt, code: int) -> AttemptReport:
        if code == 0:
            return replace(report, phase=ENDED, outcome=COMPLETED)
        if attempt.grace_s is not None or code == 143:
            return replace(report, phase=ENDED, outcome=STOPPED)
        failures = [
            failure
            for path in (attempt.folder / "failures").glob("*.failures")
            for failure in parse_failures(path.read_bytes())
        ]
        own = sorted((each for each in failures if each.kind == "own"), key=lambda failure: failure.time_ns)
        if own and not attempt.hung:
            first = own[0]
            text = f"error: rank {first.rank} failed: {first.summary}\n{first.text}".rstrip()
            return replace(report, phase=ENDED, outcome=FAILED, by_script=True, reason=text, step=first.step)
        end = log_end(log_path(Path(attempt.logs), 0))
        text = attempt.hung or f"error: a rank ended with exit code {code}; the end of rank 0's output:\n{end}"
        return replace(report, phase=ENDED, outcome=FAILED, reason=text)

    def recover(self) -> bool:
        return True

    def close(self, *, end_machines: bool) -> None:
        if end_machines:
            for key in list(self._attempts):
                self.discard(key)
