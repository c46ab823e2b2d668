"""What comes before the first step: tasks recorded and measured, a plan made, and this rank's part of it made ready.

Rank 0 cuts modules into layers, traces and probes them, and plans; all ranks lower the same plan. What ranks derive by
themselves, they compare (`agreement`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from spindle.errors import PlanError, ProfileError, TrainingError
from spindle.graph import MetaGraph, metagraph_of
from spindle.measure import local_profile, measure_update
from spindle.models import builtin_tp_plan, split_dims
from spindle.plan import Plan, check, parse_plan, read_plan
from spindle.planners import Effort, make_plan
from spindle.planners.pipeline import Layout, holders_in, pipeline_layout, plan_pipeline
from spindle.profile import Profile, ProfileRequest, fitting, profile_request, read_profile, write_profile
from spindle.program import Program, lower, verify
from spindle.run import Executor, OpCode, ShapeInference, World
from spindle.run.nests import on_device
from spindle.run.shards import Shards
from spindle.run.weights import Weights
from spindle.run.world import on_compute_stream
from spindle.train.agreement import compare, compare_attributes, compare_held, optimizer_items, task_items
from spindle.train.bind import Bound, bind, code_of
from spindle.train.kinds import kinds_of
from spindle.train.microbatches import Key, Microbatches, StepGraph, on_one_device, variant_of
from spindle.train.optimizer import MakeOptimizer, MakeScheduler, Named, Update, UpdateState
from spindle.train.optimizer_reshard import Part
from spindle.train.probe import Facts, facts_without_values, probe
from spindle.train.progress import Progress
from spindle.train.record import handles_of, record_all
from spindle.train.samples import Needs, needs_of
from spindle.train.sampling import Share
from spindle.train.task import TaskDefinition
from spindle.train.task_variants import TaskVariants
from spindle.train.tensor import Sharing, find_sharing
from spindle.train.trace import unchanged
from spindle.train.trace_broadcast import trace_on_rank_0
from spindle.train.trial import why_not_sharded
from spindle.workload import WorkloadRequest, workload_request, write_workload

PIPELINE = "pipeline"
_PLANNED = 0.95  # of the memory that a rank may hold; what a step takes is known that well


@dataclass(slots=True)
class Options:
    """What the user gave the Trainer."""

    tasks: tuple[TaskDefinition, ...]
    make_optimizer: MakeOptimizer
    make_scheduler: MakeScheduler | None
    clip_norm: float | None
    accumulate: int
    autocast: torch.dtype | None
    sampling: Mapping[str, Share] | None
    tasks_per_step: int
    planner: str
    plan: Plan | Path | str | None
    profile: Profile | Path | str | None
    seed: int
    name: str
    cuda_graphs: bool
    shard_optimizer: bool | None = None
    tensor_degrees: Mapping[str, int] | None = None
    memory_bytes: int | None = None
    pipeline_ranks: int | None = None

    @property
    def is_pipelined(self) -> bool:
        return self.planner == PIPELINE and self.plan is None

    @property
    def names(self) -> list[str]:
        return [task.name for task in self.tasks]


@dataclass(frozen=True, slots=True)
class ProfiledWorkload:
    """What was found out about the tasks on this machine."""

    bound: Bound
    graph: MetaGraph
    code: list[OpCode]
    profile: Profile
    mode: list[bool]
    ended_modules: frozenset[str] = frozenset()  # of tasks that have ended


class RankRuntime:
    """The plan, and what this rank has of it."""

    def __init__(
        self,
        known: ProfiledWorkload,
        plan: Plan,
        options: Options,
        world: World,
        holders: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        self.bound, self.graph, self.code, self.profile = known.bound, known.graph, known.code, known.profile
        self.plan, self._options, self._world = plan, options, world
        self.program = lower(plan, known.profile, holders=holders)
        compare(
            world, {"the workload": known.bound.workload, "the profile": known.profile, **_program_items(self.program)}
        )
        verify(self.program, known.profile)
        parameters = [known.bound.parameters[parameter.name] for parameter in known.graph.parameters]
        split = split_dims(known.bound.styled)
        dims = {number: split[id(one)] for number, one in enumerate(parameters) if id(one) in split}
        self.weights = Weights(self.program, known.graph, parameters, world, dims)
        self.shards = Shards(self.program, parameters, world) if plan.shard_optimizer else None
        self.main = self._executor(self.program)
        self._planned = {name: one.recorded.definition.batch_size for name, one in known.bound.tasks.items()}
        self._executors = {tuple(self._planned.values()): self.main}
        self.update: Update | None = None
        self._needs: dict[str, Needs] = {}
        self.microbatches: Microbatches | None = None
        self._last = self.main

    def executor_for(self, rows: Mapping[str, int]) -> Executor:
        """The executor for these numbers of rows; others than planned come with a loader's short last batch."""
        key = tuple(rows.get(name, planned) for name, planned in self._planned.items())
        if key not in self._executors:
            program = lower(self.plan, self.profile, dict(zip(self._planned, key, strict=True)))
            compare(self._world, _program_items(program))
            verify(program, self.profile)
            self._executors[key] = self._executor(program, captures=False)
        return self._executors[key]

    def step_graph(self, key: Key, counts: Mapping[str, int]) -> StepGraph:
        """What a step runs whose microbatches are these; `counts` has how many of them its losses are averaged over."""
        assert self.microbatches is not None
        return self.microbatches.graph(key, self._reached, counts)

    def executor_of(self, graph: StepGraph, program: Program) -> Executor:
        """The executor of a step of a pipeline; that of the step before must not run again."""
        axes = {op.task: self.bound.batch_axes[variant_of(op.task)] for op in graph.profile.graph.metaops}
        self._last = Executor(
            program,
            graph.profile.graph,
            graph.code,
            self.weights.parameters,
            axes,
            self._world,
            reached=graph.reached,
            seed=self._options.seed,
            cuda_graphs=False,
            autocast=self._options.autocast,
            before=self._last,
        )
        return self._last

    def close(self) -> None:
        """What runs beside the training ends."""
        if self.microbatches is not None:
            self.microbatches.close()

    def needs(self, variant: str) -> Needs:
        """What this rank's slots look at, of a batch as large as planned."""
        if variant not in self._needs:
            uses = [(code, first, last) for task, code, first, last in self.main.uses if task == variant]
            self._needs[variant] = needs_of(uses)
        return self._needs[variant]

    def make_update(self, state_for: Callable[[Mapping[str, Part]], UpdateState]) -> Update:
        """The optimizer over what this rank holds, which must be here, with the state that is given for these parts."""
        options, weights, rank = self._options, self.weights, self._world.rank
        shared = self.shards.owned if self.shards is not None else {}
        named: list[Named] = []
        counted: list[nn.Parameter] = []
        parts: dict[str, Part] = {}
        for number, one in enumerate(self.graph.parameters):
            parameter, holders = weights.parameters[number], weights.holders[number]
            if not one.trainable or rank not in holders:
                continue
            shard, span, counts = weights.shard(number), None, weights.counts(number)
            if number in shared:
                owned = shared[number]
                if owned is None:
                    continue
                span, parameter = owned
                # Members of a tensor group that hold a parameter alike each have its parts among their like.
                assert self.shards is not None
                counts = shard is not None or holders[0] in self.shards.sharers(number)
            named.append((one.name, parameter))
            parts[one.name] = Part(tuple(parameter.shape), shard, span)
            if counts:
                counted.append(parameter)
        ranks = sorted({rank for shape in self.program.slots for rank in shape.ranks.tolist()})
        trained = {
            number: one.name
            for number, one in enumerate(self.graph.parameters)
            if one.trainable and weights.holders[number]
        }
        if self._world.size > 1:  # before the real one is made: whoever keeps the last optimizer keeps that
            every = [(name, weights.parameters[number], weights.shapes[number]) for number, name in trained.items()]
            compare(self._world, optimizer_items(options.make_optimizer, options.make_scheduler, every))
        self.update = Update(
            options.make_optimizer,
            options.make_scheduler,
            options.clip_norm,
            named=named,
            counted=counted,
            parts=parts,
            trained=frozenset(trained.values()),
            ranks=tuple(ranks),
            world=self._world,
            state=state_for(parts),
        )
        compare_held(
            self._world,
            [parameter.name for parameter in self.graph.parameters],
            self.update.group_settings(),
            "the optimizer's settings of parameter",
        )
        return self.update

    def tensors(self) -> Iterator[torch.Tensor]:
        """What stays on this rank from step to step."""
        yield from self.weights.parameters
        for handle in self.bound.handles.values():
            yield from handle.module.buffers()
        for executor in (*self._executors.values(), self._last):
            yield from executor.gradient_memory
        optimizer = self.update.optimizer if self.update is not None else None
        for state in optimizer.state.values() if optimizer is not None else ():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    @property
    def _reached(self) -> dict[str, frozenset[int]] | None:
        """By task variant: the parameters that gradients reach."""
        if self.bound.facts.reached is None:
            return None
        return {
            task: frozenset(number for number, one in enumerate(self.graph.parameters) if one.name in names)
            for task, names in self.bound.facts.reached.items()
        }

    def _executor(self, program: Program, *, captures: bool = True) -> Executor:
        return Executor(
            program,
            self.graph,
            self.code,
            self.weights.parameters,
            self.bound.batch_axes,
            self._world,
            reached=self._reached,
            seed=self._options.seed,
            cuda_graphs=self._options.cuda_graphs and captures,
            autocast=self._options.autocast,
            shards=self.shards,
        )


def _program_items(program: Program) -> dict[str, Any]:
    rest = {field.name: getattr(program, field.name) for field in fields(program) if field.name != "plan"}
    return {"the plan": program.plan, "the program": rest}


def trace_and_profile(
    options: Options,
    variants: TaskVariants,
    world: World,
    shown: Progress,
    notify: Callable[[str], None],
) -> ProfiledWorkload:
    """Trace all task variants and profile their layers."""
    with on_compute_stream(world.device):
        return _trace_and_profile(options, variants, world, shown, notify)


def _trace_and_profile(
    options: Options, variants: TaskVariants, world: World, shown: Progress, notify: Callable[[str], None]
) -> ProfiledWorkload:
    # Copies, because what is tried out may write over its input.
    examples = {variant.name: on_device(tree_map(_copied, variant.example), world.device) for variant in variants}
    shown.stage("recording tasks")
    casting = nullcontext() if options.autocast is None else torch.autocast(world.device.type, dtype=options.autocast)
    wanted = workload_request()
    with casting:
        recorded = record_all([variant.definition for variant in variants], examples)
        handles = handles_of(recorded)
        compare(world, task_items(recorded, examples))
        compare_attributes(world, handles)
        if wanted is None:  # modules without weights cannot be moved, and need not be
            for handle in handles.values():
                handle.module.to(world.device)
        traced = trace_on_rank_0(recorded, examples, world, notify)
    if wanted is not None:
        with casting:
            sharing = find_sharing(traced, examples, has_values=False)
        bound = bind(options.name, traced, facts_without_values(traced), sharing)
        _explain(bound, world, notify)
        notify("planned without weights: that modules couple samples is told by shapes and batch normalisation alone")
        _hand_over_workload(bound, options, wanted)
    facts: Facts = world.broadcast_object(probe(traced, examples) if world.rank == 0 else None)
    sharing = Sharing()
    if world.size > 1:
        with casting:
            sharing = world.broadcast_object(
                find_sharing(traced, examples, has_values=True) if world.rank == 0 else None
            )
    bound = bind(options.name, traced, facts, sharing)
    _explain(bound, world, notify)
    graph = metagraph_of(bound.workload)
    code = [code_of(bound, op) for op in graph.metaops]
    request = profile_request()
    if options.profile is not None and request is None:
        return ProfiledWorkload(bound, graph, code, _fitting_profile(options.profile, graph, world), mode_of(bound))
    kinds = world.broadcast_object(kinds_of(bound, graph) if world.rank == 0 else None)
    modules = [handle.module for handle in bound.handles.values()]
    with shown.bar("measuring layers") as tell, unchanged(modules), casting:
        profile = local_profile(
            graph,
            code,
            kinds,
            examples,
            bound.batch_axes,
            world,
            update_bytes_per_s=lambda: measure_update(
                options.make_optimizer, bound.parameters, graph.numerics.update_bytes
            ),
            progress=tell,
            notify=notify,
            graphs=options.cuda_graphs and not options.is_pipelined,  # whose programs live for a step
            request=request,
        )
    if request is not None:
        _hand_over(profile, request, world)
    return ProfiledWorkload(bound, graph, code, profile, mode_of(bound))


def without(known: ProfiledWorkload, tasks: Collection[str], name: str) -> ProfiledWorkload:
    """What is known of some of the tasks, by the names of their variants. Nothing is probed or measured again."""
    bound = known.bound
    kept = [one for task, one in bound.tasks.items() if task not in tasks]
    facts = bound.facts
    facts = replace(
        facts,
        coupled={key: reason for key, reason in facts.coupled.items() if key[0] not in tasks},
        random_layers=frozenset(random_layer for random_layer in facts.random_layers if random_layer[0] not in tasks),
        random_losses=facts.random_losses - frozenset(tasks),
        reached=None
        if facts.reached is None
        else {one: facts.reached[one] for one in facts.reached if one not in tasks},
    )
    left = bind(name, kept, facts, bound.sharing)
    graph = metagraph_of(left.workload)
    code = [code_of(left, op) for op in graph.metaops]
    ended = frozenset(known.graph.modules) - frozenset(graph.modules)
    return ProfiledWorkload(left, graph, code, known.profile.restricted(graph), mode_of(left), ended)


def prepare(
    known: ProfiledWorkload,
    options: Options,
    world: World,
    shown: Progress,
    notify: Callable[[str], None],
    examples: Mapping[str, Any],
) -> RankRuntime:
    """Plans, and gets ready to run the plan; `examples` has the batch on which each variant was measured."""
    if options.memory_bytes is not None:
        cluster = known.profile.cluster.with_memory(int(_PLANNED * options.memory_bytes))
        known = replace(known, profile=replace(known.profile, cluster=cluster))
    degrees = {name: one for name, one in (options.tensor_degrees or {}).items() if name not in known.ended_modules}
    if degrees:
        known = replace(known, profile=_with_degrees(known, degrees))
    if options.is_pipelined:
        return _prepare_pipeline(known, options, world, shown, examples)
    with shown.bar("planning") as tell:
        plan = _plan(known, options, world, tell, notify)
    return RankRuntime(known, plan, options, world)


def _prepare_pipeline(
    known: ProfiledWorkload, options: Options, world: World, shown: Progress, examples: Mapping[str, Any]
) -> RankRuntime:
    """Chunks are placed, on one microbatch of each variant; steps are planned as their batches become known."""
    known = replace(known, profile=on_one_device(known.profile))
    found: tuple[Layout, Plan] | None = None
    with shown.bar("planning"):
        if world.rank == 0:
            layout = pipeline_layout(known.profile, options.pipeline_ranks or world.size)
            found = layout, plan_pipeline(known.profile, layout, Effort(seed=options.seed, evaluations=1))
        layout, plan = world.broadcast_object(found)
    holders = holders_in(known.graph, layout)
    runtime = RankRuntime(known, plan, options, world, holders)
    modules = [handle.module for handle in known.bound.handles.values()]
    microbatches = Microbatches(
        known.profile,
        layout,
        known.code,
        examples,
        ShapeInference(modules, world.device, options.autocast),
        is_first=world.rank == 0,
        seed=options.seed,
    )
    microbatches.holders = holders
    runtime.microbatches = microbatches
    return runtime


def _with_degrees(known: ProfiledWorkload, degrees: Mapping[str, int]) -> Profile:
    try:
        return known.profile.with_degrees(degrees)
    except ProfileError as error:
        handles, sharing = known.bound.handles, known.bound.sharing
        reasons = [f"{name!r}: {text}" for name, text in sharing.reasons.items() if name in degrees]
        reasons += [
            f"{name!r} has no tensor parallel plan; give one with spindle.module({name!r}, tensor_parallel=...)"
            for name in degrees
            if name in handles and not handles[name].tensor_parallel and not builtin_tp_plan(handles[name].module)
        ]
        raise ProfileError(f"Trainer(tensor_degrees=...): {'; '.join([str(error), *reasons])}") from error


def mode_of(bound: Bound) -> list[bool]:
    """What a plan depends on and a user may switch: what is trained, and which modules are in training mode."""
    trains = [parameter.requires_grad for parameter in bound.parameters.values()]
    return trains + [module.training for handle in bound.handles.values() for module in handle.module.modules()]


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _fitting_profile(wanted: Profile | Path | str, graph: MetaGraph, world: World) -> Profile:
    """Rank 0's profile, on all ranks."""
    given: Profile | None = None
    if isinstance(wanted, Profile):
        given = wanted
    elif world.rank == 0:
        given = read_profile(Path(wanted))
    where = "Trainer(profile=...)" if isinstance(wanted, Profile) else str(wanted)
    return fitting(world.broadcast_object(given), graph, world.size, where)


def _hand_over(profile: Profile, request: ProfileRequest, world: World) -> NoReturn:
    """`spindle profile` wants a profile and no training: the script ends here, on all ranks, as by `sys.exit()`.

    Its own `finally` and `with` blocks run. A script that goes on all the same gets here again with its next fit.
    """
    if world.rank == 0:
        write_profile(request.output, profile)
    world.barrier()
    raise SystemExit(0)


def _hand_over_workload(bound: Bound, options: Options, request: WorkloadRequest) -> NoReturn:
    """`spindle plan train.py` wants to know what is trained: the script ends here, too."""
    degrees = tuple((options.tensor_degrees or {}).items())
    write_workload(request.output, replace(bound.workload, tensor_degrees=degrees))
    raise SystemExit(0)


def _explain(bound: Bound, world: World, notify: Callable[[str], None]) -> None:
    """Says which modules run as one layer, or on one device, and why."""
    for handle in bound.handles.values():
        if handle.chain.reason and not handle.whole_batch and any(handle.module.children()):
            notify(f"module {handle.name!r} runs as one layer: {handle.chain.reason}")
    for name, reason in bound.sharing.reasons.items():
        most = bound.sharing.most.get(name, 1)
        if 2 * most <= max(2, world.size):  # else it could not have more anyway
            notify(f"module {name!r} has tensor degrees up to {most}: {reason}")
    calls = [call.handle.name for task in bound.tasks.values() for call in task.recorded.calls]
    for name, handle in bound.handles.items():
        tracking = [
            module
            for module in handle.module.modules()
            if isinstance(module, _BatchNorm) and module.track_running_stats
        ]
        if world.size > 1 and tracking and handle.module.training and calls.count(name) > 1:
            notify(
                f"module {name!r} is called {calls.count(name)} times in a step: the running statistics of its "
                "batch normalisation follow one of these calls alone"
            )
    coupled: dict[tuple[str, str], list[str]] = {}  # tasks, by module and reason
    for (task, call), reason in bound.facts.coupled.items():
        handle = next(one for one in bound.tasks[task].recorded.calls if one.name == call).handle
        if world.size > 1 and not handle.whole_batch:
            coupled.setdefault((handle.name, reason), []).append(task)
    for (name, reason), tasks in coupled.items():
        notify(
            f"module {name!r} runs on one device at a time in {', '.join(dict.fromkeys(tasks))}: {reason} "
            "(spindle.module(..., whole_batch=True) says that this is meant)"
        )


def _plan(
    known: ProfiledWorkload,
    options: Options,
    world: World,
    tell: Callable[[float], None],
    notify: Callable[[str], None],
) -> Plan:
    """Rank 0's plan, on all ranks. Where ranks update parts of parameters, it is tried first whether the optimizer can:
    else it is not sharded, and tensor groups are refused."""
    profile = known.profile
    plan: Plan | None = None
    reason: str | None = None
    if world.rank == 0:
        plan = _wanted_plan(profile, options, options.shard_optimizer, tell)
        if (plan.shard_optimizer or _splits(plan)) and world.size > 1:
            trained = [parameter for parameter in known.bound.parameters.items() if parameter[1].requires_grad]
            reason = why_not_sharded(options.make_optimizer, trained)
        if reason is not None and plan.shard_optimizer:
            plan = _wanted_plan(profile, options, False, tell)
    shared: Plan
    shared, reason = world.broadcast_object((plan, reason))
    if reason is not None and _splits(shared):
        raise TrainingError(
            f"tensor groups split parameters, of which the optimizer cannot update parts: {reason}; use another "
            "optimizer, or tensor degree 1 (Trainer(tensor_degrees={...: 1}))"
        )
    if reason is not None:
        notify(f"the optimizer is not sharded: {reason}")
    if shared.num_devices != world.size:
        raise PlanError(
            f"the plan is for {shared.num_devices} devices, but {world.size} ranks were started; start "
            f"{shared.num_devices} (spindle launch -n {shared.num_devices} ...), or leave the plan out to make one"
        )
    check(shared, profile)
    return shared


def _splits(plan: Plan) -> bool:
    return any(degree > 1 for _, degree in plan.tensor_degrees)


def _wanted_plan(
    profile: Profile, options: Options, shard_optimizer: bool | None, tell: Callable[[float], None]
) -> Plan:
    """The given plan, or a new one."""
    given = options.plan
    if given is None:
        return make_plan(profile, options.planner, Effort(seed=options.seed), tell, shard_optimizer)
    if isinstance(given, Plan):
        plan = given
    elif isinstance(given, str) and "*" in given:
        plan = parse_plan(given, profile)
    else:
        plan = read_plan(Path(given), profile.graph)
    return plan if shard_optimizer is None else replace(plan, shard_optimizer=shard_optimizer)
