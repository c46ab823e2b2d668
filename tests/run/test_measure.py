"""Measuring layers: what is timed and how often, never how long it takes."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402

import spindle  # noqa: E402
from backends import rank_device  # noqa: E402
from preloaded import run_spindle  # noqa: E402
from spindle.cluster import Link, SmGroups  # noqa: E402
from spindle.errors import ProfileError, TrainingError  # noqa: E402
from spindle.graph import metagraph_of  # noqa: E402
from spindle.measure import LayerMeter, machine, measure_layers, measure_update, overlap  # noqa: E402
from spindle.measure.layers import shares  # noqa: E402
from spindle.measure.links import measure_all_to_all  # noqa: E402
from spindle.measure.p2p_latency import measure_p2p_latency, p2p_latency_from  # noqa: E402
from spindle.measure.rank_sync import RankSync  # noqa: E402
from spindle.measure.rates import rates_from  # noqa: E402
from spindle.measure.sm_times import measured_sms  # noqa: E402
from spindle.measure.timing import Work, warm_up  # noqa: E402
from spindle.measure.update import measure_gradient_sum  # noqa: E402
from spindle.profile import Profile, write_profile  # noqa: E402
from spindle.run import World  # noqa: E402
from spindle.train.bind import bind, code_of, trace_all  # noqa: E402
from spindle.train.kinds import kinds_of  # noqa: E402

CPU = torch.device("cpu")


class Block(nn.Module):
    """Equal in classes and shapes to any other of its width; `times` makes it another layer all the same."""

    def __init__(self, width=4, times=1):
        super().__init__()
        self.linear, self.times = nn.Linear(width, width), times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return x


class Tower(nn.Module):
    def __init__(self, num_blocks=5, width=4, **options):
        super().__init__()
        self.stem = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width, **options) for _ in range(num_blocks))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def task(name, batch_size, function):
    return spindle.task(name=name, batch_size=batch_size, per_sample_mean=True)(function)


def measured(tasks, num_devices=2, cache=None, batch=None, **options):
    """Samples by op, and the meter that took them."""
    examples = {task.name: batch or {"x": torch.ones(task.batch_size, 3)} for task in tasks}
    bound = bind("small", trace_all(tasks, examples))
    graph = metagraph_of(bound.workload)
    meter = LayerMeter(RankSync(World(0, 1, CPU), enabled=False), cache)
    code, kinds = [code_of(bound, op) for op in graph.metaops], kinds_of(bound, graph)
    samples = measure_layers(graph, code, kinds, examples, bound.batch_axes, num_devices, CPU, meter, **options)
    return samples, meter


def one_task(tower, name="a", batch_size=4):
    handle = spindle.module("tower", tower)
    return task(name, batch_size, lambda batch: handle(batch["x"]).mean())


def test_layers_that_tasks_share_are_timed_once():
    tower = spindle.module("tower", Tower())
    tasks = [task(name, 4, lambda batch: tower(batch["x"]).mean()) for name in ("a", "b", "c")]
    samples, meter = measured(tasks)
    assert meter.num_timed == 3 * 2  # stem, blocks and loss on 2 and 4 rows
    assert len(samples) == 9
    assert samples["a/tower#0[1:6]"] == samples["c/tower#0[1:6]"]


def test_a_task_with_rows_of_its_own_is_timed_on_these():
    tower = spindle.module("tower", Tower())
    tasks = [task(f"t{size}", size, lambda batch: tower(batch["x"]).mean()) for size in (4, 8)]
    samples, meter = measured(tasks)
    assert meter.num_timed == 3 * 3  # 2, 4 and 8 rows
    assert [samples[f"t{size}/tower#0[0:1]"].rows for size in (4, 8)] == [(2, 4), (4, 8)]


def test_layers_that_differ_in_a_setting_alone_are_timed_twice():
    towers = [spindle.module(f"tower{times}", Tower(times=times)) for times in (1, 2)]
    tasks = [task(tower.name, 4, lambda batch, tower=tower: tower(batch["x"]).mean()) for tower in towers]
    _, meter = measured(tasks)
    assert meter.num_timed == 2 * 2 * 2 + 2  # the losses are alike


def test_frozen_layers_are_not_trained_ones():
    trained, frozen = Tower(), Tower()
    frozen.requires_grad_(False)
    towers = [spindle.module(name, tower) for name, tower in (("trained", trained), ("frozen", frozen))]
    _, meter = measured([task(tower.name, 4, lambda batch, tower=tower: tower(batch["x"]).mean()) for tower in towers])
    assert meter.num_timed == 2 * 3 * 2


def test_three_layers_stand_for_a_long_run():
    ran = []

    class Noting(Block):
        def forward(self, x):
            if not isinstance(x, torch._subclasses.FakeTensor):
                ran.append(id(self))
            return super().forward(x)

    tower = nn.Sequential(*(Noting(3) for _ in range(7)))
    measured([one_task(tower)])
    counts = [ran.count(id(block)) for block in tower]
    assert len(set(counts[:3])) == 1
    assert counts[0] > counts[3]
    assert set(counts[3:]) == {1}  # the one pass over the whole batch


class Masked(nn.Module):
    """A mask is made after the first values of its blocks, so that the first block takes them in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(3, 4), nn.ModuleList(MaskedBlock() for _ in range(7))

    def forward(self, x):
        hidden = self.stem(x)
        mask = (x.sum(-1, keepdim=True) > 0).to(x.dtype)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return hidden


class MaskedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden, mask):
        return hidden + self.linear(hidden) * mask


def test_copies_of_layers_run_in_any_order_of_their_values():
    samples, _ = measured([one_task(Masked())], lanes=True)
    assert all(sample.contention for sample in samples.values())


def test_copies_of_layers_that_drop_values_on_the_way_run(monkeypatch):
    # ModernBERT's blocks take one of two masks and rotary embeddings; those that no later block reads are dropped.
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 32}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    model = transformers.ModernBertModel(transformers.ModernBertConfig(**sizes, **ids, vocab_size=61))
    handle = spindle.module("text", model)
    batch = {"ids": torch.randint(3, 61, (2, 8)), "mask": (torch.arange(8) < torch.tensor([[8], [6]])).long()}
    modern = task(
        "a", 2, lambda batch: handle(input_ids=batch["ids"], attention_mask=batch["mask"]).last_hidden_state.mean()
    )
    weights: dict[str, list[set[int]]] = {}
    measure = LayerMeter.contention

    def ran(meter, copies, **options):
        for copy in copies:
            copy.work.run()
            weights.setdefault(str(copy.key), []).append({id(parameter) for parameter in copy.work.parameters})
        return measure(meter, copies, **options)

    notices: list[str] = []
    monkeypatch.setattr(LayerMeter, "contention", ran)
    samples, _ = measured([modern], batch=batch, lanes=True, notify=notices.append)
    assert not notices
    assert all(sample.contention for sample in samples.values())
    assert any(len(set(map(frozenset, copies))) > 1 for copies in weights.values())


class PairBlock(Block):
    """A block that runs on at least two rows of real values."""

    def forward(self, x):
        if x.shape[0] < 2 and not isinstance(x, FakeTensor):
            raise ValueError("a row alone")
        return super().forward(x)


def test_shares_on_which_a_layer_does_not_run_are_no_reason_against_lanes():
    tower = Tower()
    tower.blocks = nn.ModuleList(PairBlock() for _ in range(5))
    notices: list[str] = []
    samples, _ = measured([one_task(tower)], num_devices=4, lanes=True, notify=notices.append)
    assert samples["a/tower#0[1:6]"].rows == (2, 4)
    assert not notices
    assert all(len(sample.contention) == len(sample.rows) for sample in samples.values())


def test_copies_that_fail_leave_a_plan_without_lanes(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no streams here")

    notices: list[str] = []
    monkeypatch.setattr(LayerMeter, "contention", fail)
    samples, _ = measured([one_task(Masked())], lanes=True, notify=notices.append)
    assert not any(sample.contention for sample in samples.values())
    assert len(notices) == 1
    assert "RuntimeError: no streams here" in notices[0]


def test_layers_are_measured_on_sms_that_are_granted():
    assert measured_sms(SmGroups(group_sms=8, num_groups=15, rest_sms=12)) == [16, 32, 48, 64, 80, 96, 112]
    assert measured_sms(SmGroups(group_sms=6, num_groups=8)) == [18, 36]
    assert measured_sms(SmGroups(group_sms=2, num_groups=16)) == [16]


def test_sms_that_cannot_be_split_leave_a_plan_without_quotas(monkeypatch):
    def fail(quotas: object) -> None:
        raise TrainingError(f"no {quotas} here")

    notices: list[str] = []
    monkeypatch.setattr("spindle.measure.sm_times.partitions", fail)
    groups = SmGroups(group_sms=8, num_groups=15, rest_sms=12)
    samples, _ = measured([one_task(Masked())], lanes=True, sm_groups=groups, notify=notices.append)
    assert all(sample.contention and sample.sm_times is None for sample in samples.values())
    assert len(notices) == 1
    assert re.fullmatch(r"no quotas: measuring .* failed with TrainingError: no \(112,\) here", notices[0])


def test_glue_is_timed_with_the_first_layer_and_listed_separately():
    tower = spindle.module("tower", Tower())
    tasks = [
        task("plain", 4, lambda batch: tower(batch["x"]).mean()),
        task("glued", 4, lambda batch: tower(batch["x"].cumsum(1)).mean()),
    ]
    _, meter = measured(tasks)
    assert meter.num_timed == 8  # only the stem differs


def test_an_op_that_needs_its_whole_batch_is_timed_on_that_alone():
    tower = spindle.module("tower", Tower(), whole_batch=True)
    samples, _ = measured([task("a", 6, lambda batch: tower(batch["x"]).mean())], num_devices=3)
    assert samples["a/tower#0[0:1]"].rows == (6,)
    assert samples["a/loss[0:1]"].rows == (2, 3, 6)


def test_a_share_that_an_op_does_not_run_on_is_left_out():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            torch._check(x.shape[0] != 2, lambda: "not two")
            return self.linear(x)

    samples, _ = measured([one_task(Picky())])
    assert samples["a/tower#0[0:1]"].rows == (4,)


def test_an_op_that_runs_on_nothing_says_why_and_where():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("no way back")

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return Broken.apply(self.linear(x))

    with pytest.raises(ValueError, match="no way back") as caught:
        measured([one_task(Layer())])
    assert "in task 'a', running a/tower#0[0:1] on its first batch" in caught.value.__notes__


def test_measuring_leaves_no_gradients_and_the_same_random_numbers():
    tower = Tower()
    one = one_task(tower)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    measured([one])
    assert torch.rand(1) == expected
    assert all(parameter.grad is None for parameter in tower.parameters())


def test_gradients_are_summed_at_a_rate():
    assert measure_gradient_sum(torch.device("cpu"), torch.float32) > 0


def test_an_optimizer_that_fails_has_no_rate():
    parameter = nn.Parameter(torch.ones(3))
    assert measure_update(lambda named: torch.optim.SGD([p for _, p in named], 0.1), {"p": parameter}, 4) > 0
    assert measure_update(lambda named: None, {"p": parameter}, 4) is None
    assert measure_update(lambda named: None, {"p": nn.Parameter(torch.ones(3), requires_grad=False)}, 4) is None


@pytest.mark.parametrize(("batch_size", "most", "expected"), [(16, 8, 6), (64, 8, 8), (64, 6, 6), (1, 8, 1)])
def test_shares_are_few_and_hold_both_ends(batch_size, most, expected):
    sizes = shares(batch_size, 8, most)
    assert len(sizes) == expected
    assert (sizes[0], sizes[-1]) == (-(-batch_size // 8), batch_size)


def test_rates_are_one_where_all_are_busy_and_never_rise():
    assert rates_from({1: 2.0, 2: 2.5, 4: 3.0}) == pytest.approx((1.5, 1.2, 1.1, 1.0))
    assert rates_from({1: 2.0, 2: 1.9, 3: 2.0}) == pytest.approx((2 / 1.9, 2 / 1.9, 1.0))
    assert rates_from({1: 3.0, 2: 2.0}) == (1.0, 1.0)  # noise never makes a lone device slower


# Two gloo processes stand for two shares of one GPU.
TOGETHER = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
os.environ["SPINDLE_VIRTUAL_DEVICES"] = "2"
import spindle

class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        if dist.get_rank() == 1 and x.shape[0] in {fails} and not isinstance(x, torch._subclasses.FakeTensor):
            raise ValueError("rank 1 cannot")
        return self.linear(x)

tower = spindle.module("tower", nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
alone = spindle.module("alone", Alone())

@spindle.task(batch_size=8, per_sample_mean=True)
def a(batch):
    return alone(tower(batch["x"])).mean()

trainer = spindle.Trainer([a], optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1))
profile = trainer.prepare({{"a": [{{"x": torch.ones(8, 3)}}]}}, progress=False)
curves = {{op.name: curve.num_devices for op, (curve,) in zip(profile.graph.metaops, profile.curves)}}
if trainer.rank == 0:
    print(curves["a/tower#0[0:2]"], curves["a/alone#0[0:1]"], len(profile.host_rates), profile.host_rates[-1])
"""


def together(tmp_path, fails):
    script = tmp_path / "train.py"
    script.write_text(TOGETHER.format(fails=fails))
    return run_spindle("launch", "-n", "2", str(script))


def test_ranks_that_measure_together_leave_out_what_one_of_them_cannot_run(tmp_path):
    done = together(tmp_path, fails={4})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(1, 2) (1,) 2 1.0\n"


def test_ranks_that_measure_together_end_together(tmp_path):
    done = together(tmp_path, fails={4, 8})
    assert done.returncode == 1
    assert "ValueError: rank 1 cannot" in done.stderr


# Training.


def test_training_on_a_cpu_leaves_the_cache_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path))
    trainer_with(None).fit(loaders(), steps=1, progress=False)
    assert not list(tmp_path.iterdir())


# A profile in place of measurements.


def trainer_with(profile, batch_size=4, tower=None):
    def sgd(named):
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)

    task = one_task(tower or Tower(), batch_size=batch_size)
    return spindle.Trainer([task], optimizer=sgd, planning=spindle.Planning(profile=profile))


def loaders(batch_size=4):
    return {"a": [{"x": torch.ones(batch_size, 3)}]}


@pytest.fixture(scope="module")
def profile() -> Profile:
    return trainer_with(None).prepare(loaders(), progress=False)


def test_a_given_profile_is_trained_with_and_nothing_is_measured(profile, tmp_path, monkeypatch):
    write_profile(tmp_path / "p.json", profile)
    monkeypatch.setattr("spindle.train.profiling.local_profile", None)
    for given in (profile, tmp_path / "p.json", str(tmp_path / "p.json")):
        trainer = trainer_with(given)
        trainer.fit(loaders(), steps=2, progress=False)
        assert trainer.profile == profile


def test_a_profile_of_other_tasks_is_refused(profile):
    def refused(message, **options):
        size = options.get("batch_size", 4)
        with pytest.raises(ProfileError, match=message):
            trainer_with(profile, **options).prepare(loaders(size), progress=False)

    refused(r"it has a/tower#0\[0:1\] with 1 layers over 4 samples, .* over 8 samples", batch_size=8)
    refused(r"it has no a/tower#0\[1:4\], this training has a/tower#0\[1:4\] with 3 layers", tower=Tower(3))
    refused("other weights", tower=Tower(width=5))


def test_a_profile_for_another_number_of_devices_is_refused(profile):
    two = replace(profile.cluster, islands=profile.cluster.islands * 2)
    with pytest.raises(ProfileError, match=r"Planning\(profile=...\) is for 2 devices, but 1 ranks were started"):
        trainer_with(replace(profile, cluster=two)).prepare(loaders(), progress=False)


@pytest.mark.parametrize(("transposes", "num_copies"), [(True, 1), (False, 0)])
def test_gradients_in_another_layout_are_copied_as_where_they_are_accumulated(transposes, num_copies):
    x = torch.randn(4, 3, requires_grad=True)

    def run() -> torch.Tensor:
        return (x.T if transposes else x).contiguous().exp()

    passes = warm_up(Work(run=run, leaves=(x,), parameters=(), device=CPU))
    passes.forward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        passes.backward()
    assert sum(event.name == "aten::copy_" for event in profiled.events()) == num_copies
    assert x.grad is None


def sums_beside_compute(rank: int, num_ranks: int, failing: int | None = None) -> overlap.Overlap:
    """What is found about sums beside compute; on a rank that fails, the work does not run."""
    layer, x = torch.nn.Linear(64, 64, device=rank_device()), torch.randn(32, 64, device=rank_device())

    def run() -> torch.Tensor:
        if rank == failing:
            raise ValueError("not here")
        return layer(x)

    world = World(rank, num_ranks, rank_device())
    work = Work(run=run, leaves=(), parameters=tuple(layer.parameters()), device=world.device)
    link = Link(bytes_per_s=1e12, latency_s=1e-5, collective_s=1e-4)
    with mock.patch.multiple(overlap, _SMALL=1 << 12, _LARGE=1 << 18):
        return overlap.measure_overlap(work, RankSync(world, enabled=True), world, link, torch.float32)


def islands_of_nodes(rank: int, num_ranks: int, nodes: tuple[int, ...]) -> list[int]:
    """Devices of the islands that are found, on ranks of these nodes of torchrun."""
    world = World(rank, num_ranks, rank_device())
    with mock.patch.dict(os.environ, {"GROUP_RANK": str(nodes[rank])}):
        return [island.num_devices for island in machine._cluster(world, torch.float32).islands]


def hand_over_beside_compute(rank: int, num_ranks: int, failing: int | None = None, runs: int = 0) -> float | None:
    """What is found about hand-overs; on a rank that fails, the work does not run more often than so."""
    layer, x = torch.nn.Linear(64, 64, device=rank_device()), torch.randn(32, 64, device=rank_device())
    ran = 0

    def run() -> torch.Tensor:
        nonlocal ran
        ran += 1
        if rank == failing and ran > runs:
            raise ValueError("not here")
        return layer(x)

    world = World(rank, num_ranks, rank_device())
    work = Work(run=run, leaves=(), parameters=tuple(layer.parameters()), device=world.device)
    return measure_p2p_latency(work, world)


def test_all_ranks_find_the_same_about_sums_beside_compute(pool):
    results = pool.run(2, sums_beside_compute)
    assert results[0] == results[1]
    assert results[0].overlap >= 1
    assert results[0].exchange_overlap > 1  # than a link of 1 TB/s
    assert results[0].collective_s >= 0


def test_where_one_rank_cannot_compute_nothing_is_said_of_sums_beside_it(pool):
    for result in pool.run(2, sums_beside_compute, 1):
        assert (result.overlap, result.exchange_overlap, result.collective_s) == (1, 1, 1e-4)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_find_the_same_about_hand_overs(pool, num_ranks):
    results = pool.run(num_ranks, hand_over_beside_compute)
    assert len(set(results)) == 1
    assert results[0] > 0


@pytest.mark.parametrize("runs", [0, 8])  # before any hand-over, and amid them
def test_where_one_rank_cannot_compute_nothing_is_said_of_hand_overs(pool, runs):
    assert pool.run(2, hand_over_beside_compute, 1, runs) == [None, None]


@pytest.mark.parametrize(("nodes", "sizes"), [((0, 0, 0), [3]), ((0, 0, 1), [2, 1])])
def test_the_ranks_of_each_node_are_an_island(pool, nodes, sizes):
    assert pool.run(3, islands_of_nodes, nodes) == [sizes] * 3


def test_a_hand_over_is_half_of_what_a_round_takes_beside_the_work_of_both():
    first = [9.0, 9.0, 1.0, 2.0, 3.0, 1.0], [5.0, 5.0, 4.5, 6.5, 5.5, 0.0]
    second = [1.0, 1.0, 4.0, 5.0, 4.0, 9.0], [9.0] * 6
    assert p2p_latency_from([first, second]) == 0.75
    assert p2p_latency_from([first, second, ([1.0], [2.0])]) == 0.75  # a rank without a partner


def test_one_process_hands_over_to_nobody():
    assert measure_p2p_latency(None, World(0, 1, CPU)) is None


def test_the_latency_of_a_link_is_that_of_a_hand_over(monkeypatch):
    monkeypatch.setattr("spindle.measure.machine.measure_p2p_latency", lambda work, world: 0.5)
    profile = trainer_with(None).prepare(loaders(), progress=False)
    assert profile.cluster.islands[0].link.latency_s == profile.cluster.islands[0].uplink.latency_s == 0.5


def measured_exchange(rank, num_ranks):
    return measure_all_to_all(World(rank, num_ranks, rank_device()))


def test_all_ranks_get_one_link_for_all_to_alls(pool):
    links = pool.run(3, measured_exchange)
    assert len(set(links)) == 1
    assert links[0].bytes_per_s > 0
    assert links[0].collective_s == links[0].latency_s
