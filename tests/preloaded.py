"""Ranks of `spindle launch` as copies of a process that has imported torch: importing it takes five seconds each."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pool import forking
from spindle.cli.main import run
from spindle.launch import ranks, variables
from spindle.launch.worker import run_script


class _Descriptor:
    """A file descriptor that is open in the process that this is sent to."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _detached, (DupFd(self._number),)


def _detached(descriptor: Any) -> int:
    return descriptor.detach()


def _run(
    arguments: Sequence[str], environment: Mapping[str, str], folder: str, output: int, error: int, reports: int
) -> None:
    """What `python -P -m spindle.launch.worker ARGUMENTS` does, in a copy of a process."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(error, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment
    os.environ.pop(variables.LAUNCHER, None)  # which is not the parent
    os.environ[variables.REPORTS] = str(reports)
    warnings.resetwarnings()
    if "OMP_NUM_THREADS" in environment:  # torch has read it before
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.path.insert(0, "")  # to be replaced by the script's folder
    sys.excepthook = sys.__excepthook__
    try:
        run_script(arguments[0], arguments[1:])
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 0 if exit_.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class Preloaded:
    """What `launch` uses of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> None:
        assert command[1:4] == ["-P", "-m", "spindle.launch.worker"]
        output = 1 if options.get("stdout") is None else options["stdout"].fileno()
        error = output if options.get("stderr") == subprocess.STDOUT else 2
        descriptors = [_Descriptor(number) for number in (output, error, *options["pass_fds"])]
        arguments = (command[4:], dict(env), os.getcwd(), *descriptors)
        self._process = forking().Process(target=_run, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int | None:
        self._process.join(timeout)
        return self.returncode


@contextmanager
def preloaded_ranks() -> Iterator[None]:
    """Inside, jobs that this process launches start as copies."""
    with (
        mock.patch.object(ranks.subprocess, "Popen", Preloaded),
        mock.patch.object(ranks, "_exit_code", lambda process: process.returncode),
    ):
        yield


@contextmanager
def _output_to(output: Any, error: Any) -> Iterator[None]:
    """Inside, what this process and its children print goes to these files."""
    saved = [os.dup(number) for number in (1, 2)]
    sys.stdout.flush()
    sys.stderr.flush()
    for file, number in ((output, 1), (error, 2)):
        os.dup2(file.fileno(), number)
    try:
        with redirect_stdout(output), redirect_stderr(error):
            yield
    finally:
        output.flush()
        error.flush()
        for number, descriptor in zip((1, 2), saved, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


def run_spindle(
    *arguments: str, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`spindle ARGUMENTS` in this process, its ranks as copies."""
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+", buffering=1)) for _ in range(2)]
        stack.enter_context(chdir(folder or Path.cwd()))
        stack.enter_context(mock.patch.dict(os.environ, environment or {}))
        stack.enter_context(preloaded_ranks())
        with _output_to(*files):
            code = run(arguments)
        texts = [_read(file) for file in files]
    return subprocess.CompletedProcess(arguments, code, *texts)


def _read(file: Any) -> str:
    file.seek(0)
    return file.read()
