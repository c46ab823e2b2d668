"""Lengths that are only known after reading: each rank reads a share of the samples to come, and all gather them.

Samples of later steps go through stages, one with each step: they are read (by worker processes, where there are any),
the numbers of their tokens and items are gathered, then the lengths of items. No stage waits for another rank unless a
step needs lengths that are still under way, as the first one does. Every method is called by all ranks at the same
place; what they do follows from the state of the data and the lengths gathered so far, which all have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from spindle.data import Balanced, Lengths, Microbatch, SampleNumber, State, UnknownLengths, Unreadable
from spindle.errors import CheckpointError
from spindle.run import World
from spindle.train.agreement import compare

_BLOCK = 64  # the smallest number of draws that are read at a time
_STEPS_AHEAD = 4  # steps ahead that samples are read: one for each of three stages, and one more
_UNREADABLE = -1  # stands for the number of tokens of a sample that could not be read
Read = list[Lengths | Unreadable]
StartReading = Callable[[Sequence[SampleNumber]], Callable[[], Read]]


class LengthGathering:
    """Gathers the lengths of one task's data. `start_reading` starts to read samples on this rank, and returns a
    function that waits for their lengths."""

    def __init__(self, data: Balanced, world: World, task: str, start_reading: StartReading) -> None:
        self._data, self._world, self._task, self._start_reading = data, world, task, start_reading
        self._under_way: dict[tuple[SampleNumber, ...], Iterator[None]] = {}
        for each in data.read_lengths.values():
            each.forget_unreadable()  # lengths that were gathered in an earlier fit
        counts = {name: len(lengths) for name, lengths in data.read_lengths.items()}
        compare(
            world,
            {
                f"the state of the balanced data of task {task!r}": data.state_dict(),
                f"how many lengths of the balanced data of task {task!r} are known": counts,
            },
        )
        self._check_saved_lengths(data.state)

    def step_after(self, state: State, num_microbatches: int, batch_size: int) -> tuple[tuple[Microbatch, ...], State]:
        """The step that follows a state. Waits for the lengths that it needs."""
        while True:
            try:
                return self._data.step_after(state, num_microbatches, batch_size)
            except UnknownLengths as unknown:
                self._start(self._data.unread(state, _BLOCK + 2 * unknown.num_draws))
                self.advance()

    def advance(self) -> None:
        """Move all samples in flight one stage further, oldest first."""
        for samples, stages in list(self._under_way.items()):
            if next(stages, _END) is _END:
                del self._under_way[samples]

    def read_ahead(self, state: State, num_draws: int) -> None:
        """Start to read the samples after a state, if a step takes this many draws."""
        self._start(self._data.unread(state, max(_BLOCK, _STEPS_AHEAD * num_draws)))

    def _start(self, samples: Sequence[SampleNumber]) -> None:
        read = {sample for block in self._under_way for sample in block}
        block = tuple(sample for sample in samples if sample not in read)
        if block:
            self._under_way[block] = self._stages(block)
            next(self._under_way[block])

    def _stages(self, samples: tuple[SampleNumber, ...]) -> Iterator[None]:
        """Read and gather the lengths of some samples. Yields after each stage."""
        world = self._world
        shares = [samples[rank :: world.size] for rank in range(world.size)]
        take = self._start_reading(shares[world.rank])
        yield
        read = take()
        counts = torch.zeros(len(shares[0]), 2, dtype=torch.int64)
        for place, lengths in enumerate(read):
            if isinstance(lengths, Unreadable):
                counts[place, 0] = _UNREADABLE
            else:
                counts[place, 0], counts[place, 1] = lengths[0], len(lengths[1])
        gathering = world.start_all_gather(counts)
        yield
        counts_by_rank = torch.stack(gathering.wait())
        most_items = int(counts_by_rank[..., 1].sum(1).amax())
        items_by_rank: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)] * world.size
        if most_items:
            items = [length for lengths in read if not isinstance(lengths, Unreadable) for length in lengths[1]]
            gathering = world.start_all_gather(torch.tensor(items + [0] * (most_items - len(items))))
            yield
            items_by_rank = gathering.wait()
        for rank, share in enumerate(shares):
            counted = counts_by_rank[rank, : len(share)].tolist()
            item_lengths = iter(items_by_rank[rank].tolist())
            gathered: list[Any] = [(tokens, tuple(next(item_lengths) for _ in range(n))) for tokens, n in counted]
            if any(tokens == _UNREADABLE for tokens, _ in counted):
                failures = iter(world.broadcast_object([each for each in read if isinstance(each, Unreadable)], rank))
                where = f"task {self._task!r}, rank {rank}: "
                for place, (tokens, _) in enumerate(counted):
                    if tokens == _UNREADABLE:
                        failure = next(failures)
                        gathered[place] = Unreadable(where + failure.message, failure.details)
            for sample, lengths in zip(share, gathered, strict=True):
                self._data.read_lengths[sample.source].add(sample.number, lengths)

    def _check_saved_lengths(self, state: State) -> None:
        """Refuse a saved state whose samples have different lengths now."""
        while unread := [sample for sample, _ in state.seen if not self._data.is_known(sample)]:
            self._start(unread)
            self.advance()
        for sample, saved in state.seen:
            lengths = self._data.lengths_of(sample)
            if lengths != saved:
                raise CheckpointError(
                    f"sample {sample.number} of {sample.source!r} has {_text(lengths)}, and had {_text(saved)} when "
                    "the state of the data was saved; its samples would come in other sequences: give the same dataset "
                    "and function lengths="
                )


def _text(lengths: Lengths) -> str:
    tokens, items = lengths
    return f"{tokens} tokens and items of {list(items)[:8]}"


_END = object()
