"""A Slurm cluster on this host: a real controller, and nodes with GPUs that are plain files."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "sinfo")
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
LIMIT_S = 30.0


def missing() -> str:
    """The programs that are not installed."""
    return ", ".join(name for name in PROGRAMS if shutil.which(name, path=_PATH) is None)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def slurm_cluster(folder: Path, nodes: dict[str, tuple[str, int]]) -> Iterator[dict[str, str]]:
    """Nodes by name, with the kind and number of their GPUs. Yields the environment in which Slurm's commands find
    it."""
    host, user, ports = socket.gethostname(), getpass.getuser(), {name: _free_port() for name in nodes}
    socket_path = folder / "munge.socket"
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for name in ("state", "spool", "gpus"):
        (folder / name).mkdir()
    gres = []
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={_free_port()}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={socket_path}",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"SlurmdLogFile={folder}/slurmd-%n.log",
        "ProctrackType=proctrack/pgid",
        "TaskPlugin=task/none",
        "SchedulerType=sched/backfill",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "JobAcctGatherType=jobacct_gather/none",
        "MpiDefault=none",
        "ReturnToService=2",
        "SchedulerParameters=sched_interval=1,bf_interval=1",
        "KillWait=5",
        "MinJobAge=10",
        "SlurmdTimeout=10",
        "GresTypes=gpu",
        "SlurmctldDebug=info",
        "CommunicationParameters=NoAddrCache",
    ]
    for name, (kind, count) in nodes.items():
        for number in range(count):
            (folder / "gpus" / f"{name}-{number}").touch()
        files = f"{folder}/gpus/{name}-[0-{count - 1}]" if count > 1 else f"{folder}/gpus/{name}-0"
        gres.append(f"NodeName={name} Name=gpu Type={kind} File={files}")
        lines.append(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[name]} CPUs={count} "
            f"Gres=gpu:{kind}:{count} State=UNKNOWN"
        )
    lines.append(f"PartitionName=main Nodes={','.join(nodes)} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    (folder / "gres.conf").write_text("\n".join(gres) + "\n")
    environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:{_PATH}"}
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        log = (folder / f"{command[0]}.out").open("ab")
        started.append(subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log, cwd=folder))
        log.close()

    try:
        start(
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket_path}"),
            *(f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"),
        )
        _wait(socket_path.exists, "munge's socket", folder)
        start("slurmctld", "-D")
        for name in nodes:
            start("slurmd", "-D", "-N", name)

        def is_idle() -> bool:
            query = ["sinfo", "--Node", "--noheader", "--format=%T"]
            answer = subprocess.run(query, env=os.environ | environment, capture_output=True, text=True)
            return answer.stdout.split() == ["idle"] * len(nodes)

        _wait(is_idle, "idle nodes", folder)
        yield environment
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(condition, what: str, folder: Path) -> None:  # type: ignore[no-untyped-def]
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end_s:
            logs = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(folder.glob("*.out")))
            logs += "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(folder.glob("*.log")))
            raise AssertionError(f"no {what} within {LIMIT_S:.0f} s\n{logs}")
        time.sleep(0.1)
