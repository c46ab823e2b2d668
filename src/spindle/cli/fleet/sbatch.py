"""`spindle fleet sbatch`: a batch script for Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sbatch(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="A training script.", show_default=False),
    ],
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="How many nodes.", min=1)] = 1,
    devices: Annotated[int, typer.Option("--devices", metavar="N", help="How many GPUs on each node.", min=1)] = 1,
    kind: Annotated[
        str, typer.Option("--kind", metavar="TYPE", help="The type of GPU, as Slurm calls it.", show_default=False)
    ] = "",
    name: Annotated[
        str, typer.Option("--name", help="The name of the job. By default, that of the script.", show_default=False)
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="BATCH.sh", help="Write the batch script here.", show_default=False),
    ] = None,
) -> None:
    """Write a Slurm batch script that runs a training script with one process per GPU. Nothing is submitted.

    Options go before SCRIPT; everything after SCRIPT is passed to it. Examples:

    spindle fleet sbatch --nodes 2 --devices 8 --kind h100 train.py --lr 1e-4 | sbatch

    spindle fleet sbatch --devices 4 -o train.sh train.py
    """
    from spindle.artifact import write_atomically
    from spindle.cli.terminal import refuse_outputs, show, show_text
    from spindle.errors import InputError
    from spindle.fleet.slurm_engine import BatchScript

    script = Path(command[0])
    if not script.is_file():
        raise InputError(f"{script}: no such file")
    refuse_outputs(output, inputs=(script,))
    batch = BatchScript(
        name=name or script.stem,
        command=(str(script.absolute()), *command[1:]),
        devices=(devices,) * nodes,
        kind=kind,
    )
    if output is None:
        show_text(batch.text)
    else:
        write_atomically(output, batch.text)
        show(f"wrote {output}; submit it with: sbatch {output}")
