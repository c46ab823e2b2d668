"""Which of several plans is taken?"""

from __future__ import annotations

from dataclasses import replace

import small
from spindle.planners.build import fastest

PROFILE = small.two_towers()
PLAN = small.plan("vision*12@0-1 text*6@2-3\nhead*1@0-3", PROFILE)


def plan_of(makespan_s, folded_s):
    return replace(PLAN, makespan_s=makespan_s, folded_s=folded_s)


def test_of_steps_that_differ_by_a_nanosecond_the_one_with_less_folded_time_is_taken():
    first, second = plan_of(1.0, 1.12), plan_of(1.0 + 1e-9, 1.0)
    assert fastest([first, second], PROFILE) is fastest([second, first], PROFILE) is second


def test_a_shorter_step_is_taken_whatever_its_folded_time():
    first, second = plan_of(1.0, 1.12), plan_of(1.0 + 1e-4, 1.0)
    assert fastest([first, second], PROFILE) is fastest([second, first], PROFILE) is first


def test_a_sharded_optimizer_has_to_win_by_a_margin_where_times_were_measured():
    plain, sharded = plan_of(1.0, 1.0), replace(plan_of(0.95, 0.95), shard_optimizer=True)
    much = replace(sharded, makespan_s=0.85)
    measured = replace(PROFILE, measured_on="a machine")
    assert fastest([plain, sharded], PROFILE) is sharded
    assert fastest([plain, sharded], measured) is plain
    assert fastest([plain, much], measured) is much
