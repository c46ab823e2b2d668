"""The result of a fit: losses, plan, and a step predicted and measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, RenderableType

from spindle.display import count_of, facts, html_of, percent, seconds
from spindle.graph import MetaGraph
from spindle.plan import Plan
from spindle.planners import make_plan
from spindle.profile import Profile
from spindle.program import COMPUTE, Program, lower
from spindle.report import (
    StepBalance,
    StepComparison,
    columns_for,
    compare_step,
    draw_steps,
    idle_causes,
    idle_sentences,
    largest_differences,
    loss_table,
    loss_text,
    step_balance,
    step_charts,
    step_tables,
    write_trace,
)
from spindle.simulate import simulate
from spindle.timeline import Timeline

_TRUSTED = 1.5  # measured over predicted step, or the inverse, up to which a predicted speedup means something


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FitResult:
    """The result of a fit. Losses and metrics are on all ranks. The measured timeline, on rank 0, is a typical step
    among the last ones."""

    rank: int
    losses: tuple[dict[str, float], ...]
    step_s: tuple[float, ...]  # by step, until the last rank finished it
    num_samples: tuple[int, ...]  # by step, of all tasks
    plan: Plan
    program: Program
    profile: Profile
    predicted: Timeline
    measured: Timeline | None
    peak_bytes: tuple[int, ...] = ()  # on a GPU, on rank 0: the most memory that each rank held
    changes_s: tuple[float, ...] = ()  # how long each change of tasks took, on this rank
    # Predicted and measured seconds of some of the last steps, on rank 0.
    sampled_s: tuple[tuple[float, float], ...] = ()
    notices: tuple[str, ...] = ()
    num_captured_slots: int = 0  # slots that run as CUDA graphs on this rank
    slots_without_cuda_graph: Mapping[str, str] = field(default_factory=dict)  # on this rank, with the reason
    oversubscribed: bool = False  # whether there are more threads than cores
    metrics: tuple[dict[str, float], ...] = ()  # by step and `task/name`
    # Timelines of `program` in some of the last steps, on rank 0.
    measured_steps: Mapping[int, Timeline] = field(default_factory=dict)

    @property
    def graph(self) -> MetaGraph:
        return self.profile.graph

    @property
    def typical_step_s(self) -> float:
        """The median of all steps except the first quarter, in which graphs are captured and caches fill. NaN without
        steps."""
        return math.nan if not self.step_s else statistics.median(self.step_s[self._num_early :])

    @property
    def _num_early(self) -> int:
        return len(self.step_s) // 4

    @property
    def comparison(self) -> StepComparison | None:
        """The predicted step compared with the measured one."""
        if self.measured is None:
            return None
        return compare_step(self.predicted, self.measured, self.program, self.graph)

    @property
    def balance(self) -> tuple[StepBalance, StepBalance] | None:
        """How evenly the measured step loads the devices (the predicted step, if none was measured), and how evenly the
        predicted step does. None if no call runs in parts, and on one rank."""
        predicted = step_balance(self.predicted, self.program, self.graph)
        if predicted is None or self.program.num_ranks == 1:
            return None
        measured = None if self.measured is None else step_balance(self.measured, self.program, self.graph)
        return measured or predicted, predicted

    def print(self, *, full: bool = False) -> None:
        """Print losses, and the predicted and measured step, on rank 0: a summary, or with `full` everything."""
        if self.rank:
            return
        console = Console(highlight=False, markup=False, emoji=False)
        console.print(*self._summary(None if full else 8), sep="\n")
        comparison = self.comparison
        if not full or comparison is None or self.measured is None:
            return
        num_ranks = self.program.num_ranks
        width = console.width
        charts = step_charts(self.predicted, self.measured, self.program, self.graph, columns_for(width, num_ranks))
        console.print()
        console.print(draw_steps(charts, num_ranks, width, console.color_system is not None and not console.no_color))
        console.print()
        console.print(*step_tables(comparison), sep="\n")

    def _summary(self, max_tasks: int | None) -> list[RenderableType]:
        if not self.step_s:
            return ["No steps: all of them were done by the run that this one resumed."]
        step_s = self.step_s[self._num_early :]
        rate = sum(self.num_samples[self._num_early :]) / sum(step_s)
        which = f"{'the last ' if self._num_early else ''}{count_of(len(step_s), 'step')}"
        rows = [
            ("step", f"{seconds(self.typical_step_s)}, the median of {which}; {rate:,.0f} samples/s"),
            ("predicted", f"{seconds(self.predicted.makespan_s)}, by planner {self.plan.planner}"),
        ]
        comparison = self.comparison
        if comparison is not None:
            totals = comparison.totals
            rows[1] = ("predicted", f"{rows[1][1]}; the step compared with it took {seconds(totals.step.measured_s)}")
            waiting_s = totals.idle.measured_s + totals.transfer.measured_s + totals.sync.measured_s
            idle = percent(waiting_s / totals.step.measured_s)
            rows.append(("idle", f"{idle} of device time, including waiting for data"))
        if self.balance is not None:
            shown, foreseen = self.balance
            rows.append(
                (
                    "balance",
                    f"the slowest device has {shown.together:.2f} x the mean load ({foreseen.together:.2f} predicted); "
                    f"of encoders {shown.parts:.2f} ({foreseen.parts:.2f}), of all else {shown.others:.2f} "
                    f"({foreseen.others:.2f})",
                )
            )
        if self.program.num_ranks > 1 and not self.plan.passes and self.plan.planner != "sequential":
            alone_s = make_plan(self.profile, "sequential").makespan_s
            text = f"{alone_s / self.predicted.makespan_s:.2f} x as fast as one module at a time, predicted"
            if comparison is not None:
                ratio = comparison.totals.step.measured_s / comparison.totals.step.predicted_s
                if not 1 / _TRUSTED <= ratio <= _TRUSTED:
                    text += f"; do not rely on it: the step took {ratio:.2g} x as long as predicted"
            rows.append(("speedup", text))
        if self.metrics and self.metrics[-1]:
            last = [f"{name} {loss_text(value)}" for name, value in list(self.metrics[-1].items())[:max_tasks]]
            rows.append(("metrics", f"{', '.join(last)}, in the last step"))
        remarks = [] if comparison is None else largest_differences(comparison)
        idle_lines: list[str] = []
        if self.program.num_ranks > 1 and not self.oversubscribed:
            causes = idle_causes(self.measured or self.predicted, self.program, self.profile, (COMPUTE,))
            idle_lines = idle_sentences(causes, at_most=2 if max_tasks else 4)
        if idle_lines:
            max_tasks = max_tasks and 4  # so that the summary fits in 25 lines
            remarks = [*remarks[: 1 if max_tasks else None], *idle_lines]
        if self.oversubscribed:
            remarks.append("There are more ranks than cores here, so more ranks do not make a step faster.")
        more = [] if comparison is None else ["print(full=True) shows both steps in time, by module and by wave."]
        return [loss_table(self.losses, max_tasks), "", facts(rows), *remarks, *more]

    def __repr__(self) -> str:
        last = self.losses[-1] if self.losses else {}
        losses = ", ".join(f"{name} {loss_text(loss)}" for name, loss in list(last.items())[:4])
        more = f", and {len(last) - 4} more" if len(last) > 4 else ""
        ranks = f"{count_of(self.program.num_ranks, 'rank')}, planner {self.plan.planner!r}"
        time = f" of {seconds(self.typical_step_s)}" if self.step_s else ""
        return f"FitResult({len(self.losses)} steps{time} on {ranks}; {losses}{more})"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        return html_of(*self._summary(8))

    def write_trace(self, path: Path | str) -> None:
        """Write the measured step as a trace for Perfetto, on rank 0; compressed if the name ends in .gz."""
        if self.measured is not None:
            write_trace(Path(path), self.measured, self.program)


def result_without_steps(rank: int, plan: Plan, profile: Profile, notices: Sequence[str]) -> FitResult:
    """The result of a fit whose steps were all trained by an earlier run."""
    program = lower(plan, profile)
    return FitResult(
        rank=rank,
        losses=(),
        step_s=(),
        num_samples=(),
        plan=plan,
        program=program,
        profile=profile,
        predicted=simulate(program, profile),
        measured=None,
        notices=tuple(notices),
    )
