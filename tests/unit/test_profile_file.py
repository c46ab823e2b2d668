"""Profiles as files, and the verb that makes them."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import small
from spindle.artifact import json_text, to_json
from spindle.cli.main import run
from spindle.errors import InputError
from spindle.launch.capture import ProfileCapture, requested_capture
from spindle.profile import (
    Curve,
    LayerSamples,
    Profile,
    read_profile,
    sampled_profile,
    write_profile,
)

PROFILE = small.workload_profile({"a": ["vision", "lm"], "b": ["text", "lm"]}, num_devices=2)
TIMES = st.floats(min_value=0, max_value=1e5, allow_nan=False) | st.sampled_from([5e-324, math.pi, 1 / 3, 0.1 + 0.2])


@st.composite
def profiles(draw) -> Profile:
    num_devices = draw(st.integers(1, 4))
    profile = small.workload_profile({"a": ["vision", "lm"], "b": ["lm"]}, num_devices, per_island=2)
    curves = []
    for _ in profile.graph.metaops:
        counts = tuple(sorted(draw(st.sets(st.integers(1, num_devices), min_size=1))))
        times = st.lists(TIMES, min_size=len(counts), max_size=len(counts)).map(tuple)
        curves.append((Curve(num_devices=counts, forward_s=draw(times), backward_s=draw(times)),))
    rates = draw(st.lists(st.floats(1e-3, 10), max_size=num_devices))
    return replace(
        profile,
        curves=tuple(curves),
        gangs=draw(st.booleans()),
        host_rates=tuple(rates),
        leaves_out=tuple(draw(st.lists(st.text(), max_size=2))),
        measured_on=draw(st.text(max_size=20)),
    )


@given(profiles())
def test_a_profile_comes_back_from_its_file_equal(profile):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        write_profile(path, profile)
        assert read_profile(path) == profile
        assert read_profile(path).graph.fingerprint == profile.graph.fingerprint


@given(profiles())
def test_the_text_of_a_value_is_that_of_its_json(profile):
    assert json_text(profile) == json.dumps(to_json(profile), sort_keys=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(spindle="plan"), "expected a Spindle profile .*, this is a Spindle plan"),
        (lambda data: data.update(version=2), "reads version 1 of a profile, got 2"),
        (lambda data: data.pop("curves"), "the field 'curves' is missing"),
        (lambda data: data["curves"].pop(), "expected curves for 4 ops, got them for 3"),
        (
            lambda data: data["curves"][1][0].update(forward_s=["slow"]),
            r'curves\[1\]\[0\]\.forward_s\[0\]: expected a number, got "slow"',
        ),
        (
            lambda data: data["curves"][1][0].update(num_devices=[1, 3]),
            "times for more devices than the 2 of the cluster",
        ),
        (lambda data: data["graph"]["metaops"][0].update(num_layers=0), r"metaops\[0\]: .* needs at least one layer"),
        (lambda data: data["graph"].update(order=[0]), "graph: unknown field 'order'"),
        (lambda data: data.update(host_rates=[1.0, 0.0]), "host_rates must be above 0"),
        (lambda data: data["cluster"]["islands"][0]["link"].update(bytes_per_s=0), "bytes_per_s must be above 0"),
    ],
)
def test_a_mistake_in_a_profile_file_is_named_with_its_place(tmp_path, change, message):
    path = tmp_path / "profile.json"
    write_profile(path, PROFILE)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=message) as caught:
        read_profile(path)
    assert str(caught.value).startswith(str(path))


# A profile as the input of other verbs.


@pytest.fixture
def file(tmp_path) -> str:
    samples = LayerSamples(rows=(8, 16), forward_s=(1e-3, 1.6e-3), backward_s=(2e-3, 3e-3))
    names = [op.name for op in PROFILE.graph.metaops]
    measured = sampled_profile(PROFILE.graph, PROFILE.cluster, dict.fromkeys(names, samples), (1.4, 1.0))
    write_profile(tmp_path / "profile.json", replace(measured, measured_on="an abacus"))
    return str(tmp_path / "profile.json")


def test_a_profile_is_planned_simulated_and_compared_without_naming_machines(file, tmp_path, capsys):
    plan = str(tmp_path / "plan.json")
    assert run(["plan", file, "--evaluations", "50", "-o", plan]) == 0
    assert run(["simulate", file, plan]) == 0
    assert run(["compare", file, "--evaluations", "50"]) == 0
    assert run(["bound", file]) == 0
    assert "small on test" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--devices", "4"], ["--cluster", "a800x4"]])
def test_a_profile_brings_its_machines(file, capsys, option):
    assert run(["plan", file, *option]) == 2
    assert f"a profile holds for the machines it was measured on; leave {option[0]} out" in capsys.readouterr().err


def test_a_name_in_a_profile_that_no_terminal_can_show_is_refused(file, capsys):
    data = json.loads(Path(file).read_text())
    data["measured_on"] = "\x1b[2J"
    Path(file).write_text(json.dumps(data))
    assert run(["plan", file]) == 2
    assert "measured_on: a name must be printable" in capsys.readouterr().err


# The verb.

SCRIPT = """
import sys
import torch
from torch import nn
import spindle

tower = spindle.module("tower", nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))))

@spindle.task(batch_size=4, per_sample_mean=True)
def pull(batch):
    return tower(batch["x"]).mean()

def sgd(named):
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)

print("given", sys.argv[1:], file=sys.stderr)
try:
    spindle.Trainer([pull], optimizer=sgd).fit({"pull": [{"x": torch.ones(4, 3)}]}, steps=3)
except Exception:
    print("caught")
finally:
    print("finally", file=sys.stderr)
print("trained")
"""


def profiled(tmp_path, *arguments, script=SCRIPT):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(script)
    from preloaded import run_spindle

    environment = {"SPINDLE_CACHE": str(tmp_path / "cache"), "COLUMNS": "100"}
    return run_spindle("profile", *arguments, folder=tmp_path, environment=environment)


@pytest.mark.parametrize("processes", [None, 2])
def test_a_script_is_measured_and_not_trained(tmp_path, processes):
    options = [] if processes is None else ["-n", str(processes)]
    done = profiled(tmp_path, *options, "-o", "profile.json", "train.py", "--fast", "-o", "hers")
    assert done.returncode == 0, done.stderr
    assert "tower[0:4]" in done.stdout
    assert "measured on" in done.stdout
    assert "trained" not in done.stdout
    assert "caught" not in done.stdout
    assert "given ['--fast', '-o', 'hers']" in done.stderr
    assert "finally" in done.stderr
    assert "wrote profile.json" in done.stderr
    profile = read_profile(tmp_path / "profile.json")
    assert profile.cluster.num_devices == (processes or 1)
    assert profile.measured_on
    assert [op.name for op in profile.graph.metaops] == ["pull/tower#0[0:4]", "pull/loss[0:1]"]


def test_a_second_profile_is_the_first(tmp_path):
    first, second = (json.loads(profiled(tmp_path, "--json", "train.py").stdout) for _ in range(2))
    assert second["curves"] == first["curves"]


@pytest.mark.parametrize("fresh", [True, False])
def test_what_is_asked_for_reaches_the_script(tmp_path, monkeypatch, fresh):
    asked = ProfileCapture(output=tmp_path / "profile.json", fresh=fresh)
    assert requested_capture() is None
    for name, value in asked.environment().items():
        monkeypatch.setenv(name, value)
    assert requested_capture() == asked


def test_a_script_that_never_calls_fit_is_an_error(tmp_path):
    done = profiled(tmp_path, "train.py", script="print('nothing to do')")
    assert done.returncode == 2
    assert "error: train.py: it ended without a call of spindle.Trainer.fit, so nothing was measured" in done.stderr


def test_a_script_that_fails_fails_the_profile(tmp_path):
    done = profiled(tmp_path, "-o", "profile.json", "train.py", script="raise SystemExit(7)")
    assert done.returncode == 7
    assert not (tmp_path / "profile.json").exists()


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    done = profiled(tmp_path, "-o", "nowhere/profile.json", "train.py")
    assert done.returncode == 2
    assert "there is no directory" in done.stderr
    assert "given" not in done.stderr
