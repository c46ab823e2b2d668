"""Start and end the processes of a training script. Knows processes and ranks, neither torch nor plans.

Nothing is imported until it is used: every worker imports this package before the first line of its script.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spindle.launch.activity import LOADING, ON_STEP, recorder
    from spindle.launch.capture import Capture, Captured, ProfileCapture, WorkloadCapture, active_capture
    from spindle.launch.failure import INTERRUPTED, end_by_error, install_hook, is_debugging
    from spindle.launch.mps import VIRTUAL_VARIABLE
    from spindle.launch.user_code import innermost_users, is_users, line_text
    from spindle.launch.worker import die_with_parent

__all__ = [
    "INTERRUPTED",
    "LOADING",
    "ON_STEP",
    "VIRTUAL_VARIABLE",
    "Capture",
    "Captured",
    "ProfileCapture",
    "WorkloadCapture",
    "active_capture",
    "die_with_parent",
    "end_by_error",
    "innermost_users",
    "install_hook",
    "is_debugging",
    "is_users",
    "line_text",
    "recorder",
]
_MODULES = {
    "activity": ("LOADING", "ON_STEP", "recorder"),
    "capture": ("Capture", "Captured", "ProfileCapture", "WorkloadCapture", "active_capture"),
    "failure": ("INTERRUPTED", "end_by_error", "install_hook", "is_debugging"),
    "mps": ("VIRTUAL_VARIABLE",),
    "user_code": ("innermost_users", "is_users", "line_text"),
    "worker": ("die_with_parent",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"spindle.launch.{module}"), name)
    raise AttributeError(f"module 'spindle.launch' has no attribute {name!r}")
