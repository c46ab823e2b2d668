"""What the README shows is what runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        # The second goes on from the first.
        ((0, 1), r"Losses over 20 steps(.|\n)*image_text(.|\n)*measured(.|\n)*\{'image_text': \d"),
        ((0, 2), r"Losses over 20 steps(.|\n)*Losses over 4 steps(.|\n)*planned by pipeline"),
        ((3,), r"\d+ ms, bound \d+ ms\n"),
    ],
)
def test_the_python_examples_run(numbers, shown):
    code = "".join(blocks("python")[number] for number in numbers)
    if "torch" in code:
        pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(shown, done.stdout)


def test_the_commands_for_ones_own_numbers_run(tmp_path):
    (tmp_path / "graph.json").write_text(blocks("json")[0])
    commands = [
        line.split("#")[0].split()[1:] for block in blocks("sh") for line in block.splitlines() if "graph.json" in line
    ]
    assert commands[0][0] == "plan"  # which writes what others read
    assert sorted(command[0] for command in commands) == ["bound", "compare", "explain", "plan", "simulate"]
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", "spindle.cli", *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "vision" in done.stdout or "graph" in done.stdout


def test_ci_calls_the_two_commands_of_the_readme():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    first, second = (block.strip() for block in blocks("sh")[:2])
    for command in (*first.split(" && "), *second.split(" && ")):
        assert command.removeprefix("pip install ") in ci
