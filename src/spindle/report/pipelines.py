"""Pipelined steps for people: planners side by side, the schedule as a picture, the search as it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
_MAX_IMPROVEMENTS = 16
_LEAST_EDGED = 4  # pixels: edges of narrower boxes would hide their colour


def search_tables(title: str, results: Sequence[SearchResult]) -> list[Table]:
    """A table for the search of each replica."""
    names = [title] if len(results) == 1 else [f"{title}, replica {number}" for number in range(len(results))]
    return [_search_table(name, result) for name, result in zip(names, results, strict=True)]


def search_json(results: Sequence[SearchResult]) -> list[dict[str, Any]]:
    """How the search of each replica went on: seconds of the natural order, the bound, and each improvement."""
    return [
        {
            "natural_s": result.natural_ns * 1e-9,
            "bound_s": result.bound_ns * 1e-9,
            "improvements": [[count, makespan * 1e-9] for count, makespan in result.improvements],
        }
        for result in results
    ]


def _search_table(title: str, result: SearchResult) -> Table:
    """How the best schedule came down, beside the natural order and the bound.

    Times are those of the search: passes and what lies between ranks, without the optimizer's step.
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
    """Finished plans of one step one above another, each with the profile it was made from."""
    titles = {"sequential": "One module at a time", "wavefront": "In waves"}
    panels = [(titles.get(plan.planner, plan.planner), plan, profile) for plan, profile in plans]
    if any(plan.passes for plan, _ in plans):
        return pipeline_figure(panels)
    return step_figure(panels[0][2], [(title, plan) for title, plan, _ in panels])


def pipeline_figure(panels: Sequence[tuple[str, Plan, Profile]]) -> Drawing:
    """A panel for each (title, finished plan, its profile), one row for each pipeline rank, on one scale.

    Boxes are passes, with the number of their microbatch; backward is darker and hatched, and what only makes the
    gradients of weights has a light edge. Grey is idle.
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
        groups = sorted({slot.devices for slot in plan.slots})
        palette = palette_of(graph)
        colours |= {group_of(op): colour for op, colour in zip(graph.metaops, palette.colours, strict=True)}
        body += _panel(plan, profile, groups, top, scale)
        top += _ROW * len(groups) + _GAP
    body += time_axis(end_s, scale, top - _GAP, _LEFT, _WIDTH - _RIGHT)
    top += 26
    note = "without transfers; backward is darker and hatched"
    body.append(Label(x=_WIDTH - _RIGHT, y=top + 9, text=note, size=11, anchor="end"))
    entries = [(name, colour, False) for name, colour in {**colours, "idle": IDLE}.items()]
    shapes, top = legend(entries, _LEFT, _WIDTH - _RIGHT - 320, top)
    title = " above ".join(title for title, _, _ in panels)
    return Drawing(title=title, width=_WIDTH, height=round(top + 4), shapes=(*body, *shapes))


def _panel(plan: Plan, profile: Profile, groups: list[tuple[int, ...]], top: float, scale: float) -> Iterator[Shape]:
    graph = profile.graph
    palette = palette_of(graph)
    position = {op.name: number for number, op in enumerate(graph.metaops)}
    row_of = {devices: row for row, devices in enumerate(groups)}
    width = plan.folded_s * scale
    yield Box(x=_LEFT, y=top, width=width, height=_ROW * len(groups), fill=IDLE)
    for row, _ in enumerate(groups):
        yield Label(x=_LEFT - 8, y=top + (row + 0.5) * _ROW + 4, text=f"{row}", size=11, anchor="end")
    for span in spans(plan, profile):
        slot = plan.slots[span.slot]
        colour = palette.colours[position[slot.op]]
        fill = colour if span.kind == FORWARD else darker(colour, 0.2 if span.kind == WEIGHT else 0.4)
        x, y = _LEFT + span.start_s * scale, top + row_of[slot.devices] * _ROW
        wide = (span.end_s - span.start_s) * scale
        edge = "#fde68a" if span.kind == WEIGHT else "#ffffff"
        again = f", {slot.recomputed} of {slot.num_layers} layers recomputed" if slot.recomputed else ""
        away = f", {slot.offloaded} offloaded" if slot.offloaded else ""
        kind = {INPUT: "gradients of inputs", WEIGHT: "gradients of weights"}.get(span.kind, span.kind)
        yield Box(
            x=x,
            y=y,
            width=max(wide, 0.2),
            height=_ROW,
            fill=fill,
            edge=edge,
            edge_width=0.8 if wide >= _LEAST_EDGED else 0.0,
            hatched=span.kind != FORWARD and wide >= _LEAST_EDGED,
            title=f"{slot.op}, {kind}{again}{away}",
        )
        label = f"{slot.microbatch}"
        if wide > 7 * len(label) + 3:
            yield Label(x=x + wide / 2, y=y + _ROW / 2 + 4, text=label, size=10, fill=ink_on(fill), anchor="middle")
