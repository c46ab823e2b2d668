"""Batches of one task, step after step, the same on every rank.

An exhausted loader starts its next epoch. A short last batch is left out, with a notice, or used when the user wants
that. Loaders that shuffle draw from random streams of their own, which start alike on all ranks, so what else a rank
does cannot change the order of its data.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from spindle.errors import TrainingError
from spindle.run.rows import Axes, fingerprint_of, plain, signature_of
from spindle.train.task import TaskDefinition
from spindle.train.trace import batch_axes, describe_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as it was read: its rows, its shapes in short, and its values in short."""

    nest: Any
    num_rows: int
    signature: int
    fingerprint: int


RandomState = tuple[Any, Any, Any]


def random_state() -> RandomState:
    """The state of the random numbers that loaders draw: torch's, Python's and numpy's."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def draw() -> None:
    """Moves all of these on, so that what starts from them next starts elsewhere."""
    torch.rand(1), random.random(), np.random.random()


def set_random_state(state: RandomState) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


class Feed:
    """Reads one task's loader."""

    def __init__(
        self,
        definition: TaskDefinition,
        loader: Iterable[Any],
        drop_last: bool,
        state: RandomState,
        notify: Callable[[str], None],
        *,
        compared: bool,
    ) -> None:
        self.definition, self.loader, self.drop_last, self._notify = definition, loader, drop_last, notify
        self._state, self._compared = state, compared  # with what other ranks read
        self._draws = not isinstance(loader, list | tuple)  # whether reading may take random numbers
        self._fingerprints: dict[tuple[int, ...], int] = {}
        self._iterator: Iterator[Any] | None = None
        self._axes: Axes | None = None
        self._absent: list[bool] | None = None  # which leaves of a batch are None
        self._told = False
        self._since_start = 0  # full batches of this epoch
        self._kept: Batch | None = None

    def peek(self) -> Batch:
        """The batch that `next` will give."""
        if self._kept is None:
            self._kept = self._read()
        return self._kept

    def next(self) -> Batch:
        batch = self.peek()
        self._kept = None
        return batch

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        if not self._draws:
            yield
            return
        outside = random_state()
        set_random_state(self._state)
        try:
            yield
        finally:
            self._state = random_state()
            set_random_state(outside)

    def _read(self) -> Batch:
        name = self.definition.name
        try:
            with self._own_random_numbers():
                return self._next_batch()
        except TrainingError:
            raise
        except Exception as error:
            error.add_note(f"in the loader of task {name!r}")
            raise

    def _next_batch(self) -> Batch:
        name, size = self.definition.name, self.definition.batch_size
        while True:
            if self._iterator is None:
                self._iterator, self._since_start = iter(self.loader), 0
            nest = next(self._iterator, _END)
            if nest is _END:
                if self._since_start == 0:
                    raise TrainingError(
                        f"task {name!r}: its loader gives no batch"
                        + (" of its batch_size" if self._told else "")
                        + "; a generator cannot start again: give a list, a DataLoader, or ask for fewer steps"
                    )
                self._iterator = None
                continue
            nest = plain(nest)
            rows = self._rows(nest)
            if rows == size:
                self._since_start += 1
                return self._batch(nest, rows)
            if rows > size or next(self._iterator, _END) is not _END:
                raise TrainingError(
                    f"task {name!r}: its loader gave a batch of {rows} samples, expected {size}, its batch_size; got "
                    f"{describe_batch(nest)}"
                )
            self._iterator = None
            if not self.drop_last:
                return self._batch(nest, rows)
            if not self._told:
                self._notify(
                    f"task {name!r}: the last batch of its loader has {rows} of {size} samples and is left out "
                    "(drop_last=False trains on it too)"
                )
            self._told = True
            if self._since_start == 0:
                raise TrainingError(f"task {name!r}: its loader has {rows} samples, fewer than its batch_size {size}")

    def _rows(self, nest: Any) -> int:
        """How many samples a batch has; all that had rows in the first one must agree."""
        name, size = self.definition.name, self.definition.batch_size
        if self._axes is None:
            self._axes = batch_axes(name, size, nest)
        leaves = tree_leaves(nest)
        absent = [leaf is None for leaf in leaves]
        if self._absent is None:
            self._absent = absent
        if absent != self._absent:
            raise TrainingError(
                f"task {name!r}: its loader gave {describe_batch(nest)}, another form than that of its first batch"
            )
        found = {
            leaf.shape[0]: keystr(path)
            for (path, leaf), axis in zip(tree_flatten_with_path(nest)[0], self._axes, strict=True)
            if axis is not None and isinstance(leaf, torch.Tensor) and leaf.dim()
        }
        if len(found) != 1:
            text = ", ".join(f"{path} {rows}" for rows, path in sorted(found.items()))
            raise TrainingError(
                f"task {name!r}: its loader gave a batch whose tensors disagree about the number of samples: {text}; "
                f"expected {size}"
            )
        return next(iter(found))

    def _batch(self, nest: Any, rows: int) -> Batch:
        return Batch(
            nest=nest,
            num_rows=rows,
            signature=signature_of(nest),
            fingerprint=self._fingerprint(nest) if self._compared else 0,
        )

    def _fingerprint(self, nest: Any) -> int:
        """Batches that a list holds are looked at once: on a GPU looking waits for it."""
        if self._draws:
            return fingerprint_of(nest)
        key = tuple(id(leaf) for leaf in tree_leaves(nest))
        if key not in self._fingerprints:
            self._fingerprints[key] = fingerprint_of(nest)
        return self._fingerprints[key]


_END = object()
