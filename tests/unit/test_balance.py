"""Items to devices and sequences to replicas, in integers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spindle.errors import InputError
from spindle.planners.balance import NOT_ALLOWED, assign_items, assign_sequences


def split_times(times, degrees, loss_percent=12):
    """Rows of times over groups: an item on g devices takes a g-th, and so much more."""
    cost = np.asarray(times, dtype=np.int64)
    return np.stack([cost if degree == 1 else cost * (100 + loss_percent) // (100 * degree) for degree in degrees])


def images(num_items, sigma=1.0, seed=0):
    """Patches of images: log-normal, 64 to 16,384; and nanoseconds of an encoder."""
    patches = np.random.default_rng(seed).lognormal(np.log(1500), sigma, num_items)
    patches = np.clip(np.rint(patches), 64, 16384).astype(np.int64)
    return patches, (patches * patches) // 2 + 3000 * patches


@pytest.mark.parametrize("num_devices", [16, 64, 512])
@pytest.mark.parametrize("seed", range(3))
def test_a_long_tail_is_level_once_long_items_are_split(num_devices, seed):
    _, cost = images(4 * num_devices, seed=seed)
    degrees = (1, 2, 4, 8)
    result = assign_items(split_times(cost, degrees), degrees, [8] * (num_devices // 8))
    assert result.imbalance <= 1.10
    assert result.load_ns.max() <= 1.10 * cost.sum() / num_devices


def test_an_item_longer_than_the_mean_is_split_and_others_are_not():
    cost = [800] + [100] * 8
    whole = assign_items([cost], [1], [8])
    result = assign_items(split_times(cost, (1, 2, 4, 8), 0), (1, 2, 4, 8), [8])
    assert whole.load_ns.max() == 800
    assert result.load_ns.max() == 200
    assert result.degree[0] == 4
    assert (result.degree[1:] == 1).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_loads_are_those_of_the_items_and_groups_lie_inside_islands(data):
    islands = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    cost = data.draw(st.lists(st.integers(1, 10**9), max_size=24))
    before = data.draw(st.lists(st.integers(0, 10**8), min_size=sum(islands), max_size=sum(islands)))
    degrees = (1, 2, 3, 4)
    times = split_times(cost, degrees) if cost else np.zeros((4, 0), dtype=np.int64)
    result = assign_items(times, degrees, islands, before)
    again = assign_items(times, degrees, islands, before)
    assert (result.first_device == again.first_device).all()
    island_of = np.repeat(np.arange(len(islands)), islands)
    work = np.array(before, dtype=np.int64)
    for item in range(len(cost)):
        devices = list(result.devices_of(item))
        assert len(set(island_of[devices])) == 1
        work[devices] += times[degrees.index(len(devices)), item]
    # Members of a group wait for each other, so a device may be busy for longer than it works, never for less.
    assert (result.load_ns >= work).all()
    assert result.load_ns.max(initial=0) == max([*before, *(result.load_ns.tolist())])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_no_worse_than_longest_first_may_be_and_no_better_than_the_optimum(cost):
    num_devices = 3
    optimum = min(
        max(sum(time for time, at in zip(cost, places, strict=True) if at == device) for device in range(num_devices))
        for places in product(range(num_devices), repeat=len(cost))
    )
    slowest = assign_items([cost], [1], [num_devices]).load_ns.max()
    assert optimum <= slowest <= (4 / 3 - 1 / 9) * optimum + 1e-9


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=4))
def test_with_groups_it_is_never_better_than_all_work_and_never_worse_than_whole_items(cost):
    degrees = (1, 2)
    times = split_times(cost, degrees)
    places = [(0,), (1,), (2,), (3,), (0, 1), (2, 3)]

    def slowest(chosen):
        loads = [0] * 4
        for item, devices in enumerate(chosen):
            for device in devices:
                loads[device] += int(times[len(devices) - 1, item])
        return max(loads)

    optimum = min(slowest(chosen) for chosen in product(places, repeat=len(cost)))
    found = assign_items(times, degrees, [4]).load_ns.max()
    assert optimum <= found <= assign_items(times[:1], degrees[:1], [4]).load_ns.max()


def test_devices_that_are_busy_get_less():
    result = assign_items([[100] * 10], [1], [2], [600, 0])
    assert result.load_ns.tolist() == [800, 800]


def test_fewer_items_than_devices_and_no_items_at_all_are_ordinary():
    assert (assign_items([[5, 7]], [1], [8]).load_ns > 0).sum() == 2
    empty = assign_items(np.zeros((1, 0), dtype=np.int64), [1], [8], list(range(8)))
    assert empty.load_ns.tolist() == list(range(8))


def test_groups_of_a_tensor_degree_are_aligned_in_their_island():
    result = assign_items([[10, 20, 30], [6, 11, 16]], [2, 4], [5, 4])
    assert set(result.first_device.tolist()) <= {0, 2, 5, 7}
    assert set(result.degree.tolist()) <= {2, 4}
    assert result.load_ns[4] == 0


def test_many_short_items_are_not_heaped_on_few_devices():
    """By p² alone, 64 frames of 256 patches weigh as much as one image of 2,048 patches, and so go to one device."""
    lengths = [2048] * 7 + [256] * 64
    times = np.interp(lengths, [256, 2048], [1_000_000, 10_000_000]).astype(np.int64)
    result = assign_items([times], [1], [8])
    squares = assign_items([[length * length for length in lengths]], [1], [8])
    actual = np.zeros(8, dtype=np.int64)
    np.add.at(actual, squares.first_device, times)
    assert result.imbalance <= 1.05
    assert actual.max() / actual.mean() > 1.3


@pytest.mark.parametrize("num_replicas", [4, 8])
def test_sequences_are_level_over_replicas(num_replicas):
    _, cost = images(32 * num_replicas)
    assert assign_sequences(cost, num_replicas).imbalance <= 1.05


def test_a_long_sequence_is_alone_on_its_replica():
    assert assign_sequences([100, 10, 10, 10], 2).replica.tolist() == [0, 1, 1, 1]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.data())
def test_every_replica_has_a_sequence_and_sums_are_right(num_replicas, data):
    times = data.draw(st.lists(st.integers(0, 10**6), min_size=num_replicas, max_size=20))
    result = assign_sequences(times, num_replicas)
    assert set(result.replica.tolist()) == set(range(num_replicas))
    assert result.time_ns.tolist() == np.bincount(result.replica, times, num_replicas).astype(int).tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: assign_sequences([1, 2], 3), r"2 sequences for 3 replicas; give more microbatches"),
        (lambda: assign_items([[1, int(NOT_ALLOWED)]], [1], [4]), r"item 1 is allowed on no group"),
        (lambda: assign_items([[1]], [8], [4, 4]), r"a group of 8 devices fits into no island"),
        (lambda: assign_items([[1], [1]], [2, 3], [4]), r"multiples of the smallest group"),
        (lambda: assign_items([[1]], [1], [4], [0]), r"4 devices, and 1 loads"),
    ],
)
def test_what_cannot_be_assigned_is_refused_in_a_sentence(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_items_that_take_too_long_are_shared_even_if_devices_are_level():
    times = np.array([[40, 40, 10, 10], [22, 22, 6, 6]])
    level = assign_items(times, (1, 2), [2])
    assert level.degree.tolist() == [1, 1, 1, 1]
    assert level.imbalance == 1
    assert assign_items(times, (1, 2), [2], most_ns=30).degree.tolist() == [2, 2, 1, 1]
    assert assign_items(times, (1, 2), [2], most_ns=1).degree.tolist() == [2, 2, 2, 2]  # as fast as can be
