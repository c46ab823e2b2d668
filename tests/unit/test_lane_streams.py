"""Streams and events of lanes, without a GPU: what each instruction has waited for when it starts."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest

import small
from random_plans import contended, random_lane_plan
from spindle.plan import format_plan, parse_plan
from spindle.program import Backward, Forward, launch_order, lower, needed_pairs

torch = pytest.importorskip("torch")

from spindle.errors import PlanError, TrainingError  # noqa: E402
from spindle.run import lanes as lanes_module  # noqa: E402
from spindle.run import shards as shards_module  # noqa: E402
from spindle.run.lanes import Lanes  # noqa: E402
from spindle.run.regions import Region, region_positions  # noqa: E402
from spindle.run.shards import Shards  # noqa: E402
from spindle.train.plan import _with_lanes  # noqa: E402

TASKS = {"first": ["vision", "head"], "second": ["text", "head"], "third": ["audio"]}


class Stream:
    """What is done when the next kernel of this stream starts."""

    def __init__(self) -> None:
        self.done: set[int] = set()

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done

    def wait_event(self, event: frozenset[int]) -> None:
        self.done |= event

    def record_event(self) -> frozenset[int]:
        return frozenset(self.done)


@contextmanager
def streams():
    made: dict[int, Stream] = {}

    def stream_of(lane):
        return made.setdefault(lane, Stream())

    with (
        mock.patch.object(lanes_module, "lane_stream", stream_of),
        mock.patch.object(lanes_module, "_stream_of_lane", stream_of),
        mock.patch.object(torch.cuda, "stream", return_value=nullcontext()),
    ):
        yield made


def lanes_of(program, rank, *, shares_gpu=False):
    world = SimpleNamespace(device=torch.device("cuda"), size=program.num_ranks, shares_gpu=shares_gpu)
    place = launch_order(program)
    compute = sorted(program.compute_of_rank(rank), key=lambda number: place[number])
    transfer, sync = (program.lanes[lane].of_rank(rank).tolist() for lane in (1, 2))
    return Lanes(program, SimpleNamespace(compute=compute, transfer=transfer, sync=sync), world), compute


def started(program, rank, *, in_regions):
    """For each instruction that a rank launches: what it has waited for. Messages count as done when they are sent;
    whatever needs one waits for it then."""
    made: dict[int, frozenset[int]] = {}
    needs = needed_pairs(program).tolist()
    with streams() as of_lane:
        lanes, compute = lanes_of(program, rank)
        communication = [number for lane in (1, 2) for number in program.lanes[lane].of_rank(rank).tolist()]
        passes = [number for number in compute if isinstance(program.instructions[number], Forward | Backward)]
        regions = [(number,) for number in compute]
        if in_regions:
            waiting = {after for before, after in needs if before in communication}
            regions = region_positions(
                passes,
                lanes.needs_of(passes),
                can_begin=lambda number: True,
                can_follow=lambda number: number not in waiting,
            )
            regions += [(number,) for number in compute if number not in passes]
        lanes.begin()
        launched: set[int] = set()
        for positions in regions:
            region = lanes.region_of(positions) if len(positions) > 1 else Region.of_one(positions[0])
            for number in positions:
                with lanes.on_stream_of(number):
                    stream = of_lane[lanes._lane_at[number]]
                    stream.done |= {before for before, after in needs if after == number and before in communication}
                    if len(positions) == 1:
                        made[number] = frozenset(stream.done)
                        stream.done.add(number)

            def replay(region=region):
                number_of_stream = (lanes._num_regions - 1) % len(lanes_module._REGION_LANES)
                stream = of_lane[lanes_module._REGION_LANES[number_of_stream]]
                begin, ends = frozenset(stream.done), {}
                for number, needed in region.needs.items():
                    made[number] = begin.union(*(ends[before] for before in needed))
                    ends[number] = made[number] | {number}
                region.events = {number: ends[number] for number in region._awaited}
                stream.done |= frozenset().union(*ends.values())
                return False

            if len(positions) > 1:
                lanes.launch(region, replay)
            launched.update(positions)
            for number in communication:
                own = {before for before, after in needs if after == number and before in compute}
                if number not in made and own <= launched:
                    with lanes.on_communication_stream(number):
                        made[number] = frozenset(of_lane[lanes_module.COMMUNICATION].done)
        lanes.join()
        assert set(compute) <= of_lane[0].done
    return made, compute, needs, [len(positions) for positions in regions]


@pytest.mark.parametrize("in_regions", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_all_that_a_lane_or_a_message_needs_is_done_when_it_starts(seed, in_regions):
    profile = contended(small.workload_profile(TASKS, num_devices=2 + seed % 3))
    program = lower(random_lane_plan(profile, f"plan {seed} {'weight ' * (seed % 2)}lanes"), profile)
    if program.plan.num_lanes == 1:
        pytest.skip("one lane")
    for rank in range(program.num_ranks):
        made, compute, needs, _ = started(program, rank, in_regions=in_regions)
        assert set(compute) <= set(made)
        for before, after in needs:
            if before in compute and after in made:
                assert before in made[after]


@pytest.mark.parametrize("seed", range(12))
def test_regions_make_no_pass_wait_for_more(seed, monkeypatch):
    monkeypatch.setattr(lanes_module, "_REGION_LANES", range(-100, -1))  # else one follows the fourth before it
    profile = contended(small.workload_profile(TASKS, num_devices=2 + seed % 3))
    program = lower(random_lane_plan(profile, f"plan {seed} lanes"), profile)
    if program.plan.num_lanes == 1:
        pytest.skip("one lane")
    for rank in range(program.num_ranks):
        one_by_one, *_ = started(program, rank, in_regions=False)
        in_regions, *_ = started(program, rank, in_regions=True)
        for number, waited_for in in_regions.items():
            if isinstance(program.instructions[number], Forward | Backward):  # messages keep the order of the host
                assert waited_for <= one_by_one[number]


def test_a_rank_without_messages_launches_all_its_passes_together():
    profile = contended(small.workload_profile(TASKS, num_devices=1))
    *_, sizes = started(lower(random_lane_plan(profile, "plan 0 lanes"), profile), 0, in_regions=True)
    assert len(sizes) == 2  # and the optimizer


def test_virtual_devices_have_one_lane():
    profile = contended(small.workload_profile(TASKS, num_devices=2))
    program = next(
        program
        for seed in range(20)
        if (program := lower(random_lane_plan(profile, f"plan {seed} lanes"), profile)).plan.num_lanes > 1
    )
    with streams(), pytest.raises(TrainingError, match=r"virtual devices have one.*lanes=1"):
        lanes_of(program, 0, shares_gpu=True)


def test_lanes_that_a_profile_suggests_on_virtual_devices_are_refused_with_what_to_do():
    profile = contended(small.workload_profile(TASKS, num_devices=2))
    world = SimpleNamespace(device=torch.device("cuda"), size=2, shares_gpu=True)
    with pytest.raises(PlanError, match=r"2 ranks share the GPU; plan with Planning\(lanes=1\)"):
        _with_lanes(SimpleNamespace(num_lanes=3), profile, world, print)


def test_every_lane_waits_for_gathered_parameters_once_in_a_step(monkeypatch):
    profile = contended(small.workload_profile(TASKS, num_devices=2))
    plan = parse_plan("# optimizer sharded\n" + format_plan(random_lane_plan(profile, "plan 3 lanes")), profile)
    program = lower(plan, profile)
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in profile.graph.parameters]
    world = SimpleNamespace(device=torch.device("cuda"), rank=0, size=2, shares_gpu=False)
    waits: list[str] = []
    current = "lane 0"
    monkeypatch.setattr(shards_module, "_stream", lambda: current)
    request = SimpleNamespace(wait=lambda: waits.append(current))
    monkeypatch.setattr(shards_module, "start_all_gather", lambda *_: request)
    shards = Shards(program, parameters, world)
    shards.attach()
    bucket = next(bucket for bucket in program.buckets if 0 in bucket.ranks)
    for _ in range(2):
        shards.wait_all()
        waits.clear()
        shards.start_gather(bucket)
        for current in ("lane 0", "lane 1", "lane 1", "lane 0"):  # noqa: B007
            if shards.is_gathering(bucket):
                shards.wait(bucket)
        assert waits == ["lane 0", "lane 1"]
    shards.wait_all()
    current = "lane 2"
    assert not shards.is_gathering(bucket)
