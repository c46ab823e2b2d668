"""`python -m spindle.launch.worker SCRIPT [ARGUMENTS]...`: one process of a job, which runs a script.

The script runs as under `python SCRIPT`, in a process that ends with its launcher, prints where it crashed and reports
why it failed. Nothing heavy is imported before the first line of the script, unless the launcher names a function
(`package.module:function`) to call first, or the rank is on standby until its devices are free.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from spindle.launch import variables
from spindle.launch.capture import capturing, requested_capture
from spindle.launch.failure import end_by_exit, install_hook, report_to

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a script in this process as its main module."""
    launcher, reports = (os.environ.pop(name, None) for name in (variables.LAUNCHER, variables.REPORTS))
    if launcher is not None:
        die_with_parent(int(launcher))
    if reports is not None:
        report_to(int(reports))
    install_hook()
    if sys.stderr is not None:  # closed by the caller
        faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            # Python buffers output to files and pipes, and a process that is killed loses what is in the buffer.
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    standby = os.environ.pop(variables.STANDBY, None)
    if standby is not None:
        from spindle.launch.standby import wait_to_begin

        wait_to_begin(Path(standby))
    prelude = os.environ.pop(variables.PRELUDE, None)
    if prelude is not None:
        module, _, function = prelude.partition(":")
        getattr(importlib.import_module(module), function)()
    sys.argv = [script, *arguments]
    # Without -P, the first entry is the current folder, which `python SCRIPT` would not have.
    sys.path[: 0 if sys.flags.safe_path else 1] = [os.path.dirname(os.path.realpath(script))]
    try:
        with capturing(requested_capture()):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as exit_:
        end_by_exit(exit_)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the one that started it is gone, even by SIGKILL. Works on Linux only.

    With `parent`, end at once if that is no longer the parent.
    Child processes of the script are not covered; DataLoader workers watch their parent themselves.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if parent is not None and os.getppid() != parent:  # it ended before the call
            os._exit(1)


if __name__ == "__main__":
    run_script(sys.argv[1], sys.argv[2:])
