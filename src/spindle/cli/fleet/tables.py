"""Tables of `spindle fleet`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from spindle.fleet import FleetMeasures


def measures_table(measures: Mapping[str, tuple[FleetMeasures, Sequence[float]]]) -> Table:
    """One column per policy; all six and their labels fit a terminal of 80 columns."""
    from rich.table import Table

    table = Table("", *measures, box=None)
    hours = {
        "JCT, h: mean": "jct_mean_s",
        "  median": "jct_median_s",
        "  p99": "jct_p99_s",
        "makespan, h": "makespan_s",
        "longest wait, h": "longest_wait_s",
    }
    figures = [entry for entry, _ in measures.values()]
    for label, name in hours.items():
        table.add_row(label, *(f"{getattr(entry, name) / 3600:.2f}" for entry in figures))
    table.add_row("sum of normalised rates", *(f"{entry.throughput:.2f}" for entry in figures))
    table.add_row("finish-time fairness", *(f"{entry.fairness_mean:.2f}" for entry in figures))
    table.add_row("  worst", *(f"{entry.fairness_worst:.1f}" for entry in figures))
    table.add_row("reallocations", *(f"{entry.num_reallocations:,}" for entry in figures))
    table.add_row("  device-hours", *(f"{entry.realloc_device_h:,.0f}" for entry in figures))
    table.add_row("faults, device-hours", *(f"{entry.fault_device_h:,.0f}" for entry in figures))
    table.add_row("rounds", *(f"{entry.num_rounds:,}" for entry in figures))
    # The first round may compile for a second, so a mean would say little about the others.
    table.add_row(
        "CPU of a round, ms",
        *(f"{1e3 * median(cpu_s):.2f}" if cpu_s else "" for _, cpu_s in measures.values()),
    )
    table.add_row("jobs", *(f"{entry.num_jobs:,}" for entry in figures))
    return table
