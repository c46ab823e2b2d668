"""Where output goes: results to stdout, progress and notices to stderr, files whole or not at all."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from spindle.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from spindle.report.gantt import Chart

CLOSED_PIPE = 141  # as shells say it: 128 + SIGPIPE


def show(*parts: RenderableType) -> None:
    """Prints tables and text for people."""
    from rich.console import Console

    console = Console(highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    _write("".join(line.rstrip(" ") + "\n" for line in capture.get().splitlines()))


def show_json(value: Any) -> None:
    """Prints one JSON object and nothing else."""
    _write(json.dumps(value, indent=1) + "\n")


def show_chart(chart_of: Callable[[int], Chart], num_devices: int) -> None:
    """Draws a chart as wide as the output is; `chart_of` makes it for a number of columns."""
    from rich.console import Console

    from spindle.report.gantt import columns_for, draw

    console = Console()
    chart = chart_of(columns_for(console.width, num_devices))
    show("", draw(chart, num_devices, console.width, console.color_system is not None and not console.no_color))


def notice(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def errors() -> Console:
    """A console on stderr, which shows nothing that moves where no person looks."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


@contextmanager
def progress_bar(text: str, total: float) -> Iterator[Callable[[float], None]]:
    """A bar on stderr that is told how much is done; nothing where no person looks."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = errors()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        job = bar.add_task(text, total=total)
        yield lambda done: bar.update(job, completed=done)


def refuse_unwritable(path: Path | None) -> None:
    """Says before the work, not after it, that a file cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{path}: cannot be written, it is a directory; give the name of a file")
    if not path.parent.is_dir():
        raise InputError(f"{path}: cannot be written, there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path}: cannot be written, {path.parent} does not allow it")


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        leave_closed_pipe()


def leave_closed_pipe() -> NoReturn:
    """The reader has gone: leave without a word. Python would complain at exit when it flushes what is left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(CLOSED_PIPE)
