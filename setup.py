"""Makes the README's links absolute: package indexes show it outside of the repository. The rest: pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]


def with_absolute_links(readme: str) -> str:
    """Links to files lead into the repository; links inside the page stay as they are."""
    linked = re.sub(r"(?<=\]\()(?!https?://|#)", f"{REPOSITORY}/blob/HEAD/", readme)
    return re.sub(rf"(!\[[^]]*\]\({re.escape(REPOSITORY)})/blob/", r"\1/raw/", linked)


setup(
    long_description=with_absolute_links((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
