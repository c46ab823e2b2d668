"""`spindle profile`: how fast are the layers of a training script on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spindle.cli.launch import Arguments, JobEnded, Processes, Script, VirtualDevices
from spindle.cli.options import AsJson


def profile(
    script: Script,
    arguments: Arguments = None,
    processes: Processes = None,
    virtual_devices: VirtualDevices = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="PROFILE.json", help="Write the profile here.", show_default=False),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", metavar="", help="Measure every layer again, and update the cache.")
    ] = False,
    as_json: AsJson = False,
) -> JobEnded | None:
    """Measure the layers, links and optimizer of a training script, without training it.

    The script runs as under `spindle launch`, in one process by default, and ends once its first `Trainer.fit` has
    measured everything. Options go before SCRIPT; everything after SCRIPT is passed to it.

    The profile describes the script on this machine. It is an input of `spindle plan`, `simulate`, `compare`, `bound`
    and `explain`, and of `spindle.Planning(profile=...)`. Layer times are cached in ~/.cache/spindle. Examples:

    spindle profile -n 4 -o profile.json train.py

    spindle profile --virtual-devices 8 -o profile.json train.py --steps 100

    spindle compare profile.json
    """
    import tempfile

    from spindle.artifact import artifact_text
    from spindle.cli.launch import launched
    from spindle.cli.terminal import notice, refuse_outputs, show, show_text
    from spindle.errors import InputError
    from spindle.launch import ProfileCapture
    from spindle.profile import read_profile, write_profile
    from spindle.report import profile_facts, profile_table

    refuse_outputs(output, inputs=(script,))
    if processes is None and virtual_devices is None:
        processes = 1
    with tempfile.TemporaryDirectory(prefix="spindle-profile-") as folder:
        capture = ProfileCapture(output=Path(folder) / "profile.json", fresh=no_cache)
        ended = launched(script, arguments, processes, virtual_devices, environment=capture.environment())
        if ended.code:
            return ended
        if not capture.output.exists():
            raise InputError(f"{script}: it ended without a call of spindle.Trainer.fit, so nothing was measured")
        measured = read_profile(capture.output)
    if output is not None:
        write_profile(output, measured)
    if as_json:
        show_text(artifact_text("profile", measured))
        return None
    show(profile_table(measured), profile_facts(measured))
    if output is not None:
        notice(f"wrote {output}")
    return None
