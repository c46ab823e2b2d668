"""What does a failing process say, and how does it end?

One report for each failure, a small file in the folder that the environment names in SPINDLE_FAILURES. Whoever started
the processes reads the reports and tells people about the first cause. Without such a folder (under torchrun, or alone)
the process tells people itself.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, NoReturn

from spindle.errors import PeerLostError, SpindleError

FOLDER_VARIABLE = "SPINDLE_FAILURES"
INTERRUPTED = 130  # as shells say it: 128 + SIGINT
_RUNNERS = frozenset({runpy.run_path.__code__.co_filename, str(Path(__file__).with_name("worker.py"))})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why one rank ended. `own` is a cause; `follows` is a rank that ended only because another had gone."""

    rank: int
    time_ns: int  # time.monotonic_ns, one clock for all processes of a host
    kind: Literal["own", "follows"]
    summary: str  # one line
    text: str  # a traceback; or a message, of which the summary is the first line; or nothing, after sys.exit

    def __post_init__(self) -> None:
        """Reports come from files, so this is where one that is none is noticed."""
        if not (isinstance(self.rank, int) and isinstance(self.time_ns, int) and self.kind in ("own", "follows")):
            raise ValueError(f"no report of a failure: {self!r}")
        if not (isinstance(self.summary, str) and isinstance(self.text, str)):
            raise ValueError(f"no report of a failure: {self!r}")


def failure_of(error: BaseException, rank: int) -> Failure:
    """The report of an exception that nobody caught, as of now."""
    return Failure(
        rank=rank,
        time_ns=time.monotonic_ns(),
        kind="follows" if _follows(error) else "own",
        summary=_summary(error),
        text=_text(error),
    )


def write_failure(folder: Path, failure: Failure) -> None:
    """Writes a report whole or not at all. A rank's second report does not replace its first."""
    name = f"rank-{failure.rank}-{failure.time_ns}"
    half = folder / f"{name}.half"
    half.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    os.replace(half, folder / f"{name}.json")


def read_failures(folder: Path) -> tuple[Failure, ...]:
    """All reports in a folder, earliest first. One that cannot be read is skipped: its writer was failing."""
    failures = []
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError, TypeError):
            failures.append(Failure(**json.loads(path.read_text(encoding="utf-8"))))
    return tuple(sorted(failures, key=lambda failure: (failure.time_ns, failure.rank)))


def install_hook() -> None:
    """From now on an exception that nobody catches is reported and ends this process at once. Calling it again is fine.

    At once, because a process that merely returns destroys its process groups, which can wait for operations in flight
    with ranks that will never answer. So functions registered with `atexit` do not run; `finally` blocks do. At a
    prompt nothing is installed: there an exception is no end.
    """
    if not (hasattr(sys, "ps1") or sys.flags.interactive):
        sys.excepthook = _end_by_exception


def end_by_exit(ended: SystemExit) -> NoReturn:
    """Ends this process as `sys.exit` asked, and as promptly as an exception when that means failure.

    The report is of now: a launcher could see the end of the process only later than the ranks that wait for this one.
    """
    code = ended.code
    if code is None or code == 0:
        raise ended
    try:
        if not isinstance(code, int):
            print(code, file=sys.stderr)
        _report(ended)
    finally:
        # Eight bits are all that the system keeps of a code, and those may be 0.
        _end_at_once(code if isinstance(code, int) and 1 <= code <= 255 else 1)


def end_by_error(error: BaseException) -> NoReturn:
    """Reports an error and ends this process at once, from any thread: the main one may be in a call that waits."""
    try:
        if not _report(error):
            _tell(error)
    finally:
        _end_at_once(1)


def _end_by_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    code = 1
    try:
        if isinstance(error, KeyboardInterrupt):
            code = INTERRUPTED
        elif not _report(error):
            _tell(error)
    except BaseException:  # a failure of the report itself must hide neither the error nor the end
        sys.__excepthook__(kind, error, trace)
    finally:
        _end_at_once(code)


def _end_at_once(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or its reader has gone
            stream.flush()
    os._exit(code)


def _report(error: BaseException) -> bool:
    """Writes a report where the launcher looks for it, if there is a launcher and a place."""
    folder, rank = os.environ.get(FOLDER_VARIABLE), _rank()
    if not folder or rank is None:
        return False
    try:
        write_failure(Path(folder), failure_of(error, rank))
    except OSError:
        return False
    return True


def _tell(error: BaseException) -> None:
    """Says to people on stderr what would stand in the report."""
    rank, place = _rank(), sys.stderr
    if _follows(error):
        print(f"{'' if rank is None else f'rank {rank} '}stopped: {_summary(error)}", file=place)
        return
    if rank is not None:
        print(f"rank {rank} failed:", file=place)
    print(f"{'error: ' if isinstance(error, SpindleError) else ''}{_text(error)}", file=place)


def _rank() -> int | None:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def _follows(error: BaseException) -> bool:
    """Whether a lost peer stands anywhere behind this error: whatever fails while one is dealt with is no cause."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        if isinstance(one, PeerLostError):
            return True
        seen.add(id(one))
        one = one.__cause__ or one.__context__
    return False


def _summary(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})"
    if isinstance(error, SpindleError):
        return _message(error).split("\n")[0]
    lines = "".join(traceback.format_exception_only(error)).strip().split("\n")
    # A syntax error says where before it says what; others say what first and may go on for many lines.
    return (lines[-1] if isinstance(error, SyntaxError) else lines[0]).strip()


def _text(error: BaseException) -> str:
    """What people need to see. Our frames say nothing to them about a mistake that has a message of ours."""
    if isinstance(error, SystemExit):
        return ""  # the script has said itself what it had to say
    if not isinstance(error, SpindleError):
        return _traceback(error)
    cause = error.__cause__
    return _message(error) if cause is None else f"{_message(error)}\n{_traceback(cause)}"


def _message(error: SpindleError) -> str:
    return str(error).strip() or type(error).__name__


def _traceback(error: BaseException) -> str:
    """The traceback from the script on, without the frames of whoever ran the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _RUNNERS:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip("\n")
