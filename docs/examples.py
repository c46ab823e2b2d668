"""Writes the differences between examples and their twins, and whole examples, into the pages that show them."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "examples.md",
    ROOT / "docs" / "from_transformers.md",
    ROOT / "docs" / "tutorial.md",
)
NAMES = ("two_tower", "multitask_clip", "vlm")
TWINS = {name: (f"examples/plain/{name}.py", f"examples/{name}.py") for name in NAMES}
TWINS["transformers"] = ("examples/transformers/before.py", "examples/transformers/after.py")


def difference(name: str) -> list[str]:
    """The lines of a unified diff, from the twin to the example."""
    twin, example = TWINS[name]
    before, after = ((ROOT / path).read_text(encoding="utf-8").splitlines() for path in (twin, example))
    return list(difflib.unified_diff(before, after, twin, example, n=1, lineterm=""))


def with_examples(page: str) -> str:
    """The page with what stands between `<!-- diff of NAME -->` and `<!-- end of diff -->`, and between
    `<!-- file of PATH -->` and `<!-- end of file -->`, made anew."""
    for name in TWINS:
        block = "\n".join([f"<!-- diff of {name} -->", "```diff", *difference(name), "```", "<!-- end of diff -->"])
        pattern = rf"<!-- diff of {name} -->.*?<!-- end of diff -->"
        page = re.sub(pattern, lambda _, block=block: block, page, flags=re.DOTALL)
    return re.sub(
        r"<!-- file of (\S+) -->.*?<!-- end of file -->",
        lambda match: f"<!-- file of {match[1]} -->\n{_whole_file(match[1])}\n<!-- end of file -->",
        page,
        flags=re.DOTALL,
    )


def _whole_file(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    return f"```{{code-block}} python\n{text}\n```"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_examples(page.read_text(encoding="utf-8")), encoding="utf-8")
