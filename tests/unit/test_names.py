"""Variables are named after what they hold: pronouns may only become fewer."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRONOUNS = frozenset(
    {"one", "ones", "other", "others", "found", "told", "kept", "these", "those", "them", "all_of_them"}
)
# Of all names that are bound, by folder; lower them whenever fewer are left.
MOST = {"src": 0.003, "tests": 0.005, "benchmarks": 0.003}


def bound_names(tree: ast.AST) -> list[str]:
    """Names that assignments, loops, comprehensions, patterns and signatures bind."""
    names = []
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.append(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                names.append(name)
            case _:
                pass
    return names


@pytest.mark.parametrize("folder", MOST)
def test_few_variables_are_pronouns(folder):
    paths = (ROOT / folder).rglob("*.py")
    counts = Counter(name for path in paths for name in bound_names(ast.parse(path.read_text("utf-8"))))
    pronouns = {name: count for name, count in counts.items() if name in PRONOUNS}
    share = sum(pronouns.values()) / counts.total()
    assert share <= MOST[folder], f"{share:.2%} of names are pronouns: {pronouns}"
