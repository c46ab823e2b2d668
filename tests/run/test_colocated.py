"""A Trainer with planner `colocate`: items of microbatches are encoded in parts on any rank. The numbers are those of a
plain PyTorch loop in one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from unittest import mock
from weakref import WeakSet

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import internals  # noqa: E402
import spindle  # noqa: E402
from spindle.run import Executor, compute, slice_rows  # noqa: E402
from spindle.run.compute import Compute  # noqa: E402
from spindle.train import microbatches  # noqa: E402
from spindle.train.microbatches import Microbatches  # noqa: E402
from sweeps import RUNS_ALL  # noqa: E402
from trainings import assert_trained, sgd, train  # noqa: E402
from vlm import IMAGES, PlansInProcess, cut_backwards, random_memory, random_parts, vlm, vlm_training  # noqa: E402


def train_vlm(rank, num_ranks, plan="colocate", degree=None, shards=None, optimizer=sgd, **options):
    planning = {"pipeline_parallel_degree": degree, "shard_optimizer": shards}
    return train(rank, num_ranks, replace(vlm_training(**options), optimizer=optimizer), plan, **planning)


class Normalized(torch.optim.SGD):
    """Divides each gradient by its norm: elements of a parameter are not updated by themselves."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / (1 + parameter.grad.norm())
        return super().step(closure)


def coupled(named):
    return Normalized([parameter for _, parameter in named], lr=0.1)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {"counts": True}),
        (5, {"images": "few"}),  # fewer images than ranks, ranks without a part
        (2, {"images": "steps without", "micro_steps": 2}),
        (3, {"plan": "stage-0", "images": "equal", "mean": False}),
        (3, {"plan": "dedicated"}),
        (2, {"plan": "upfront", "images": "one long"}),
        (2, {"plan": "upfront", "images": "steps with", "empty": True}),  # the first step has no image
        (2, {"degree": 1, "micro_steps": 4}),  # two replicas of a pipeline of one rank
        (4, {"degree": 2, "images": "one long"}),
        (2, {"freezes": ("vision",)}),
        (2, {"freezes": ("vision", "projector")}),
        (3, {"audio": True}),  # a projector that two encoders share
        (
            2,
            {"plan": "upfront", "projects_tokens": True},
        ),  # a projector that waits for embeddings stays in the pipeline
        (3, {"audio": True, "projects_tokens": True}),
        (2, {"plan": "pipeline", "counts": True}),
        (1, {"plan": "wavefront", "counts": True}),
    ],
)
def test_a_vision_language_model_trains_like_one_process(pool, num_ranks, options):
    assert_trained(pool.run(num_ranks, train_vlm, **options))


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"plan": "upfront"}),  # encoders on both ranks, the language model cut between them
        (3, {"plan": "upfront", "images": "steps without", "micro_steps": 2}),
        (4, {"plan": "upfront", "degree": 2, "images": "few"}),
        (4, {"plan": "stage-0", "degree": 2, "audio": True}),
        (3, {"plan": "upfront", "freezes": ("vision",)}),
        (4, {"plan": "pipeline 2", "shards": True}),  # replicas share the state of every layer
    ],
)
def test_ranks_that_hold_the_same_weights_share_their_optimizer_state(pool, num_ranks, options):
    answers = pool.run(num_ranks, train_vlm, **options)
    assert_trained(answers)
    assert all(answer.sharded for answer in answers)
    modules = vlm(audio=options.get("audio", False), freezes=options.get("freezes", ())).handles.values()
    trained = [parameter for handle in modules for parameter in handle.module.parameters() if parameter.requires_grad]
    assert sum(answer.state_elements for answer in answers) == sum(parameter.numel() for parameter in trained)


def test_an_optimizer_that_couples_elements_is_not_sharded_in_a_pipeline(pool):
    answers = pool.run(2, train_vlm, plan="upfront", optimizer=coupled)
    assert_trained(answers)
    assert not answers[0].sharded
    assert any("the optimizer is not sharded: it does not update each element" in text for text in answers[0].notices)


def train_randomly(rank, num_ranks, seed, degree, **options):
    with random_parts(seed):
        return train_vlm(rank, num_ranks, "colocate", degree, **options)


@pytest.mark.parametrize(
    ("num_ranks", "degree", "options"),
    [
        (2, 2, {}),
        (3, 3, {"counts": True}),
        (4, 2, {"images": "one long"}),
        (5, 5, {"audio": True}),
        (6, 3, {"freezes": ("vision",)}),
    ],
)
def test_random_layouts_parts_and_devices_give_the_same_numbers(pool, num_ranks, degree, options):
    for seed in range(4 if RUNS_ALL else 1):
        assert_trained(pool.run(num_ranks, train_randomly, 10 * num_ranks + seed, degree, **options))


def train_with_cut_backwards(rank, num_ranks, seed, degree, **options):
    with cut_backwards() as num_cut, random_parts(seed):
        return train_vlm(rank, num_ranks, "colocate", degree, **options), num_cut


@pytest.mark.parametrize(("num_ranks", "options"), [(2, {}), (3, {"images": "one long", "recompute": True})])
def test_cut_backwards_beside_parts_give_the_same_numbers(pool, num_ranks, options):
    answers = pool.run(num_ranks, train_with_cut_backwards, num_ranks, num_ranks, **options)
    assert_trained([answer for answer, _ in answers])
    assert any(max(num_cut, default=0) > 0 for _, num_cut in answers)


def train_with_random_memory(rank, num_ranks, seed, **options):
    with random_memory(seed) as counts, random_parts(seed):
        return train_vlm(rank, num_ranks, "colocate", num_ranks, **options), counts


@pytest.mark.parametrize(("num_ranks", "options"), [(2, {}), (3, {"images": "one long"}), (3, {"audio": True})])
def test_parts_that_recompute_and_offload_give_the_same_numbers(pool, num_ranks, options):
    answers = pool.run(num_ranks, train_with_random_memory, 7 + num_ranks, **options)
    assert_trained([trained for trained, _ in answers])
    recomputed, offloaded = (sum(counts) for counts in zip(*answers[0][1], strict=True))  # rank 0 plans
    assert recomputed > 0
    assert offloaded > 0


class Kept:
    """A tensor that autograd keeps for a backward."""

    def __init__(self, tensor):
        self.tensor = tensor


def train_and_count_kept(rank, num_ranks, seed):
    """For each backward of a part: how many tensors autograd still keeps for it, and for other parts of the rank."""
    forward, backward = Compute.forward, Compute.backward
    kept, counts = {}, []  # by step and slot

    def counted_forward(own, step, slot, *rest):
        if not slot.items:
            return forward(own, step, slot, *rest)
        of_slot = kept.setdefault((step.number, slot.number), WeakSet())

        def pack(tensor):
            of_slot.add(entry := Kept(tensor))
            return entry

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda entry: entry.tensor):
            return forward(own, step, slot, *rest)

    def counted_backward(own, step, slot, instruction, *rest):
        backward(own, step, slot, instruction, *rest)
        if slot.items and instruction.first == slot.chunks[0][0]:
            own_slot = step.number, slot.number
            counts.append((len(kept[own_slot]), sum(len(each) for key, each in kept.items() if key != own_slot)))

    with (
        random_parts(seed),
        mock.patch.object(Compute, "forward", counted_forward),
        mock.patch.object(Compute, "backward", counted_backward),
    ):
        train_vlm(rank, num_ranks, "colocate", num_ranks)
    return counts


def test_a_part_releases_its_activations_in_its_own_backward(pool):
    """One backward over all parts would keep the activations of all until its end."""
    counts = [count for answer in pool.run(2, train_and_count_kept, 21) for count in answer]
    assert len(counts) > 6
    assert {own for own, _ in counts} == {0}
    assert max(others for _, others in counts) > 0


def train_shared(rank, num_ranks, seed, degree, sequence_degree, **options):
    with random_parts(seed, sequence_degree) as planned:
        return train_vlm(rank, num_ranks, "colocate", degree, **options), planned


@pytest.mark.parametrize(
    ("num_ranks", "degree", "sequence_degree", "options"),
    [
        (2, 2, 2, {"images": "one long"}),  # 17 output rows over two members
        (3, 3, 3, {"counts": True}),
        (4, 2, 2, {"freezes": ("vision",)}),  # two replicas
        (5, 5, 3, {"audio": True}),  # a projector that two encoders share, ranks without a part
        (6, 6, 6, {"images": "one long"}),
        (3, 3, 2, {"freezes": ("vision", "projector")}),
        (3, 3, 3, {"images": "one long", "hugging_face": True}),
        (2, 2, 2, {"images": "one long", "detached": True}),
        (2, 2, 2, {"recompute": True}),  # attention exchanges tokens again in backward
    ],
)
def test_items_on_sequence_groups_give_the_same_numbers(pool, num_ranks, degree, sequence_degree, options):
    if "hugging_face" in options:
        pytest.importorskip("transformers")
    for seed in range(4 if RUNS_ALL else 1):
        answers = pool.run(num_ranks, train_shared, 10 * num_ranks + seed, degree, sequence_degree, **options)
        assert_trained([trained for trained, _ in answers])
        planned = answers[0][1]  # rank 0 plans
        assert planned.count(sequence_degree) > 2
        assert 1 in planned or options.get("images") != "one long"


def test_a_module_whose_items_see_each_other_runs_whole(pool):
    answers = pool.run(2, train_vlm, is_per_item=False)
    assert_trained(answers)
    assert any("items of vision#0 in task 'describe' run together" in notice for notice in answers[0].notices)


@pytest.mark.parametrize("plan", ["colocate", "upfront", "stage-0", "dedicated"])
def test_steps_of_text_alone_are_ordinary(pool, plan):
    assert_trained(pool.run(2, train_vlm, plan=plan, images="none"))


def train_without_items(rank, num_ranks):
    language = spindle.module("language", torch.nn.Linear(4, 4))

    @spindle.task(batch_size=2)
    def describe(batch):
        return language(batch["text"]).square().mean()

    planning = spindle.Planning(planner="stage-0", profile=internals.guessed_profile)
    trainer = spindle.Trainer([describe], optimizer=sgd, planning=planning)
    trainer.fit({"describe": [{"text": torch.ones(2, 4)}]}, steps=1, progress=False)


@pytest.mark.parametrize("plan", ["colocate", "upfront"])
def test_running_statistics_see_all_images(pool, plan):
    """Not only those that one of the ranks with a copy of the encoder would have."""
    answers = pool.run(2, train_vlm, plan=plan, normalises=True)
    assert_trained(answers)
    assert "buffer" in answers[0].comparison.compared
    assert any("module 'vision' runs in the pipeline, its items undivided" in text for text in answers[0].notices)


def test_without_items_there_is_nothing_to_place(pool):
    with pytest.raises(AssertionError, match=r'planner="stage-0"\): places the modules that read items alone'):
        pool.run(2, train_without_items)


class Appended(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def train_appended(rank, num_ranks):
    """Images as further rows of a sequence, whose length therefore follows from them."""
    torch.manual_seed(0)
    vision = spindle.module("vision", torch.nn.Linear(4, 4))
    language = spindle.module("language", Appended())

    @spindle.task(batch_size=1, items={"patches": "lengths"})
    def describe(batch):
        images = vision(batch["patches"])
        return language(torch.cat([batch["text"], images[None]], dim=1)).square().mean()

    def batch(*lengths):
        return {
            "text": torch.ones(1, 3, 4),
            "patches": torch.ones(sum(lengths), 4),
            "lengths": torch.tensor(lengths),
        }

    batches = [batch(*lengths) for lengths in [*permutations((1, 2, 3)), (2, 4, 5), (1, 1, 1)]]
    planning = spindle.Planning(planner="stage-0", profile=internals.guessed_profile)
    trainer = spindle.Trainer([describe], optimizer=sgd, gradient_accumulation_steps=2, planning=planning)
    result = trainer.fit({"describe": batches}, steps=4, progress=False)
    return [losses["describe"] for losses in result.losses]


def test_shapes_that_follow_from_rows_of_items_are_inferred_anew(pool):
    (alone,) = pool.run(1, train_appended)
    for losses in pool.run(2, train_appended):
        assert losses == pytest.approx(alone, rel=1e-5)


def train_long_images(rank, num_ranks, planner, **planning):
    """The sequence degrees of the last step's slots, and its losses, with one image in every batch far longer than the
    others."""
    workload = vlm_training(images="one long", num_layers=(6, 2)).workload()
    planning = spindle.Planning(planner=planner, profile=internals.guessed_profile, **planning)
    trainer = spindle.Trainer(workload.tasks, optimizer=sgd, gradient_accumulation_steps=1, planning=planning)
    batches = [workload.batches(number)["describe"] for number in range(3)]
    result = trainer.fit({"describe": batches}, steps=3, progress=False)
    return {slot.sequence_degree for slot in result.program.plan.slots}, [
        losses["describe"] for losses in result.losses
    ]


def test_long_images_are_shared_where_that_helps(pool):
    (_, alone), *_ = pool.run(1, train_long_images, "colocate")
    for shards in (False, True):  # the optimizer
        for degrees, losses in pool.run(3, train_long_images, "colocate", shard_optimizer=shards):
            assert max(degrees) > 1
            assert losses == pytest.approx(alone, rel=1e-9)
    for degrees, losses in pool.run(3, train_long_images, "colocate", sequence_parallel_degrees={"vision": 1}):
        assert degrees == {1}
        assert losses == pytest.approx(alone, rel=1e-9)


class Reshards:
    """What parts gave, what their consumers took, and the gradients of both, of all steps of a rank."""

    def __init__(self):
        self.given, self.taken = {}, {}  # by step, task and call: slices with their places; the joined tensor
        self._number = 0

    def __enter__(self):
        self._own = Compute.forward, Compute._output_gradients, compute.join_items
        Compute.forward, Compute._output_gradients, compute.join_items = self._methods(*self._own)
        return self

    def __exit__(self, *error):
        Compute.forward, Compute._output_gradients, compute.join_items = self._own

    def _methods(self, forward, output_gradients, join_items):
        def leaves_part(own, slot):
            slots = own._rank_program.slots
            consumers = [slots.get(link.consumer) for link in slot.outputs]
            return slot.items and any(consumer is None or not consumer.items for consumer in consumers)

        def noted_forward(own, step, slot, *args):
            self._number = step.number
            forward(own, step, slot, *args)
            if leaves_part(own, slot):
                self._note(step, slot, 0, step.outputs[slot.number][0].detach())

        def noted_gradients(own, step, slot, outputs, watch):
            gradients = output_gradients(own, step, slot, outputs, watch)
            if leaves_part(own, slot):
                self._note(step, slot, 1, gradients[0])
            return gradients

        def noted_join(parts, code, lengths, name):
            joined = join_items(parts, code, lengths, name)
            tensor = joined[0]
            entry = self.taken.setdefault((self._number, name), [tensor.detach(), None])
            tensor.register_hook(lambda gradient: entry.__setitem__(1, gradient))
            return joined

        return noted_forward, noted_gradients, noted_join

    def _note(self, step, slot, number, tensor):
        lengths, code = step.lengths[slot.task], slot.code.items
        rows = code.rows[0].of(lengths, len(lengths[code.length_entry]))
        starts = [sum(rows[:item]) for item in range(len(rows))]
        key = (step.number, f"{slot.task}/{slot.call.rpartition('.')[0]}")
        if slot.sequence_group:
            first, last = slice_rows(code, lengths, slot.items[0], len(slot.sequence_group), 0)[slot.begin :][:2]
            pieces = [(starts[slot.items[0]] + first, tensor)]
            assert last - first == len(tensor)
        else:
            sizes = [rows[item] for item in slot.items]
            pieces = [(starts[item], part) for item, part in zip(slot.items, tensor.split(sizes), strict=True)]
        self.given.setdefault(key, (sum(rows), tensor.shape[1:], [[], []]))[2][number] += pieces

    def differences(self):
        """The largest difference, in values and gradients, from the oracle: every rank adds what it gave into a buffer
        of zeros, and the buffers are all-reduced. With how many it has compared."""
        shapes = {}
        table = [None] * dist.get_world_size()
        dist.all_gather_object(table, {key: entry[:2] for key, entry in self.given.items()})
        for entries in table:
            shapes |= entries
        errors, count = [0.0, 0.0], 0
        for key in sorted(shapes):
            num_rows, rest = shapes[key]
            for number in range(2):
                buffer = torch.zeros(num_rows, *rest, dtype=torch.float64)
                for first, tensor in self.given.get(key, (0, (), [[], []]))[2][number]:
                    buffer[first : first + len(tensor)] += tensor.cpu()
                dist.all_reduce(buffer)
                if key in self.taken:
                    errors[number] = max(errors[number], float((buffer - self.taken[key][number].cpu()).abs().max()))
                    count += 1
        return errors, count


def train_beside_the_oracle(rank, num_ranks, seed, sequence_degree, **options):
    with random_parts(seed, sequence_degree), Reshards() as reshards:
        train_vlm(rank, num_ranks, "colocate", num_ranks, **options)
    return reshards.differences()


@pytest.mark.parametrize("options", [{}, {"images": "one long"}])
def test_the_reshard_is_what_summing_buffers_gives(pool, options):
    answers = pool.run(3, train_beside_the_oracle, 1, 3, **options)
    assert sum(count for _, count in answers) > 10
    for errors, _ in answers:
        assert errors == [0.0, 0.0]


def train_recorded(rank, num_ranks, plan):
    """Trains on batches that never come again; returns, in order, the steps whose plan was requested, whose program was
    wanted, and that ran."""
    events = []
    request, program, step = Microbatches.request_plan, Microbatches.program, Executor.step

    def requesting(self, key, *arguments):
        events.append(("requested", key))
        request(self, key, *arguments)

    def wanting(self, key, profile):
        events.append(("wanted", key))
        return program(self, key, profile)

    def running(self, number, *arguments, **options):
        events.append(("ran", number))
        return step(self, number, *arguments, **options)

    with (
        mock.patch.object(Microbatches, "request_plan", requesting),
        mock.patch.object(Microbatches, "program", wanting),
        mock.patch.object(Executor, "step", running),
        mock.patch.object(microbatches, "BackgroundPlanner", PlansInProcess),
        mock.patch.dict(IMAGES, {"others": lambda number: (1 + number, 2)}),
    ):
        train_vlm(rank, num_ranks, plan, images="others")
    return events


@pytest.mark.parametrize("plan", ["colocate", "pipeline"])
def test_a_step_is_planned_before_the_one_before_it_runs(pool, plan):
    events, _ = pool.run(2, train_recorded, plan)
    wanted = [key for kind, key in events if kind == "wanted"]
    assert len(set(wanted)) == len(wanted) > 2
    for step, key in enumerate(wanted[1:]):
        assert events.index(("requested", key)) < events.index(("ran", step))
