"""The host of a rank launches its passes one after the other, and holds up a GPU that is faster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import small
from spindle.errors import ProfileError
from spindle.plan import parse_plan
from spindle.planners import make_plan
from spindle.profile import HostOverhead, abstract_profile, read_profile, write_profile
from spindle.program import Backward, Forward, lower
from spindle.simulate import simulate

NOTHING = HostOverhead(
    step_s=0,
    task_s=0,
    pass_s=0,
    send_s=0,
    receive_s=0,
    collective_start_s=0,
    collective_finish_s=0,
    optimizer_s=0,
    ahead=10**6,
)


def profile_of(num_devices, forward_s=1e-6, backward_s=1e-6):
    """Two ops of one layer, the second behind the first."""
    times = {"layers": 1, "forward_s": {"1": forward_s}, "backward_s": {"1": backward_s}}
    graph = {"ops": [{"name": name, **times} for name in "ab"], "edges": [["a", "b"]]}
    return abstract_profile(graph, small.devices(num_devices))


def passes(profile, host, text):
    """(rank, start, end) of passes in seconds, in the order of their starts."""
    profile = replace(profile, host=host)
    timeline = simulate(lower(parse_plan(text, profile), profile), profile)
    numbers = [
        number
        for number, instruction in enumerate(timeline.instructions)
        if isinstance(instruction, Forward | Backward)
    ]
    rows = np.flatnonzero(np.isin(timeline.instruction, numbers))
    return [
        (int(timeline.rank[row]), timeline.start[row] / 1e9, timeline.end[row] / 1e9)
        for row in rows[np.argsort(timeline.start[rows])]
    ]


@given(small.graphs(), st.sampled_from(["wavefront", "sequential", "distmm"]))
def test_a_host_without_overhead_changes_nothing(profile, planner):
    program = lower(make_plan(profile, planner), profile)
    expected, actual = simulate(program, profile), simulate(program, replace(profile, host=NOTHING))
    assert actual.start.tolist() == expected.start.tolist()
    assert actual.end.tolist() == expected.end.tolist()


@given(small.graphs(), st.integers(1, 4))
def test_overhead_makes_no_step_shorter(profile, ahead):
    program = lower(make_plan(profile, "sequential"), profile)
    overheads = [0.0, 1e-4, 1e-3]
    steps_ns = [
        simulate(
            program, replace(profile, host=replace(NOTHING, pass_s=overhead, send_s=overhead, ahead=ahead))
        ).makespan_ns
        for overhead in overheads
    ]
    assert sorted(steps_ns) == steps_ns


def test_short_passes_start_as_fast_as_the_host_launches_them():
    host = replace(NOTHING, step_s=0.5, task_s=0.25, pass_s=0.1)
    begin = 0.5 + 0.25  # both ops are of one task
    starts = [start for _, start, _ in passes(profile_of(1), host, "a*1@0 \nb*1@0")]
    assert starts == pytest.approx([begin + 0.1, begin + 0.2, begin + 0.3, begin + 0.4])


@pytest.mark.parametrize(("ahead", "start"), [(1, 1.2), (2, 1.1)])
def test_a_host_stays_only_so_far_ahead_of_its_gpu(ahead, start):
    host = replace(NOTHING, pass_s=0.1, ahead=ahead)
    timed = passes(profile_of(1, 1.0, 1.0), host, "a*1@0 \nb*1@0")
    assert [start_s for _, start_s, _ in timed][:2] == pytest.approx([0.1, start])


def test_a_host_launches_behind_the_message_that_a_pass_needs():
    profile = profile_of(2)
    host = replace(NOTHING, pass_s=0.1, send_s=1.0, receive_s=0.4)
    (_, begin, _), (rank, start, _), *_ = passes(profile, host, "a*1@0 \nb*1@1")
    assert rank == 1
    assert start == pytest.approx(begin + 1.0 + 0.4 + 0.1, abs=1e-3)  # posted, received, launched


def test_what_a_pass_sends_is_launched_before_the_next_one():
    text = "a*1@0 \nb*1@1"
    without, actual = (
        passes(profile_of(2), replace(NOTHING, pass_s=0.1, send_s=send_s), text) for send_s in (0.0, 1.0)
    )
    assert [rank for rank, *_ in actual] == [0, 1, 1, 0]
    assert actual[2][1] == pytest.approx(without[2][1] + 1.0, abs=1e-3)  # a posts its output, which b waits for
    assert actual[3][1] == pytest.approx(without[3][1] + 2.0, abs=1e-3)  # and b its gradient


def test_a_host_posts_what_it_sends_before_it_waits_for_the_next_message():
    host = replace(NOTHING, pass_s=0.1, send_s=1.0, receive_s=0.4)
    *_, (rank, start, _) = passes(profile_of(2), host, "a*1@0 \nb*1@1")
    # Posting takes 1.0 on each rank, one after the other; rank 0 has posted long before the gradient comes back.
    assert (rank, start) == (0, pytest.approx(0.1 + 1.0 + 0.5 + 0.1 + 1.0 + 0.5, abs=1e-3))


def test_a_pass_that_is_launch_bound_delays_the_next():
    profile = profile_of(1)
    launched = tuple((replace(curve, launch_s=(0.5, 2.0)),) for (curve,) in profile.curves)
    starts = [
        start
        for _, start, _ in passes(replace(profile, curves=launched), replace(NOTHING, pass_s=0.1), "a*1@0 \nb*1@0")
    ]
    # A pass starts when its first kernel is launched; the next one waits until the last is.
    assert starts == pytest.approx([0.1, 0.7, 1.3, 3.4])


def test_host_overheads_are_in_the_file_of_a_profile(tmp_path):
    profile = replace(small.two_towers(), host=replace(NOTHING, pass_s=0.25))
    write_profile(tmp_path / "profile.json", profile)
    assert read_profile(tmp_path / "profile.json").host == profile.host


def test_no_overhead_is_negative():
    with pytest.raises(ProfileError, match="must not be negative"):
        replace(NOTHING, send_s=-1.0)
