"""Run a Program on `torch.distributed`. Knows instructions and the code of ops, not how tasks were written."""

from spindle.run.backward_split import WeightPart, capture_input_part
from spindle.run.budget import Budget, limit_gpu_memory
from spindle.run.compute import seed_of
from spindle.run.executor import Executor
from spindle.run.graph_memory import capturing, own_workspaces
from spindle.run.green_contexts import partitions, sm_groups
from spindle.run.items import (
    CountedRows,
    ItemCode,
    ItemRows,
    Lengths,
    SequenceCode,
    SliceRule,
    cut_items,
    cut_slice,
    items_to_measure,
    join_items,
    meta_of_items,
    slice_rows,
)
from spindle.run.losses import metric_sums
from spindle.run.measured_timeline import timeline_of
from spindle.run.op_code import LayerCode, LayersCode, LossCode, OpCode
from spindle.run.pytrees import (
    Axes,
    PytreeMeta,
    TensorMeta,
    as_leaves,
    axes_of,
    copied,
    cut,
    cut_leaf,
    digest,
    fingerprint_of,
    has_uneven_rows,
    on_device,
    plain,
    pytree_meta,
    signature_of,
    takes_gradient,
)
from spindle.run.rank_program import held_parameters, rank_program_of
from spindle.run.resharding import TensorSpec, box_view, reshard, send_tensors, slice_of
from spindle.run.shape_inference import Cuts, ShapeInference
from spindle.run.shards import Shards
from spindle.run.staging import StagedBytes, Staging
from spindle.run.step import MAX_AHEAD, HeldBytes, HostCopy, LaunchThrottle, MicroStep, ReadBytes, StepTimer
from spindle.run.weights import Weights
from spindle.run.world import (
    Message,
    PendingGather,
    World,
    compute_stream,
    join_world,
    on_compute_stream,
    peers,
    to_device,
    wait,
)

__all__ = [
    "MAX_AHEAD",
    "Axes",
    "Budget",
    "CountedRows",
    "Cuts",
    "Executor",
    "HeldBytes",
    "HostCopy",
    "ItemCode",
    "ItemRows",
    "LaunchThrottle",
    "LayerCode",
    "LayersCode",
    "Lengths",
    "LossCode",
    "Message",
    "MicroStep",
    "OpCode",
    "PendingGather",
    "PytreeMeta",
    "ReadBytes",
    "SequenceCode",
    "ShapeInference",
    "Shards",
    "SliceRule",
    "StagedBytes",
    "Staging",
    "StepTimer",
    "TensorMeta",
    "TensorSpec",
    "WeightPart",
    "Weights",
    "World",
    "as_leaves",
    "axes_of",
    "box_view",
    "capture_input_part",
    "capturing",
    "compute_stream",
    "copied",
    "cut",
    "cut_items",
    "cut_leaf",
    "cut_slice",
    "digest",
    "fingerprint_of",
    "has_uneven_rows",
    "held_parameters",
    "items_to_measure",
    "join_items",
    "join_world",
    "limit_gpu_memory",
    "meta_of_items",
    "metric_sums",
    "on_compute_stream",
    "on_device",
    "own_workspaces",
    "partitions",
    "peers",
    "plain",
    "pytree_meta",
    "rank_program_of",
    "reshard",
    "seed_of",
    "send_tensors",
    "signature_of",
    "slice_of",
    "slice_rows",
    "sm_groups",
    "takes_gradient",
    "timeline_of",
    "to_device",
    "wait",
]
