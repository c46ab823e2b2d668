"""Balanced, resumable data: which samples a step has, packed into sequences, and what each rank decodes of them.

Samples are drawn by seed and number and packed by their lengths alone. So every rank computes the same steps, whatever
the number of ranks, and without messages if an index has the lengths. `balanced` is part of the public interface.
"""

from spindle.data.balanced import Balanced, State, balanced
from spindle.data.decode import WHOLE, Decoder, Microbatch, SampleNumber, Wanted
from spindle.data.draws import Mix
from spindle.data.lengths import LengthIndex, Lengths, ReadLengths, UnknownLengths, Unreadable, length_index
from spindle.data.random_state import (
    RandomState,
    is_same,
    random_state,
    restored_random_state,
    seed_all,
    set_random_state,
)
from spindle.data.workers import DecodeWorkers

__all__ = [
    "WHOLE",
    "Balanced",
    "DecodeWorkers",
    "Decoder",
    "LengthIndex",
    "Lengths",
    "Microbatch",
    "Mix",
    "RandomState",
    "ReadLengths",
    "SampleNumber",
    "State",
    "UnknownLengths",
    "Unreadable",
    "Wanted",
    "balanced",
    "is_same",
    "length_index",
    "random_state",
    "restored_random_state",
    "seed_all",
    "set_random_state",
]
