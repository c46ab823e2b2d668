"""Balanced data: lengths, draws, packing and state, without ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from spindle.data import Mix, balanced  # noqa: E402
from spindle.errors import CheckpointError, InputError, TrainingError  # noqa: E402
from spindle.planners import group_sequences  # noqa: E402


class Texts:
    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, number):
        return {"ids": torch.full((self.tokens[number],), number)}


def steps_of(data, count, num_microbatches=2, batch_size=2):
    state = data.state
    for _ in range(count):
        microbatches, state = data.step_after(state, num_microbatches, batch_size)
        yield microbatches, state


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(0, 3))
def test_every_sample_of_an_epoch_comes_once_and_none_is_lost(tokens, seed):
    data = balanced({"a": Texts(tokens)}, lengths=tokens, max_tokens=20, seed=seed)
    used, state = [], data.state
    while dict(state.drawn)["a"] < 3 * len(tokens):
        microbatches, state = data.step_after(state, 2, 2)
        used += [sample.number for microbatch in microbatches for sample in microbatch.samples]
        for microbatch in microbatches:
            for sequence in microbatch.sequences:
                assert 0 < sum(tokens[sample.number] for sample in sequence) <= 20
    counts = np.bincount([*used, *(sample.number for sample in state.carried)], minlength=len(tokens))
    drawn = dict(state.drawn)["a"]
    assert counts.sum() == drawn
    assert counts.max() - counts.min() <= 1  # whole epochs, and a part of one


def test_steps_continue_from_a_state_exactly():
    tokens = [3, 9, 4, 11, 2, 8, 5]
    options = {"lengths": {"a": tokens, "b": tokens[:3]}, "max_tokens": 12, "mix": {"a": 3, "b": lambda step: step}}

    def make():
        return balanced({"a": Texts(tokens), "b": Texts(tokens[:3])}, **options)

    data = make()
    whole = list(steps_of(data, 9))
    for stop in range(9):
        again = make()
        again.load_state_dict(json.loads(json.dumps(data.dict_of(whole[stop][1]))))
        assert list(steps_of(again, 8 - stop)) == whole[stop + 1 :]
    assert "b" not in {sample.source for microbatch in whole[0][0] for sample in microbatch.samples}
    assert "b" in {sample.source for microbatches, _ in whole for part in microbatches for sample in part.samples}


def test_a_changed_source_index_or_mix_is_refused_by_name():
    data = balanced({"a": Texts([3, 4])}, lengths=[3, 4], max_tokens=8, mix={"a": 2})
    state = data.state_dict()
    for options, message in (
        ({"lengths": [3, 5]}, "the lengths of source 'a' are not those with which"),
        ({"mix": {"a": 3}}, "has mix 'a=2', but balanced"),
        ({"max_tokens": 9}, "has max_tokens 8, but balanced"),
        ({"seed": 1}, "has seed 0, but balanced"),
        ({"too_long": "skip"}, "has too_long 'error', but balanced"),
    ):
        other = balanced({"a": Texts([3, 4])}, **{"lengths": [3, 4], "max_tokens": 8, "mix": {"a": 2}} | options)
        with pytest.raises(CheckpointError, match=message):
            other.load_state_dict(state)
    named = balanced({"b": Texts([3, 4])}, lengths=[3, 4], max_tokens=8, mix={"b": 2})
    with pytest.raises(CheckpointError, match=r"has sources \['a'\], but balanced\(...\) has \['b'\]"):
        named.load_state_dict(state)
    with pytest.raises(CheckpointError, match="the state of the data has no 'mix'; expected what state_dict"):
        data.load_state_dict({key: value for key, value in state.items() if key != "mix"})
    for damaged in ({"step": "x"}, {"draws": -1}, {"carried": [["b", 1]]}, {"carried": [["a", 2]]}, {"carried": [1]}):
        with pytest.raises(CheckpointError, match="the state of the data is damaged"):
            data.load_state_dict(state | damaged)
    with pytest.raises(CheckpointError, match="the state of the data is a NoneType"):
        data.load_state_dict(None)


def test_draws_do_not_depend_on_the_order_in_which_sources_are_named():
    def samples(*names):
        data = balanced(
            {name: Texts([3, 4]) for name in names}, lengths={name: [3, 4] for name in names}, max_tokens=40
        )
        return data.step_after(data.state, 2, 2)[0]

    assert samples("a", "b", "c") == samples("c", "a", "b")


def test_functions_of_a_mix_are_compared_by_code_and_numbers():
    def rising(by, *, until=4):
        return lambda step, first=until: first + sum(by for _ in range(step)) + (step in {1, 2, 3})

    assert Mix({"a": rising(2)}).text == Mix({"a": rising(2)}).text
    assert " at 0x" not in Mix({"a": rising(2)}).text  # which differs from process to process
    assert Mix({"a": rising(2)}).text != Mix({"a": rising(3)}).text
    assert Mix({"a": rising(2)}).text != Mix({"a": rising(2, until=5)}).text
    assert Mix({"a": 1234567.0}).text != Mix({"a": 1234568.0}).text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [3]}, r"source 'a': the index has the lengths of 1 samples, and the dataset 2; make it again"),
        ({"lengths": None}, r"source 'a': nothing says how long its samples are; give lengths="),
        ({"lengths": [3, 0]}, r"sample 1 has 0 tokens"),
        ({"lengths": [(3, [2, 0]), (3, [])]}, r"sample 0 has 3 tokens and items of \[2, 0\]"),
        ({"lengths": {"b": [3, 4]}}, r"'b' is not a source; sources: a"),
        ({"mix": {"b": 1}}, r"names 'b', which is not a source; sources: a"),
        ({"mix": {}}, r"has no weight of source 'a'"),
        ({"mix": {"a": "3"}}, r"mix=\{'a': '3'\}\): expected a number, or a function of the step"),
        ({"lengths": [3, 1.5]}, r"the lengths of sample 1 are 1.5; expected its tokens, such as 812"),
        ({"lengths": [(3, 2), 4]}, r"the lengths of sample 0 are \(3, 2\); expected"),
        ({"lengths": "none.parquet"}, r"none.parquet: cannot be read as Parquet \(FileNotFoundError"),
        ({"max_tokens": 0}, r"max_tokens=0\): expected a number of tokens, at least 1"),
        ({"max_tokens": "8"}, r"max_tokens='8'\): expected a number of tokens"),
        ({"lengths": 7}, r"source 'a': lengths is a int; expected a file, an array, or pairs"),
        ({"mix": [1]}, r"mix=\[1\]\): expected a dict"),
        ({"num_workers": -1}, r"num_workers=-1\): expected a number of processes, or 0"),
        ({"multiprocessing_context": "thread"}, r"multiprocessing_context='thread'\): expected one of fork"),
        ({"too_long": "cut"}, r"too_long='cut'\): expected one of error, truncate, skip"),
        ({"max_tokens": 2, "too_long": "skip"}, r"all samples of 'a' are longer than max_tokens=2"),
    ],
)
def test_what_cannot_be_balanced_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        balanced({"a": Texts([3, 4])}, **{"lengths": [3, 4], "max_tokens": 8} | options)


def test_samples_that_are_too_long_are_named_truncated_or_skipped():
    def step(tokens, **options):
        data = balanced({"a": Texts([len(tokens)])}, lengths=tokens, max_tokens=6, **options)
        return data.step_after(data.state, 1, 1)[0]

    with pytest.raises(InputError, match=r"sample 0 of 'a' has 9 tokens, more than max_tokens=6: truncate or skip"):
        step([9])
    assert step([9], too_long="truncate")[0].num_tokens == 6
    with pytest.raises(InputError, match="with items, which cannot be truncated"):
        step([(9, [4])], too_long="truncate")
    data = balanced({"a": Texts([9, 2])}, lengths=[9, 2], max_tokens=6, too_long="skip")
    assert {sample.number for sample in data.step_after(data.state, 1, 1)[0][0].samples} == {1}
    falling = balanced({"a": Texts([2])}, lengths=[2], max_tokens=6, mix={"a": lambda step: -step})
    with pytest.raises(InputError, match=r"step 0 needs a weight above 0 and none below, got a 0"):
        falling.step_after(falling.state, 1, 1)
    unknown = balanced({"a": Texts([2])}, lengths=[2], max_tokens=6, mix={"a": lambda step: float("nan")})
    with pytest.raises(InputError, match=r"step 0 needs a weight above 0 and none below, got a nan"):
        unknown.step_after(unknown.state, 1, 1)


def test_a_mix_has_extremes_where_shares_change():
    def extremes(*steps, **weights):
        return Mix(weights).extremes(*steps)

    assert extremes(0, 1000, a=1.0, b=2.0) == []
    assert extremes(0, 1000, a=1.0, b=lambda step: 1 + step) == [1000]
    assert extremes(10, 74, a=lambda step: abs(step - 40), b=1.0) == [40, 74]
    assert extremes(0, 1000, a=lambda step: 1 + step, b=lambda step: 2 + 2 * step) == []  # in the same ratio
    assert extremes(3, 3, a=lambda step: step, b=1.0) == []


def test_an_index_is_read_from_files(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"tokens": 3, "items": [2, 4]}\n\n{"tokens": 4}\n')
    data = balanced({"a": Texts([3, 4])}, lengths=lines, max_tokens=8)
    assert data.indices["a"].items_of(0) == (2, 4)
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"tokens": [3, 4], "items": [[2, 4], []]}), tmp_path / "a.parquet")
    same = balanced({"a": Texts([3, 4])}, lengths=tmp_path / "a.parquet", max_tokens=8)
    assert same.indices["a"].digest == data.indices["a"].digest
    lines.write_text('{"words": 3}\n')
    with pytest.raises(InputError, match=r'line 1: expected an object such as \{"tokens": 812'):
        balanced({"a": Texts([3])}, lengths=lines, max_tokens=8)


def test_batches_are_padded_and_samples_numbered():
    data = balanced(
        {"a": Texts([3, 4])}, lengths=[3, 4], max_tokens=8, padding={"ids": -1}, segments="segments", seed=1
    )
    ((microbatch,), _) = data.step_after(data.state, 1, 1)
    batch = data.decoder({}, None).decode(microbatch)
    assert batch["ids"].shape == batch["segments"].shape == (1, 8)
    assert sorted(batch["segments"][0].tolist()) == [0, 1, 1, 1, 2, 2, 2, 2]
    assert (batch["ids"][0][batch["segments"][0] == 0] == -1).all()
    wrong = balanced({"a": Texts([3, 4])}, lengths=[4, 4], max_tokens=8)
    ((microbatch,), _) = wrong.step_after(wrong.state, 1, 1)
    with pytest.raises(
        TrainingError, match=r"sample 0 of 'a': 'ids' has shape \(3,\), expected a row for each of the 4"
    ):
        wrong.decoder({}, None).decode(microbatch)


def test_groups_of_sequences_have_equal_size_and_level_work():
    assert group_sequences([9, 1, 5, 5], 2) == ((0, 1), (2, 3))
    assert group_sequences([1, 1], 2) == ((0,), (1,))
    with pytest.raises(InputError, match="cannot be divided into 2 groups of equal size; give a multiple of 2"):
        group_sequences([1, 2, 3], 2)


def test_many_small_items_count_beside_one_large():
    """A pure square would count sixteen images of 64 patches as a sixteenth of one of 1,024."""
    lengths = [(8, [1024]), (8, [64] * 16), (8, []), (8, [])]
    data = balanced({"a": Texts([8] * 4)}, lengths=lengths, max_tokens=8)
    ((first, second), _) = data.step_after(data.state, 2, 2)
    assert {len(first.item_lengths), len(second.item_lengths)} == {1, 16}


def test_samples_are_used_in_the_order_in_which_they_are_drawn():
    """Packing does not sort: where every sample fits, sequences follow the order of draws, whatever their items."""
    lengths = [(2, [4 * (number % 5 + 1)]) for number in range(24)]
    data = balanced({"a": Texts([2] * 24)}, lengths=lengths, max_tokens=4, seed=3)
    microbatches, _ = data.step_after(data.state, 3, 2)
    sequences = sorted(sequence for microbatch in microbatches for sequence in microbatch.sequences)
    order = [data._orders["a"].sample(number) for number in range(12)]
    drawn = [tuple(("a", number) for number in pair) for pair in zip(order[::2], order[1::2], strict=True)]
    assert sequences == sorted(drawn)


def test_samples_with_other_entries_or_more_rows_than_indexed_are_refused():
    class Weighted(Texts):
        def __getitem__(self, number):
            return super().__getitem__(number) | {"weights": torch.ones(self.tokens[number])}

    data = balanced({"a": Texts([3]), "b": Weighted([3])}, lengths={"a": [3], "b": [3]}, max_tokens=30)
    ((microbatch,), _) = data.step_after(data.state, 1, 1)
    with pytest.raises(TrainingError, match=r"are in one sequence, and only one of them has 'weights'"):
        data.decoder({}, None).decode(microbatch)
    old = balanced({"a": Texts([5])}, lengths=[3], max_tokens=8)
    ((microbatch,), _) = old.step_after(old.state, 1, 1)
    with pytest.raises(TrainingError, match=r"'ids' has shape \(5,\), expected a row for each of the 3 tokens"):
        old.decoder({}, None).decode(microbatch)
