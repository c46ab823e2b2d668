"""An optimizer whose state is sharded over the ranks that hold each parameter: the numbers of one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from worlds import Training  # noqa: E402


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("seed", "num_ranks"), [(3, 4), (8, 3), (12, 2), (13, 4), (15, 3)])
def test_a_trainer_leaves_the_weights_that_plain_pytorch_does(pool, seed, num_ranks, optimizer):
    training = Training(name=f"random {seed}", optimizer=optimizer, shards=True)
    for trained in pool.run(num_ranks, "train", training, f"plan {seed}"):
        assert trained.parameter < 1e-9, trained.worst
        assert trained.loss < 1e-9
        assert trained.buffer < 1e-9
