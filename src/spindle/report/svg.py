"""What pictures share: letters, an axis of time, the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape

from spindle.report.gantt import ticks

_FONT = "font-family='ui-sans-serif, Helvetica, Arial, sans-serif'"
IDLE = "#e5e7eb"


def text(x: float, y: float, content: str, *, size: int = 12, fill: str = "#374151", more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{fill}' {more}>{escape(content)}</text>"


def time_axis(end_s: float, scale: float, y: float, left: float, right: float) -> Iterator[str]:
    """Round times below a line from `left` to `right`."""
    marks, unit, factor = ticks(end_s, 8)
    yield f"<path d='M{left:g} {y + 6:.1f}H{right:g}' stroke='#9ca3af' fill='none'/>"
    for tick in marks:
        x = left + tick / factor * scale
        yield f"<path d='M{x:.2f} {y + 6:.1f}v5' stroke='#9ca3af' fill='none'/>"
        yield text(x, y + 23, f"{tick:g} {unit}" if tick == 0 else f"{tick:g}", size=11, more="text-anchor='middle'")


def page(title: str, width: int, height: int, body: Iterable[str]) -> str:
    """A whole picture."""
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
            f"viewBox='0 0 {width} {height}' {_FONT} role='img'>",
            f"<title>{escape(title)}</title>",
            f"<rect width='{width}' height='{height}' rx='8' fill='#ffffff'/>",
            *body,
            "</svg>\n",
        ]
    )
