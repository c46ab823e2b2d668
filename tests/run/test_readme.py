"""The code and commands that README.md and docs show run as shown: programs on one process and on two, commands as
they are typed. What is not run here is listed in `NOT_RUN`, with the reason."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from spindle.cli.main import run

ROOT = Path(__file__).resolve().parents[2]
PATHS = [ROOT / "README.md", *sorted(path for path in ROOT.glob("docs/**/*.md") if path.name != "commands.md")]
PAGES = {str(path.relative_to(ROOT)).removeprefix("docs/"): path.read_text(encoding="utf-8") for path in PATHS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A Python block of a page, what it prints, and the page whose first block it continues, if any."""

    page: str
    block: int
    prints: str
    continues: str | None = None

    @property
    def path(self) -> str:
        return f"{self.page.replace('/', '-')}-{self.block}.py"

    @property
    def code(self) -> str:
        return blocks(self.page, "python")[self.block]


TRAIN = Program(page="tutorial.md", block=0, prints=r"Losses over 60 steps(.|\n)*image_text(.|\n)*predicted")
PROGRAMS = (
    TRAIN,
    # Before the block of training.md, which freezes a module.
    Program(
        page="pipelines.md", block=0, continues=TRAIN.page, prints=r"Losses over 4 steps(.|\n)*by planner pipeline"
    ),
    # Where spread chunks are faster here, `colocate` takes the plan of `pipeline`.
    Program(page="items.md", block=0, prints=r"Losses over 6 steps(.|\n)*by planner (colocate|pipeline)"),
    Program(page="training.md", block=0, continues=TRAIN.page, prints=r"\{'image_text': \d"),
    Program(page="interface.md", block=0, prints=r"Losses over \d+ steps(.|\n)*metrics +classify/accuracy"),
    Program(page="planning.md", block=0, prints=r"\d+ ms, bound \d+ ms\n"),
    Program(page="from_transformers.md", block=0, prints=r"Losses over 10 steps(.|\n)*predict"),
    Program(page="how_to/own_model.md", block=0, prints=r"Losses over 20 steps(.|\n)*classify"),
    Program(page="how_to/mixed_batches.md", block=0, prints=r"Losses over 24 steps(.|\n)*answer"),
    Program(page="how_to/sweep.md", block=0, prints=r"Losses over 40 steps(.|\n)*middle"),
    Program(page="how_to/own_planner.md", block=0, prints=r"(sequential|task-level): \d+ ms, bound \d+ ms\n"),
)

NEEDS_GPU = "needs a GPU"
INSTALLS = "installs the package, which .ci/run does"
TWINS = "tests/run/test_examples.py runs this script with fewer steps, on one process and on two"
TRANSFORMERS = "tests/run/test_from_transformers.py runs it"
REPORTS = "tests/unit/test_step_report.py runs this verb on small runs, plans and graphs"
FLEET_REPORTS = "tests/unit/test_fleet_report.py runs this verb on timelines, events and stores"
QUICK_SEARCH = "takes half a minute; tests/unit/test_cli_pipelines.py runs this verb with fewer evaluations"
LIVE_FLEET = "tests/run/test_fleet_live.py runs this verb on a live fleet"
SWEEPS = "tests/unit/test_live_fleet.py runs this verb with a sweep"
NOT_RUN = {
    "pip install -c constraints.txt '.[train]'": INSTALLS,
    "pip install -c constraints.txt -e '.[dev]'": INSTALLS,
    "pip install '.[hf]'": INSTALLS,
    "pytest": "these are the tests",
    "spindle launch -n 4 examples/four_tasks.py": "takes a minute; .ci/run runs it",
    "torchrun --nproc-per-node 8 train.py": NEEDS_GPU,
    "python tests/gpu/all.py --jobs 3": NEEDS_GPU,
    "spindle launch --virtual-devices 8 train.py": NEEDS_GPU,
    "spindle profile --virtual-devices 8 -o profile.json train.py": NEEDS_GPU,
    "spindle compare vlm-s": QUICK_SEARCH,
    "spindle plan vlm-s --evaluations 20000 --show-search": QUICK_SEARCH,
    "pip install '.[hf]' accelerate datasets": INSTALLS,
    "python examples/transformers/make_model.py tiny-llava": TRANSFORMERS,
    "python examples/transformers/before.py tiny-llava": TRANSFORMERS,
    "spindle launch -n 2 examples/transformers/after.py tiny-llava": TRANSFORMERS,
    "spindle report runs/a -o step.html": REPORTS,
    "spindle report runs/a runs/b -o both.html": REPORTS,
    "spindle report clip-10 --cluster a800x32 -o planners.html": REPORTS,
    "spindle report graph.json first.json second.json -o plans.html": REPORTS,
    "spindle report runs/a -o step.svg": REPORTS,
    "spindle report price.json sia.json -o fleet.html": FLEET_REPORTS,
    "spindle report fleet.db -o fleet.html": FLEET_REPORTS,
    "python examples/vlm.py": TWINS,
    "spindle launch -n 2 examples/vlm.py --steps 40": TWINS,
    "python examples/plain/vlm.py": TWINS,
    "pip install 'spindle-train[fleet]'": INSTALLS,
    "ray start --head --labels=spindle-kind=a100": LIVE_FLEET,
    "spindle fleet up --view": LIVE_FLEET,
    "spindle fleet up --address 10.0.0.1:6379": LIVE_FLEET,
    "spindle fleet submit --count 1-8 train.py": LIVE_FLEET,
    "spindle fleet submit --count 1-16 train.py": LIVE_FLEET,
    "spindle fleet submit --team vision --priority high --deadline 6h --kinds a100,h100 other.py --lr 1e-4": LIVE_FLEET,
    "spindle fleet estimate train.py --fleet a100x8 --sweep lr=1e-4,3e-4": SWEEPS,
    "spindle fleet submit --sweep lr=1e-4,3e-4 train.py": SWEEPS,
    "spindle fleet submit --sweep lr=1e-3 train.py": SWEEPS,
    "spindle fleet status": LIVE_FLEET,
    "spindle fleet logs train --follow": LIVE_FLEET,
    "spindle fleet explain train": LIVE_FLEET,
    "spindle fleet stop train": LIVE_FLEET,
    "spindle fleet drain node3": LIVE_FLEET,
    "spindle fleet down": LIVE_FLEET,
    "sbatch train.sh": "tests/run/test_fleet_slurm.py submits such a script",
}
# The first of the commands that write a file which others read.
WRITERS = (
    "spindle profile -n 2 -o profile.json train.py",
    "spindle plan profile.json -o plan.json",
    "spindle plan graph.json --devices 8 -o plan.json",
    "spindle fleet simulate examples/fleet_jobs.jsonl --fleet a100x16,l40sx8 --events events.jsonl",
)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


def commands() -> list[str]:
    """The commands of all `sh` blocks, each once, without comments."""
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    parts = [part for line in lines for part in line.split("#")[0].split(" && ")]
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))


def test_every_python_block_is_a_program():
    shown = [(page, number) for page in PAGES for number in range(len(blocks(page, "python")))]
    assert sorted((program.page, program.block) for program in PROGRAMS) == sorted(shown)


# One program after the other in the same processes, each in a namespace of its own, with the names of the program that
# it continues.
RUN_ALL = """
import json, runpy

namespaces = {None: {}}
for path, continued in json.load(open("programs.json")):
    print(f"=== {path}", flush=True)
    namespaces[path] = runpy.run_path(path, init_globals=namespaces[continued], run_name="__main__")
"""


def loss_rows(printed: str) -> dict[str, list[float]]:
    """Losses of some steps from first to last, by task, as `FitResult.print` shows them."""
    table = re.search(r"^Losses over .*\n(?:task .*\n)((?:\w+(?: +[\d.]+)+ *\n)+)", printed, flags=re.MULTILINE)
    rows = [] if table is None else [line.split() for line in table[1].splitlines()]
    return {task: [float(loss) for loss in losses] for task, *losses in rows}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_python_programs_run_as_shown(num_ranks, tmp_path):
    pytest.importorskip("torch")
    from preloaded import run_spindle

    path_of = {program.page: program.path for program in PROGRAMS if not program.block}
    for program in PROGRAMS:
        (tmp_path / program.path).write_text(program.code)
    steps = [(program.path, path_of.get(program.continues)) for program in PROGRAMS]
    (tmp_path / "programs.json").write_text(json.dumps(steps))
    (tmp_path / "run_all.py").write_text(RUN_ALL)
    # Several torch threads on busy cores spend their time waiting for each other.
    done = run_spindle(
        "launch", "-n", str(num_ranks), "run_all.py", folder=tmp_path, environment={"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    outputs = dict(re.findall(r"^=== (\S+)\n((?:(?!=== ).*\n)*)", printed, flags=re.MULTILINE))
    for program in PROGRAMS:
        assert re.match(program.prints, outputs[program.path]), (program, printed)
        rows = loss_rows(outputs[program.path])
        assert bool(rows) == ("Losses" in program.prints)
        for task, losses in rows.items():
            assert losses[-1] < losses[0], (program, task, losses)
    shown = loss_rows(PAGES[TRAIN.page])
    assert shown.keys() == {"image_text", "audio_text"}
    for task, losses in loss_rows(outputs[TRAIN.path]).items():
        assert losses[-1] < 0.7 * losses[0]
        assert losses == pytest.approx(shown[task], rel=0.05)  # rounding depends on the machine


def test_commands_that_are_not_run_are_shown():
    assert set(NOT_RUN) <= set(commands())
    assert set(WRITERS) <= set(commands())


def test_the_commands_run_as_shown(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    from preloaded import run_spindle

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("train.py").write_text(TRAIN.code)
    Path("examples").symlink_to(ROOT / "examples")
    Path("graph.json").write_text(blocks("planning.md", "json")[0])
    Path("lengths.jsonl").write_text(f"{json.dumps({'text_tokens': 120, 'clips': [{'seconds': 4.6}]})}\n" * 320)
    to_run = [command for command in commands() if command not in NOT_RUN]
    by_input = sorted(to_run, key=lambda command: ("graph.json" in command, command not in WRITERS))
    for command in by_input:
        name, *arguments = shlex.split(command)
        assert name == "spindle"
        if arguments[0] == "profile":
            done = run_spindle(*arguments)
            assert done.returncode == 0, done.stderr
            continue
        assert run(arguments) == 0, (command, capsys.readouterr().err)
        said = capsys.readouterr()
        assert said.out or "wrote" in said.err, command


def test_ci_calls_the_two_commands_of_the_readme():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    first, second = (block.strip() for block in blocks("README.md", "sh")[:2])
    for command in (*first.split(" && "), *second.split(" && ")):
        assert command.removeprefix("pip install ") in ci


def test_the_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 120


def test_links_between_pages_lead_to_files_that_exist():
    for path in PATHS:
        for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), (path, target)


def test_the_documentation_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="the extra dev brings Sphinx")
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "commands.html").read_text(encoding="utf-8")
    assert "spindle doctor" in page
    assert "spindle.Trainer" in (tmp_path / "python.html").read_text(encoding="utf-8")


def test_the_layout_names_every_file_and_none_that_does_not_exist():
    source = ROOT / "src" / "spindle"
    named = {Path(name).name for name in re.findall(r"`([\w/]+\.py)`", PAGES["layout.md"])}
    assert named <= {path.name for path in source.rglob("*.py")}
    words = {word.split("/")[-1].removesuffix(".py") for word in re.findall(r"`([\w/.]+)`", PAGES["layout.md"])}
    one_verb_per_file = {path.stem for path in source.glob("cli/**/*.py")}
    assert {path.stem for path in source.rglob("[!_]*.py")} <= words | one_verb_per_file


def test_a_task_through_spindle_links_to_functions_that_exist():
    links = re.findall(
        r'^\[\w+\]: \.\./(\S+) "(?:\w+\.)?(\w+)"', PAGES["a_task_through_spindle.md"], flags=re.MULTILINE
    )
    assert len(links) == 10
    for path, function in links:
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), (path, function)
