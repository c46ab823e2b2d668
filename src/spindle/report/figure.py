"""The picture of a step: one module at a time above the same step in waves, as SVG text.

Folded time runs to the right on one scale for all panels, devices run down in the same order, a module has the colour
it has everywhere. Grey is idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape, quoteattr

from spindle.display import seconds
from spindle.plan import Plan, Slot, Span, forward_spans
from spindle.profile import Profile
from spindle.report.palette import group_of, ink_on, palette_of
from spindle.report.svg import IDLE, page, text, time_axis

_WIDTH, _LEFT, _RIGHT = 960, 64, 24
_PANEL_HEIGHT, _HEADING, _GAP = 210, 30, 22
_LETTER_WIDTH = 0.56  # of the font size, for names


def step_figure(profile: Profile, panels: Sequence[tuple[str, Plan]]) -> str:
    """SVG text with a panel for each (title, finished plan); speed is told beside the first."""
    graph = profile.graph
    end_s = max(plan.folded_s for _, plan in panels)
    palette = palette_of(graph)
    colours = {op.name: colour for op, colour in zip(graph.metaops, palette.colours, strict=True)}
    groups = {op.name: group_of(op) for op in graph.metaops}
    tasks = {op.name: op.task if op.module is not None else "" for op in graph.metaops}
    scale = (_WIDTH - _LEFT - _RIGHT) / end_s

    body: list[str] = []
    top = 10.0
    for number, (title, plan) in enumerate(panels):
        top += _HEADING
        body += _heading(title, plan, panels[0][1] if number else None, top - 10)
        # Whole pixels for each device where there are enough of them.
        height = max(_PANEL_HEIGHT // plan.num_devices * plan.num_devices, _PANEL_HEIGHT // 2)
        body += _panel(plan, forward_spans(plan, profile), top, height, scale, colours, groups, tasks)
        top += height + _GAP
    body += time_axis(end_s, scale, top - _GAP, _LEFT, _WIDTH - _RIGHT)
    top += 26
    body.append(
        text(
            _WIDTH - _RIGHT,
            top + 9,
            "forward and backward together, without communication",
            size=11,
            more="text-anchor='end'",
        )
    )
    legend, top = _legend({groups[op]: colour for op, colour in colours.items()}, top)
    return page(" above ".join(title for title, _ in panels), _WIDTH, round(top + 8), [*body, *legend])


def _heading(title: str, plan: Plan, reference: Plan | None, y: float) -> Iterator[str]:
    yield text(_LEFT, y, title, size=15, fill="#111827", more="font-weight='600'")
    facts = f"step {seconds(plan.makespan_s)}, {plan.makespan_s / plan.bound_s:.2f} × the bound"
    if reference is not None:
        facts += f", {reference.makespan_s / plan.makespan_s:.2f} times as fast"
    yield text(_WIDTH - _RIGHT, y, facts, size=13, more="text-anchor='end'")


def _panel(
    plan: Plan,
    timed: Sequence[Span],
    top: float,
    height: float,
    scale: float,
    colours: dict[str, str],
    groups: dict[str, str],
    tasks: dict[str, str],
) -> Iterator[str]:
    per_device = height / plan.num_devices
    yield f"<rect x='{_LEFT}' y='{top}' width='{plan.folded_s * scale:.2f}' height='{height}' fill='{IDLE}'/>"
    for slot, span in zip(plan.slots, timed, strict=True):
        yield "<g>"
        layers = f"layers {slot.first} to {slot.last - 1}" if slot.num_layers > 1 else f"layer {slot.first}"
        yield f"<title>{escape(f'{slot.op}, {layers} on {len(slot.devices)} devices')}</title>"
        runs = list(_runs_of(slot))
        widest = max(runs, key=lambda run: run[1] - run[0])
        for first, last in runs:
            x, y = _LEFT + span.start_s * scale, top + first * per_device
            width, tall = (span.end_s - span.start_s) * scale, (last - first) * per_device
            yield (
                f"<rect x='{x:.2f}' y='{y:.2f}' width='{max(width, 0.4):.2f}' height='{tall:.2f}' "
                f"fill={quoteattr(colours[slot.op])} stroke='#ffffff' stroke-width='0.8'/>"
            )
            if (first, last) == widest:
                yield from _name_in(groups[slot.op], tasks[slot.op], x, y, width, tall, ink_on(colours[slot.op]))
        yield "</g>"
    for device in sorted({0, plan.num_devices - 1}):
        middle = top + (device + 0.5) * per_device + 4
        yield text(_LEFT - 8, middle, f"{device}", size=11, more="text-anchor='end'")
    place = f"{_LEFT - 34:.0f} {top + height / 2:.0f}"
    yield text(0, 0, "device", size=11, more=f"text-anchor='middle' transform='translate({place}) rotate(-90)'")


def _runs_of(slot: Slot) -> Iterator[tuple[int, int]]:
    """Neighbouring devices of a slot, as ranges `[first, last)`."""
    devices = sorted(slot.devices)
    start = 0
    for end in range(1, len(devices) + 1):
        if end == len(devices) or devices[end] != devices[end - 1] + 1:
            yield devices[start], devices[end - 1] + 1
            start = end


def _name_in(name: str, task: str, x: float, y: float, width: float, height: float, ink: str) -> Iterator[str]:
    """The module, and the task below it, where there is room; upright where only that fits."""
    size = 12 if height >= 15 else 10

    def fits(text: str, along: float) -> bool:
        return bool(text) and len(text) * size * _LETTER_WIDTH + 6 <= along

    middle_x, middle_y = x + width / 2, y + height / 2
    centred = "text-anchor='middle'"
    if fits(name, width) and height >= size + 3:
        both = fits(task, width) and height >= 2 * size + 8
        yield text(middle_x, middle_y + (-2 if both else 4), name, size=size, fill=ink, more=centred)
        if both:
            yield text(middle_x, middle_y + 12, task, size=size - 2, fill=ink, more=centred)
    elif fits(name, height) and width >= size + 3:
        turned = f"{centred} transform='translate({middle_x + 4:.1f} {middle_y:.1f}) rotate(-90)'"
        yield text(0, 0, name, size=size, fill=ink, more=turned)


def _legend(colours: dict[str, str], top: float) -> tuple[list[str], float]:
    parts: list[str] = []
    x = float(_LEFT)
    for name, colour in {**colours, "idle": IDLE}.items():
        width = 24 + len(name) * 12 * _LETTER_WIDTH + 14
        if x + width > _WIDTH - _RIGHT - 330 and x > _LEFT:  # the note on time stands at the right
            x, top = float(_LEFT), top + 20
        parts.append(f"<rect x='{x:.1f}' y='{top - 2:.1f}' width='13' height='13' rx='2' fill='{colour}'/>")
        parts.append(text(x + 19, top + 9, name))
        x += width
    return parts, top + 20
