"""Writes the differences between the examples and their twins into docs/examples.md and docs/from_transformers.md."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "docs" / "examples.md", ROOT / "docs" / "from_transformers.md")
NAMES = ("multitask_clip", "vlm")
TWINS = {name: (f"examples/plain/{name}.py", f"examples/{name}.py") for name in NAMES}
TWINS["transformers"] = ("examples/transformers/before.py", "examples/transformers/after.py")


def difference(name: str) -> list[str]:
    """The lines of a unified diff, from the twin to the example."""
    twin, example = TWINS[name]
    before, after = ((ROOT / path).read_text(encoding="utf-8").splitlines() for path in (twin, example))
    return list(difflib.unified_diff(before, after, twin, example, n=1, lineterm=""))


def with_differences(page: str) -> str:
    """The page with what stands between `<!-- diff of NAME -->` and `<!-- end of diff -->` made anew."""
    for name in TWINS:
        block = "\n".join([f"<!-- diff of {name} -->", "```diff", *difference(name), "```", "<!-- end of diff -->"])
        pattern = rf"<!-- diff of {name} -->.*?<!-- end of diff -->"
        page = re.sub(pattern, lambda _, block=block: block, page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_differences(page.read_text(encoding="utf-8")), encoding="utf-8")
