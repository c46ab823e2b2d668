"""What one rank runs a plan with: weights and buffers, the executors of its steps, an optimizer over what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spindle.errors import TrainingError
from spindle.models import split_dims
from spindle.program import Sharding, main_replicas, optimizer_sharding
from spindle.run import Shards, Weights, World, send_tensors
from spindle.train.agreement import compare, compare_overlapping, optimizer_items
from spindle.train.analyze import AnalyzedWorkload
from spindle.train.bind import BoundWorkload
from spindle.train.config import TrainConfig
from spindle.train.optimizer import Named, NamedGroups, OptimizerUpdate
from spindle.train.optimizer_reshard import OptimizerState
from spindle.train.plan import PlannedWorkload
from spindle.train.steps import PipelinedSteps, StaticSteps, Steps
from spindle.train.update import Update, split_state

StateFor = Callable[[Sharding], OptimizerState]  # reads a rank's share of a saved state


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRuntime:
    """What one rank needs to run a plan: weights and buffers, and the executors of its steps."""

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
    """Make this rank's weights and executors. `examples` has the batch on which each task variant was measured."""
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
    """Make the optimizer of the parameters that this rank holds, which must be scattered. `state` is that of an earlier
    plan's optimizer, or of a checkpoint."""
    weights, shards, parameters = runtime.weights, runtime.shards, runtime.workload.graph.parameters
    program = runtime.planned.program
    owned = shards.owned if shards is not None else {}
    dtypes = [parameter.dtype for parameter in weights.parameters]
    sharding = optimizer_sharding(program, runtime.workload.graph, weights.sharding, dtypes)
    named: list[Named] = []
    counted: list[Named] = []
    for number, entry in enumerate(parameters):
        slices = sharding.get(entry.name, {})
        if world.rank in slices:
            updated = owned.get(number, weights.parameters[number])
            assert updated is not None
            assert tuple(updated.shape) == slices[world.rank].shape
            named.append((entry.name, updated))
            if world.rank in main_replicas(slices):
                counted.append((entry.name, updated))
    stepping = {rank for slices in weights.sharding.values() for rank in slices}
    computing = {rank for shape in program.slots for rank in shape.ranks.tolist()}
    if not config.planning.is_pipelined:
        stepping |= computing
    elif config.loss_scaling is not None and not computing <= stepping:
        # In which steps a rank without weights takes part is only known when they are planned.
        raise TrainingError(
            f"autocast=torch.float16 in a pipeline: rank {min(computing - stepping)} computes a loss and holds no "
            "weights, so that it would not know the loss scale; use torch.bfloat16, or fewer ranks"
        )
    if callable(state):
        state = state(sharding)
    owners = runtime.workload.bound.trial_of if config.is_sweep else {}
    states = split_state(state, owners, [options.trial for options in config.updates])
    parts = []
    for options in config.updates:
        own = {name: slices for name, slices in sharding.items() if owners.get(name, "") == options.trial}
        lr_groups: NamedGroups | None = None
        # This comes before the real optimizer, so that a function which remembers its last optimizer remembers the real
        # one.
        if world.size > 1:
            whole = [
                (entry.name, weights.parameters[number], weights.shapes[number])
                for number, entry in enumerate(parameters)
                if entry.name in own
            ]
            items, lr_groups = optimizer_items(options.optimizer, options.lr_scheduler, whole)
            where = f" of trial {options.trial!r}" if options.trial else ""
            compare(world, {f"{name}{where}": item for name, item in items.items()})
            lr_groups = world.broadcast_object(lr_groups)  # the order may differ between ranks
        parts.append(
            OptimizerUpdate(
                options,
                named=[(name, parameter) for name, parameter in named if name in own],
                counted=[parameter for name, parameter in counted if name in own],
                sharding=own,
                ranks=tuple(sorted({rank for slices in own.values() for rank in slices})),
                world=world,
                state=states[options.trial],
                ema=config.ema,
                grad_scaler=config.loss_scaling,
                scaled_ranks=tuple(sorted(stepping)),
                lr_groups=lr_groups,
                reports_norm=bool(config.callbacks),
            )
        )
    update = Update(parts)
    names = [parameter.name for parameter in parameters]
    compare_overlapping(world, names, update.group_settings(), "the optimizer's settings of parameter")
    return update


# Buffers of modules (running statistics) are the same on all ranks before and after a fit.


def share_buffers(bound: BoundWorkload, world: World) -> None:
    """Broadcast rank 0's buffers."""
    if world.size == 1:
        return
    buffers = [buffer for handle in bound.handles.values() for buffer in handle.module.buffers()]
    send_tensors(world, buffers, [0] * len(buffers), range(world.size))


def buffer_owners(runtime: RankRuntime) -> dict[int, int]:
    """Id of a buffer → the rank with its latest value: the first rank of the slot that ran its layer last."""
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
    """Gather the buffers of every layer on rank 0."""
    if world.size == 1:
        return
    owner = buffer_owners(runtime)
    buffers = [buffer for handle in runtime.workload.bound.handles.values() for buffer in handle.module.buffers()]
    send_tensors(world, buffers, [owner.get(id(buffer), 0) for buffer in buffers], [0])
