"""`python -m spindle.launch.worker SCRIPT [ARGUMENTS]...`: one process of a job, around a script.

The script runs as `python SCRIPT` would run it, in a process that ends with its launcher, says where it crashed and
reports why it failed. Nothing heavy is imported before the first line of the script, unless the launcher names a
function (`package.module:function`) to be called before it.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import runpy
import signal
import sys
from collections.abc import Sequence

from spindle.launch.capture import capture_from, capturing
from spindle.launch.failure import end_by_exit, install_hook

LAUNCHER_VARIABLE = "SPINDLE_LAUNCHER"
PRELUDE_VARIABLE = "SPINDLE_PRELUDE"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs a script in this process as its main module."""
    launcher = os.environ.pop(LAUNCHER_VARIABLE, None)
    if launcher is not None:
        _end_with(int(launcher))
    install_hook()
    if sys.stderr is not None:  # closed by the caller
        faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            # Into a file or a pipe Python writes pages, and a process that is killed takes its last page along.
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    prelude = os.environ.pop(PRELUDE_VARIABLE, None)
    if prelude is not None:
        module, _, function = prelude.partition(":")
        getattr(importlib.import_module(module), function)()
    sys.argv = [script, *arguments]
    # Unless -P was given, the first entry is the current folder, which `python SCRIPT` would not look in.
    sys.path[: 0 if sys.flags.safe_path else 1] = [os.path.dirname(os.path.realpath(script))]
    try:
        with capturing(capture_from()):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        end_by_exit(ended)


def _end_with(launcher: int) -> None:
    """Has the kernel kill this process when its launcher is gone, even by SIGKILL. Only Linux can.

    Processes that the script starts are not covered; those of a DataLoader look for their parent themselves.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != launcher:  # it ended before the kernel knew
            os._exit(1)


if __name__ == "__main__":
    run_script(sys.argv[1], sys.argv[2:])
