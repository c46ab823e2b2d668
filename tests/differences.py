"""A small training in which rank 1 has something else than rank 0, by name; gives the error that each rank raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

import spindle
from courses import unmeasured
from spindle.errors import TrainingError
from spindle.profile import Profile
from spindle.run.pytrees import TensorMeta
from spindle.run.shape_inference import ShapeInference
from spindle.train import analyze, plan, profiling
from zoo import Tower

WIDTH, ROWS = 6, 4


@dataclass
class Script:
    """What the training script of a rank says."""

    batch_size: int = ROWS
    weight: float = 1.0
    per_sample_mean: bool = False
    width: int = WIDTH
    rate: float = 0.1
    decay: float = 0.0
    scale: float = 1.0
    constant: float = 1.0
    loader_columns: int = WIDTH
    steps: int = 1
    gamma: float = 0.9
    place: Callable[[int], str] = lambda number: "0-1"  # ranks of the op of this number
    prepare: Callable[[nn.Module], Any] = lambda module: None
    options: dict[str, Any] = field(default_factory=dict)


def plan_text(profile: Profile, place: Callable[[int], str]) -> str:
    """A plan that runs every op on ranks that are given for its number, as far as it can be split."""
    counts = [curves[0].num_devices[-1] for curves in profile.curves]
    ops = enumerate(zip(profile.graph.metaops, counts, strict=True))
    return "\n".join(f"{op.name}*{op.num_layers}@{place(number) if count > 1 else '0'}" for number, (op, count) in ops)


def changed(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: change(function(*args, **kwargs))


def patched(module: ModuleType, name: str, change: Callable[[Any], Any]) -> Any:
    """A function that a module calls, whose result is another."""
    return mock.patch.object(module, name, changed(getattr(module, name), change))


def with_other_plan(program: Any) -> Any:
    return replace(program, plan=replace(program.plan, evaluations=77))


def with_other_name(bound: Any) -> Any:
    return replace(bound, workload=replace(bound.workload, name="elsewhere"))


def with_other_shapes(cuts: Any) -> Any:
    (place, form), *rest = cuts.items()
    leaf = form.leaves[0]
    other = replace(form, leaves=(TensorMeta((1, 77), leaf.dtype, leaf.requires_grad), *form.leaves[1:]))
    return {place: other, **dict(rest)}


class NormalisedTwice(nn.LayerNorm):
    def forward(self, x):
        return super().forward(super().forward(x))


def untied(tower: nn.Module) -> None:
    tower.blocks[1].linear.weight = nn.Parameter(tower.blocks[1].linear.weight.detach().clone())


PIPELINE = {"planning": spindle.Planning(planner="pipeline"), "gradient_accumulation_steps": 2}
APART = {"place": lambda number: str(min(number, 1))}  # no parameter is on both ranks
SCRIPTS: dict[str, dict[str, Any]] = {  # what rank 1's script has otherwise
    "max_grad_norm": {"options": {"max_grad_norm": 2.0}},
    "gradient_accumulation_steps": {"options": {"gradient_accumulation_steps": 3}},
    "autocast": {"options": {"autocast": torch.bfloat16}},
    "seed": {"options": {"seed": 5}},
    "cuda_graphs": {"options": {"cuda_graphs": False}},
    "sampling_weights": {"options": {"sampling_weights": {"pull": 0.5}}},
    "planner": {"options": {"planning": spindle.Planning(planner="pipeline")}},
    "batch_size": {"batch_size": 5},
    "weight": {"weight": 0.5},
    "per_sample_mean": {"per_sample_mean": True},
    "shape": {"width": 7},
    "dtype": {"prepare": lambda tower: tower.norm.float()},
    "requires_grad": {"prepare": lambda tower: tower.norm.requires_grad_(False)},
    "tied": {"prepare": untied},
    "buffer": {"prepare": lambda tower: tower.register_buffer("table", torch.ones(3))},
    "class": {"prepare": lambda tower: setattr(tower, "norm", NormalisedTwice(WIDTH).double())},
    "mode": {"prepare": lambda tower: tower.norm.eval()},
    "graph": {"scale": 2.0},
    "constant": {"constant": 3.0},
    "batch": {"loader_columns": 9},
    "steps": {"steps": 3},
    "lr": {"rate": 0.2},
    "weight_decay": {"decay": 0.01},
    "attribute": {"prepare": lambda tower: setattr(tower.blocks[1].linear, "scale", 2.0)},
    "recorded apart": {},
    "apart": {**APART},
    "lr apart": {"rate": 0.2, **APART},
    "weight_decay apart": {"decay": 0.01, **APART},
    "scheduler": {"gamma": 0.8, **APART},
}
PATCHES: dict[str, Callable[[], Any]] = {  # what Spindle makes of it otherwise on rank 1
    "Python": lambda: mock.patch("spindle.train.agreement.sys", SimpleNamespace(version_info=(3, 99))),
    "torch": lambda: mock.patch.object(torch, "__version__", "2.99.0"),
    "Spindle": lambda: mock.patch.object(spindle, "__version__", "9.9"),
    "workload": lambda: patched(analyze, "bind", with_other_name),
    "profile": lambda: patched(profiling, "local_profile", lambda profile: replace(profile, overlap=3.0)),
    "plan": lambda: patched(plan, "lower", with_other_plan),
    "program": lambda: patched(plan, "lower", lambda program: replace(program, owning_ranks=((0, (0, 1)),))),
    "shapes": lambda: mock.patch.object(ShapeInference, "of", changed_method(ShapeInference.of)),
}


def changed_method(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: with_other_shapes(method(self, *args))


@contextmanager
def difference(name: str, rank: int) -> Iterator[Script]:
    common: dict[str, Any] = {"options": PIPELINE} if name == "shapes" else {}
    common |= APART if SCRIPTS.get(name, {}).keys() & APART.keys() else {}
    script = Script(**common) if rank == 0 or name in PATCHES else Script(**SCRIPTS[name])
    if rank == 1 and name in PATCHES:
        with PATCHES[name]():
            yield script
    else:
        yield script


def local_function(rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that cannot be pickled, so every rank records the module that is given it."""
    return lambda x: x


class Calls(nn.Module):
    """Gives its blocks a function, and does more between them on rank 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Given() for _ in range(2))
        self.rank, self.function = rank, local_function(rank)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.function) * (1 + self.rank)
        return x


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x, function):
        return self.inner(function(x))


def mark(tower: nn.Module, rank: int) -> None:
    """Attributes that may be others on other ranks."""
    tower.rank, tower.place, tower.is_main = rank, f"cuda:{rank}", rank == 0
    tower._num_calls = 3 * rank
    tower.origin = f"/home/{'abc'[rank]}/weights"
    if rank == 0:
        tower.longest = 7


def differing(rank: int, num_ranks: int, name: str) -> str:
    """The error of a training whose ranks differ in what the name says; nothing if there is none."""
    torch.manual_seed(0)
    with difference(name, rank) as script:
        tower = Tower(WIDTH, script.width, 2).double()
        tower.blocks[1].linear.weight = tower.blocks[0].linear.weight
        tower.blocks[1].linear.scale = 1.0
        mark(tower, rank)
        script.prepare(tower)
        handle = spindle.module("tower", Calls(rank).double() if name == "recorded apart" else tower)
        constant = torch.full((1,), script.constant, dtype=torch.float64)

        @spindle.task(
            batch_size=script.batch_size, weight=script.weight, per_sample_mean=script.per_sample_mean, name="pull"
        )
        def pull(batch):
            y = handle(batch["x"][:, :WIDTH]) * constant
            return (y * 2.0 if script.scale == 2.0 else y + 1.0).square().mean()

        def optimizer(named):
            decayed = [parameter for path, parameter in named if "norm" not in path]
            rest = [parameter for path, parameter in named if "norm" in path]
            groups = [{"params": decayed, "weight_decay": script.decay}, {"params": rest, "weight_decay": 0.0}]
            return torch.optim.AdamW([group for group in groups if group["params"]], lr=script.rate)

        batch = {"x": torch.randn(script.batch_size, script.loader_columns, dtype=torch.float64)}
        try:
            trainer = spindle.Trainer(
                [pull],
                optimizer=optimizer,
                lr_scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: script.gamma**step),
                **script.options,
            )
            profile = trainer.prepare({"pull": [batch]}, progress=False)
            if name != "shapes":
                trainer.replan(plan=plan_text(profile, script.place))
            trainer.fit({"pull": [batch]}, steps=script.steps, progress=False)
        except TrainingError as error:
            return str(error)
    return ""


def changing_alone(rank: int, num_ranks: int, when: str) -> str:
    """The error of a training in which rank 1 changes something that rank 0 does not, at the time that is named."""
    torch.manual_seed(0)
    tower = Tower(WIDTH, WIDTH, 2)
    handle = spindle.module("tower", tower)
    tasks = [
        spindle.task(batch_size=ROWS, name=name)(lambda batch: handle(batch).square().mean())
        for name in ("pull", "push")
    ]
    loaders = {name: [torch.ones(ROWS, WIDTH)] for name in ("pull", "push")}

    def on_step(step: int, losses: Any) -> None:
        if rank == 1 and when == "in a fit" and step == 2:  # before a step that is not timed, which starts at once
            trainer.remove_task("push")
        if rank == 1 and when == "in the last step" and step == 5:
            trainer.replan()
        if when == "which task" and step == 1:
            trainer.remove_task(["pull", "push"][rank])
        if when == "frozen" and step == 1:
            tower.norm.requires_grad_(rank == 0)
            trainer.replan()

    with unmeasured():
        trainer = spindle.Trainer(tasks, optimizer=lambda named: torch.optim.SGD([one for _, one in named], lr=0.1))
        try:
            profile = trainer.prepare(loaders, progress=False)
            # On rank 0 alone, so that it does not wait for rank 1 in the midst of a step.
            trainer.replan(plan="\n".join(f"{op.name}*{op.num_layers}@0" for op in profile.graph.metaops))
            trainer.fit(loaders, steps=6, progress=False, on_step=on_step)
            if rank == 1 and when == "between fits":
                trainer.remove_task("push")
            trainer.fit(loaders, steps=1, progress=False)
        except TrainingError as error:
            return str(error)
    return ""
