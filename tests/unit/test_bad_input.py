"""Inputs that are damaged, hostile or merely huge: each is refused in one short line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import small
from spindle.artifact import artifact_text
from spindle.cli.main import run
from spindle.errors import InputError, PlanError, WorkloadError
from spindle.plan import parse_plan
from spindle.profile import read_profile
from spindle.workload import Packing, Sample, even_parts, pack_images, read_samples

FUZZ = Path(__file__).parents[1] / "fuzz.py"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vision*12@0-999999999 text*6@3\nhead*1@0", r"line 1: there is no device 999999999, only 0 to 3"),
        ("vision*12@0-3\n\ntext*6@4\nhead*1@0", r"line 3: there is no device 4, only 0 to 3"),
        ("vision*12@3-0", r"line 1: 3-0 is not a range of devices"),
        ("vision*12@0-", r"line 1: 'vision\*12@0-' is not a slot"),
        ("vision*12@0-30-3", r"line 1: .* is not a slot"),
        (f"vision*{'9' * 5000}@0", r"line 1: expected a number of up to 9 digits"),
        ("vision*13@0", r"line 1: vision has 12 layers, up to here its slots run 13"),
        ("vision*0@0", r"line 1: vision has 12 layers"),
        ("vision*12@0^0..25", r"line 1: 0\.\.25 is not a start time"),
        ("vision*12@0^9e999", r"line 1: 9e999 is not a start time"),
        ("# planner", r"line 1: expected # planner NAME, got '# planner'"),
        ("# tensor vision two", r"line 1: no module is called 'vision'"),
        ("vision*12@0\n# recompute audio", r"line 2: no op is called 'audio'"),
        ("", r"the text of a plan has no slots"),
        ("vision*12@0\n> F0 B0", r"op 'text' has no slots"),
        ("vision*12@0~999999999 text*6@1~999999999\nhead*1@0~999999999", None),
        (f"{'x' * 100_000}*1@0", r"line 1: no op is called 'xxx"),
    ],
)
def test_a_plans_text_that_is_wrong_is_refused_with_its_line(text, message):
    if message is None:
        assert parse_plan(text, small.two_towers()).order  # a round of this number is no loop of this length
        return
    with pytest.raises(PlanError, match=message) as refused:
        parse_plan(text, small.two_towers())
    assert len(str(refused.value).splitlines()[0]) <= 500


@pytest.mark.parametrize("degree", ["two", "3", "-1", "²", "9" * 5000])
def test_a_tensor_degree_that_a_module_cannot_have_is_refused_with_its_line(degree):
    profile = small.workload_profile({"x": ["vision"]}, 4)
    with pytest.raises(PlanError, match=r"line 1: "):
        parse_plan(f"# tensor vision {degree}\nx/vision#0[0:4]*4@0-1", profile)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda graph: graph["metaops"][0]["parameters"][0].append(-1), r"there is no parameter -1"),
        (lambda graph: graph["metaops"][0]["parameters"][0].append(12), r"there is no parameter 12, the graph has 12"),
        (lambda graph: graph["metaops"][0]["parameters"].pop(), r"expected the parameters of 4 layers, got them for 3"),
        (lambda graph: graph["edges"].append([-1, 0]), r"edge \[-1, 0\]: expected two ops, 0 to 3"),
        (lambda graph: graph["edges"].append([0, 4]), r"edge \[0, 4\]: expected two ops, 0 to 3"),
        (lambda graph: graph["edges"].append([0, 0]), r"edge \[0, 0\]: expected two ops"),
    ],
)
def test_positions_in_a_profile_that_are_not_there_are_refused(change, message, tmp_path):
    data = json.loads(
        artifact_text("profile", small.workload_profile({"x": ["vision", "lm"], "y": ["audio", "lm"]}, 2))
    )
    change(data["graph"])
    (tmp_path / "profile.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=message):
        read_profile(tmp_path / "profile.json")


def cluster_file(**changes: str) -> str:
    fields = {"num_devices": "2", "link": "{bytes_per_s = 1e9}", "uplink": "{bytes_per_s = 1e9}"} | changes
    return '[[islands]]\nkind = "a800"\n' + "".join(f"{name} = {value}\n" for name, value in fields.items())


LONG = "x" * 100_000
GRAPH = small.linear_graph(small.CASE_A, num_devices=2)
WORKLOAD = json.loads(artifact_text("workload", small.workload({"x": ["vision"]})))
HUGE_WORKLOAD = WORKLOAD | {"parameters": [{"name": "vision.0", "num_elements": 10**4000}, *WORKLOAD["parameters"][1:]]}


@pytest.mark.parametrize(
    ("verb", "files", "message"),
    [
        (["graph.json", "--cluster", "a800x10000000000"], {}, "at most 1,048,576 devices"),
        (["graph.json", "--cluster", f"a800x{'9' * 5000}"], {}, "at most 1,048,576 devices"),
        (["graph.json", "--cluster", "c.toml"], {"c.toml": f"name = {'[' * 5000}"}, "not TOML"),
        (["graph.json", "--cluster", "c.toml"], {"c.toml": cluster_file(num_devices="9" * 5000)}, "not TOML"),
        (["graph.json", "--cluster", "c.toml"], {"c.toml": cluster_file(num_devices="9" * 30)}, "64 bits"),
        (["graph.json", "--cluster", "c.toml"], {"c.toml": cluster_file(num_devices="9" * 15)}, "more than Spindle"),
        (
            ["graph.json", "--cluster", "c.toml"],
            {"c.toml": f'name = "{LONG}"\n' + cluster_file()},
            "at most 500 letters",
        ),
        (["workload.json", "--cluster", "a800x2"], {"workload.json": json.dumps(HUGE_WORKLOAD)}, "4001 digits"),
        (["long.json", "--devices", "2"], {"long.json": json.dumps(GRAPH).replace('"a"', f'"{LONG}"')}, "at most 500"),
        (["long.json", "--devices", "2"], {"long.json": json.dumps({"ops": LONG, LONG: 1})}, "unknown field"),
    ],
)
def test_inputs_that_are_too_long_or_too_many_are_refused_in_one_line(
    verb, files, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name, text in ({"graph.json": json.dumps(GRAPH)} | files).items():
        Path(name).write_text(text)
    assert run(["plan", *verb]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert len(line) <= len("error: ") + 500


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text_tokens": 1, "text_tokens": 2}', r"line 1: .*the key 'text_tokens' appears twice"),
        ('{"text_tokens": 1, "clips": [{"seconds": 1, "width": 1000000000}]}', r"line 1: a clip has at most 65,536"),
        ("\n".join(['{"text_tokens": 1000000000}'] * 11), r"line 11: up to here there are 11,000,000,000 tokens"),
        ("[" * 100_000, r"line 1: not a JSON object"),
    ],
)
def test_samples_that_are_no_lengths_are_refused_with_their_line(line, message, tmp_path):
    (tmp_path / "samples.jsonl").write_text(line)
    with pytest.raises(InputError, match=message):
        read_samples(tmp_path / "samples.jsonl")


def test_a_sample_of_a_billion_tokens_is_cut_without_trying_every_number_of_parts():
    packed = pack_images([Sample(text_tokens=10**9, images=3)])
    assert sum(microbatch.num_images for microbatch in packed) == 3
    assert len(packed) < 130_000


@given(st.integers(0, 400), st.integers(0, 40), st.integers(1, 30), st.integers(1, 6))
def test_a_long_sample_is_cut_into_the_fewest_equal_parts_that_fit(text_tokens, images, image_tokens, max_images):
    packing = Packing(max_tokens=40, image_tokens=image_tokens, max_images=max_images)
    if not text_tokens + images:
        return

    def parts(count):
        return list(zip(even_parts(text_tokens, count), even_parts(images, count)[::-1], strict=True))

    fewest = next(
        count
        for count in range(1, 1000)
        if all(text + many * image_tokens <= 40 and many <= max_images for text, many in parts(count))
    )
    sample = Sample(text_tokens=text_tokens, images=images)
    packed = pack_images([sample], packing)
    assert len(packed) <= fewest
    assert sum(microbatch.num_images for microbatch in packed) == images
    assert sum(microbatch.num_tokens for microbatch in packed) == text_tokens + images * image_tokens


def test_a_graph_refuses_positions_when_it_is_made_in_python_too():
    graph = small.two_towers().graph
    with pytest.raises(WorkloadError, match=r"edge \[0, 3\]"):
        type(graph)(name="broken", metaops=graph.metaops, edges=((0, 3),))


def test_mutated_inputs_of_every_reader_are_read_or_refused():
    pytest.importorskip("torch")  # which the reader of cached times needs
    command = [sys.executable, str(FUZZ), "--each", "60", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
