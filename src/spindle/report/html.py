"""The report's page: one HTML file without references to anything outside of it."""

from __future__ import annotations

import base64
from html import escape
from importlib.resources import files

# In this order: later files use earlier ones.
SCRIPTS = (
    "data.js",
    "sums.js",
    "rows.js",
    "colours.js",
    "paint.js",
    "causes.js",
    "charts.js",
    "panels.js",
    "fleet.js",
    "view.js",
)


def page_html(title: str, data: bytes, *, version: str = "") -> str:
    """The page that shows packed data (`step_page_data`). With a `version`, it asks its server for newer ones."""
    folder = files("spindle.report") / "page"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    own = "\n".join(read(name) for name in SCRIPTS)
    parts = {
        "TITLE": escape(title),
        "STYLE": read("uPlot.min.css") + read("page.css"),
        "LIBRARY": read("uPlot.iife.min.js"),
        "LICENCE": read("uPlot.LICENSE").replace("*/", "* /"),
        "SCRIPT": own + (read("live.js").replace("%VERSION%", version) if version else ""),
        "CONNECT": "; connect-src 'self'" if version else "",
        "DATA": base64.b64encode(data).decode(),
    }
    # One pass over the template: data may contain what looks like a placeholder.
    pieces = read("page.html").split("%%")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))
