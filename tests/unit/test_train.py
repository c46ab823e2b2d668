"""What the user writes: chains from modules, recorded tasks, and mistakes that are explained."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import zoo  # noqa: E402
from spindle.errors import WorkloadError  # noqa: E402
from spindle.models import chain_of  # noqa: E402
from spindle.run.pytrees import fingerprint_of  # noqa: E402
from spindle.train import bind, mean, module, record, task, trace_all  # noqa: E402
from spindle.train.record import cut_all  # noqa: E402
from spindle.train.unchanged import unchanged  # noqa: E402
from workloads import everything  # noqa: E402


class Masked(nn.Module):
    """Blocks that take a mask beside their input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.table = nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList(zoo.Block(8) for _ in range(3))

    def forward(self, x, mask):
        x = self.stem(x) + self.table
        for block in self.blocks:
            x = block(x) * mask
        return self.head(x)


def test_a_module_with_blocks_is_cut_before_between_and_behind_them():
    whole = Masked()
    x, mask = torch.randn(3, 5, 4), torch.ones(3, 5, 1)
    chain = chain_of(whole, x, mask)
    assert chain.reason == ""
    assert len(chain.layers) == 5
    # Stem, two blocks with what follows them, the last block, and what is behind it.
    assert len({layer.kind for layer in chain.layers}) == 4
    assert torch.equal(chain(x, mask), whole(x, mask))


def test_what_a_module_returns_from_its_middle_reaches_the_output():
    class Early(zoo.Tower):
        def forward(self, x):
            x = early = self.blocks[0](self.stem(x))
            for block in list(self.blocks)[1:]:
                x = block(x)
            return self.norm(x), early

    whole = Early(4, 8, 3)
    x = torch.randn(2, 4)
    chain = chain_of(whole, x)
    assert len(chain.layers) == 5
    for ours, theirs in zip(chain(x), whole(x), strict=True):
        assert torch.equal(ours, theirs)


def test_every_parameter_is_in_some_layer():
    whole = Masked()
    chain = chain_of(whole, torch.randn(3, 5, 4), torch.ones(3, 5, 1))
    used = {id(parameter) for layer in chain.layers for parameter in layer.parameters}
    assert used == {id(parameter) for parameter in whole.parameters()}


def test_a_sequential_is_its_children():
    whole = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    assert len(chain_of(whole, x).layers) == 3
    assert torch.equal(chain_of(whole, x)(x), whole(x))


def test_a_module_that_cannot_be_cut_is_one_layer_and_says_why():
    class Branching(Masked):
        def forward(self, x, mask):
            return super().forward(x, mask) if x.sum() > 0 else x

    assert chain_of(nn.Linear(3, 3), torch.ones(2, 3)).reason == "it has no list of two or more equal blocks"
    chain = chain_of(Branching(), torch.randn(3, 5, 4), torch.ones(3, 5, 1))
    assert len(chain.layers) == 1
    assert "its forward branches on values of tensors between its blocks (test_train.py, line" in chain.reason


def test_a_recorded_task_computes_what_the_function_does():
    workload = everything()
    for definition in workload.tasks:
        (recorded,) = cut_all([record(definition)], workload.batches(0))
        batch = workload.batches(3)[definition.name]
        outputs = {}
        for call in recorded.calls:
            args, kwargs = call.arguments(batch, *(outputs[source] for source in call.sources))
            outputs[call.name] = call.chain(*args, **kwargs)
        ours = recorded.loss(batch, *(outputs[source] for source in recorded.loss_sources))
        theirs = definition(batch)
        assert recorded.is_mean == isinstance(theirs, tuple)
        for mine, yours in zip(ours, theirs, strict=True) if recorded.is_mean else [(ours, theirs)]:
            assert torch.equal(mine, yours)


def test_a_workload_of_tasks_names_calls_flows_and_tied_parameters():
    workload = everything()
    bound = bind("everything", trace_all(workload.tasks, workload.batches(0)))
    plain = next(task for task in bound.workload.tasks if task.name == "plain")
    assert [call.name for call in plain.calls] == ["lm#0", "lm#1", "loss"]
    assert plain.flows == (("lm#0", "lm#1"), ("lm#1", "loss"))
    assert "lm.blocks.0.linear.weight" in bound.parameters
    assert "head.0.weight" not in bound.parameters


ENCODER = module("encoder", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
LOOSE = nn.Linear(1, 1)
TEMPERATURE = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda batch: LOOSE(ENCODER(batch["x"])).mean(), r"calls a Linear that is not registered; write handle ="),
        (
            lambda batch: (ENCODER(batch["x"]) * TEMPERATURE).mean(),
            r"uses a parameter of shape \(1,\) outside any",
        ),
        (
            lambda batch: (ENCODER(batch["x"]) * TEMPERATURE.exp()).mean(),
            r"uses a tensor that takes a gradient, of shape \(1,\) outside any",
        ),
        (lambda batch: ENCODER(batch["x"]).mean() if batch["x"].sum() > 0 else 0, r"branches on a tensor's value"),
        (lambda batch: batch["x"].mean(), r"calls no module; register one"),
        (lambda batch: [ENCODER(batch["x"]), None][1], r"returns None; it must return its loss"),
        (lambda batch: ENCODR(batch["x"]).mean(), r"line \d+ .*: NameError: name 'ENCODR' is not defined$"),  # noqa: F821
    ],
)
def test_a_mistake_in_a_task_is_explained_with_its_line(function, message):
    with pytest.raises(WorkloadError, match=message) as caught:
        record(task(batch_size=2, name="bad")(function))
    assert "task 'bad'" in str(caught.value)


def test_masks_of_a_batch_may_be_combined():
    def masked(batch):
        mask = (batch["x"] > 0) & (batch["x"] < 1) | ~(batch["x"] > -1)
        return (ENCODER(batch["x"]).sum(-1) * (batch["keep"] & batch["keep"] | mask[:, 0])).mean()

    recorded = record(task(batch_size=2, name="masked")(masked))
    assert [call.name for call in recorded.calls] == ["encoder#0"]


def bad_lines(function, example=None):
    with pytest.raises(WorkloadError) as caught:
        record(task(batch_size=2, name="bad")(function), example)
    return str(caught.value)


def test_a_branch_on_a_shape_is_taken_as_the_batches_have_it():
    def function(batch):
        y = ENCODER(batch["x"][:, 0] if batch["x"].ndim == 3 else batch["x"])
        y = y + torch.arange(1.0, 2.0)
        return (y * batch["mask"] if "mask" in batch else y).mean()

    for example in ({"x": torch.ones(2, 4)}, {"x": torch.ones(2, 5, 4), "mask": torch.ones(2, 1)}):
        recorded = record(task(batch_size=2, name="shapes")(function), example)
        (call,) = recorded.calls
        args, kwargs = call.arguments(example)
        ours = recorded.loss(example, call.handle.module(*args, **kwargs))
        assert torch.equal(ours, function(example))


def test_a_branch_on_the_number_of_samples_is_refused():
    text = bad_lines(
        lambda batch: ENCODER(batch["x"]).mean() if batch["x"].shape[0] == 2 else 0, {"x": torch.ones(2, 4)}
    )
    assert "it branches on the number of samples" in text


def test_what_tracing_cannot_do_is_refused_with_the_line():
    text = bad_lines(lambda batch: ENCODER(batch["x"]).mean() * float(batch["x"].sum()))
    assert "task 'bad', test_train.py, line" in text
    assert "it reads the value of a tensor" in text


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Linear(4, 3)

    def forward(self, x):
        a = self.tower(x)
        return {"a": a, "b": (2 * a, 3 * a)}


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: (lambda a, b: (a * b[1]).mean())(**out),
        lambda out: (lambda x, y: (x - 2 * y).mean())(*out["b"]),
        lambda out: sum(x.mean() for x in out["b"]) / len(out["b"]),
        lambda out: sum(x.mean() for x in out["a"].T) / len(out["a"].T),
        lambda out: out["a"].view(*out["a"].shape[:1], 3, -1).mean() if "a" in out and "c" not in out else None,
        lambda out: sum(x.mean() for key, x in out.items() if key == "a") + sum(x.mean() for x in [*out.values()][:1]),
    ],
)
def test_outputs_of_a_module_are_unpacked_as_in_python(loss):
    both, example = module("both", Both()), {"x": torch.randn(2, 4)}
    recorded = record(task(batch_size=2, name="unpacked")(lambda batch: loss(both(**batch))), example)
    ours = recorded.loss(example, both.module(**example))
    assert torch.allclose(ours, loss(both.module(**example)))
    ours.backward()
    assert both.module.tower.weight.grad.abs().sum() > 0


class Queued(nn.Module):
    """Compares samples with a queue of earlier ones, whose position it reads, as MoCo does."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Linear(4, 4)
        self.register_buffer("queue", torch.ones(4, 6))
        self.register_buffer("position", torch.tensor(2))

    def forward(self, x):
        scores = self.tower(x) @ self.queue
        start = int(self.position)
        self.queue[:, start : start + len(x)] = x.detach().T
        self.position += len(x)
        return scores, torch.zeros(len(x), dtype=torch.long)


def test_outputs_of_a_module_that_reads_values_are_unpacked():
    queued, example = module("queued", Queued()), {"x": torch.randn(2, 4)}
    recorded = record(task(batch_size=2, name="unpacked")(lambda batch: F.cross_entropy(*queued(batch["x"]))), example)
    assert queued.module.position == 2
    assert bool((queued.module.queue == 1).all())
    outputs = queued.module(example["x"])
    assert torch.equal(recorded.loss(example, outputs), F.cross_entropy(*outputs))


class Segments(nn.Module):
    """Reads lengths that have to add up to its rows."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Linear(4, 4)

    def forward(self, x, lengths):
        parts = [self.tower(part).mean(0) for part in x.split(lengths.tolist())]
        return torch.stack(parts), torch.zeros(len(parts), dtype=torch.long)


@pytest.mark.parametrize("more", [0, 1])
def test_a_module_that_cannot_run_on_other_values_than_the_examples_is_refused_without_invented_numbers(more):
    segments = module("segments", Segments())
    example = {"x": torch.randn(6, 4), "lengths": torch.tensor([2, 4]) - more}
    recording = task(batch_size=2, name="unpacked")(
        lambda batch: F.cross_entropy(*segments(batch["x"], batch["lengths"] + more if more else batch["lengths"]))
    )
    with pytest.raises(WorkloadError, match=r"x\.split\(lengths.tolist\(\)\)") as error:
        record(recording, example)
    assert "split_sizes" not in str(error.value)


def test_limits_on_frozen_weights_and_weights_made_for_inference_are_no_changes():
    with torch.inference_mode():
        made_for_inference = nn.Linear(4, 4).requires_grad_(False)
    limited = nn.Embedding(3, 4, max_norm=1e6).requires_grad_(False)
    with unchanged([made_for_inference, limited]):
        limited(torch.tensor([0, 2]))


def test_a_loop_over_a_length_that_changes_makes_another_variant():
    handle = module("sums", nn.Linear(4, 4))
    recording = task(batch_size=2, name="loop")(lambda batch: sum(x.mean() for x in handle(batch).unbind(1)))
    lengths = [record(recording, torch.randn(2, length, 4)).decisions for length in (3, 5)]
    assert lengths == [(3,), (5,)]


def test_a_length_of_an_output_counts_no_batch():
    handle = module("normed", nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    recording = task(batch_size=3, name="length")(lambda batch: sum(x.mean() for x in handle(batch).unbind(1)))
    record(recording, torch.ones(3, 4))  # batch normalisation needs two rows, and one less is tried, too
    assert handle.module[1].num_batches_tracked == 0


def test_batches_with_conjugated_and_negated_views_have_the_digests_of_their_values():
    numbers = torch.complex(torch.arange(3.0), torch.arange(3.0))
    for view in (numbers.conj(), numbers.conj().imag):
        assert view.is_conj() or view.is_neg()
        assert fingerprint_of({"x": view}) == fingerprint_of({"x": view.clone().resolve_conj().resolve_neg()})


def test_two_modules_with_one_name_are_refused():
    other = module("encoder", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))

    @task(batch_size=2)
    def both(batch):
        return mean((ENCODER(batch["x"]) + other(batch["x"])).sum(), 2)

    with pytest.raises(WorkloadError, match="two modules are called 'encoder'"):
        trace_all([both], {"both": {"x": torch.zeros(2, 4)}})


def test_what_is_no_module_is_refused():
    with pytest.raises(WorkloadError, match=r"expected an nn\.Module, got function"):
        module("vision", lambda x: x)
