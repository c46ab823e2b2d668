"""Runs that are cut and started again, on as many processes or others, have the numbers of one that was not cut."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from backends import on_gpu
from resuming import LOADERS, Run, drop_newest, error, run
from sweeps import chosen

STEPS = 7
SHARDED, WHOLE = {"shard_optimizer": True}, {"shard_optimizer": False}
ITERATED = ("iterable", "generator", "list", "dataset")


@pytest.fixture(scope="module")
def undisturbed(pool):
    """Uninterrupted runs on one process, by what matters to their numbers."""
    known = {}

    def of(**options):
        key = repr(sorted(options.items()))
        if key not in known:
            (known[key],) = pool.run(1, run, Run(steps=STEPS, **options))
        return known[key]

    return of


def test_on_as_many_ranks_with_the_saved_plan_a_resumed_run_is_the_same_bit_for_bit(pool, tmp_path):
    whole = pool.run(3, run, Run(steps=STEPS, planning=SHARDED))
    pool.run(3, run, Run(steps=5, folder=str(tmp_path), planning=SHARDED))
    assert drop_newest(tmp_path) == 4
    resumed = pool.run(3, run, Run(steps=STEPS, folder=str(tmp_path), planning=SHARDED))
    assert [error(ran, expected) for ran, expected in zip(resumed, whole, strict=True)] == [0.0, 0.0, 0.0]
    assert len(resumed[0].losses) == 3
    assert any("step-4: 4 steps of 7 in this fit are done" in notice for notice in resumed[0].notices)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-4", "step-7"]
    # A second start finds all steps done.
    for ran, expected in zip(pool.run(2, run, Run(steps=STEPS, folder=str(tmp_path))), resumed, strict=False):
        assert ran.losses == ()
        assert error(ran, expected) == 0.0


@pytest.mark.parametrize(
    ("saved", "resumed", "loaders"),
    chosen(
        [
            ((3, SHARDED), (2, {"planner": "sequential"}), ITERATED),
            ((1, {}), (4, SHARDED), tuple(LOADERS)[:4]),
        ],
        ((4, SHARDED), (6, SHARDED), ITERATED),
        ((4, WHOLE), (6, {"planner": "sequential"}), tuple(LOADERS)[:4]),
        ((6, SHARDED), (5, WHOLE), tuple(LOADERS)[:4]),
        ((2, {"planner": "pipeline"}), (3, SHARDED), tuple(LOADERS)[:4]),
        ((3, SHARDED), (2, {"planner": "pipeline"}), tuple(LOADERS)[:4]),
        ((2, {}), (1, {}), ITERATED),
    ),
    ids=str,
)
def test_on_another_number_of_ranks_a_resumed_run_has_the_same_numbers(
    pool, undisturbed, tmp_path, saved, resumed, loaders
):
    pool.run(saved[0], run, Run(steps=5, folder=str(tmp_path), planning=saved[1], loaders=loaders))
    drop_newest(tmp_path)
    answers = pool.run(resumed[0], run, Run(steps=STEPS, folder=str(tmp_path), planning=resumed[1], loaders=loaders))
    expected = undisturbed(loaders=loaders)
    for ran in answers:
        assert len(ran.losses) == 3
        assert error(ran, expected) < 1e-9


@pytest.mark.parametrize(
    ("saved", "resumed"),
    chosen([((2, 2, True), (2, 1, False))], ((2, 1, True), (4, 2, True)), ((4, 2, True), (2, 2, False))),
)
def test_tensor_degrees_may_be_others(pool, undisturbed, tmp_path, saved, resumed):
    loaders = ("dataset", "stacking")

    def planned(ranks, degree, shards):
        return {"tensor_parallel_degrees": {"left": degree}, "shard_optimizer": shards}

    pool.run(saved[0], run, Run(steps=5, folder=str(tmp_path), splits=True, loaders=loaders, planning=planned(*saved)))
    drop_newest(tmp_path)
    options = Run(steps=STEPS, folder=str(tmp_path), splits=True, loaders=loaders, planning=planned(*resumed))
    for ran in pool.run(resumed[0], run, options):
        assert error(ran, undisturbed(splits=True, loaders=loaders)) < 1e-9


def test_after_a_signal_to_one_rank_all_save_the_same_step_and_end_with_143(pool, undisturbed, tmp_path):
    loaders = tuple(LOADERS)[:4]
    options = Run(steps=STEPS, folder=str(tmp_path), every=None, signalled_at=2, loaders=loaders)
    assert [ran.exit_code for ran in pool.run(2, run, options)] == [143, 143]
    (saved,) = tmp_path.glob("step-*")
    last = 6 if on_gpu() else 5  # losses, and with them the signal, come two steps later, on a CPU one
    assert 3 <= int(saved.name.removeprefix("step-")) <= last
    (ran,) = pool.run(1, run, Run(steps=STEPS, folder=str(tmp_path), every=None, loaders=loaders))
    assert 0 < len(ran.losses) < STEPS
    assert error(ran, undisturbed(loaders=loaders)) < 1e-9
