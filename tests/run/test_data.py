"""Each rank fetches the samples and entries that it needs; which samples make a step does not depend on the plan."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, WeightedRandomSampler, default_collate  # noqa: E402

import spindle  # noqa: E402
from internals import guessed_profile, unmeasured  # noqa: E402
from random_plans import plan_text_named  # noqa: E402
from spindle.errors import TrainingError  # noqa: E402
from spindle.train.samples import Shuffled  # noqa: E402
from sweeps import chosen  # noqa: E402
from training_cases import WIDTH, two_towers  # noqa: E402
from trainings import sgd  # noqa: E402


class Notes(torch.utils.data.Dataset):
    """Samples with two entries and a goal, which notes who asks for what."""

    def __init__(self, length: int = 20, is_random: bool = False) -> None:
        self.length, self.is_random = length, is_random
        self.asked: list[tuple[int, tuple[str, ...]]] = []
        self.threads: list[str] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return self.entries(number, ("x", "y", "z"))

    @staticmethod
    def batch_of(numbers: Iterable[int]) -> Any:
        return default_collate([Notes()[number] for number in numbers])

    def entries(self, number: int, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        self.asked.append((number, names))
        self.threads.append(threading.current_thread().name)
        generator = torch.Generator().manual_seed(number)
        widths = {"x": 4, "y": 3, "z": WIDTH}
        whole = {key: torch.randn(width, generator=generator, dtype=torch.float64) for key, width in widths.items()}
        if self.is_random:
            whole["x"] = whole["x"] + torch.rand(4, dtype=torch.float64) + random.random() + np.random.random()
        return {name: whole[name] for name in names}


class NotesByField(Notes):
    def get_fields(self, number: int, names: list[str]) -> dict[str, torch.Tensor]:
        return self.entries(number, tuple(names))


class Streamed(torch.utils.data.IterableDataset):
    """The samples one after another."""

    def __iter__(self) -> Any:
        notes = Notes()
        yield from (notes[number] for number in range(notes.length))


def loader_named(kind: str, dataset: Notes) -> Any:
    """What the user gives, over a dataset that is asked."""
    match kind:
        case "dataset":
            return dataset
        case "loader":
            return DataLoader(dataset, batch_size=6, shuffle=True)
        case "weighted":
            weights = torch.arange(1.0, len(dataset) + 1)
            return DataLoader(dataset, batch_size=6, sampler=WeightedRandomSampler(weights.tolist(), 18))
        case "collated":
            return DataLoader(dataset, batch_size=6, shuffle=True, collate_fn=lambda rows: default_collate(rows))
        case "streamed":
            return DataLoader(Streamed(), batch_size=6)
        case "stateful":
            from torchdata.stateful_dataloader import StatefulDataLoader

            return StatefulDataLoader(dataset, batch_size=6, shuffle=True)
        case _:
            raise AssertionError(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a rank asked its dataset for in the last steps, and what it trained on."""

    losses: tuple[float, ...]
    asked: list[tuple[int, tuple[str, ...]]]
    threads: set[str]


def plan_text(profile: Any, name: str) -> str:
    """`towers apart`: vision on rank 0, the rest on rank 1; `loss apart`: the loss on rank 1, the rest on rank 0; `rows
    apart`: everything on all ranks; or a random plan."""
    if name.startswith("plan "):
        return plan_text_named(profile, name)
    everywhere = ",".join(map(str, range(profile.cluster.num_devices)))
    ranks = {
        "towers apart": lambda op: int(op.module != "vision"),
        "loss apart": lambda op: int("/loss" in op.name),
        "rows apart": lambda op: everywhere,
    }[name]
    ops = [profile.graph.metaops[place] for place in profile.graph.order]
    return "\n".join(f"{op.name}*{op.num_layers}@{ranks(op)}^{number}000" for number, op in enumerate(ops))


def read_samples(
    rank: int,
    num_ranks: int,
    kind: str,
    plan: str,
    fits: tuple[int, ...],
    by_field: bool = False,
    is_random: bool = False,
    loss_reads: bool = True,
) -> Reading:
    """Trains two towers on a dataset, under a loss that reads an entry of the batch or none."""
    modules = two_towers()
    vision, text = (spindle.module(name, modules[name]) for name in ("vision", "text"))

    @spindle.task(batch_size=6, per_sample_mean=True)
    def match(batch):
        product = vision(batch["x"]) * text(batch["y"])
        return (product - batch["z"] if loss_reads else product).square().mean()

    def slow_sgd(named):
        return torch.optim.SGD([parameter for _, parameter in named] or [torch.zeros(1)], lr=0.01)

    dataset = (NotesByField if by_field else Notes)(is_random=is_random)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    losses: list[float] = []
    with unmeasured():
        trainer = spindle.Trainer([match], optimizer=slow_sgd)
        trainer.prepare({"match": [Notes.batch_of(range(6))]}, progress=False)
        trainer.replan(plan=plan_text(trainer.profile, plan))
        for steps in fits:
            marks: list[int] = []
            result = trainer.fit(
                {"match": loader_named(kind, dataset)},
                steps=steps,
                progress=False,
                on_step=lambda step, losses, marks=marks: marks.append(len(dataset.asked)),
            )
            losses += [step_losses["match"] for step_losses in result.losses]
    asked = dataset.asked[marks[2] :] if len(marks) > 3 else []
    return Reading(losses=tuple(losses), asked=asked, threads=set(dataset.threads))


def losses_of(answers):
    assert all(answer.losses == answers[0].losses for answer in answers)
    return list(answers[0].losses)


@pytest.mark.parametrize(
    ("kind", "is_random"),
    [("dataset", False), ("dataset", True), ("loader", False), ("loader", True), ("weighted", False)],
)
def test_the_samples_of_a_step_do_not_depend_on_the_plan(pool, kind, is_random):
    expected = losses_of(pool.run(1, read_samples, kind, "rows apart", (5,), False, is_random))
    assert len(set(expected)) == 5
    for num_ranks, plan, by_field in chosen([(2, "towers apart", True), (3, "plan 4", True)], (3, "rows apart", False)):
        some = losses_of(pool.run(num_ranks, read_samples, kind, plan, (5,), by_field, is_random))
        assert some == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", ["collated", "streamed", "stateful"])
def test_what_cannot_be_read_in_parts_is_read_whole(pool, kind):
    if kind == "stateful":
        pytest.importorskip("torchdata")
    expected = losses_of(pool.run(1, read_samples, kind, "rows apart", (5,)))
    assert losses_of(pool.run(3, read_samples, kind, "plan 2", (5,))) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_a_rank_fetches_its_rows(pool, kind):
    answers = pool.run(3, read_samples, kind, "rows apart", (9,))
    asked = [{number for number, _ in answer.asked} for answer in answers]
    counts = [len(answer.asked) for answer in answers]
    assert max(counts) <= 2 * 8  # two rows a step
    assert min(counts) > 0
    assert asked[0] != asked[1]


def test_a_rank_fetches_the_entries_that_its_slots_look_at(pool):
    vision, rest = pool.run(2, read_samples, "dataset", "towers apart", (9,), True)
    assert {names for _, names in vision.asked} == {("x",)}
    assert {names for _, names in rest.asked} == {("y", "z")}


def test_a_rank_whose_code_looks_at_nothing_of_a_batch_fetches_nothing(pool):
    (alone,) = pool.run(1, read_samples, "dataset", "rows apart", (9,), loss_reads=False)
    towers, loss = pool.run(2, read_samples, "dataset", "loss apart", (9,), loss_reads=False)
    assert loss.losses == towers.losses == pytest.approx(alone.losses, rel=1e-9)
    assert towers.asked
    assert not loss.asked


def test_samples_are_fetched_beside_the_compute_unless_they_draw_random_numbers(pool):
    (single,) = pool.run(1, read_samples, "dataset", "rows apart", (5,))
    assert any(name.startswith("samples") for name in single.threads)
    (single,) = pool.run(1, read_samples, "dataset", "rows apart", (5,), False, True)
    assert single.threads == {"MainThread"}


def test_a_dataset_that_is_bound_to_its_thread_is_read_there():
    class Bound(Notes):
        def entries(self, number, names):
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("created in another thread")
            return super().entries(number, names)

    assert len(seen_by(Bound(), 4)) == 4


def test_an_error_in_a_dataset_names_the_task_and_stays_itself():
    class Broken(Notes):
        def entries(self, number, names):
            if number == 7:
                raise OSError("disk on fire")
            return super().entries(number, names)

    with pytest.raises(OSError, match="disk on fire") as caught:
        seen_by(Broken(), 4)
    assert caught.value.__notes__ == ["in the dataset of task 'look'"]


@pytest.mark.parametrize("is_random", [False, True])
def test_a_second_fit_continues_in_the_order_of_the_first(pool, is_random):
    whole = losses_of(pool.run(2, read_samples, "dataset", "plan 1", (5,), False, is_random))
    parts = losses_of(pool.run(2, read_samples, "dataset", "plan 1", (2, 3), False, is_random))
    assert parts == pytest.approx(whole, rel=1e-9)


def read_other_batches(rank: int, num_ranks: int) -> str:
    """The error of a training in which the loader of rank 1 gives another fourth batch."""
    vision = spindle.module("vision", two_towers()["vision"])

    @spindle.task(batch_size=6, per_sample_mean=True)
    def pull(batch):
        return vision(batch).square().mean()

    batches = [torch.full((6, 4), float(9 if rank and number == 3 else 1), dtype=torch.float64) for number in range(6)]
    with unmeasured():
        trainer = spindle.Trainer([pull], optimizer=sgd)
        trainer.prepare({"pull": batches}, progress=False)
        trainer.replan(plan=plan_text(trainer.profile, "rows apart"))
        try:
            trainer.fit({"pull": batches}, steps=6, progress=False)
        except spindle.errors.TrainingError as error:
            return str(error)
    return ""


def test_loaders_that_give_ranks_different_batches_are_an_error(pool):
    for message in pool.run(2, read_other_batches):
        assert re.search(
            "the loader of task 'pull' gave rank 1 a different batch than rank 0.*torch.manual_seed", message
        )


def test_every_epoch_has_every_sample_once_in_another_order():
    epochs = [[number for batch in order for number in batch] for order in [Shuffled(10, 3, False, 7, 0)] * 3]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    later = [number for batch in Shuffled(10, 3, False, 7, 6) for number in batch]
    assert later == epochs[1][6:]


# In this process, whose loaders may have processes of their own.


def seen_by(loader, steps):
    """The samples of each batch that was trained on, by their first number."""
    seen = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            if not isinstance(x, torch._subclasses.FakeTensor):
                seen.append(x[:, 0].tolist())
            return x * self.weight

    watched = spindle.module("watched", Watched())

    @spindle.task(batch_size=6, name="look")
    def look(batch):
        return watched(batch["x"]).sum()

    with unmeasured():
        trainer = spindle.Trainer([look], optimizer=sgd)
        trainer.prepare({"look": [Notes.batch_of(range(6))]}, progress=False)
        seen.clear()
        torch.manual_seed(3)
        trainer.fit({"look": loader}, steps=steps, progress=False)
    return seen[-steps:]


@pytest.mark.parametrize("kind", ["loader", "weighted"])
def test_a_loaders_own_sampler_gives_the_order_that_it_gives_without_spindle(kind):
    torch.manual_seed(3)
    loader = loader_named(kind, Notes())
    plainly = [batch["x"][:, 0].tolist() for _ in range(2) for batch in loader if len(batch["x"]) == 6]
    assert seen_by(loader_named(kind, Notes()), 6) == plainly


def test_processes_of_a_loader_fetch_the_same_samples_with_the_same_random_numbers():
    def loader(workers):
        return DataLoader(Notes(is_random=True), batch_size=6, shuffle=True, num_workers=workers)

    assert seen_by(loader(2), 5) == seen_by(loader(0), 5)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_keeps_its_place():
    pytest.importorskip("torchdata")
    loader = loader_named("stateful", Notes(length=60))
    seen_by(loader, 3)
    assert loader.state_dict()["_num_yielded"] >= 3


def test_a_dataset_without_a_length_is_explained():
    class Endless(torch.utils.data.Dataset):
        def __getitem__(self, number):
            return {"x": torch.zeros(4)}

    with pytest.raises(spindle.errors.TrainingError, match=r"task 'look': its dataset has no length"):
        seen_by(Endless(), 1)


def test_samples_in_shards_are_shuffled_shard_by_shard_then_in_blocks(monkeypatch):
    lengths = [3, 5, 1, 7, 4]
    monkeypatch.setattr("spindle.train.samples._BLOCK", 6)
    orders = [[number for batch in Shuffled(20, 4, True, seed, 0, lengths) for number in batch] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(20)) != orders[0]
    shard_of = [shard for shard, length in enumerate(lengths) for _ in range(length)]
    open_shards = [{shard_of[number] for number in orders[0][begin : begin + 6]} for begin in range(0, 20, 6)]
    for shard in range(len(lengths)):  # read in one go: the blocks that it is in follow one another
        blocks = [number for number, shards in enumerate(open_shards) if shard in shards]
        assert blocks == list(range(blocks[0], blocks[-1] + 1))
    after = [number for batch in Shuffled(20, 4, True, 1, 2, lengths) for number in batch]
    assert after == orders[0][8:]


def test_a_streaming_dataset_is_read_by_number_and_a_loader_of_it_is_refused(tmp_path):
    streaming = pytest.importorskip("streaming")
    with streaming.MDSWriter(out=str(tmp_path / "mds"), columns={"x": "ndarray:float64:8"}, size_limit=400) as writer:
        for number in range(20):
            writer.write({"x": np.full(8, number + 1.0)})
    dataset = streaming.StreamingDataset(local=str(tmp_path / "mds"), batch_size=4)
    assert len(dataset.samples_per_shard) > 2

    def trained(steps, folder, loader):
        torch.manual_seed(0)
        tower = spindle.module("tower", torch.nn.Linear(8, 8).double())

        @spindle.task(batch_size=4)
        def pull(batch):
            return tower(batch["x"]).square().mean()

        trainer = spindle.Trainer(
            [pull],
            optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=1e-4),
            planning=spindle.Planning(profile=guessed_profile),
            checkpoints=None if folder is None else spindle.Checkpoints(folder),
        )
        return trainer.fit({"pull": loader}, steps=steps, progress=False).losses

    whole = trained(8, None, dataset)
    assert trained(3, tmp_path / "saved", dataset) == whole[:3]
    assert trained(8, tmp_path / "saved", dataset) == whole[3:]
    with pytest.raises(TrainingError, match="give the dataset itself instead of a DataLoader of it"):
        trained(1, None, torch.utils.data.DataLoader(dataset, 4))
