"""A figure of one step under several plans, one panel below the other.

Time runs to the right on the same scale in all panels, and devices run down in the same order. A module has the same
colour everywhere. Grey is idle. A plan is drawn in folded time; one with lanes, whose slots slow each other down, as
its step is simulated, with a row for each lane of a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spindle.display import seconds
from spindle.plan import Plan, Slot, forward_spans
from spindle.profile import Profile
from spindle.program import Backward, Forward, lower
from spindle.report.drawing import IDLE, INK, LETTER_WIDTH, Box, Drawing, Label, Shape, legend, time_axis
from spindle.report.palette import darker, group_of, ink_on, palette_of
from spindle.simulate import simulate

_WIDTH, _LEFT, _RIGHT = 960, 64, 24
_PANEL_HEIGHT, _HEADING, _GAP = 210, 30, 22
_MIN_NAMED_HEIGHT = 13  # height of a row of a lane that has its name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A slot, or one of its passes, on some rows of a panel."""

    slot: Slot
    start_s: float
    end_s: float
    rows: tuple[tuple[int, int], ...]  # ranges `[first, last)`
    is_backward: bool = False
    pass_name: str = ""


def step_figure(profile: Profile, panels: Sequence[tuple[str, Plan]]) -> Drawing:
    """A panel for each (title, finished plan). Later panels give their speed relative to the first."""
    graph = profile.graph
    end_s = max(_end_s(plan) for _, plan in panels)
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
        # Whole pixels for each row if there are enough of them.
        num_rows = plan.num_devices * plan.num_lanes
        height = max(_PANEL_HEIGHT // num_rows * num_rows, _PANEL_HEIGHT // 2)
        body += _panel(plan, _blocks(plan, profile), top, height, scale, colours, groups, tasks)
        top += height + _GAP
    body += time_axis(end_s, scale, top - _GAP, _LEFT, _WIDTH - _RIGHT)
    top += 26
    note = "forward and backward as one block, communication left out"
    if any(plan.num_lanes > 1 for _, plan in panels):
        note = "backward of lanes is darker and hatched, communication left out"
    body.append(Label(x=_WIDTH - _RIGHT, y=top + 9, text=note, size=11, anchor="end"))
    entries = {groups[op]: colour for op, colour in colours.items()} | {"idle": IDLE}
    # The note on time stands at the right.
    shapes, top = legend([(name, colour, False) for name, colour in entries.items()], _LEFT, _WIDTH - _RIGHT - 330, top)
    title = ", above: ".join(title for title, _ in reversed(panels))
    return Drawing(title=title, width=_WIDTH, height=round(top + 8), shapes=(*body, *shapes))


def _heading(title: str, plan: Plan, reference: Plan | None, y: float) -> Iterator[Shape]:
    yield Label(x=_LEFT, y=y, text=title, size=15, fill=INK, bold=True)
    facts = f"step {seconds(plan.makespan_s)}, {plan.makespan_s / plan.bound_s:.2f} × the bound"
    if reference is not None:
        facts += f", {reference.makespan_s / plan.makespan_s:.2f} times as fast"
    yield Label(x=_WIDTH - _RIGHT, y=y, text=facts, size=13, anchor="end")


def _end_s(plan: Plan) -> float:
    return plan.folded_s if plan.num_lanes == 1 else plan.makespan_s


def _blocks(plan: Plan, profile: Profile) -> list[_Block]:
    if plan.num_lanes == 1:
        return [
            _Block(slot=slot, start_s=span.start_s, end_s=span.end_s, rows=tuple(_runs_of(slot)))
            for slot, span in zip(plan.slots, forward_spans(plan, profile), strict=True)
        ]
    program = lower(plan, profile)
    timeline = simulate(program, profile)
    blocks = []
    for rank, number, start_ns, end_ns in zip(
        *(column.tolist() for column in (timeline.rank, timeline.instruction, timeline.start, timeline.end)),
        strict=True,
    ):
        match program.instructions[number]:
            case Forward(slot=slot_number):
                lane, name, is_backward = plan.slots[slot_number].lane, "forward", False
            case Backward(slot=slot_number, makes_inputs=False):
                lane, name, is_backward = plan.slots[slot_number].lane_of_weights, "gradients of weights", True
            case Backward(slot=slot_number):
                lane, name, is_backward = plan.slots[slot_number].lane, "backward", True
            case _:
                continue
        row = rank * plan.num_lanes + lane
        blocks.append(
            _Block(
                slot=plan.slots[slot_number],
                start_s=1e-9 * start_ns,
                end_s=1e-9 * end_ns,
                rows=((row, row + 1),),
                is_backward=is_backward,
                pass_name=f", {name}",
            )
        )
    return blocks


def _panel(
    plan: Plan,
    blocks: Sequence[_Block],
    top: float,
    height: float,
    scale: float,
    colours: dict[str, str],
    groups: dict[str, str],
    tasks: dict[str, str],
) -> Iterator[Shape]:
    num_rows = plan.num_devices * plan.num_lanes
    per_row = height / num_rows
    yield Box(x=_LEFT, y=top, width=_end_s(plan) * scale, height=height, fill=IDLE)
    for block in blocks:
        slot = block.slot
        layers = f"layers {slot.first} to {slot.last - 1}" if slot.num_layers > 1 else f"layer {slot.first}"
        title = f"{slot.op}, {layers} on {len(slot.devices)} devices{block.pass_name}"
        widest = max(block.rows, key=lambda run: run[1] - run[0])
        for first, last in block.rows:
            x, y = _LEFT + block.start_s * scale, top + first * per_row
            width, tall = (block.end_s - block.start_s) * scale, (last - first) * per_row
            fill = darker(colours[slot.op], 0.4) if block.is_backward else colours[slot.op]
            yield Box(
                x=x,
                y=y,
                width=max(width, 0.4),
                height=tall,
                fill=fill,
                edge="#ffffff",
                edge_width=0.8,
                hatched=block.is_backward,
                title=title,
            )
            if (first, last) == widest:
                yield from _name_in(groups[slot.op], tasks[slot.op], x, y, width, tall, ink_on(fill))
    has_lanes = plan.num_lanes > 1 and per_row >= _MIN_NAMED_HEIGHT
    for row in range(num_rows) if has_lanes else sorted({0, num_rows - plan.num_lanes}):
        device, lane = divmod(row, plan.num_lanes)
        name = f"{device}|{lane}" if has_lanes else f"{device}"
        yield Label(x=_LEFT - 8, y=top + (row + 0.5) * per_row + 4, text=name, size=11, anchor="end")
    what = "device|lane" if has_lanes else "device"
    yield Label(x=_LEFT - 34, y=top + height / 2, text=what, size=11, anchor="middle", upright=True)


def _runs_of(slot: Slot) -> Iterator[tuple[int, int]]:
    """The devices of a slot as ranges `[first, last)` of consecutive devices."""
    devices = sorted(slot.devices)
    start = 0
    for end in range(1, len(devices) + 1):
        if end == len(devices) or devices[end] != devices[end - 1] + 1:
            yield devices[start], devices[end - 1] + 1
            start = end


def _name_in(name: str, task: str, x: float, y: float, width: float, height: float, ink: str) -> Iterator[Shape]:
    """The labels in a slot's box: the module, and the task below it if there is room; rotated if only that fits."""
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
