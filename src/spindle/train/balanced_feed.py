"""Batches of balanced data: planned from lengths, decoded when a rank knows what it needs of them.

A batch is announced with its shapes and the lengths of its items; its values are decoded when it runs, only the entries
and items that the rank's slots read; by worker processes, where there are any, ahead of time. Which samples it has, and
how long they are, is compared between ranks with the header, by a digest. Lengths that are only known after reading are
gathered before (`length_gathering.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from spindle.data import (
    Balanced,
    DecodeWorkers,
    Lengths,
    Microbatch,
    SampleNumber,
    State,
    UnknownLengths,
    Unreadable,
    Wanted,
)
from spindle.errors import InputError, TrainingError
from spindle.run import World, digest, signature_of
from spindle.train.feed import Batch, Feed, LoaderPosition
from spindle.train.items import item_entries, with_lengths
from spindle.train.length_gathering import LengthGathering

_MOST_STEPS = 4  # microbatches that are kept because they may be requested again
StepAfter = Callable[[State, int, int], tuple[tuple[Microbatch, ...], State]]


class BalancedFeed(Feed):
    """Reads one task's balanced data by batch number."""

    def __init__(
        self, loader: Balanced, num_microbatches: int, position: LoaderPosition, world: World, **named: Any
    ) -> None:
        super().__init__(loader=loader, position=position, **named)  # type: ignore[arg-type]
        self._data, self._num_microbatches = loader, num_microbatches
        if position.loader_state is not None:
            loader.load_state_dict(position.loader_state["state"])
        entries = item_entries(self.definition)
        length_entries = {entry for entry in self.definition.items.values() if isinstance(entry, str)}
        if len(length_entries) > 1:
            raise TrainingError(
                f"task {self.definition.name!r}: balanced data have items of one kind, got lengths in "
                f"{', '.join(sorted(length_entries))}"
            )
        self._length_entry = next(iter(length_entries), None)
        self._decoder = loader.decoder(entries, self._length_entry)
        self._after = {0: loader.state}  # states by the number of steps since the feed was made
        self._steps: dict[int, tuple[Microbatch, ...]] = {}
        self._forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}  # the shape of a row, by entry
        self._example: Batch | None = None
        self._workers: DecodeWorkers | None = None
        # Requests to worker processes by batch number: what was requested, and the number of the request.
        self._requests: dict[int, dict[Wanted | None, int]] = {}
        self._lengths: LengthGathering | None = None
        if loader.read_lengths:
            try:
                self._lengths = LengthGathering(loader, world, self.definition.name, self._start_reading)
                self.prepare(0)
            except BaseException:
                self.close()
                raise

    @property
    def decodes_ahead(self) -> bool:
        """Whether worker processes decode batches."""
        return self._data.num_workers > 0

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
        self._workers = None
        self._requests.clear()

    def prepare(self, number: int) -> None:
        """Gather the lengths for the step of this batch and for the one after it, which some ranks may look at. All
        ranks call this before any of them reads the batch."""
        if self._lengths is None:
            return
        step = number // self._num_microbatches
        self._lengths.advance()
        self._compute(step, self._lengths.step_after)
        try:
            self._compute(step + 1, self._lengths.step_after)
        except (InputError, TrainingError):  # the lengths are for a step that may never run
            if self.decodes_ahead:
                raise
        last = max(self._after)
        if last - 1 in self._after:
            self._lengths.read_ahead(self._after[last], self._after[last].draws - self._after[last - 1].draws)

    def _start_reading(self, samples: Sequence[SampleNumber]) -> Callable[[], list[Lengths | Unreadable]]:
        """Start to read samples for their lengths in worker processes; without any, they are read when the lengths are
        needed."""
        if not self.decodes_ahead:
            return partial(self._decoder.read_lengths, samples)
        num_workers = self._data.num_workers
        shares = [samples[worker::num_workers] for worker in range(min(num_workers, len(samples)))]
        requests = [self._pool.ask_lengths(share) for share in shares]

        def take() -> list[Lengths | Unreadable]:
            read: list[Any] = [None] * len(samples)
            for worker, (share, request) in enumerate(zip(shares, requests, strict=True)):
                try:
                    read[worker::num_workers] = self._pool.take(request)
                except TrainingError as error:  # the worker process has ended
                    read[worker::num_workers] = [Unreadable(str(error))] * len(share)
            return read

        return take

    def example(self) -> Batch:
        if self._example is None:
            self._example = self._decode_whole(self._microbatch(0))
        return self._example

    def peek(self, number: int) -> Batch:
        return self._batch_without_values(number + self._given)

    def extreme_steps(self, num_steps: int) -> list[list[Batch]]:
        """The next step with the mix of each step in which a source has its smallest or largest share."""
        state, steps = self._state_at(self._given), []
        try:
            extremes = self._data.mix.extremes(state.step, state.step + max(0, num_steps - 1))
        except Exception:  # of the user's functions, in steps that may never run
            return []
        try:
            for step in extremes:
                microbatches, _ = self._data.step_after(
                    replace(state, step=step), self._num_microbatches, self.definition.batch_size
                )
                steps.append([self._without_values(microbatch) for microbatch in microbatches])
        except (InputError, UnknownLengths):
            return []
        return steps

    def at(self, number: int) -> Batch:
        self._given = number + 1
        batch = self._batch_without_values(number)
        if self.decodes_ahead:
            # A batch whose tokens must be counted by decoding is counted a step before its header is exchanged.
            if self.definition.tokens is not None:
                self._request(number + self._num_microbatches, None)
            step = number // self._num_microbatches
            for old in [known for known in self._requests if known // self._num_microbatches < step - 1]:
                for request in self._requests.pop(old).values():
                    self._pool.drop(request)  # requested under an earlier plan
        return batch

    def shapes_at(self, number: int) -> Batch:
        """The shapes of an upcoming batch, without counting its tokens."""
        return self._batch_without_values(number, counts=False)

    @property
    def _pool(self) -> DecodeWorkers:
        if self._workers is None:
            data, definition = self._data, self.definition
            self._workers = DecodeWorkers(
                self._decoder, data.num_workers, data.multiprocessing_context, definition.name, definition.tokens
            )
        return self._workers

    def _request(self, number: int, wanted: Wanted | None) -> None:
        """Have a batch decoded, or its tokens counted."""
        asked = self._requests.setdefault(number, {})
        if wanted not in asked:
            asked[wanted] = self._pool.ask(
                self._microbatch(number), wanted or self._token_fields(), counts=wanted is None
            )

    def _result_of(self, number: int, wanted: Wanted | None) -> Any:
        self._request(number, wanted)
        request = self._requests[number].pop(wanted)
        if not self._requests[number]:
            del self._requests[number]
        return self._pool.take(request)

    def _token_fields(self) -> Wanted:
        """All entries with one row per token, without items."""
        entries = item_entries(self.definition)
        rows = (0, self.definition.batch_size)
        return Wanted(tuple((name, *rows) for name in self._forms if name not in entries), ())

    def note_trained(self, number: int) -> None:
        self._data.state = self._state_at(number)

    def position(self, number: int) -> LoaderPosition:
        state = self._data.dict_of(self._state_at(number))
        return LoaderPosition(random_state=self._state, loader_state={"num_workers": 0, "state": state})

    def _state_at(self, number: int) -> State:
        """The state of the data before the step that this batch belongs to."""
        if number:
            self._microbatch(number - 1)  # a rank that does not read the task may lag behind
        return self._after[number // self._num_microbatches]

    def _microbatch(self, number: int) -> Microbatch:
        step, place = divmod(number, self._num_microbatches)
        self._compute(step, self._data.step_after)
        return self._steps[step][place]

    def _compute(self, step: int, step_after: StepAfter) -> None:
        while step not in self._steps:
            last = max(known for known in self._after if known <= step)
            self._steps[last], self._after[last + 1] = step_after(
                self._after[last], self._num_microbatches, self.definition.batch_size
            )
            for old in [known for known in self._after if known < last - _MOST_STEPS]:
                del self._after[old]
                self._steps.pop(old, None)

    def _decode_whole(self, microbatch: Microbatch) -> Batch:
        """Decode a whole batch."""
        nest = self._decoder.decode(microbatch)
        self._forms.update(
            (name, (tuple(tensor.shape[self._num_dims(name) :]), tensor.dtype)) for name, tensor in nest.items()
        )
        batch = super()._batch(nest, self.definition.batch_size)
        return replace(batch, fingerprint=self._digest(microbatch))

    def _num_dims(self, name: str) -> int:
        """The number of dimensions before those of a row: one for items (their number), two for tokens (sequence and
        position)."""
        return 1 if name in item_entries(self.definition) else 2

    def _digest(self, microbatch: Microbatch) -> int:
        return digest(repr((microbatch.sequences, microbatch.lengths))) if self._compared else 0

    def _batch_without_values(self, number: int, *, counts: bool = True) -> Batch:
        """A batch of which only the shapes are known so far."""
        microbatch = self._microbatch(number)
        tokens = microbatch.num_tokens
        batch = self._without_values(microbatch)
        if self.definition.tokens is not None and counts:
            if self.decodes_ahead:
                tokens = self._result_of(number, None)
            else:
                tokens = int(self.definition.tokens(self._decoder.decode(microbatch, self._token_fields())))
        return replace(batch, tokens=tokens, load=_BalancedLoad(self, number))

    def _without_values(self, microbatch: Microbatch) -> Batch:
        """The shapes of a batch."""
        entries = item_entries(self.definition)
        has_items = bool(microbatch.item_lengths and entries)
        if not self._forms or (has_items and not entries.keys() <= self._forms.keys()):
            self._decode_whole(microbatch)  # decode one batch to learn the shapes of its entries
        nest = {}
        for name, (row, dtype) in self._forms.items():
            if name not in entries:
                shape: tuple[int, ...] = (self.definition.batch_size, self._data.max_tokens, *row)
            elif not has_items:
                continue
            else:
                is_ragged = entries[name] is not None
                shape = (sum(microbatch.item_lengths) if is_ragged else len(microbatch.item_lengths), *row)
            nest[name] = torch.empty(shape, dtype=dtype, device="meta")
        lengths = {self._length_entry: microbatch.item_lengths} if has_items and self._length_entry else {}
        return Batch(
            nest=nest,
            num_rows=self.definition.batch_size,
            signature=with_lengths(signature_of(nest), lengths),
            fingerprint=self._digest(microbatch),
            tokens=microbatch.num_tokens,
            lengths=lengths,
            item_entries=frozenset(entries),
        )


class _BalancedLoad:
    """Decodes a batch of a feed, ahead of time if there are worker processes."""

    def __init__(self, feed: BalancedFeed, number: int) -> None:
        self._feed, self._number = feed, number

    def start(self, wanted: Wanted) -> None:
        if self._feed.decodes_ahead:
            self._feed._request(self._number, wanted)

    def take(self, wanted: Wanted) -> Any:
        feed = self._feed
        if feed.decodes_ahead:
            return feed._result_of(self._number, wanted)
        return feed._decoder.decode(feed._microbatch(self._number), wanted)
