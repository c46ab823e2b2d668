"""Whatever cuts a run and changes before it goes on, it has the numbers of one that was not cut.

SPINDLE_ALL_CASES=1 tries many more examples."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resuming import LOADERS, Run, drop_newest, error, run
from sweeps import RUNS_ALL

STEPS = 7


@st.composite
def starts(draw):
    """One start of the script: on how many ranks, under which plan. `left` may have tensor parallel blocks."""
    num_ranks = draw(st.integers(1, 6 if RUNS_ALL else 3))
    degree = draw(st.sampled_from([degree for degree in (1, 2) if num_ranks % degree == 0]))
    planning = {"tensor_parallel_degrees": {"left": degree}, "shard_optimizer": draw(st.booleans())}
    if degree == 1 and draw(st.booleans()):
        planning = {"planner": draw(st.sampled_from(("pipeline", "sequential")))}
    return num_ranks, planning


@settings(
    max_examples=60 if RUNS_ALL else 3,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    saved=starts(),
    resumed=starts(),
    loaders=st.lists(st.sampled_from(list(LOADERS)), min_size=2, max_size=3, unique=True),
    accumulated=st.integers(1, 3),
    ends_at=st.sampled_from((None, 1, 3)),
)
def test_a_resumed_run_has_the_numbers_of_one_that_was_not_cut(
    pool, tmp_path_factory, saved, resumed, loaders, accumulated, ends_at
):
    folder, whole = tmp_path_factory.mktemp("cut"), tmp_path_factory.mktemp("whole")
    script = {"loaders": tuple(loaders), "accumulated": accumulated, "ends_at": ends_at, "splits": True}
    (expected,) = pool.run(1, run, Run(steps=STEPS, folder=str(whole), **script))
    pool.run(saved[0], run, Run(steps=5, folder=str(folder), planning=saved[1], **script))
    assert drop_newest(folder) == 4
    for ran in pool.run(resumed[0], run, Run(steps=STEPS, folder=str(folder), planning=resumed[1], **script)):
        assert len(ran.losses) == STEPS - 4
        assert error(ran, expected) < 1e-9
