"""What do the pieces compute? Chains of layers from `nn.Module`s. Needs torch; knows no rank and no plan."""

from spindle.models.chain import Chain, ChainLayer, chain_and_output, chain_of, whole_chain
from spindle.models.state import keep_state
from spindle.models.valueless import Swapped, as_when_compiling, device_of, stand_in, without_caches

__all__ = [
    "Chain",
    "ChainLayer",
    "Swapped",
    "as_when_compiling",
    "chain_and_output",
    "chain_of",
    "device_of",
    "keep_state",
    "stand_in",
    "whole_chain",
    "without_caches",
]
