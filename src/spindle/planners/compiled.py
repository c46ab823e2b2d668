"""Whether the compiled loops are in numba's cache: after an install the first command compiles them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spindle.planners.anneal import anneal
from spindle.planners.pipeline.interleave import interleave_passes
from spindle.simulate import engine


def needs_compiling(is_pipeline: bool) -> bool:
    """Whether planning and simulating such a step begins with compiling, which takes about half a minute."""
    return not all(map(_is_cached, (engine.run, interleave_passes if is_pipeline else anneal)))


def _is_cached(loop: Any) -> bool:
    """Numba names the index of a function's compiled versions by the function and its first line."""
    name = (
        f"{Path(loop.py_func.__code__.co_filename).stem}.{loop.__name__}-{loop.py_func.__code__.co_firstlineno}.py*.nbi"
    )
    return any(Path(loop.stats.cache_path).glob(name))
