"""One harness for whole trainings: a Trainer on some ranks, and the same steps in a plain PyTorch loop, compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import internals
import spindle
from backends import rank_device, to_device
from comparison import Comparison, assert_close
from programs import loss_value
from random_plans import plan_text_named, random_plan_text
from spindle.graph import MetaGraph
from spindle.plan import Plan, parse_plan
from spindle.profile import Profile
from spindle.run import held_parameters
from spindle.train import FitResult
from spindle.train.record import record_all
from spindle.train.task import Mean
from workloads import handles_in, workload_named
from zoo import Workload

Modules = Mapping[str, nn.Module]
LEARNING_RATE = 0.05
FIRST_OF_JOINED = 100  # the number of the first batch of a task that joins during a fit


def sgd(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=LEARNING_RATE, momentum=0.9)


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=LEARNING_RATE, weight_decay=0.3)


def keep_modules(modules: Modules) -> None:
    """Changes nothing before a fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One call of `Trainer.fit`, after what a user does to the modules and a replan, if any.

    `changes` happen once the losses of a step are known: `-name` a task ends, `+name` one joins, `replan`, and `freeze`
    and `thaw` of the module that `Training.freezes` names.
    """

    steps: int
    before: Callable[[Modules], None] = keep_modules
    plan: str | None = None  # `plan 3 sharded`
    degrees: Mapping[str, int] | None = None  # tensor degrees
    changes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training, by Spindle and by plain PyTorch alike."""

    workload: Callable[..., Workload]
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    options: Mapping[str, Any] = field(default_factory=dict)  # of the Trainer, but for its planning
    fits: tuple[Fit, ...] = (Fit(steps=3),)
    measures: bool = False  # the profile; else it is guessed
    captures: bool = False
    own_weights: bool = False  # ranks start with weights of their own: `workload` takes a seed
    short_rows: int | None = None  # of the second of two batches that loaders have
    checks_memory: bool = False  # which parameters a rank holds while it trains
    tasks: tuple[str, ...] | None = None  # that the first step has, where not all
    freezes: str = ""
    sharing: str = ""  # a name under which the process remembers which tensor degrees the modules can have
    plan_text: Callable[..., str] = plan_text_named
    make_plans: Callable[[], Callable[[Profile], Plan]] | None = None  # for the first step and every change


def training_of(name: str, **options: Any) -> Training:
    """A training of a named workload."""
    workload = partial(workload_named, name, options.pop("dtype", torch.float64))
    return Training(workload=workload, checks_memory=True, **options)


def random_plans(seed: int, shards: str) -> Callable[[Profile], Plan]:
    """Random plans one after the other, of which "all", "none" or "some" shard the optimizer."""
    choose = random.Random(seed)

    def make(profile: Profile) -> Plan:
        plan = parse_plan(random_plan_text(profile, choose.randrange(1000)), profile)
        return replace(plan, shard_optimizer={"all": True, "none": False}.get(shards, choose.random() < 0.5))

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one rank reports of a training."""

    comparison: Comparison
    moved: float  # the largest distance of a parameter from where it began
    tasks: tuple[frozenset[str], ...]  # of each step
    notices: tuple[str, ...]
    captured: int  # slots, in CUDA graphs
    recomputed: tuple[str, ...]
    sharded: bool
    pipelined: bool  # the last step had an order of passes
    trained_elements: list[int]  # of each optimizer that was made
    all_elements: int
    state_elements: int  # of the optimizer on this rank, but for single numbers
    num_profiled: int  # how often tasks were traced and profiled, on rank 0
    num_changes: int


def assert_trained(answers: Sequence[Trained], limit: float = 1e-9) -> None:
    """All ranks end with the losses and parameters of one process, having trained something."""
    assert_close([answer.comparison for answer in answers], limit)
    for answer in answers:
        assert answer.moved > 1e-3
        assert answer.tasks == answers[0].tasks


def train(rank: int, num_ranks: int, training: Training, plan: str = "wavefront", **planning: Any) -> Trained:
    """Trains with a Trainer and then plainly. `plan` is a planner's name, a random plan (`plan 3 recomputed`), or
    `pipeline 2`: over so many ranks. Further options are those of `Planning`."""
    planner, _, degree = plan.partition(" ")
    num_profiled = 0

    def guess(graph: MetaGraph, num_devices: int) -> Profile:
        nonlocal num_profiled
        num_profiled += 1
        return internals.guessed_profile(graph, num_devices)

    if planner == "pipeline":
        planning |= {"planner": planner, "pipeline_parallel_degree": int(degree) if degree else None}
    elif training.make_plans is not None:
        planning["planner"] = training.make_plans()
    elif planner != "plan":
        planning["planner"] = planner
    if not training.measures:
        planning["profile"] = guess
    training = replace(training, options={**training.options, "planning": spindle.Planning(**planning)})
    with ExitStack() as stack:
        stack.enter_context(internals.one_step_behind())
        if training.captures:
            stack.enter_context(internals.capturing())
        if training.sharing:
            stack.enter_context(internals.sharing_found_once(training.sharing))
        trained = _train(training, rank, num_ranks, plan if planner == "plan" else "")
    return replace(trained, num_profiled=num_profiled)


def _train(training: Training, rank: int, num_ranks: int, first_plan: str) -> Trained:
    workload = training.workload(**({"seed": 100 + rank} if training.own_weights and rank else {}))
    modules = modules_of(workload)
    begin = {path: parameter.detach().clone() for path, parameter in parameters_of(modules).items()}
    dims = {
        path: parameter.dim() for path, parameter in nn.ModuleDict(modules).named_parameters(remove_duplicate=False)
    }
    memory = HeldParameters(modules)
    optimizers: list[torch.optim.Optimizer] = []
    trained_elements: list[int] = []

    def make_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer = training.optimizer(named)
        if not any(parameter.is_meta for _, parameter in named):  # else ranks compare what it gives for all of them
            assert all(parameter.dim() == dims.get(path, parameter.dim()) for path, parameter in named)
            trained_elements.append(sum(parameter.numel() for _, parameter in named))
            optimizers.append(optimizer)
            memory.watch(named, optimizer)
        return optimizer

    tasks = {task.name: task for task in workload.tasks}
    first_tasks = training.tasks or tuple(tasks)
    trainer = spindle.Trainer([tasks[name] for name in first_tasks], optimizer=make_optimizer, **training.options)
    positions = dict.fromkeys(tasks, 0)
    history: list[dict[str, float]] = []
    before_steps: dict[int, Callable[[Modules], None]] = {}
    num_changes = 0
    for number, fit in enumerate(training.fits):
        fit.before(modules)
        before_steps[len(history)] = fit.before
        loaders = {name: loader_of(training, workload, name, positions[name]) for name in first_tasks}
        wanted = fit.plan or (first_plan if number == 0 else "")
        if wanted or fit.degrees is not None:
            profile = trainer.prepare(loaders, progress=False)
            text = training.plan_text(profile, wanted, fit.degrees) if wanted else None
            trainer.replan(plan=text, **({} if fit.degrees is None else {"tensor_parallel_degrees": fit.degrees}))
        result = trainer.fit(
            loaders,
            steps=fit.steps,
            drop_last=training.short_rows is None,
            progress=False,
            on_step=_changer(training, fit, trainer, workload, modules, before_steps) if fit.changes else None,
        )
        for losses in result.losses:
            for name in losses if "sampling_weights" in training.options else tasks:
                positions[name] += training.options.get("gradient_accumulation_steps", 1)
        history += result.losses
        num_changes += len(result.changes_s)
        if training.checks_memory:
            memory.check(result, rank, num_ranks)
    comparison = _compare(training, workload, modules, trainer, history, before_steps)
    ended = parameters_of(modules)
    return Trained(
        comparison=comparison,
        moved=max(float((ended[path].detach() - tensor).norm()) for path, tensor in begin.items()),
        tasks=tuple(frozenset(losses) for losses in history),
        notices=tuple(trainer.notices),
        captured=result.num_captured_slots,
        recomputed=trainer.plan.recompute,
        sharded=trainer.plan.shard_optimizer,
        pipelined=bool(result.plan.passes),
        trained_elements=trained_elements,
        all_elements=sum(parameter.numel() for parameter in ended.values()),
        state_elements=_state_elements(optimizers[-1:]),
        num_profiled=0,
        num_changes=num_changes,
    )


def _compare(
    training: Training,
    workload: Workload,
    modules: Modules,
    trainer: spindle.Trainer,
    history: Sequence[Mapping[str, float]],
    before_steps: Mapping[int, Callable[[Modules], None]],
) -> Comparison:
    """With a plain loop on the same device: Hugging Face models compute positions in float32, in which devices
    differ."""
    reference = training.workload()
    reference_modules = modules_of(reference)
    nn.ModuleDict(reference_modules).to(rank_device())
    expected = train_plainly(
        reference.tasks,
        training.optimizer(list(nn.ModuleDict(reference_modules).named_parameters())),
        batches_of_steps(training, reference, history),
        scheduler=training.options.get("lr_scheduler"),
        max_grad_norm=training.options.get("max_grad_norm"),
        autocast=training.options.get("autocast"),
        before_step=lambda step: before_steps.get(step, keep_modules)(reference_modules),
    )
    is_adam = training.optimizer is adamw and next(iter(parameters_of(modules).values())).dtype == torch.float64
    comparison = Comparison(adam_learning_rate=LEARNING_RATE if is_adam else None)
    comparison.add_losses(history, expected)
    # The user's own modules, and fresh ones that load what was trained; tasks may leave some modules out.
    comparison.add_tensors("parameter", parameters_of(modules), parameters_of(reference_modules))
    state, fresh = trainer.state_dict(), modules_of(training.workload())
    loaded, expected_modules = (
        {name: module for name, module in some.items() if any(key.startswith(f"{name}.") for key in state)}
        for some in (fresh, reference_modules)
    )
    nn.ModuleDict(loaded).load_state_dict(state)
    comparison.add_tensors("parameter", parameters_of(loaded), parameters_of(expected_modules), " of the state dict")
    if any(True for module in modules.values() for _ in module.buffers()):
        once = called_once(workload)
        ours, theirs = (
            dict(nn.ModuleDict({name: some[name] for name in once}).named_buffers())
            for some in (modules, reference_modules)
        )
        comparison.add_tensors("buffer", ours, theirs)
    return comparison


def train_plainly(
    tasks: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[Mapping[str, Any]]],
    *,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    max_grad_norm: float | None = None,
    autocast: torch.dtype | None = None,
    before_step: Callable[[int], None] = lambda step: None,
) -> list[dict[str, float]]:
    """What a person would write for one process. A step has micro-steps, each with a batch (or None) for some tasks.
    Gives the losses of each step by task; the weights stay in the modules."""
    schedule = None if scheduler is None else scheduler(optimizer)
    device = rank_device()
    history: list[dict[str, float]] = []
    for step, microbatches in enumerate(steps):
        before_step(step)
        optimizer.zero_grad()
        losses: dict[str, list[float]] = {}
        tokens = {
            task.name: [task.tokens(batch) for batches in microbatches if (batch := batches.get(task.name))]
            for task in tasks
            if task.tokens is not None
        }
        for batches in microbatches:
            total: Any = 0.0
            for task in tasks:
                batch = to_device(batches.get(task.name), device)
                if batch is None:
                    continue
                with torch.autocast(device.type, dtype=autocast) if autocast else nullcontext():
                    result = task(batch)
                    loss = loss_value(result) if not isinstance(result, Mean) or result.count else 0 * result.total
                weight = task.weight(step) if callable(task.weight) else task.weight
                share, scale = 1 / len(microbatches), 1.0
                if isinstance(result, Mean) and task.tokens is not None:
                    share = task.tokens(batch) / sum(tokens[task.name])
                    scale = share * len(tokens[task.name])
                losses.setdefault(task.name, []).append(loss.item() * scale)
                total = total + weight * loss * share
            if isinstance(total, torch.Tensor):
                total.backward()
        if max_grad_norm is not None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        history.append({name: sum(values) / len(values) for name, values in losses.items()})
    return history


# Batches.


@dataclass(frozen=True)
class Batches:
    """The batches of a task from some number on, without end."""

    workload: Workload
    task: str
    first: int

    def __iter__(self) -> Iterator[Any]:
        number = self.first
        while True:
            yield self.workload.batches(number)[self.task]
            number += 1


def loader_of(training: Training, workload: Workload, task: str, first: int) -> Any:
    if training.short_rows is None:
        return Batches(workload, task, first)
    return [short_batch(training, workload, task, number) for number in range(2)]


def short_batch(training: Training, workload: Workload, task: str, number: int) -> Any:
    """Of two batches that alternate, the second is short."""
    batch = workload.batches(number % 2)[task]
    if training.short_rows is None or number % 2 == 0:
        return batch
    (size,) = {definition.batch_size for definition in workload.tasks if definition.name == task}
    rows = min(size, training.short_rows)
    return {
        key: leaf[:rows] if isinstance(leaf, torch.Tensor) and len(leaf) == size else leaf
        for key, leaf in batch.items()
    }


def batches_of_steps(
    training: Training, workload: Workload, history: Sequence[Mapping[str, float]]
) -> Iterator[list[dict[str, Any]]]:
    """The batches of each step's micro-steps by task, as a Trainer that reported these losses has read them."""
    names = [task.name for task in workload.tasks]
    varies = "sampling_weights" in training.options or any(fit.changes for fit in training.fits)
    positions = dict.fromkeys(names, 0)
    for step, losses in enumerate(history):
        microbatches = []
        for name in losses:
            if step and name not in history[step - 1] and any(fit.changes for fit in training.fits):
                positions[name] = FIRST_OF_JOINED
        for _ in range(training.options.get("gradient_accumulation_steps", 1)):
            batches = {}
            for name in losses if varies else names:
                if training.short_rows is None:
                    batches[name] = workload.batches(positions[name])[name]
                else:
                    batches[name] = short_batch(training, workload, name, positions[name])
                positions[name] += 1
            microbatches.append(batches)
        yield microbatches


def _changer(
    training: Training,
    fit: Fit,
    trainer: spindle.Trainer,
    workload: Workload,
    modules: Modules,
    before_steps: dict[int, Callable[[Modules], None]],
) -> Callable[[int, Any], None]:
    """What asks for the changes of a fit; notes in `before_steps` what they do to modules."""
    tasks = {task.name: task for task in workload.tasks}

    def on_step(step: int, losses: Any) -> None:
        for change in fit.changes.get(step, ()):
            if change[0] == "-":
                trainer.remove_task(change[1:])
            elif change[0] == "+":
                trainer.add_task(tasks[change[1:]], Batches(workload, change[1:], FIRST_OF_JOINED))
            else:
                if change != "replan":
                    switch = partial(set_trainable, training.freezes, change == "thaw")
                    switch(modules)
                    before_steps[step + 1 + internals.losses_behind(trainer)] = switch
                trainer.replan()

    return on_step


def set_trainable(path: str, trains: bool, modules: Modules) -> None:
    nn.ModuleDict(modules).get_submodule(path).requires_grad_(trains)


# Modules and what they hold.


def modules_of(workload: Workload) -> dict[str, nn.Module]:
    return {name: handle.module for name, handle in handles_in(workload).items()}


def parameters_of(modules: Modules) -> dict[str, nn.Parameter]:
    """Every parameter once, on the CPU."""
    return dict(nn.ModuleDict(modules).cpu().named_parameters())


def called_once(workload: Workload) -> list[str]:
    """Modules that a step calls once: where they are called more often, the order in which buffers change differs."""
    calls = [call.handle.name for task in record_all(workload.tasks, workload.batches(0)) for call in task.calls]
    return [name for name in dict.fromkeys(calls) if calls.count(name) == 1]


class HeldParameters:
    """Watches which parameters have memory on this rank whenever its optimizer steps."""

    def __init__(self, modules: Modules) -> None:
        self._parameters = dict(nn.ModuleDict(modules).named_parameters())
        self._shapes = {path: parameter.shape for path, parameter in self._parameters.items()}
        self._seen: list[set[str]] = []

    def watch(self, named: Sequence[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> None:
        """Of an optimizer over the modules' own memory; others are made to measure with, or to be tried."""
        own = {parameter.untyped_storage().data_ptr() for parameter in self._parameters.values()}
        if all(parameter.untyped_storage().data_ptr() in own for _, parameter in named):
            optimizer.register_step_post_hook(lambda *_: self._seen.append(self._present()))

    def _present(self) -> set[str]:
        return {path for path, parameter in self._parameters.items() if parameter.shape == self._shapes[path]}

    def check(self, result: FitResult, rank: int, num_ranks: int) -> None:
        """A rank has the parameters of its slots and those that no slot uses; after a fit it has all of them."""
        names = [parameter.name for parameter in result.graph.parameters]
        held = [
            {names[number] for number in held_parameters(result.program, result.graph, each)}
            for each in range(num_ranks)
        ]
        expected = held[rank] | (set(names) - set().union(*held))
        assert all(seen == expected for seen in self._seen)
        if not result.plan.shard_optimizer:  # else all elements that it holds may be others' to update
            assert bool(self._seen) == any(result.graph.parameters[names.index(path)].trainable for path in held[rank])
        assert self._present() == set(names)


def _state_elements(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    tensors = [value for state in states for value in state.values()]
    return sum(tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.dim())
