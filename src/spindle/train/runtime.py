"""What one rank runs a plan with: weights and buffers, the executors of its steps, an optimizer over what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from spindle.errors import TrainingError
from spindle.models import split_dims
from spindle.program import Sharding, main_replicas, optimizer_sharding
from spindle.run import Shards, Weights, World, send_tensors
from spindle.train.agreement import compare, compare_held, optimizer_items
from spindle.train.analyze import AnalyzedWorkload
from spindle.train.bind import Bound
from spindle.train.config import TrainConfig
from spindle.train.optimizer import Named, NamedGroups, Update
from spindle.train.optimizer_reshard import OptimizerState
from spindle.train.plan import PlannedWorkload
from spindle.train.steps import PipelinedSteps, StaticSteps, Steps

StateFor = Callable[[Sharding], OptimizerState]  # reads a rank's share of a saved state


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRuntime:
    """One rank's share of a planned workload."""

    workload: AnalyzedWorkload
    planned: PlannedWorkload
    weights: Weights
    shards: Shards | None
    steps: Steps

    def drop_gradients(self) -> None:
        for parameter in self.weights.parameters:
            parameter.grad = None


def make_runtime(
    workload: AnalyzedWorkload,
    planned: PlannedWorkload,
    config: TrainConfig,
    world: World,
    examples: Mapping[str, Any],
) -> RankRuntime:
    """This rank's weights and executors; `examples` has the batch on which each task variant was measured."""
    bound, program = workload.bound, planned.program
    parameters = [bound.parameters[parameter.name] for parameter in workload.graph.parameters]
    split = split_dims(bound.styled)
    dims = {number: split[id(parameter)] for number, parameter in enumerate(parameters) if id(parameter) in split}
    weights = Weights(program, workload.graph, parameters, world, dims)
    shards = Shards(program, parameters, world) if planned.plan.shard_optimizer else None
    steps: Steps
    if planned.layout is None:
        steps = StaticSteps(workload, planned, weights.parameters, shards, config, world)
    else:
        steps = PipelinedSteps(workload, planned, planned.layout, weights.parameters, shards, examples, config, world)
    return RankRuntime(workload=workload, planned=planned, weights=weights, shards=shards, steps=steps)


def make_update(
    runtime: RankRuntime, config: TrainConfig, world: World, state: OptimizerState | StateFor | None
) -> Update:
    """The optimizer over the parameters that this rank holds, which must be scattered, with the state of an earlier
    plan's optimizer or of a checkpoint."""
    weights, shards, parameters = runtime.weights, runtime.shards, runtime.workload.graph.parameters
    program = runtime.planned.program
    owned = shards.owned if shards is not None else {}
    dtypes = [parameter.dtype for parameter in weights.parameters]
    sharding = optimizer_sharding(program, runtime.workload.graph, weights.sharding, dtypes)
    named: list[Named] = []
    counted: list[nn.Parameter] = []
    for number, entry in enumerate(parameters):
        slices = sharding.get(entry.name, {})
        if world.rank in slices:
            updated = owned.get(number, weights.parameters[number])
            assert updated is not None
            assert tuple(updated.shape) == slices[world.rank].shape
            named.append((entry.name, updated))
            if world.rank in main_replicas(slices):
                counted.append(updated)
    trained = {number: entry.name for number, entry in enumerate(parameters) if entry.name in sharding}
    lr_groups: NamedGroups | None = None
    # Before the real optimizer is made, so that a function that keeps its last optimizer keeps the real one.
    if world.size > 1:
        whole = [(name, weights.parameters[number], weights.shapes[number]) for number, name in trained.items()]
        items, lr_groups = optimizer_items(config.optimizer, config.lr_scheduler, whole)
        compare(world, items)
        lr_groups = world.broadcast_object(lr_groups)  # the order may differ between ranks
    ranks = sorted({rank for slices in sharding.values() for rank in slices})
    stepping = {rank for slices in weights.sharding.values() for rank in slices}
    computing = {rank for shape in program.slots for rank in shape.ranks.tolist()}
    if not config.planning.is_pipelined:
        stepping |= computing
    elif config.loss_scaling is not None and not computing <= stepping:
        # In which steps a rank without weights takes part is known only when they are planned.
        raise TrainingError(
            f"autocast=torch.float16 in a pipeline: rank {min(computing - stepping)} computes a loss and holds no "
            "weights, so that it would not know the loss scale; use torch.bfloat16, or fewer ranks"
        )
    update = Update(
        config.optimizer,
        config.lr_scheduler,
        config.max_grad_norm,
        named=named,
        counted=counted,
        sharding=sharding,
        ranks=tuple(ranks),
        world=world,
        state=state(sharding) if callable(state) else state,
        ema=config.ema,
        grad_scaler=config.loss_scaling,
        scaled_ranks=tuple(sorted(stepping)),
        lr_groups=lr_groups,
        reports_norm=bool(config.callbacks),
    )
    names = [parameter.name for parameter in parameters]
    compare_held(world, names, update.group_settings(), "the optimizer's settings of parameter")
    return update


# Buffers of modules (running statistics) are the same on all ranks before and after a fit.


def share_buffers(bound: Bound, world: World) -> None:
    """Broadcast rank 0's buffers."""
    if world.size == 1:
        return
    buffers = [buffer for handle in bound.handles.values() for buffer in handle.module.buffers()]
    send_tensors(world, buffers, [0] * len(buffers), range(world.size))


def buffer_owners(runtime: RankRuntime) -> dict[int, int]:
    """The rank whose buffers of a layer are the latest, by id of the buffer: the first of the slot that ran it last."""
    handles = runtime.workload.bound.handles
    owner: dict[int, int] = {}
    program, plan = runtime.planned.program, runtime.planned.plan
    slots = sorted(zip(program.slots, plan.slots, strict=True), key=lambda pair: pair[0].op)
    for shape, slot in slots:
        op = runtime.workload.graph.metaops[shape.op]
        if op.module is not None and op.module in handles:
            layers = handles[op.module].chain.layers[op.first_layer + slot.first : op.first_layer + slot.last]
            owner.update((id(buffer), slot.devices[0]) for layer in layers for buffer in layer.buffers)
    return owner


def gather_buffers(runtime: RankRuntime, world: World) -> None:
    """Gather each layer's buffers on rank 0."""
    if world.size == 1:
        return
    owner = buffer_owners(runtime)
    buffers = [buffer for handle in runtime.workload.bound.handles.values() for buffer in handle.module.buffers()]
    send_tensors(world, buffers, [owner.get(id(buffer), 0) for buffer in buffers], [0])
