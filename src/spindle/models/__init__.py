"""What do the pieces compute? Chains of layers from `nn.Module`s. Needs torch; knows no rank and no plan."""

from spindle.models.chain import Chain, ChainLayer, chain_and_output, chain_of, whole_chain
from spindle.models.state import keep_state
from spindle.models.valueless import as_when_compiling

__all__ = ["Chain", "ChainLayer", "as_when_compiling", "chain_and_output", "chain_of", "keep_state", "whole_chain"]
