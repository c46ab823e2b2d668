"""Seconds, bytes and shares as people read them (four figures at most, and the unit beside them), and tables of a few
facts."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType
from rich.table import Table

_YEAR_S = 365.25 * 86400.0


def seconds(time_s: float) -> str:
    """`412.3 ms`; the unit follows the size."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if time_s * factor >= (100 if unit == "s" else 1):
            return f"{figures(time_s * factor)} {unit}"
    return "0 ms" if time_s == 0 else f"{time_s * 1e6:.3g} µs"


def duration(time_s: float) -> str:
    """`45 s`, `12 minutes`, `5 hours`, `3 days`, `6.9 years`: the unit follows the size."""
    if time_s >= 2 * _YEAR_S:
        return f"{time_s / _YEAR_S:.1f} years"
    for unit, unit_s in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if time_s >= 2 * unit_s:
            return f"{time_s / unit_s:.0f} {unit}"
    return f"{time_s:.0f} s"


def milliseconds(time_s: float) -> str:
    """The bare number of milliseconds, for columns that say so in their head."""
    return figures(time_s * 1e3)


def figures(value: float) -> str:
    """About four figures, never an exponent."""
    size = abs(value)
    decimals = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3
    return f"{value:,.{decimals}f}"


def num_bytes(count: float) -> str:
    """`61.2 GiB`; the unit follows the size."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.1f} {unit}"
    return f"{count:.0f} B"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def count_of(number: int, singular: str, plural: str | None = None) -> str:
    """`1 device`, `2 devices`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def large(number: float) -> str:
    """`1.19B`: counts of parameters."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.0f}"


def listed(names: list[str] | tuple[str, ...], at_most: int = 6) -> str:
    """`a, b and c`; what is beyond the limit is counted."""
    shown = list(names[:at_most])
    if len(names) > at_most:
        shown = [*names[: at_most - 1], f"{len(names) - at_most + 1} more"]
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def facts(rows: list[tuple[str, str]]) -> Table:
    """A table of names and values, without borders."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def html_of(*parts: RenderableType) -> str:
    """Text and tables as HTML, for notebooks."""
    console = Console(record=True, file=io.StringIO(), width=100, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
