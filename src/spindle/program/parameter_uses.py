"""Which slots, or which passes, use each parameter?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from spindle.program.columns import Column
from spindle.program.instructions import Backward, Instruction

Layers = tuple[tuple[int, ...], ...]  # the parameters of each layer of an op


def parameter_uses(used: Iterable[tuple[Layers, int, int]]) -> dict[int, Column]:
    """Parameter → the positions in `used`, increasing, of uses that include it; a use is of layers `[first, last)` of
    an op. Parameters with the same uses share one column, so that callers can compute what depends on it once.

    Ops that run the same layers in several microbatches share their `parameters` tuple, so distinct uses are few.
    """
    members: dict[tuple[int, int, int], list[int]] = {}  # by distinct use
    layers_of: list[tuple[Layers, int, int]] = []
    for number, (layers, first, last) in enumerate(used):
        key = (id(layers), first, last)
        if key not in members:
            members[key] = []
            layers_of.append((layers, first, last))
        members[key].append(number)
    kinds_of: dict[int, list[int]] = {}  # the distinct uses of each parameter
    for kind, (layers, first, last) in enumerate(layers_of):
        for parameter in dict.fromkeys(chain.from_iterable(layers[first:last])):
            kinds_of.setdefault(parameter, []).append(kind)
    columns = [np.array(numbers, dtype=np.int64) for numbers in members.values()]
    known: dict[tuple[int, ...], Column] = {}
    uses = {}
    for parameter, kinds in kinds_of.items():
        key_of_kinds = tuple(kinds)
        if key_of_kinds not in known:
            known[key_of_kinds] = np.sort(np.concatenate([columns[kind] for kind in kinds]))
        uses[parameter] = known[key_of_kinds]
    return uses


def gradient_uses(
    instructions: Sequence[Instruction], layers_of_slot: Sequence[Layers]
) -> tuple[list[tuple[int, Backward]], dict[int, Column]]:
    """The instructions that compute weight gradients, with their numbers; and parameter → the positions, in this list,
    of those that add to its gradient."""
    training = [
        (number, instruction)
        for number, instruction in enumerate(instructions)
        if isinstance(instruction, Backward) and instruction.makes_weights
    ]
    used = ((layers_of_slot[each.slot], each.first, each.last) for _, each in training)
    return training, parameter_uses(used)
