"""Ray executes actions.

A start is one detached placement group: a bundle for each node with its devices, on nodes of their own, pinned by node
id, so that the scheduler's placement is what runs. In each bundle one agent, a detached actor without CPUs, starts the
ranks. Placement groups and agents are named after fleet, job and attempt: the next scheduler finds them by name.

    fleet/<fleet>/<job>/<attempt>           the placement group
    fleet/<fleet>/<job>/<attempt>/<number>  the agent of its bundle of that number
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from spindle import __version__
from spindle.cluster import Island
from spindle.errors import InputError, SpindleError
from spindle.fleet.engine import (
    ENDED,
    LOST,
    PENDING,
    RUNNING,
    STARTING,
    AttemptReport,
    AttemptStart,
    EngineLostError,
    Key,
    NodeStatus,
)
from spindle.fleet.ray_nodes import (
    NODE_LABEL,
    LocalNode,
    LocalRay,
    end_local_ray,
    import_ray,
    is_listening,
    start_local_ray,
)
from spindle.launch.agent import COMPLETED, CUT_OFF_S, FAILED, STOPPED, Agent, NodePart, PartReport

NAMESPACE = "spindle"
_ID_LABEL = "ray.io/node-id"
_PING_S = 3.0
_HEAD_LOST_S = 10.0  # without an answer of the head
_CREATE_S = 120.0  # until an agent is given up that does not come up
_OTHERS_S = 5.0  # that ranks of other nodes have after a failure of one


class RayAgent:
    """An agent as an actor. Ray calls its methods in the main thread of its process, one after the other."""

    def __init__(self) -> None:
        self._agent = Agent(is_connected=_cluster_answers, parent=os.getppid())  # the raylet

    def versions(self) -> tuple[str, str]:
        return platform.python_version(), __version__

    def listen(self, address: str) -> int:
        return self._agent.listen(address)

    def start(self, part: NodePart) -> None:
        self._agent.start(part)

    def report(self) -> PartReport:
        return self._agent.report

    def stop(self, grace_s: float) -> None:
        self._agent.stop(grace_s)


def _cluster_answers() -> bool:
    """Whether Ray's head answers within some seconds."""
    from ray._private.worker import global_worker

    try:
        global_worker.gcs_client.internal_kv_exists(b"spindle", b"spindle", timeout=_PING_S)
        return True
    except Exception:  # of any kind: there is no answer
        return False


@dataclass(slots=True)
class _RayAttempt:
    """An attempt in Ray. A thread brings it up; afterwards `agents` report."""

    start: AttemptStart | None  # None if it was adopted
    group: Any = None
    agents: list[Any] = field(default_factory=list)
    phase: str = PENDING
    reason: str = ""
    is_cancelled: bool = False
    is_discarded: bool = False  # what its thread still creates is freed by that
    is_stopped: bool = False  # without ever running
    reports: list[PartReport] = field(default_factory=list)
    calls: dict[int, Any] = field(default_factory=dict)  # reports that were asked for, by number of agent
    has_told_others: bool = False


class RayEngine:
    """`local` is a Ray that this fleet started on its machine, with `local_nodes`; otherwise `address` is one that
    others run. `fleet_id` tells the attempts of two fleets in one cluster apart."""

    def __init__(
        self,
        fleet_id: str,
        address: str,
        *,
        local: LocalRay | None = None,
        local_nodes: Sequence[LocalNode] = (),
        remember: Callable[[LocalRay], None] = lambda started: None,
        describe: Callable[[dict[str, Any]], Island | None] | None = None,
    ) -> None:
        self._prefix = f"fleet/{fleet_id}/"
        self.address, self.local, self._local_nodes = address, local, tuple(local_nodes)
        self._remember = remember  # as `start_local_ray` calls it, when Ray is started anew
        self._describe = describe  # what a node has, from what Ray says of it
        self._attempts: dict[Key, _RayAttempt] = {}
        self._alive: dict[str, NodeStatus] = {}
        self._ids: dict[str, str] = {}  # of nodes, by name
        self._hosts: dict[str, str] = {}
        self._checks: dict[str, Any] = {}  # of nodes, by id
        self._checked: dict[str, str] = {}  # by id: empty, or what is wrong
        self._answered_s = time.monotonic()
        self._lost_s: float | None = None
        self._ray = import_ray(is_local=local is not None or address.startswith(("127.", "localhost")))
        self._connect()

    def _connect(self) -> None:
        if not is_listening(self.address):
            raise InputError(f"{self.address}: there is no Ray; start one (ray start --head), or leave --address out")
        try:
            self._ray.init(
                address=self.address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=True,
            )
        except Exception as error:  # Ray raises errors of many kinds
            raise InputError(f"{self.address}: cannot join this Ray ({str(error).splitlines()[0]})") from error
        self._ray._private.worker._worker_logs_enabled = False  # logs of nodes that die: we say that they do
        self._agent_class = self._ray.remote(RayAgent)
        self._check = self._ray.remote(_versions)
        self._answered_s = time.monotonic()

    # Nodes.

    def nodes(self) -> Mapping[str, NodeStatus]:
        if not self._answers():
            return self._alive  # other calls would wait for the head
        draining = self._draining()
        alive = {}
        for node in self.alive_nodes():
            identity, labels = node["NodeID"], node.get("Labels") or {}
            name = node_name(node)
            if "node:__internal_head__" in node["Resources"] and NODE_LABEL not in labels and self.local is not None:
                continue
            self._ids[name], self._hosts[name] = identity, node["NodeManagerAddress"]
            has_passed = self._has_passed(identity, name)
            alive[name] = NodeStatus(
                identity=identity,
                is_checked=has_passed,
                drain_s=draining.get(identity),
                island=None if self._describe is None else self._describe(node),
            )
        self._alive = alive
        return alive

    def alive_nodes(self) -> list[dict[str, Any]]:
        """The nodes that Ray says are alive, as it describes them."""
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _answers(self) -> bool:
        """Whether the head answers now; raises when it has not for some time."""
        if _cluster_answers():
            self._answered_s = time.monotonic()
            return True
        if time.monotonic() - self._answered_s > _HEAD_LOST_S:
            self._lost_s = time.monotonic()
            for attempt in self._attempts.values():
                attempt.is_cancelled = attempt.is_discarded = True
            self._attempts.clear()  # no call would return
            raise EngineLostError(
                f"Ray's head at {self.address} has not answered for {_HEAD_LOST_S:.0f} s; agents save checkpoints, and "
                "all jobs resume when there is a cluster again"
            )
        return False

    def _draining(self) -> dict[str, float]:
        """Nodes that Ray has told to leave, with the seconds that are left."""
        try:
            draining: dict[str, int] = self._ray._private.state.state.get_draining_nodes()
        except Exception:  # not a part of Ray's interface
            return {}
        return {node: max(0.0, end_ms / 1e3 - time.time()) for node, end_ms in draining.items()}

    def _has_passed(self, identity: str, name: str) -> bool | None:
        """Whether a node has the Python and the Spindle of this process; asked once, None until it answers."""
        if identity not in self._checked:
            if identity not in self._checks:
                options = {"num_cpus": 0, "label_selector": {_ID_LABEL: identity}}
                self._checks[identity] = self._check.options(**options).remote()
            if not self._ray.wait([self._checks[identity]], timeout=0)[0]:
                return None
            try:
                theirs = self._ray.get(self._checks.pop(identity))
                ours = _versions()
                self._checked[identity] = "" if theirs == ours else _other_versions(name, theirs, ours)
            except self._ray.exceptions.RayError as error:
                self._checked[identity] = f"node {name} cannot import Spindle: {str(error).splitlines()[-1]}"
            if self._checked[identity]:
                logging.getLogger("spindle").warning(self._checked[identity])
        return not self._checked[identity]

    # Attempts.

    def adopt(self) -> Sequence[Key]:
        util = self._ray.util
        found: dict[Key, dict[int, str]] = {}
        for name in util.list_named_actors():
            parts = name.removeprefix(self._prefix).rsplit("/", 2)
            if name.startswith(self._prefix) and len(parts) == 3:
                found.setdefault((parts[0], int(parts[1])), {})[int(parts[2])] = name
        groups = {}
        for entry in util.placement_group_table().values():
            name = entry["name"]
            if name.startswith(self._prefix) and entry["state"] != "REMOVED":
                job, attempt = name.removeprefix(self._prefix).rsplit("/", 1)
                groups[job, int(attempt)] = name, len(entry["bundles"])
        for key, (name, num_bundles) in groups.items():
            attempt = _RayAttempt(start=None, phase=RUNNING)
            with suppress(ValueError):
                attempt.group = util.get_placement_group(name)
            with suppress(ValueError, self._ray.exceptions.RayError):
                attempt.agents = [self._ray.get_actor(actor) for _, actor in sorted(found.get(key, {}).items())]
                attempt.reports = self._ray.get([agent.report.remote() for agent in attempt.agents], timeout=30)
            self._attempts[key] = attempt
            is_whole = len(attempt.agents) == num_bundles and len(attempt.reports) == num_bundles
            if not is_whole or not all(report.is_started for report in attempt.reports):
                self.discard(key)  # it was not up yet when the scheduler died
        return list(self._attempts)

    def start(self, start: AttemptStart) -> None:
        key = (start.job, start.attempt)
        self._attempts[key] = attempt = _RayAttempt(start=start)
        nodes = ", ".join(share.node for share in start.nodes)
        attempt.reason = f"waits for devices of {nodes}"
        threading.Thread(target=self._bring_up, args=(key, attempt), daemon=True).start()

    def _bring_up(self, key: Key, attempt: _RayAttempt) -> None:
        """Create the placement group and the agents, and have them start the ranks."""
        try:
            self._create(key, attempt)
        except Exception as error:  # a node that dies meanwhile raises any of Ray's errors
            cause = getattr(error, "cause", None)  # of an agent; Ray's own text is a traceback
            attempt.reason = f"could not be started: {cause if isinstance(cause, SpindleError) else error}"
            attempt.phase = LOST
        if attempt.is_discarded:
            self._free(attempt)
        elif attempt.is_cancelled and attempt.phase == RUNNING:
            for agent in attempt.agents:
                agent.stop.remote(0.0)

    def _create(self, key: Key, attempt: _RayAttempt) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        start = attempt.start
        assert start is not None
        shares = start.nodes
        name = f"{self._prefix}{key[0]}/{key[1]}"
        attempt.group = placement_group(
            [{"GPU": share.num_devices} for share in shares],
            strategy="STRICT_SPREAD" if len(shares) > 1 else "STRICT_PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[{_ID_LABEL: self._ids[share.node]} for share in shares],
        )
        while not attempt.group.wait(timeout_seconds=1):
            if attempt.is_cancelled:
                attempt.is_stopped, attempt.phase = True, ENDED
                return
        if attempt.is_cancelled:
            attempt.is_stopped, attempt.phase = True, ENDED
            return
        attempt.phase = STARTING
        agents = []
        for number, share in enumerate(shares):
            strategy = PlacementGroupSchedulingStrategy(attempt.group, placement_group_bundle_index=number)
            options = {"num_cpus": 0, "num_gpus": share.num_devices, "scheduling_strategy": strategy, "max_restarts": 0}
            name_of_agent = f"{name}/{number}"
            agents.append(self._agent_class.options(name=name_of_agent, lifetime="detached", **options).remote())
        attempt.agents = agents
        self._ray.get([agent.versions.remote() for agent in agents], timeout=_CREATE_S)
        address, port = "", 0
        if len(shares) > 1:
            address = self._hosts[shares[0].node]
            port = self._ray.get(agents[0].listen.remote(address), timeout=_CREATE_S)
        secret, first, size = secrets.token_hex(32), 0, sum(share.num_devices for share in shares)
        calls = []
        for number, (agent, share) in enumerate(zip(agents, shares, strict=True)):
            part = NodePart(
                attempt=start.attempt,
                command=start.submission.command,
                is_script=start.submission.is_script,
                folder=start.submission.folder,
                logs=start.submission.logs,
                environment=start.submission.environment,
                first_rank=first,
                num_ranks=share.num_devices,
                world_size=size,
                node_rank=number,
                secret=secret,
                address=address,
                port=port,
                plan=start.plan,
                profile=start.profile,
                grace_s=start.grace_s,
                memory=f"{self._prefix}{start.job} on {self._ids[share.node]}",  # as long as the node lives
            )
            calls.append(agent.start.remote(part))
            first += share.num_devices
        self._ray.get(calls, timeout=_CREATE_S)
        attempt.reports = [PartReport(is_started=True)] * len(agents)
        attempt.reason, attempt.phase = "", RUNNING

    def stop(self, key: Key, grace_s: float) -> None:
        attempt = self._attempts.get(key)
        if attempt is None:
            return
        attempt.is_cancelled = True
        if attempt.phase == RUNNING:
            for agent in attempt.agents:
                agent.stop.remote(grace_s)

    def discard(self, key: Key) -> None:
        attempt = self._attempts.pop(key, None)
        if attempt is None:
            return
        attempt.is_cancelled = attempt.is_discarded = True
        # Removing a group waits for the head; one that is gone would hold up the scheduler until Ray ends the process.
        thread = threading.Thread(target=self._free, args=(attempt,), daemon=True)
        thread.start()
        thread.join(_PING_S)

    def _free(self, attempt: _RayAttempt) -> None:
        for agent in attempt.agents:
            with suppress(Exception):
                self._ray.kill(agent)
        if attempt.group is not None:
            with suppress(Exception):
                self._ray.util.remove_placement_group(attempt.group)

    def poll(self) -> Sequence[AttemptReport]:
        return [self._report(key, attempt) for key, attempt in list(self._attempts.items())]

    def _report(self, key: Key, attempt: _RayAttempt) -> AttemptReport:
        job, number = key
        if attempt.phase != RUNNING:
            outcome = STOPPED if attempt.is_stopped else ""
            return AttemptReport(job=job, attempt=number, phase=attempt.phase, reason=attempt.reason, outcome=outcome)
        lost = self._ask(attempt)
        if lost:
            return self._merged(key, attempt, phase=LOST, reason=lost)
        outcomes = [report.outcome for report in attempt.reports]
        if not all(outcomes):
            if FAILED in outcomes and not attempt.has_told_others:
                attempt.has_told_others = True
                for agent, outcome in zip(attempt.agents, outcomes, strict=True):
                    if not outcome:
                        agent.stop.remote(_OTHERS_S)
            return self._merged(key, attempt, phase=RUNNING)
        failed = [report for report in attempt.reports if report.outcome == FAILED]
        if failed:
            first = min(failed, key=lambda report: (not report.is_cause, report.failed_at))
            return self._merged(key, attempt, phase=ENDED, outcome=FAILED, reason=first.reason, by_script=first.is_own)
        outcome = STOPPED if STOPPED in outcomes else COMPLETED
        reason = next((report.reason for report in attempt.reports if report.reason), "")
        return self._merged(key, attempt, phase=ENDED, outcome=outcome, reason=reason)

    def _merged(self, key: Key, attempt: _RayAttempt, **fields: Any) -> AttemptReport:
        """One report of all agents."""
        reports = attempt.reports
        steps = [report.step for report in reports if report.step is not None]
        times_s = [report.step_s for report in reports if report.step_s is not None]
        return AttemptReport(
            job=key[0],
            attempt=key[1],
            step=max(steps, default=None),
            num_taken=max((report.num_taken for report in reports), default=0),
            step_s=max(times_s, default=None),
            checkpoints=next((report.checkpoints for report in reports if report.checkpoints), ""),
            tasks=next((report.tasks for report in reports if report.tasks), ""),
            **fields,
        )

    def _ask(self, attempt: _RayAttempt) -> str:
        """Collect what agents have answered, and ask again. Returns why one is lost; an agent that does not answer now
        is not."""
        errors = self._ray.exceptions
        for number, agent in enumerate(attempt.agents):
            if attempt.reports[number].outcome:
                continue
            call = attempt.calls.get(number)
            if call is not None:
                if not self._ray.wait([call], timeout=0)[0]:
                    continue
                try:
                    attempt.reports[number] = self._ray.get(call)
                except errors.ActorUnavailableError:
                    pass
                except errors.RayError as error:
                    attempt.calls.pop(number)
                    return f"its agent is gone: {str(error).splitlines()[0]}"
            attempt.calls[number] = agent.report.remote()
        return ""

    # The cluster.

    def recover(self) -> bool:
        assert self._lost_s is not None
        if self._ray.is_initialized():
            self._ray.shutdown()
        if self.local is None:
            if not is_listening(self.address):
                return False
        else:
            # Agents need their raylets while they save checkpoints.
            left_s = self._lost_s + CUT_OFF_S + 10 - time.monotonic()
            if left_s > 0:
                return False
            end_local_ray(self.local)
            self.address = start_local_ray(self._local_nodes, self._started).address
        self._ids.clear()
        self._checks.clear()
        self._checked.clear()
        self._connect()
        return True

    def _started(self, local: LocalRay) -> None:
        self.local = local  # also if it cannot be remembered: it is ended before the next is started
        self._remember(local)

    def close(self, *, end_machines: bool) -> None:
        if end_machines:
            for key in list(self._attempts):
                self.discard(key)
        with suppress(Exception):
            self._ray.shutdown()
        if end_machines and self.local is not None:
            end_local_ray(self.local)


def node_name(node: Mapping[str, Any]) -> str:
    """What a node is called, from what Ray says of it: our label, or the beginning of its id."""
    name: str = (node.get("Labels") or {}).get(NODE_LABEL) or node["NodeID"][:12]
    return name


def _other_versions(name: str, theirs: tuple[str, str], ours: tuple[str, str]) -> str:
    return (
        f"node {name} has Python {theirs[0]} and Spindle {theirs[1]}, expected {ours[0]} and {ours[1]}, as here; "
        "install the same on it"
    )


def _versions() -> tuple[str, str]:
    return platform.python_version(), __version__
