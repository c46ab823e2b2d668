"""docs/layout.md and docs/a_task_through_spindle.md name files, functions and classes that exist, where they say."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "spindle"
LAYOUT, TASK = ((ROOT / "docs" / name).read_text("utf-8") for name in ("layout.md", "a_task_through_spindle.md"))
# Names of other libraries, and those of the example on the page.
OTHERS = frozenset(
    {"a800x32", "distributed", "parallel", "compile", "fx", "vision", "text", "make_adamw", "TrainingArguments"}
)


@cache
def defined_names() -> set[str]:
    """Functions, classes, fields, arguments, modules and packages of the source, and its planners and task names."""
    names = {path.stem for path in SOURCE.rglob("*.py")} | {path.name for path in SOURCE.rglob("*") if path.is_dir()}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
                case ast.Constant(value=str(text)) if text.isidentifier():
                    names.add(text)
                case _:
                    pass
    return names


def sections() -> list[tuple[list[str], str]]:
    """The packages in each heading of the layout, and the text below it."""
    _, *parts = re.split(r"^## ", LAYOUT, flags=re.MULTILINE)
    return [(re.findall(r"`(\w+)/`", part.splitlines()[0]), part) for part in parts]


@pytest.mark.parametrize(("packages", "text"), [section for section in sections() if len(section[0]) == 1])
def test_the_layout_lists_each_file_under_its_package(packages, text):
    (package,) = packages
    listed = re.findall(r"`([\w/]+\.py)`", text)
    folders = (SOURCE, SOURCE / package, *(path for path in (SOURCE / package).iterdir() if path.is_dir()))
    assert all(any((folder / name).exists() for folder in folders) for name in listed)
    if package != "cli":  # one verb per file
        files = {path.name for path in (SOURCE / package).glob("[!_]*.py")}
        assert files <= {Path(name).name for name in listed}


@pytest.mark.parametrize("page", [LAYOUT, TASK], ids=["layout", "a task"])
def test_pages_name_what_exists(page):
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    words = re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", prose)
    names = {word.removesuffix(".py").split(".")[-1] for word in words}
    assert names <= defined_names() | OTHERS


def test_the_flows_of_the_layout_name_functions():
    flows = [block for block in re.findall(r"```\n(.*?)```", LAYOUT, flags=re.DOTALL) if " ── " in block]
    names = {name for block in flows for step in re.findall(r"── ([\w, ]+) ─▶", block) for name in step.split(", ")}
    assert len(names) >= 8
    assert names <= defined_names()


def test_the_task_page_links_to_definitions():
    links = re.findall(r'^\[\w+\]: \.\./(\S+) "([\w.]+)"', TASK, flags=re.MULTILINE)
    assert len(links) == 10
    for path, name in links:
        scope: list[ast.stmt] = ast.parse((ROOT / path).read_text("utf-8")).body
        for part in name.split("."):
            definitions = [
                node for node in scope if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
            ]
            assert definitions, (path, name)
            scope = definitions[0].body
