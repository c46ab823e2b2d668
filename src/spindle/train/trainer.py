"""The Trainer: plans once, then runs the plan step after step.

Every rank runs the same script. Rank 0 tries the tasks out, measures their layers and plans; all ranks lower the same
plan. In each step ranks exchange one small header, a step ahead: the samples and shapes of each task's next batch, and
their parts of the losses of a step before.
"""

from __future__ import annotations

import gc
import inspect
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from spindle.errors import PlanError, TrainingError, WorkloadError
from spindle.graph import MetaGraph, metagraph_of
from spindle.measure import local_profile, measure_update
from spindle.plan import Plan, check, parse_plan, read_plan
from spindle.planners import Effort, make_plan
from spindle.profile import Profile, ProfileRequest, fitting, profile_request, read_profile, write_profile
from spindle.program import Program, lower, verify
from spindle.run import Executor, OpCode, Watch, World, join_world
from spindle.run.recorded import timeline_of
from spindle.run.weights import Weights
from spindle.simulate import simulate
from spindle.train.bind import Bound, bind, code_of, trace_all
from spindle.train.feed import Batch, Feed, draw, random_state
from spindle.train.header import Table, agreed, header, losses_in
from spindle.train.kinds import kinds_of
from spindle.train.probe import Facts, probe
from spindle.train.progress import Progress
from spindle.train.record import RecordedTask, handles_of, record, record_all
from spindle.train.result import FitResult
from spindle.train.task import TaskDefinition
from spindle.train.trace import describe_batch, unchanged

NamedParameters = Iterable[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
_SAMPLED_STEPS = 9  # whose timelines are kept
# How many steps lie between a step and the header that carries its losses. Reading them waits for a GPU, which must not
# stand still for it.
_LOSSES_BEHIND = {"cpu": 1, "cuda": 2}


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found out about the tasks on this machine."""

    bound: Bound
    graph: MetaGraph
    code: list[OpCode]
    profile: Profile
    mode: list[bool]


@dataclass(slots=True)
class _Prepared:
    """The plan, and what this rank has of it."""

    bound: Bound
    graph: MetaGraph
    code: list[OpCode]
    profile: Profile
    plan: Plan
    program: Program
    weights: Weights
    executors: dict[tuple[int, ...], Executor]
    optimizer: torch.optim.Optimizer | None


class Trainer:
    """Trains several tasks in one step on all processes there are.

    `optimizer` is called on each rank with the names and parameters that it holds, and returns a torch optimizer of
    them. `plan` is a plan to run (a Plan, or the file of one); without it `planner` makes one, from measurements of
    this machine, or from a `profile` (a Profile, or the file that `spindle profile` wrote). `seed` is for random layers
    and for the planner. On a GPU, steps whose batches have the same shapes are captured in `cuda_graphs` and replayed:
    the same numbers, without what Python code in a module does beside.
    """

    def __init__(
        self,
        tasks: Sequence[TaskDefinition],
        *,
        optimizer: MakeOptimizer,
        planner: str = "wavefront",
        plan: Plan | Path | str | None = None,
        profile: Profile | Path | str | None = None,
        seed: int = 0,
        name: str = "training",
        cuda_graphs: bool = True,
    ) -> None:
        if not tasks:
            raise WorkloadError("spindle.Trainer needs at least one task")
        for one in tasks:
            if not isinstance(one, TaskDefinition):
                raise WorkloadError(
                    f"spindle.Trainer([...]): expected tasks, got {one!r}; write @spindle.task(batch_size=...) above it"
                )
        names = [one.name for one in tasks]
        for task_name in names:
            if names.count(task_name) > 1:
                raise WorkloadError(
                    f"two tasks are called {task_name!r}; give one another name, @spindle.task(name=...)"
                )
        self.tasks, self.seed, self.name, self.cuda_graphs = tuple(tasks), seed, name, cuda_graphs
        self._make_optimizer, self._planner = optimizer, planner
        self._given_plan, self._given_profile = plan, profile
        self.world: World = join_world()
        self.notices: list[str] = []
        self._known: _Known | None = None
        self._prepared: _Prepared | None = None
        self._steps_done = 0
        self._same_way: set[tuple[str, int]] = set()

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def plan(self) -> Plan | None:
        """The plan that is trained with, once there is one."""
        return self._prepared.plan if self._prepared else None

    @property
    def profile(self) -> Profile | None:
        """What was measured, once it was."""
        return self._known.profile if self._known else None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights and buffers of all modules, `module.path` by name, the same on every rank.

        They load into plain PyTorch: `nn.ModuleDict({"vision": vision, ...}).load_state_dict(...)`.
        """
        handles = self._known.bound.handles if self._known else handles_of(record_all(self.tasks))
        return {
            f"{name}.{path}": value
            for name, handle in handles.items()
            for path, value in handle.module.state_dict().items()
        }

    def fit(
        self,
        loaders: Mapping[str, Iterable[Any]],
        *,
        steps: int,
        drop_last: bool = True,
        progress: bool = True,
        on_step: Callable[[int, dict[str, float]], None] | None = None,
    ) -> FitResult:
        """Trains for so many steps. Afterwards the user's own modules hold the trained weights.

        `loaders` has an iterable of batches for each task. `on_step(step, losses)` is called on every rank as losses
        become known, a step or two behind.
        """
        if steps < 1:
            raise TrainingError(f"fit(steps={steps}): must be at least 1")
        shown = Progress(enabled=progress and self.world.rank == 0)
        try:
            feeds = self._feeds(loaders, drop_last, shown)
            if self._known is None:
                self._known = self._find_out(feeds, shown)
            elif self._known.mode != _mode(self._known.bound):
                raise TrainingError(
                    "modules were frozen, thawed or switched between train() and eval() since the first fit, which "
                    "planned for them as they were; make a new spindle.Trainer"
                )
            if self._prepared is None:
                self._prepared = self._prepare(self._known, shown)
            return self._train(self._prepared, feeds, steps, shown, on_step)
        finally:
            shown.close()

    def prepare(self, loaders: Mapping[str, Iterable[Any]], *, progress: bool = True) -> Profile:
        """Records the tasks and measures their layers, as the first `fit` would, without training.

        The first batch of each loader is looked at.
        """
        shown = Progress(enabled=progress and self.world.rank == 0)
        try:
            if self._known is None:
                self._known = self._find_out(self._feeds(loaders, True, shown), shown)
            return self._known.profile
        finally:
            shown.close()

    def replan(self, *, planner: str | None = None, plan: Plan | Path | str | None = None) -> None:
        """The next `fit` goes on with another plan: a given one, or another planner's. The optimizer starts anew."""
        if planner is not None:
            self._planner = planner
        self._given_plan = plan
        if self._prepared is not None:
            for parameter in self._prepared.weights.parameters:
                parameter.grad = None
            self._prepared = None
            gc.collect()  # what the plan held on its device
            self.world.forget_groups()

    def _notify(self, shown: Progress, text: str) -> None:
        self.notices.append(text)
        shown.note(text)

    def _feeds(self, loaders: Mapping[str, Iterable[Any]], drop_last: bool, shown: Progress) -> dict[str, Feed]:
        names = [one.name for one in self.tasks]
        missing, unknown = (
            [name for name in names if name not in loaders],
            [name for name in loaders if name not in names],
        )
        if missing or unknown:
            raise TrainingError(
                "fit needs one loader for each task: "
                + "; ".join(
                    [f"none for {name!r}" for name in missing]
                    + [f"{name!r} is no task (tasks: {', '.join(names)})" for name in unknown]
                )
            )
        state = self.world.broadcast_object(random_state())
        draw()
        several = self.world.size > 1
        return {
            one.name: Feed(
                one, loaders[one.name], drop_last, state, lambda text: self._notify(shown, text), compared=several
            )
            for one in self.tasks
        }

    # Once, before the first step.

    def _find_out(self, feeds: Mapping[str, Feed], shown: Progress) -> _Known:
        """Records the tasks and measures their layers."""
        world = self.world
        # Copies, because what is tried out may write over its input.
        examples = {name: self._on_device(tree_map(_copied, feed.peek().nest)) for name, feed in feeds.items()}
        shown.stage("recording tasks")
        traced = trace_all(self.tasks, examples, world.device)
        facts: Facts = world.broadcast_object(probe(traced, examples) if world.rank == 0 else None)
        bound = bind(self.name, traced, facts)
        self._explain(bound, shown)
        graph = metagraph_of(bound.workload)
        code = [code_of(bound, op) for op in graph.metaops]
        request = profile_request()
        if self._given_profile is not None and request is None:
            return _Known(bound, graph, code, self._fitting_profile(graph), _mode(bound))
        with shown.bar("measuring layers") as tell, unchanged(handle.module for handle in bound.handles.values()):
            profile = local_profile(
                graph,
                code,
                kinds_of(bound, graph),
                examples,
                bound.batch_axes,
                world,
                update_bytes_per_s=lambda: measure_update(
                    self._make_optimizer, bound.parameters, graph.numerics.update_bytes
                ),
                progress=tell,
                notify=lambda text: self._notify(shown, text),
                graphs=self.cuda_graphs,
                request=request,
            )
        if request is not None:
            self._hand_over(profile, request)
        return _Known(bound, graph, code, profile, _mode(bound))

    def _fitting_profile(self, graph: MetaGraph) -> Profile:
        """Rank 0's profile, on all ranks."""
        given = self._given_profile
        if isinstance(given, Path | str):
            given = read_profile(Path(given)) if self.world.rank == 0 else None
        where = "Trainer(profile=...)" if isinstance(self._given_profile, Profile) else str(self._given_profile)
        return fitting(self.world.broadcast_object(given), graph, self.world.size, where)

    def _hand_over(self, profile: Profile, request: ProfileRequest) -> NoReturn:
        """`spindle profile` wants a profile and no training: the script ends here, on all ranks, as by `sys.exit()`.

        Its own `finally` and `with` blocks run. A script that goes on all the same gets here again with its next fit.
        """
        if self.world.rank == 0:
            write_profile(request.output, profile)
        self.world.barrier()
        raise SystemExit(0)

    def _prepare(self, known: _Known, shown: Progress) -> _Prepared:
        """Plans, and gets ready to run the plan."""
        with shown.bar("planning") as tell:
            plan = self._plan(known.profile, tell)
        program = lower(plan, known.profile)
        verify(program, known.profile)
        parameters = [known.bound.parameters[one.name] for one in known.graph.parameters]
        prepared = _Prepared(
            bound=known.bound,
            graph=known.graph,
            code=known.code,
            profile=known.profile,
            plan=plan,
            program=program,
            weights=Weights(program, known.graph, parameters, self.world),
            executors={},
            optimizer=None,
        )
        sizes = tuple(one.batch_size for one in self.tasks)
        prepared.executors[sizes] = self._executor(prepared, program)
        return prepared

    def _executor(self, prepared: _Prepared, program: Program, *, captures: bool = True) -> Executor:
        graph, facts = prepared.graph, prepared.bound.facts
        reached = None
        if facts.reached is not None:
            reached = frozenset(number for number, one in enumerate(graph.parameters) if one.name in facts.reached)
        return Executor(
            program,
            graph,
            prepared.code,
            prepared.weights.parameters,
            prepared.bound.batch_axes,
            self.world,
            reached=reached,
            seed=self.seed,
            cuda_graphs=self.cuda_graphs and captures,
        )

    def _explain(self, bound: Bound, shown: Progress) -> None:
        """Says which modules run as one layer, or on one device, and why."""
        for handle in bound.handles.values():
            if handle.chain.reason and not handle.whole_batch and any(handle.module.children()):
                self._notify(shown, f"module {handle.name!r} runs as one layer: {handle.chain.reason}")
        calls = [call.handle.name for task in bound.tasks.values() for call in task.recorded.calls]
        for name, handle in bound.handles.items():
            tracking = [
                one for one in handle.module.modules() if isinstance(one, _BatchNorm) and one.track_running_stats
            ]
            if self.world.size > 1 and tracking and handle.module.training and calls.count(name) > 1:
                self._notify(
                    shown,
                    f"module {name!r} is called {calls.count(name)} times in a step: the running statistics of its "
                    "batch normalisation follow one of these calls alone",
                )
        if self.world.size > 1:
            for (task, call), reason in bound.facts.coupled.items():
                if not next(one for one in bound.tasks[task].recorded.calls if one.name == call).handle.whole_batch:
                    self._notify(shown, f"task {task!r}: {call} runs on one device at a time: {reason}")

    def _plan(self, profile: Profile, tell: Callable[[float], None]) -> Plan:
        """Rank 0's plan, on all ranks."""
        plan: Plan | None = None
        if self.world.rank == 0:
            given = self._given_plan
            if given is None:
                plan = make_plan(profile, self._planner, Effort(seed=self.seed), tell)
            elif isinstance(given, Plan):
                plan = given
            elif isinstance(given, str) and "*" in given:
                plan = parse_plan(given, profile)
            else:
                plan = read_plan(Path(given), profile.graph)
        shared: Plan = self.world.broadcast_object(plan)
        if shared.num_devices != self.world.size:
            raise PlanError(
                f"the plan is for {shared.num_devices} devices, but {self.world.size} ranks were started; start "
                f"{shared.num_devices} (spindle launch -n {shared.num_devices} ...), or leave the plan out to make one"
            )
        check(shared, profile)
        return shared

    def _on_device(self, nest: Any) -> Any:
        device = self.world.device
        return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, nest)

    # Every step.

    def _train(
        self,
        prepared: _Prepared,
        feeds: Mapping[str, Feed],
        steps: int,
        shown: Progress,
        on_step: Callable[[int, dict[str, float]], None] | None,
    ) -> FitResult:
        names = [one.name for one in self.tasks]
        world = self.world
        prepared.weights.send_out()
        self._share_buffers(prepared.bound)
        if prepared.optimizer is None:
            prepared.optimizer = self._optimizer(prepared)
        main = prepared.executors[tuple(one.batch_size for one in self.tasks)]
        wanted = main.reads
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(world.device)
        history: list[dict[str, float]] = []
        kept: list[Watch] = []
        sampled = _sampled(steps)
        step_s: list[float] = []
        first = self._steps_done

        def read() -> dict[str, Batch]:
            batches = {name: feed.next() for name, feed in feeds.items() if name in wanted}
            for name, batch in batches.items():
                self._check_way(prepared.bound.tasks[name].recorded, batch)
            return batches

        def note(table: Table) -> None:
            losses = losses_in(table, names)
            step = first + len(history)
            history.append(losses)
            for name, loss in losses.items():
                if not math.isfinite(loss):
                    raise TrainingError(
                        f"task {name!r}: its loss is {loss} in step {step}"
                        + (f" (step {step - 1}: {history[-2][name]:.6g})" if len(history) > 1 else "")
                        + "; look at its learning rate, its data and what it divides by"
                    )
            shown.losses(step, losses)
            if on_step is not None:
                on_step(step, losses)

        batches = read()
        gathering = world.start_all_gather(header(names, batches, None))
        unsent: deque[torch.Tensor] = deque()  # losses of the last steps, which a GPU may still be at
        carries_losses = False  # the header that is on its way
        shown.training(steps, names)
        for number in range(steps):
            begin = time.perf_counter()
            table = [one.tolist() for one in gathering.wait()]
            if carries_losses:
                note(table)
            rows, signatures = agreed(table, names, first + number)
            current = batches
            if number + 1 < steps:
                batches = read()
                carries_losses = len(unsent) >= _LOSSES_BEHIND[world.device.type]
                losses = unsent.popleft() if carries_losses else None
                gathering = world.start_all_gather(header(names, batches, losses))
            executor = self._executor_for(prepared, rows)
            is_timed = number in sampled and executor is main
            if is_timed:
                world.meet()  # a timeline needs a common start, as the simulator has
            parts, watch = executor.step(
                first + number,
                {name: self._on_device(batch.nest) for name, batch in current.items()},
                signatures,
                prepared.optimizer,
                check_losses=first + number == 0,
                timed=is_timed,
            )
            unsent.append(parts)
            if is_timed:
                kept.append(watch)
            step_s.append(time.perf_counter() - begin)
            shown.step(number + 1, step_s[-1])
        # The losses of the last steps have no header to travel with.
        for losses in unsent:
            note([one.tolist() for one in world.start_all_gather(header(names, {}, losses)).wait()])
        self._steps_done += steps
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        for name, reason in main.without_graph.items():
            text = f"{name} runs without a CUDA graph: {reason}"
            if text not in self.notices:
                self._notify(shown, text)
        peak = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else 0
        prepared.weights.bring_home()
        self._buffers_home(prepared)
        self._share_buffers(prepared.bound)
        return self._result(prepared, history, kept, step_s, peak)

    def _check_way(self, recorded: RecordedTask, batch: Batch) -> None:
        """A task that branches on shapes must take the way on which it was recorded."""
        name = recorded.definition.name
        if not recorded.decisions or (name, batch.signature) in self._same_way:
            return
        again = record(replace(recorded.definition, batch_size=batch.num_rows), batch.nest)
        if again.decisions != recorded.decisions:
            raise TrainingError(
                f"task {name!r}: it branches on shapes, and this batch ({describe_batch(batch.nest)}) takes another "
                "way than the first did; it is recorded once: move the branch into a module, or pad batches alike"
            )
        self._same_way.add((name, batch.signature))

    def _executor_for(self, prepared: _Prepared, rows: tuple[int, ...]) -> Executor:
        """The executor for these numbers of rows; another than planned comes with a loader's short last batch."""
        if rows not in prepared.executors:
            names = [one.name for one in self.tasks]
            program = lower(prepared.plan, prepared.profile, dict(zip(names, rows, strict=True)))
            verify(program, prepared.profile)
            prepared.executors[rows] = self._executor(prepared, program, captures=False)
        return prepared.executors[rows]

    def _optimizer(self, prepared: _Prepared) -> torch.optim.Optimizer | None:
        """The user's optimizer over what this rank holds and trains; none where that is nothing."""
        graph, held = prepared.graph, prepared.executors[tuple(one.batch_size for one in self.tasks)].held
        named = [
            (graph.parameters[number].name, prepared.weights.parameters[number])
            for number in sorted(held)
            if graph.parameters[number].trainable
        ]
        if not named:
            return None
        optimizer = self._make_optimizer(list(named))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TrainingError(f"Trainer(optimizer=...) must return a torch optimizer, got {type(optimizer).__name__}")
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if isinstance(optimizer, torch.optim.LBFGS) or (
            closure is not None and closure.default is inspect.Parameter.empty
        ):
            raise TrainingError(
                f"{type(optimizer).__name__} updates all parameters together, but each rank holds only some; use an "
                "optimizer that updates each parameter by itself (SGD, Adam, AdamW, ...)"
            )
        mine = {id(parameter) for _, parameter in named}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in mine:
                    raise TrainingError(
                        "Trainer(optimizer=...) made an optimizer of parameters that were not given to it; use the "
                        "names and parameters of its argument: each rank holds only some"
                    )
        return optimizer

    def _share_buffers(self, bound: Bound) -> None:
        if self.world.size == 1:
            return
        buffers = [buffer for handle in bound.handles.values() for buffer in handle.module.buffers()]
        values = self.world.broadcast_object([buffer.cpu() for buffer in buffers] if self.world.rank == 0 else None)
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)

    def _buffers_home(self, prepared: _Prepared) -> None:
        """Rank 0 takes each layer's buffers (running statistics) from the first rank that ran it in its last call."""
        if self.world.size == 1:
            return
        handles = prepared.bound.handles
        owner: dict[int, int] = {}
        slots = sorted(zip(prepared.program.slots, prepared.plan.slots, strict=True), key=lambda pair: pair[0].op)
        for shape, slot in slots:
            op = prepared.graph.metaops[shape.op]
            if op.module is not None and op.module in handles:
                layers = handles[op.module].chain.layers[op.first_layer + slot.first : op.first_layer + slot.last]
                owner.update((id(buffer), slot.devices[0]) for layer in layers for buffer in layer.buffers)
        buffers = [buffer for handle in handles.values() for buffer in handle.module.buffers()]
        mine = [
            (number, buffer.cpu())
            for number, buffer in enumerate(buffers)
            if owner.get(id(buffer), 0) == self.world.rank and self.world.rank
        ]
        for given in self.world.gather_objects(mine):
            for number, value in given:
                buffers[number].copy_(value)

    def _result(
        self,
        prepared: _Prepared,
        history: list[dict[str, float]],
        kept: list[Watch],
        step_s: list[float],
        peak_bytes: int,
    ) -> FitResult:
        """Everything that can be said about the run; timelines on rank 0 alone."""
        spans = self.world.gather_objects([watch.spans() for watch in kept])
        measured = None
        if self.world.rank == 0 and kept:
            timelines = [timeline_of(prepared.program, step) for step in zip(*spans, strict=True)]
            measured = sorted(timelines, key=lambda one: one.makespan_ns)[len(timelines) // 2]
        return FitResult(
            rank=self.world.rank,
            losses=tuple(history),
            step_s=tuple(step_s),
            plan=prepared.plan,
            program=prepared.program,
            graph=prepared.graph,
            predicted=simulate(prepared.program, prepared.profile),
            measured=measured,
            peak_bytes=tuple(self.world.gather_objects(peak_bytes)) if peak_bytes else (),
            notices=tuple(self.notices),
            crowded=min(prepared.profile.host_rates, default=1.0) < 1,
        )


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _mode(bound: Bound) -> list[bool]:
    """What a plan depends on and a user may switch: what is trained, and which modules are in training mode."""
    trains = [parameter.requires_grad for parameter in bound.parameters.values()]
    return trains + [one.training for handle in bound.handles.values() for one in handle.module.modules()]


def _sampled(steps: int) -> frozenset[int]:
    """Steps whose timelines are kept: a few, spread over the second half of the run; the first ones warm up."""
    count = min(_SAMPLED_STEPS, max(1, steps // 8))
    return frozenset(steps - 1 - (steps // 2) * number // count for number in range(count))
