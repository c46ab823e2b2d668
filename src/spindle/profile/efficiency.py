"""Tables of measured kernel efficiencies, by the size of the kernel.

An efficiency is the roofline time (the larger of FLOPs over the peak and bytes over the bandwidth) divided by the
measured time. So a table can be used for a device with other peaks, on the assumption, which profiles state, that its
kernels are equally good. Between points, efficiency is linear in the logarithm of the size. Beyond the first or last
point it is constant, and every lookup also returns whether the size was inside the table.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from spindle.errors import ProfileError
from spindle.profile.operators import Attention, Gemm, MemoryBound

EFFICIENCIES_KIND = "kernel-efficiencies"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmColumn:
    """The three GEMMs of one weight shape (forward, input gradient, weight gradient), by the number of tokens."""

    outputs: int
    inputs: int
    tokens: tuple[int, ...]
    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]

    def __post_init__(self) -> None:
        what = f"GEMM {self.outputs} x {self.inputs}"
        _check_increasing(what, self.tokens)
        for values in (self.forward, self.input, self.weight):
            _check_efficiencies(what, values, len(self.tokens))

    def at(self, gemm: Gemm) -> tuple[float, bool]:
        match gemm.pass_:
            case "forward":
                values = self.forward
            case "input":
                values = self.input
            case "weight":
                values = self.weight
        return _interpolate(self.tokens, values, gemm.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTable:
    """Attention of one head width, by the number of planes (sequences times heads), one row each, and by length."""

    head_width: int
    causal: bool
    planes: tuple[int, ...]
    lengths: tuple[int, ...]
    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        what = f"attention of heads of {self.head_width}"
        _check_increasing(what, self.planes)
        _check_increasing(what, self.lengths)
        for rows in (self.forward, self.backward):
            if len(rows) != len(self.planes):
                raise ProfileError(f"{what}: expected {len(self.planes)} rows, got {len(rows)}")
            for row in rows:
                _check_efficiencies(what, row, len(self.lengths))

    def at(self, attention: Attention) -> tuple[float, bool]:
        rows = self.backward if attention.backward else self.forward
        length = math.sqrt(attention.queries * attention.keys)
        column = [_interpolate(self.lengths, row, length) for row in rows]
        value, is_inside = _interpolate(self.planes, [value for value, _ in column], attention.count * attention.heads)
        return value, is_inside and column[0][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    """A kind of memory-bound kernel, by the bytes that it reads and writes."""

    kind: str
    num_bytes: tuple[int, ...]
    efficiency: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_increasing(self.kind, self.num_bytes)
        _check_efficiencies(self.kind, self.efficiency, len(self.num_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Efficiencies of all kinds of kernels. Where there is no table, the `flat_` number holds for all sizes.

    `gemm_grid` has a column for every pair of output and input sizes; shapes in `gemm` were measured themselves and
    take precedence. `launch_s` is the overhead of each kernel; `network` is the share of a link's bandwidth that
    collectives reach.
    """

    flat_gemm: float = 0.65
    flat_attention: float = 0.45
    flat_attention_backward: float = 0.40
    flat_memory: float = 0.75
    network: float = 0.8
    launch_s: float = 2e-6
    gemm: tuple[GemmColumn, ...] = ()
    gemm_grid: tuple[GemmColumn, ...] = ()
    attention: tuple[AttentionTable, ...] = ()
    memory: tuple[MemoryTable, ...] = ()
    measured_on: str = ""

    def __post_init__(self) -> None:
        for name in ("flat_gemm", "flat_attention", "flat_attention_backward", "flat_memory", "network"):
            if not 0 < getattr(self, name) <= 1:
                raise ProfileError(f"{name} must lie in (0, 1], got {getattr(self, name)}")
        if not self.launch_s >= 0:
            raise ProfileError(f"launch_s must not be negative, got {self.launch_s}")
        outputs, inputs = ({getattr(column, name) for column in self.gemm_grid} for name in ("outputs", "inputs"))
        if len(self.gemm_grid) != len(outputs) * len(inputs):
            raise ProfileError(
                f"a grid of {len(outputs)} x {len(inputs)} shapes needs one column for each, got {len(self.gemm_grid)}"
            )


class Lookup:
    """Looks up the efficiency of operators. Every method also returns whether the size was inside the table."""

    def __init__(self, efficiencies: Efficiencies) -> None:
        self._efficiencies = efficiencies
        self._exact = {(column.outputs, column.inputs): column for column in efficiencies.gemm}
        self._grid = {(column.outputs, column.inputs): column for column in efficiencies.gemm_grid}
        self._outputs = tuple(sorted({column.outputs for column in efficiencies.gemm_grid}))
        self._inputs = tuple(sorted({column.inputs for column in efficiencies.gemm_grid}))
        self._memory = {table.kind: table for table in efficiencies.memory}

    def gemm(self, gemm: Gemm) -> tuple[float, bool]:
        """The efficiency of this shape if it was measured itself, else interpolated between its neighbours in the
        grid."""
        if gemm.pass_ not in ("forward", "input", "weight"):
            raise ProfileError(f"a GEMM's pass_ is forward, input or weight, got {gemm.pass_!r}")
        exact = self._exact.get((gemm.outputs, gemm.inputs))
        if exact is not None:  # this weight shape was measured itself
            return exact.at(gemm)
        if not self._grid:
            return self._efficiencies.flat_gemm, True
        # Bilinear over the logarithms of outputs and inputs.
        total, is_inside = 0.0, True
        for row, row_share, row_inside in _neighbours(self._outputs, gemm.outputs):
            for column, column_share, column_inside in _neighbours(self._inputs, gemm.inputs):
                value, tokens_inside = self._grid[self._outputs[row], self._inputs[column]].at(gemm)
                total += row_share * column_share * value
                is_inside = is_inside and row_inside and column_inside and tokens_inside
        return total, is_inside

    def attention(self, attention: Attention) -> tuple[float, bool]:
        """The efficiency in the table with the nearest head width, among tables with the same mask if there are any."""
        every_table = self._efficiencies.attention
        tables = [table for table in every_table if table.causal == attention.causal] or list(every_table)
        if not tables:
            flat, flat_backward = self._efficiencies.flat_attention, self._efficiencies.flat_attention_backward
            return (flat_backward if attention.backward else flat), True
        table = min(tables, key=lambda table: (abs(table.head_width - attention.head_width), table.head_width))
        value, is_inside = table.at(attention)
        return value, is_inside and table.head_width == attention.head_width and table.causal == attention.causal

    def memory(self, kernel: MemoryBound) -> tuple[float, bool]:
        if not self._memory:
            return self._efficiencies.flat_memory, True
        table = self._memory.get(kernel.kind)
        if table is None:
            return self._efficiencies.flat_memory, False
        return _interpolate(table.num_bytes, table.efficiency, kernel.num_bytes)


def _interpolate(sizes: tuple[int, ...], values: tuple[float, ...] | list[float], size: float) -> tuple[float, bool]:
    """Interpolate a value, and say whether `size` is within `sizes`."""
    near = _neighbours(sizes, size)
    return sum(values[position] * share for position, share, _ in near), near[0][2]


def _neighbours(sizes: tuple[int, ...], size: float) -> tuple[tuple[int, float, bool], ...]:
    """The one or two positions in `sizes` to interpolate between: (position, weight, whether `size` is within
    `sizes`)."""
    if size <= sizes[0]:
        return ((0, 1.0, size == sizes[0]),)
    if size >= sizes[-1]:
        return ((len(sizes) - 1, 1.0, size == sizes[-1]),)
    position = bisect_right(sizes, size)
    below, above = _log(sizes[position - 1]), _log(sizes[position])
    share = (math.log2(size) - below) / (above - below)
    return (position - 1, 1 - share, True), (position, share, True)


@functools.cache
def _log(size: int) -> float:
    return math.log2(size)


def _check_increasing(what: str, sizes: tuple[int, ...]) -> None:
    if not sizes or sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
        raise ProfileError(f"{what}: sizes must be increasing and at least 1, got {list(sizes)[:8]}")


def _check_efficiencies(what: str, values: tuple[float, ...], count: int) -> None:
    if len(values) != count:
        raise ProfileError(f"{what}: expected {count} efficiencies, got {len(values)}")
    if not all(0 < value < 2 for value in values):
        raise ProfileError(f"{what}: efficiencies must be above 0 and below 2, got {list(values)[:8]}")
