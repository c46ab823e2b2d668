"""A Ray cluster: its nodes, their checks, and a lost head.

This module knows no jobs. While the head does not answer, only calls with a time limit are made: others would wait for
it, and Ray ends a process that could not reach it for a minute.
"""

from __future__ import annotations

import logging
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from spindle import __version__
from spindle.cluster import Island
from spindle.errors import InputError
from spindle.fleet.engine import EngineLostError, NodeStatus
from spindle.fleet.ray_nodes import (
    NODE_LABEL,
    LocalNode,
    LocalRay,
    end_local_ray,
    import_ray,
    is_listening,
    start_local_ray,
)
from spindle.launch.agent import CUT_OFF_S

NAMESPACE = "spindle"
ID_LABEL = "ray.io/node-id"
PING_S = 3.0
_HEAD_LOST_S = 10.0  # without an answer of the head
_LATE_S = 10.0  # beyond the seconds after which agents know that they are cut off, for their checkpoints


def cluster_answers() -> bool:
    """Whether the head of the Ray that this process has joined answers within some seconds."""
    from ray._private.worker import global_worker

    try:
        global_worker.gcs_client.internal_kv_exists(b"spindle", b"spindle", timeout=PING_S)
        return True
    except Exception:  # of any kind: there is no answer
        return False


class RayCluster:
    """`local` is a Ray that this fleet started on its machine, with `local_nodes`; otherwise `address` is one that
    others run. `ids`, `hosts` and `sizes` (numbers of devices) are those of nodes, by name."""

    def __init__(
        self,
        address: str,
        *,
        local: LocalRay | None = None,
        local_nodes: Sequence[LocalNode] = (),
        remember: Callable[[LocalRay], None] = lambda started: None,
        describe: Callable[[dict[str, Any]], Island | None] | None = None,
    ) -> None:
        self.address, self.local, self._local_nodes = address, local, tuple(local_nodes)
        self._remember = remember  # as `start_local_ray` calls it, when Ray is started anew
        self._describe = describe  # what a node has, from what Ray says of it
        self.ids: dict[str, str] = {}
        self.hosts: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self._alive: dict[str, NodeStatus] = {}
        self._checks: dict[str, Any] = {}  # of nodes, by id
        self._checked: dict[str, str] = {}  # by id: an error message, empty if the node has passed
        self._answered_s = time.monotonic()
        self._lost_s: float | None = None
        self.ray = import_ray(is_local=local is not None or address.startswith(("127.", "localhost")))
        self._connect()

    def _connect(self) -> None:
        if not is_listening(self.address):
            raise InputError(f"{self.address}: there is no Ray; start one (ray start --head), or leave --address out")
        try:
            self.ray.init(
                address=self.address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=True,
            )
        except Exception as error:  # Ray raises errors of many kinds
            raise InputError(f"{self.address}: cannot join this Ray ({str(error).splitlines()[0]})") from error
        self.ray._private.worker._worker_logs_enabled = False  # logs of nodes that die: we say that they do
        self._check = self.ray.remote(_versions)
        self._answered_s = time.monotonic()

    # Nodes.

    def nodes(self) -> Mapping[str, NodeStatus]:
        """The nodes that are there, as of the head's last answer; raises where there was none for some time."""
        if not self._answers():
            return self._alive  # other calls would wait for the head
        draining = self._draining()
        alive = {}
        for node in self.alive_nodes():
            identity, labels = node["NodeID"], node.get("Labels") or {}
            name = node_name(node)
            if "node:__internal_head__" in node["Resources"] and NODE_LABEL not in labels and self.local is not None:
                continue
            self.ids[name], self.hosts[name] = identity, node["NodeManagerAddress"]
            self.sizes[name] = int(node["Resources"].get("GPU", 0))
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
        return [node for node in self.ray.nodes() if node["Alive"]]

    def _answers(self) -> bool:
        """Whether the head answers now; raises if it has not answered for 10 s."""
        if cluster_answers():
            self._answered_s = time.monotonic()
            return True
        if time.monotonic() - self._answered_s > _HEAD_LOST_S:
            self._lost_s = time.monotonic()
            raise EngineLostError(
                f"Ray's head at {self.address} has not answered for {_HEAD_LOST_S:.0f} s; agents save checkpoints, and "
                "all jobs resume when there is a cluster again"
            )
        return False

    def _draining(self) -> dict[str, float]:
        """Nodes that Ray has told to leave, with the seconds that are left."""
        try:
            draining: dict[str, int] = self.ray._private.state.state.get_draining_nodes()
        except Exception:  # not a part of Ray's interface
            return {}
        return {node: max(0.0, end_ms / 1e3 - time.time()) for node, end_ms in draining.items()}

    def _has_passed(self, identity: str, name: str) -> bool | None:
        """Whether a node has the Python and the Spindle of this process; asked once, None until it answers."""
        if identity not in self._checked:
            if identity not in self._checks:
                options = {"num_cpus": 0, "label_selector": {ID_LABEL: identity}}
                self._checks[identity] = self._check.options(**options).remote()
            if not self.ray.wait([self._checks[identity]], timeout=0)[0]:
                return None
            try:
                node_versions = self.ray.get(self._checks.pop(identity))
                own_versions = _versions()
                self._checked[identity] = (
                    "" if node_versions == own_versions else _other_versions(name, node_versions, own_versions)
                )
            except self.ray.exceptions.RayError as error:
                self._checked[identity] = f"node {name} cannot import Spindle: {str(error).splitlines()[-1]}"
            if self._checked[identity]:
                logging.getLogger("spindle").warning(self._checked[identity])
        return not self._checked[identity]

    def used_devices(self) -> dict[str, int]:
        """How many devices of each node something holds, by its name; a few hundred milliseconds old."""
        available = self.ray._private.state.available_resources_per_node()
        used = {}
        for node in self.alive_nodes():
            free = available.get(node["NodeID"], {}).get("GPU", 0.0)
            used[node_name(node)] = math.ceil(node["Resources"].get("GPU", 0.0) - free)
        return used

    # A head that is lost.

    def recover(self) -> bool:
        """After an EngineLostError: start Ray anew if it was ours; whether it answers again."""
        assert self._lost_s is not None
        if self.ray.is_initialized():
            self.ray.shutdown()
        if self.local is None:
            if not is_listening(self.address):
                return False
        else:
            # Agents need their raylets while they save checkpoints.
            left_s = self._lost_s + CUT_OFF_S + _LATE_S - time.monotonic()
            if left_s > 0:
                return False
            end_local_ray(self.local)
            self.address = start_local_ray(self._local_nodes, self._started).address
        self.ids.clear()
        self._checks.clear()
        self._checked.clear()
        self._connect()
        return True

    def _started(self, local: LocalRay) -> None:
        self.local = local  # also if it cannot be remembered: it is ended before the next is started
        self._remember(local)

    def close(self, *, end_machines: bool) -> None:
        """Leave the cluster; `end_machines` ends a Ray that was started here."""
        with suppress(Exception):
            self.ray.shutdown()
        if end_machines and self.local is not None:
            end_local_ray(self.local)


def node_name(node: Mapping[str, Any]) -> str:
    """What a node is called, from what Ray says of it: our label, or the beginning of its id."""
    name: str = (node.get("Labels") or {}).get(NODE_LABEL) or node["NodeID"][:12]
    return name


def _other_versions(name: str, node_versions: tuple[str, str], own_versions: tuple[str, str]) -> str:
    return (
        f"node {name} has Python {node_versions[0]} and Spindle {node_versions[1]}, "
        f"expected {own_versions[0]} and {own_versions[1]}, as here; install the same on it"
    )


def _versions() -> tuple[str, str]:
    return platform.python_version(), __version__
