"""Timelines on disk: read back as they were, small, the same bytes each time, refused in a sentence where cut off."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import small
from spindle.errors import InputError
from spindle.program import code, instruction_of_code, lower
from spindle.report import trace_of, write_trace
from spindle.simulate import simulate
from spindle.timeline import pack, read_timeline, unpack, write_timeline
from spindle.timeline.file import timeline_bytes, timeline_from_bytes

COLUMNS = ("rank", "lane", "instruction", "posted", "start", "end", "bytes_at_start", "bytes_at_end", "static_bytes")


@pytest.fixture(scope="module")
def simulated():
    profile = small.workload_profile(small.TWO_TASKS)
    program = lower(small.crossing_plan(profile), profile)
    return program, simulate(program, profile)


def test_a_timeline_is_read_back_as_it_was_written(simulated, tmp_path):
    _, timeline = simulated
    write_timeline(tmp_path / "a.timeline.gz", timeline)
    again = read_timeline(tmp_path / "a.timeline.gz")
    assert again.instructions == timeline.instructions
    assert again.num_ranks == timeline.num_ranks
    for name in COLUMNS:
        assert np.array_equal(getattr(again, name), getattr(timeline, name)), name
    write_timeline(tmp_path / "b.timeline.gz", again)
    assert (tmp_path / "a.timeline.gz").read_bytes() == (tmp_path / "b.timeline.gz").read_bytes()


def test_it_takes_a_small_part_of_the_bytes_of_a_trace(simulated):
    program, timeline = simulated
    assert len(timeline_bytes(timeline)) < len(trace_of(timeline, program)) / 20


def test_a_file_that_is_cut_off_anywhere_is_refused_in_a_sentence(simulated):
    data = timeline_bytes(simulated[1])
    for length in range(len(data)):
        with pytest.raises(InputError, match=r"^a.gz: .*(empty|cut off|not a gzip)") as refusal:
            timeline_from_bytes(data[:length], "a.gz")
        assert "\n" not in str(refusal.value)


def test_a_file_with_a_changed_byte_is_refused_or_the_same(simulated):
    data = timeline_bytes(simulated[1])
    for place in range(0, len(data), 7):
        changed = data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :]
        try:
            again = timeline_from_bytes(changed, "a.gz")
        except InputError as error:
            assert "\n" not in str(error)  # noqa: PT017
        else:
            assert np.array_equal(again.end, simulated[1].end)  # a byte of gzip's header that says nothing


@pytest.mark.parametrize(
    ("header", "columns", "reason"),
    [
        ({"spindle": "plan"}, {}, "expected a Spindle timeline"),
        ({"spindle": "timeline", "version": 2}, {}, "reads version 1"),
        ({"spindle": "timeline", "version": 1}, {}, "the column 'rank' is missing"),
    ],
)
def test_other_files_are_refused_by_what_they_are(header, columns, reason):
    with pytest.raises(InputError, match=reason):
        timeline_from_bytes(pack(header, columns), "a.gz")


def test_spans_outside_of_the_step_are_refused(simulated):
    header, columns = unpack(timeline_bytes(simulated[1]), "a")
    for name, value, reason in (("rank", 99, "a rank lies outside"), ("duration", -1, "ends before it starts")):
        wrong = columns[name].copy()
        wrong[0] = value
        with pytest.raises(InputError, match=reason):
            timeline_from_bytes(pack(header, {**columns, name: wrong}), "a")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(1 << 61), 1 << 61), max_size=30))
def test_columns_of_any_whole_numbers_are_read_back(values):
    _, columns = unpack(pack({}, {"a": np.array(values, dtype=np.int64)}), "a")
    assert columns["a"].tolist() == values


def test_every_instruction_has_a_short_name_that_gives_it_back(simulated):
    for instruction in simulated[0].instructions:
        assert instruction_of_code(code(instruction)) == instruction
    for word in ("", "F", "Q1", "B1", "F1[0:2]", "U1", "F٣"):
        with pytest.raises(ValueError, match="is not an instruction"):
            instruction_of_code(word)


def test_a_trace_has_an_arrow_from_each_sender_to_its_receiver(simulated, tmp_path):
    program, timeline = simulated
    write_trace(tmp_path / "trace.json.gz", timeline, program)
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    messages = sum(len(link.forward.source) + len(link.backward.source) for link in program.links)
    assert len(starts) == len(ends) == messages > 0
    assert starts.keys() == ends.keys()
    sent = [(starts[number]["pid"], ends[number]["pid"]) for number in starts]
    flows = [flow for link in program.links for flow in (link.forward, link.backward)]
    expected = [pair for flow in flows for pair in zip(flow.source.tolist(), flow.destination.tolist(), strict=True)]
    assert sorted(sent) == sorted(expected)
    assert all(starts[number]["ts"] <= ends[number]["ts"] for number in starts)
