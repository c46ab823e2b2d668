"""The result of a fit: losses, plan, and a step predicted and measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from spindle.artifact import write_atomically
from spindle.graph import MetaGraph
from spindle.plan import Plan
from spindle.program import Program
from spindle.report import StepComparison, columns_for, compare_step, draw_steps, step_charts, step_tables, trace_of
from spindle.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """Losses by step, of the tasks that had a part in it, on all ranks; the measured timeline is rank 0's, one typical
    step of the last ones."""

    rank: int
    losses: tuple[dict[str, float], ...]
    step_s: tuple[float, ...]  # until the last rank was through
    plan: Plan
    program: Program
    graph: MetaGraph
    predicted: Timeline
    measured: Timeline | None
    peak_bytes: tuple[int, ...] = ()  # on a GPU: the most that each rank held, on rank 0
    changes_s: tuple[float, ...] = ()  # how long each change of the tasks took, on this rank
    sampled_s: tuple[tuple[float, float], ...] = ()  # predicted and measured, of some of the last steps, on rank 0
    notices: tuple[str, ...] = ()
    num_captured_slots: int = 0  # that run as CUDA graphs on this rank
    slots_without_cuda_graph: Mapping[str, str] = field(default_factory=dict)  # on this rank, with the reason
    oversubscribed: bool = False  # more threads than cores

    @property
    def comparison(self) -> StepComparison | None:
        """The predicted step compared with the measured one."""
        if self.measured is None:
            return None
        return compare_step(self.predicted, self.measured, self.program, self.graph)

    def print(self) -> None:
        """Print losses, and the predicted and the measured step, on rank 0."""
        if self.rank:
            return
        console = Console(highlight=False, markup=False, emoji=False)
        console.print(_loss_table(self.losses))
        comparison = self.comparison
        if comparison is None or self.measured is None:
            return
        num_ranks = self.program.num_ranks
        width = console.width
        charts = step_charts(self.predicted, self.measured, self.program, self.graph, columns_for(width, num_ranks))
        console.print()
        console.print(draw_steps(charts, num_ranks, width, console.color_system is not None and not console.no_color))
        console.print()
        console.print(*step_tables(comparison), sep="\n")
        typical = statistics.median(self.step_s[len(self.step_s) // 4 :])
        console.print(f"\n{typical * 1e3:.1f} ms per step, the median of {len(self.step_s)}")
        if self.oversubscribed:
            console.print("There are more ranks than cores here, so more ranks do not make a step faster.")

    def write_trace(self, path: Path | str) -> None:
        """Write the measured step as a trace for Perfetto, on rank 0."""
        if self.measured is not None:
            write_atomically(Path(path), trace_of(self.measured, self.program))


def _loss_table(losses: tuple[dict[str, float], ...]) -> Table:
    table = Table(title=f"Losses over {len(losses)} steps", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("task")
    count = min(5, len(losses))
    shown = [round(number * (len(losses) - 1) / max(1, count - 1)) for number in range(count)]
    for step in shown:
        table.add_column(f"step {step}", justify="right")
    for name in dict.fromkeys(name for step in losses for name in step):
        table.add_row(name, *(f"{losses[step][name]:.3f}" if name in losses[step] else "–" for step in shown))
    return table
