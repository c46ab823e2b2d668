"""Errors in the code of tasks and modules, reported with the user's own line and torch's last sentence.

Tasks run as recorded graphs, so a traceback shows generated code and the insides of torch. Every recorded node knows
the line that it came from; with SPINDLE_DEBUG=1 in the environment the whole traceback is shown as well.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import fx

from spindle.errors import SpindleError, WorkloadError
from spindle.launch import is_debugging, is_users

_LINE = "line_of_task"  # in the `meta` of a node
_GENERATED = "<eval_with_key>"  # how torch.fx names the code of a graph


def mark_line(node: fx.Node) -> None:
    """Remember the line of the user's code that is being recorded as this node."""
    line = users_line(sys._getframe(1))
    if line:
        node.meta[_LINE] = line


def users_line(frame: FrameType | None, *, only_caller: bool = False) -> str:
    """The innermost line of the user's code from a frame outwards, or in this frame alone; nothing if there is none."""
    while frame is not None and not is_users(frame.f_code):
        frame = None if only_caller else frame.f_back
    return "" if frame is None else line_text(frame.f_code.co_filename, frame.f_lineno)


def copy_line(source: fx.Node, node: fx.Node) -> None:
    """Remember for a node the line of another."""
    node.meta[_LINE] = line_of_node(source)


def line_text(file: str, number: int) -> str:
    """`train.py, line 12 (return x.mean())`."""
    code = linecache.getline(file, number).strip()
    return f"{os.path.basename(file)}, line {number}" + (f" ({code})" if code else "")


def line_of_node(node: fx.Node) -> str:
    """The line that a node was recorded from, or nothing."""
    return str(node.meta.get(_LINE, ""))


def line_of(error: BaseException) -> str:
    """The innermost line of the user's code on the way to an error, which may have been raised by a recorded graph."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        code, runner = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
        if code.co_filename.startswith(_GENERATED) and isinstance(runner, fx.GraphModule):
            # Each line of generated code assigns one node, under its name.
            name = linecache.getline(code.co_filename, trace.tb_lineno).partition("=")[0].partition(":")[0].strip()
            lines += [line_of_node(node) for node in runner.graph.nodes if node.name == name]
        elif is_users(code):
            lines.append(line_text(code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return next((line for line in reversed(lines) if line), "")


@contextmanager
def named_call(line: str, module: str) -> Iterator[None]:
    """A context for a call of a module: its errors name the module, and the line of the task that calls it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{line}, calling module {module!r}" if line else f"calling module {module!r}")
        raise


@contextmanager
def explained_errors(run_tasks: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A context in which an error in the code of a task or module becomes a WorkloadError of two lines: where, and
    what.

    Other errors pass: ours, and those that are not about the code, such as running out of memory. `run_tasks` runs the
    original tasks: the layers of a module are recorded code, whose errors have no line.
    """
    try:
        yield
    except (SpindleError, torch.OutOfMemoryError, MemoryError, OSError):
        raise
    except Exception as error:
        line = line_of(error) or _line_when(run_tasks, type(error))
        notes = list(getattr(error, "__notes__", ()))
        if not any(note.startswith(line) for note in notes):  # else the line that calls the module is all there is
            notes = [line, *notes]
        where = "; ".join(filter(None, notes))
        if not where:
            raise
        what = f"{type(error).__name__}: {str(error).strip()}" if str(error).strip() else type(error).__name__
        hint = "" if is_debugging() else "\n(SPINDLE_DEBUG=1 shows the whole traceback)"
        raise WorkloadError(f"{where}\n{what}{hint}") from (error if is_debugging() else None)


def _line_when(run_tasks: Callable[[], object], kind: type[BaseException]) -> str:
    """The line at which the original tasks fail in the same way, or nothing."""
    try:
        with torch.no_grad():
            run_tasks()
    except kind as error:
        return line_of(error)
    except Exception:  # it fails differently: the first error is the more useful one
        return ""
    return ""
