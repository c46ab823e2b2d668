"""Ray on this machine: a head and nodes that outlive the scheduler, on loopback, without a dashboard.

A node may have devices that do not exist, so that one machine rehearses a fleet with real processes. Processes are
found again by their session's folder, which is part of every command line, and ended by their numbers.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spindle.errors import InputError

NODE_LABEL, KIND_LABEL = "spindle-node", "spindle-kind"
LOOPBACK = "127.0.0.1"
_OBJECT_STORE_BYTES = 80 << 20  # the least that Ray accepts; nothing goes through it
_ENDED_S = 5.0
# A raylet that was killed refuses connections at once, so it is found dead in 4 s instead of 15; one that hangs, or is
# cut off, in 20 s instead of 50.
_HEALTH = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 4000,
    "health_check_failure_threshold": 4,
}
_WORKERS = {"num_workers_soft_limit": 1}  # one that is idle stays, as on nodes with CPUs, of which these have none


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNode:
    """A node to be started here: so many devices of a kind, which need not exist."""

    name: str
    kind: str
    num_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRay:
    """A Ray that runs on this machine: its address, and the folder of its session."""

    address: str
    session: str

    @property
    def text(self) -> str:
        return json.dumps({"address": self.address, "session": self.session})

    @classmethod
    def parse(cls, text: str) -> LocalRay:
        data = json.loads(text)
        return cls(address=data["address"], session=data["session"])


def import_ray(*, is_local: bool) -> Any:
    """Ray, or one sentence that says how to install it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a call after a lost head must not start another Ray
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if is_local:
        # Read when Ray is imported: otherwise it replaces loopback by this machine's address on the network, and its
        # servers listen on every address.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "a live fleet needs Ray, which is not installed: pip install 'spindle-train[fleet]'"
        ) from error
    if tuple(map(int, ray.__version__.split(".")[:2])) < (2, 51):
        raise InputError(f"a live fleet needs Ray 2.51 or newer, got {ray.__version__}: pip install -U 'ray>=2.51'")
    return ray


def start_local_ray(nodes: Iterable[LocalNode], remember: Callable[[LocalRay], None]) -> LocalRay:
    """Start a head without devices, and these nodes. `remember` is called before any process is started, with the
    session and no address, and again when all are: whoever is killed in between leaves none that nobody knows of."""
    import_ray(is_local=True)
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    name = f"session_spindle_{secrets.token_hex(8)}"
    folder = os.path.join(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray")  # Ray's own default
    remember(LocalRay(address="", session=os.path.join(folder, name)))
    head = Node(
        RayParams(
            session_name=name,
            temp_dir=folder,
            node_ip_address=LOOPBACK,
            num_cpus=0,
            num_gpus=0,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            min_worker_port=0,
            max_worker_port=0,
            _system_config=_HEALTH | _WORKERS,  # to which Ray adds folders of this session
        ),
        head=True,
        shutdown_at_exit=False,
        spawn_reaper=False,
    )
    ray = LocalRay(address=head.gcs_address, session=head.get_session_dir_path())
    for node in nodes:
        add_local_node(ray, node)
    remember(ray)
    return ray


def add_local_node(ray: LocalRay, node: LocalNode) -> None:
    """Start one more node of a Ray on this machine."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    Node(
        RayParams(
            node_ip_address=LOOPBACK,
            gcs_address=ray.address,
            num_cpus=0,
            num_gpus=node.num_devices,
            object_store_memory=_OBJECT_STORE_BYTES,
            labels={NODE_LABEL: node.name, KIND_LABEL: label_text(node.kind)},
            include_log_monitor=False,
            min_worker_port=0,
            max_worker_port=0,
            node_manager_port=0,
            dashboard_agent_listen_port=None,
        ),
        head=False,
        shutdown_at_exit=False,
        spawn_reaper=False,
    )


def label_text(name: str) -> str:
    """A name as the value of a label: letters, digits, dashes, underscores and dots."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)[:63]


def is_listening(address: str) -> bool:
    """Whether something accepts connections at an address (`host:port`)."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2.0):
            return True
    except (OSError, ValueError):
        return False


def end_local_ray(ray: LocalRay) -> None:
    """End all processes of a Ray on this machine, and remove its folder."""
    end_processes(session_processes(ray))
    shutil.rmtree(ray.session, ignore_errors=True)


def raylets(ray: LocalRay) -> dict[str, int]:
    """The process of each node, by the name of the node."""
    pid_of_node = {}
    for pid in session_processes(ray):
        command = _command(pid)
        if command and command[0].endswith("/raylet"):
            for word in command:
                if word.startswith("--labels="):
                    with suppress(ValueError):
                        labels = json.loads(word.removeprefix("--labels="))
                        if NODE_LABEL in labels:
                            pid_of_node[labels[NODE_LABEL]] = pid
    return pid_of_node


def session_processes(ray: LocalRay) -> list[int]:
    """The processes whose command names the session, with their descendants."""
    session = os.path.basename(ray.session.rstrip("/"))
    children: dict[int, list[int]] = {}
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        with suppress(OSError, IndexError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
            if entry.stat().st_uid == os.getuid() and any(session in word for word in _command(pid)):
                pids.append(pid)
    every: dict[int, None] = {}
    while pids:
        pid = pids.pop()
        if pid not in every and pid != os.getpid():
            every[pid] = None
            pids += children.get(pid, [])
    return list(every)


def end_processes(pids: Iterable[int]) -> None:
    """SIGKILL: agents have ended their ranks before, and ranks die with their agent."""
    left = list(pids)
    for pid in left:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    end_s = time.monotonic() + _ENDED_S
    while left and time.monotonic() < end_s:
        left = [pid for pid in left if _is_alive(pid)]
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # of our own, so that no zombie stays
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
