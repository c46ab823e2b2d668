"""Executes actions through Slurm: `sbatch` starts an attempt, `scancel --signal=TERM` stops it, and reports come from
`squeue` and files.

    <folder>/<job>-<attempt>/   batch.sh    the script that was submitted
                                activity/   what ranks are doing (`launch.activity`)
                                failures/   why they failed (`launch.failure`)
                                exit        the exit code of `srun`, once it has ended

The comment of the Slurm job names the attempt, so the next scheduler finds it wherever the last one died. The folder
must be on a file system that all nodes share. While the controller does not answer, nothing changes, and jobs continue
to train.
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
from spindle.fleet.events import NodeShare
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
# After this time, `status` explains why an attempt is pending, and its job is placed elsewhere if others have its GPUs.
_EXPLAINED_S = 60.0
_SIGNAL_S = 120  # before a time limit
_GPUS = r"gpu:(?:([A-Za-z][\w.-]*):)?(\d+)"
_SINFO = ((0, 128), (128, 384), (384, 640), (640, 704))  # columns of its lines
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """A node's GPUs, how many of them jobs have, and its state."""

    kind: str
    num_gpus: int
    num_used: int
    state: str


def slurm_nodes() -> dict[str, SlurmNode]:
    """Nodes by name."""
    nodes = {}
    columns = "NodeList:128,Gres:256,GresUsed:256,StateLong:64"
    for line in slurm("sinfo", "--Node", "--noheader", f"--Format={columns}").splitlines():
        name, gres, used, state = (line[begin:end].strip() for begin, end in _SINFO)
        match = re.search(_GPUS, gres)
        num_used = sum(int(each[2]) for each in re.finditer(_GPUS, used))
        nodes[name] = SlurmNode(
            kind=(match[1] or "") if match else "",
            num_gpus=int(match[2]) if match else 0,
            num_used=num_used,
            state=state,
        )
    return nodes


def slurm_fleet(described: Fleet | None) -> Fleet:
    """The nodes of a Slurm cluster that have GPUs, of the kinds that its configuration names."""
    from spindle.fleet.machines import preset_of

    islands, names = [], []
    for name, node in slurm_nodes().items():
        kind = node.kind
        if not node.num_gpus:
            continue
        if not kind:
            raise InputError(f"Slurm's node {name} has GPUs without a type; name it in gres.conf (Type=a100)")
        known = {} if described is None else {each.kind.name: each for each in described.cluster.islands}
        island: Island = known.get(kind) or preset_of(kind, f"Slurm's node {name}, {kind}")
        # Slurm's name of the kind, which `--gpus-per-node` needs.
        islands.append(replace(island, num_devices=node.num_gpus, kind=replace(island.kind, name=kind)))
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
    nodes: tuple[NodeShare, ...]
    slurm_id: str
    is_script: bool
    hangs: HangDetector
    seen_s: float = 0.0  # when squeue listed it last
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
        self._others: dict[str, int] = {}  # devices of a node that no attempt of ours has
        self._next_poll_s = self._next_nodes_s = self._polled_s = 0.0
        slurm_nodes()  # refuses early

    def nodes(self) -> Mapping[str, NodeStatus]:
        if time.monotonic() >= self._next_nodes_s:
            self._next_nodes_s = time.monotonic() + 2 * _POLL_S
            with suppress(FleetError):  # the controller is away; nodes are not, as far as is known
                nodes = {}
                listed = slurm_nodes()
                before, self._others = self._others, self._of_others(listed)
                for name, node in listed.items():
                    plain = node.state.rstrip("*~#!%$@^-+")
                    if node.state.endswith("*") or plain.startswith(("down", "fail", "unknown", "power")):
                        continue
                    drains = plain.startswith(("drain", "maint", "reboot"))
                    if drains or plain.startswith(_UP):
                        nodes[name] = NodeStatus(
                            identity=name,
                            drain_s=float(_SIGNAL_S) if drains else None,
                            # An attempt may have ended between the two questions.
                            num_occupied=min(self._others[name], before.get(name, self._others[name])),
                        )
                self._nodes = nodes
        return self._nodes

    def _of_others(self, nodes: Mapping[str, SlurmNode]) -> dict[str, int]:
        """How many devices of each node are used, and not by our attempts."""
        self._poll_queue(is_forced=True)  # afterwards: what has begun since then is ours, and not counted yet
        used = {name: node.num_used for name, node in nodes.items()}
        for attempt in self._attempts.values():
            for share in attempt.nodes if attempt.state not in ("PENDING", "GONE") else ():
                if share.node in used:
                    used[share.node] -= share.num_devices
        return {name: max(0, number) for name, number in used.items()}

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
            nodes=tuple(NodeShare(node=name, num_devices=count) for name, count in data.get("nodes", {}).items()),
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
            "nodes": {share.node: share.num_devices for share in start.nodes},
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

    def prepare(self, start: AttemptStart) -> bool:
        return False  # Slurm starts nothing where devices are not free

    def is_prepared(self, key: Key) -> bool | None:
        return False

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
            if now_s - attempt.pending_s <= _EXPLAINED_S:
                return replace(report, phase=PENDING, reason="Slurm has not started it yet")
            waits = f"Slurm leaves it pending ({attempt.reason})"
            return replace(report, phase=PENDING, reason=waits, is_crowded_out=self._is_crowded_out(attempt))
        if attempt.state == "GONE":
            if attempt.grace_s is not None:
                return replace(report, phase=ENDED, outcome=STOPPED)
            if time.monotonic() - attempt.seen_s > _GONE_S:
                return replace(report, phase=LOST, reason=attempt.hung or "Slurm has ended it, or its node is gone")
        return report

    def _is_crowded_out(self, attempt: _SlurmAttempt) -> bool:
        """Whether an attempt does not fit on its nodes while others hold devices there."""
        sizes = dict(zip(self._fleet.node_names, self._fleet.size_of_node, strict=True))
        return any(
            self._nodes[share.node].num_occupied + share.num_devices > sizes[share.node]
            for share in attempt.nodes
            if share.node in self._nodes
        )

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
