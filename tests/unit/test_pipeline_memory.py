"""What is planned fits: bytes that are in flight between the ranks of a pipeline are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spindle.planners import PlanOptions, pipeline_layout, search_pipeline
from spindle.program import lower, posted_peaks
from spindle.simulate import simulate
from test_pipeline_plans import batch

IMAGES = (24, 40, 12, 30, 12, 19, 0, 44)


def peaks_of(profile, **options):
    plan, _ = search_pipeline(profile, PlanOptions(evaluations=20, **options))
    program = lower(plan, profile)
    simulated = simulate(program, profile).peak_bytes()
    return simulated, posted_peaks(program, profile, range(profile.cluster.num_devices))


@pytest.mark.parametrize("sends_stay", [False, True])
def test_receive_buffers_outputs_and_gradients_that_are_sent_are_counted(sends_stay):
    profile = replace(batch(IMAGES, saved_bytes=1e6), sends_stay=sends_stay)
    simulated, posted = peaks_of(profile, pipeline_ranks=4)
    assert (posted > simulated).all()


@pytest.mark.parametrize("sends_stay", [False, True])
def test_a_plan_fits_with_all_that_the_runtime_holds(sends_stay):
    free = replace(batch(IMAGES, saved_bytes=1e6), sends_stay=sends_stay)
    layout = pipeline_layout(free, 4)
    limit = int(0.6 * peaks_of(free, layouts=(layout,))[1].max())
    tight = replace(free, cluster=free.cluster.with_memory(limit))
    for peaks in peaks_of(tight, layouts=(layout,)):
        assert peaks.max() <= limit


def test_a_small_device_is_used_nearly_whole():
    # Budgets shrink by what is too much and by a share of the memory, not by megabytes that a small device lacks.
    free = batch(IMAGES, saved_bytes=1e4)
    layout = pipeline_layout(free, 4)
    limit = int(0.8 * peaks_of(free, layouts=(layout,))[1].max())
    tight = replace(free, cluster=free.cluster.with_memory(limit))
    assert peaks_of(tight, layouts=(layout,))[1].max() > 0.6 * limit
