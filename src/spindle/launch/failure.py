"""How a failing process reports its error, and how it ends.

A failure is reported through a pipe from the process to its launcher, which no full disk can block. The launcher reads
the reports and prints the first cause. Without such a pipe (under torchrun, or alone) the process prints its error
itself.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, NoReturn, get_args

from spindle.errors import PeerLostError, SpindleError
from spindle.launch.user_code import is_users_file

_TORCHELASTIC_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_MAX_TEXT = 1 << 18  # characters of a report
INTERRUPTED = 130  # as in shells: 128 + SIGINT
_SPINDLE = Path(__file__).parents[1]
_RUNNERS = frozenset({runpy.run_path.__code__.co_filename, str(Path(__file__).with_name("worker.py"))})


Kind = Literal["own", "follows", "exits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank ended: because of an error of its `own`, because it `follows` another rank that was lost, or because
    it `exits` with code 0, which is a failure only if other ranks need it."""

    rank: int
    time_ns: int  # time.monotonic_ns, which is one clock for all processes of a host
    kind: Kind
    summary: str  # one line
    text: str  # a traceback, or a message whose first line is the summary; empty after sys.exit
    step: int | None = None  # the step of the training, if it had begun

    def __post_init__(self) -> None:
        """Validate the fields, because reports come from other processes."""
        if not (isinstance(self.rank, int) and isinstance(self.time_ns, int) and self.kind in get_args(Kind)):
            raise ValueError(f"not a report of a failure: {self!r}")
        if not (isinstance(self.summary, str) and isinstance(self.text, str) and isinstance(self.step, int | None)):
            raise ValueError(f"not a report of a failure: {self!r}")


def is_debugging() -> bool:
    """Whether the user wants whole tracebacks."""
    return os.environ.get("SPINDLE_DEBUG", "") not in ("", "0")


def failure_of(error: BaseException, rank: int) -> Failure:
    """The report of an uncaught exception, with the present time."""
    from spindle.launch.activity import recorder

    return Failure(
        rank=rank,
        time_ns=time.monotonic_ns(),
        kind="exits" if _is_success(error) else "follows" if _follows(error) else "own",
        summary=_summary(error),
        text=_text(error)[:_MAX_TEXT],
        step=recorder.step,
    )


class _Reports:
    """The pipe to the launcher, once the worker has opened it."""

    descriptor: int | None = None


def report_to(descriptor: int) -> None:
    """From now on, report failures of this process to this pipe. Its child processes do not inherit it."""
    os.set_inheritable(descriptor, False)
    _Reports.descriptor = descriptor


def write_failure(descriptor: int, failure: Failure) -> None:
    """Write a report as one line."""
    data = json.dumps(asdict(failure)).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def parse_failures(data: bytes) -> tuple[Failure, ...]:
    """Parse the reports read from a pipe, earliest first. Unreadable reports are skipped, because their writer was
    failing."""
    failures = []
    for line in data.split(b"\n"):
        with suppress(ValueError, TypeError, RecursionError):
            failures.append(Failure(**json.loads(line)))
    return tuple(sorted(failures, key=lambda failure: (failure.time_ns, failure.rank)))


def install_hook() -> None:
    """From now on, an uncaught exception is reported and ends this process immediately. May be called several times.

    A normal exit would destroy process groups, which may wait for operations in flight with ranks that never answer.
    `finally` blocks still run, but functions registered with `atexit` do not. Nothing is installed in an interactive
    session, which an exception does not end.
    """
    if not (hasattr(sys, "ps1") or sys.flags.interactive):
        sys.excepthook = partial(_end_by_exception, os.getpid())


def end_by_exit(exit_: SystemExit) -> NoReturn:
    """End this process as `sys.exit` requested, with a report; immediately if the exit code means failure.

    The report contains the current time, because the launcher may notice the exit only after the ranks that wait for
    this one have failed.
    """
    code = exit_.code
    if _is_success(exit_):
        _report(exit_)
        raise exit_
    try:
        if not isinstance(code, int):
            print(code, file=sys.stderr)
        _report(exit_)
    finally:
        # the system keeps the low eight bits of a code, which may be 0
        _exit_now(code if isinstance(code, int) and 1 <= code <= 255 else 1)


def end_by_error(error: BaseException) -> NoReturn:
    """Report an error and end this process immediately, from any thread: the main thread may be in a blocking call."""
    try:
        if not _report(error):
            _print_error(error)
    finally:
        _exit_now(1)


def _end_by_exception(
    process: int, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """The hook of the process with this id. Elsewhere an error is only printed: multiprocessing calls the hook for
    errors of a thread that serves other processes, also in the processes of a DataLoader."""
    if os.getpid() != process or threading.current_thread() is not threading.main_thread():
        sys.__excepthook__(kind, error, trace)
        return
    code = 1
    try:
        if isinstance(error, KeyboardInterrupt):
            code = INTERRUPTED
        elif not _report(error):
            _print_error(error)
    except BaseException:  # if reporting fails, print the error and end anyway
        sys.__excepthook__(kind, error, trace)
    finally:
        _exit_now(code)


def _exit_now(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or its reader is gone
            stream.flush()
    os._exit(code)


def _report(error: BaseException) -> bool:
    """Write a report for the launcher. Returns False without a launcher, or if its pipe cannot be written."""
    descriptor, rank = _Reports.descriptor, _rank()
    _report_to_torchelastic(error)
    if descriptor is None or rank is None:
        return False
    try:
        write_failure(descriptor, failure_of(error, rank))
    except OSError:
        return False
    return True


def _report_to_torchelastic(error: BaseException) -> None:
    """Write this rank's own error where torchrun reads it, in its format, so that its summary names the cause."""
    path = os.environ.get(_TORCHELASTIC_VARIABLE)
    if not path or _follows(error):
        return
    # torchrun takes the earliest report, in whole seconds, as the cause; ranks without a file get the time of its
    # check.
    timestamp = int(time.time()) - 1
    content = {"message": _summary(error), "extraInfo": {"py_callstack": _text(error), "timestamp": str(timestamp)}}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": content}), encoding="utf-8")


def _print_error(error: BaseException) -> None:
    """Print to stderr what a report would contain."""
    rank = _rank()
    if _follows(error):
        print(f"{'' if rank is None else f'rank {rank} '}stopped: {_summary(error)}", file=sys.stderr)
        return
    if rank is not None:
        print(f"rank {rank} failed:", file=sys.stderr)
    print(f"{'error: ' if isinstance(error, SpindleError) else ''}{_text(error)}", file=sys.stderr)


def _rank() -> int | None:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def _follows(error: BaseException) -> bool:
    """Whether a lost peer is among the causes of this error. An error raised while another is handled is not the first
    cause."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, PeerLostError):
            return True
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _summary(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})"
    if isinstance(error, SpindleError):
        return _message(error).split("\n")[0]
    lines = "".join(traceback.format_exception_only(error)).strip().split("\n")
    # The last line of a syntax error says what is wrong. For other errors it is the first line, which many others may
    # follow.
    return (lines[-1] if isinstance(error, SyntaxError) else lines[0]).strip()


def _text(error: BaseException) -> str:
    """What the user needs to see. For one of our errors the message is enough, because our stack frames do not help."""
    if isinstance(error, SystemExit):
        return ""  # the script has printed what it wanted to
    if not isinstance(error, SpindleError):
        return _traceback(error)
    cause = error.__cause__
    return _message(error) if cause is None else f"{_message(error)}\n{_traceback(cause)}"


def _message(error: SpindleError) -> str:
    return str(error).strip() or type(error).__name__


def _traceback(error: BaseException) -> str:
    """The traceback without the frames that ran the script, and without those of Spindle between frames of the user's
    code (a dataset, a callback)."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _RUNNERS:
        trace = trace.tb_next
    shown = traceback.TracebackException(type(error), error, trace)
    innermost = max((place for place, frame in enumerate(shown.stack) if is_users_file(frame.filename)), default=0)
    ours = [frame for frame in shown.stack[:innermost] if Path(frame.filename).is_relative_to(_SPINDLE)]
    if not ours or is_debugging():
        return "".join(shown.format()).rstrip("\n")
    shown.stack = traceback.StackSummary.from_list([frame for frame in shown.stack if frame not in ours])
    left_out = f"(SPINDLE_DEBUG=1 also shows {len(ours)} {'line' if len(ours) == 1 else 'lines'} of Spindle)"
    return "".join([*shown.format(), left_out])
