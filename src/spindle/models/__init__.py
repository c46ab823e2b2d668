"""What do the pieces compute? Chains of layers from `nn.Module`s. Needs torch; knows no rank and no plan."""

from spindle.models.chain import Chain, ChainLayer, GradientTracer, chain_of, whole_chain

__all__ = ["Chain", "ChainLayer", "GradientTracer", "chain_of", "whole_chain"]
