"""The report's data: exact sums, true causes, the same bytes from the same run; cut-off runs are refused."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

import small
from spindle.cli.main import run
from spindle.errors import InputError
from spindle.planners import make_plan
from spindle.program import instances_of, lower
from spindle.report import ShownTimeline, StepReport, page_html, read_run, run_report, step_page_data, write_run
from spindle.report.causes import last_needs
from spindle.report.drawing import Box, figure_svg
from spindle.report.html import SCRIPTS
from spindle.report.step_drawing import curves_drawing, step_drawing, write_figure
from spindle.report.sums import CLASSES
from spindle.simulate import simulate
from spindle.timeline import device_times, measure, unpack
from step_sums import critical_path, time_sums

PAGE = Path(__file__).resolve().parents[2] / "src/spindle/report/page"


def planned(planner: str = "by hand", **changes):
    profile = small.workload_profile(small.TWO_TASKS)
    plan = small.crossing_plan(profile) if planner == "by hand" else make_plan(profile, planner)
    plan = dataclasses.replace(plan, **changes)
    program = lower(plan, profile)
    return program, profile, simulate(program, profile)


@settings(max_examples=25, deadline=None)
@given(small.graphs())
def test_sums_equal_the_measures_of_a_timeline_to_the_nanosecond(profile):
    program = lower(make_plan(profile, "sequential"), profile)
    timeline = simulate(program, profile)
    assert_equal_to_measures(timeline, time_sums(timeline, program, profile))


def assert_equal_to_measures(timeline, sums):
    compute = sums[:, : CLASSES.index("transfer")].sum(1)
    assert np.array_equal(np.column_stack([compute, sums[:, 4:]]), device_times(timeline))
    assert (sums.sum(1) == timeline.makespan_ns).all()
    total, shares = timeline.makespan_ns * timeline.num_ranks, measure(timeline)
    assert compute.sum() == round(shares.compute_share * total)
    assert sums[:, -1].sum() == round(shares.idle_share * total)


def test_recomputation_has_a_sum_of_its_own():
    program, profile, timeline = planned()
    ops = tuple(op.name for op in profile.graph.metaops)
    again, _, longer = planned(recompute=ops)
    plain, recomputed = time_sums(timeline, program, profile), time_sums(longer, again, profile)
    assert_equal_to_measures(longer, recomputed)
    place = CLASSES.index("recompute")
    assert plain[:, place].sum() == 0
    # Each layer is computed forward once more.
    assert recomputed[:, place].sum() == pytest.approx(recomputed[:, CLASSES.index("forward")].sum(), rel=1e-6)


@pytest.mark.parametrize("planner", ["sequential", "by hand", "paper"])
def test_what_a_span_waited_for_is_done_before_it_begins_and_nothing_it_needs_is_done_later(planner):
    program, _, timeline = planned(planner)
    needs = last_needs(timeline, program)
    instances = instances_of(program)
    waits = needs >= 0
    assert (timeline.end[needs[waits]] <= timeline.end[waits]).all()
    for source in range(instances.num_instances):
        followers = instances.followers[instances.follower_starts[source] : instances.follower_starts[source + 1]]
        assert (timeline.end[needs[followers]] >= timeline.end[source]).all()


def test_the_critical_path_leads_from_the_start_of_the_step_to_its_end():
    program, _, timeline = planned()
    path = critical_path(timeline, last_needs(timeline, program))
    assert timeline.end[path[-1]] == timeline.makespan_ns
    assert timeline.posted[path[0]] == 0
    assert (np.diff(timeline.end[path]) >= 0).all()


def report_of(*planners: str) -> StepReport:
    shown = []
    for planner in planners:
        program, profile, timeline = planned(planner)
        shown.append(ShownTimeline(name=planner, timeline=timeline, program=program, profile=profile))
    return StepReport(title="two tasks", timelines=tuple(shown))


def test_the_page_is_one_file_without_references_and_the_same_bytes_each_time():
    pages = [page_html("a <b> & c", step_page_data(report_of("sequential", "by hand"))) for _ in range(2)]
    assert pages[0] == pages[1]
    assert "<title>a &lt;b&gt; &amp; c</title>" in pages[0]
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!data:)", pages[0])
    assert "%%" not in pages[0].replace('id="data">', "")


def test_spans_of_the_page_stand_in_the_order_of_rows_and_point_to_what_they_waited_for():
    report = report_of("by hand")
    header, columns = unpack(step_page_data(report), "page")
    program, timeline = report.timelines[0].program, report.timelines[0].timeline
    rank, lane = columns["0.rank"], columns["0.lane"]
    end = np.cumsum(columns["0.gap"] + columns["0.duration"])
    start = end - columns["0.duration"]
    assert (np.diff(np.stack([rank, lane, start]).T @ [1 << 60, 1 << 50, 1]) >= 0).all()
    assert header["timelines"][0]["makespan"] == end.max() == timeline.makespan_ns
    needs = last_needs(timeline, program)
    waited = {
        (int(timeline.rank[span]), int(timeline.instruction[span])): int(timeline.end[need]) if need >= 0 else None
        for span, need in enumerate(needs.tolist())
    }
    for span, distance in enumerate(columns["0.after"].tolist()):
        expected = waited[int(rank[span]), int(columns["0.instruction"][span])]
        assert (int(end[span - distance]) if distance else None) == expected


def test_figures_are_well_formed_and_the_same_each_time():
    report = report_of("sequential", "by hand")
    for draw in (step_drawing, curves_drawing):
        assert figure_svg(draw(report)) == figure_svg(draw(report))
        assert figure_svg(draw(report)).startswith("<svg")
    assert "url(#hatch)" in figure_svg(step_drawing(report))


def test_a_png_has_the_colours_of_the_svg(tmp_path):
    pytest.importorskip("matplotlib", reason="no PNG without matplotlib")
    drawing = step_drawing(report_of("sequential", "by hand"))
    write_figure(tmp_path / "a.png", drawing)
    write_figure(tmp_path / "b.png", drawing)
    content = (tmp_path / "a.png").read_bytes()
    assert content == (tmp_path / "b.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (2 * drawing.width, 2 * drawing.height)
    from matplotlib.image import imread

    pixels = (imread(tmp_path / "a.png")[..., :3] * 255).round().astype(int)
    boxes = [shape for shape in drawing.shapes if isinstance(shape, Box) and shape.title and shape.width > 12]
    forward = [box for box in boxes if not box.hatched]
    assert len({box.fill for box in forward}) >= 3
    for box in forward:  # in the corner at the right, beside its label
        pixel = pixels[round(2 * (box.y + 3)), round(2 * (box.x + box.width - 3))]
        assert np.abs(pixel - [int(box.fill[place : place + 2], 16) for place in (1, 3, 5)]).max() <= 2


# Runs.


@pytest.fixture
def folder(tmp_path):
    program, profile, timeline = planned()
    late = dataclasses.replace(timeline, end=timeline.end + 1000, start=timeline.start + 500)
    write_run(tmp_path / "run", "a run", program, profile, timeline, {7: timeline, 9: late}, notices=("be careful",))
    lines = ['{"time": 1.5, "step": 0, "plan": "paper", "predicted_s": 0.5}']
    lines += [f'{{"time": 2.0, "step": {step}, "loss": {1 / (1 + step)}, "losses/a": 0.5}}' for step in range(3)]
    (tmp_path / "run/steps.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "run"


def test_a_run_is_read_back(folder):
    made = read_run(folder)
    assert list(made.measured) == [7, 9]
    assert [line["step"] for line in made.steps] == [0, 0, 1, 2]
    report = run_report({"run": made})
    assert [shown.name for shown in report.timelines] == ["predicted", "measured, step 9", "measured, step 7"]
    assert step_page_data(report) == step_page_data(run_report({"run": read_run(folder)}))
    both = run_report({"a": made, "b": made})
    assert [shown.name for shown in both.timelines][:2] == ["a: measured, step 9", "b: measured, step 9"]


def test_a_run_that_is_cut_off_anywhere_is_refused_in_a_sentence(folder, tmp_path):
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        whole_lines = path.name == "steps.jsonl"  # without its last lines it is the run of fewer steps
        for length in {0, 1, len(content) // 3, len(content) // 2, len(content) - 2}:
            if (whole_lines and content[:length].endswith((b"\n", b"}"))) or (whole_lines and not length):
                continue
            path.write_bytes(content[:length])
            with pytest.raises(InputError) as refusal:
                read_run(folder)
            assert "\n" not in str(refusal.value)
            assert path.name in str(refusal.value)
        path.unlink()
        if not whole_lines:
            with pytest.raises(InputError, match=re.escape(path.name)):
                read_run(folder)
        path.write_bytes(content)
    read_run(folder)


def test_the_command_writes_the_page_of_a_run_and_refuses_what_is_none(folder, tmp_path, capsys):
    for name in ("a.html", "b.html"):
        assert run(["report", str(folder), "-o", str(tmp_path / name)]) == 0
    shutil.copytree(folder, tmp_path / "other")
    assert run(["report", str(folder), str(tmp_path / "other"), "-o", str(tmp_path / "both.html")]) == 0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert run(["report", str(folder), "-o", str(tmp_path / "a.svg")]) == 0
    (tmp_path / "empty").mkdir()
    for arguments, reason in (
        ([str(tmp_path / "empty"), "-o", "x.html"], "is no run folder"),
        ([str(folder), str(folder), "-o", "x.html"], "given twice"),
        ([str(folder), "clip-4", "-o", "x.html"], "is no run folder"),
        ([str(folder), "-o", "x.pdf"], "ending in .html"),
        ([str(folder), "--devices", "4", "-o", "x.html"], "leave --devices"),
    ):
        capsys.readouterr()
        assert run(["report", *arguments]) == 2
        assert reason in capsys.readouterr().err


def test_the_command_compares_all_planners_of_a_graph(tmp_path):
    graph = tmp_path / "graph.json"
    graph.write_text(json.dumps(small.linear_graph(small.CASE_B, small.CASE_B_EDGES, 4)))
    page = tmp_path / "step.html"
    assert run(["report", str(graph), "--devices", "4", "--evaluations", "4", "-o", str(page)]) == 0
    assert page.stat().st_size < 400_000
    plans = [str(tmp_path / f"{planner}.json") for planner in ("sequential", "task-level")]
    for plan in plans:
        assert run(["plan", str(graph), "--devices", "4", "--planner", Path(plan).stem, "-o", plan]) == 0
    assert run(["report", str(graph), *plans, "-o", str(page)]) == 0


# The page's code.


def test_every_script_is_part_of_the_page():
    own = {path.name for path in PAGE.glob("*.js")} - {"uPlot.iife.min.js"}
    assert own == {*SCRIPTS, "live.js"}  # which only pages have that are served live


def test_the_pages_code_has_no_type_errors():
    """`tsc` reads the types in the comments of the scripts; without node and a registry there is none to run."""
    npx = shutil.which("npx")
    if npx is None:
        pytest.skip("there is no npx here, so the page's types are not checked")
    command = [npx, "--yes", "-p", "typescript@7.0.2", "tsc", "--noEmit", "-p", str(PAGE / "tsconfig.json")]
    try:
        checked = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        pytest.skip("npx cannot fetch typescript here, so the page's types are not checked")
    if checked.returncode and "error TS" not in checked.stdout:
        pytest.skip("npx cannot fetch typescript here, so the page's types are not checked")
    assert checked.returncode == 0, checked.stdout
