"""What a package index shows, and what an install takes."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from unittest import mock

import spindle

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_readme_of_a_package_index_has_absolute_links_to_files_that_exist():
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    shown = re.findall(r"(!?)\[[^]]*\]\(([^)#]+)\)", setup.call_args.kwargs["long_description"])
    assert len(shown) > 20
    for image, link in shown:
        folder, _, path = link.removeprefix(PROJECT["urls"]["Repository"]).partition("/HEAD/")
        assert folder == ("/raw" if image else "/blob"), link
        assert (ROOT / path).is_file(), link


def test_no_upper_limit_downgrades_the_torch_or_the_python_that_users_have():
    assert PROJECT["requires-python"] == ">=3.11"
    assert PROJECT["optional-dependencies"]["train"] == ["torch>=2.11"]


def test_the_version_is_stated_once():
    stated = [
        path.name
        for path in (ROOT / "pyproject.toml", ROOT / "setup.py", ROOT / "CITATION.cff", *ROOT.glob("src/**/*.py"))
        if re.search(rf"(?<![\d.]){re.escape(spindle.__version__)}(?![\d.])", path.read_text(encoding="utf-8"))
    ]
    assert stated == ["__init__.py"]
    assert f"## {spindle.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
