"""Mistakes in the code of tasks are told by the user's line and torch's last sentence."""

from __future__ import annotations

import logging
from copy import deepcopy

import numpy
import pytest
import torch
import torch.distributed.nn.functional
from torch import nn

import spindle
from spindle.errors import TrainingError, WorkloadError
from spindle.launch import is_users


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
    "a dtype": (
        lambda tower, batch: tower(batch["x"].double()).mean(),
        "calling module 'tower'\nRuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float",
    ),
    "a value": (
        lambda tower, batch: tower(batch["x"]).mean() / float(batch["x"].max()),
        "it reads the value of a tensor (float() argument must be",
    ),
    "a format": (
        lambda tower, batch: print(f"{tower(batch['x']).mean():.3f}"),
        "it reads the value of a tensor (unsupported format string",
    ),
    "numpy": (
        lambda tower, batch: tower(batch["x"]).mean() * torch.from_numpy(numpy.exp(batch["x"].numpy())).mean(),
        "it reads the value of a tensor (invalid __array_struct__)",
    ),
    "a collective": (
        lambda tower, batch: torch.cat(gather(tower(batch["x"]))).mean(),
        "it calls all_gather of torch.distributed: a task is given the whole batch",
    ),
    "a collective with a gradient": (
        lambda tower, batch: torch.cat(gather_with_gradient(tower(batch["x"]))).mean(),
        "it calls AllGather of torch.distributed: a task is given the whole batch",
    ),
    "a length": (lambda tower, batch: tower(batch["x"]).sum() / len(batch["x"]), "write x.shape[0] for len(x)"),
    "a loop": (
        lambda tower, batch: sum(row.mean() for row in tower(batch["x"])),
        "it loops over the samples of a batch",
    ),
    "an assignment": (lambda tower, batch: write_to(tower(batch["x"])).mean(), "it writes to a part of a tensor; use"),
    "an assertion": (lambda tower, batch: demand(tower(batch["x"])).mean(), "assert x.shape == (4, 5)): AssertionErr"),
    "its own error": (lambda tower, batch: refuse(tower(batch["x"])).mean(), ": ValueError: not these"),
}


def gather(x):
    torch.distributed.all_gather([x, x], x)
    return [x, x]


def gather_with_gradient(x):
    return torch.distributed.nn.functional._AllGather.apply(None, x)


def write_to(x):
    x[:, 0] = 0
    return x


def demand(x):
    assert x.shape == (4, 5)
    return x


def refuse(x):
    raise ValueError("not these")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_by_its_line(mistake, monkeypatch, caplog):
    monkeypatch.delenv("SPINDLE_DEBUG", raising=False)
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)
    loss, text = MISTAKES[mistake]
    with pytest.raises(WorkloadError) as caught:
        fit(loss)
    said = str(caught.value)
    called = {write_to, demand, refuse, gather, gather_with_gradient} & {
        globals().get(name) for name in loss.__code__.co_names
    }
    lines = [function.__code__.co_firstlineno + 1 for function in called] or [loss.__code__.co_firstlineno]
    assert said.count(f"test_task_errors.py, line {lines[0]} (") == 1
    assert text in said
    assert "<eval_with_key>" not in said
    assert caught.value.__cause__ is None
    assert len(said.splitlines()) <= 3
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]  # torch has said nothing


def test_the_whole_traceback_is_there_for_those_who_want_it(monkeypatch):
    monkeypatch.setenv("SPINDLE_DEBUG", "1")
    with pytest.raises(WorkloadError) as caught:
        fit(MISTAKES["a typo"][0])
    assert isinstance(caught.value.__cause__, AttributeError)


def test_an_attribute_of_a_handle_that_is_missing_can_be_asked_for():
    handle = spindle.module("tower", nn.Linear(2, 2))
    assert not hasattr(handle, "encode")
    with pytest.raises(AttributeError, match=r"no attribute 'train': its \.module has: write \.module\.train"):
        handle.train()
    assert handle.module.in_features == 2
    assert deepcopy(handle).name == "tower"


class Annealed:
    """A task whose code reads numbers and tensors from outside."""

    def __init__(self):
        self.beta, self.queue = 0.0, torch.zeros(4)
        tower = spindle.module("tower", nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))

        @spindle.task(batch_size=4)
        def anneal(batch):
            encoded = tower(batch["x"])
            return encoded.square().mean() + self.beta * encoded.abs().mean() + (encoded * self.queue).mean()

        self.trainer = spindle.Trainer([anneal], optimizer=torch.optim.AdamW)

    def fit(self, steps, on_step=None):
        loader = [{"x": torch.ones(4, 8)}]
        return self.trainer.fit({"anneal": loader}, steps=steps, on_step=on_step, progress=False).losses


def test_a_number_that_changes_after_a_task_was_recorded_is_refused():
    annealed = Annealed()
    message = r"test_task_errors.py, line \d+ \(return .*\): 0\.0 has become 0\.5 since the task was recorded"

    def on_step(step, losses):
        annealed.beta = 0.5

    with pytest.raises(TrainingError, match=message):
        annealed.fit(6, on_step)

    annealed = Annealed()
    annealed.fit(1)
    annealed.fit(1)
    annealed.beta = 0.5
    with pytest.raises(TrainingError, match=message):
        annealed.fit(1)


def test_a_tensor_that_changes_in_place_is_seen_by_training():
    annealed = Annealed()

    def on_step(step, losses):
        annealed.queue.fill_(100.0)

    losses = [step["anneal"] for step in annealed.fit(8, on_step)]
    assert abs(losses[-1]) > 5 * abs(losses[0])
    annealed.queue = torch.zeros(4)
    with pytest.raises(TrainingError, match="a constant has changed since the task was recorded"):
        annealed.fit(1)


def test_a_task_that_prints_or_reads_values_while_it_is_recorded_is_told_so(capsys):
    history = []
    tower = spindle.module("tower", nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))

    @spindle.task(batch_size=4)
    def pull(batch):
        loss = tower(batch["x"]).square().mean()
        print("the loss is", loss)
        history.append(loss.item())
        print("recorded")
        loss.backward()
        return loss

    trainer = spindle.Trainer([pull], optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    trainer.fit({"pull": [{"x": torch.zeros(4, 8)}]}, steps=2, progress=False)
    notices = [notice for notice in trainer.notices if "task 'pull', test_task_errors.py, line" in notice]
    assert [notice.partition("(")[2].partition(" while")[0] for notice in notices] == [
        'print("the loss is", loss)) prints',
        "history.append(loss.item())) calls .item() of a tensor, which has no value",
        'print("recorded")) prints',
        "loss.backward()) calls .backward(), which has no effect: gradients of what the task returns are computed",
    ]
    assert all("to see numbers, return spindle.result(loss, name=...)" in notice for notice in notices[:-1])
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


def clamp(weight):
    with torch.no_grad():
        weight.clamp_(-1, 1)


def assign(weight):
    weight.data = weight.data.clamp(-1, 1)


CHANGES = {
    "without gradients": clamp,
    "its data": lambda weight: weight.data.clamp_(-1, 1),
    "other data": assign,
    "as out": lambda weight: torch.clamp(weight.data, -1, 1, out=weight.data),
    "several": lambda weight: torch._foreach_mul_([weight.data], 0.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_weight_that_a_task_changes_is_refused(change):
    tower = nn.Linear(8, 4)
    handle = spindle.module("tower", tower)
    before = tower.weight.clone()

    @spindle.task(batch_size=4)
    def t(batch):
        change(tower.weight)
        return handle(batch["x"]).mean()

    trainer = spindle.Trainer([t], optimizer=torch.optim.AdamW)
    with pytest.raises(WorkloadError, match=r"line \d+ \(.*\): it changes the weight 'tower\.weight' in place"):
        trainer.fit({"t": [{"x": torch.ones(4, 8)}]}, steps=1, progress=False)
    assert torch.equal(tower.weight, before)


class Clamping(nn.Module):
    """Limits its weight in each forward, and returns a pair."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        with torch.no_grad():
            self.scale.clamp_(max=4.6)
        return x * self.scale, x


def test_a_task_may_freeze_weights_and_read_the_shapes_of_a_module_that_limits_its_own():
    module = Clamping()
    handle = spindle.module("scaling", module)

    @spindle.task(batch_size=4)
    def t(batch):
        module.scale.requires_grad_(True)
        steps = torch.zeros(8)
        steps[2:] = 1
        scaled, plain = handle(batch["x"])
        return (scaled * plain * steps.mul_(2)).mean()

    trainer = spindle.Trainer([t], optimizer=torch.optim.AdamW)
    losses = trainer.fit({"t": [{"x": torch.ones(4, 8)}]}, steps=5, progress=False).losses
    assert losses[0]["t"] == pytest.approx(3.0)


def test_numbers_of_numpy_are_numbers():
    tower = spindle.module("tower", nn.Linear(8, 4))

    @spindle.task(batch_size=4)
    def t(batch):
        scaled = numpy.float32(3) * tower(batch["x"]) / numpy.sqrt(64.0)
        return scaled.clamp(max=numpy.log(100)).square().mean() + numpy.int64(2)

    batch = {"x": torch.ones(4, 8)}
    expected = t(batch).item()
    trainer = spindle.Trainer([t], optimizer=torch.optim.AdamW)
    losses = trainer.fit({"t": [batch]}, steps=5, progress=False).losses
    assert losses[0]["t"] == pytest.approx(expected)


def test_a_task_that_keeps_what_it_computed_in_a_cache_is_refused_by_its_line():
    tower = spindle.module("tower", nn.Linear(8, 4))
    cache = {}

    @spindle.task(batch_size=4)
    def t(batch):
        if not cache:
            cache["positions"] = torch.arange(batch["x"].shape[1])
        return tower(batch["x"] * cache["positions"]).mean()

    trainer = spindle.Trainer([t], optimizer=torch.optim.AdamW)
    message = r"line \d+ \(return tower.*\): it uses a value that was computed when a task was recorded before"
    with pytest.raises(WorkloadError, match=message):
        trainer.fit({"t": [{"x": torch.ones(4, 8)}]}, steps=1, progress=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(8).to_sparse() @ torch.ones(8, 1),
        lambda: torch.eye(8).to_sparse(),
        lambda: torch.ones(8, 8, dtype=torch.complex64).conj().imag,
    ],
    ids=["of a sparse one", "sparse", "a view of conjugates"],
)
def test_constants_of_any_layout_are_compared_with_those_of_the_first_recording(make):
    tower = spindle.module("tower", nn.Linear(8, 8))

    @spindle.task(batch_size=4)
    def t(batch):
        return (tower(batch["x"]) @ make()).sum(1).mean()

    trainer = spindle.Trainer([t], optimizer=torch.optim.AdamW)
    assert len(trainer.fit({"t": [{"x": torch.ones(4, 8)}]}, steps=5, progress=False).losses) == 5


def test_a_sparse_constant_that_changes_is_refused():
    tower, share = spindle.module("tower", nn.Linear(8, 8)), [1.0]

    @spindle.task(batch_size=4)
    def t(batch):
        return (tower(batch["x"]) @ (share[0] * torch.eye(8)).to_sparse()).sum(1).mean()

    def on_step(step, losses):
        share[0] = 2.0

    trainer = spindle.Trainer([t], optimizer=torch.optim.AdamW)
    with pytest.raises(TrainingError, match="a constant has changed since the task was recorded"):
        trainer.fit({"t": [{"x": torch.ones(4, 8)}]}, steps=5, on_step=on_step, progress=False)


def test_synchronised_batch_normalisation_is_refused():
    tower = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    with pytest.raises(WorkloadError, match="1 is a SyncBatchNorm, which exchanges statistics between ranks itself"):
        spindle.module("tower", tower)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_torchscript_module_is_refused_by_name():
    traced = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    for module in (traced, nn.Sequential(nn.ReLU(), traced)):
        with pytest.raises(WorkloadError, match=r"TorchScript modules \(\w+\) cannot be split.*as it was before"):
            spindle.module("traced", module)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me/train.py", True),
        ("/home/me/.local/lib/python3.11/site-packages/torch/nn/modules/linear.py", False),
        ("/usr/lib/python3/dist-packages/torch/functional.py", False),  # seen by an environment with system packages
    ],
)
def test_a_package_is_not_the_users_code_wherever_it_is_installed(path, expected):
    assert is_users(compile("", path, "exec")) == expected


@pytest.mark.parametrize("rows", [1, 4])
def test_a_loss_without_a_gradient_is_refused(rows):
    tower = spindle.module("tower", nn.Linear(8, 4))
    frozen = spindle.module("frozen", nn.Linear(8, 4).requires_grad_(False))
    tasks = [
        spindle.task(batch_size=rows, name="detached")(lambda batch: tower(batch["x"]).detach().mean()),
        spindle.task(batch_size=rows, name="frozen")(lambda batch: frozen(batch["x"]).mean()),
        spindle.task(batch_size=rows, name="trained")(lambda batch: tower(batch["x"]).mean()),
    ]

    def trainer_of(tasks):
        return spindle.Trainer(tasks, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))

    def loaders_of(tasks):
        return {task.name: [{"x": torch.ones(rows, 8)}] for task in tasks}

    with pytest.raises(WorkloadError, match=r"'detached' and task 'frozen': nothing would be trained"):
        trainer_of(tasks[:2]).fit(loaders_of(tasks[:2]), steps=1, progress=False)
    trainer = trainer_of(tasks)
    trainer.fit(loaders_of(tasks), steps=1, progress=False)
    said = [text for text in trainer.notices if "trains nothing" in text]
    assert [text.split("'")[1] for text in said] == ["detached", "frozen"]


@pytest.mark.parametrize("wrapper", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_a_module_that_synchronises_gradients_itself_is_refused(wrapper):
    wrapped = wrapper.__new__(wrapper)  # a DistributedDataParallel is made in a process group alone
    nn.Module.__init__(wrapped)
    with pytest.raises(WorkloadError, match=rf"{wrapper.__name__} synchronises gradients itself.* the module inside"):
        spindle.module("tower", wrapped)
