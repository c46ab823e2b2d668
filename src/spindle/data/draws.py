"""The order of samples: drawn by seed and number, from sources in a ratio that may change from step to step.

Draw n chooses its source by a hash of the seed and n, and takes the next sample of that source, whose samples are
shuffled in every epoch. Nothing depends on ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType

import numpy as np

from spindle.data.lengths import Column
from spindle.errors import InputError

Weight = float | Callable[[int], float]
_NUM_LOOKED_AT = 65  # steps of a training, where the mix may change


@dataclass(frozen=True, slots=True)
class Mix:
    """Weights of sources, each a number or a function of the step."""

    weights: Mapping[str, Weight]

    def at(self, step: int) -> dict[str, float]:
        """The weights of a step, sorted by name, so that draws do not depend on the order of a dict."""
        weights = {}
        for name, weight in sorted(self.weights.items()):
            value = weight(step) if callable(weight) else weight
            try:
                weights[name] = float(value)
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"balanced(mix=...): the weight of {name!r} at step {step} is {value!r}; expected a number"
                ) from error
        if not 0 < sum(weights.values()) < math.inf or min(weights.values()) < 0:
            raise InputError(
                f"balanced(mix=...): step {step} needs a weight above 0 and none below, got "
                + ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
            )
        return weights

    def extremes(self, first: int, last: int) -> list[int]:
        """The steps from `first` to `last` in which a source has its smallest or its largest share, of some that lie
        evenly between them; none if the shares stay what they are at `first`."""
        steps = np.unique(np.linspace(first, last, _NUM_LOOKED_AT).astype(np.int64)).tolist()
        weights = np.array([list(self.at(step).values()) for step in steps])
        shares = weights / weights.sum(axis=1, keepdims=True)
        places = {*shares.argmin(axis=0).tolist(), *shares.argmax(axis=0).tolist()}
        return [steps[place] for place in sorted(places) if not np.allclose(shares[place], shares[0])]

    @property
    def text(self) -> str:
        """The mix as text, for comparison: functions are described by their code and the numbers that they close
        over."""
        return ", ".join(f"{name}={_text(weight)}" for name, weight in sorted(self.weights.items()))


def _text(value: object) -> str:
    """A text of a weight that is the same in every process, unlike one with the addresses of objects."""
    if isinstance(value, CodeType):
        return f"{value.co_code.hex()} {_text(value.co_consts)} {value.co_names}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, int | float | str | bytes | None):
        return f"{value:.17g}" if isinstance(value, float) else repr(value)
    code = getattr(value, "__code__", None)
    if code is None:
        return "a callable" if callable(value) else type(value).__name__
    cells = tuple(cell.cell_contents for cell in getattr(value, "__closure__", None) or ())
    return " ".join(map(_text, (code, getattr(value, "__defaults__", None) or (), cells)))


def source_of(weights: Mapping[str, float], seed: int, number: int) -> str:
    """The source of a draw."""
    hashed = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    place = int.from_bytes(hashed, "big") / 2**64 * sum(weights.values())
    for name, weight in weights.items():
        place -= weight
        if place < 0:
            return name
    return [name for name, weight in weights.items() if weight > 0][-1]


class Order:
    """The samples of one source, epoch after epoch."""

    def __init__(self, name: str, length: int, seed: int) -> None:
        self._name, self._length, self._seed = name, length, seed
        self._shuffled_epochs: dict[int, Column] = {}

    def sample(self, drawn: int) -> int:
        """The number of the sample that comes after `drawn` others of the source."""
        epoch, place = divmod(drawn, self._length)
        if epoch not in self._shuffled_epochs:
            # Keep two epochs, because samples that are read ahead may be in the next one.
            for old in list(self._shuffled_epochs)[:-1]:
                del self._shuffled_epochs[old]
            self._shuffled_epochs[epoch] = self._shuffled(epoch)
        return int(self._shuffled_epochs[epoch][place])

    def _shuffled(self, epoch: int) -> Column:
        entropy = int.from_bytes(hashlib.blake2b(f"{self._seed} {self._name}".encode(), digest_size=8).digest(), "big")
        # A generator whose numbers are the same in every version of numpy.
        bits = np.random.Philox(key=np.array([entropy, epoch], dtype=np.uint64)).random_raw(self._length)
        return np.argsort(bits, kind="stable")
