"""Notices for tasks that print, or read the values of tensors, while they are recorded.

A task's function runs without values when it is recorded; training runs what was recorded. So `print(loss)` shows a
placeholder, and `history.append(loss.item())` appends one. Both are common while debugging.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from spindle.train.task_errors import users_line

_READING = ("item", "tolist", "numpy")  # methods of a tensor that return its values to Python
INSTEAD = "to see numbers, return spindle.result(loss, name=...)"
_notify: ContextVar[Callable[[str], None] | None] = ContextVar("notify", default=None)


@contextmanager
def noticing(notify: Callable[[str], None]) -> Iterator[None]:
    """A context in which `notify` is called if a task prints or reads values while it is recorded."""
    token = _notify.set(notify)
    try:
        yield
    finally:
        _notify.reset(token)


def note_method(task: str, name: Any) -> None:
    """Notify the user that a task calls a method that reads values, or computes gradients."""
    if name == "backward":
        _add_notice(task, "calls .backward(), which has no effect: gradients of what the task returns are computed")
    if name in _READING:
        _add_notice(
            task,
            f"calls .{name}() of a tensor, which has no value while the task is recorded. What the task computes from "
            f"it waits for the GPU in every step; other code does not run again; {INSTEAD}",
        )


@contextmanager
def prints_noticed(task: str) -> Iterator[None]:
    """A context for recording a task in this thread: printing placeholders becomes a notice."""
    show, thread = builtins.print, threading.get_ident()

    def noticed_print(*values: Any, **options: Any) -> None:
        if threading.get_ident() != thread or not users_line(sys._getframe(1), only_caller=True):
            show(*values, **options)
            return
        _add_notice(task, f"prints while the task is recorded, without values, and not in training; {INSTEAD}")
        if not any("Proxy(" in str(value) for value in values):
            show(*values, **options)

    builtins.print = noticed_print
    try:
        yield
    finally:
        builtins.print = show


def _add_notice(task: str, text: str) -> None:
    notify = _notify.get()
    if notify is not None:
        line = users_line(sys._getframe(1))
        notify(f"task {task!r}{f', {line}' if line else ''} {text}")
