"""Ray executes actions.

A start is one detached placement group: a bundle for each node with its devices, on nodes of their own, pinned by node
id, so that the scheduler's placement is what runs. In each bundle one agent, a detached actor without CPUs, starts the
ranks. Placement groups and agents are named after fleet, job and attempt: the next scheduler finds them by name.

    fleet/<fleet>/<job>/<attempt>                   the placement group
    fleet/<fleet>/<job>/<attempt>/<number>          the agent of its bundle of that number
    fleet/<fleet>/<job>/<attempt>/standby-<number>  the same agent, where its ranks were prepared

Ray cannot resize a group, and devices of another attempt are free only when its group is removed. So agents of prepared
ranks are created outside of any group. When the ranks are to begin, the group is created, and the agents get the
devices that Ray has assigned to it.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from spindle import __version__
from spindle.errors import SpindleError
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
from spindle.fleet.events import NodeShare
from spindle.fleet.ray_cluster import ID_LABEL, PING_S, RayCluster, cluster_answers
from spindle.launch.agent import COMPLETED, FAILED, STOPPED, Agent, NodePart, PartReport

_CREATE_S = 120.0  # until an agent is given up that does not come up
_READY_POLL_S = 0.1
_STANDBY = "standby-"
_PEER_GRACE_S = 5.0  # that ranks of other nodes have after a failure of one
_PENDING_S = 60.0  # after which an attempt that waits for devices asks who holds them
_OTHERS_S = 5.0  # between two looks at devices that others hold


class RayAgent:
    """An agent as an actor. Ray calls its methods in the main thread of its process, one after the other."""

    def __init__(self) -> None:
        self._agent = Agent(is_connected=cluster_answers, parent=os.getppid())  # the raylet

    def versions(self) -> tuple[str, str]:
        return platform.python_version(), __version__

    def listen(self, address: str) -> int:
        return self._agent.listen(address)

    def start(self, part: NodePart) -> None:
        self._agent.start(part)

    def prepare(self, part: NodePart) -> None:
        self._agent.prepare(part)

    def begin(self, environment: Mapping[str, str]) -> None:
        self._agent.begin(environment)

    def report(self) -> PartReport:
        return self._agent.report

    def stop(self, grace_s: float) -> None:
        self._agent.stop(grace_s)


@dataclass(slots=True)
class _Standby:
    """Agents whose ranks wait, without devices. `is_ready` is None until that is known."""

    agents: list[Any] = field(default_factory=list)
    is_ready: bool | None = None
    is_discarded: bool = False


@dataclass(slots=True)
class _RayAttempt:
    """An attempt in Ray. A thread brings it up; afterwards `agents` report."""

    start: AttemptStart | None  # None if it was adopted
    group: Any = None
    agents: list[Any] = field(default_factory=list)
    phase: str = PENDING
    reason: str = ""
    is_cancelled: bool = False
    is_discarded: bool = False  # its thread then frees what it still creates
    is_stopped: bool = False  # before it ran
    reports: list[PartReport] = field(default_factory=list)
    calls: dict[int, Any] = field(default_factory=dict)  # requested reports, by number of agent
    has_stopped_peers: bool = False
    pending_since_s: float = field(default_factory=time.monotonic)


class RayEngine:
    """`fleet_id` tells the attempts of two fleets in one cluster apart."""

    def __init__(self, fleet_id: str, cluster: RayCluster) -> None:
        self._prefix = f"fleet/{fleet_id}/"
        self._cluster, self._ray = cluster, cluster.ray
        self._attempts: dict[Key, _RayAttempt] = {}
        self._standbys: dict[Key, _Standby] = {}  # of attempts that have not begun
        self._occupied: dict[str, int] = {}  # devices that others hold, by node
        self._used_by_others: dict[str, int] = {}  # at the last look
        self._next_look_s = 0.0
        self._register()

    def _register(self) -> None:
        """Register the actor and the task with the cluster."""
        self._agent_class = self._ray.remote(RayAgent)
        self._visible_devices = self._ray.remote(_visible_devices)

    # Attempts.

    def adopt(self) -> Sequence[Key]:
        util = self._ray.util
        agents_of: dict[Key, dict[int, str]] = {}
        superfluous = []  # agents on standby whose ranks never began
        # Agents in groups first: they are kept if there are both.
        for name in sorted(util.list_named_actors(), key=lambda name: name.rpartition("/")[2].startswith(_STANDBY)):
            parts = name.removeprefix(self._prefix).rsplit("/", 2)
            if name.startswith(self._prefix) and len(parts) == 3:
                agents = agents_of.setdefault((parts[0], int(parts[1])), {})
                number = int(parts[2].removeprefix(_STANDBY))
                if agents.setdefault(number, name) != name:
                    superfluous.append(name)
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
                attempt.agents = [self._ray.get_actor(actor) for _, actor in sorted(agents_of.get(key, {}).items())]
                attempt.reports = self._ray.get([agent.report.remote() for agent in attempt.agents], timeout=30)
            self._attempts[key] = attempt
            is_whole = len(attempt.agents) == num_bundles and len(attempt.reports) == num_bundles
            if not is_whole or not all(report.is_started for report in attempt.reports):
                self.discard(key)  # it was not up yet when the scheduler died
        for key in agents_of.keys() - groups.keys():
            superfluous += agents_of[key].values()
        for name in superfluous:
            with suppress(ValueError):
                self._free([self._ray.get_actor(name)])
        return list(self._attempts)

    def prepare(self, start: AttemptStart) -> bool:
        if not start.submission.is_script:
            return False
        self._standbys[start.job, start.attempt] = standby = _Standby()
        threading.Thread(target=self._prepare, args=(start, standby), daemon=True).start()
        return True

    def _prepare(self, start: AttemptStart, standby: _Standby) -> None:
        """Create agents outside of any group, and have them start ranks that wait."""
        try:
            name = f"{self._prefix}{start.job}/{start.attempt}/{_STANDBY}"
            for number, share in enumerate(start.nodes):
                options = {**self._on_node(share), "max_restarts": 0}
                agent_class = self._agent_class.options(name=f"{name}{number}", lifetime="detached", **options)
                standby.agents.append(agent_class.remote())
            parts = self._parts(start, standby.agents)
            calls = [agent.prepare.remote(part) for agent, part in zip(standby.agents, parts, strict=True)]
            # A worker that is there makes the question for devices later a short one.
            calls += [self._visible_devices.options(**self._on_node(share)).remote() for share in start.nodes]
            self._ray.get(calls, timeout=_CREATE_S)
            reports: list[PartReport] = []
            while not standby.is_discarded and not all(report.is_ready for report in reports or [PartReport()]):
                reports = self._ray.get([agent.report.remote() for agent in standby.agents], timeout=_CREATE_S)
                if any(report.outcome for report in reports):
                    standby.is_ready = False
                    return
                time.sleep(_READY_POLL_S)
            standby.is_ready = True
        except Exception:  # of a node that dies meanwhile, of any kind: then the attempt is started without
            standby.is_ready = False
        finally:
            if standby.is_discarded:
                self._free(standby.agents)

    def is_prepared(self, key: Key) -> bool | None:
        standby = self._standbys.get(key)
        return False if standby is None else standby.is_ready

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
            self._free(attempt.agents, attempt.group)
        elif attempt.is_cancelled and attempt.phase == RUNNING:
            for agent in attempt.agents:
                agent.stop.remote(0.0)

    def _create(self, key: Key, attempt: _RayAttempt) -> None:
        from ray.util.placement_group import placement_group

        start = attempt.start
        assert start is not None
        shares = start.nodes
        name = f"{self._prefix}{key[0]}/{key[1]}"
        attempt.group = placement_group(
            [{"GPU": share.num_devices} for share in shares],
            strategy="STRICT_SPREAD" if len(shares) > 1 else "STRICT_PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[{ID_LABEL: self._cluster.ids[share.node]} for share in shares],
        )
        while not attempt.group.wait(timeout_seconds=1):
            if attempt.is_cancelled:
                attempt.is_stopped, attempt.phase = True, ENDED
                return
        if attempt.is_cancelled:
            attempt.is_stopped, attempt.phase = True, ENDED
            return
        attempt.phase = STARTING
        standby = self._standbys.pop(key, None)
        if standby is not None and self._is_alive(standby):
            self._begin(start, attempt, standby)
        else:
            if standby is not None:
                standby.is_discarded = True  # its thread then ends what it still creates
                self._free(standby.agents)
            self._start_agents(start, attempt, name)
        attempt.reports = [PartReport(is_started=True)] * len(shares)
        attempt.reason, attempt.phase = "", RUNNING

    def _start_agents(self, start: AttemptStart, attempt: _RayAttempt, name: str) -> None:
        for number, share in enumerate(start.nodes):
            options = {**self._in_bundle(attempt, number, share), "max_restarts": 0}
            agent_class = self._agent_class.options(name=f"{name}/{number}", lifetime="detached", **options)
            attempt.agents.append(agent_class.remote())
        parts = self._parts(start, attempt.agents)
        calls = [agent.start.remote(part) for agent, part in zip(attempt.agents, parts, strict=True)]
        self._ray.get(calls, timeout=_CREATE_S)

    def _is_alive(self, standby: _Standby) -> bool:
        """Whether all ranks on standby are ready, and none has died since."""
        if not standby.is_ready:
            return False
        try:
            reports = self._ray.get([agent.report.remote() for agent in standby.agents], timeout=PING_S)
        except self._ray.exceptions.RayError:
            return False
        return not any(report.outcome for report in reports)

    def _begin(self, start: AttemptStart, attempt: _RayAttempt, standby: _Standby) -> None:
        """Have ranks on standby begin, on the devices of the group."""
        attempt.agents = standby.agents
        asked = [
            self._visible_devices.options(**self._in_bundle(attempt, number, share)).remote()
            for number, share in enumerate(start.nodes)
        ]
        devices = self._ray.get(asked, timeout=_CREATE_S)
        calls = [agent.begin.remote(visible) for agent, visible in zip(standby.agents, devices, strict=True)]
        self._ray.get(calls, timeout=_CREATE_S)

    def _on_node(self, share: NodeShare) -> dict[str, Any]:
        """Options of what runs on a node, without devices."""
        return {"num_cpus": 0, "label_selector": {ID_LABEL: self._cluster.ids[share.node]}}

    def _in_bundle(self, attempt: _RayAttempt, number: int, share: NodeShare) -> dict[str, Any]:
        """Options of what has the devices of a bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(attempt.group, placement_group_bundle_index=number)
        return {"num_cpus": 0, "num_gpus": share.num_devices, "scheduling_strategy": strategy}

    def _parts(self, start: AttemptStart, agents: Sequence[Any]) -> list[NodePart]:
        """The part of an attempt that each node runs, once its agents are up. With several nodes, the first agent binds
        the rendezvous port."""
        self._ray.get([agent.versions.remote() for agent in agents], timeout=_CREATE_S)
        shares, address, port = start.nodes, "", 0
        if len(shares) > 1:
            address = self._cluster.hosts[shares[0].node]
            port = self._ray.get(agents[0].listen.remote(address), timeout=_CREATE_S)
        secret, first, size = secrets.token_hex(32), 0, sum(share.num_devices for share in shares)
        parts = []
        for number, share in enumerate(shares):
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
                memory=f"{self._prefix}{start.job} on {self._cluster.ids[share.node]}",  # as long as the node lives
            )
            parts.append(part)
            first += share.num_devices
        return parts

    def stop(self, key: Key, grace_s: float) -> None:
        attempt = self._attempts.get(key)
        if attempt is None:
            return
        attempt.is_cancelled = True
        if attempt.phase == RUNNING:
            for agent in attempt.agents:
                agent.stop.remote(grace_s)

    def discard(self, key: Key) -> None:
        agents, group = [], None
        standby, attempt = self._standbys.pop(key, None), self._attempts.pop(key, None)
        if standby is not None:
            standby.is_discarded = True
            agents += standby.agents
        if attempt is not None:
            attempt.is_cancelled = attempt.is_discarded = True
            agents += attempt.agents
            group = attempt.group
        if agents or group is not None:
            # Removing a group waits for the head; one that is gone would hold up the scheduler until Ray ends the
            # process.
            thread = threading.Thread(target=self._free, args=(agents, group), daemon=True)
            thread.start()
            thread.join(PING_S)

    def _free(self, agents: Sequence[Any], group: Any = None) -> None:
        for agent in agents:
            with suppress(Exception):
                self._ray.kill(agent)
        if group is not None:
            with suppress(Exception):
                self._ray.util.remove_placement_group(group)

    def poll(self) -> Sequence[AttemptReport]:
        return [self._report(key, attempt) for key, attempt in list(self._attempts.items())]

    def _report(self, key: Key, attempt: _RayAttempt) -> AttemptReport:
        job, number = key
        if attempt.phase != RUNNING:
            return AttemptReport(
                job=job,
                attempt=number,
                phase=attempt.phase,
                reason=attempt.reason,
                outcome=STOPPED if attempt.is_stopped else "",
                is_crowded_out=self._is_crowded_out(attempt),
            )
        lost = self._ask(attempt)
        if lost:
            return self._merged(key, attempt, phase=LOST, reason=lost)
        outcomes = [report.outcome for report in attempt.reports]
        if not all(outcomes):
            if FAILED in outcomes and not attempt.has_stopped_peers:
                attempt.has_stopped_peers = True
                for agent, outcome in zip(attempt.agents, outcomes, strict=True):
                    if not outcome:
                        agent.stop.remote(_PEER_GRACE_S)
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
        """Collect the answers of agents, and ask again. Returns why an agent is lost; one that is only unavailable
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

    def nodes(self) -> Mapping[str, NodeStatus]:
        try:
            nodes = self._cluster.nodes()
            self._look_for_others()
            return {name: replace(status, num_occupied=self._occupied.get(name, 0)) for name, status in nodes.items()}
        except EngineLostError:
            for attempt in self._attempts.values():
                attempt.is_cancelled = attempt.is_discarded = True
            self._attempts.clear()  # no call would return
            self._standbys.clear()
            raise

    def _look_for_others(self) -> None:
        """Count the devices of each node that something holds, and not an attempt of this fleet."""
        if time.monotonic() < self._next_look_s or not cluster_answers():
            return
        self._next_look_s = time.monotonic() + _OTHERS_S
        with suppress(Exception):  # of a head that is lost meanwhile, which `RayCluster.nodes` notices
            used = self._cluster.used_devices()
            for node, num_devices in self._own_devices():
                if node in used:
                    used[node] -= num_devices
            before, self._used_by_others = self._used_by_others, used
            # Ray's numbers are of different moments, so what is held at two looks counts.
            self._occupied = {name: max(0, min(number, before.get(name, number))) for name, number in used.items()}

    def _own_devices(self) -> Iterator[tuple[str, int]]:
        """Nodes and devices in groups of this fleet's attempts."""
        names = {identity: name for name, identity in self._cluster.ids.items()}
        own = {f"{self._prefix}{job}/{attempt}" for job, attempt in self._attempts}
        for group in self._ray.util.placement_group_table().values():
            for bundle, identity in group["bundles_to_node_id"].items() if group["name"] in own else ():
                if identity in names:
                    yield names[identity], int(group["bundles"][bundle].get("GPU", 0))

    def _is_crowded_out(self, attempt: _RayAttempt) -> bool:
        """Whether an attempt has waited for long, and does not fit on its nodes beside what others hold."""
        if attempt.phase != PENDING or time.monotonic() - attempt.pending_since_s < _PENDING_S:
            return False
        assert attempt.start is not None
        sizes = self._cluster.sizes
        return any(
            self._occupied.get(share.node, 0) + share.num_devices > sizes.get(share.node, 0)
            for share in attempt.start.nodes
            if self._occupied.get(share.node, 0)
        )

    def recover(self) -> bool:
        if not self._cluster.recover():
            return False
        self._register()
        return True

    def close(self, *, end_machines: bool) -> None:
        if end_machines:
            for key in {*self._attempts, *self._standbys}:
                self.discard(key)
        self._cluster.close(end_machines=end_machines)


def _visible_devices() -> dict[str, str]:
    """The variables that say which devices a process has, as Ray sets them."""
    return {name: value for name, value in os.environ.items() if name.endswith("_VISIBLE_DEVICES")}
