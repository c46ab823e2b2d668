"""`spindle export`: the weights of a checkpoint, for plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle.cli.checkpoints import Folder


def export(
    folder: Folder,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="MODEL.safetensors", help="Write the weights here.", show_default=False),
    ],
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            metavar="N",
            help="Export the checkpoint of this step. By default, the newest.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the weights of a checkpoint as a safetensors file, for plain PyTorch.

    The file contains the parameters and buffers of all modules, named MODULE.PATH as in Trainer.state_dict(). Example:

    spindle export runs/a -o model.safetensors
    """
    from spindle.checkpoint import export_safetensors, folder_of_step, open_checkpoint
    from spindle.cli.terminal import notice, progress_bar, refuse_outputs
    from spindle.display import num_bytes

    refuse_outputs(output)
    checkpoint = open_checkpoint(folder_of_step(folder, step))
    checkpoint.check()
    with progress_bar("writing weights", 1.0) as report:
        size = export_safetensors(checkpoint, output, report)
    notice(f"wrote {output}, {num_bytes(size)} of weights after {checkpoint.state.step} steps")
