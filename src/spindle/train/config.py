"""What the user gave the Trainer. Frozen: a change of tasks or plan makes a new `TrainConfig` with `replace`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from spindle.errors import TrainingError, WorkloadError
from spindle.graph import MetaGraph
from spindle.plan import MAX_LANES, Plan
from spindle.planners import PLANNERS
from spindle.profile import Profile
from spindle.train.callbacks import Callback
from spindle.train.optimizer import MakeLRScheduler, MakeOptimizer, UpdateOptions
from spindle.train.sampling import SamplingWeight
from spindle.train.sweep import Trial, check_same_data
from spindle.train.task import TaskDefinition

DEFAULT_PLANNER, PIPELINE, COLOCATE = "wavefront", "pipeline", "colocate"
PIPELINED = (PIPELINE, *(name for name, planner in PLANNERS.items() if planner.takes_parts))

MakePlan = Callable[[Profile], Plan]
MakeProfile = Callable[[MetaGraph, int], Profile]  # from a graph and a number of devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """How `spindle.Trainer` plans its steps. By default, it measures this machine and searches for a plan.

    `plan` is a plan to run: a Plan, its text, or a file. Without it, `planner` makes one; it is the name of a planner
    (`spindle plan --help` lists them) or a function from a Profile to a Plan. It plans from measurements of this
    machine, or from `profile`: a Profile, a file that `spindle profile` wrote, or a function from a graph and a number
    of devices to a Profile.

    `tensor_parallel_degrees` fixes how many devices share each layer of the modules that it names (`{"language": 4}`);
    the planner chooses for all others.

    With `shard_optimizer`, the ranks that hold a parameter each keep the optimizer state of a part of it (ZeRO-1). The
    Trainer's `optimizer` function is then called with these parts, which have as many dimensions as the parameter. With
    None, optimizer state is sharded if that is simulated to be faster or if memory is short; in pipelines, if encoders
    are replicated on several ranks. An optimizer that does not update element by element is never sharded.

    With `planner="pipeline"`, layers are spread over `pipeline_parallel_degree` ranks (by default all; further ranks
    are replicas), and the `gradient_accumulation_steps` batches of a step are the microbatches of one pipeline. They
    may differ from step to step: a background process searches the order of the next step's passes while a step runs.

    With `planner="colocate"`, modules whose calls read only items (`@spindle.task(items=...)`) are replicated on the
    ranks of the pipeline, and each item is encoded on a rank that has time. Several ranks share a long item if its
    module allows it and the step gets shorter; `sequence_parallel_degrees` limits how many, by module (`{"vision": 1}`
    means none).

    Each rank may hold `memory_limit_bytes` of tensors: plans respect the limit, and a step that exceeds it raises an
    error. Without a GPU, tensors are counted operation by operation, which is slow.

    Up to `lanes` modules run on a GPU at the same time, on streams of their own, if that is simulated to be faster than
    one at a time. On CPUs, on virtual devices and in pipelines there is always one lane. With `quotas`, in a job of one
    process, layers are also measured on some of the SMs, and lanes get SMs of their own if that is simulated to be
    faster.
    """

    planner: str | MakePlan = DEFAULT_PLANNER
    plan: Plan | Path | str | None = None
    profile: Profile | Path | str | MakeProfile | None = None
    tensor_parallel_degrees: Mapping[str, int] = field(default_factory=dict)
    sequence_parallel_degrees: Mapping[str, int] = field(default_factory=dict)
    pipeline_parallel_degree: int | None = None
    shard_optimizer: bool | None = None
    memory_limit_bytes: int | None = None
    lanes: int = 4
    quotas: bool = False

    def __post_init__(self) -> None:
        if type(self.lanes) is not int or not 1 <= self.lanes <= MAX_LANES:
            raise TrainingError(
                f"spindle.Planning(lanes={self.lanes!r}): expected how many modules may run on a device at the same "
                f"time, from 1 to {MAX_LANES}"
            )
        if not isinstance(self.quotas, bool):
            raise TrainingError(
                f"spindle.Planning(quotas={self.quotas!r}): expected True or False, whether lanes may have SMs of "
                "their own; how many is part of a plan (# quotas 64 64 in its text)"
            )
        # a copy that the caller cannot change
        object.__setattr__(self, "tensor_parallel_degrees", dict(self.tensor_parallel_degrees))
        object.__setattr__(self, "sequence_parallel_degrees", dict(self.sequence_parallel_degrees))
        # Refuse unknown planners now, not after minutes of profiling.
        if isinstance(self.planner, str) and self.planner not in PLANNERS:
            raise TrainingError(
                f"spindle.Planning(planner={self.planner!r}): no planner has that name; there are {', '.join(PLANNERS)}"
            )
        for name, degree in self.sequence_parallel_degrees.items():
            if not isinstance(degree, int) or degree < 1:
                raise TrainingError(
                    f"spindle.Planning(sequence_parallel_degrees={{{name!r}: {degree!r}}}): must be at least 1"
                )
            if degree > 1 and not (isinstance(self.planner, str) and PLANNERS[self.planner].shares_items):
                names = " or ".join(f'"{name}"' for name, planner in PLANNERS.items() if planner.shares_items)
                raise TrainingError(
                    f"spindle.Planning(sequence_parallel_degrees={{{name!r}: {degree}}}): requires planner={names}"
                )
        if self.planner not in PIPELINED:
            if self.pipeline_parallel_degree is not None:
                raise TrainingError(
                    f"spindle.Planning(pipeline_parallel_degree={self.pipeline_parallel_degree}): requires "
                    f'planner="{PIPELINE}"'
                )
            return
        if any(degree > 1 for degree in self.tensor_parallel_degrees.values()):
            raise TrainingError(
                f'spindle.Planning(planner="{self.planner}", tensor_parallel_degrees=...): stages of a pipeline run on '
                "one device each; leave the degrees out"
            )

    @property
    def takes_parts(self) -> bool:
        """Whether item calls may run in parts."""
        return self.is_pipelined and self.planner != PIPELINE

    @property
    def shares_items(self) -> bool:
        """Whether several ranks may share an item."""
        return self.takes_parts and isinstance(self.planner, str) and PLANNERS[self.planner].shares_items

    @property
    def is_pipelined(self) -> bool:
        """Whether each step has a program of its own, which is searched while the previous step runs."""
        return self.planner in PIPELINED and self.plan is None


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where and how often `spindle.Trainer` saves its state, to resume from when its script is started again.

    All ranks must share `folder`. A checkpoint is saved after every `every` steps (None: only on `Trainer.save`), at
    the end of a fit, and on SIGTERM and SIGUSR1, after which the job ends. The newest `keep` checkpoints are kept
    (None: all).

    Under `spindle launch --restarts`, and in a Ray fleet for jobs on one node, the state is also saved after every
    `memory_every` steps, to memory that outlives the ranks but not their host. Losing a rank then costs at most that
    many steps, if the job is restarted on the same host.
    """

    folder: Path | str
    every: int | None = 500
    keep: int | None = 2
    memory_every: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        for name in ("every", "keep", "memory_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise TrainingError(f"spindle.Checkpoints({name}={value!r}): must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The Trainer's arguments, checked."""

    tasks: tuple[TaskDefinition, ...]
    trials: tuple[Trial, ...] = ()  # in a sweep: the trials of its tasks, and of tasks that have ended
    optimizer: MakeOptimizer | None = None  # None in a sweep, whose trials have optimizers of their own
    lr_scheduler: MakeLRScheduler | None = None
    max_grad_norm: float | None = None
    gradient_accumulation_steps: int = 1
    autocast: torch.dtype | None = None
    sampling_weights: Mapping[str, SamplingWeight] | None = None
    tasks_per_step: int = 1
    planning: Planning = field(default_factory=Planning)
    checkpoints: Checkpoints | None = None
    seed: int = 0
    name: str = "training"
    cuda_graphs: bool = True
    callbacks: tuple[Callback, ...] = ()
    ema: float | None = None
    grad_scaler: torch.amp.GradScaler | None = None
    run_folder: Path | None = None
    profiler_steps: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.tasks:
            raise WorkloadError("spindle.Trainer needs at least one task")
        for task in self.tasks:
            if not isinstance(task, TaskDefinition):
                raise WorkloadError(
                    f"spindle.Trainer([...]): expected tasks, got {task!r}; "
                    "write @spindle.task(batch_size=...) above it"
                )
        names = self.task_names
        for name in names:
            if names.count(name) > 1:
                raise WorkloadError(
                    f"two tasks are called {name!r}; give one of them another name, @spindle.task(name=...)"
                )
        if not isinstance(self.planning, Planning):
            raise TrainingError(
                f"spindle.Trainer(planning={self.planning!r}): expected spindle.Planning(...), for example "
                'spindle.Planning(planner="sequential")'
            )
        if self.is_sweep:
            self._check_sweep()
        elif not callable(self.optimizer):
            got = "" if self.optimizer is None else f", got {type(self.optimizer).__name__}"
            raise TrainingError(
                "spindle.Trainer(...): expected optimizer=, a function of named parameters that returns a torch "
                f"optimizer of them{got}; each rank calls it with the parameters that it holds: "
                "optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3)"
            )
        if not (self.lr_scheduler is None or callable(self.lr_scheduler)):
            raise TrainingError(
                "spindle.Trainer(lr_scheduler=...): expected a function of the optimizer that returns a scheduler, got "
                f"{type(self.lr_scheduler).__name__}; write lr_scheduler=lambda optimizer: ...(optimizer, ...)"
            )
        if self.gradient_accumulation_steps < 1:
            raise TrainingError(
                f"spindle.Trainer(gradient_accumulation_steps={self.gradient_accumulation_steps}): must be at least 1"
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise TrainingError(f"spindle.Trainer(max_grad_norm={self.max_grad_norm}): must be above 0")
        if self.ema is not None and not 0 < self.ema < 1:
            raise TrainingError(f"spindle.Trainer(ema={self.ema}): expected a decay between 0 and 1, such as 0.999")
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise TrainingError(f"spindle.Trainer(autocast={self.autocast}): expected torch.bfloat16 or torch.float16")
        if self.grad_scaler is not None and self.autocast != torch.float16:
            raise TrainingError("spindle.Trainer(grad_scaler=...): requires autocast=torch.float16")
        if not isinstance(self.checkpoints, Checkpoints | None):
            raise TrainingError(
                f"spindle.Trainer(checkpoints={self.checkpoints!r}): expected "
                'spindle.Checkpoints("runs/a", every=500, keep=2)'
            )
        if self.profiler_steps and self.run_folder is None:
            raise TrainingError("spindle.Trainer(profiler_steps=...): requires run_folder=..., where traces go")
        if self.sampling_weights is not None:
            object.__setattr__(self, "sampling_weights", dict(self.sampling_weights))

    def _check_sweep(self) -> None:
        check_same_data(self.trials)
        own = {
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "max_grad_norm": self.max_grad_norm,
        }
        for name, value in own.items():
            if value is not None:
                raise TrainingError(
                    f"spindle.Trainer([spindle.Trial(...), ...], {name}=...): each trial has its own, "
                    f"spindle.Trial(task, {name}=...)"
                )
        if self.sampling_weights is not None:
            raise TrainingError(
                "spindle.Trainer([spindle.Trial(...), ...], sampling_weights=...): a step of a sweep has all trials; "
                "leave it out"
            )
        if self.autocast == torch.float16:
            raise TrainingError(
                "spindle.Trainer([spindle.Trial(...), ...], autocast=torch.float16): trials would share a loss scale, "
                "and an overflow in one would skip the step of all; use torch.bfloat16"
            )
        if self.planning.is_pipelined:
            raise TrainingError(
                f'spindle.Planning(planner="{self.planning.planner}"): a pipeline does not share calls between the '
                "trials of a sweep; leave the planner out"
            )

    @property
    def is_sweep(self) -> bool:
        return bool(self.trials)

    @property
    def updates(self) -> tuple[UpdateOptions, ...]:
        """How parameters are updated: by one optimizer, or by the optimizer of each trial."""
        if not self.is_sweep:
            assert self.optimizer is not None
            options = UpdateOptions(
                optimizer=self.optimizer, lr_scheduler=self.lr_scheduler, max_grad_norm=self.max_grad_norm
            )
            return (options,)
        return tuple(
            UpdateOptions(
                trial=trial.name,
                optimizer=trial.optimizer,
                lr_scheduler=trial.lr_scheduler,
                max_grad_norm=trial.max_grad_norm,
            )
            for trial in self.trials
            if trial.name in self.task_names
        )

    @property
    def loss_scaling(self) -> torch.amp.GradScaler | None:
        """The settings of the loss scale; None if losses are not scaled."""
        if self.autocast != torch.float16:
            return None
        scaler = self.grad_scaler or torch.amp.GradScaler("cuda" if torch.cuda.is_available() else "cpu")
        return scaler if scaler.is_enabled() else None

    @property
    def task_names(self) -> list[str]:
        return [task.name for task in self.tasks]

    def without_given_plan(self, reason: str, notify: Callable[[str], None]) -> TrainConfig:
        """The configuration without a given plan or profile, because the tasks or modules have changed. Functions stay,
        because they can make a new one."""
        planning = self.planning
        if planning.plan is not None:
            notify(f"the given plan no longer applies: {reason}")
            planning = replace(planning, plan=None)
        if planning.profile is not None and not callable(planning.profile):
            notify(f"the given profile no longer applies: {reason}")
            planning = replace(planning, profile=None)
        return replace(self, planning=planning)
