"""Mistakes in the code of tasks are told by the user's line and torch's last sentence."""

from __future__ import annotations

import logging
from copy import deepcopy

import pytest
import torch
from torch import nn

import spindle
from spindle.errors import WorkloadError


def fit(loss) -> None:
    tower = spindle.module("tower", nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    task = spindle.task(batch_size=4, name="t")(lambda batch: loss(tower, batch))
    trainer = spindle.Trainer([task], optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    trainer.fit({"t": [{"x": torch.zeros(4, 8)}]}, steps=1, progress=False)


MISTAKES = {
    "a shape": (
        lambda tower, batch: (tower(batch["x"]) @ torch.ones(5, 3)).mean(),
        "cannot be multiplied (4x4 and 5x3)",
    ),
    "a typo": (
        lambda tower, batch: tower(batch["x"]).maen(),
        "AttributeError: 'Tensor' object has no attribute 'maen'",
    ),
    "an input": (
        lambda tower, batch: tower(batch["x"][:, :5]).mean(),
        "calling module 'tower'\nRuntimeError: mat1 and",
    ),
    "an entry": (lambda tower, batch: tower(batch["y"]).mean(), "its batch has no entry 'y'; it has 'x'"),
    "a method": (
        lambda tower, batch: tower.encode(batch["x"]).mean(),
        "has no attribute 'encode': a task calls the handle",
    ),
    "a value": (
        lambda tower, batch: tower(batch["x"]).mean() / float(batch["x"].max()),
        "it reads the value of a tensor (float() argument must be",
    ),
    "a length": (lambda tower, batch: tower(batch["x"]).sum() / len(batch["x"]), "write x.shape[0] for len(x)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_by_its_line(mistake, monkeypatch, caplog):
    monkeypatch.delenv("SPINDLE_DEBUG", raising=False)
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)
    loss, text = MISTAKES[mistake]
    with pytest.raises(WorkloadError) as caught:
        fit(loss)
    said = str(caught.value)
    line = loss.__code__.co_firstlineno
    assert said.count(f"line {line} (") == 1
    assert text in said
    assert "<eval_with_key>" not in said
    assert caught.value.__cause__ is None
    assert len(said.splitlines()) <= 3
    assert not caplog.records  # torch has said nothing


def test_the_whole_traceback_is_there_for_those_who_want_it(monkeypatch):
    monkeypatch.setenv("SPINDLE_DEBUG", "1")
    with pytest.raises(WorkloadError) as caught:
        fit(MISTAKES["a typo"][0])
    assert isinstance(caught.value.__cause__, AttributeError)


def test_an_attribute_of_a_handle_that_is_missing_can_be_asked_for():
    handle = spindle.module("tower", nn.Linear(2, 2))
    assert not hasattr(handle, "encode")
    assert handle.module.in_features == 2
    assert deepcopy(handle).name == "tower"


def test_a_task_that_prints_or_reads_values_while_it_is_recorded_is_told_so(capsys):
    history = []
    tower = spindle.module("tower", nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))

    @spindle.task(batch_size=4)
    def pull(batch):
        loss = tower(batch["x"]).square().mean()
        print("the loss is", loss)
        history.append(loss.item())
        print("recorded")
        return loss

    trainer = spindle.Trainer([pull], optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    trainer.fit({"pull": [{"x": torch.zeros(4, 8)}]}, steps=2, progress=False)
    notices = [notice for notice in trainer.notices if "task 'pull', test_task_errors.py, line" in notice]
    assert [notice.partition("(")[2].partition(" while")[0] for notice in notices] == [
        'print("the loss is", loss)) prints',
        "history.append(loss.item())) calls .item() of a tensor, which has no value",
        'print("recorded")) prints',
    ]
    assert all("to see numbers, return spindle.result(loss, name=...)" in notice for notice in notices)
    shown = capsys.readouterr().out
    assert "Proxy" not in shown
    assert "recorded" in shown


class Words(nn.Module):
    """Its code outside of the blocks is recorded, and runs without it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)  # an id that is too large
        for block in self.blocks:
            x = block(x).relu()
        return x


def test_a_mistake_in_a_module_that_shows_on_real_data_is_told_by_its_line():
    words = spindle.module("words", Words())
    task = spindle.task(batch_size=4, name="t")(lambda batch: words(batch).mean())
    trainer = spindle.Trainer([task], optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    with pytest.raises(WorkloadError, match=r"line \d+ \(x = self.table\(ids\)  # an id.*\n.*index out of range"):
        trainer.fit({"t": [torch.full((4, 3), 10)]}, steps=1, progress=False)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_torchscript_module_is_refused_by_name():
    traced = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    for module in (traced, nn.Sequential(nn.ReLU(), traced)):
        with pytest.raises(WorkloadError, match=r"TorchScript modules \(\w+\) cannot be split.*as it was before"):
            spindle.module("traced", module)
