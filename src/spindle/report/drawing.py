"""Figures as shapes, which become SVG text, or PNG by matplotlib.

Boxes of backward are hatched, so that they differ from forward even in print without colour.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, assert_never
from xml.sax.saxutils import escape, quoteattr

from spindle.errors import InputError
from spindle.report.gantt import ticks

IDLE = "#e5e7eb"
INK, QUIET, AXIS = "#111827", "#374151", "#9ca3af"
LETTER_WIDTH = 0.56  # of the font size, for names
_FONTS = "ui-sans-serif, Helvetica, Arial, sans-serif"
_HATCH = 6.0  # from one line to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle; `title` is what a viewer shows for it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str = ""
    edge_width: float = 0.0
    hatched: bool = False
    radius: float = 0.0
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Text on a base line; with `upright`, rotated around its position."""

    x: float
    y: float
    text: str
    size: int = 12
    fill: str = QUIET
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False
    upright: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    stroke: str = AXIS
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    x: float
    y: float
    radius: float
    fill: str


Shape = Box | Label | Path | Dot


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Shapes on a page; later ones are drawn over earlier ones."""

    title: str
    width: int
    height: int
    shapes: tuple[Shape, ...]


def time_axis(end_s: float, scale: float, y: float, left: float, right: float) -> Iterator[Shape]:
    """An axis from `left` to `right`, with round times below it."""
    marks, unit, factor = ticks(end_s, 8)
    yield Path(points=((left, y + 6), (right, y + 6)))
    for tick in marks:
        x = left + tick / factor * scale
        yield Path(points=((x, y + 6), (x, y + 11)))
        yield Label(x=x, y=y + 23, text=f"{tick:g} {unit}" if tick == 0 else f"{tick:g}", size=11, anchor="middle")


def legend(
    entries: Sequence[tuple[str, str, bool]], left: float, right: float, top: float
) -> tuple[list[Shape], float]:
    """The shapes of a legend (names with their colours, and whether they are hatched), in as many lines as needed; and
    the y coordinate at which it ends."""
    shapes: list[Shape] = []
    x = left
    for name, colour, hatched in entries:
        width = 24 + len(name) * 12 * LETTER_WIDTH + 14
        if x + width > right and x > left:
            x, top = left, top + 20
        shapes.append(Box(x=x, y=top - 2, width=13, height=13, radius=2, fill=colour, hatched=hatched))
        shapes.append(Label(x=x + 19, y=top + 9, text=name))
        x += width
    return shapes, top + 20


def figure_svg(drawing: Drawing) -> str:
    """A drawing as the text of an SVG file."""
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{drawing.width}' height='{drawing.height}' "
        f"viewBox='0 0 {drawing.width} {drawing.height}' font-family='{_FONTS}' role='img'>",
        f"<title>{escape(drawing.title)}</title>",
    ]
    if any(isinstance(shape, Box) and shape.hatched for shape in drawing.shapes):
        lines.append(
            f"<defs><pattern id='hatch' width='{_HATCH:g}' height='{_HATCH:g}' patternUnits='userSpaceOnUse' "
            f"patternTransform='rotate(45)'><path d='M0 0V{_HATCH:g}' stroke='#ffffff' stroke-opacity='0.55' "
            "stroke-width='1.6'/></pattern></defs>"
        )
    lines.append(f"<rect width='{drawing.width}' height='{drawing.height}' rx='8' fill='#ffffff'/>")
    for shape in drawing.shapes:
        lines += _svg_lines(shape)
    return "\n".join([*lines, "</svg>\n"])


def _svg_lines(shape: Shape) -> Iterator[str]:
    match shape:
        case Box():
            place = f"x='{shape.x:.2f}' y='{shape.y:.2f}' width='{shape.width:.2f}' height='{shape.height:.2f}'" + (
                f" rx='{shape.radius:g}'" if shape.radius else ""
            )
            edge = f" stroke='{shape.edge}' stroke-width='{shape.edge_width:g}'" if shape.edge else ""
            if shape.title:
                yield f"<g><title>{escape(shape.title)}</title>"
            yield f"<rect {place} fill={quoteattr(shape.fill)}{edge}/>"
            if shape.hatched:
                yield f"<rect {place} fill='url(#hatch)'/>"
            if shape.title:
                yield "</g>"
        case Label():
            more = "" if shape.anchor == "start" else f" text-anchor='{shape.anchor}'"
            more += " font-weight='600'" if shape.bold else ""
            place = f"x='{shape.x:.1f}' y='{shape.y:.1f}'"
            if shape.upright:
                place = f"x='0' y='0' transform='translate({shape.x:.1f} {shape.y:.1f}) rotate(-90)'"
            yield f"<text {place} font-size='{shape.size}' fill='{shape.fill}'{more}>{escape(shape.text)}</text>"
        case Path():
            places = "L".join(f"{x:.2f} {y:.2f}" for x, y in shape.points)
            dashes = " stroke-dasharray='6 4'" if shape.dashed else ""
            yield f"<path d='M{places}' stroke='{shape.stroke}' stroke-width='{shape.width:g}' fill='none'{dashes}/>"
        case Dot():
            yield f"<circle cx='{shape.x:.2f}' cy='{shape.y:.2f}' r='{shape.radius:g}' fill='{shape.fill}'/>"
        case _:
            assert_never(shape)


def figure_png(drawing: Drawing) -> bytes:
    """A drawing as a PNG file, with two pixels for each unit."""
    if find_spec("matplotlib") is None:
        raise InputError(
            "a PNG needs matplotlib (pip install 'spindle-train[figures]'); a name that ends in .svg does not"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(drawing.width / 72, drawing.height / 72), dpi=2 * 72, facecolor="#ffffff")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.axis("off")
    for order, shape in enumerate(drawing.shapes):
        _add_to_axes(axes, shape, order)
    content = io.BytesIO()
    FigureCanvasAgg(figure).print_png(content, metadata={"Title": drawing.title, "Software": None})
    return content.getvalue()


def _add_to_axes(axes: object, shape: Shape, order: int) -> None:
    from matplotlib.patches import Circle, Rectangle

    add_patch, plot, write = axes.add_patch, axes.plot, axes.text  # type: ignore[attr-defined]
    match shape:
        case Box():
            size = (max(shape.width, 0.3), shape.height)
            edge = shape.edge or "none"
            box = Rectangle((shape.x, shape.y), *size, facecolor=shape.fill, edgecolor=edge, zorder=order)
            box.set_linewidth(shape.edge_width)
            add_patch(box)
            # Lines by hand: the hatches of matplotlib are too fine for rows of a few pixels.
            for start, end in _hatch_lines(shape) if shape.hatched else ():
                xs, ys = zip(start, end, strict=True)
                plot(xs, ys, color="#ffffff", alpha=0.55, linewidth=1.4, zorder=order, solid_capstyle="butt")
        case Label():
            write(
                shape.x,
                shape.y,
                shape.text,
                fontsize=shape.size,
                color=shape.fill,
                ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                va="center" if shape.upright else "baseline",
                rotation=90 if shape.upright else 0,
                fontweight=700 if shape.bold else 400,
                parse_math=False,
                zorder=order,
            )
        case Path():
            xs, ys = zip(*shape.points, strict=True)
            style = (0, (6, 4)) if shape.dashed else "-"
            plot(xs, ys, color=shape.stroke, linewidth=shape.width, linestyle=style, zorder=order)
        case Dot():
            add_patch(Circle((shape.x, shape.y), shape.radius, facecolor=shape.fill, zorder=order))
        case _:
            assert_never(shape)


def _hatch_lines(box: Box) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Diagonals x + y = c, clipped to a box; the same ones in all boxes."""
    step = _HATCH * math.sqrt(2)
    right, bottom = box.x + box.width, box.y + box.height
    number = math.ceil((box.x + box.y) / step)
    while (total := number * step) < right + bottom:
        left_x, right_x = max(box.x, total - bottom), min(right, total - box.y)
        if right_x > left_x:
            yield (left_x, total - left_x), (right_x, total - right_x)
        number += 1
