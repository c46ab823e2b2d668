"""Writes the differences between the examples and their plain-PyTorch twins into docs/examples.md."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "examples.md"
NAMES = ("multitask_clip", "vlm")


def difference(name: str) -> list[str]:
    """The lines of a unified diff, from the twin to the example."""
    twin, example = f"examples/plain/{name}.py", f"examples/{name}.py"
    before, after = ((ROOT / path).read_text(encoding="utf-8").splitlines() for path in (twin, example))
    return list(difflib.unified_diff(before, after, twin, example, n=1, lineterm=""))


def with_differences(page: str) -> str:
    """The page with what stands between `<!-- diff of NAME -->` and `<!-- end of diff -->` made anew."""
    for name in NAMES:
        block = "\n".join([f"<!-- diff of {name} -->", "```diff", *difference(name), "```", "<!-- end of diff -->"])
        pattern = rf"<!-- diff of {name} -->.*?<!-- end of diff -->"
        page = re.sub(pattern, lambda _, block=block: block, page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    PAGE.write_text(with_differences(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
