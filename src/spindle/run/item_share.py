"""One member's share of an item that a sequence group runs: how its layers are cut and run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from spindle.models import SequenceGroup, sequence_attention, with_own_attention, with_sequence_attention
from spindle.run.items import ItemCode, Lengths, cut_slice


class ItemShare:
    """The share of one member of `group` in an item of a call."""

    def __init__(self, code: ItemCode, lengths: Lengths, item: int, group: SequenceGroup) -> None:
        assert code.sequence is not None
        assert code.length_entry is not None
        self._sequence, self._group = code.sequence, group
        self._bounds = code.sequence.bounds(lengths[code.length_entry][item], group.size)
        attended = code.sequence.attended
        self._tokens = [bound if attended is None else attended.at(bound) for bound in self._bounds]

    def of_arguments(self, arguments: Any) -> Any:
        """The arguments of a call's first layer, sliced if that layer runs on slices."""
        return self._cut(arguments) if self._sequence.whole_layers == 0 else arguments

    def of_layer(self, run: Callable[..., Any], number: int) -> Callable[..., Any]:
        """A layer of the call as this member runs it."""
        whole_layers = self._sequence.whole_layers
        if number >= whole_layers:
            return with_sequence_attention(run, self._group, self._tokens)
        # on all tokens, also if backward recomputes it among layers that run on slices
        run = with_own_attention(run)
        return run if number < whole_layers - 1 else lambda *args, **kwargs: self._cut(run(*args, **kwargs))

    def attention(self) -> AbstractContextManager[None]:
        """A context in which attention is computed by the whole group."""
        return sequence_attention(self._group, self._tokens)

    def _cut(self, tree: Any) -> Any:
        rules = self._sequence.cut
        return cut_slice(tree, rules, self._bounds, self._group.group_rank) if rules else tree
