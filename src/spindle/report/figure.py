"""The picture of a step by its plan: one module at a time above the same step in waves.

Folded time runs to the right on one scale for all panels, devices run down in the same order, a module has the colour
it has everywhere. Grey is idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spindle.display import seconds
from spindle.plan import Plan, Slot, Span, forward_spans
from spindle.profile import Profile
from spindle.report.drawing import IDLE, INK, LETTER_WIDTH, Box, Drawing, Label, Shape, legend, time_axis
from spindle.report.palette import group_of, ink_on, palette_of

_WIDTH, _LEFT, _RIGHT = 960, 64, 24
_PANEL_HEIGHT, _HEADING, _GAP = 210, 30, 22


def step_figure(profile: Profile, panels: Sequence[tuple[str, Plan]]) -> Drawing:
    """A panel for each (title, finished plan); speed is told beside the first."""
    graph = profile.graph
    end_s = max(plan.folded_s for _, plan in panels)
    palette = palette_of(graph)
    colours = {op.name: colour for op, colour in zip(graph.metaops, palette.colours, strict=True)}
    groups = {op.name: group_of(op) for op in graph.metaops}
    tasks = {op.name: op.task if op.module is not None else "" for op in graph.metaops}
    scale = (_WIDTH - _LEFT - _RIGHT) / end_s

    body: list[Shape] = []
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
    note = "forward and backward together, without communication"
    body.append(Label(x=_WIDTH - _RIGHT, y=top + 9, text=note, size=11, anchor="end"))
    entries = {groups[op]: colour for op, colour in colours.items()} | {"idle": IDLE}
    # The note on time stands at the right.
    shapes, top = legend([(name, colour, False) for name, colour in entries.items()], _LEFT, _WIDTH - _RIGHT - 330, top)
    title = " above ".join(title for title, _ in panels)
    return Drawing(title=title, width=_WIDTH, height=round(top + 8), shapes=(*body, *shapes))


def _heading(title: str, plan: Plan, reference: Plan | None, y: float) -> Iterator[Shape]:
    yield Label(x=_LEFT, y=y, text=title, size=15, fill=INK, bold=True)
    facts = f"step {seconds(plan.makespan_s)}, {plan.makespan_s / plan.bound_s:.2f} × the bound"
    if reference is not None:
        facts += f", {reference.makespan_s / plan.makespan_s:.2f} times as fast"
    yield Label(x=_WIDTH - _RIGHT, y=y, text=facts, size=13, anchor="end")


def _panel(
    plan: Plan,
    timed: Sequence[Span],
    top: float,
    height: float,
    scale: float,
    colours: dict[str, str],
    groups: dict[str, str],
    tasks: dict[str, str],
) -> Iterator[Shape]:
    per_device = height / plan.num_devices
    yield Box(x=_LEFT, y=top, width=plan.folded_s * scale, height=height, fill=IDLE)
    for slot, span in zip(plan.slots, timed, strict=True):
        layers = f"layers {slot.first} to {slot.last - 1}" if slot.num_layers > 1 else f"layer {slot.first}"
        title = f"{slot.op}, {layers} on {len(slot.devices)} devices"
        runs = list(_runs_of(slot))
        widest = max(runs, key=lambda run: run[1] - run[0])
        for first, last in runs:
            x, y = _LEFT + span.start_s * scale, top + first * per_device
            width, tall = (span.end_s - span.start_s) * scale, (last - first) * per_device
            fill = colours[slot.op]
            yield Box(
                x=x, y=y, width=max(width, 0.4), height=tall, fill=fill, edge="#ffffff", edge_width=0.8, title=title
            )
            if (first, last) == widest:
                yield from _name_in(groups[slot.op], tasks[slot.op], x, y, width, tall, ink_on(fill))
    for device in sorted({0, plan.num_devices - 1}):
        middle = top + (device + 0.5) * per_device + 4
        yield Label(x=_LEFT - 8, y=middle, text=f"{device}", size=11, anchor="end")
    yield Label(x=_LEFT - 34, y=top + height / 2, text="device", size=11, anchor="middle", upright=True)


def _runs_of(slot: Slot) -> Iterator[tuple[int, int]]:
    """Neighbouring devices of a slot, as ranges `[first, last)`."""
    devices = sorted(slot.devices)
    start = 0
    for end in range(1, len(devices) + 1):
        if end == len(devices) or devices[end] != devices[end - 1] + 1:
            yield devices[start], devices[end - 1] + 1
            start = end


def _name_in(name: str, task: str, x: float, y: float, width: float, height: float, ink: str) -> Iterator[Shape]:
    """The module, and the task below it, where there is room; upright where only that fits."""
    size = 12 if height >= 15 else 10

    def fits(text: str, along: float) -> bool:
        return bool(text) and len(text) * size * LETTER_WIDTH + 6 <= along

    middle_x, middle_y = x + width / 2, y + height / 2
    if fits(name, width) and height >= size + 3:
        both = fits(task, width) and height >= 2 * size + 8
        yield Label(x=middle_x, y=middle_y + (-2 if both else 4), text=name, size=size, fill=ink, anchor="middle")
        if both:
            yield Label(x=middle_x, y=middle_y + 12, text=task, size=size - 2, fill=ink, anchor="middle")
    elif fits(name, height) and width >= size + 3:
        yield Label(x=middle_x + 4, y=middle_y, text=name, size=size, fill=ink, anchor="middle", upright=True)
