"""Pipelined steps for people: planners side by side, the schedule as a picture, the search as it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from rich import box
from rich.table import Table

from spindle.graph import MetaGraph
from spindle.plan import FORWARD, INPUT, WEIGHT, Plan
from spindle.planners.pipeline import Found
from spindle.report.compare import ComparedPlan, Comparison, RefusedPlan
from spindle.report.palette import darker, group_of, ink_on, palette_of
from spindle.report.quantities import seconds
from spindle.report.svg import IDLE, page, text, time_axis

_WIDTH, _LEFT, _RIGHT = 1200, 56, 20
_ROW, _HEADING, _GAP = 26, 30, 18
_MAX_IMPROVEMENTS = 16
_LEAST_EDGED = 4  # pixels: edges of narrower boxes would hide their colour


def pipelines_table(comparison: Comparison, reference: str) -> Table:
    """Planners as rows, fastest first."""
    title = f"{comparison.workload} on {comparison.cluster}: one iteration"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("planner", no_wrap=True)
    for name in ("s", f"over\n{reference}", "bubble %", "peak GiB", "MFU %", "× its\nbound"):
        table.add_column(name, justify="right")
    for row in comparison.rows:
        match row:
            case ComparedPlan():
                bubble = row.idle_share + row.transfer_share + row.sync_share
                table.add_row(
                    row.planner,
                    f"{row.makespan_s:.2f}",
                    "-" if row.speedup is None else f"{row.speedup - 1:+.1%}".replace("%", " %"),
                    f"{100 * bubble:.1f}",
                    f"{row.peak_bytes / 2**30:.1f}",
                    "-" if row.mfu is None else f"{100 * row.mfu:.1f}",
                    f"{row.over_bound:.3f}",
                )
            case RefusedPlan():
                table.add_row(row.planner, "none", *["-"] * 5, style="dim")
    return table


def search_table(title: str, found: Found) -> Table:
    """How the best schedule came down, beside the natural order and the bound."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for name in ("schedules tried", "s", "over natural", "× bound"):
        table.add_column(name, justify="right")
    table.add_column("", no_wrap=True)
    shown = list(found.improvements)
    if len(shown) > _MAX_IMPROVEMENTS:  # the first, the last, and some between
        places = {round(one * (len(shown) - 1) / (_MAX_IMPROVEMENTS - 1)) for one in range(_MAX_IMPROVEMENTS)}
        shown = [shown[place] for place in sorted(places)]
    longest = max(makespan for _, makespan in shown) - found.bound_ns
    for count, makespan in shown:
        bar = "█" * round(30 * (makespan - found.bound_ns) / longest) if longest > 0 else ""
        table.add_row(
            f"{count:,}",
            f"{makespan * 1e-9:.3f}",
            f"{makespan / found.natural_ns - 1:+.1%}".replace("%", " %"),
            f"{makespan / found.bound_ns:.3f}",
            bar,
        )
    table.add_section()
    table.add_row("bound", f"{found.bound_ns * 1e-9:.3f}", "", "1.000", "", style="dim")
    return table


def pipeline_figure(panels: Sequence[tuple[str, Plan, MetaGraph]]) -> str:
    """SVG text: a panel for each (title, finished plan, its graph), one row for each pipeline rank, on one scale.

    Boxes are passes, with the number of their microbatch; backward is darker, and what only makes the gradients of
    weights has a light edge. Grey is idle.
    """
    end_s = max(plan.folded_s for _, plan, _ in panels)
    scale = (_WIDTH - _LEFT - _RIGHT) / end_s
    body: list[str] = []
    top = 10.0
    colours: dict[str, str] = {}
    for title, plan, graph in panels:
        top += _HEADING
        body.append(text(_LEFT, top - 10, title, size=15, fill="#111827", more="font-weight='600'"))
        facts = f"{seconds(plan.makespan_s)}, {plan.makespan_s / plan.bound_s:.2f} × its bound"
        body.append(text(_WIDTH - _RIGHT, top - 10, facts, size=13, more="text-anchor='end'"))
        groups = sorted({slot.devices for slot in plan.slots})
        palette = palette_of(graph)
        colours |= {group_of(op): colour for op, colour in zip(graph.metaops, palette.colours, strict=True)}
        body += _panel(plan, graph, groups, top, scale)
        top += _ROW * len(groups) + _GAP
    body += time_axis(end_s, scale, top - _GAP, _LEFT, _WIDTH - _RIGHT)
    top += 26
    x = float(_LEFT)
    for name, colour in {**colours, "idle": IDLE}.items():
        body.append(f"<rect x='{x:.1f}' y='{top - 2:.1f}' width='13' height='13' rx='2' fill='{colour}'/>")
        body.append(text(x + 19, top + 9, name, size=12))
        x += 40 + 7 * len(name)
    body.append(
        text(_WIDTH - _RIGHT, top + 9, "without transfers; backward is darker", size=11, more="text-anchor='end'")
    )
    return page(" above ".join(title for title, _, _ in panels), _WIDTH, round(top + 24), body)


def _panel(plan: Plan, graph: MetaGraph, groups: list[tuple[int, ...]], top: float, scale: float) -> Iterator[str]:
    palette = palette_of(graph)
    position = {op.name: number for number, op in enumerate(graph.metaops)}
    number_of = {task: number for number, task in enumerate(graph.tasks)}
    row_of = {devices: row for row, devices in enumerate(groups)}
    width = plan.folded_s * scale
    yield f"<rect x='{_LEFT}' y='{top}' width='{width:.2f}' height='{_ROW * len(groups)}' fill='{IDLE}'/>"
    for row, _ in enumerate(groups):
        yield text(_LEFT - 8, top + (row + 0.5) * _ROW + 4, f"{row}", size=11, more="text-anchor='end'")
    for pass_ in plan.passes:
        slot = plan.slots[pass_.slot]
        op = graph.metaops[position[slot.op]]
        colour = palette.colours[position[slot.op]]
        fill = colour if pass_.kind == FORWARD else darker(colour, 0.2 if pass_.kind == WEIGHT else 0.4)
        x, y = _LEFT + pass_.start_s * scale, top + row_of[slot.devices] * _ROW
        wide = (pass_.end_s - pass_.start_s) * scale
        edge = "#fde68a" if pass_.kind == WEIGHT else "#ffffff"
        again = f", {slot.recomputed} of {slot.num_layers} layers recomputed" if slot.recomputed else ""
        away = f", {slot.offloaded} offloaded" if slot.offloaded else ""
        kind = {INPUT: "gradients of inputs", WEIGHT: "gradients of weights"}.get(pass_.kind, pass_.kind)
        yield (
            f"<rect x='{x:.2f}' y='{y:.2f}' width='{max(wide, 0.2):.2f}' height='{_ROW}' fill='{fill}' "
            f"stroke='{edge}' stroke-width='{0.8 if wide >= _LEAST_EDGED else 0}'>"
            f"<title>{escape(f'{slot.op}, {kind}{again}{away}')}</title></rect>"
        )
        label = f"{number_of[op.task]}"
        if wide > 7 * len(label) + 3:
            yield text(x + wide / 2, y + _ROW / 2 + 4, label, size=10, fill=ink_on(fill), more="text-anchor='middle'")
