"""Compare a measured step with its simulation, by totals, modules and waves.

Both timelines are of one program, so their numbers can be compared one by one. Left out: memory, because a measured
timeline may have no bytes; and single transfers, because a measured transfer ends when its rank notices, which depends
more on the rank than on the link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from spindle.display import count_of, facts, figures, percent, seconds
from spindle.errors import ProgramError
from spindle.graph import MetaGraph, MetaOp
from spindle.program import Backward, Column, Forward, OptimizerStep, Program, code, compute_lane, lane_of
from spindle.report.gantt import Chart, draw_legend, draw_rows, timeline_chart
from spindle.timeline import Timeline, device_times

NS = 1e9
_MAX_WAVES = 12
_MAX_RATIO = 9_999
_MAX_NAME = 30
_ROOMY = 6  # with numbers of up to this length, four pairs fit into 80 columns with spaces around their arrows

Key = TypeVar("Key", int, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A time, as predicted and as measured."""

    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        return self.measured_s - self.predicted_s

    @property
    def ratio(self) -> float | None:
        """Measured over predicted time; None if the prediction is zero."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 else None

    def __add__(self, other: Pair) -> Pair:
        return Pair(predicted_s=self.predicted_s + other.predicted_s, measured_s=self.measured_s + other.measured_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalsComparison:
    """The time of the step, and how a device spends it, as a mean over devices: the other five add up to the step.

    Transfers and synchronisation count only while a device does not compute, as in `Measures`.
    """

    step: Pair
    compute: Pair
    optimizer: Pair
    transfer: Pair
    sync: Pair
    idle: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class PassComparison:
    """Device-seconds of forward and backward."""

    forward: Pair
    backward: Pair

    @property
    def both(self) -> Pair:
        return self.forward + self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleComparison(PassComparison):
    """All slots of a module, or, for ops without a module, of a task."""

    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveComparison(PassComparison):
    """A wave, and when the first device starts and the last one ends its forward."""

    wave: int
    forward_start: Pair
    forward_end: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """One step, predicted and measured. Modules are in the order of the graph. If the plan has several lanes, `lanes`
    is the busy time of each compute lane, as a mean over devices."""

    workload: str
    planner: str
    num_ranks: int
    totals: TotalsComparison
    modules: tuple[ModuleComparison, ...]
    waves: tuple[WaveComparison, ...]
    lanes: tuple[Pair, ...] = ()

    @property
    def module_error(self) -> float | None:
        """The mean over modules of |measured / predicted - 1|, weighted by predicted device-seconds; None if all
        predictions are zero."""
        predicted = [module.both for module in self.modules if module.both.predicted_s > 0]
        weight_s = sum(pair.predicted_s for pair in predicted)
        return sum(abs(pair.difference_s) for pair in predicted) / weight_s if predicted else None


def compare_step(predicted: Timeline, measured: Timeline, program: Program, graph: MetaGraph) -> StepComparison:
    """Compare a measured step with its prediction. Raises a ProgramError if one of them is of another program."""
    if program.plan.fingerprint != graph.fingerprint:
        raise ProgramError(
            f"this program was made for another workload: {program.plan.workload!r} (fingerprint "
            f"{program.plan.fingerprint}), expected {graph.name!r} ({graph.fingerprint})"
        )
    _refuse_another("predicted", predicted, program)
    _refuse_another("measured", measured, program)
    predicted_sums, measured_sums = _sums(predicted), _sums(measured)
    modules = _passes_by(program, lambda slot: _name_of(graph.metaops[program.slots[slot].op]))
    waves = _passes_by(program, lambda slot: program.plan.slots[slot].wave)
    return StepComparison(
        workload=program.plan.workload,
        planner=program.plan.planner,
        num_ranks=program.num_ranks,
        totals=_totals(predicted, measured),
        modules=tuple(
            ModuleComparison(
                module=name,
                forward=_device_s(predicted_sums, measured_sums, modules[name].forward),
                backward=_device_s(predicted_sums, measured_sums, modules[name].backward),
            )
            for name in dict.fromkeys(map(_name_of, graph.metaops))
        ),
        waves=tuple(
            WaveComparison(
                wave=wave,
                forward_start=_pair(
                    predicted_sums.start_ns[passes.forward].min(), measured_sums.start_ns[passes.forward].min()
                ),
                forward_end=_pair(
                    predicted_sums.end_ns[passes.forward].max(), measured_sums.end_ns[passes.forward].max()
                ),
                forward=_device_s(predicted_sums, measured_sums, passes.forward),
                backward=_device_s(predicted_sums, measured_sums, passes.backward),
            )
            for wave, passes in sorted(waves.items())
        ),
        lanes=_lanes(predicted_sums, measured_sums, program),
    )


def _lanes(predicted: _Sums, measured: _Sums, program: Program) -> tuple[Pair, ...]:
    plan = program.plan
    if plan.num_lanes == 1:
        return ()
    numbered = enumerate(program.instructions)
    passes = [number for number, instruction in numbered if isinstance(instruction, Forward | Backward)]
    busy = []
    for lane in map(compute_lane, range(plan.num_lanes)):
        own = [number for number in passes if lane_of(program.instructions[number], plan) == lane]
        total = _device_s(predicted, measured, own)
        busy.append(
            Pair(predicted_s=total.predicted_s / program.num_ranks, measured_s=total.measured_s / program.num_ranks)
        )
    return tuple(busy)


def _name_of(op: MetaOp) -> str:
    return op.task if op.module is None else op.module


def _refuse_another(name: str, timeline: Timeline, program: Program) -> None:
    """Raise a ProgramError unless a timeline has the program's instructions, and every forward and backward once on
    each of its ranks."""
    if timeline.instructions != program.instructions:
        raise ProgramError(
            f"the {name} timeline is of another program: {_first_difference(timeline, program)}; "
            "predicted and measured can be compared only under one program"
        )
    if timeline.num_ranks != program.num_ranks:
        raise ProgramError(
            f"the {name} timeline is of {count_of(timeline.num_ranks, 'rank')}, the program of {program.num_ranks}"
        )
    ranks = np.concatenate([np.repeat(np.arange(program.num_ranks), np.diff(lane.starts)) for lane in program.lanes])
    expected = _computed(program, ranks, np.concatenate([lane.instructions for lane in program.lanes]))
    got = _computed(program, timeline.rank, timeline.instruction)
    if not np.array_equal(got, expected):
        num_got, num_expected = Counter(got.tolist()), Counter(expected.tolist())
        wrong = min(key for key in num_got | num_expected if num_got[key] != num_expected[key])
        rank, number = divmod(wrong, len(program.instructions))
        raise ProgramError(
            f"the {name} timeline is not of one whole step: on rank {rank} it has "
            f"{count_of(num_got[wrong], 'span')} of {code(program.instructions[number])}, "
            f"expected {num_expected[wrong]}"
        )


def _computed(program: Program, ranks: Column, instructions: Column) -> Column:
    """Which rank runs which forward and backward: (rank, instruction) packed into one number, sorted."""
    computes = np.array([isinstance(instruction, Forward | Backward) for instruction in program.instructions])
    chosen = computes[instructions]
    return np.sort(ranks[chosen] * len(program.instructions) + instructions[chosen])


def _first_difference(timeline: Timeline, program: Program) -> str:
    for number, (got, expected) in enumerate(zip(timeline.instructions, program.instructions, strict=False)):
        if got != expected:
            return f"its instruction {number} is {code(got)}, expected {code(expected)}"
    return f"it has {count_of(len(timeline.instructions), 'instruction')}, expected {len(program.instructions)}"


@dataclass(frozen=True, slots=True)
class _Sums:
    """For each instruction, over its ranks: total device time, first start, last end."""

    device_ns: Column
    start_ns: Column
    end_ns: Column


def _sums(timeline: Timeline) -> _Sums:
    count = len(timeline.instructions)
    sums = _Sums(
        np.zeros(count, dtype=np.int64),
        np.full(count, np.iinfo(np.int64).max),
        np.zeros(count, dtype=np.int64),
    )
    np.add.at(sums.device_ns, timeline.instruction, timeline.end - timeline.start)
    np.minimum.at(sums.start_ns, timeline.instruction, timeline.start)
    np.maximum.at(sums.end_ns, timeline.instruction, timeline.end)
    return sums


@dataclass(frozen=True, slots=True)
class _Passes:
    """The instruction numbers of forward and backward passes."""

    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)


def _passes_by(program: Program, key_of: Callable[[int], Key]) -> dict[Key, _Passes]:
    passes: dict[Key, _Passes] = {}
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Forward(slot=slot):
                passes.setdefault(key_of(slot), _Passes()).forward.append(number)
            case Backward(slot=slot):
                passes.setdefault(key_of(slot), _Passes()).backward.append(number)
            case _:
                pass
    return passes


def _pair(predicted_ns: float, measured_ns: float) -> Pair:
    return Pair(predicted_s=float(predicted_ns) / NS, measured_s=float(measured_ns) / NS)


def _device_s(predicted: _Sums, measured: _Sums, instructions: list[int]) -> Pair:
    return _pair(predicted.device_ns[instructions].sum(), measured.device_ns[instructions].sum())


def _totals(predicted: Timeline, measured: Timeline) -> TotalsComparison:
    predicted_totals, measured_totals = _seconds_of(predicted), _seconds_of(measured)
    return TotalsComparison(
        **{
            name: Pair(predicted_s=predicted_totals[name], measured_s=measured_totals[name])
            for name in predicted_totals
        }
    )


def _seconds_of(timeline: Timeline) -> dict[str, float]:
    compute_ns, transfer_ns, sync_ns, idle_ns = device_times(timeline).sum(axis=0).tolist()
    updates = np.array([isinstance(instruction, OptimizerStep) for instruction in timeline.instructions], dtype=bool)
    optimizer_ns = int((timeline.end - timeline.start)[updates[timeline.instruction]].sum())
    device_ns = {
        "step": timeline.makespan_ns * timeline.num_ranks,
        "compute": max(0, compute_ns - optimizer_ns),
        "optimizer": optimizer_ns,
        "transfer": transfer_ns,
        "sync": sync_ns,
        "idle": idle_ns,
    }
    return {name: value / timeline.num_ranks / NS for name, value in device_ns.items()}


def step_tables(comparison: StepComparison) -> list[RenderableType]:
    """A summary, then tables of the totals, the modules and the waves."""
    totals = _totals_table(comparison.totals, comparison.lanes)
    tables = (totals, _module_table(comparison.modules), _wave_table(comparison.waves))
    return [_headline(comparison), *(part for table in tables for part in ("", table))]


def _headline(comparison: StepComparison) -> Table:
    step, error = comparison.totals.step, comparison.module_error
    off = "not predicted" if error is None else f"{percent(error)} off on average, weighted by predicted device time"
    return facts(
        [
            (
                "workload",
                f"{comparison.workload} on {count_of(comparison.num_ranks, 'device')}, planned by {comparison.planner}",
            ),
            (
                "step",
                f"{seconds(step.predicted_s)} predicted, {seconds(step.measured_s)} measured, ratio {_ratio(step)}",
            ),
            ("modules", off),
        ]
    )


def _totals_table(totals: TotalsComparison, lanes: Sequence[Pair]) -> Table:
    unit, per_second = _unit([totals.step])
    table = _table(f"A device's step on average, {unit}")
    table.add_column("")
    for name in ("predicted", "measured", "difference", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)

    def add_row(name: str, pair: Pair, style: str = "") -> None:
        both = (figures(pair.predicted_s * per_second), figures(pair.measured_s * per_second))
        table.add_row(name, *both, _signed(pair.difference_s * per_second), _ratio(pair), style=style)

    add_row("compute", totals.compute)
    add_row("optimizer", totals.optimizer)
    add_row("send, receive", totals.transfer)
    add_row("synchronise", totals.sync)
    add_row("idle", totals.idle)
    table.add_section()
    add_row("step", totals.step, style="bold")
    if lanes:
        table.add_section()
    for number, busy in enumerate(lanes):
        add_row(f"lane {number} busy", busy)
    return table


def _module_table(modules: Sequence[ModuleComparison]) -> Table:
    forward, backward = [module.forward for module in modules], [module.backward for module in modules]
    unit, per_second = _unit([*forward, *backward])
    table = _table(f"Modules, device-{unit} predicted → measured")
    table.add_column("module", no_wrap=True, max_width=_MAX_NAME, overflow="ellipsis")
    for name in ("forward", "ratio", "backward", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    cells = zip(_arrows(forward, per_second), _arrows(backward, per_second), strict=True)
    for module, (forward_cell, backward_cell) in zip(modules, cells, strict=True):
        table.add_row(module.module, forward_cell, _ratio(module.forward), backward_cell, _ratio(module.backward))
    return table


def _wave_table(waves: Sequence[WaveComparison]) -> Table:
    """A table of the waves; its ratio is of the device time of both passes together."""
    shown = _worth_showing(waves)
    columns = (
        [wave.forward_start for wave in shown],
        [wave.forward_end for wave in shown],
        [wave.forward for wave in shown],
        [wave.backward for wave in shown],
    )
    unit, per_second = _unit(pair for column in columns for pair in column)
    table = _table(f"Waves, {unit} predicted → measured, ratio of device time")
    table.add_column("wave", justify="right", no_wrap=True)
    for name in ("forward\nstarts", "forward\nends", f"forward\ndevice-{unit}", f"backward\ndevice-{unit}", "\nratio"):
        table.add_column(name, justify="right", no_wrap=True)
    cells = zip(*(_arrows(column, per_second) for column in columns), strict=True)
    for wave, row in zip(shown, cells, strict=True):
        table.add_row(str(wave.wave), *row, _ratio(wave.both))
    left_out = [wave for wave in waves if wave not in shown]
    if left_out:
        most_s = max(abs(wave.both.difference_s) for wave in left_out)
        table.caption = f"{count_of(len(left_out), 'wave')} left out, at most {seconds(most_s)} of device time off"
    return table


def _worth_showing(waves: Sequence[WaveComparison]) -> list[WaveComparison]:
    """All waves if they are few; else the first ones, and the others with the largest differences."""
    if len(waves) <= _MAX_WAVES:
        return list(waves)
    num_first = _MAX_WAVES // 2
    furthest = sorted(waves[num_first:], key=lambda wave: -abs(wave.both.difference_s))
    return [*waves[:num_first], *sorted(furthest[: _MAX_WAVES - num_first], key=lambda wave: wave.wave)]


def _table(title: str) -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
    )


def _unit(pairs: Iterable[Pair]) -> tuple[str, float]:
    """One unit for a whole table, chosen by its largest number, and the number of units per second."""
    largest_s = max((max(pair.predicted_s, pair.measured_s) for pair in pairs), default=0.0)
    return ("s", 1.0) if largest_s >= 100 else ("ms", 1e3) if largest_s >= 1e-3 else ("µs", 1e6)


def _arrows(column: Sequence[Pair], per_second: float) -> list[str]:
    """Cells such as `12.34 → 13.10`, with arrows aligned; without spaces around them if numbers are long."""
    predicted = [figures(pair.predicted_s * per_second) for pair in column]
    measured = [figures(pair.measured_s * per_second) for pair in column]
    width = max(map(len, (*predicted, *measured)), default=0)
    arrow = " → " if width <= _ROOMY else "→"
    return [f"{before:>{width}}{arrow}{after:>{width}}" for before, after in zip(predicted, measured, strict=True)]


def _ratio(pair: Pair) -> str:
    if pair.ratio is None:
        return "-"
    return figures(pair.ratio) if pair.ratio <= _MAX_RATIO else f">{figures(_MAX_RATIO)}"


def _signed(value: float) -> str:
    size = figures(abs(value))
    sign = "+" if value > 0 else "-"
    return f"{sign}{size}" if size.strip("0.") else size


def step_charts(
    predicted: Timeline, measured: Timeline, program: Program, graph: MetaGraph, num_columns: int
) -> tuple[Chart, Chart]:
    """The charts of both steps on one scale, which ends with the longer step."""
    end_ns = max(1, predicted.makespan_ns, measured.makespan_ns)
    return (
        timeline_chart(predicted, program, graph, num_columns, end_ns),
        timeline_chart(measured, program, graph, num_columns, end_ns),
    )


def draw_steps(charts: tuple[Chart, Chart], num_devices: int, width: int, in_colour: bool = False) -> Text:
    """Predicted above measured, at most `width` wide, with one legend for both."""
    text = Text(no_wrap=True)
    for name, chart in zip(("predicted", "measured"), charts, strict=True):
        text.append(f"{name}\n", style="bold")
        text.append_text(draw_rows(chart, num_devices, in_colour)).append("\n")
    return text.append_text(draw_legend(charts, width))
