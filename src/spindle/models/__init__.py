"""Cut modules into chains of layers, and run layers tensor or sequence parallel. Needs torch; knows no rank or plan."""

from spindle.models.blocks import towers_of
from spindle.models.chain import Chain, ChainLayer, build_chain, chain_and_output, chain_of, whole_chain
from spindle.models.compiled import check_options, compiled
from spindle.models.composite import Glue, OpenedComposite, PartCall, matched_leaves, open_composite
from spindle.models.cross_entropy import CrossEntropies
from spindle.models.effects import EffectsMode, host_random_state
from spindle.models.fake import (
    NEEDS_VALUES,
    FakeWeights,
    RandomWeights,
    as_when_compiling,
    clone_leaf,
    device_of,
    fake_like,
    fake_mode,
    fake_output,
    without_caches,
    without_torch_logs,
)
from spindle.models.mappings import TensorGroup, shard_of, span_of
from spindle.models.parallel_styles import (
    MAX_TENSOR_DEGREE,
    EmulatedTensorGroup,
    StyledModule,
    apply_styles,
    builtin_tp_plan,
    drop_tied_conflicts,
    resolve_styles,
    split_dims,
    with_styles,
)
from spindle.models.sequence_attention import (
    SequenceGroup,
    recorded_attention,
    sequence_attention,
    with_own_attention,
    with_sequence_attention,
)
from spindle.models.serialize import NotSerializableError, dump_chain, load_source, source_text
from spindle.models.state import ModuleSnapshot, ModuleStates
from spindle.models.zeros import zero_output, zero_outputs, zero_weights, zeros_like

__all__ = [
    "MAX_TENSOR_DEGREE",
    "NEEDS_VALUES",
    "Chain",
    "ChainLayer",
    "CrossEntropies",
    "EffectsMode",
    "EmulatedTensorGroup",
    "FakeWeights",
    "Glue",
    "ModuleSnapshot",
    "ModuleStates",
    "NotSerializableError",
    "OpenedComposite",
    "PartCall",
    "RandomWeights",
    "SequenceGroup",
    "StyledModule",
    "TensorGroup",
    "apply_styles",
    "as_when_compiling",
    "build_chain",
    "builtin_tp_plan",
    "chain_and_output",
    "chain_of",
    "check_options",
    "clone_leaf",
    "compiled",
    "device_of",
    "drop_tied_conflicts",
    "dump_chain",
    "fake_like",
    "fake_mode",
    "fake_output",
    "host_random_state",
    "load_source",
    "matched_leaves",
    "open_composite",
    "recorded_attention",
    "resolve_styles",
    "sequence_attention",
    "shard_of",
    "source_text",
    "span_of",
    "split_dims",
    "towers_of",
    "whole_chain",
    "with_own_attention",
    "with_sequence_attention",
    "with_styles",
    "without_caches",
    "without_torch_logs",
    "zero_output",
    "zero_outputs",
    "zero_weights",
    "zeros_like",
]
