"""Modules that are compiled: once for each kind of layer, with the numbers of the module as it is."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spindle  # noqa: E402
from comparison import Comparison, assert_close  # noqa: E402
from internals import guessed_profile  # noqa: E402
from spindle.errors import WorkloadError  # noqa: E402
from trainings import sgd  # noqa: E402

WIDTH, ROWS, STEPS = 6, 6, 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, width), nn.Linear(width, WIDTH)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def towers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"left": Encoder(8, 4).double(), "right": Encoder(10, 3).double()}


def task_of(left: Any, right: Any) -> Any:
    @spindle.task(batch_size=ROWS, per_sample_mean=True)
    def pull(batch):
        return (left(batch["x"]) - right(batch["y"])).square().mean()

    return pull


def train_compiled(rank: int, num_ranks: int, planning: dict[str, Any]) -> tuple[Comparison, list[int]]:
    """Trains towers of two widths, of which one is compiled. Returns the numbers of parameters of compiled graphs."""
    compiled_graphs: list[int] = []

    def count_graphs(graph: Any, inputs: Any) -> Any:
        compiled_graphs.append(sum(isinstance(value, nn.Parameter) for value in inputs))
        return graph

    torch._dynamo.reset()
    modules = towers()
    reference = deepcopy(modules)
    handles = (
        spindle.module("left", modules["left"], compile={"backend": count_graphs}),
        spindle.module("right", modules["right"]),
    )
    batches = [
        {"x": torch.randn(ROWS, 3, dtype=torch.float64), "y": torch.randn(ROWS, 3, dtype=torch.float64)}
        for _ in range(STEPS)
    ]
    trainer = spindle.Trainer(
        [task_of(*handles)], optimizer=sgd, planning=spindle.Planning(profile=guessed_profile, **planning)
    )
    result = trainer.fit({"pull": batches}, steps=STEPS, progress=False)
    optimizer = sgd(nn.ModuleDict(reference).named_parameters())
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = task_of(reference["left"], reference["right"])(batch)
        loss.backward()
        optimizer.step()
        losses.append({"pull": float(loss)})
    comparison = Comparison()
    comparison.add_losses(result.losses, losses)
    trained = trainer.state_dict()
    expected = nn.ModuleDict(reference).state_dict()
    if trained:
        comparison.add_tensors("parameter", dict(trained), dict(expected))
    return comparison, compiled_graphs


@pytest.mark.parametrize(
    ("num_ranks", "planning"), [(1, {}), (2, {"planner": "sequential"}), (2, {"planner": "pipeline"})]
)
def test_compiled_layers_give_the_same_numbers(pool, num_ranks, planning):
    answers = pool.run(num_ranks, train_compiled, planning)
    assert_close([comparison for comparison, _ in answers], kinds=("loss",))
    if planning.get("planner") == "pipeline":
        return
    for _, graphs in answers:
        # Stem, block and head, each compiled once; shapes that differ between ranks are other processes' business.
        assert graphs.count(6) == 1, graphs
        assert len(graphs) <= 3, graphs


def test_a_mode_with_cuda_graphs_of_its_own_is_refused():
    with pytest.raises(WorkloadError, match=r"max-autotune-no-cudagraphs"):
        spindle.module("m", nn.Linear(2, 2), compile={"mode": "reduce-overhead"})
    with pytest.raises(WorkloadError, match=r"torch.compile takes no argument 'fast'"):
        spindle.module("m", nn.Linear(2, 2), compile={"fast": True})
