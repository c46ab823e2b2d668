"""`srun python -m spindle.launch.slurm_rank SCRIPT [ARGUMENTS]...`: one rank of a job that Slurm starts.

Slurm's variables become torchrun's; then the worker runs the script. Ranks of all nodes find each other on the node
that runs the batch script, which is that of rank 0, at a port that follows from the number of the Slurm job.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from spindle.errors import InputError
from spindle.launch import variables
from spindle.launch.failure import end_by_error
from spindle.launch.worker import run_script

REPORTS_FOLDER = "SPINDLE_REPORTS_FOLDER"  # where ranks write why they failed
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000  # below those that the system hands out


def rank_variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set for this rank."""
    try:
        rank, size, local = slurm["SLURM_PROCID"], slurm["SLURM_NTASKS"], slurm["SLURM_LOCALID"]
        job, nodes = int(slurm["SLURM_JOB_ID"]), int(slurm["SLURM_JOB_NUM_NODES"])
    except KeyError as error:
        raise InputError(
            f"expected the variables of a Slurm step, {error.args[0]} is missing; start this with srun, in a script "
            "that `spindle fleet sbatch` wrote"
        ) from None
    address = slurm.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1") if nodes > 1 else "127.0.0.1"
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": str(_tasks_per_node(slurm, int(size), nodes)[int(slurm.get("SLURM_NODEID", "0"))]),
        "GROUP_RANK": slurm.get("SLURM_NODEID", "0"),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(_FIRST_PORT + job % _NUM_PORTS),
        "OMP_NUM_THREADS": slurm.get("OMP_NUM_THREADS", "1"),
        "TORCH_CPP_LOG_LEVEL": slurm.get("TORCH_CPP_LOG_LEVEL", "FATAL"),
    }
    if address.startswith("127."):
        values["GLOO_SOCKET_IFNAME"] = slurm.get("GLOO_SOCKET_IFNAME", "lo")
    return values


def _tasks_per_node(slurm: Mapping[str, str], num_ranks: int, num_nodes: int) -> list[int]:
    """The number of ranks on each node, which Slurm writes as `4(x2),3`."""
    text = slurm.get("SLURM_STEP_TASKS_PER_NODE") or slurm.get("SLURM_TASKS_PER_NODE", "")
    tasks = [
        int(count) for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(repeats or 1))
    ]
    return tasks if len(tasks) == num_nodes else [num_ranks // num_nodes] * num_nodes


def main() -> None:
    try:
        os.environ.update(rank_variables(os.environ))
    except InputError as error:
        end_by_error(error)
    folder = os.environ.pop(REPORTS_FOLDER, None)
    if folder is not None:
        path = Path(folder) / f"{os.environ['RANK']}.failures"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.environ[variables.REPORTS] = str(descriptor)
    run_script(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
