"""What people are shown: charts, figures, tables and explanations say what the plan says."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

import small
from spindle.display import count_of, duration, large, listed, num_bytes, seconds
from spindle.errors import InputError
from spindle.plan import forward_spans
from spindle.planners import graph_bound_s, make_plan
from spindle.profile import abstract_profile
from spindle.program import lower
from spindle.report.bound import bound_report, limit_sentences
from spindle.report.compare import ComparedPlan, RefusedPlan, compared
from spindle.report.drawing import figure_svg
from spindle.report.explain import explain, sentences
from spindle.report.figure import step_figure
from spindle.report.gantt import columns_for, draw, plan_chart, ticks, timeline_chart
from spindle.report.palette import palette_of
from spindle.report.table import bound_facts, comparison_table, refusal_lines
from spindle.report.trace import trace_of
from spindle.simulate import simulate

SVG = "{http://www.w3.org/2000/svg}"


def shown(renderable, width: int = 80, colour: bool = False) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        no_color=not colour,
    )
    console.print(renderable)
    return console.file.getvalue()


def drawn(plan, profile, width: int = 80) -> str:
    chart = plan_chart(plan, profile, columns_for(width, plan.num_devices))
    return shown(draw(chart, plan.num_devices, width), width)


def rows_of(chart_text: str) -> dict[str, str]:
    return dict(re.findall(r"^ *([\d,+-]+) ([A-Za-z·>=^]+)$", chart_text, flags=re.MULTILINE))


def test_the_gantt_shows_who_runs_where():
    profile = small.two_towers(4)
    plan = small.plan("vision*12@0-2 text*6@3\nhead*1@0-3", profile)
    rows = rows_of(drawn(plan, profile))
    assert rows.keys() == {"0-2", "3"}
    assert re.fullmatch(r"A+C+", rows["0-2"])
    assert re.fullmatch(r"B+·+C+", rows["3"])


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_gantt_keeps_to_its_width_and_shows_every_op(width):
    profile = small.linear_profile(small.CASE_C, num_devices=16)
    text = drawn(make_plan(profile, "paper"), profile, width)
    cells = "".join(rows_of(text).values())
    assert all(len(line) <= width for line in text.splitlines())
    assert set("ABCDEFGH") <= set(cells)
    for name, *_ in small.CASE_C:
        assert name in text


def test_an_op_too_short_for_a_column_still_shows_once():
    graph = small.linear_graph([("long", 4, 1000, 1, 1), ("short", 4, 1, 0.01, 0.001)], num_devices=4)
    profile = abstract_profile(graph, small.devices(4))
    plan = small.plan("short*1@0-3\nlong*1000@0-3", profile)
    assert rows_of(drawn(plan, profile))["0-3"].startswith("BA")


def test_hundreds_of_devices_that_do_the_same_are_one_row():
    profile = small.linear_profile([("a", 1024, 8, 1, 0.1), ("b", 1024, 8, 1, 0.1)], num_devices=600)
    plan = small.plan("a*8@0-299 b*8@300-599", profile)
    assert rows_of(drawn(plan, profile)).keys() == {"0-299", "300-599"}


def test_too_many_different_rows_are_counted_not_drawn():
    ops = [(f"op{number}", 1, number + 1, 1, 0.1) for number in range(50)]
    profile = small.linear_profile(ops, num_devices=50)
    plan = small.plan(" ".join(f"op{number}*{number + 1}@{number}" for number in range(50)), profile)
    assert "10 devices in 10 more rows" in drawn(plan, profile, width=120)


def test_a_step_shows_forward_in_capitals_and_backward_in_small_letters():
    profile = small.two_towers(4)
    program = lower(small.plan("vision*12@0-2 text*6@3\nhead*1@0-3", profile), profile)
    chart = timeline_chart(simulate(program, profile), program, profile.graph, 72)
    rows = rows_of(shown(draw(chart, 4, 80)))
    assert re.fullmatch(r"A+C+c+a+", rows["0-2"])
    assert re.fullmatch(r"B+·+C+c+b+·*", rows["3"])


def test_a_step_shows_the_optimizer_and_what_moves():
    profile = small.workload_profile({"a": ["vision", "lm"]}, num_devices=4, elements=400_000_000)
    program = lower(make_plan(profile, "sequential"), profile)
    chart = timeline_chart(simulate(program, profile), program, profile.graph, 72)
    text = shown(draw(chart, 4, 80))
    assert "^ optimizer" in text
    assert "= synchronise gradients" in text


def test_with_colour_a_block_has_its_letter_once_and_without_everywhere():
    profile = small.two_towers(4)
    plan = small.plan("vision*12@0-3\ntext*6@0-3\nhead*1@0-3", profile)
    chart = plan_chart(plan, profile, 72)
    coloured = shown(draw(chart, 4, 80, in_colour=True), colour=True)
    plain = shown(draw(chart, 4, 80))
    assert "\x1b[" in coloured
    assert "\x1b[" not in plain
    assert coloured.count("A") == 2  # the block and the legend
    assert plain.count("A") > 20


def test_ops_of_one_module_share_a_colour_and_have_letters_of_their_own():
    profile = small.workload_profile({"a": ["vision", "lm"], "b": ["text", "lm"]})
    palette = palette_of(profile.graph)
    by_module = {}
    for op, colour in zip(profile.graph.metaops, palette.colours, strict=True):
        by_module.setdefault(op.module, set()).add(colour)
    assert all(len(colours) == 1 for colours in by_module.values())
    assert len(set.union(*by_module.values())) == 3
    assert len(set(palette.letters)) == len(profile.graph.metaops)


def test_more_ops_than_letters_share_them_by_module():
    tasks = {f"t{number}": ["vision", "lm"] for number in range(40)}
    palette = palette_of(small.workload_profile(tasks).graph)
    assert set(zip(palette.letters, palette.labels, strict=True)) == {("A", "vision"), ("B", "lm")}


def test_the_axis_has_round_numbers_from_zero():
    for end_s in (3e-7, 0.0042, 0.2419, 7.3, 912.0):
        marks, _, factor = ticks(end_s, 6)
        assert marks[0] == 0
        assert 2 <= len(marks) <= 8
        assert marks[-1] / factor <= end_s * (1 + 1e-9)


def test_the_figure_is_well_formed_and_names_every_module():
    profile = small.workload_profile({"a": ["vision", "lm"], "b": ["text", "lm"]})
    panels = [("One module at a time", make_plan(profile, "sequential")), ("In waves", make_plan(profile, "paper"))]
    root = ElementTree.fromstring(figure_svg(step_figure(profile, panels)))
    words = {element.text for element in root.iter(f"{SVG}text")}
    assert {"vision", "text", "lm", "idle", "One module at a time", "In waves"} <= words


def test_the_figure_gives_a_module_the_same_colour_in_both_panels():
    profile = small.two_towers(4)
    panels = [("one", make_plan(profile, "sequential")), ("two", make_plan(profile, "paper"))]
    root = ElementTree.fromstring(figure_svg(step_figure(profile, panels)))
    colours = {}
    for group in root.iter(f"{SVG}g"):
        op = group.find(f"{SVG}title").text.split(",")[0]
        colours.setdefault(op, set()).update(rectangle.get("fill") for rectangle in group.iter(f"{SVG}rect"))
    assert colours.keys() == {"vision", "text", "head"}
    assert all(len(used) == 1 for used in colours.values())
    assert len(set.union(*colours.values())) == 3


def test_the_area_of_the_figures_blocks_is_the_work_of_the_plan():
    profile = small.two_towers(4)
    plan = make_plan(profile, "paper")
    root = ElementTree.fromstring(figure_svg(step_figure(profile, [("one", plan)])))
    blocks = [rectangle for group in root.iter(f"{SVG}g") for rectangle in group.iter(f"{SVG}rect")]
    area = sum(float(block.get("width")) * float(block.get("height")) for block in blocks)
    whole = next(rect for rect in root.iter(f"{SVG}rect") if rect.get("fill") == "#e5e7eb")
    slots = zip(plan.slots, forward_spans(plan, profile), strict=True)
    planned = sum(len(slot.devices) * (span.end_s - span.start_s) for slot, span in slots) / (4 * plan.folded_s)
    assert area / (float(whole.get("width")) * float(whole.get("height"))) == pytest.approx(planned, rel=1e-2)


def test_odd_names_do_not_break_the_figure():
    graph = small.linear_graph([("a<b>&'\"", 4, 2, 1, 1), ("ünï", 4, 2, 1, 1)], num_devices=2)
    profile = abstract_profile(graph, small.devices(2))
    root = ElementTree.fromstring(figure_svg(step_figure(profile, [("x & y", make_plan(profile, "sequential"))])))
    assert "a<b>&'\"" in {element.text for element in root.iter(f"{SVG}text")}


def test_work_that_splits_without_loss_is_limited_by_area():
    graph = {"ops": [{"name": name, "layers": 8, "time_s": {str(n): 0.12 / n for n in range(1, 5)}} for name in "ab"]}
    report = bound_report(abstract_profile(graph, small.devices(4)))
    assert report.limit == "area"
    assert report.lp_s == pytest.approx(2 * 8 * 0.12 / 4)


def test_a_chain_that_does_not_split_is_limited_by_its_path():
    ops = [{"name": name, "layers": 8, "time_s": {"1": 0.1}} for name in "abc"]
    report = bound_report(abstract_profile({"ops": ops, "edges": [["a", "b"]]}, small.devices(4)))
    assert report.limit == "path"
    assert report.path == ("a", "b")
    assert report.lp_s == pytest.approx(2 * 8 * 0.1)
    assert "a → b" in limit_sentences(report)[0]


def test_a_chain_of_launches_is_limited_by_its_path_though_more_devices_make_it_a_little_shorter():
    ops = [{"name": name, "layers": 8, "time_s": {"1": 0.100001, "4": 0.1}} for name in "abc"]
    report = bound_report(abstract_profile({"ops": ops, "edges": [["a", "b"]]}, small.devices(4)))
    assert report.path_s < report.lp_s
    assert report.limit == "path"


def test_the_bound_that_is_explained_is_the_bound_of_plans():
    for profile in (small.two_towers(4), small.workload_profile({"a": ["vision", "lm"], "b": ["text", "lm"]})):
        report = bound_report(profile)
        assert report.lp_s == pytest.approx(graph_bound_s(profile), rel=1e-9)
        assert max(report.area_s, report.path_s) <= report.lp_s * (1 + 1e-9)


def test_the_comparison_is_sorted_and_measured_against_sequential():
    profile = small.two_towers(4)
    plans = [make_plan(profile, planner) for planner in ("sequential", "paper", "task-level")]
    made = [(plan, profile) for plan in plans]
    comparison = compared(made, profile, {"distmm": "it does not fit"}, reference="sequential")
    assert [row.makespan_s for row in comparison.plans] == sorted(row.makespan_s for row in comparison.plans)
    slow = next(row for row in comparison.plans if row.planner == "sequential")
    assert all(row.speedup == pytest.approx(slow.makespan_s / row.makespan_s) for row in comparison.plans)
    assert isinstance(comparison.rows[-1], RefusedPlan)
    assert "distmm has no plan: it does not fit" in shown(refusal_lines(comparison)[0])
    assert "distmm" in shown(comparison_table(comparison, profile, "sequential"))


def test_without_sequential_there_is_no_speedup():
    profile = small.two_towers(4)
    (row,) = compared([(make_plan(profile, "paper"), profile)], profile, {}, reference="sequential").rows
    assert isinstance(row, ComparedPlan)
    assert row.speedup is None


def test_an_explanation_tells_what_a_slot_waited_for():
    profile = small.two_towers(4)
    plan = small.plan("vision*12@0-2 text*6@3\nhead*1@0-3", profile)
    stories = {explanation.op: explanation.slots[0].waited_for for explanation in explain(plan, profile)}
    assert stories["vision"] == stories["text"] == "the start of the step"
    assert stories["head"] == "its input from vision on 0-2"
    plan = small.plan("vision*12@0-3\ntext*6@2-3\nhead*1@0-3", profile)
    assert explain(plan, profile, "text")[0].slots[0].waited_for == "vision to leave devices 2-3"


def test_an_explanation_shows_the_curve_around_the_choice():
    profile = small.two_towers(4)
    (explanation,) = explain(small.plan("vision*12@0-1 text*6@3\nhead*1@0-3", profile), profile, "vision")
    assert [(point.num_devices, point.chosen) for point in explanation.curve] == [
        (1, False),
        (2, True),
        (3, False),
        (4, False),
    ]
    assert explanation.curve[0].efficiency == 1
    assert explanation.curve[1].efficiency == pytest.approx(
        9 / (2 * 5)
    )  # 1 + 0.5 * 16 ms on one device, 1 + 0.5 * 8 on two
    assert explanation.slots[0].beside == (("text", 1),)
    assert sum(layers for _, layers in explanation.bound_mix) == pytest.approx(12)


def test_an_explanation_counts_the_bytes_that_move_and_those_that_stay():
    profile = small.workload_profile({"a": ["vision", "lm"]}, num_devices=4)
    names = [op.name for op in profile.graph.metaops]
    plan = small.plan(f"{names[0]}*4@0-1\n{names[1]}*4@0-3", profile)
    (explanation,) = explain(plan, profile, names[1])
    (inflow,) = explanation.inflows
    # Rows in quarters: of those that devices 0 and 1 hold, only the first quarter is where it is needed.
    assert inflow.kept_bytes / (inflow.kept_bytes + inflow.moved_bytes) == pytest.approx(1 / 4)


def test_an_explanation_names_those_who_share_weights():
    profile = small.workload_profile({"a": ["vision", "lm"], "b": ["text", "lm"]}, num_devices=4)
    explanations = explain(make_plan(profile, "sequential"), profile, "lm")
    first, second = explanations
    assert first.shared_weights[0].with_ops == (second.op,)
    assert first.shared_weights[0].num_devices == 4
    assert any(
        f"with {second.op}; their gradients are synchronised over 4 devices" in text for text in sentences(first)
    )


def test_an_unknown_op_cannot_be_explained():
    profile = small.two_towers(4)
    with pytest.raises(InputError, match=r"'tower'; ops: vision, text, head"):
        explain(make_plan(profile, "paper"), profile, "tower")


def test_a_trace_has_a_span_for_every_instruction():
    profile = small.workload_profile({"a": ["vision", "lm"], "b": ["text", "lm"]})
    program = lower(make_plan(profile, "paper"), profile)
    events = json.loads(trace_of(simulate(program, profile), program))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == program.num_instructions


def test_quantities_read_well():
    assert [seconds(value) for value in (0, 0.0123, 0.4123, 1.5, 250, 2e-6)] == [
        "0 ms",
        "12.30 ms",
        "412.3 ms",
        "1,500 ms",
        "250.0 s",
        "2.000 µs",
    ]
    times_s = (5, 119, 600, 5 * 3600, 50 * 3600, 217_146_541)
    assert [duration(value) for value in times_s] == ["5 s", "119 s", "10 minutes", "5 hours", "2 days", "6.9 years"]
    assert [num_bytes(value) for value in (12, 3 << 20, 5 << 30)] == ["12 B", "3.0 MiB", "5.0 GiB"]
    assert [count_of(1, "device"), count_of(2, "device")] == ["1 device", "2 devices"]
    assert large(1.19e9) == "1.19B"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(list("abcdefgh"), at_most=3) == "a, b and 6 more"


def test_equal_pieces_of_an_op_are_counted_not_repeated():
    profile = small.two_towers(4)
    plan = small.plan("vision*3@0-2\nvision*3@0-2\nvision*6@0-1 text*6@3\nhead*1@0-3", profile)
    (explanation,) = explain(plan, profile, "vision")
    assert any(
        "this plan runs 2 × 3 layers on 3 devices and 6 layers on 2 devices." in text for text in sentences(explanation)
    )


def test_inputs_that_are_alike_are_shown_in_one_line():
    profile = small.two_towers(4)
    (explanation,) = explain(small.plan("vision*12@0-2 text*6@3\nhead*1@0-3", profile), profile, "head")
    lines = [text for text in sentences(explanation) if "takes its input" in text]
    assert len(lines) == 1
    assert re.fullmatch(r"Layer 0 takes its input from (vision and text|text and vision); .*", lines[0])


def test_a_bound_of_one_level_is_shown_once():
    single = {"ops": [{"name": "a", "layers": 2, "time_s": {"1": 0.1, "2": 0.06}}]}
    assert "120.0 ms, of its only level" in shown(bound_facts(bound_report(abstract_profile(single, small.devices(2)))))
    report = bound_report(small.two_towers(4))
    assert re.search(r"= [\d.]+ \+ [\d.]+ ms, level by level", shown(bound_facts(report)))
    assert f"on {report.cluster}" in shown(bound_facts(report))
