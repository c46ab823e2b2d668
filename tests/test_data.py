"""Each rank fetches the samples and entries that it needs; which samples make a step does not depend on the plan."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import spindle  # noqa: E402
from courses import Notes, loader_named  # noqa: E402
from spindle.train.samples import Shuffled  # noqa: E402


def losses_of(answers):
    assert all(one.losses == answers[0].losses for one in answers)
    return list(answers[0].losses)


@pytest.mark.parametrize(
    ("kind", "is_random"),
    [("dataset", False), ("dataset", True), ("loader", False), ("loader", True), ("weighted", False)],
)
def test_the_samples_of_a_step_do_not_depend_on_the_plan(pool, kind, is_random):
    one = losses_of(pool.run(1, "read_samples", kind, "rows apart", (5,), False, is_random))
    assert len(set(one)) == 5
    for num_ranks, plan, by_field in ((2, "towers apart", True), (3, "rows apart", False), (3, "plan 4", True)):
        some = losses_of(pool.run(num_ranks, "read_samples", kind, plan, (5,), by_field, is_random))
        assert some == pytest.approx(one, rel=1e-9)


@pytest.mark.parametrize("kind", ["collated", "streamed", "stateful"])
def test_what_cannot_be_read_in_parts_is_read_whole(pool, kind):
    if kind == "stateful":
        pytest.importorskip("torchdata")
    one = losses_of(pool.run(1, "read_samples", kind, "rows apart", (5,)))
    assert losses_of(pool.run(3, "read_samples", kind, "plan 2", (5,))) == pytest.approx(one, rel=1e-9)


@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_a_rank_fetches_its_rows(pool, kind):
    answers = pool.run(3, "read_samples", kind, "rows apart", (9,))
    asked = [{number for number, _ in one.asked} for one in answers]
    counts = [len(one.asked) for one in answers]
    assert max(counts) <= 2 * 8  # two rows a step
    assert min(counts) > 0
    assert asked[0] != asked[1]


def test_a_rank_fetches_the_entries_that_its_slots_look_at(pool):
    vision, rest = pool.run(2, "read_samples", "dataset", "towers apart", (9,), True)
    assert {names for _, names in vision.asked} == {("x",)}
    assert {names for _, names in rest.asked} == {("y", "z")}


def test_a_rank_whose_code_looks_at_nothing_of_a_batch_fetches_nothing(pool):
    (one,) = pool.run(1, "read_by_towers_alone")
    towers, loss = pool.run(2, "read_by_towers_alone")
    assert loss.losses == towers.losses == pytest.approx(one.losses, rel=1e-9)
    assert towers.asked
    assert not loss.asked


def test_samples_are_fetched_beside_the_compute_unless_they_draw_random_numbers(pool):
    (one,) = pool.run(1, "read_samples", "dataset", "rows apart", (5,))
    assert any(name.startswith("samples") for name in one.threads)
    (one,) = pool.run(1, "read_samples", "dataset", "rows apart", (5,), False, True)
    assert one.threads == {"MainThread"}


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
def test_a_second_fit_goes_on_in_the_order_of_the_first(pool, is_random):
    whole = losses_of(pool.run(2, "read_samples", "dataset", "plan 1", (5,), False, is_random))
    parts = losses_of(pool.run(2, "read_samples", "dataset", "plan 1", (2, 3), False, is_random))
    assert parts == pytest.approx(whole, rel=1e-9)


def test_every_epoch_has_every_sample_once_in_another_order():
    epochs = [[number for batch in order for number in batch] for order in [Shuffled(10, 3, False, 7, 0)] * 3]
    assert all(sorted(one) == list(range(10)) for one in epochs)
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

    trainer = spindle.Trainer([look], optimizer=lambda named: torch.optim.SGD([one for _, one in named], lr=0.1))
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
