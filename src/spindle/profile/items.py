"""How long items (images, clips) of different lengths take, from measurements of single items and of a whole batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from spindle.errors import ProfileError


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemTimes:
    """Seconds of one layer of an item call, on one device, on single items of these lengths. The op's curve was
    measured on a batch of items of lengths `together`.

    Between measured lengths p, the time of one item is a parabola a·p² + b·p + k through three neighbouring points.
    Items of a part share kernel launches, so several take less time than the sum of each alone: the batch's time,
    scaled by the part's share of its work, but at least the time of the longest item alone.
    """

    lengths: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    together: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 1:
            raise ProfileError(f"lengths of items must be increasing and at least 1, got {list(self.lengths)}")
        if not len(self.lengths) == len(self.forward_s) == len(self.backward_s):
            raise ProfileError("expected one forward and one backward time for each length of an item")

    def at(self, length: int) -> tuple[float, float]:
        """Forward and backward seconds of one item."""
        return _at(self.lengths, self.forward_s, length), _at(self.lengths, self.backward_s, length)

    def of_part(self, lengths: Sequence[int], together_s: tuple[float, float]) -> tuple[float, float]:
        """Forward and backward seconds of a part with items of these lengths; `together_s` are the times of the
        batch."""
        forward_s, backward_s = (
            _part_s(self.lengths, times, lengths, self.together, whole_s)
            for times, whole_s in zip((self.forward_s, self.backward_s), together_s, strict=True)
        )
        return forward_s, backward_s


def _part_s(
    measured: Sequence[int],
    times: Sequence[float],
    lengths: Sequence[int],
    reference: Sequence[int],
    reference_s: float,
) -> float:
    longest_s = _at(measured, times, max(lengths))
    if len(lengths) == 1:
        return longest_s
    share = sum(_work(measured, times, length) for length in lengths) / sum(
        _work(measured, times, length) for length in reference
    )
    return max(longest_s, reference_s * share)


def _work(lengths: Sequence[int], times: Sequence[float], length: int) -> float:
    """The work of an item: a·p² + b·p through the two longest measured lengths, because the time of a short item may be
    nothing but launch overhead."""
    long_rate = times[-1] / lengths[-1]
    if len(lengths) == 1:
        return long_rate * length
    short_rate = times[-2] / lengths[-2]
    square = min(max(0.0, (long_rate - short_rate) / (lengths[-1] - lengths[-2])), long_rate / lengths[-1])
    return (square * length + long_rate - square * lengths[-1]) * length


def _at(lengths: Sequence[int], times: Sequence[float], length: int) -> float:
    """The time at a length. Below the shortest measured length it is constant; above the longest it grows at the rate
    between the last two, and at least in proportion to the length."""
    if length <= lengths[0]:
        return times[0]
    if length > lengths[-1]:
        slope = times[-1] / lengths[-1]
        if len(lengths) > 1:
            slope = max(slope, (times[-1] - times[-2]) / (lengths[-1] - lengths[-2]))
        return times[-1] + slope * (length - lengths[-1])
    upper = bisect_left(lengths, length)
    if lengths[upper] == length:
        return times[upper]
    low, high = sorted((times[upper - 1], times[upper]))
    places = range(max(0, upper - 2), min(len(lengths), upper + 1))
    total = 0.0
    for place in places:
        weight = 1.0
        for other in places:
            if other != place:
                weight *= (length - lengths[other]) / (lengths[place] - lengths[other])
        total += weight * times[place]
    return min(max(total, low), high)
