"""Whether code is the user's own."""

from __future__ import annotations

import linecache
import os
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType, TracebackType

# Packages may be installed elsewhere than this interpreter installs them: for the user or the system, or on PYTHONPATH.
_INSTALLED = frozenset({"site-packages", "dist-packages"})
# Folders of code that is not the user's.
_OTHERS = tuple(
    f"{os.path.realpath(folder)}{os.sep}"
    for folder in (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[1]))
)


def is_users(code: CodeType) -> bool:
    """Whether code is the user's: not from Python, an installed package, or Spindle, and not generated."""
    return is_users_file(code.co_filename)


@cache
def is_users_file(file: str) -> bool:
    """Whether a file has the user's code. Cached, because recording a task checks every stack frame at every op."""
    if file.startswith("<"):
        return file.startswith("<ipython-input-")
    path = os.path.realpath(file)
    return not path.startswith(_OTHERS) and _INSTALLED.isdisjoint(Path(path).parts)


def innermost_users(trace: TracebackType | None) -> TracebackType | None:
    """The innermost frame of the user's code in a traceback, if there is one."""
    innermost = None
    while trace is not None:
        innermost = trace if is_users(trace.tb_frame.f_code) else innermost
        trace = trace.tb_next
    return innermost


def line_text(file: str, number: int) -> str:
    """`train.py, line 12 (return x.mean())`."""
    code = linecache.getline(file, number).strip()
    return f"{os.path.basename(file)}, line {number}" + (f" ({code})" if code else "")
