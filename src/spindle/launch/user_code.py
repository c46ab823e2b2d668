"""Whether code is the user's own."""

from __future__ import annotations

import os
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType

# Folders of code that is not the user's.
_OTHERS = tuple(
    f"{os.path.realpath(folder)}{os.sep}"
    for folder in (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[1]))
)


def is_users(code: CodeType) -> bool:
    """Whether code is the user's: not from Python, an installed package, or Spindle."""
    return not code.co_filename.startswith("<") and _is_users_file(code.co_filename)


@cache
def _is_users_file(file: str) -> bool:
    """Cached, because recording a task checks every stack frame at every op."""
    return not os.path.realpath(file).startswith(_OTHERS)
