"""Full garbage collections do not stall steps, and what a dropped plan held is still freed."""

from __future__ import annotations

import gc
import weakref

import pytest

from spindle.train.garbage import collect_all, frozen_objects


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_objects_from_before_are_not_visited_by_a_collection():
    with frozen_objects():
        frozen = gc.get_freeze_count()
        assert frozen > 1000
        assert len(gc.get_objects()) < frozen / 10
    assert gc.get_freeze_count() == 0


def test_garbage_made_meanwhile_is_collected():
    with frozen_objects():
        reference = weakref.ref(Node())
        gc.collect()
        assert reference() is None


def test_frozen_garbage_is_collected_when_a_plan_is_dropped():
    node = Node()
    reference = weakref.ref(node)
    with frozen_objects():
        del node
        gc.collect()
        assert reference() is not None
        collect_all()
        assert reference() is None
        assert gc.get_freeze_count() > 0


def test_objects_that_the_user_froze_stay_frozen():
    gc.freeze()
    count = gc.get_freeze_count()
    with frozen_objects():
        pass
    collect_all()
    assert gc.get_freeze_count() >= count * 0.9
