"""Multimodal models on the command line: which verbs take them, what is refused, what is said of their times."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest

from spindle.cli.compare import pipelines_estimate_s
from spindle.cli.inputs import load_profile, load_step
from spindle.cli.main import run
from spindle.cli.terminal import note_duration
from spindle.errors import InputError
from spindle.recipes import MODELS

QUICK = ("--microbatches", "2", "--evaluations", "5")


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def refusal(capsys, *arguments: str) -> str:
    code = run(arguments)
    printed = capsys.readouterr()
    assert code == 2, printed.err
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err


def answer(capsys, *arguments: str) -> str:
    code = run(arguments)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[str, dict]:
    """What `compare` prints of a model, and the table that it writes."""
    table = tmp_path_factory.mktemp("compared") / "table.json"
    with redirect_stdout(StringIO()) as printed:
        assert run(("compare", "vlm-s", *QUICK, "-o", str(table))) == 0
    return printed.getvalue(), json.loads(table.read_text())


def test_recipes_list_the_multimodal_models(capsys):
    out = answer(capsys, "recipes")
    assert "tensor degree 8 × 8 stages, h800x64" in out
    assert all(name in out for name in MODELS)
    listed = json.loads(answer(capsys, "recipes", "--json"))["models"]
    assert [row["name"] for row in listed] == list(MODELS)
    first = {"description": "ViT 5B and Llama3 8B", "tensor_degree": 4, "num_stages": 4, "cluster": "h800x16"}
    assert first.items() <= listed[0].items()
    assert listed[0]["weights"] == MODELS["vlm-s"].num_parameters


def test_a_profile_of_a_model_without_a_batch_is_refused():
    with pytest.raises(InputError, match=r"t2v-s is a multimodal model, planned batch by batch"):
        load_profile("t2v-s", None, None)


def test_one_bound_for_a_batch_whatever_the_planner(capsys, compared):
    bound = json.loads(answer(capsys, "bound", "vlm-s", "--microbatches", "2", "--json"))
    assert bound["bound_s"] == max(bound["work_s"], bound["layer_s"], bound["path_s"])
    rows = compared[1]["rows"]
    plans = [row for row in rows if "bound_s" in row]
    assert {row["bound_s"] for row in plans} == {bound["bound_s"]}
    assert all(row["over_bound"] >= 1 and row["settings"] for row in plans)
    assert "over every size of sub-microbatches" in answer(capsys, "bound", "vlm-s", "--microbatches", "2")


@pytest.mark.parametrize("option", [("--microbatches", "32"), ("--batch-seed", "0"), ("--samples", "x.jsonl")])
@pytest.mark.parametrize("verb", [("plan", "clip-4"), ("compare", "clip-4"), ("simulate", "clip-4", "p.json")])
def test_what_is_asked_of_a_batch_is_for_models_only(capsys, verb, option):
    said = refusal(capsys, *verb, "--cluster", "a800x8", *option)
    assert f"{option[0]} is for multimodal models" in said
    assert "leave it out for clip-4" in said


def test_a_pipeline_is_simulated_from_its_plan_as_text(capsys, tmp_path):
    plans = [str(tmp_path / name) for name in ("plan.json", "plan.txt")]
    for plan in plans:
        answer(capsys, "plan", "vlm-s", *QUICK, "-o", plan)
    assert "\n> F" in (tmp_path / "plan.txt").read_text()
    simulated = [answer(capsys, "simulate", "vlm-s", plan, "--microbatches", "2") for plan in plans]
    steps = [text.partition("step ")[2].split()[:2] for text in simulated]
    assert steps[0] == [steps[1][0], f"{steps[1][1]},"]


def test_a_plan_of_another_batch_is_called_that(capsys, tmp_path):
    plan = str(tmp_path / "plan.json")
    answer(capsys, "plan", "vlm-s", *QUICK, "-o", plan)
    for options in (("--microbatches", "3"), ("--microbatches", "2", "--batch-seed", "1"), ()):
        said = refusal(capsys, "simulate", "vlm-s", plan, *options)
        assert "was made for another batch of vlm-s; give --microbatches, --batch-seed, --samples" in said
    assert "for another workload: 'vlm-s'" in refusal(capsys, "simulate", "t2v-s", plan, "--microbatches", "2")
    answer(capsys, "simulate", "vlm-s", plan, "--microbatches", "2")


@pytest.mark.parametrize(
    ("model", "line", "message"),
    [
        ("vlm-s", '{"text_tokens": 9, "clips": [{"seconds": 3}]}', "it has clips; a vision-language model takes"),
        ("t2v-s", '{"text_tokens": 9, "images": 1}', "text-to-video takes samples with clips and without images"),
        ("t2v-s", '{"text_tokens": 9000, "clips": [{"seconds": 3}]}', "9000 tokens of text for one clip"),
        ("vlm-s", '{"text_tokens": 9, "images": 1000001}', "at most 1,000,000 images and 1,000,000,000 tokens"),
        ("vlm-s", '{"text_tokens": 1000000001}', "got 0 and 1,000,000,001"),
    ],
)
def test_a_sample_that_the_model_cannot_take_is_named_with_its_line(capsys, tmp_path, model, line, message):
    fine = {"vlm-s": '{"text_tokens": 9}', "t2v-s": '{"text_tokens": 9, "clips": [{"seconds": 3}]}'}[model]
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text(f"{fine}\n\n{line}\n")
    said = refusal(capsys, "plan", model, *QUICK, "--samples", str(lengths))
    assert f"{lengths}, line 3: " in said
    assert message in said
    assert "pack_" not in said


def test_a_tensor_group_does_not_cross_islands(capsys, tmp_path):
    cluster = tmp_path / "small.toml"
    links = "link.bytes_per_s = 2e11\nuplink.bytes_per_s = 2e10"
    cluster.write_text(f'name = "small"\n[[islands]]\nkind = "h800"\nnum_devices = 2\ncount = 8\n{links}\n')
    said = refusal(capsys, "plan", "vlm-s", *QUICK, "--cluster", str(cluster))
    assert "vlm-s has tensor groups of 4 devices, which lie inside islands: small has an island of 2" in said


def test_a_model_has_no_workload_to_write(capsys):
    assert "vlm-l is a multimodal model, whose batches differ" in refusal(capsys, "recipes", "vlm-l", "-o", "x")


@pytest.mark.parametrize(
    ("given", "planner", "message"),
    [
        (("vlm-s",), "paper", "planner 'paper' plans no pipelines; for vlm-s there are pipeline, colocate"),
        (
            ("clip-4", "--cluster", "a800x8"),
            "vpp",
            "planner 'vpp' plans pipelines only; for clip-4 there are wavefront",
        ),
        (("vlm-s",), "gpipe", "no planner is called 'gpipe'; there are pipeline, colocate"),
    ],
)
def test_pipelines_have_planners_of_their_own(capsys, given, planner, message):
    assert message in refusal(capsys, "plan", *given, "--planner", planner)


def test_the_search_of_a_pipeline_can_be_shown(capsys, tmp_path):
    out = answer(capsys, "plan", "vlm-s", *QUICK, "--show-search")
    assert "schedules tried" in out
    assert "over natural" in out
    printed = answer(capsys, "plan", "vlm-s", *QUICK, "--show-search", "--json")
    (replica,) = json.loads(printed)["search"]
    assert replica["bound_s"] <= replica["improvements"][-1][1] <= replica["natural_s"]
    again = tmp_path / "again.json"
    again.write_text(printed)
    answer(capsys, "simulate", "vlm-s", str(again), "--microbatches", "2")
    said = refusal(capsys, "plan", "vlm-s", *QUICK, "--planner", "vpp", "--show-search")
    assert "--show-search: planner 'vpp' keeps no record of its search" in said


def check_what_is_left_out(out: str, out_in_full: str, leaves_out: list[str]) -> None:
    assert "effects left out of these times; --assumptions lists them." in out
    assert "Left out:" not in out
    assert "Left out: data loading, and host time between layers" in out_in_full
    assert "Left out: kernels were measured on" in out_in_full
    assert len(leaves_out) == out_in_full.count("Left out: ")


def test_what_the_times_of_a_plan_leave_out_is_said(capsys, tmp_path):
    out = answer(capsys, "plan", "vlm-s", *QUICK)
    out_in_full = answer(capsys, "plan", "vlm-s", "--assumptions", *QUICK)
    printed = answer(capsys, "plan", "vlm-s", *QUICK, "--json")
    check_what_is_left_out(out, out_in_full, json.loads(printed)["leaves_out"])
    again = tmp_path / "again.json"  # what was printed is still a plan
    again.write_text(printed)
    answer(capsys, "simulate", "vlm-s", str(again), "--microbatches", "2")


def test_what_the_times_of_a_comparison_leave_out_is_said(capsys, compared):
    out, table = compared
    check_what_is_left_out(out, answer(capsys, "compare", "vlm-s", "--assumptions", *QUICK), table["leaves_out"])


def test_long_work_says_how_long_before_it_starts(capsys):
    for estimate_s in (19, 38, 170):
        note_duration("tuning 7 planners", estimate_s)
    assert capsys.readouterr().err.splitlines() == [
        "note: tuning 7 planners: about 40 s on a free core",
        "note: tuning 7 planners: about 3 minutes on a free core",
    ]


def test_the_paper_models_are_compared_in_about_a_minute():
    for name, measured_s in {"vlm-s": 38, "vlm-l": 73, "t2v-s": 59}.items():
        step = load_step(name, None, None)
        assert 0.6 < pipelines_estimate_s(len(step.whole.graph.metaops), step.pipeline_ranks) / measured_s < 1.6
