"""Colours of modules can be told apart by people who see fewer colours, and in print."""

from __future__ import annotations

from itertools import combinations

import pytest

from colour_difference import DICHROMATS, difference
from spindle.report.palette import COLOURS, darker


def test_the_distance_is_that_of_the_reference():
    # colorspacious 1.1.2, the same colours under the same conditions.
    assert difference("#e69f00", "#f0e442") == pytest.approx(20.8, abs=0.1)
    assert difference("#e69f00", "#cc79a7", "tritanope") == pytest.approx(11.0, abs=0.1)
    assert difference("#0072b2", "#cc79a7", "protanope") == pytest.approx(14.0, abs=0.1)
    assert difference("#1f6fb4", "#8a63b5", "protanope") == pytest.approx(0.2, abs=0.1)


@pytest.mark.parametrize("viewer", [None, *DICHROMATS])
def test_any_two_of_the_first_eight_colours_differ_by_ten(viewer):
    pairs = {pair: difference(*pair, viewer) for pair in combinations(COLOURS[:8], 2)}
    assert min(pairs.values()) >= 10, min(pairs.items(), key=lambda item: item[1])


@pytest.mark.parametrize("viewer", [None, *DICHROMATS])
def test_backward_is_not_mistaken_for_forward_of_its_module(viewer):
    assert all(difference(colour, darker(colour), viewer) >= 8 for colour in COLOURS[:8])


def test_all_colours_are_different():
    assert len(set(COLOURS)) == len(COLOURS) == 24
