"""From a training script to what it trains, without its weights."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

from spindle.errors import InputError
from spindle.workload import Workload, read_workload


def script_words(given: str) -> list[str] | None:
    """A script and its arguments, if this is one: a file, or a whole command line in one argument."""
    if given.endswith(".py") and Path(given).exists():
        return [given]
    try:
        words = shlex.split(given)
    except ValueError:  # an unclosed quotation mark, which may be part of a file name
        return None
    return words if words and words[0].endswith(".py") else None


def workload_of_script(script: str, *arguments: str) -> Workload:
    """Run a script up to the first fit of its Trainer, and return the workload it would train."""
    from spindle.cli.launch import launched
    from spindle.launch import INTERRUPTED, WorkloadCapture, variables

    with tempfile.TemporaryDirectory(prefix="spindle-plan-") as folder:
        capture = WorkloadCapture(output=Path(folder) / "workload.json")
        environment = {
            **capture.environment(),
            variables.PRELUDE: "spindle.run.meta_init:create_parameters_on_meta",
            "CUDA_VISIBLE_DEVICES": "",  # the same result on every machine, and no GPU memory is taken
        }
        ended = launched(Path(script), list(arguments), 1, None, environment=environment)
        if ended.code == INTERRUPTED:
            raise KeyboardInterrupt
        if ended.code:
            raise InputError(f"{script}: it failed with the error above, so there is nothing to plan")
        if not capture.output.exists():
            raise InputError(
                f"{script}: it ended without a call of spindle.Trainer.fit, so there is nothing to plan; give a script "
                "that trains (python train.py), with the arguments it needs ('train.py --its-own options')"
            )
        return read_workload(capture.output)
