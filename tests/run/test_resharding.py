"""Which rank holds which slice, and what ranks send each other when that changes: the map, `transfer`, and tensors that
follow it, with ranks as threads of one process."""

from __future__ import annotations

from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import small
from spindle.plan import parse_plan
from spindle.program import (
    Box,
    Slice,
    Transfer,
    flat_pieces,
    keep_unused,
    lower,
    main_replicas,
    moves_between,
    optimizer_sharding,
    state_sharding,
    transfer,
    weight_sharding,
)

NUM_RANKS = 6

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


@st.composite
def layouts(draw, shape):
    """A parameter on some ranks: tensor-parallel along any dimension, replicated, and perhaps each replica group in
    ZeRO-1 shards, as a program would lay it out."""
    size = draw(st.sampled_from([1, 2, 3])) if shape else 1
    num_replicas = draw(st.integers(1, NUM_RANKS // size))
    ranks = draw(st.permutations(range(NUM_RANKS)))[: size * num_replicas]
    dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
    in_parts = draw(st.booleans())
    slices = {}
    for place in range(size):
        shard = Slice.shard(shape, dim, place, size)
        group = ranks[place * num_replicas : (place + 1) * num_replicas]
        if in_parts:
            before = draw(st.integers(0, 5))  # elements of another parameter in the same bucket
            _, (_, pieces) = flat_pieces([before, shard.num_elements], num_replicas)
            slices |= {group[piece.part]: Slice(shard.box, piece.first, piece.last) for piece in pieces}
        else:
            slices |= dict.fromkeys(group, shard)
    return slices


@st.composite
def changes(draw):
    """Shapes of some parameters, with two layouts of each."""
    all_shapes = {f"p{number}": draw(shapes) for number in range(draw(st.integers(1, 3)))}
    old, new = ({name: draw(layouts(shape)) for name, shape in all_shapes.items()} for _ in range(2))
    return all_shapes, old, new


def elements_of_box(shape, box):
    ranges = [range(offset, offset + length) for offset, length in zip(box.offsets, box.lengths, strict=True)]
    return np.arange(prod(shape)).reshape(shape)[np.ix_(*ranges)].ravel().tolist() if shape else [0]


def elements(shape, part):
    """The elements of a slice, as its tensor has them in memory."""
    return elements_of_box(shape, part.box)[part.first : part.last]


@given(changes())
def test_a_slice_is_its_boxes_in_the_order_of_memory(change):
    all_shapes, old, _ = change
    for name, slices in old.items():
        for part in slices.values():
            boxes = list(part.boxes())
            in_boxes = [element for _, box in boxes for element in elements_of_box(all_shapes[name], box)]
            assert in_boxes == elements(all_shapes[name], part)
            assert prod(part.shape) == part.num_elements == len(in_boxes)
            assert [begin for begin, _ in boxes] == [
                sum(box.num_elements for _, box in boxes[:number]) for number in range(len(boxes))
            ]
            assert len(boxes) <= max(1, 2 * len(all_shapes[name]) - 1)


@given(changes())
def test_every_missing_element_is_sent_once_and_no_other(change):
    all_shapes, old, new = change
    received = defaultdict(Counter)
    for sent in transfer(old, new):
        shape = all_shapes[sent.parameter]
        moved = elements_of_box(shape, sent.box)
        assert set(moved) <= set(elements(shape, old[sent.parameter][sent.source]))
        received[sent.parameter, sent.destination].update(moved)
    for name, slices in new.items():
        for rank in range(NUM_RANKS):
            wanted = elements(all_shapes[name], slices[rank]) if rank in slices else []
            present = elements(all_shapes[name], old[name][rank]) if rank in old[name] else []
            # The lower bound: what a rank lacks, and nothing twice.
            assert received[name, rank] == Counter(set(wanted) - set(present))


@given(changes())
def test_a_transfer_lies_in_one_box_of_either_slice(change):
    _, old, new = change
    for sent in transfer(old, new):
        for part in (old[sent.parameter][sent.source], new[sent.parameter][sent.destination]):
            assert sum(held.overlap(sent.box) == sent.box for _, held in part.boxes()) == 1


@given(changes(), st.randoms())
def test_ranks_that_know_the_same_in_another_order_find_the_same(change, random):
    _, old, new = change

    def shuffled(sharding):
        names = random.sample(sorted(sharding), len(sharding))
        return {name: dict(random.sample(sorted(sharding[name].items()), len(sharding[name]))) for name in names}

    assert transfer(shuffled(old), shuffled(new)) == transfer(old, new)
    assert transfer(old, old) == []


@given(changes())
def test_main_replicas_hold_every_element_once(change):
    all_shapes, old, _ = change
    for name, slices in old.items():
        main = main_replicas(slices)
        held = Counter(element for part in main.values() for element in elements(all_shapes[name], part))
        assert held == Counter(range(prod(all_shapes[name])))
        assert main.items() <= slices.items()


def test_replicas_share_the_work():
    whole = Slice.whole((8, 8))
    old = {f"p{number}": dict.fromkeys(range(3), whole) for number in range(6)}
    new = {name: dict.fromkeys(range(6), whole) for name in old}
    sources = Counter(sent.source for sent in transfer(old, new))
    assert sources == {0: 6, 1: 6, 2: 6}


def test_large_parameters_are_assigned_first():
    old = {"a": {0: Slice.whole((1,)), 1: Slice.whole((1,))}, "b": {0: Slice.whole((9,)), 1: Slice.whole((9,))}}
    new = {name: {2: slices[0]} for name, slices in old.items()}
    assert [(sent.parameter, sent.source) for sent in transfer(old, new)] == [("b", 0), ("a", 1)]


def test_sources_in_the_same_island_come_first():
    whole = Slice.whole((4,))
    old, new = {"p": dict.fromkeys((0, 2), whole)}, {"p": dict.fromkeys(range(4), whole)}
    assert [(sent.source, sent.destination) for sent in transfer(old, new, island_of=[0, 0, 1, 1])] == [(0, 1), (2, 3)]


def test_another_tensor_degree_moves_what_a_rank_lacks_of_its_shard():
    halves = {place: Slice.shard((4, 3), 0, place, 2) for place in range(2)}
    quarters = {place: Slice.shard((4, 3), 0, place, 4) for place in range(4)}
    sent = transfer({"p": halves}, {"p": quarters})
    row = lambda number: Box((number, 0), (1, 3))  # noqa: E731
    # Rank 0 keeps row 0 and rank 1 has to get row 1 from it.
    assert sent == [Transfer("p", 0, 1, row(1)), Transfer("p", 1, 2, row(2)), Transfer("p", 1, 3, row(3))]


def test_what_nobody_holds_is_new_and_not_sent():
    assert transfer({}, {"p": {0: Slice.whole((2,))}}) == []
    with pytest.raises(AssertionError, match="no rank holds"):
        transfer({"p": {0: Slice.shard((2,), 0, 0, 2)}}, {"p": {1: Slice.whole((2,))}})


def test_unused_parameters_stay_with_one_rank_each():
    halves = {rank: Slice.shard((4,), 0, rank % 2, 2) for rank in (3, 2, 1, 0)}
    assert keep_unused({}, {"p": halves}) == {"p": {0: halves[0], 1: halves[1]}}


# Of programs.


def program_of(devices, degree=1, shards=False):
    profile = small.workload_profile({"x": ["vision"]}, num_devices=4).with_degrees({"vision": degree})
    plan = parse_plan(f"x/vision#0[0:4]*4@{devices}", profile)
    return lower(replace(plan, shard_optimizer=shards), profile), profile


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("degree", [1, 2])
def test_a_program_shards_weights_by_tensor_groups_and_optimizer_state_by_buckets(degree, shards):
    program, profile = program_of("0-3", degree, shards)
    weights = weight_sharding(program, profile.graph)
    optimizer = optimizer_sharding(program, profile.graph, weights)
    for parameter in profile.graph.parameters:
        size = parameter.num_elements
        assert weights[parameter.name] == {rank: Slice.shard((size,), 0, rank % degree, degree) for rank in range(4)}
        updated = [part.num_elements for part in optimizer[parameter.name].values()]
        assert sum(updated) == size * (1 if shards else 4 // degree)


def test_moves_of_a_sharded_optimizer_are_predicted_too():
    program, profile = program_of("0-3", shards=True)
    fewer, _ = program_of("0-1", shards=True)
    before, after = (state_sharding(each, profile.graph) for each in (program, fewer))
    moves = moves_between(before, after, profile.graph, profile.cluster)
    numerics, elements = profile.graph.numerics, sum(parameter.num_elements for parameter in profile.graph.parameters)
    # Weights are there. Ranks 2 and 3 give up half of the optimizer state; rank 0 keeps a quarter, and rank 1 what it
    # had of the second half, which is none.
    assert {move.source for move in moves} == {1, 2, 3}
    assert sum(move.num_bytes for move in moves) == elements * numerics.optimizer_bytes * 3 // 4


# Tensors. Ranks are threads that exchange messages through a table.

torch = pytest.importorskip("torch")

from spindle.run import resharding  # noqa: E402
from spindle.run.resharding import TensorSpec, box_view, reshard, send_tensors, slice_of  # noqa: E402
from spindle.train.optimizer_reshard import OptimizerState, reshard_state  # noqa: E402


class Exchange:
    """Messages between threads: each rank puts in what it sends, and takes out what it receives."""

    def __init__(self, num_ranks):
        self.size, self.barrier = num_ranks, Barrier(num_ranks, timeout=20)
        self.messages, self.objects, self.num_elements = defaultdict(list), {}, Counter()


class ThreadWorld:
    def __init__(self, exchange, rank):
        self.rank, self.size, self.device, self._exchange = rank, exchange.size, torch.device("cpu"), exchange

    def exchange(self, sends, receives):
        shared = self._exchange
        for send in sends:
            shared.messages[self.rank, send.peer].append(send.tensor.clone())
            shared.num_elements[self.rank] += send.tensor.numel()
        shared.barrier.wait()
        for receive in receives:
            receive.tensor.copy_(shared.messages[receive.peer, self.rank].pop(0))
        shared.barrier.wait()

    def gather_objects(self, value):
        self._exchange.objects[self.rank] = value
        self._exchange.barrier.wait()
        return [self._exchange.objects[rank] for rank in range(self.size)]

    def broadcast_object(self, value):
        self._exchange.barrier.wait()
        return value


def on_all_ranks(function):
    """What `function(world)` gives on each rank, and how many elements each has sent."""
    exchange = Exchange(NUM_RANKS)
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        answers = list(pool.map(lambda rank: function(ThreadWorld(exchange, rank)), range(NUM_RANKS)))
    assert not any(exchange.messages.values())
    return answers, exchange.num_elements


@given(changes(), st.sampled_from([1, 7, 1 << 24]))
def test_tensors_arrive_as_their_new_slices(change, round_elements):
    all_shapes, old, new = change
    wholes = {name: torch.arange(float(prod(shape))).reshape(shape) for name, shape in all_shapes.items()}
    spec = TensorSpec(torch.float32, torch.device("cpu"))

    def run(world):
        own = {name: slice_of(wholes[name], old[name][world.rank]) for name in old if world.rank in old[name]}
        return dict(reshard(world, old, new, own, dict.fromkeys(new, spec)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resharding, "_ROUND_ELEMENTS", round_elements)
        answers, num_sent = on_all_ranks(run)
    for rank, answer in enumerate(answers):
        assert answer.keys() == new.keys()
        for name, tensor in answer.items():
            if rank not in new[name]:
                assert tensor is None
            else:
                assert torch.equal(tensor, slice_of(wholes[name], new[name][rank]))
    assert sum(num_sent.values()) == sum(sent.box.num_elements for sent in transfer(old, new))


@given(changes())
def test_optimizer_state_follows_its_parameters(change):
    all_shapes, old, new = change
    means = {name: torch.randn(shape, dtype=torch.float64) for name, shape in all_shapes.items()}
    new = dict(list(new.items())[1:])  # the first parameter is frozen

    def state_on(rank):
        return {
            name: {"step": torch.tensor(3.0), "mean": slice_of(means[name], slices[rank]), "kind": "x"}
            for name, slices in old.items()
            if rank in slices
        }

    def run(world):
        settings = {name: {"lr": 0.5} for name in state_on(world.rank)}
        state = OptimizerState(
            num_steps=3 * bool(settings), sharding=old, states=state_on(world.rank), settings=settings
        )
        return reshard_state(world, state, new)

    answers, _ = on_all_ranks(run)
    expected = keep_unused(new, old)
    for rank, state in enumerate(answers):
        assert state.num_steps == 3
        assert state.sharding == expected
        assert state.settings == {name: {"lr": 0.5} for name in old}
        assert state.states.keys() == {name for name, slices in expected.items() if rank in slices}
        for name, values in state.states.items():
            assert values.keys() == {"step", "mean", "kind"}
            assert values["step"] == 3
            assert torch.equal(values["mean"], slice_of(means[name], expected[name][rank]))


def test_a_tensor_whose_slice_stays_is_not_copied():
    old = {"p": {0: Slice.whole((4,))}}
    tensor = torch.arange(4.0)
    (answer, *_), num_sent = on_all_ranks(
        lambda world: dict(
            reshard(world, old, old, {"p": tensor}, {"p": TensorSpec(torch.float32, torch.device("cpu"))})
        )
    )
    assert answer["p"] is tensor
    assert not num_sent


def test_boxes_of_a_range_are_views_of_its_tensor():
    part = Slice(Slice.whole((3, 4)).box, 2, 11)
    tensor = torch.zeros(part.shape)
    assert tensor.shape == (1, 9)
    for number, (_, box) in enumerate(part.boxes()):
        box_view(tensor, part, box).fill_(number + 1)
    assert tensor.tolist() == [[1, 1, 2, 2, 2, 2, 3, 3, 3]]


def test_tensors_are_overwritten_with_those_of_their_sources():
    shapes, sources = [(2, 3), (), (0,), (4,)], [1, 0, 3, 3]

    def run(world):
        tensors = [torch.full(shape, float(world.rank)) for shape in shapes]
        send_tensors(world, tensors, sources, [0, 2])
        return [tensor.unique().tolist() for tensor in tensors]

    answers, _ = on_all_ranks(run)
    for rank, answer in enumerate(answers):
        values = sources if rank in (0, 2) else [rank] * len(sources)
        assert answer == [[value] if shape != (0,) else [] for shape, value in zip(shapes, values, strict=True)]
