"""A step in the terminal: devices down, time across.

A cell shows what its device does at the middle of the cell's time. Devices whose rows look the same become one row, so
that hundreds fit. If slots share a device at the same time, each of its lanes has a row (`0|1`). Letters alone carry
all information: forward in capitals, backward in small letters. With colour, a block has its letter only at its start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from spindle.display import count_of
from spindle.graph import MetaGraph
from spindle.plan import FOLDED, FORWARD, Plan, format_devices, spans
from spindle.profile import Profile
from spindle.program import Backward, Exchange, Forward, GatherParameters, OptimizerStep, Program, SyncGradients
from spindle.report.palette import Palette, darker, ink_on, palette_of
from spindle.timeline import Timeline

IDLE = "·"
_MAX_ROWS = 40
_MAX_LABEL = 15
_OVER = -2  # a cell after the end of its step


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that a cell can show: a letter with its colour and meaning."""

    letter: str
    meaning: str
    colour: str | None = None

    @property
    def style(self) -> str:
        return f"{ink_on(self.colour)} on {self.colour}" if self.colour else "dim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Rows of cells: positions in `marks`, -1 for idle, -2 after the step. Each row has the devices that it shows, and
    their lane. The columns end at `end_s`."""

    marks: tuple[Mark, ...]
    rows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    lanes: tuple[int, ...]
    end_s: float
    hint: str


def plan_chart(plan: Plan, profile: Profile, num_columns: int) -> Chart:
    """The chart of a plan by curves alone: its passes, or, if backward mirrors forward, its slots in folded time."""
    graph, timed = profile.graph, spans(plan, profile)
    marks, num_ops = _op_marks(palette_of(graph)), len(graph.metaops)
    is_folded = all(span.kind == FOLDED for span in timed)
    scale = num_columns / plan.folded_s
    num_lanes = plan.num_lanes
    lanes = [
        num_lanes * np.asarray(plan.slots[span.slot].devices, dtype=np.int64) + plan.slots[span.slot].lane
        for span in timed
    ]
    counts = [len(on) for on in lanes]
    codes = [
        graph.positions[plan.slots[span.slot].op] + (0 if span.kind in (FORWARD, FOLDED) else num_ops) for span in timed
    ]
    cells = _paint(
        plan.num_devices * num_lanes,
        num_columns,
        np.concatenate(lanes),
        np.repeat([span.start_s * scale for span in timed], counts),
        np.repeat([span.end_s * scale for span in timed], counts),
        np.repeat(codes, counts),
        num_ops if is_folded else 0,  # one of many passes that is too short for a cell need not show
    )
    rows, lanes_of_rows = _grouped(cells, num_lanes)
    return Chart(
        marks=marks if is_folded else (*marks, *_backward_marks(marks)),
        rows=rows,
        lanes=lanes_of_rows,
        end_s=plan.folded_s,
        hint="forward and backward together" if is_folded else "capitals forward, small letters backward",
    )


def timeline_chart(
    timeline: Timeline, program: Program, graph: MetaGraph, num_columns: int, end_ns: int | None = None
) -> Chart:
    """The chart of a simulated or measured step. Transfers and synchronisation show where a device does not compute.

    The columns end with the step, or at `end_ns`, so that steps of different lengths can share a scale.
    """
    end_ns = timeline.makespan_ns if end_ns is None else end_ns
    palette = palette_of(graph)
    num_ops = len(graph.metaops)
    forward = _op_marks(palette)
    backward = _backward_marks(forward)
    communication = (
        Mark(letter=">", meaning="send or receive"),
        Mark(letter="=", meaning="synchronise gradients"),
        Mark(letter="^", meaning="optimizer"),
        Mark(letter="+", meaning="gather parameters"),
    )
    code = np.zeros(len(timeline.instructions), dtype=np.int64)
    lane = np.zeros(len(timeline.instructions), dtype=np.int64)
    for number, instruction in enumerate(timeline.instructions):
        match instruction:
            case Forward(slot=slot):
                code[number] = program.slots[slot].op
                lane[number] = program.plan.slots[slot].lane
            case Backward(slot=slot):
                code[number] = num_ops + program.slots[slot].op
                planned = program.plan.slots[slot]
                lane[number] = planned.lane if instruction.makes_inputs else planned.lane_of_weights
            case Exchange():
                code[number] = 2 * num_ops
            case SyncGradients():
                code[number] = 2 * num_ops + 1
            case OptimizerStep():
                code[number] = 2 * num_ops + 2
            case GatherParameters():
                code[number] = 2 * num_ops + 3
    scale = num_columns / max(1, end_ns)
    num_lanes = program.plan.num_lanes
    # Compute is painted last, over communication that it hides.
    order = np.argsort(-timeline.lane, kind="stable")
    cells = _paint(
        timeline.num_ranks * num_lanes,
        num_columns,
        num_lanes * timeline.rank[order] + lane[timeline.instruction[order]],
        timeline.start[order] * scale,
        timeline.end[order] * scale,
        code[timeline.instruction[order]],
        num_ops,
    )
    after = cells[:, math.ceil(timeline.makespan_ns * scale - 0.5) :]
    after[after < 0] = _OVER
    rows, lanes_of_rows = _grouped(cells, num_lanes)
    return Chart(
        marks=(*forward, *backward, *communication),
        rows=rows,
        lanes=lanes_of_rows,
        end_s=end_ns * 1e-9,
        hint="capitals forward, small letters backward",
    )


def _backward_marks(forward: Iterable[Mark]) -> tuple[Mark, ...]:
    return tuple(
        Mark(letter=mark.letter.lower(), meaning=f"{mark.meaning} backward", colour=darker(mark.colour or "#000000"))
        for mark in forward
    )


def _op_marks(palette: Palette) -> tuple[Mark, ...]:
    return tuple(
        Mark(letter=letter, meaning=label, colour=colour)
        for letter, label, colour in zip(palette.letters, palette.labels, palette.colours, strict=True)
    )


def _paint(
    num_rows: int,
    num_columns: int,
    of_row: NDArray[np.int64],
    start: NDArray[np.floating],
    end: NDArray[np.floating],
    mark: NDArray[np.int64],
    num_ops: int,
) -> NDArray[np.int64]:
    """The cells by row (a lane of a device) and column that spans fill; later spans overwrite earlier ones."""
    cells = np.full((num_rows, num_columns), -1, dtype=np.int64)
    # Span [start, end) holds the middles c + 1/2 of columns first to last - 1.
    first = np.ceil(start - 0.5).astype(np.int64).clip(0, num_columns)
    last = np.ceil(end - 0.5).astype(np.int64).clip(0, num_columns)
    length = last - first
    span = np.repeat(np.arange(len(of_row)), length)
    column = np.arange(len(span)) - np.repeat(np.cumsum(length) - length, length) + first[span]
    cells[of_row[span], column] = mark[span]
    # An op too short for any middle still shows once.
    for op in np.setdiff1d(mark[mark < num_ops], cells):
        longest = int(np.argmax(np.where(mark == op, end - start, -1.0)))
        column_of_it = min(num_columns - 1, int((start[longest] + end[longest]) / 2))
        cells[of_row[(mark == op) & (start == start[longest])], column_of_it] = op
    return cells


def _grouped(
    cells: NDArray[np.int64], num_lanes: int
) -> tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], tuple[int, ...]]:
    """Rows with their devices, and the lane of each row. Lanes other than the first are shown only if they run
    something."""
    groups: dict[tuple[int, bytes], list[int]] = {}
    for number, row in enumerate(cells):
        device, lane = divmod(number, num_lanes)
        if lane == 0 or (row >= 0).any():
            groups.setdefault((lane, row.tobytes()), []).append(device)
    rows = tuple(
        (tuple(devices), tuple(cells[devices[0] * num_lanes + lane].tolist())) for (lane, _), devices in groups.items()
    )
    return rows, tuple(lane for lane, _ in groups)


def columns_for(width: int, num_devices: int) -> int:
    """The number of columns that fit into `width` characters next to the labels of `num_devices` devices."""
    return max(10, width - _label_width(num_devices) - 2)


def _label_width(num_devices: int) -> int:
    return min(_MAX_LABEL, max(7, 3 * len(str(num_devices - 1)) + 2))


def draw(chart: Chart, num_devices: int, width: int, in_colour: bool = False) -> Text:
    """The chart as text, with its axis and its legend, at most `width` characters wide."""
    return draw_rows(chart, num_devices, in_colour).append_text(draw_legend((chart,), width))


def draw_rows(chart: Chart, num_devices: int, in_colour: bool = False) -> Text:
    """The chart with its axis but without a legend, for charts that share one."""
    label_width = _label_width(num_devices)
    text = Text(no_wrap=True)
    text.append(f"{'devices':>{label_width}} ", style="bold")
    text.append(f"one column is {_short(chart.end_s / max(1, len(chart.rows[0][1])))}; {chart.hint}\n", style="dim")
    for (devices, row), lane in zip(chart.rows[:_MAX_ROWS], chart.lanes, strict=False):
        label = _label(devices, label_width - 2) + f"|{lane}" if lane else _label(devices, label_width)
        text.append(f"{label:>{label_width}} ")
        for mark, cells in _runs(row):
            if mark == _OVER:
                text.append(" " * cells)
            elif mark < 0:
                text.append(IDLE * cells, style="dim")
            else:
                shown = chart.marks[mark]
                filling = " " if in_colour and shown.colour else shown.letter
                text.append(shown.letter + filling * (cells - 1), style=shown.style)
        text.append("\n")
    if len(chart.rows) > _MAX_ROWS:
        hidden = chart.rows[_MAX_ROWS:]
        num_hidden = sum(len(devices) for devices, _ in hidden)
        text.append(f"{'':>{label_width}} … and {count_of(num_hidden, 'device')} in {len(hidden)} more rows\n")
    num_columns = len(chart.rows[0][1])
    text.append(f"{'':>{label_width}} {_axis(chart.end_s, num_columns)}\n", style="dim")
    return text


def _label(devices: tuple[int, ...], width: int) -> str:
    label = format_devices(devices)
    if len(label) <= width:
        return label
    for cut in range(len(devices) - 1, 0, -1):
        label = f"{format_devices(devices[:cut])},+{len(devices) - cut}"
        if len(label) <= width:
            return label
    return f"{count_of(len(devices), 'device')}"[:width]


def _runs(row: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    start = 0
    for end in range(1, len(row) + 1):
        if end == len(row) or row[end] != row[start]:
            yield row[start], end - start
            start = end


def ticks(end_s: float, at_most: int) -> tuple[list[float], str, float]:
    """Round times from 0 to the end, their unit, and the number of units per second."""
    unit, factor = ("s", 1.0) if end_s >= 10 else ("ms", 1e3) if end_s >= 1e-3 else ("µs", 1e6)
    least = end_s * factor / max(1, at_most)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor_of_ten for factor_of_ten in (1, 2, 5, 10) if power * factor_of_ten >= least * (1 - 1e-9))
    return [step * number for number in range(int(end_s * factor / step + 1e-9) + 1)], unit, factor


def _axis(end_s: float, num_columns: int) -> str:
    marks, unit, factor = ticks(end_s, max(2, num_columns // 12))
    line = [" "] * (num_columns + 1)
    for number, tick in enumerate(marks):
        name = f"{tick:g}" + (f" {unit}" if number == 0 else "")
        place = round(tick / factor / end_s * num_columns)
        if place + 1 + len(name) <= len(line) and all(letter == " " for letter in line[max(0, place - 1) : place]):
            line[place : place + 1 + len(name)] = f"╵{name}"
    return "".join(line).rstrip()


def _short(time_s: float) -> str:
    unit, factor = ("s", 1.0) if time_s >= 1 else ("ms", 1e3) if time_s >= 1e-3 else ("µs", 1e6)
    return f"{time_s * factor:.3g} {unit}"


def draw_legend(charts: Sequence[Chart], width: int) -> Text:
    """The legend of charts with the same marks: ops in columns, without their backward; other marks only if they
    appear."""
    shown = {mark for chart in charts for _, row in chart.rows for mark in row}
    entries = [
        mark
        for number, mark in enumerate(charts[0].marks)
        if (mark.colour is None and number in shown) or (mark.colour is not None and mark.letter.isupper())
    ]
    entries = list(dict.fromkeys(entries))
    if -1 in shown:
        entries.append(Mark(letter=IDLE, meaning="idle"))
    cell_width = min(width, 4 + max(len(mark.meaning) for mark in entries))
    per_line = max(1, width // cell_width)
    num_lines = -(-len(entries) // per_line)
    text = Text(no_wrap=True)
    for line in range(num_lines):
        for mark in entries[line::num_lines]:
            name = mark.meaning if len(mark.meaning) <= cell_width - 4 else mark.meaning[: cell_width - 5] + "…"
            text.append(mark.letter, style=mark.style)
            text.append(f" {name:<{cell_width - 2}}")
        text.rstrip()
        text.append("\n")
    text.rstrip()
    return text
