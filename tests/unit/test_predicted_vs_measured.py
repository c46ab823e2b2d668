"""Predicted and measured: a timeline that was changed by known amounts shows just these."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

import small
from spindle.errors import ProgramError
from spindle.planners import PlanOptions, make_plan
from spindle.program import Backward, Exchange, Forward, OptimizerStep, lower
from spindle.report.gantt import columns_for, timeline_chart
from spindle.report.predicted_vs_measured import compare_step, draw_steps, step_charts, step_tables
from spindle.simulate import simulate

TASKS = {"a": ["vision", "lm"], "b": ["text", "lm"]}


def world(tasks=TASKS, planner: str = "paper", num_devices: int = 4):
    """A program with weights and flows: its simulated timeline, the program, the graph."""
    profile = small.workload_profile(tasks, num_devices=num_devices, elements=40_000_000)
    program = lower(make_plan(profile, planner, PlanOptions(shard_optimizer=False)), profile)
    return simulate(program, profile), program, profile.graph


def many_waves(num_waves: int):
    """One op on all devices, one layer in each wave."""
    profile = small.linear_profile([("a", 8, num_waves, 1, 0.5), ("b", 8, 1, 1, 0.5)], num_devices=4)
    lines = [f"a*1@0-{3 - number % 2}" for number in range(num_waves)]
    program = lower(small.plan("\n".join([*lines, "b*1@0-3"]), profile), profile)
    return simulate(program, profile), program, profile.graph


def slower(timeline, factor: int):
    """Every time so many times as long after the start of the step."""
    return replace(timeline, posted=timeline.posted * factor, start=timeline.start * factor, end=timeline.end * factor)


def longer(timeline, chosen, factor: int):
    """Spans of chosen instructions so many times as long; none moves."""
    mine = np.array([chosen(instruction) for instruction in timeline.instructions])[timeline.instruction]
    end = np.where(mine, timeline.start + factor * (timeline.end - timeline.start), timeline.end)
    return replace(timeline, end=end)


def of_module(program, graph, module: str):
    def chosen(instruction) -> bool:
        computes = isinstance(instruction, Forward | Backward)
        return computes and graph.metaops[program.slots[instruction.slot].op].module == module

    return chosen


def shown(parts, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    for part in parts:
        console.print(part)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def pairs_of(row) -> dict:
    return {name: getattr(row, name) for name in row.__dataclass_fields__ if hasattr(getattr(row, name), "ratio")}


def all_pairs(both) -> list:
    return [pair for row in (both.totals, *both.modules, *both.waves) for pair in pairs_of(row).values()]


def test_a_step_compared_with_itself_differs_in_nothing():
    timeline, program, graph = world()
    both = compare_step(timeline, timeline, program, graph)
    assert both.totals.step.ratio == 1
    assert both.module_error == 0
    assert all(pair.difference_s == 0 for pair in all_pairs(both))


def test_where_all_takes_twice_as_long_every_ratio_is_two():
    timeline, program, graph = world()
    both = compare_step(timeline, slower(timeline, 2), program, graph)
    assert both.totals.step.ratio == pytest.approx(2)
    assert both.module_error == pytest.approx(1)
    ratios = [pair.ratio for pair in all_pairs(both) if pair.predicted_s]
    assert len(ratios) > 10
    assert ratios == pytest.approx([2] * len(ratios))


def test_the_parts_of_a_step_add_up_to_it():
    timeline, program, graph = world({"a": ["vision", "lm"], "b": ["text"]}, num_devices=3)
    totals = pairs_of(compare_step(timeline, slower(timeline, 3), program, graph).totals)
    step = totals.pop("step")
    assert totals.keys() == {"compute", "optimizer", "transfer", "sync", "idle"}
    assert sum(pair.predicted_s for pair in totals.values()) == pytest.approx(step.predicted_s)
    assert sum(pair.measured_s for pair in totals.values()) == pytest.approx(step.measured_s)
    assert step.predicted_s == pytest.approx(timeline.makespan_s)


def test_a_slow_module_is_the_only_one_whose_ratio_changes():
    timeline, program, graph = world()
    both = compare_step(timeline, longer(timeline, of_module(program, graph, "text"), 3), program, graph)
    ratios = {row.module: (row.forward.ratio, row.backward.ratio) for row in both.modules}
    assert ratios == {"vision": (1, 1), "lm": (1, 1), "text": (pytest.approx(3), pytest.approx(3))}


def test_the_error_of_modules_weighs_them_by_what_was_predicted():
    timeline, program, graph = world()
    both = compare_step(timeline, longer(timeline, of_module(program, graph, "text"), 3), program, graph)
    seconds = {row.module: row.both.predicted_s for row in both.modules}
    assert both.module_error == pytest.approx(2 * seconds["text"] / sum(seconds.values()))


def test_a_slow_optimizer_is_not_slow_compute():
    timeline, program, graph = world()
    both = compare_step(
        timeline, longer(timeline, lambda instruction: isinstance(instruction, OptimizerStep), 5), program, graph
    )
    assert both.totals.optimizer.ratio == pytest.approx(5)
    assert both.totals.compute.ratio == pytest.approx(1)
    assert both.totals.optimizer.predicted_s > 0


def test_device_seconds_of_modules_and_of_waves_are_the_compute_of_all_devices():
    timeline, program, graph = world()
    both = compare_step(timeline, slower(timeline, 2), program, graph)
    for rows in (both.modules, both.waves):
        assert sum(row.both.predicted_s for row in rows) == pytest.approx(4 * both.totals.compute.predicted_s)
        assert sum(row.both.measured_s for row in rows) == pytest.approx(4 * both.totals.compute.measured_s)


def test_a_wave_has_both_passes_of_its_slots_and_the_span_of_its_forward():
    profile = small.two_towers(4)
    program = lower(small.plan("vision*12@0-2 text*6@3\nhead*1@0-3", profile), profile)
    timeline = simulate(program, profile)
    last = [number for number, slot in enumerate(program.plan.slots) if slot.wave == 1]
    measured = longer(timeline, lambda instruction: isinstance(instruction, Backward) and instruction.slot in last, 4)
    towers, head = compare_step(timeline, measured, program, profile.graph).waves
    assert (towers.wave, head.wave) == (0, 1)
    assert (head.forward.ratio, head.backward.ratio) == (1, pytest.approx(4))
    assert (towers.forward.ratio, towers.backward.ratio) == (1, 1)
    # Forward is a third: vision takes 1 + 0.5 * 6 ms a layer on three devices, text 1 + 0.1 * 16 on one.
    assert towers.forward_start.predicted_s == 0
    assert towers.forward_end.predicted_s == pytest.approx(12 * 4e-3 / 3)
    assert towers.forward.predicted_s == pytest.approx((3 * 12 * 4e-3 + 6 * 2.6e-3) / 3)
    assert head.forward_start.predicted_s == pytest.approx(towers.forward_end.predicted_s)


def test_ops_without_a_module_are_called_by_their_task():
    profile = small.linear_profile(small.CASE_C, num_devices=16)
    program = lower(make_plan(profile, "paper"), profile)
    timeline = simulate(program, profile)
    both = compare_step(timeline, timeline, program, profile.graph)
    assert [row.module for row in both.modules] == ["t1", "t2", "t3", "t4"]


def test_a_timeline_of_another_program_is_refused():
    timeline, program, graph = world()
    cut = replace(timeline, instructions=timeline.instructions[:-1])
    with pytest.raises(ProgramError, match=r"the measured timeline is of another program: it has \d+ instructions"):
        compare_step(timeline, cut, program, graph)
    swapped = replace(timeline, instructions=(timeline.instructions[1], *timeline.instructions[1:]))
    with pytest.raises(ProgramError, match=r"the predicted timeline .* its instruction 0 is F1, expected F0"):
        compare_step(swapped, timeline, program, graph)
    with pytest.raises(ProgramError, match=r"the measured timeline is of 5 ranks, the program of 4"):
        compare_step(timeline, replace(timeline, num_ranks=5), program, graph)


def test_a_program_of_another_workload_is_refused():
    timeline, program, _ = world()
    with pytest.raises(ProgramError, match="made for another workload"):
        compare_step(timeline, timeline, program, small.two_towers(4).graph)


def test_a_timeline_that_lacks_a_rank_or_holds_two_steps_is_refused():
    timeline, program, graph = world()
    names = ("rank", "lane", "instruction", "posted", "start", "end", "bytes_at_start", "bytes_at_end")
    columns = {name: getattr(timeline, name) for name in names}
    lacking = replace(timeline, **{name: column[timeline.rank != 2] for name, column in columns.items()})
    with pytest.raises(ProgramError, match=r"on rank 2 it has 0 spans of F\d+, expected 1"):
        compare_step(timeline, lacking, program, graph)
    twice = replace(timeline, **{name: np.tile(column, 2) for name, column in columns.items()})
    with pytest.raises(ProgramError, match=r"on rank 0 it has 2 spans of F\d+, expected 1"):
        compare_step(timeline, twice, program, graph)


def test_spans_may_stand_in_any_order_and_carry_no_bytes():
    timeline, program, graph = world()
    order = np.random.default_rng(0).permutation(len(timeline.rank))
    columns = ("rank", "lane", "instruction", "posted", "start", "end")
    nothing = np.zeros_like(timeline.rank)
    measured = replace(
        timeline,
        **{name: getattr(timeline, name)[order] for name in columns},
        bytes_at_start=nothing,
        bytes_at_end=nothing,
        static_bytes=np.zeros_like(timeline.static_bytes),
    )
    assert compare_step(timeline, measured, program, graph) == compare_step(timeline, timeline, program, graph)


def test_a_transfer_noticed_late_is_waiting_and_not_compute():
    profile = small.workload_profile({"a": ["vision", "lm"]}, num_devices=4)
    vision, lm = (op.name for op in profile.graph.metaops)
    program = lower(small.plan(f"{vision}*4@0-1\n{lm}*4@2-3", profile), profile)
    timeline = simulate(program, profile)
    measured = longer(timeline, lambda instruction: isinstance(instruction, Exchange), 20)
    both = compare_step(timeline, measured, program, profile.graph)
    assert both.totals.compute.ratio == pytest.approx(1)
    waiting = both.totals.transfer + both.totals.sync + both.totals.idle
    assert waiting.ratio == pytest.approx(1)
    assert both.totals.transfer.ratio > 2
    assert both.module_error == 0


def test_where_nothing_was_predicted_or_measured_there_is_no_ratio_and_no_failure():
    timeline, program, graph = world()
    nothing = slower(timeline, 0)
    for predicted, measured in ((nothing, timeline), (timeline, nothing), (nothing, nothing)):
        both = compare_step(predicted, measured, program, graph)
        assert both.totals.step.ratio == (0 if predicted is timeline else None)
        assert both.module_error == (1 if predicted is timeline else None)
        assert "nan" not in shown(step_tables(both))
        charts = step_charts(predicted, measured, program, graph, 60)
        assert shown([draw_steps(charts, 4, 80)])


def test_a_module_that_was_not_predicted_does_not_spoil_the_error_of_the_others():
    timeline, program, graph = world()
    predicted = longer(timeline, of_module(program, graph, "text"), 0)
    both = compare_step(predicted, timeline, program, graph)
    assert both.module_error == 0
    text = next(row for row in both.modules if row.module == "text")
    assert text.forward.ratio is None
    assert re.search(r"text +0\.000 → [\d.]+ +- ", shown(step_tables(both)))


def test_the_tables_say_what_is_predicted_and_what_is_measured():
    timeline, program, graph = world()
    text = shown(step_tables(compare_step(timeline, slower(timeline, 2), program, graph)))
    step_ms = f"{timeline.makespan_s * 1e3:.1f}"
    assert re.search(rf"^step +{step_ms} ms predicted, [\d.]+ ms measured, ratio 2\.000$", text, re.MULTILINE)
    assert re.search(rf"^step +{step_ms} +[\d.]+ +\+{step_ms} +2\.000$", text, re.MULTILINE)
    assert "100.0 % off on average" in text
    for module in ("vision", "text", "lm"):
        assert re.search(rf"^{module} +[\d.]+ → [\d,.]+ +2\.000 +[\d,.]+ → [\d,.]+ +2\.000$", text, re.MULTILINE)


@pytest.mark.parametrize("factor", [1, 30, 1_000_000])
def test_tables_and_charts_fit_into_80_columns(factor):
    long_name = "a-module-with-a-name-that-is-longer-than-anyone-would-like"
    timeline, program, graph = world({"a": [long_name, "lm"], "b": ["text", "lm"]})
    measured = slower(timeline, factor)
    parts = step_tables(compare_step(timeline, measured, program, graph))
    wide = shown([*parts, draw_steps(step_charts(timeline, measured, program, graph, columns_for(80, 4)), 4, 80)], 200)
    assert max(len(line.rstrip()) for line in wide.splitlines()) <= 80
    # Only the long name is cut: nothing is lost at 80 columns that a wider terminal would show.
    assert shown(parts, 80).count("…") == shown(parts, 200).count("…") == 1


def test_of_many_waves_the_first_and_the_furthest_off_are_shown_and_the_others_counted():
    timeline, program, graph = many_waves(30)
    off = {12: 2, 20: 7, 25: 5}
    measured = timeline
    for wave, factor in off.items():
        slots = [number for number, slot in enumerate(program.plan.slots) if slot.wave == wave]
        measured = longer(
            measured,
            lambda instruction, slots=slots: isinstance(instruction, Forward) and instruction.slot in slots,
            factor,
        )
    both = compare_step(timeline, measured, program, graph)
    text = shown(step_tables(both))
    waves = [int(number) for number in re.findall(r"^ *(\d+)  [\d.]+ → ", text, re.MULTILINE)]
    assert len(both.waves) == 31
    assert len(waves) == 12
    assert waves == sorted(waves)
    assert {0, 1, 2, 3, 4, 5, *off} <= set(waves)
    assert "19 waves left out, at most 0 ms of device time off" in text


def test_a_dozen_waves_are_all_shown():
    timeline, program, graph = many_waves(11)
    text = shown(step_tables(compare_step(timeline, timeline, program, graph)))
    assert len(re.findall(r"^ *\d+  [\d.]+ → ", text, re.MULTILINE)) == 12
    assert "left out" not in text


def test_every_pair_has_its_ratio():
    timeline, program, graph = world()
    both = compare_step(timeline, slower(timeline, 2), program, graph)
    assert both.totals.step.measured_s == 2 * both.totals.step.predicted_s
    assert [module.module for module in both.modules] == ["vision", "lm", "text"]
    assert all(row.backward.ratio == 2 for row in (*both.modules, *both.waves))
    assert both.totals.step.ratio == both.module_error + 1 == 2


def test_both_charts_are_on_one_scale():
    timeline, program, graph = world()
    measured = slower(timeline, 2)
    predicted_chart, measured_chart = step_charts(timeline, measured, program, graph, 60)
    assert predicted_chart.end_s == measured_chart.end_s == pytest.approx(measured.makespan_s)
    assert measured_chart.rows == timeline_chart(measured, program, graph, 60).rows
    over = (-2,) * 30
    halves = timeline_chart(timeline, program, graph, 30).rows
    assert predicted_chart.rows == tuple((devices, row + over) for devices, row in halves)


def test_the_shorter_step_ends_in_blanks_and_the_legend_stands_once():
    timeline, program, graph = world()
    charts = step_charts(timeline, slower(timeline, 2), program, graph, columns_for(80, 4))
    text = shown([draw_steps(charts, 4, 80)])
    rows = [len(line.rstrip()) for line in re.findall(r"^ *[\d,-]+ [A-Za-z].*$", text, re.MULTILINE)]
    half = len(rows) // 2
    label = 80 - columns_for(80, 4) - 1
    assert text.index("predicted") < text.index("measured")
    assert all(short - label <= 0.51 * (long - label) for short, long in zip(rows[:half], rows[half:], strict=True))
    assert text.count("^ optimizer") == 1


def test_a_chart_that_ends_with_its_step_is_the_chart_without_an_end():
    timeline, program, graph = world()
    plain = timeline_chart(timeline, program, graph, 72)
    assert plain == timeline_chart(timeline, program, graph, 72, timeline.makespan_ns)
    assert all(mark >= -1 for _, row in plain.rows for mark in row)
