"""What do the pieces compute? Chains of layers from `nn.Module`s. Needs torch; knows no rank and no plan."""

from spindle.models.chain import Chain, ChainLayer, build_chain, chain_and_output, chain_of, whole_chain
from spindle.models.crossings import Members, shard_of, span_of
from spindle.models.serialize import NotSerializableError, dump_chain, load_source, source_text
from spindle.models.state import keep_state
from spindle.models.tensor import (
    MOST_MEMBERS,
    Rehearsal,
    Styled,
    plan_inside,
    split_dims,
    styles_of,
    styles_on,
    with_styles,
    without_tied,
)
from spindle.models.valueless import Swapped, as_when_compiling, device_of, stand_in, without_caches

__all__ = [
    "MOST_MEMBERS",
    "Chain",
    "ChainLayer",
    "Members",
    "NotSerializableError",
    "Rehearsal",
    "Styled",
    "Swapped",
    "as_when_compiling",
    "build_chain",
    "chain_and_output",
    "chain_of",
    "device_of",
    "dump_chain",
    "keep_state",
    "load_source",
    "plan_inside",
    "shard_of",
    "source_text",
    "span_of",
    "split_dims",
    "stand_in",
    "styles_of",
    "styles_on",
    "whole_chain",
    "with_styles",
    "without_caches",
    "without_tied",
]
