"""`balanced`: packed sequences from several datasets in a ratio, the same steps on any number of ranks."""

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
_MOST_CARRIED = 16  # a step is complete once this many samples fit into none of its sequences
_MOST_SEEN = 8  # samples of each source whose lengths are part of a state, to notice that a dataset has changed
_CACHE_BYTES = 1 << 28  # of samples that were read for their lengths, on each rank
# An item of p tokens counts as p·(p + _LINEAR), a token as _LINEAR. With p² alone, small items would cost next to
# nothing and gather in few sequences.
_LINEAR = 3072


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything that later steps depend on; independent of ranks and plans."""

    step: int
    draws: int
    drawn: tuple[tuple[str, int], ...]  # by source: the number of samples drawn so far, in all epochs
    carried: tuple[SampleNumber, ...]  # samples that were drawn and are in no sequence yet
    seen: tuple[tuple[SampleNumber, Lengths], ...] = ()  # the latest samples of sources whose lengths are read


class Balanced:
    """The data of one task, as returned by `balanced`. Pass it to `Trainer.fit` in place of a loader."""

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
        """Source → its lengths, for sources whose lengths are known only after samples were read."""
        return {name: index for name, index in self.indices.items() if isinstance(index, ReadLengths)}

    def lengths_of(self, sample: SampleNumber) -> Lengths:
        return self.indices[sample.source].lengths_of(sample.number)

    def is_known(self, sample: SampleNumber) -> bool:
        index = self.indices[sample.source]
        return isinstance(index, LengthIndex) or sample.number in index

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step that was trained; it can be resumed on any number of ranks."""
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
        """Continue from a saved state. Refuses a state of other sources, lengths or mix, by name."""
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"the state of the data is a {type(state).__name__}; expected what state_dict() of balanced(...) gave"
            )
        state = {"seen": [], **state}  # states of earlier versions lack these entries
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
                    f"the saved state of the data has {what} {saved!r}, but balanced(...) has {present!r}; use the "
                    "same, or do not load the state"
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
        """The microbatches of the step that follows a state, each with `batch_size` sequences, and the state after it.

        Samples go to the first sequence with room, in the order in which they were drawn. A sample that fits nowhere
        comes first in the next step. Sequences are then grouped so that microbatches have equal work. Raises
        UnknownLengths if it needs lengths that have not been read yet.
        """
        num_sequences = num_microbatches * batch_size
        weights = self.mix.at(state.step)
        tokens_left = np.full(num_sequences, self.max_tokens, dtype=np.int64)
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
                # without an index: if none of two epochs of samples fit, none will
                num_drawn = drawn[sample.source] - dict(state.drawn)[sample.source]
                if sample.source not in fitting and num_drawn >= 2 * len(self.sources[sample.source]):
                    raise _nothing_fits(sample.source, self.max_tokens)
                continue
            fitting.add(sample.source)
            place = int(np.argmax(tokens_left >= tokens))
            if tokens_left[place] < tokens:
                carried.append(sample)
                continue
            packed[place].append(sample)
            tokens_left[place] -= tokens
            if not tokens_left.any():
                break
        carried += waiting
        groups = group_sequences([self._work(sequence) for sequence in packed], num_microbatches)
        microbatches = tuple(self._microbatch(state.step, [packed[place] for place in places]) for places in groups)
        after = State(step=state.step + 1, draws=draws, drawn=tuple(drawn.items()), carried=tuple(carried))
        last = tuple(entry for entries in seen.values() for entry in entries[-_MOST_SEEN:])
        return microbatches, replace(after, seen=last)

    def _draws_after(self, state: State, weights: Mapping[str, float]) -> Iterator[SampleNumber]:
        """The samples drawn after a state, while the sources have these weights."""
        draws, drawn = state.draws, dict(state.drawn)
        while True:
            source = source_of(weights, self.seed, draws)
            yield SampleNumber(source, self._orders[source].sample(drawn[source]))
            draws, drawn[source] = draws + 1, drawn[source] + 1

    def unread(self, state: State, num_draws: int) -> list[SampleNumber]:
        """Samples with unknown lengths, among those that a state carries over and the next `num_draws` draws."""
        following = islice(self._draws_after(state, self.mix.at(state.step)), num_draws)
        return [sample for sample in dict.fromkeys([*state.carried, *following]) if not self.is_known(sample)]

    def _tokens(self, sample: SampleNumber) -> int | None:
        """The number of tokens of a sample in a sequence; None if it is left out."""
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
        """A rough measure of the time of a sequence, as an integer: p·(p + 3072) for each item, 3072 for each token."""
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
    """Draw samples of several map-style datasets in a ratio, pack them into sequences of `max_tokens`, and group these
    into microbatches with equal work: the same on every rank, and on any number of ranks.

    A sample is a dict of entries with one row per token, and of the task's item entries. `lengths` says, without
    decoding, how many tokens each sample has and how long its items are. It is, by source, a JSONL or Parquet file, an
    array of token counts, or pairs (tokens, items); by default, each dataset's `lengths(number)`. If lengths are known
    only after reading, it is a function of a decoded sample that returns its tokens, or its tokens and the lengths of
    its items; each rank then reads a share of the samples ahead, and all ranks gather the lengths one step before they
    are needed.

    `mix` has the weight of each source, a number or a function of the step; by default, all are equal. A sample with
    more than `max_tokens` is an error, unless `too_long` is "truncate" or "skip". `padding` has the values after the
    last token of a sequence, by entry, 0 by default. `segments` names an entry that numbers the samples of a sequence
    from 1, with 0 for padding.

    Each rank decodes what it needs of a step in `num_workers` processes of its own, during the previous step; without
    any, in the rank itself when the step starts. They are started by `multiprocessing_context` ("fork", "spawn",
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
        what = f"names {unknown[0]!r}, which is not a source" if unknown else f"has no weight of source {missing[0]!r}"
        raise InputError(f"balanced(mix=...): {what}; sources: {', '.join(sources)}")
    for name, dataset in sources.items():
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or len(dataset) == 0:
            raise InputError(f"balanced(...): source {name!r} must be a map-style dataset with samples")
    if isinstance(lengths, Mapping) and not set(lengths) <= set(sources):
        name = next(name for name in lengths if name not in sources)
        raise InputError(f"balanced(lengths=...): {name!r} is not a source; sources: {', '.join(sources)}")
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
