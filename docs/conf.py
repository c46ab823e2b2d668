"""Sphinx: `sphinx-build -W docs docs/_build`. The pages of commands and of Python names are made from docstrings."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from spindle import __version__  # noqa: E402
from spindle.cli.main import make_app  # noqa: E402

project = "Spindle"
copyright = "the Spindle authors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Spindle {release}"
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links to sources and results, which are in the repository, not on the site
autodoc_typehints = "none"
smartquotes = False  # options begin with two dashes


def command_reference() -> str:
    """All verbs with their arguments and options, as a page."""
    group = typer.main.get_command(make_app())
    parts = ["# Commands", "What `spindle VERB --help` shows."]
    for name, command in commands_of(group):
        context = typer.Context(command, info_name=f"spindle {name}")
        usage = command.get_usage(context).removeprefix("Usage: ")
        rows = [record for parameter in command.get_params(context) if (record := table_row(parameter, context))]
        parts += [f"## spindle {name}", f"```text\n{usage}\n```", with_examples_as_code(command.help or "")]
        parts += ["\n".join(["| | |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def commands_of(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Verbs with their names, those of groups of verbs behind the group's."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def table_row(parameter: Any, context: typer.Context) -> str | None:
    """An option or argument with its text."""
    record = parameter.get_help_record(context)
    if record is None:
        return None
    name, text = (re.sub(r"\s+", " ", part).replace("|", "\\|").strip() for part in record)
    return f"| `{name}` | {text} |"


def with_examples_as_code(text: str) -> str:
    return re.sub(r"^(spindle .*)$", r"`\1`", text, flags=re.MULTILINE)


def write_command_reference(_app: Any) -> None:
    """Write docs/commands.md, which is not checked in."""
    (ROOT / "docs" / "commands.md").write_text(command_reference(), encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("builder-inited", write_command_reference)
