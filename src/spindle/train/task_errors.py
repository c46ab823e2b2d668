"""Errors in the code of tasks and modules, reported with the user's own line and torch's last sentence.

Tasks run as recorded graphs, so a traceback shows generated code and the insides of torch. Every recorded node knows
the line that it came from; with SPINDLE_DEBUG=1 in the environment the whole traceback is shown as well.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import fx

from spindle.errors import SpindleError, WorkloadError
from spindle.launch import is_debugging, is_users, line_text

_LINE = "line_of_task"  # key in the `meta` of a node
_GENERATED = "<eval_with_key>"  # the file name that torch.fx gives to the code of a graph


def mark_line(node: fx.Node) -> None:
    """Remember the line of the user's code that is being recorded as this node."""
    line = users_line(sys._getframe(1))
    if line:
        node.meta[_LINE] = line


def users_line(frame: FrameType | None, *, only_caller: bool = False) -> str:
    """The innermost line of the user's code, searched from a frame outwards or only in this frame; empty if there is
    none."""
    while frame is not None and not is_users(frame.f_code):
        frame = None if only_caller else frame.f_back
    return "" if frame is None else line_text(frame.f_code.co_filename, frame.f_lineno)


def copy_line(source: fx.Node, node: fx.Node) -> None:
    """Remember for a node the line of another node."""
    node.meta[_LINE] = line_of_node(source)


def line_of_node(node: fx.Node) -> str:
    """The line that a node was recorded from; empty if unknown."""
    return str(node.meta.get(_LINE, ""))


def line_of(error: BaseException) -> str:
    """The innermost line of the user's code in the traceback of an error, which a recorded graph may have raised."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        code, runner = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
        if code.co_filename.startswith(_GENERATED) and isinstance(runner, fx.GraphModule):
            # In generated code, each line assigns one node, under its name.
            name = linecache.getline(code.co_filename, trace.tb_lineno).partition("=")[0].partition(":")[0].strip()
            lines += [line_of_node(node) for node in runner.graph.nodes if node.name == name]
        elif is_users(code):
            lines.append(line_text(code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return next((line for line in reversed(lines) if line), "")


@contextmanager
def named_call(line: str, module: str) -> Iterator[None]:
    """A context for a call of a module: errors name the module, and the line of the task that calls it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{line}, calling module {module!r}" if line else f"calling module {module!r}")
        raise


@contextmanager
def explained_errors(run_tasks: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A context in which an error in the code of a task or module becomes a WorkloadError of two lines: where, and
    what.

    Other errors pass unchanged: Spindle's own, and those that are not about the code, such as running out of memory.
    `run_tasks` runs the original tasks, because the layers of a module are recorded code, whose errors have no line.
    """
    try:
        yield
    except (SpindleError, torch.OutOfMemoryError, MemoryError, OSError):
        raise
    except Exception as error:
        line = line_of(error) or _line_of_same_failure(run_tasks, type(error))
        notes = list(getattr(error, "__notes__", ()))
        if not any(note.startswith(line) for note in notes):  # otherwise only the line that calls the module is known
            notes = [line, *notes]
        where = "; ".join(filter(None, notes))
        if not where:
            raise
        what = f"{type(error).__name__}: {str(error).strip()}" if str(error).strip() else type(error).__name__
        hint = "" if is_debugging() else "\n(SPINDLE_DEBUG=1 shows the whole traceback)"
        raise WorkloadError(f"{where}\n{what}{hint}") from (error if is_debugging() else None)


def _line_of_same_failure(run_tasks: Callable[[], object], kind: type[BaseException]) -> str:
    """The line at which the original tasks fail in the same way; empty if they do not."""
    try:
        with torch.no_grad():
            run_tasks()
    except kind as error:
        return line_of(error)
    except Exception:  # it fails differently: the first error is more useful
        return ""
    return ""
