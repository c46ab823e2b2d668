"""What a new user tries first: `spindle doctor`, `spindle init`, and the scripts that it writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from spindle.cli.doctor import _check_extras, check_machine
from spindle.cli.init import TEMPLATES
from spindle.cli.main import run


def spindle(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spindle.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


def test_doctor_measures_the_link_between_two_ranks():
    pytest.importorskip("torch")
    done = spindle("doctor", "--json", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    report = json.loads(done.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert (done.returncode, report["can_train"]) == (0, True), done.stderr
    assert re.match(r"[\d.]+ \w+/s, [\d.]+ \w+ latency, two ranks through gloo", checks["Links"]["value"])
    assert checks["torch"]["value"].startswith("2.")


def test_doctor_says_how_to_install_torch_where_it_is_missing(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = spindle("doctor", "--no-links", PYTHONPATH=paths, COLUMNS="200")
    assert done.returncode == 1, done.stderr
    assert "not installed" in done.stdout
    assert "pip install 'spindle-train[train]'" in done.stdout
    assert "Training cannot start: torch." in done.stdout


def test_doctor_names_what_a_broken_torch_says(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = spindle("doctor", "--no-links", "--json", PYTHONPATH=paths)
    (torch,) = (check for check in json.loads(done.stdout)["checks"] if check["name"] == "torch")
    assert done.returncode == 1
    assert "libcudart.so.13" in torch["value"]
    assert "--force-reinstall" in torch["next_step"]


def test_doctor_counts_a_small_mlflow_as_mlflow_and_names_what_fleets_need(monkeypatch):
    def version(distribution):
        if distribution != "mlflow-skinny":
            raise PackageNotFoundError(distribution)
        return "3.17.2"

    monkeypatch.setattr("spindle.cli.doctor.version", version)
    check = _check_extras()
    assert check.value == "mlflow-skinny 3.17.2"
    assert "MLflow" not in check.allows
    assert "live fleets on Ray (spindle-train[fleet])" in check.allows


def test_doctor_finds_a_temporary_folder_that_cannot_be_written(monkeypatch):
    def refuse(*_arguments, **_options):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("spindle.cli.doctor._torch_facts", lambda: "not asked")
    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    (check,) = (check for check in check_machine(measures_links=False) if check.name == "Temporary files")
    assert check.state == "missing"
    assert "TMPDIR" in check.next_step


def test_the_shell_completes_verbs():
    done = spindle(_SPINDLE_COMPLETE="complete_bash", COMP_WORDS="spindle doc", COMP_CWORD="1")
    assert (done.returncode, done.stdout.split()) == (0, ["doctor"]), done.stderr


def test_init_refuses_unknown_templates_and_files_that_exist(tmp_path, capsys):
    path = tmp_path / "train.py"
    assert run(["init", "three-tower", "-o", str(path)]) == 2
    assert "expected one of two-tower" in capsys.readouterr().err
    path.write_text("mine")
    assert run(["init", "vlm", "-o", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert path.read_text() == "mine"


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_trains_as_it_is_on_two_processes(template, tmp_path, capsys):
    pytest.importorskip("torch")
    if template == "vlm":
        pytest.importorskip("transformers")
    from preloaded import run_spindle

    path = tmp_path / "train.py"
    assert run(["init", template, "-o", str(path)]) == 0
    assert f"spindle launch -n 2 {path}" in capsys.readouterr().out
    text = path.read_text(encoding="utf-8")
    assert "spindle launch" in text
    assert "{name}" not in text
    path.write_text(re.sub(r"STEPS = (.*)\b\d+$", r"STEPS = \g<1>16", text, flags=re.MULTILINE))
    done = run_spindle("launch", "-n", "2", "train.py", folder=tmp_path, environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\w+) +(\d\.\d+) .* (\d\.\d+) *$", done.stdout, flags=re.MULTILINE)
    assert rows, done.stdout
    for task, first, last in rows:
        assert float(last) < float(first), (task, done.stdout)
    assert run(["report", str(tmp_path / "runs" / template), "-o", str(tmp_path / "step.html")]) == 0
    assert (tmp_path / "step.html").stat().st_size > 100_000
