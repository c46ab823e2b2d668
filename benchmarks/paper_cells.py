"""What the Spindle paper measured: 17 cells, read off its end-to-end figure (§5; milliseconds are approximate)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One workload on so many A800s; speedups are over DeepSpeed."""

    recipe: str
    num_devices: int
    deepspeed_ms: float
    spindle_ms: float
    spindle: float
    optimus: float
    distmm: float
    megatron: float


# By recipe: num_devices, deepspeed_ms, spindle_ms, then the speedups of Spindle, Spindle-Optimus, DistMM-MT, Megatron.
_ROWS: dict[str, tuple[tuple[int, float, float, float, float, float, float], ...]] = {
    "clip-4": (
        (8, 852, 705, 1.21, 0.96, 1.09, 1.02),
        (16, 529, 434, 1.22, 1.00, 1.08, 1.05),
        (32, 453, 298, 1.52, 1.36, 1.20, 1.09),
    ),
    "clip-7": (
        (8, 1263, 964, 1.31, 0.73, 1.09, 1.02),
        (16, 752, 597, 1.26, 0.84, 1.09, 1.04),
        (32, 589, 383, 1.54, 1.15, 1.17, 1.01),
    ),
    "clip-10": (
        (8, 1547, 1129, 1.37, 0.50, 1.08, 1.01),
        (16, 889, 668, 1.33, 0.93, 1.08, 1.02),
        (32, 747, 437, 1.71, 1.38, 1.14, 1.05),
    ),
    "ofasys-4": (
        (8, 1606, 1050, 1.53, 1.23, 1.01, 0.99),
        (16, 851, 600, 1.42, 1.20, 1.01, 0.98),
        (32, 526, 349, 1.51, 1.28, 1.04, 1.01),
    ),
    "ofasys-7": (
        (8, 3116, 1822, 1.71, 1.17, 1.07, 1.02),
        (16, 1560, 1091, 1.43, 1.12, 1.03, 0.98),
        (32, 870, 654, 1.33, 1.13, 1.06, 1.01),
    ),
    "qwen-val-3": (
        (32, 2529, 2180, 1.16, 1.04, 1.04, 1.02),
        (64, 2006, 1231, 1.63, 1.44, 1.11, 1.03),
    ),
}

CELLS: tuple[Cell, ...] = tuple(
    Cell(
        recipe=recipe,
        num_devices=num_devices,
        deepspeed_ms=deepspeed_ms,
        spindle_ms=spindle_ms,
        spindle=spindle,
        optimus=optimus,
        distmm=distmm,
        megatron=megatron,
    )
    for recipe, rows in _ROWS.items()
    for num_devices, deepspeed_ms, spindle_ms, spindle, optimus, distmm, megatron in rows
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCell:
    """The paper's own simulation on 256 devices; speedups are over DeepSpeed, no times are given."""

    recipe: str
    num_devices: int
    spindle: float
    optimus: float
    distmm: float


SIMULATED: tuple[SimulatedCell, ...] = (
    SimulatedCell(recipe="qwen-val-30b", num_devices=256, spindle=1.34, optimus=1.05, distmm=1.04),
    SimulatedCell(recipe="qwen-val-70b", num_devices=256, spindle=1.36, optimus=1.09, distmm=1.04),
)
