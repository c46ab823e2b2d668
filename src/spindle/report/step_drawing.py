"""Static figures of what the report's page shows: its first two steps device by device, and the scaling of modules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path as FilePath

import numpy as np

from spindle.artifact import write_atomically, write_bytes_atomically
from spindle.display import seconds
from spindle.errors import InputError
from spindle.plan import format_devices
from spindle.program import Backward, Forward, OptimizerStep, is_compute
from spindle.report.drawing import (
    IDLE,
    INK,
    LETTER_WIDTH,
    Box,
    Dot,
    Drawing,
    Label,
    Path,
    Shape,
    figure_png,
    figure_svg,
    legend,
    time_axis,
)
from spindle.report.page_data import ShownTimeline, StepReport, module_curves, module_names
from spindle.report.palette import COLOURS, darker, group_of, ink_on
from spindle.timeline import Timeline

_WIDTH, _LEFT, _RIGHT = 1200, 92, 20
_ROW, _LANE, _THIN, _GAP = 22, 15, 5, 6
_MAX_ROWS = 24  # of each step
_COMMUNICATION, _OPTIMIZER = "#8d949f", "#b3a7c4"
_PANEL_WIDTH, _PANEL_HEIGHT = 360, 220


def write_figure(path: FilePath, drawing: Drawing) -> None:
    """Write a figure in the format of its file name, .svg or .png."""
    if path.suffix == ".png":
        write_bytes_atomically(path, figure_png(drawing))
    elif path.suffix == ".svg":
        write_atomically(path, figure_svg(drawing))
    else:
        raise InputError(f"{path}: expected the name of a figure, ending in .svg or .png")


def step_drawing(report: StepReport) -> Drawing:
    """The first two steps of a report, one below the other, on one scale. Devices with equal rows are drawn once."""
    shown = report.timelines[:2]
    names = module_names(report)
    end_s = max(entry.timeline.makespan_s for entry in shown) or 1e-9
    scale = (_WIDTH - _LEFT - _RIGHT) / end_s
    body: list[Shape] = []
    top = 14.0
    for entry in shown:
        top += 26
        bound_s = entry.program.plan.bound_s
        facts = f"step {seconds(entry.timeline.makespan_s)}"
        facts += f", {entry.timeline.makespan_s / bound_s:.2f} × the bound" if bound_s else ""
        body.append(Label(x=_LEFT, y=top - 8, text=entry.name, size=15, fill=INK, bold=True))
        body.append(Label(x=_WIDTH - _RIGHT, y=top - 8, text=facts, size=13, anchor="end"))
        first = top
        rows = _folded(entry.timeline)
        for ranks in rows[:_MAX_ROWS]:
            body += _device(entry, ranks, top, scale, names)
            top += _height(entry) + 2 * _THIN + _GAP
        if len(rows) > _MAX_ROWS:
            body.append(Label(x=_LEFT, y=top + 10, text=f"and {len(rows) - _MAX_ROWS} more rows of devices", size=11))
            top += 16
        if bound_s:
            x = _LEFT + bound_s * scale
            body.append(Path(points=((x, first - 4), (x, top - _GAP)), stroke=INK, width=1.2, dashed=True))
    body += time_axis(end_s, scale, top - _GAP, _LEFT, _WIDTH - _RIGHT)
    top += 28
    entries = [(name, colour, False) for name, colour in names.items()]
    entries += [
        ("backward", darker(COLOURS[0]), True),
        ("communication", _COMMUNICATION, False),
        ("optimizer", _OPTIMIZER, False),
        ("idle", IDLE, False),
    ]
    if any(entry.program.plan.bound_s for entry in shown):
        body.append(Label(x=_WIDTH - _RIGHT, y=top + 9, text="dashed: the bound", size=11, anchor="end"))
    shapes, top = legend(entries, _LEFT, _WIDTH - _RIGHT - 110, top)
    return Drawing(title=report.title, width=_WIDTH, height=round(top + 6), shapes=(*body, *shapes))


def _folded(timeline: Timeline) -> list[list[int]]:
    """Groups of devices whose spans have the same instructions at the same times."""
    groups: dict[bytes, list[int]] = {}
    order = np.lexsort((timeline.start, timeline.lane, timeline.rank))
    bounds = np.searchsorted(timeline.rank[order], np.arange(timeline.num_ranks + 1))
    for rank in range(timeline.num_ranks):
        spans = order[bounds[rank] : bounds[rank + 1]]
        columns = (timeline.lane, timeline.instruction, timeline.start, timeline.end)
        key = np.stack([column[spans] for column in columns]).tobytes()
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _height(entry: ShownTimeline) -> float:
    """The height of a device without its communication: its lanes are below each other."""
    num_lanes = entry.program.plan.num_lanes
    return _ROW if num_lanes == 1 else num_lanes * _LANE


def _device(entry: ShownTimeline, ranks: list[int], top: float, scale: float, names: dict[str, str]) -> Iterator[Shape]:
    """The row of a device: compute, and below it transfers and gradient reductions."""
    timeline, program, metaops = entry.timeline, entry.program, entry.profile.graph.metaops
    height = _height(entry)
    yield Label(x=_LEFT - 8, y=top + height / 2 + 4, text=_shortened(format_devices(ranks)), size=11, anchor="end")
    yield Box(x=_LEFT, y=top, width=timeline.makespan_s * scale, height=height, fill=IDLE)
    spans = np.flatnonzero(timeline.rank == ranks[0])
    lanes = sorted({int(lane) for lane in timeline.lane[spans] if is_compute(int(lane))})
    tall = height / max(1, len(lanes))
    for span in spans[np.argsort(timeline.start[spans], kind="stable")].tolist():
        instruction, lane = timeline.instructions[timeline.instruction[span]], int(timeline.lane[span])
        x = _LEFT + timeline.start[span] * 1e-9 * scale
        width = float(timeline.end[span] - timeline.start[span]) * 1e-9 * scale
        if not is_compute(lane):
            y = top + height + (_THIN + 1) * (lane - 1)
            yield Box(x=x, y=y, width=max(width, 0.2), height=_THIN - 1, fill=_COMMUNICATION)
            continue
        y = top + lanes.index(lane) * tall
        if isinstance(instruction, OptimizerStep):
            fill, name, title = _OPTIMIZER, "", "optimizer"
        else:
            assert isinstance(instruction, Forward | Backward)
            op = metaops[program.slots[instruction.slot].op]
            is_backward = isinstance(instruction, Backward)
            name = group_of(op)
            fill = darker(names[name]) if is_backward else names[name]
            title = f"{op.name} {'backward' if is_backward else 'forward'}"
        hatched = isinstance(instruction, Backward) and width >= 3
        edge = "#ffffff" if width >= 3 else ""
        yield Box(
            x=x,
            y=y,
            width=max(width, 0.2),
            height=tall,
            fill=fill,
            edge=edge,
            edge_width=0.6,
            hatched=hatched,
            title=title,
        )
        if name and len(name) * 11 * LETTER_WIDTH + 6 <= width and tall >= 14:
            ink = "#ffffff" if hatched else ink_on(fill)
            yield Label(x=x + 4, y=y + tall / 2 + 4, text=name, size=11, fill=ink, bold=hatched)


def _shortened(text: str) -> str:
    return text if len(text) <= 12 else text[:11] + "…"


def curves_drawing(report: StepReport) -> Drawing:
    """A plot for each module whose layers may run on several numbers of devices: seconds of one layer on n devices.
    Large dots are the numbers that plans chose; the dashed line is ideal scaling."""
    modules = [
        module for module in module_curves(report) if any(len(curve["devices"]) > 1 for curve in module["curves"])
    ]
    if not modules:
        raise InputError(f"{report.title}: every module runs on one number of devices, so there are no curves")
    per_line = min(3, len(modules))
    body: list[Shape] = []
    for number, module in enumerate(modules):
        left, top = 70 + number % per_line * (_PANEL_WIDTH + 40), 20 + number // per_line * (_PANEL_HEIGHT + 60)
        body += _curve_panel(module, left, top)
    width = 70 + per_line * (_PANEL_WIDTH + 40)
    height = 20 + -(-len(modules) // per_line) * (_PANEL_HEIGHT + 60)
    return Drawing(title=f"Scaling of {report.title}", width=width, height=height, shapes=tuple(body))


def _curve_panel(module: dict[str, object], left: float, top: float) -> Iterator[Shape]:
    curves = module["curves"]
    assert isinstance(curves, list)
    counts = sorted({count for curve in curves for count in curve["devices"]})
    most_s = max(time_s for curve in curves for time_s in curve["seconds"]) or 1e-9
    low, high = math.log2(counts[0]), math.log2(max(counts[-1], 2 * counts[0]))

    def place(count: float, time_s: float) -> tuple[float, float]:
        x = left + (math.log2(count) - low) / (high - low) * _PANEL_WIDTH
        return x, top + 20 + (_PANEL_HEIGHT - 20) * (1 - time_s / most_s)

    base = top + _PANEL_HEIGHT
    yield Label(x=left, y=top + 8, text=str(module["module"]), size=14, fill=INK, bold=True)
    yield Path(points=((left, top + 20), (left, base), (left + _PANEL_WIDTH, base)))
    for share in (0.5, 1.0):
        y = place(counts[0], share * most_s)[1]
        yield Path(points=((left - 4, y), (left, y)))
        yield Label(x=left - 7, y=y + 4, text=seconds(share * most_s), size=10, anchor="end")
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = place(2**power, 0)[0]
        yield Path(points=((x, base), (x, base + 5)))
        yield Label(x=x, y=base + 18, text=f"{2**power}", size=10, anchor="middle")
    yield Label(x=left + _PANEL_WIDTH, y=base + 32, text="devices", size=10, anchor="end")
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        times = dict(zip(curve["devices"], curve["seconds"], strict=True))
        first = curve["devices"][0]
        yield Path(
            points=tuple(place(count, times[first] * first / count) for count in counts if count >= first),
            stroke=colour,
            width=0.8,
            dashed=True,
        )
        yield Path(points=tuple(place(count, time_s) for count, time_s in times.items()), stroke=colour, width=1.6)
        for count, time_s in times.items():
            x, y = place(count, time_s)
            radius = 5.0 if count in curve["chosen"] else 2.4
            yield Dot(x=x, y=y, radius=radius, fill=colour)
            if curve["measured"] and count not in curve["measured"]:  # hollow: between measurements
                yield Dot(x=x, y=y, radius=radius - 1.2, fill="#ffffff")
