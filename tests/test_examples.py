"""The examples on Hugging Face models train, on one process and on two, with the losses of their plain-PyTorch twins."""

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
STEPS = {"multitask_clip": 16, "vlm": 8}
LAUNCH = ("-m", "spindle.cli", "launch", "-n", "2")


@functools.cache
def losses(name: str, *how: str) -> list[dict[str, float]]:
    """Losses by step, as a script prints them."""
    done = subprocess.run(
        [sys.executable, *how, f"{name}.py", "--steps", str(STEPS[Path(name).name])],
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # several do nothing for tensors as small as these
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^step +\d+  (.*)$", done.stdout, flags=re.MULTILINE)
    assert len(lines) == STEPS[Path(name).name], done.stdout
    return [{task: float(loss) for task, loss in map(str.split, line.split("  "))} for line in lines]


@pytest.mark.parametrize("how", [(), LAUNCH], ids=["one process", "two processes"])
@pytest.mark.parametrize("name", STEPS)
def test_an_example_has_the_losses_of_its_twin(name, how):
    for ours, theirs in zip(losses(name, *how), losses(f"plain/{name}"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("name", STEPS)
def test_losses_fall(name):
    told = losses(f"plain/{name}")
    few = len(told) // 4
    for task in told[0]:
        assert sum(one[task] for one in told[-few:]) < sum(one[task] for one in told[:few]), task


@pytest.mark.parametrize("name", STEPS)
def test_an_example_differs_from_its_twin_by_less_than_thirty_lines(name):
    changed = [line for line in SHOWN["difference"](name) if re.match(r"[+-](?!\+\+ |-- )", line)]
    assert 0 < len(changed) < 30


def test_the_documentation_shows_the_differences_as_they_are():
    page = SHOWN["PAGE"].read_text(encoding="utf-8")
    assert SHOWN["with_differences"](page) == page, "run python docs/examples.py"
