"""Balanced, resumable data: which samples a step has, packed into sequences, and what each rank decodes of them.

Samples are drawn by seed and number and packed from their lengths alone, so every rank computes the same steps without
messages, whatever the number of ranks. `balanced` is part of the public interface.
"""

from spindle.data.balanced import Balanced, State, balanced
from spindle.data.decode import Decoder, Microbatch, SampleNumber
from spindle.data.draws import Mix
from spindle.data.lengths import LengthIndex, length_index

__all__ = [
    "Balanced",
    "Decoder",
    "LengthIndex",
    "Microbatch",
    "Mix",
    "SampleNumber",
    "State",
    "balanced",
    "length_index",
]
