"""The examples have the losses of their plain-PyTorch twins, which fall."""

from __future__ import annotations

import re
import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
SHOWN = runpy.run_path(str(ROOT / "docs" / "examples.py"))
NAMES = SHOWN["NAMES"]
STEPS, TWIN_STEPS = 6, 48  # batches do not depend on how many steps there are, so the first losses are to be the same


def printed_by(rank: int, num_ranks: int, script: str, *arguments: str) -> str:
    """What a training script prints, run on these ranks."""
    with redirect_stdout(StringIO()) as printed, mock.patch.object(sys, "argv", [script, *arguments]):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def losses(pool, num_ranks: int, path: str, steps: int) -> list[dict[str, float]]:
    """Losses by step, as a script prints them."""
    printed, *others = pool.run(num_ranks, printed_by, str(ROOT / "examples" / path), "--steps", str(steps))
    lines = re.findall(r"^step +\d+  (.*)$", printed, flags=re.MULTILINE)
    assert len(lines) == steps, printed
    assert not any(others)
    return [{task: float(loss) for task, loss in map(str.split, line.split("  "))} for line in lines]


@pytest.fixture(scope="module")
def twin_losses(pool) -> dict[str, list[dict[str, float]]]:
    return {name: losses(pool, 1, f"plain/{name}.py", TWIN_STEPS) for name in NAMES}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_the_losses_of_its_twin(pool, twin_losses, name, num_ranks):
    ours = losses(pool, num_ranks, f"{name}.py", STEPS)
    for mine, theirs in zip(ours, twin_losses[name][:STEPS], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_losses_of_all_tasks_fall(twin_losses, name):
    losses = twin_losses[name]
    for task in losses[0]:
        early, late = (sum(step[task] for step in some) for some in (losses[:8], losses[-8:]))
        assert late < 0.9 * early, task


@pytest.mark.parametrize("name", NAMES)
def test_an_example_differs_from_its_twin_by_less_than_thirty_lines(name):
    changed = [line for line in SHOWN["difference"](name) if re.match(r"[+-](?!\+\+ |-- )", line)]
    assert 0 < len(changed) < 30


def test_the_documentation_shows_the_examples_as_they_are():
    for page in SHOWN["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert SHOWN["with_examples"](text) == text, "run python docs/examples.py"
