"""Loops compiled by numba, with a cache on disk that may be missing, damaged or full.

Numba refuses to import a cached function where it finds no folder for its cache, and fails in the first call where a
file of the cache is cut off or cannot be written. Here such a cache is reported once and then not used. Every compiled
loop is made by this `njit`, so that the folder is chosen before the first of them, whoever imports it: the command
line, a script, or a rank under torchrun. Numba is imported with the first call of a loop: ranks that do not plan never
import it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, cached_property, update_wrapper
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "NUMBA_CACHE_DIR"


def njit(*, cache: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with these options; with `cache`, compiled code is kept on disk if possible."""
    return lambda function: _Loop(function, cache, options)


def warm_up() -> None:
    """Import numba, and load what the first call of any loop loads: more than a second of CPU time."""
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


class _Loop:
    """A function that numba compiles when it is first called, by Python or by another compiled loop."""

    def __init__(self, function: Callable[..., Any], is_cached: bool, options: Mapping[str, Any]) -> None:
        self._function, self._is_cached, self._options = function, is_cached, options
        update_wrapper(self, function)

    @cached_property
    def _dispatcher(self) -> Any:
        import numba

        dispatcher = numba.njit(**self._options)(self._function)
        if self._is_cached:
            _choose_folder()
            try:
                dispatcher._cache = _cache_class()(self._function)
            except (RuntimeError, OSError) as error:  # no folder can be written
                _report_once(f"compiled code is not cached: {_first_line(error)}; set {FOLDER_VARIABLE} to a folder")
        return dispatcher

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._dispatcher(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name == "_numba_type_":  # as which another loop sees this one
            from numba.core.types import Dispatcher

            return Dispatcher(self._dispatcher)
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dispatcher, name)


@cache
def _cache_class() -> Any:
    from numba.core.caching import FunctionCache

    class Cache(FunctionCache):
        def load_overload(self, sig: Any, target_context: Any) -> Any:
            try:
                return super().load_overload(sig, target_context)
            except Exception as error:  # unpickling what is left of a file can raise anything
                problem = f"cannot be read ({_first_line(error)}); compiling again"
                _report_once(f"compiled code in {self.cache_path} {problem}")
                with suppress(OSError):
                    self.flush()  # the index, which would be read again to be written
                return None

        def save_overload(self, sig: Any, data: Any) -> None:
            try:
                super().save_overload(sig, data)
            except Exception as error:
                self.disable()
                _report_once(f"compiled code cannot be cached in {self.cache_path} ({_first_line(error)})")

    return Cache


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


@cache
def _choose_folder() -> None:
    """Cache compiled code in a temporary folder of this run if neither the package nor the home is writable."""
    package = Path(__file__).resolve().parent
    caches = [folder / "__pycache__" for folder in package.iterdir() if (folder / "__init__.py").exists()]
    if FOLDER_VARIABLE in os.environ or all(map(_can_be_written, caches)) or _can_be_written(_numba_home()):
        return
    with suppress(OSError):  # numba says that there is no folder
        folder = tempfile.mkdtemp(prefix="spindle-numba-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[FOLDER_VARIABLE] = folder
        import numba

        numba.config.CACHE_DIR = folder  # type: ignore[attr-defined]  # read from the environment before


def _numba_home() -> Path:
    """Where numba puts the cache of a user (its copy of appdirs)."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home()))
    if sys.platform == "darwin":
        return Path(os.path.expanduser("~/Library/Caches/numba"))
    return Path(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))) / "numba"


def _can_be_written(folder: Path) -> bool:
    """Whether a file can be created in this folder, which need not exist yet."""
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


@cache
def _notices() -> list[str]:
    """The notices of this process."""
    return []


def _report_once(text: str) -> None:
    """Print only the first notice: dozens of functions would repeat it."""
    if not _notices() and sys.stderr is not None:
        print(f"note: {text}", file=sys.stderr)
    _notices().append(text)
