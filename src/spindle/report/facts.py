"""Names and values one under the other, for whoever has only a few; knows nothing of plans."""

from __future__ import annotations

from rich.table import Table


def facts(rows: list[tuple[str, str]]) -> Table:
    """Names and values, without lines."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table
