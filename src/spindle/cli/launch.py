"""`spindle launch`: a training script in several local processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """Carries the exit code of a job that has already printed its own error."""

    code: int


Script = Annotated[Path, typer.Argument(metavar="SCRIPT", help="A training script.", show_default=False)]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGUMENTS", help="Arguments and options of the script.", show_default=False),
]
Processes = Annotated[
    int | None,
    typer.Option("-n", "--processes", metavar="N", help="How many processes to start.", show_default=False),
]
VirtualDevices = Annotated[
    int | None,
    typer.Option(
        "--virtual-devices",
        metavar="N",
        help="Start N processes on one GPU, each with a share of it.",
        show_default=False,
    ),
]


def launch(
    script: Script,
    arguments: Arguments = None,
    processes: Processes = None,
    virtual_devices: VirtualDevices = None,
    logs: Annotated[
        Path | None,
        typer.Option(
            "--logs",
            metavar="DIR",
            help="Write the output of all ranks but rank 0 to this folder: rank-1.log, ...",
            show_default=False,
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option("--restarts", metavar="N", help="Restart a failed job up to N times.", min=0),
    ] = 0,
    least: Annotated[
        int | None,
        typer.Option(
            "--least",
            metavar="N",
            help="If the same process is lost twice in a row, continue with one fewer, down to N. By default, never.",
            min=1,
            show_default=False,
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            "--grace", metavar="SECONDS", help="How long ranks may take to save a checkpoint after SIGTERM.", min=0
        ),
    ] = 30.0,
) -> JobEnded:
    """Run a training script in several processes on this machine, and stop all of them if one fails.

    Options go before SCRIPT; everything after SCRIPT is passed to it. A single process needs no launcher (python
    train.py); several hosts need torchrun.

    Each process gets its rank through the same environment variables as under torchrun. Without GPUs, the processes
    communicate through gloo. With --virtual-devices, they share one NVIDIA GPU through MPS, which is started for them
    and stopped afterwards. Rank 0 writes to this terminal.

    If a rank fails, all are stopped and the first error is printed. With --restarts, the job is then restarted, unless
    the script has failed at the same step twice. On SIGTERM and SIGUSR1, ranks have --grace seconds to save a
    checkpoint; a second signal ends the job at once. Examples:

    spindle launch -n 4 train.py

    spindle launch -n 4 --logs logs train.py --steps 100

    spindle launch -n 4 --restarts 3 --least 2 train.py

    spindle launch --virtual-devices 8 train.py
    """
    return launched(script, arguments, processes, virtual_devices, logs, restarts=restarts, least=least, grace_s=grace)


def launched(
    script: Path,
    arguments: list[str] | None,
    processes: int | None,
    virtual_devices: int | None,
    logs: Path | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    restarts: int = 0,
    least: int | None = None,
    grace_s: float = 30.0,
) -> JobEnded:
    """Run a script as these options ask; `environment` is added to that of its processes."""
    import importlib.util
    import os

    from spindle.errors import InputError

    if processes is not None and virtual_devices is not None:
        raise InputError("give -n N or --virtual-devices N, not both: every virtual device is one process")
    count = virtual_devices if processes is None else processes
    if count is None:
        raise InputError(f"how many processes? give -n N before the script: spindle launch -n 2 {script}")
    if os.name != "posix":
        raise InputError("spindle launch needs the process groups of Linux or macOS")
    if importlib.util.find_spec("torch") is None:
        raise InputError("training needs torch, which is not installed: pip install 'spindle-train[train]'")

    import spindle.launch.launch

    share_gpu = virtual_devices is not None
    code = spindle.launch.launch.launch(
        script,
        arguments or (),
        count,
        logs,
        share_gpu=share_gpu,
        environment=environment,
        num_restarts=restarts,
        least_processes=least,
        grace_s=grace_s,
    )
    return JobEnded(code=code)
