"""Reports of pipelined steps: figures of plans side by side, and tables of the search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from spindle.display import seconds
from spindle.plan import FORWARD, INPUT, WEIGHT, Plan, spans
from spindle.planners import SearchResult
from spindle.profile import Profile
from spindle.report.drawing import IDLE, INK, Box, Drawing, Label, Shape, legend, time_axis
from spindle.report.figure import step_figure
from spindle.report.palette import darker, group_of, ink_on, palette_of

_WIDTH, _LEFT, _RIGHT = 1200, 56, 20
_ROW, _HEADING, _GAP = 26, 30, 18
_MIN_ROW, _MIN_LABELLED, _PANEL = 5, 13, 416  # rows of many devices are lower, and not all have a number
_MAX_IMPROVEMENTS = 16
_MIN_EDGED = 4  # pixels: edges of narrower boxes would hide their colour


def search_tables(title: str, results: Sequence[SearchResult]) -> list[Table]:
    """A table for the search of each replica."""
    names = [title] if len(results) == 1 else [f"{title}, replica {number}" for number in range(len(results))]
    return [_search_table(name, result) for name, result in zip(names, results, strict=True)]


def search_json(results: Sequence[SearchResult]) -> list[dict[str, Any]]:
    """The search of each replica as JSON: seconds of the natural order, the bound, and each improvement."""
    return [
        {
            "natural_s": result.natural_ns * 1e-9,
            "bound_s": result.bound_ns * 1e-9,
            "improvements": [[count, makespan * 1e-9] for count, makespan in result.improvements],
        }
        for result in results
    ]


def _search_table(title: str, result: SearchResult) -> Table:
    """The improvements of the best schedule during a search, compared with the natural order and the bound.

    Times are those of the search: passes and hops between ranks, without the optimizer step.
    """
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for name in ("schedules tried", "s", "over natural", "× bound"):
        table.add_column(name, justify="right")
    table.add_column("", no_wrap=True)
    shown = list(result.improvements)
    if len(shown) > _MAX_IMPROVEMENTS:  # the first, the last, and some between
        places = {round(number * (len(shown) - 1) / (_MAX_IMPROVEMENTS - 1)) for number in range(_MAX_IMPROVEMENTS)}
        shown = [shown[place] for place in sorted(places)]
    longest = max(makespan for _, makespan in shown) - result.bound_ns
    for count, makespan in shown:
        bar = "█" * round(30 * (makespan - result.bound_ns) / longest) if longest > 0 else ""
        table.add_row(
            f"{count:,}",
            f"{makespan * 1e-9:.3f}",
            f"{makespan / result.natural_ns - 1:+.1%}".replace("%", " %"),
            f"{makespan / result.bound_ns:.3f}",
            bar,
        )
    table.add_section()
    table.add_row("bound", f"{result.bound_ns * 1e-9:.3f}", "", "1.000", "", style="dim")
    return table


def comparison_figure(plans: Sequence[tuple[Plan, Profile]]) -> Drawing:
    """A figure of finished plans of one step, one below the other, each with the profile that it was made from."""
    titles = {"sequential": "One module at a time", "wavefront": "Spindle: several modules at a time"}
    panels = [(titles.get(plan.planner.split(",")[0], plan.planner), plan, profile) for plan, profile in plans]
    if any(plan.passes for plan, _ in plans):
        return pipeline_figure(panels)
    return step_figure(panels[0][2], [(title, plan) for title, plan, _ in panels])


def pipeline_figure(panels: Sequence[tuple[str, Plan, Profile]]) -> Drawing:
    """A panel for each (title, finished plan, its profile), on one scale. Devices that always work together, such as
    the tensor group of a pipeline rank, share a row.

    Boxes are passes, with the number of their microbatch; backward is darker and hatched, and passes that only compute
    weight gradients have a light edge. Grey is idle.
    """
    end_s = max(plan.folded_s for _, plan, _ in panels)
    scale = (_WIDTH - _LEFT - _RIGHT) / end_s
    body: list[Shape] = []
    top = 10.0
    colours: dict[str, str] = {}
    for title, plan, profile in panels:
        graph = profile.graph
        top += _HEADING
        body.append(Label(x=_LEFT, y=top - 10, text=title, size=15, fill=INK, bold=True))
        facts = f"{seconds(plan.makespan_s)}, {plan.makespan_s / plan.bound_s:.2f} × the bound"
        body.append(Label(x=_WIDTH - _RIGHT, y=top - 10, text=facts, size=13, anchor="end"))
        rows = _rows_of(plan)
        row_height = max(_MIN_ROW, min(_ROW, _PANEL / len(set(rows.values()))))
        palette = palette_of(graph)
        colours |= {group_of(op): colour for op, colour in zip(graph.metaops, palette.colours, strict=True)}
        body += _panel(plan, profile, rows, row_height, top, scale)
        top += row_height * len(set(rows.values())) + _GAP
    body += time_axis(end_s, scale, top - _GAP, _LEFT, _WIDTH - _RIGHT)
    top += 26
    note = "transfers are left out; backward is darker and hatched"
    body.append(Label(x=_WIDTH - _RIGHT, y=top + 9, text=note, size=11, anchor="end"))
    entries = [(name, colour, False) for name, colour in {**colours, "idle": IDLE}.items()]
    shapes, top = legend(entries, _LEFT, _WIDTH - _RIGHT - 320, top)
    title = ", above: ".join(title for title, _, _ in reversed(panels))
    return Drawing(title=title, width=_WIDTH, height=round(top + 4), shapes=(*body, *shapes))


def _rows_of(plan: Plan) -> dict[int, int]:
    """The row of each device. Neighbours share one if all slots have both or neither of them."""
    slots_of: dict[int, list[int]] = {}
    for number, slot in enumerate(plan.slots):
        for device in slot.devices:
            slots_of.setdefault(device, []).append(number)
    rows: dict[int, int] = {}
    row, before = -1, None
    for device, slots in sorted(slots_of.items()):
        row += slots != before
        rows[device], before = row, slots
    return rows


def _panel(
    plan: Plan, profile: Profile, rows: Mapping[int, int], row_height: float, top: float, scale: float
) -> Iterator[Shape]:
    graph = profile.graph
    palette = palette_of(graph)
    num_rows = len(set(rows.values()))
    width = plan.folded_s * scale
    yield Box(x=_LEFT, y=top, width=width, height=row_height * num_rows, fill=IDLE)
    for row in range(0, num_rows, math.ceil(_MIN_LABELLED / row_height)):
        yield Label(x=_LEFT - 8, y=top + (row + 0.5) * row_height + 4, text=f"{row}", size=11, anchor="end")
    for span in spans(plan, profile):
        slot = plan.slots[span.slot]
        colour = palette.colours[graph.positions[slot.op]]
        fill = colour if span.kind == FORWARD else darker(colour, 0.2 if span.kind == WEIGHT else 0.4)
        first, last = rows[slot.devices[0]], rows[slot.devices[-1]]
        x, y = _LEFT + span.start_s * scale, top + first * row_height
        height = (last - first + 1) * row_height
        wide = (span.end_s - span.start_s) * scale
        edge = "#fde68a" if span.kind == WEIGHT else "#ffffff"
        recomputed = f", {slot.recomputed} of {slot.num_layers} layers recomputed" if slot.recomputed else ""
        offloaded = f", {slot.offloaded} offloaded" if slot.offloaded else ""
        kind = {INPUT: "gradients of inputs", WEIGHT: "gradients of weights"}.get(span.kind, span.kind)
        yield Box(
            x=x,
            y=y,
            width=max(wide, 0.2),
            height=height,
            fill=fill,
            edge=edge,
            edge_width=0.8 if wide >= _MIN_EDGED else 0.0,
            hatched=span.kind != FORWARD and wide >= _MIN_EDGED,
            title=f"{slot.op}, {kind}{recomputed}{offloaded}",
        )
        label = f"{slot.microbatch}"
        if wide > 7 * len(label) + 3 and height >= _MIN_LABELLED:
            yield Label(x=x + wide / 2, y=y + height / 2 + 4, text=label, size=10, fill=ink_on(fill), anchor="middle")
