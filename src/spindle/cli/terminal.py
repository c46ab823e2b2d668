"""Where output goes: results to stdout, progress and notices to stderr, files written completely or not at all."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from spindle.artifact import writable_target
from spindle.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from spindle.report import Chart

CLOSED_PIPE = 141  # as in shells: 128 + SIGPIPE
_ANY_WIDTH = 10_000


def show(*parts: RenderableType) -> None:
    """Print tables and text for people. Names come from files, so nothing in a text is markup."""
    console = _console()
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    show_text("".join(line.rstrip(" ") + "\n" for line in capture.get().splitlines()))


def show_json(value: Any) -> None:
    """Print one JSON object and nothing else."""
    show_text(json.dumps(value, indent=1) + "\n")


def fits(part: RenderableType) -> bool:
    """Whether the output is wide enough to show this without cutting or wrapping it."""
    console = _console()
    return console.measure(part, options=console.options.update(max_width=_ANY_WIDTH)).maximum <= console.width


def show_chart(chart_of: Callable[[int], Chart], num_devices: int) -> None:
    """Draw a chart as wide as the output; `chart_of` makes it for a number of columns."""
    from spindle.report import columns_for, draw

    console = _console()
    chart = chart_of(columns_for(console.width, num_devices))
    show("", draw(chart, num_devices, console.width, console.color_system is not None and not console.no_color))


def printable(text: str) -> str:
    """The text with a placeholder for every character that a terminal would not print or would interpret; newlines
    stay."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def notice(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def note_compilation(is_pipeline: bool) -> None:
    """Print a notice if this command has to compile loops first, as the first one after an install does."""
    from spindle.planners import needs_compiling

    if needs_compiling(is_pipeline):
        notice("compiling loops, which takes about half a minute, once after installation")


_LONG_S = 20.0


def note_duration(what: str, estimate_s: float) -> None:
    """Print how long something will take, if that is long."""
    if estimate_s >= _LONG_S:
        minutes = f"{estimate_s / 60:.0f} minutes" if estimate_s >= 90 else f"{10 * round(estimate_s / 10)} s"
        notice(f"{what}: about {minutes} on a free core")


@contextmanager
def progress_bar(text: str, total: float) -> Iterator[Callable[[float], None]]:
    """A progress bar on stderr, if that is a terminal."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = _console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        job = bar.add_task(text, total=total)
        yield lambda done: bar.update(job, completed=done)


def refuse_outputs(*outputs: Path | None, inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuse, before any work is done, outputs that cannot be written or are also an input or another output."""
    role_of = {
        Path(os.path.realpath(given)): "an input" for given in inputs if given is not None and os.path.isfile(given)
    }
    for path in outputs:
        if path is None:
            continue
        if path == Path("-"):
            raise InputError("-: an output needs the name of a file; use --json to print to standard output")
        target = writable_target(path)
        if target in role_of:
            raise InputError(f"{path}: cannot be written, it is also {role_of[target]} of this command")
        role_of[target] = "another output"


def show_text(text: str) -> None:
    """Print a text unchanged."""
    if sys.stdout is None:
        raise InputError("cannot write to standard output (it is closed)")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        leave_closed_pipe()
    except OSError as error:
        raise unwritable_output(error) from error


def unwritable_output(error: OSError) -> InputError:
    """The error for a standard output that cannot be written to."""
    _discard_output()
    return InputError(f"cannot write to standard output ({error.strerror})")


def leave_closed_pipe() -> NoReturn:
    """Exit silently: the reader of the pipe has closed it."""
    _discard_output()
    raise SystemExit(CLOSED_PIPE)


def _discard_output() -> None:
    """Redirect stdout to /dev/null; otherwise Python fails at exit when it flushes the rest."""
    with suppress(OSError, ValueError):  # an output without a descriptor has none to flush to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
