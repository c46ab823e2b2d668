"""`balanced`: sources, their lengths and a mix become the same steps of packed sequences on any number of ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from numbers import Real
from typing import Any

import numpy as np

from spindle.data.decode import Decoder, Microbatch, SampleCache, SampleNumber
from spindle.data.draws import Mix, Order, Weight, source_of
from spindle.data.lengths import LengthIndex, Lengths, ReadLengths, UnknownLengths, length_index
from spindle.errors import CheckpointError, InputError
from spindle.planners import group_sequences

ERROR, TRUNCATE, SKIP = TOO_LONG = ("error", "truncate", "skip")
_MOST_CARRIED = 16  # samples that fit into no sequence of a step, until it is closed
_MOST_SEEN = 8  # of each source: samples whose lengths a state has, to notice a dataset that has changed
_CACHE_BYTES = 1 << 28  # of samples that were read for their lengths, on each rank
_LINEAR = 3072  # of an item's work p·(p + this), and of each token's: a pure square would heap small items on few


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All that later steps depend on; nothing of ranks or plans."""

    step: int
    draws: int
    drawn: tuple[tuple[str, int], ...]  # by source: how many of its samples, through all epochs
    carried: tuple[SampleNumber, ...]  # drawn, and in no sequence yet
    seen: tuple[tuple[SampleNumber, Lengths], ...] = ()  # drawn last, of sources whose lengths are read


class Balanced:
    """Data of one task, as `balanced` makes it. Give it to `Trainer.fit` in place of a loader."""

    def __init__(
        self,
        sources: Mapping[str, Any],
        indices: Mapping[str, LengthIndex | ReadLengths],
        *,
        max_tokens: int,
        mix: Mix,
        seed: int,
        too_long: str,
        padding: Mapping[str, float],
        segments: str | None,
        num_workers: int = 0,
        multiprocessing_context: str | None = None,
    ) -> None:
        self.num_workers, self.multiprocessing_context = num_workers, multiprocessing_context
        self.sources, self.indices, self.max_tokens, self.mix, self.seed = sources, indices, max_tokens, mix, seed
        self.too_long, self.padding, self.segments = too_long, padding, segments
        self._orders = {name: Order(name, len(sources[name]), seed) for name in sources}
        self.state = State(step=0, draws=0, drawn=tuple((name, 0) for name in sources), carried=())

    @property
    def read_lengths(self) -> dict[str, ReadLengths]:
        """By source: lengths that are only known once its samples were read."""
        return {name: index for name, index in self.indices.items() if isinstance(index, ReadLengths)}

    def lengths_of(self, sample: SampleNumber) -> Lengths:
        return self.indices[sample.source].lengths_of(sample.number)

    def is_known(self, sample: SampleNumber) -> bool:
        index = self.indices[sample.source]
        return isinstance(index, LengthIndex) or sample.number in index

    def state_dict(self) -> dict[str, Any]:
        """Where the data continue: after the last step that was trained. It resumes on any number of ranks."""
        return self.dict_of(self.state)

    def dict_of(self, state: State) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "step": state.step,
            "draws": state.draws,
            "sources": {
                name: {
                    "drawn": drawn,
                    "epoch": drawn // len(self.sources[name]),
                    "position": drawn % len(self.sources[name]),
                    "lengths": self.indices[name].digest,
                }
                for name, drawn in state.drawn
            },
            "carried": [list(sample) for sample in state.carried],
            "seen": [[*sample, tokens, list(items)] for sample, (tokens, items) in state.seen],
            "max_tokens": self.max_tokens,
            "too_long": self.too_long,
            "mix": self.mix.text,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; refuses one of other sources, lengths or mix, by name."""
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"the state of the data is a {type(state).__name__}; expected what state_dict() of balanced(...) gave"
            )
        state = {"seen": [], **state}  # which states of earlier versions do not have
        missing = [key for key in self.state_dict() if key not in state]
        if missing:
            raise CheckpointError(
                f"the state of the data has no {missing[0]!r}; expected what state_dict() of balanced(...) returned"
            )
        for what, saved, present in (
            ("seed", state["seed"], self.seed),
            ("max_tokens", state["max_tokens"], self.max_tokens),
            ("too_long", state["too_long"], self.too_long),
            ("sources", sorted(state["sources"]), sorted(self.sources)),
            ("mix", state["mix"], self.mix.text),
        ):
            if saved != present:
                raise CheckpointError(
                    f"the state of the data has {what} {saved!r}, and balanced(...) has {present!r}; give the same, or "
                    "start the data anew"
                )
        for name, entry in state["sources"].items():
            if entry.get("lengths") != self.indices[name].digest:
                raise CheckpointError(
                    f"the lengths of source {name!r} are not those with which the state of the data was saved; its "
                    "samples would come in other sequences: give the same dataset and index"
                )
        try:
            loaded = State(
                step=int(state["step"]),
                draws=int(state["draws"]),
                drawn=tuple((name, int(state["sources"][name]["drawn"])) for name in self.sources),
                carried=tuple(SampleNumber(str(source), int(number)) for source, number in state["carried"]),
                seen=tuple(
                    (SampleNumber(str(source), int(number)), (int(tokens), tuple(map(int, items))))
                    for source, number, tokens, items in state["seen"]
                ),
            )
        except (TypeError, ValueError, KeyError) as error:
            raise CheckpointError(f"the state of the data is damaged ({type(error).__name__}: {error})") from error
        counts = [loaded.step, loaded.draws, *(drawn for _, drawn in loaded.drawn)]
        lost = [each for each in loaded.carried if not 0 <= each.number < len(self.sources.get(each.source, ()))]
        read = {name: len(self.sources[name]) for name in self.read_lengths}
        lost += [each for each, _ in loaded.seen if not 0 <= each.number < read.get(each.source, 0)]
        if min(counts) < 0 or lost:
            what = f"has {tuple(lost[0])}, which is no sample" if lost else "counts below 0"
            raise CheckpointError(f"the state of the data is damaged: it {what}")
        self.state = loaded

    def step_after(self, state: State, num_microbatches: int, batch_size: int) -> tuple[tuple[Microbatch, ...], State]:
        """The microbatches of the step that follows a state, each of `batch_size` sequences, and the state after it.

        Samples go to the first sequence that has room, in the order in which they were drawn; what fits nowhere comes
        first in the next step. Sequences are then grouped so that microbatches have level work. Raises UnknownLengths
        where it needs lengths that are not read yet.
        """
        num_sequences = num_microbatches * batch_size
        weights = self.mix.at(state.step)
        room = np.full(num_sequences, self.max_tokens, dtype=np.int64)
        packed: list[list[SampleNumber]] = [[] for _ in range(num_sequences)]
        carried: list[SampleNumber] = []
        draws, drawn = state.draws, dict(state.drawn)
        waiting, upcoming = list(state.carried), self._draws_after(state, weights)
        seen: dict[str, list[tuple[SampleNumber, Lengths]]] = {name: [] for name in self.read_lengths}
        for sample, lengths in state.seen:
            seen[sample.source].append((sample, lengths))
        fitting: set[str] = set()  # sources
        while len(carried) < _MOST_CARRIED or waiting:
            is_new = not waiting
            sample = next(upcoming) if is_new else waiting.pop(0)
            if is_new:
                draws, drawn[sample.source] = draws + 1, drawn[sample.source] + 1
            if not self.is_known(sample):
                raise UnknownLengths(draws - state.draws)
            tokens = self._tokens(sample)
            if is_new and sample.source in seen:
                seen[sample.source].append((sample, self.lengths_of(sample)))
            if tokens is None:
                # Without an index, no sample fits if none of two epochs did.
                num_drawn = drawn[sample.source] - dict(state.drawn)[sample.source]
                if sample.source not in fitting and num_drawn >= 2 * len(self.sources[sample.source]):
                    raise _nothing_fits(sample.source, self.max_tokens)
                continue
            fitting.add(sample.source)
            place = int(np.argmax(room >= tokens))
            if room[place] < tokens:
                carried.append(sample)
                continue
            packed[place].append(sample)
            room[place] -= tokens
            if not room.any():
                break
        carried += waiting
        groups = group_sequences([self._work(sequence) for sequence in packed], num_microbatches)
        microbatches = tuple(self._microbatch(state.step, [packed[place] for place in places]) for places in groups)
        after = State(step=state.step + 1, draws=draws, drawn=tuple(drawn.items()), carried=tuple(carried))
        last = tuple(entry for entries in seen.values() for entry in entries[-_MOST_SEEN:])
        return microbatches, replace(after, seen=last)

    def _draws_after(self, state: State, weights: Mapping[str, float]) -> Iterator[SampleNumber]:
        """The samples that follow a state, as long as sources have these weights."""
        draws, drawn = state.draws, dict(state.drawn)
        while True:
            source = source_of(weights, self.seed, draws)
            yield SampleNumber(source, self._orders[source].sample(drawn[source]))
            draws, drawn[source] = draws + 1, drawn[source] + 1

    def unread(self, state: State, num_draws: int) -> list[SampleNumber]:
        """Samples without known lengths, among those that a state carries over and the draws that follow it."""
        following = islice(self._draws_after(state, self.mix.at(state.step)), num_draws)
        return [sample for sample in dict.fromkeys([*state.carried, *following]) if not self.is_known(sample)]

    def _tokens(self, sample: SampleNumber) -> int | None:
        """The tokens of a sample in a sequence; None if it is left out."""
        tokens, items = self.lengths_of(sample)
        if tokens <= self.max_tokens or self.too_long == SKIP:
            return tokens if tokens <= self.max_tokens else None
        if self.too_long == TRUNCATE and not items:
            return self.max_tokens
        hint = "skip it (too_long='skip')" if self.too_long == TRUNCATE else "truncate or skip it (too_long=...)"
        raise InputError(
            f"sample {sample.number} of {sample.source!r} has {tokens} tokens"
            + (" with items, which cannot be truncated" if self.too_long == TRUNCATE else "")
            + f", more than max_tokens={self.max_tokens}: {hint}, or raise max_tokens"
        )

    def _work(self, sequence: list[SampleNumber]) -> int:
        """Integers in proportion to the time of a sequence, roughly: p·(p + 3072) of each item, 3072 of each token."""
        work = 0
        for tokens, items in map(self.lengths_of, sequence):
            work += _LINEAR * min(tokens, self.max_tokens)
            work += sum(length * (length + _LINEAR) for length in items)
        return work

    def _microbatch(self, step: int, sequences: list[list[SampleNumber]]) -> Microbatch:
        lengths = tuple(self.lengths_of(sample) for sequence in sequences for sample in sequence)
        num_tokens = sum(min(tokens, self.max_tokens) for tokens, _ in lengths)
        return Microbatch(tuple(map(tuple, sequences)), lengths, num_tokens, step)

    def decoder(self, item_entries: Mapping[str, str | None], length_entry: str | None) -> Decoder:
        return Decoder(
            datasets=self.sources,
            max_tokens=self.max_tokens,
            padding=self.padding,
            segments=self.segments,
            item_entries=item_entries,
            length_entry=length_entry,
            seed=self.seed,
            length_functions={name: index.function for name, index in self.read_lengths.items()},
            cache=SampleCache(_CACHE_BYTES // max(1, self.num_workers)),
        )


def _nothing_fits(source: str, max_tokens: int) -> InputError:
    return InputError(f"balanced(...): all samples of {source!r} are longer than max_tokens={max_tokens}; raise it")


def balanced(
    sources: Mapping[str, Any],
    *,
    max_tokens: int,
    lengths: Any = None,
    mix: Mapping[str, Weight] | None = None,
    seed: int = 0,
    too_long: str = ERROR,
    padding: Mapping[str, float] | None = None,
    segments: str | None = None,
    num_workers: int = 0,
    multiprocessing_context: str | None = None,
) -> Balanced:
    """Samples of several map-style datasets, drawn in a ratio, packed into sequences of `max_tokens` and grouped into
    microbatches of level work, the same on every rank and on any number of ranks.

    A sample is a dict of entries with a row for each token, and of the task's item entries. `lengths` says, without
    decoding, how many tokens each sample has and how long its items are: by source, a JSONL or Parquet file, an array
    of tokens, or pairs (tokens, items); without it, each dataset's `lengths(number)`. Where lengths are only known
    after reading, it is a function of a decoded sample that returns its tokens, or its tokens and the lengths of its
    items: each rank then reads a share of the samples to come, and all gather the lengths a step ahead. `mix` has the
    weight of each source, a number or a function of the step; all alike without it. A sample of more than `max_tokens`
    is an error, or with `too_long` "truncate" or "skip". `padding` are the values behind the last token of a sequence,
    by entry, 0 by default; `segments` names an entry that numbers the samples of a sequence from 1, with 0 for padding.

    Each rank decodes what it needs of a step in `num_workers` processes of its own, while the step before runs; without
    any, in the rank itself when the step begins. They are started by `multiprocessing_context` ("fork", "spawn",
    "forkserver"; torch's default).
    """
    if not isinstance(sources, Mapping) or not sources:
        got = "none" if isinstance(sources, Mapping) else f"a {type(sources).__name__}"
        raise InputError(f'balanced(sources): expected datasets by name, such as {{"web": web}}, got {got}')
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise InputError(f"balanced(max_tokens={max_tokens!r}): expected a number of tokens, at least 1")
    for option, value in (("mix", mix), ("padding", padding)):
        if not isinstance(value, Mapping | None):
            raise InputError(f"balanced({option}={value!r}): expected a dict")
    if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 0:
        raise InputError(f"balanced(num_workers={num_workers!r}): expected a number of processes, or 0 for none")
    if multiprocessing_context not in (None, *multiprocessing.get_all_start_methods()):
        raise InputError(
            f"balanced(multiprocessing_context={multiprocessing_context!r}): expected one of "
            f"{', '.join(multiprocessing.get_all_start_methods())}"
        )
    if too_long not in TOO_LONG:
        raise InputError(f"balanced(too_long={too_long!r}): expected one of {', '.join(TOO_LONG)}")
    weights: dict[str, Any] = dict.fromkeys(sources, 1.0) if mix is None else dict(mix)
    for name, weight in weights.items():
        if not callable(weight) and not isinstance(weight, Real):
            raise InputError(f"balanced(mix={{{name!r}: {weight!r}}}): expected a number, or a function of the step")
    unknown = [name for name in weights if name not in sources]
    missing = [name for name in sources if name not in weights]
    if unknown or missing:
        what = f"names {unknown[0]!r}, which is no source" if unknown else f"has no weight of source {missing[0]!r}"
        raise InputError(f"balanced(mix=...): {what}; sources: {', '.join(sources)}")
    for name, dataset in sources.items():
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or len(dataset) == 0:
            raise InputError(f"balanced(...): source {name!r} must be a map-style dataset with samples")
    if isinstance(lengths, Mapping) and not set(lengths) <= set(sources):
        name = next(name for name in lengths if name not in sources)
        raise InputError(f"balanced(lengths=...): {name!r} is no source; sources: {', '.join(sources)}")
    if lengths is not None and not isinstance(lengths, Mapping) and not callable(lengths) and len(sources) > 1:
        raise InputError("balanced(lengths=...): there are several sources; give the lengths of each, by name")
    given = lengths if isinstance(lengths, Mapping) else dict.fromkeys(sources, lengths)
    indices = {
        name: length_index(given.get(name), dataset, f"balanced(...), source {name!r}")
        for name, dataset in sources.items()
    }
    for name, index in indices.items():
        if too_long != SKIP or not isinstance(index, LengthIndex):
            continue
        if int(index.tokens[: len(sources[name])].min()) > max_tokens:
            raise _nothing_fits(name, max_tokens)
    return Balanced(
        dict(sources),
        indices,
        max_tokens=max_tokens,
        mix=Mix({name: weight if callable(weight) else float(weight) for name, weight in weights.items()}),
        seed=seed,
        too_long=too_long,
        padding=dict(padding or {}),
        segments=segments,
        num_workers=num_workers,
        multiprocessing_context=multiprocessing_context,
    )
