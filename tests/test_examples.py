"""The examples on Hugging Face models have the losses of their plain-PyTorch twins, which fall."""

from __future__ import annotations

import functools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[1]
SHOWN = runpy.run_path(str(ROOT / "docs" / "examples.py"))
NAMES = SHOWN["NAMES"]
STEPS, TWIN_STEPS = 6, 48  # scenes do not depend on how many steps there are, so the first losses are to be the same
LAUNCH = ("-m", "spindle.cli", "launch", "-n", "2")


@functools.cache
def losses(path: str, steps: int, *how: str) -> list[dict[str, float]]:
    """Losses by step, as a script prints them."""
    done = subprocess.run(
        [sys.executable, *how, path, "--steps", str(steps)],
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # several do nothing for tensors as small as these
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^step +\d+  (.*)$", done.stdout, flags=re.MULTILINE)
    assert len(lines) == steps, done.stdout
    return [{task: float(loss) for task, loss in map(str.split, line.split("  "))} for line in lines]


def twin_losses(name: str) -> list[dict[str, float]]:
    return losses(f"plain/{name}.py", TWIN_STEPS)


@pytest.mark.parametrize("how", [(), LAUNCH], ids=["one process", "two processes"])
@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_the_losses_of_its_twin(name, how):
    for ours, theirs in zip(losses(f"{name}.py", STEPS, *how), twin_losses(name)[:STEPS], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_losses_of_all_tasks_fall(name):
    told = twin_losses(name)
    for task in told[0]:
        early, late = (sum(one[task] for one in some) for some in (told[:8], told[-8:]))
        assert late < 0.9 * early, task


@pytest.mark.parametrize("name", NAMES)
def test_an_example_differs_from_its_twin_by_less_than_thirty_lines(name):
    changed = [line for line in SHOWN["difference"](name) if re.match(r"[+-](?!\+\+ |-- )", line)]
    assert 0 < len(changed) < 30


def test_the_documentation_shows_the_differences_as_they_are():
    page = SHOWN["PAGE"].read_text(encoding="utf-8")
    assert SHOWN["with_differences"](page) == page, "run python docs/examples.py"
