"""Parts of composites whose outputs are packed: a vision tower that has a row for each patch of its rank's samples.

Rows that cross from rank to rank must be as many for each sample, so such a part returns its output padded, and the
code after it unpacks that:

    batch: padded ─▶ [unpack] ─▶ arguments ─▶ part, then [pad] ─▶ padded output ─▶ [unpack] ─▶ code after it

Between the layers of such a part everything is packed, and not all of it can be padded (boundaries of sequences): it
stays one layer, divided over samples.

Such parts are detected by running the code on the first batch, and on that batch with one more sample: an output is
packed if its length follows that of an entry. Every step checks that it still does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from spindle.errors import WorkloadError
from spindle.models import without_caches, zero_output
from spindle.train.composites import replace_in_losses
from spindle.train.packed import Packed, entries_of, pad, unpack
from spindle.train.task import called_module, called_part
from spindle.train.task_errors import copy_line


@dataclass(frozen=True, slots=True)
class PackedLeaf:
    """A leaf of an output that has `ratio` rows for each row of a packed entry of the batch."""

    entry: int
    ratio: Fraction

    def lengths(self, entry: Packed) -> tuple[torch.Tensor, int]:
        """The number of rows of each sample, and the most of any sample in the batch."""
        numerator, denominator = self.ratio.numerator, self.ratio.denominator
        return entry.lengths * numerator // denominator, entry.padded.shape[1] * numerator // denominator


Rules = tuple[PackedLeaf | None, ...]  # by leaf of an output


class PackedPart(nn.Module):
    """A module with the parameters, buffers and submodules of another one, under the same names, whose output is
    padded."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self.__dict__["_packed"] = module  # kept out of the submodules, because names would change

    @property
    def training(self) -> bool:
        return bool(self.__dict__["_packed"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_packed" in self.__dict__:
            self.__dict__["_packed"].training = mode

    def forward(self, rules: Rules, entries: Sequence[Packed], args: Any, kwargs: Any) -> Any:
        module = self.__dict__["_packed"]
        with without_caches(module):
            leaves, spec = tree_flatten(module(*args, **kwargs))
        return tree_unflatten(
            [
                leaf if rule is None else pad(leaf, *rule.lengths(entries[rule.entry]))
                for leaf, rule in zip(leaves, rules, strict=True)
            ],
            spec,
        )


def _padded_call(rules: Rules) -> Callable[..., Any]:
    """A function that makes the arguments of a `PackedPart` from the packed entries and the module's own arguments."""

    def padded_call(entries: Sequence[Packed], arguments: tuple[Any, Any]) -> Any:
        return (rules, entries, *arguments), {}

    return _named(padded_call, rules)


def _unpacked_output(rules: Rules) -> Callable[..., Any]:
    """A function that turns the output of a `PackedPart` back into what the module itself returns."""

    def unpacked_output(entries: Sequence[Packed], output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        return tree_unflatten(
            [
                leaf if rule is None else unpack(leaf, rule.lengths(entries[rule.entry])[0])
                for leaf, rule in zip(leaves, rules, strict=True)
            ],
            spec,
        )

    return _named(unpacked_output, rules)


def _named(function: Callable[..., Any], rules: Rules) -> Callable[..., Any]:
    """Name a function of recorded code after what it does, so that its name is the same in all processes."""
    function.__qualname__ = f"{function.__name__} {rules}"
    function.reads_values = True  # type: ignore[attr-defined]
    return function


# Finding the parts that return packed tensors


def pad_packed_outputs(graph: fx.Graph, constants: nn.Module, batch_size: int, example: Any) -> None:
    """In the graph of a task, let modules with packed arguments or outputs return padded outputs."""
    entries = entries_of(example)
    if not entries or batch_size < 2:
        return
    lengths = [entry.lengths.tolist() for entry in entries]
    for number, counts in enumerate(lengths):
        if len(counts) != batch_size:
            raise WorkloadError(
                f"spindle.packed: entry {number} of the batch has lengths for {len(counts)} samples, expected "
                f"{batch_size}"
            )
    rows = [*range(batch_size), max(range(batch_size), key=lambda sample: sum(counts[sample] for counts in lengths))]
    more = tree_map(
        lambda leaf: leaf[rows] if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == batch_size else leaf,
        example,
    )
    shapes = [_shapes(graph, constants, batch) for batch in (example, more)]
    rule = _Rule(lengths, rows)
    (placeholder,) = (node for node in graph.nodes if node.op == "placeholder")
    for node in list(graph.nodes):
        if node.target not in (called_module, called_part):
            continue
        (taken, given), (more_taken, more_given) = (shape[node] for shape in shapes)
        rules = tuple(map(rule, given, more_given))
        takes_packed = any(map(rule, taken, more_taken))
        if any(rules) or takes_packed:
            _pad_call(graph, node, placeholder, rules)


Shapes = list[tuple[int, ...] | None]


def _shapes(graph: fx.Graph, constants: nn.Module, batch: Any) -> dict[fx.Node, tuple[Shapes, Shapes]]:
    """The shapes of each call's arguments and outputs, with modules that return zeros."""
    values: dict[fx.Node, Any] = {}
    shapes: dict[fx.Node, tuple[Shapes, Shapes]] = {}
    with torch.no_grad():
        for node in graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: values[source])
            match node.op:
                case "placeholder":
                    values[node] = batch
                case "get_attr":
                    values[node] = getattr(constants, node.target)
                case "call_function" if node.target in (called_module, called_part):
                    arguments = (args[1:], kwargs) if node.target is called_module else args[1]
                    values[node] = zero_output(args[0].module, *arguments)
                    shapes[node] = _leaf_shapes(arguments), _leaf_shapes(values[node])
                case "call_function":
                    values[node] = node.target(*args, **kwargs)
                case "call_method":
                    values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
    return shapes


def _leaf_shapes(nest: Any) -> Shapes:
    return [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in tree_leaves(nest)]


@dataclass(frozen=True, slots=True)
class _Rule:
    """Which entry of a batch a tensor follows, judged by its shapes for the batch and for a batch with more `rows`."""

    lengths: list[list[int]]  # by entry and sample
    rows: list[int]

    def __call__(self, shape: tuple[int, ...] | None, more: tuple[int, ...] | None) -> PackedLeaf | None:
        if not shape or not more or shape[0] == more[0] or (shape[0], more[0]) == (len(self.rows) - 1, len(self.rows)):
            return None
        # The entry with most rows describes the length of a sample best.
        for entry in sorted(range(len(self.lengths)), key=lambda number: -sum(self.lengths[number])):
            counts = self.lengths[entry]
            ratio = Fraction(shape[0], sum(counts))
            if ratio * sum(counts[row] for row in self.rows) == more[0] and all(
                (ratio * count).denominator == 1 for count in counts
            ):
                return PackedLeaf(entry, ratio)
        return None


def _pad_call(graph: fx.Graph, node: fx.Node, placeholder: fx.Node, rules: Rules) -> None:
    handle: Any = node.args[0]
    arguments: Any = node.args[1] if node.target is called_part else (node.args[1:], node.kwargs)
    with graph.inserting_before(node):
        entries = graph.call_function(entries_of, (placeholder,))
        with_entries = graph.call_function(_padded_call(rules), (entries, arguments))
        call = graph.call_function(called_part, (handle.packed(PackedPart), with_entries))
        copy_line(node, call)
        output = graph.call_function(_unpacked_output(rules), (entries, call))
    node.replace_all_uses_with(output)
    replace_in_losses(graph, node, output)
    graph.erase_node(node)
