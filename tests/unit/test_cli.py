"""The command line as a stranger meets it: what it prints, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import small
from spindle.artifact import write_artifact
from spindle.cli.main import run
from spindle.errors import DoesNotFitError

GRAPH = small.linear_graph(
    [("vision", 16, 12, 1, 0.5), ("text", 16, 6, 1, 0.1), ("head", 16, 1, 0.5, 0.1)],
    [("vision", "head"), ("text", "head")],
    num_devices=4,
)


@pytest.fixture(autouse=True, scope="module")
def _compiled_loops(tmp_path_factory):
    """Compile what the first command after an install compiles, and says so: these are tests of the ones after it."""
    path = tmp_path_factory.mktemp("compile") / "graph.json"
    path.write_text(json.dumps(GRAPH))
    assert run(["plan", str(path), "--devices", "4", "--evaluations", "2", "-o", str(path.with_name("plan.json"))]) == 0


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def graph(tmp_path) -> str:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(GRAPH))
    return str(path)


@pytest.fixture
def plan(graph, tmp_path, capsys) -> str:
    path = str(tmp_path / "plan.json")
    assert run(["plan", graph, "--devices", "4", "--planner", "paper", "-o", path]) == 0
    capsys.readouterr()
    return path


@pytest.fixture
def workload(tmp_path) -> str:
    path = tmp_path / "workload.json"
    write_artifact(path, "workload", small.workload({"a": ["vision", "lm"], "b": ["text", "lm"]}))
    return str(path)


def refusal(capsys, *arguments: str) -> str:
    """Runs a command that must be refused; the one message it gives."""
    code = run(arguments)
    printed = capsys.readouterr()
    assert code == 2, printed.err
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert "Traceback" not in printed.err
    return printed.err


def with_op(**changes) -> dict:
    vision, *others = GRAPH["ops"]
    changed = {key: value for key, value in (vision | changes).items() if value is not None}
    return GRAPH | {"ops": [changed, *others]}


BAD_GRAPHS = {
    "an unknown op in an edge": (GRAPH | {"edges": [["vision", "haed"]]}, r"edges\[0\].*'haed'.*vision, text, head"),
    "a cycle": (GRAPH | {"edges": [["vision", "head"], ["head", "vision"]]}, r"cycle.*vision.*head"),
    "an op that feeds itself": (GRAPH | {"edges": [["text", "text"]]}, r"edges\[0\].*'text'.*cycle"),
    "a missing time": (with_op(time_s=None), r"ops\[0\] \(vision\).*no time.*time_s"),
    "only one pass's time": (with_op(time_s=None, forward_s={"1": 0.1}), r"ops\[0\] \(vision\).*backward_s"),
    "no times at all": (with_op(time_s={}), r"vision.*time_s.*expected times by number of devices"),
    "a negative time": (with_op(time_s={"1": -0.5}), r'vision.*time_s\["1"\].*above 0, got -0.5'),
    "a time that is not a number": (with_op(time_s={"1": float("nan")}), r'vision.*time_s\["1"\].*finite.*nan'),
    "an infinite time": (with_op(time_s={"1": float("inf")}), r'vision.*time_s\["1"\].*finite.*inf'),
    "a time in words": (with_op(time_s={"1": "fast"}), r'vision.*time_s\["1"\].*number, got "fast"'),
    "half a device": (with_op(time_s={"0.5": 0.1}), r"vision.*'0.5' is not a number of devices"),
    "zero layers": (with_op(layers=0), r"ops\[0\] \(vision\).layers.*at least one.*got 0"),
    "half a layer": (with_op(layers=1.5), r"vision.*layers.*whole number, got 1.5"),
    "no layers": (with_op(layers=None), r'ops\[0\] \(vision\).*"layers" is missing'),
    "an op that fits on no allowed number of devices": (with_op(time_s={"64": 0.1}), r"'vision' fits on no.*64.*has 4"),
    "two ops of one name": (GRAPH | {"ops": [GRAPH["ops"][0]] * 2, "edges": []}, r"ops\[1\].*'vision'.*twice"),
    "an unknown field": (with_op(time_ms={"1": 3}), r"ops\[0\] \(vision\).*'time_ms'.*time_s"),
    "no ops": ({"ops": []}, r"at least one op"),
    "foreign JSON": ({"nodes": [], "links": []}, r'"ops".*workload.*\'nodes\''),
    "someone else's artifact": ({"spindle": "fleet", "version": 1}, r"expected a Spindle workload.*Spindle fleet"),
    "a workload of the future": ({"spindle": "workload", "version": 9}, r"reads version 1.*got 9"),
}


@pytest.mark.parametrize(("data", "message"), BAD_GRAPHS.values(), ids=BAD_GRAPHS)
@pytest.mark.parametrize("verb", ["plan", "bound"])
def test_a_bad_graph_is_refused_with_one_line_that_names_the_place(verb, data, message, tmp_path, capsys):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    said = refusal(capsys, verb, str(path), "--devices", "4")
    assert said.count("\n") == 1
    assert str(path) in said
    assert re.search(message, said), said


@pytest.mark.parametrize("share", [0.3, 0.9, 0.99])
def test_a_truncated_file_is_refused_with_its_line(share, tmp_path, capsys):
    text = json.dumps(GRAPH, indent=1)
    path = tmp_path / "cut.json"
    path.write_text(text[: int(share * len(text))])
    said = refusal(capsys, "plan", str(path), "--devices", "4")
    assert f"{path}, line " in said
    assert "truncated" in said


def test_a_file_that_is_not_text_is_refused(tmp_path, capsys):
    path = tmp_path / "noise.json"
    path.write_bytes(bytes(range(256)))
    assert f"{path}: cannot be read as text" in refusal(capsys, "plan", str(path), "--devices", "4")


def test_a_list_is_no_graph(tmp_path, capsys):
    path = tmp_path / "list.json"
    path.write_text("[1, 2]")
    assert "expected a JSON object" in refusal(capsys, "bound", str(path), "--devices", "4")


def test_a_plan_for_another_workload_is_refused_by_name(plan, tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(with_op(layers=13)))
    for verb in ("simulate", "explain"):
        said = refusal(capsys, verb, str(other), plan, "--devices", "4")
        assert f"{plan}: this plan was made for another workload: 'graph'" in said


def test_a_plan_for_more_devices_than_there_are_is_refused(graph, plan, capsys):
    said = refusal(capsys, "simulate", graph, plan, "--devices", "3")
    assert f"{plan}: this plan needs 4 devices, the cluster has 3" in said


def test_a_plan_made_from_other_times_is_simulated_with_those_of_the_graph(plan, tmp_path, capsys):
    slower = with_op(time_s={count: 100 * time for count, time in GRAPH["ops"][0]["time_s"].items()})
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(slower))
    assert run(["simulate", str(path), plan, "--devices", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folded_s"] > 10 * json.loads(Path(plan).read_text())["folded_s"]
    assert run(["explain", str(path), plan, "--devices", "4"]) == 0


def test_a_graph_is_no_plan_and_a_plan_is_no_graph(graph, plan, capsys):
    assert "expected a Spindle plan" in refusal(capsys, "simulate", graph, graph, "--devices", "4")
    assert "this is a Spindle plan" in refusal(capsys, "plan", plan, "--devices", "4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "nowhere.json", "--devices", "4"], "nowhere.json: no such file"),
        (["plan", "clap-4", "--devices", "4"], "no recipe of that name; recipes: clip-4"),
        (["plan", "clip-4", "--cluster", "a800x0"], "expected at least 1 and at most 1,048,576 devices, got 0"),
        (["plan", "graph.json", "--devices", "2", "--evaluations", "0"], "'--evaluations': "),
        (["plan", "clip-4", "--devices", "16"], "give --cluster instead of --devices 16 (a800x16"),
        (["plan", "clip-4", "--cluster", "b900x4"], "unknown cluster 'b900x4'"),
        (["plan", "clip-4", "--cluster", "nowhere.toml"], "nowhere.toml: no such file"),
        (["recipes", "clap-4", "-o", "x.json"], "no recipe is called 'clap-4'"),
        (["recipes", "-o", "x.json"], "-o x.json: give the name of a recipe"),
        (["plan"], "INPUT"),
        (
            ["simulate", "g.json"],
            "'PLAN.json'; expected spindle simulate INPUT PLAN.json (see spindle simulate --help)",
        ),
        (["plan", "g.json", "--devices", "some"], "'--devices': expected a whole number"),
        (["plan", "g.json", "--seed", "1.5"], "'--seed': expected a whole number"),
        (["plan", "g.json", "--time-limit", "x"], "'--time-limit': expected a number"),
        (["plan", "g.json", "--bogus"], "--bogus"),
        (["plam"], "plam"),
    ],
)
def test_misuse_is_one_line_that_says_what_to_do(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refusal(capsys, *arguments)
    assert message in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_how_many_devices_is_asked_for_once(graph, capsys):
    assert "give --devices N, or --cluster" in refusal(capsys, "plan", graph)
    assert "not both" in refusal(capsys, "plan", graph, "--devices", "4", "--cluster", "a800x4")
    assert "at least 1, got 0" in refusal(capsys, "plan", graph, "--devices", "0")


def test_an_unknown_planner_is_told_which_there_are(graph, capsys):
    assert "no planner is called 'best'; there are wavefront" in refusal(
        capsys, "plan", graph, "--devices", "4", "--planner", "best"
    )


def test_an_unknown_op_is_told_which_there_are(graph, plan, capsys):
    said = refusal(capsys, "explain", graph, plan, "--devices", "4", "--op", "visoin")
    assert "'visoin'; ops: vision, text, head" in said


def test_a_file_that_cannot_be_written_is_refused_before_the_work(graph, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("spindle.planners.make_plan", lambda *_: pytest.fail("planned first"))
    for target in (tmp_path / "no" / "plan.json", tmp_path):
        assert f"{target}: cannot be written" in refusal(capsys, "plan", graph, "--devices", "4", "-o", str(target))


def test_a_full_disk_leaves_the_old_file_and_nothing_else(graph, plan, tmp_path, capsys, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    trace = tmp_path / "trace.json"
    trace.write_text("an old trace")
    before, files = Path(plan).read_text(), sorted(tmp_path.iterdir())
    monkeypatch.setattr(os, "replace", no_space)
    for arguments in (
        ["plan", graph, "--planner", "sequential", "-o", plan],
        ["simulate", graph, plan, "--trace", str(trace)],
    ):
        assert "No space left" in refusal(capsys, *arguments, "--devices", "4")
    assert Path(plan).read_text() == before
    assert trace.read_text() == "an old trace"
    assert sorted(tmp_path.iterdir()) == files


def test_plan_writes_every_slot_once_beside_its_bound(graph, plan):
    written = json.loads(Path(plan).read_text())
    layers = {name: [] for name in ("vision", "text", "head")}
    for slot in written["slots"]:
        assert slot.keys() >= {"op", "first", "last", "devices", "wave"}
        layers[slot["op"]] += range(slot["first"], slot["last"])
    assert layers == {"vision": list(range(12)), "text": list(range(6)), "head": [0]}
    assert 0 < written["bound_s"] <= written["folded_s"] * (1 + 1e-9)
    assert written["makespan_s"] == pytest.approx(written["folded_s"], rel=1e-6)


def test_json_of_a_plan_is_the_plan_file(graph, plan, tmp_path, capsys):
    assert run(["plan", graph, "--devices", "4", "--planner", "paper", "--json"]) == 0
    printed = capsys.readouterr().out
    assert printed == Path(plan).read_text()
    again = tmp_path / "again.json"
    again.write_text(printed)
    assert run(["simulate", graph, str(again), "--devices", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] == json.loads(printed)["makespan_s"]


def test_plan_shows_its_bound_and_draws_every_op(graph, capsys):
    assert run(["plan", graph, "--devices", "4", "--planner", "paper"]) == 0
    printed = capsys.readouterr()
    for word in ("paper", "bound", "idle", "waves", "A vision", "B text", "C head"):
        assert word in printed.out
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    assert printed.err == ""


def test_lanes_that_are_asked_for_and_cannot_be_planned_say_why(graph, capsys):
    assert run(["plan", graph, "--devices", "4"]) == 0
    assert "lane" not in capsys.readouterr().err
    assert run(["plan", graph, "--devices", "4", "--lanes", "3"]) == 0
    assert "one lane on each device: nothing says how much these layers slow each other down" in capsys.readouterr().err


def test_a_plan_for_fewer_devices_runs_on_more(graph, plan, capsys):
    assert run(["simulate", graph, plan, "--devices", "8", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["idle_share"] >= 0.5
    assert printed.err == f"note: {plan} was planned for 4 of the 8 devices\n"


def test_a_plan_for_all_devices_needs_no_note(graph, plan, capsys):
    assert run(["simulate", graph, plan, "--devices", "4"]) == 0
    assert capsys.readouterr().err == ""


def test_a_trace_names_ops_and_passes(graph, plan, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    assert run(["simulate", graph, plan, "--devices", "4", "--trace", str(trace)]) == 0
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert "head 0:1 forward" in names
    assert "head 0:1 backward" in names
    assert "vision → head" in names


def test_compare_puts_every_planner_in_a_row_fastest_first(graph, tmp_path, capsys):
    table, figure = tmp_path / "table.json", tmp_path / "step.svg"
    assert run(["compare", graph, "--devices", "4", "-o", str(table), "--figure", str(figure), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(table.read_text())
    rows = printed["rows"]
    assert {row["planner"] for row in rows} == {"wavefront", "paper", "sequential", "distmm", "task-level"}
    assert [row["makespan_s"] for row in rows] == sorted(row["makespan_s"] for row in rows)
    assert all(row["over_bound"] >= 1 - 1e-6 for row in rows)
    assert next(row["speedup"] for row in rows if row["planner"] == "sequential") == 1
    assert figure.read_text().startswith("<svg")


def test_compare_prints_a_table_that_fits_the_terminal(workload, capsys):
    assert run(["compare", workload, "--cluster", "a800x4"]) == 0
    printed = capsys.readouterr().out
    for word in ("wavefront", "task-level", "speedup", "idle %", "sync %", "peak GiB", "LP bound"):
        assert word in printed
    assert "…" not in printed
    assert all(len(line) <= 80 for line in printed.splitlines())


def test_a_planner_that_refuses_says_why_in_the_comparison(workload, capsys, monkeypatch):
    import spindle.planners

    whole = spindle.planners.make_plan

    def without_distmm(profile, planner, options, progress):
        if planner == "distmm":
            raise DoesNotFitError("device 3 would need more than there is")
        return whole(profile, "paper" if planner == "wavefront" else planner)

    monkeypatch.setattr(spindle.planners, "make_plan", without_distmm)
    assert run(["compare", workload, "--cluster", "a800x4"]) == 0
    assert "distmm has no plan: device 3 would need more than there is" in capsys.readouterr().out


def test_what_does_not_fit_is_answered_with_no(tmp_path, capsys):
    heavy = small.workload({"a": ["vision"]}, elements=20_000_000_000)
    path = tmp_path / "heavy.json"
    write_artifact(path, "workload", heavy)
    assert (
        run(["plan", str(path), "--cluster", "a800x2", "--planner", "sequential", "-o", str(tmp_path / "p.json")]) == 1
    )
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert "does not fit: device" in printed.err
    assert not (tmp_path / "p.json").exists()


def test_bound_says_what_limits_it_and_what_is_left_out(graph, capsys):
    assert run(["bound", graph, "--devices", "4"]) == 0
    printed = capsys.readouterr().out
    for word in ("LP bound", "C*", "limit", "Left out: bytes"):
        assert word in printed
    assert run(["bound", graph, "--devices", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["lp_s"] <= report["paper_s"] * (1 + 1e-9)
    assert report["limit"] in ("area", "path", "both")


def test_explain_tells_the_story_of_one_op(graph, plan, capsys):
    assert run(["explain", graph, plan, "--devices", "4", "--op", "head"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("head: 1 layer")
    for words in ("chosen", "The LP bound would run", "takes its input from vision"):
        assert words in " ".join(printed.split())
    assert run(["explain", graph, plan, "--devices", "4", "--json"]) == 0
    assert [op["op"] for op in json.loads(capsys.readouterr().out)["ops"]] == ["vision", "text", "head"]


def test_recipes_are_listed_with_a_sentence_and_their_sizes(capsys):
    assert run(["recipes"]) == 0
    printed = capsys.readouterr().out
    assert "clip-10" in printed
    assert "10 tasks" in printed
    assert run(["recipes", "--json"]) == 0
    names = [recipe["name"] for recipe in json.loads(capsys.readouterr().out)["recipes"]]
    assert {"clip-4", "ofasys-7", "qwen-val-3"} <= set(names)
    assert run(["recipes", "clip-4"]) == 0
    printed = capsys.readouterr().out
    assert "4 contrastive tasks" in printed
    assert "clip-10" not in printed


def test_a_recipe_can_be_written_as_a_workload_and_planned(tmp_path, capsys):
    path = tmp_path / "clip.json"
    assert run(["recipes", "clip-4", "-o", str(path)]) == 0
    assert run(["plan", str(path), "--cluster", "a800x8", "--planner", "sequential", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workload"] == "clip-4"


def test_a_recipe_is_planned_by_its_name(capsys):
    assert run(["plan", "clip-4", "--cluster", "a800x8", "--planner", "sequential", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["slots"]) >= 8


def test_a_cluster_of_ones_own_comes_from_a_toml_file(workload, tmp_path, capsys):
    path = tmp_path / "two.toml"
    path.write_text(
        '[[islands]]\nkind = "a800"\ncount = 2\nnum_devices = 2\n'
        "link = {bytes_per_s = 2e11}\nuplink = {bytes_per_s = 2.5e10}\n"
    )
    assert run(["plan", workload, "--cluster", str(path), "--planner", "sequential", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_devices"] == 4


def test_version_and_help_answer(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("spindle ")
    for verb in ("plan", "simulate", "compare", "bound", "explain", "recipes"):
        assert run([verb, "--help"]) == 0
        assert f"spindle {verb} " in capsys.readouterr().out


def test_ctrl_c_says_that_nothing_was_written(graph, tmp_path, capsys, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("spindle.planners.make_plan", stopped)
    assert run(["plan", graph, "--devices", "4", "-o", str(tmp_path / "plan.json")]) == 130
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.strip() == "interrupted, nothing written"
    assert not (tmp_path / "plan.json").exists()


def test_help_loads_neither_numpy_nor_planners():
    code = (
        "import sys; from spindle.cli.main import run; run(['--help']); print('numpy' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "False"


def test_recipes_are_listed_without_a_compiler():
    code = (
        "import sys; from spindle.cli.main import run; run(['recipes']); print('numba' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "False"


def test_a_reader_that_has_gone_is_no_traceback():
    for arguments in (["recipes"], ["--help"]):
        process = subprocess.Popen(
            [sys.executable, "-m", "spindle.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        process.stdout.close()
        _, said = process.communicate()
        assert process.returncode == 141
        assert said == b""


def test_an_output_never_replaces_an_input_or_another_output(graph, plan, tmp_path, capsys):
    link = tmp_path / "link.json"
    link.symlink_to(graph)
    before = Path(graph).read_text()
    on_four = ["--devices", "4"]
    for target in (graph, str(link), str(tmp_path / "." / "graph.json")):
        assert "it is also an input" in refusal(capsys, "plan", graph, *on_four, "-o", target)
    assert "it is also an input" in refusal(capsys, "simulate", graph, plan, *on_four, "--trace", plan)
    same = str(tmp_path / "same")
    assert "it is also another output" in refusal(capsys, "compare", graph, *on_four, "-o", same, "--figure", same)
    assert Path(graph).read_text() == before
    assert not Path(same).exists()


def test_an_output_called_dash_is_pointed_to_json(graph, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "--json" in refusal(capsys, "plan", graph, "--devices", "4", "-o", "-")
    assert not Path("-").exists()


def test_names_in_files_are_not_markup(plan, tmp_path, capsys):
    names = {"vision": "[/x]", "text": "[red]:smile:", "head": "[bold"}
    ops = [op | {"name": names[op["name"]]} for op in GRAPH["ops"]]
    graph = tmp_path / "[x]graph.json"
    graph.write_text(json.dumps({"ops": ops, "edges": [[names[end] for end in edge] for edge in GRAPH["edges"]]}))
    made = tmp_path / "made.json"
    on_four = ["--devices", "4"]
    assert run(["plan", str(graph), *on_four, "--planner", "paper", "-o", str(made)]) == 0
    made.write_text(json.dumps(json.loads(made.read_text()) | {"planner": "[/x]"}))
    for arguments in (["simulate", str(graph), str(made)], ["explain", str(graph), str(made)], ["bound", str(graph)]):
        assert run([*arguments, *on_four]) == 0
    assert run(["compare", str(graph), *on_four, "--evaluations", "20"]) == 0
    printed = capsys.readouterr().out
    for word in ("[/x]", "[red]:smile:", "[bold", "[x]graph on 4 devices"):
        assert word in printed


@pytest.mark.parametrize("odd", ["a\x1b[2J", "a\nb", "a\x00", "\ud800"])
def test_a_name_that_cannot_be_printed_is_refused_with_its_place(odd, plan, graph, tmp_path, capsys):
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(GRAPH | {"ops": [*GRAPH["ops"], GRAPH["ops"][0] | {"name": odd}]}))
    assert "ops[3].name: a name must be printable" in refusal(capsys, "plan", str(path), "--devices", "4")
    path.write_text(json.dumps(with_op(task=odd)))
    assert "task: a name must be printable" in refusal(capsys, "plan", str(path), "--devices", "4")
    path.write_text(json.dumps(json.loads(Path(plan).read_text()) | {"planner": odd}))
    said = refusal(capsys, "simulate", graph, str(path), "--devices", "4")
    assert "planner: a name must be printable" in said
    assert said.rstrip("\n").isprintable()


@pytest.mark.parametrize("place", ["tasks", "modules"])
def test_a_workload_with_unprintable_names_is_refused(place, workload, capsys):
    data = json.loads(Path(workload).read_text())
    old = data[place][0]["name"]
    text = json.dumps(data).replace(json.dumps(old), json.dumps(old + "\x07"))
    Path(workload).write_text(text)
    said = refusal(capsys, "bound", workload, "--cluster", "a800x4")
    assert f"{place}[0].name: a name must be printable, got '{old}\\x07'" in said


def test_an_output_that_is_full_is_one_line(graph, capsys, monkeypatch):
    class Full:
        encoding = "utf-8"

        def write(self, _):
            raise OSError(28, "No space left on device")

        def isatty(self):
            return False

    for arguments in (["bound", graph, "--devices", "4"], ["recipes"], ["recipes", "--json"]):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Full())
            patch.setattr("spindle.cli.terminal._discard_output", lambda: None)
            assert run(arguments) == 2
        assert capsys.readouterr().err == "error: cannot write to standard output (No space left on device)\n"


@pytest.mark.parametrize("arguments", [["recipes"], ["--help"], ["--version"], ["recipes", "--json"]])
def test_a_closed_output_is_no_traceback(arguments):
    command = [sys.executable, "-m", "spindle.cli", *arguments]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in done.stderr
    if arguments[0] == "recipes":
        assert done.stderr == "error: cannot write to standard output (it is closed)\n"
        assert done.returncode == 2


def test_a_graph_with_a_byte_order_mark_is_read(tmp_path, capsys):
    path = tmp_path / "marked.json"
    path.write_text(json.dumps(GRAPH), encoding="utf-8-sig")
    assert run(["bound", str(path), "--devices", "4"]) == 0
    assert "marked on 4 devices" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_file_and_a_directory_are_called_what_they_are(text, tmp_path, capsys):
    path = tmp_path / "empty.json"
    path.write_text(text)
    assert f"{path}: is empty" in refusal(capsys, "plan", str(path), "--devices", "4")
    assert f"{tmp_path}: is a directory" in refusal(capsys, "plan", str(tmp_path), "--devices", "4")


def test_a_plan_file_says_its_seed_even_when_it_is_zero(plan):
    written = json.loads(Path(plan).read_text())
    assert written["seed"] == 0
    assert written.keys() >= {"folded_s", "makespan_s", "bound_s", "evaluations"}
    assert written.keys().isdisjoint({"cut_s", "recompute"})


@pytest.mark.parametrize("columns", [40, 60, 75])
def test_a_narrow_terminal_sees_whole_numbers_of_fewer_columns(columns, workload, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(["compare", workload, "--cluster", "a800x4", "--evaluations", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= columns for line in lines)
    assert not any("…" in line for line in lines)
    (sequential,) = (line.split() for line in lines if line.startswith(" sequential"))
    assert len(sequential) == 4
    assert sequential[2] == "1.00"


def test_compiled_code_finds_a_folder_where_nothing_else_can_be_written(tmp_path, monkeypatch):
    import numba

    import spindle.jit as program

    cleanups = []
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(program.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(program.atexit, "register", lambda *call, **options: cleanups.append((call, options)))
    program._choose_folder.__wrapped__()
    assert "NUMBA_CACHE_DIR" not in os.environ
    monkeypatch.setattr(program, "_can_be_written", lambda _: False)
    program._choose_folder.__wrapped__()
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    assert folder.parent == tmp_path
    (((remove, *arguments), options),) = cleanups
    remove(*arguments, **options)
    assert not folder.exists()
    monkeypatch.setenv("NUMBA_CACHE_DIR", "mine")
    program._choose_folder.__wrapped__()
    assert os.environ["NUMBA_CACHE_DIR"] == "mine"


def test_a_script_that_does_not_exist_is_named_before_its_machines(capsys):
    assert run(["plan", "vlm.py"]) == 2
    assert capsys.readouterr().err == "error: vlm.py: no such file\n"


@pytest.mark.parametrize("verb", ["simulate", "explain"])
def test_machines_of_a_plan_need_not_be_given_again(graph, capsys, tmp_path, verb):
    plan = str(tmp_path / "plan.json")
    assert run(["plan", graph, "--devices", "4", "-o", plan]) == 0
    assert run([verb, graph, plan]) == 0
    assert run(["plan", "clip-4", "--cluster", "a800x8", "--evaluations", "20", "-o", plan]) == 0
    assert run([verb, "clip-4", plan]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("verb", ["simulate", "explain"])
def test_what_is_no_plan_is_named_before_its_machines(graph, capsys, verb):
    assert run([verb, "clip-4", graph]) == 2
    assert capsys.readouterr().err == f"error: {graph}: expected a plan that `spindle plan` wrote\n"


def test_flags_take_no_value_in_help(capsys):
    for verb in ("plan", "compare", "bound", "profile", "launch"):
        assert run([verb, "--help"]) == 0
    assert run(["--help"]) == 0
    assert "bool" not in capsys.readouterr().out


def test_more_processes_than_memory_are_refused(capsys, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    assert run(["launch", "-n", "100000", str(script)]) == 2
    assert "100,000 processes do not fit in this host's memory" in capsys.readouterr().err


def test_a_plan_is_not_launched(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    assert run(["launch", "-n", "2", str(plan)]) == 2
    assert "expected a Python script; a plan is given to Planning(plan=...)" in capsys.readouterr().err


def test_a_command_that_compiles_first_says_so(graph, capsys, monkeypatch):
    assert run(["plan", graph, "--devices", "4"]) == 0  # compiles, if that is not done yet
    capsys.readouterr()
    assert run(["plan", graph, "--devices", "4"]) == 0
    assert "compiling" not in capsys.readouterr().err
    monkeypatch.setattr("spindle.planners.compiled._is_cached", lambda loop: False)
    assert run(["plan", graph, "--devices", "4"]) == 0
    assert (
        capsys.readouterr().err == "note: compiling loops, which takes about half a minute, once after installation\n"
    )
