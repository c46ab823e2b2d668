"""Trainings by name: what training scripts do with optimizers, losses, batches and tasks that change on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import spindle
from trainings import Fit, Modules, Trained, Training, random_plans, train
from zoo import Tower, Workload

WIDTH = 6
Tasks = Callable[[Mapping[str, Any]], list[Any]]  # of handles
Batch = Callable[[str, int], Any]  # of a task, by number


def train_named(rank: int, num_ranks: int, name: str, plan: str = "plan 1", **options: Any) -> Trained:
    return train(rank, num_ranks, TRAININGS[name](), plan, **options)


def build(
    modules: Callable[[], Modules], tasks: Tasks, batch: Batch, module_options: Mapping[str, Mapping[str, Any]]
) -> Workload:
    built = modules()
    handles = {name: spindle.module(name, module, **module_options.get(name, {})) for name, module in built.items()}
    definitions = tasks(handles)
    names = [task.name for task in definitions]
    return Workload(
        tasks=definitions, batches=lambda number: {name: batch(name, number) for name in names}, handles=handles
    )


def two_towers() -> Modules:
    torch.manual_seed(5)
    return {
        "vision": Tower(4, WIDTH, 3).double(),
        "text": Tower(3, WIDTH, 2).double(),
        "head": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)).double(),
    }


def pairs_and_answers(**options: Any) -> Callable[[Mapping[str, Any]], list[Any]]:
    """A loss over the whole batch, and one over tokens."""

    def tasks(handles: Mapping[str, Any]) -> list[Any]:
        vision, text, head = handles["vision"], handles["text"], handles["head"]

        @spindle.task(batch_size=5, **options)
        def pair(batch):
            scores = F.normalize(vision(batch["x"]), dim=-1) @ F.normalize(text(batch["y"]), dim=-1).T
            return F.cross_entropy(scores * 4, torch.arange(scores.shape[0], device=scores.device))

        @spindle.task(batch_size=7, weight=0.5)
        def answer(batch):
            wrong = ((head(text(batch["y"])) - batch["z"]) ** 2).mean(-1)
            return spindle.mean((wrong * batch["mask"]).sum(), batch["mask"].sum())

        return [pair, answer]

    return tasks


def unshared(handles: Mapping[str, Any]) -> list[Any]:
    """Each module is one task's."""
    vision, head, text = handles["vision"], handles["head"], handles["text"]

    @spindle.task(batch_size=5)
    def pair(batch):
        return vision(batch["x"]).square().mean()

    @spindle.task(batch_size=7)
    def answer(batch):
        return head(text(batch["y"])).square().mean()

    return [pair, answer]


def normal_batch(task: str, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * len(task) + number)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if task == "pair":
        return {"x": normal(5, 4), "y": normal(5, 3)}
    mask = (torch.rand(7, generator=generator) > 0.4).double()
    mask[0] = 1.0
    return {"y": normal(7, 3), "z": normal(7, 2), "mask": mask}


def decayed_sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.05, momentum=0.9, weight_decay=0.1)


def two_tasks(
    *,
    modules: Callable[[], Modules] = two_towers,
    tasks: Tasks | None = None,
    batch: Batch = normal_batch,
    module_options: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Training:
    """The two tasks above, but for what is given."""
    workload = partial(build, modules, tasks or pairs_and_answers(), batch, module_options or {})
    return Training(workload=workload, **{"optimizer": decayed_sgd, "fits": (Fit(steps=4),), **options})


def in_bfloat16(**options: Any) -> Training:
    return two_tasks(
        modules=lambda: {name: module.float() for name, module in two_towers().items()},
        batch=lambda task, number: {key: leaf.float() for key, leaf in normal_batch(task, number).items()},
        options={"autocast": torch.bfloat16},
        **options,
    )


def grouped(named: Any) -> torch.optim.Optimizer:
    """A group for each module that is there, with settings of its own."""
    rates = {"vision": 0.1, "text": 0.02, "head": 0.05}
    groups = [
        {
            "params": [parameter for path, parameter in named if path.startswith(module)],
            "lr": rate,
            "weight_decay": rate,
        }
        for module, rate in rates.items()
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]])


def by_dimensions(named: Any) -> torch.optim.Optimizer:
    """As people do it: matrices decay, the rest does not."""
    groups = [
        {"params": [parameter for _, parameter in named if parameter.ndim >= 2], "weight_decay": 0.4},
        {"params": [parameter for _, parameter in named if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.03, amsgrad=True)


class Scaled(torch.optim.Optimizer):
    """Steps as large as the parameter is: not element by element."""

    def __init__(self, named: Any) -> None:
        super().__init__([parameter for _, parameter in named], {})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        scale = parameter.norm() / (1e-3 + parameter.grad.norm())
                        parameter -= 0.01 * parameter.grad * scale


def tied_towers() -> Modules:
    modules = two_towers()
    modules["head"][0].weight = modules["text"].blocks[0].linear.weight
    return modules


def warming(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        ],
        milestones=[2],
    )


def frozen(*names: str, trains: bool = False) -> Callable[[Modules], None]:
    def freeze(modules: Modules) -> None:
        for name in names:
            modules[name].requires_grad_(trains)

    return freeze


# Batches that differ in what they have.


def with_or_without_images(handles: Mapping[str, Any]) -> list[Any]:
    """Text, and images where a batch has some; the second task always has images."""
    vision, text, head = handles["vision"], handles["text"], handles["head"]

    @spindle.task(batch_size=5)
    def caption(batch):
        hidden = text(batch["y"])
        images = batch.get("x")
        if images is not None and images.shape[0] > 0:
            hidden = hidden + vision(images)
        wrong = ((head(hidden) - batch["z"]) ** 2).mean(-1)
        return spindle.mean(wrong.sum(), wrong.shape[0])

    @spindle.task(batch_size=2, per_sample_mean=True)
    def look(batch):
        return (vision(batch["x"]) ** 2).mean()

    return [caption, look]


def only_caption(handles: Mapping[str, Any]) -> list[Any]:
    return with_or_without_images(handles)[:1]


def mixed_batch(forms: str) -> Callable[[str, int], Any]:
    """Batches as letters say, again and again: (i)mages, (n)one, key (a)bsent, (e)mpty images, no batch at all (-)."""

    def batch(task: str, number: int) -> Any:
        generator = torch.Generator().manual_seed(7000 + 10 * number + len(task))

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        if task == "look":
            return {"x": normal(2, 4)}
        whole = {"x": normal(5, 4), "y": normal(5, 3), "z": normal(5, 2)}
        match forms[number % len(forms)]:
            case "n":
                return {**whole, "x": None}
            case "a":
                return {"y": whole["y"], "z": whole["z"]}
            case "e":
                return {**whole, "x": torch.zeros(0, 4, dtype=torch.float64)}
            case "-":
                return None
            case _:
                return whole

    return batch


class Filled(nn.Module):
    """A language model that puts the images of a batch, however many, where the text wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, y_BC, seen_ND=None, rows_N=None):
        hidden_BD = self.first(y_BC)
        if seen_ND is not None:
            hidden_BD = hidden_BD.index_add(0, rows_N, seen_ND)
        return self.last(torch.tanh(hidden_BD))


def images_in_any_number(handles: Mapping[str, Any]) -> list[Any]:
    vision, language = handles["vision"], handles["language"]

    @spindle.task(batch_size=4)
    def chat(batch):
        if batch["pixels"] is None:
            answer = language(batch["y"])
        else:
            answer = language(batch["y"], vision(batch["pixels"]), batch["rows"])
        return ((answer - batch["z"]) ** 2).mean()

    return [chat]


def chat_batch(task: str, number: int) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(number)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    count = (2, 0, 3, 1, 0, 6)[number % 6]
    return {
        "y": normal(4, 3),
        "z": normal(4, 2),
        "pixels": normal(count, 4) if count else None,
        "rows": torch.randint(4, (count,), generator=generator) if count else None,
    }


def chatting() -> Modules:
    torch.manual_seed(6)
    return {"vision": Tower(4, WIDTH, 3).double(), "language": Filled().double()}


def by_length(handles: Mapping[str, Any]) -> list[Any]:
    text, head = handles["text"], handles["head"]

    @spindle.task(batch_size=5)
    def read(batch):
        hidden = text(batch["y"])
        return head(hidden[:, :2]).square().mean() if hidden.shape[1] > 2 else hidden.square().sum()

    return [read]


def long_or_short(task: str, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {"y": torch.randn(5, (4, 2, 3, 1)[number % 4], 3, generator=generator, dtype=torch.float64)}


def one_sample(handles: Mapping[str, Any]) -> list[Any]:
    """Fewer samples than there are devices."""
    vision, text, head = handles["vision"], handles["text"], handles["head"]

    @spindle.task(batch_size=1)
    def single(batch):
        return (head(vision(batch["x"])) - batch["z"]).square().mean()

    @spindle.task(batch_size=2, per_sample_mean=True)
    def double(batch):
        return (head(text(batch["y"])) - batch["z"]).square().mean()

    return [single, double]


def few_samples(task: str, number: int) -> dict[str, torch.Tensor]:
    whole = mixed_batch("i")("caption", number)
    return {key: leaf[: 1 if task == "single" else 2] for key, leaf in whole.items()}


def mixed(forms: str, steps: int = 5, **options: Any) -> Training:
    given = {"tasks": with_or_without_images, "batch": mixed_batch(forms), "fits": (Fit(steps=steps),)}
    return two_tasks(**{**given, **options})


TRAININGS: dict[str, Callable[[], Training]] = {
    "text only": lambda: mixed("inina"),
    "text first": lambda: mixed("nni", tasks=only_caption),
    "images never again": lambda: mixed("innn", tasks=only_caption),
    "empty images": lambda: mixed("ieei"),
    "no batch": lambda: mixed("i-n-"),
    "no batch first": lambda: mixed("-ni"),
    "mixed, clipped and accumulated": lambda: mixed(
        "inai-n", options={"gradient_accumulation_steps": 2, "max_grad_norm": 0.2}, optimizer=grouped
    ),
    "mixed, captured": lambda: mixed("in", steps=14, captures=True),
    "any number of images": lambda: two_tasks(
        tasks=images_in_any_number, batch=chat_batch, modules=chatting, fits=(Fit(steps=6),)
    ),
    "by length": lambda: two_tasks(tasks=by_length, batch=long_or_short, fits=(Fit(steps=5),)),
    "few samples": lambda: two_tasks(tasks=one_sample, batch=few_samples),
    "groups and schedule": lambda: two_tasks(
        optimizer=grouped, options={"lr_scheduler": warming}, fits=(Fit(steps=3), Fit(steps=3))
    ),
    "by dimensions": lambda: two_tasks(
        optimizer=by_dimensions, options={"lr_scheduler": warming, "max_grad_norm": 0.3}
    ),
    "not by element": lambda: two_tasks(optimizer=Scaled),
    "tied": lambda: two_tasks(modules=tied_towers, optimizer=by_dimensions),
    "carried": lambda: two_tasks(
        optimizer=by_dimensions,
        fits=(
            Fit(steps=2, plan="plan 1 sharded"),
            Fit(steps=2, plan="plan 2"),
            Fit(steps=2, plan="plan 3 sharded"),
            Fit(steps=2, before=frozen("text")),
            Fit(steps=2, plan="plan 4 sharded"),
            Fit(steps=2, before=frozen("text", trains=True)),
            Fit(steps=2, plan="plan 5 sharded"),
        ),
    ),
    "clipped": lambda: two_tasks(options={"max_grad_norm": 0.05}),
    "clipped rarely": lambda: two_tasks(options={"max_grad_norm": 1e3}),
    "accumulated": lambda: two_tasks(
        options={"gradient_accumulation_steps": 3, "max_grad_norm": 0.3}, fits=(Fit(steps=3),)
    ),
    "accumulated, captured": lambda: two_tasks(
        options={"gradient_accumulation_steps": 2}, fits=(Fit(steps=5),), captures=True
    ),
    "weight": lambda: two_tasks(tasks=pairs_and_answers(weight=lambda step: 0.3 + 0.5 * step)),
    "weight, captured": lambda: two_tasks(
        tasks=pairs_and_answers(weight=lambda step: 0.3 + 0.5 * step), fits=(Fit(steps=7),), captures=True
    ),
    "checkpointed": lambda: two_tasks(module_options={"vision": {"activation_checkpointing": True}}),
    "sampled": lambda: two_tasks(options={"sampling_weights": {"pair": 2.0, "answer": 1.0}}, fits=(Fit(steps=8),)),
    "sampled by step": lambda: two_tasks(
        options={"sampling_weights": {"pair": lambda step: float(step < 3), "answer": lambda step: float(step >= 3)}},
        fits=(Fit(steps=6),),
    ),
    "sampled, accumulated": lambda: two_tasks(
        options={"sampling_weights": {"pair": 1.0, "answer": 1.0}, "gradient_accumulation_steps": 2, "seed": 1},
        fits=(Fit(steps=6),),
    ),
    "one task, accumulated": lambda: two_tasks(
        tasks=lambda handles: unshared(handles)[1:], options={"gradient_accumulation_steps": 2}
    ),
    "sampled, clipped and scheduled": lambda: two_tasks(
        modules=lambda: {**two_towers(), "vision": nn.Linear(4, WIDTH).double()},  # one layer: on one rank
        tasks=unshared,
        options={
            "sampling_weights": {"pair": 1.0, "answer": 1.0},
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.3,
            "lr_scheduler": warming,
        },
        fits=(Fit(steps=6),),
    ),
    "sampled, captured": lambda: two_tasks(
        options={"sampling_weights": {"pair": 1.0, "answer": 1.0}}, fits=(Fit(steps=16),), captures=True
    ),
    "frozen": lambda: two_tasks(
        fits=(
            Fit(steps=2),
            Fit(steps=2, before=frozen("text", "head")),
            Fit(steps=2, before=frozen("text", trains=True)),
        )
    ),
    "autocast": lambda: in_bfloat16(),
    "autocast, captured": lambda: in_bfloat16(fits=(Fit(steps=6),), captures=True),
    "autocast, recomputed": lambda: in_bfloat16(module_options={"vision": {"activation_checkpointing": True}}),
}


# Tasks that change during a fit.

CLIP = 3.0
SIZES = {"pair": 5, "answer": 7, "sound": 4, "late": 6}
FIRST_TASKS = ("pair", "answer", "sound")
CHANGES: dict[str, Fit] = {
    "ends": Fit(steps=6, changes={1: ("-pair",)}),
    "ends and comes back": Fit(steps=10, changes={0: ("-answer",), 4: ("+answer",)}),
    "joins": Fit(steps=7, changes={1: ("+late",)}),
    "all of it": Fit(
        steps=15,
        changes={0: ("-sound",), 2: ("+late", "-pair"), 5: ("freeze",), 8: ("thaw", "+pair"), 10: ("replan",)},
    ),
}


def five_modules() -> Modules:
    torch.manual_seed(7)
    return {
        "vision": Tower(4, WIDTH, 3).double(),
        "text": Tower(3, WIDTH, 2).double(),
        "audio": Tower(2, WIDTH, 2).double(),
        "head": nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)).double(),
        "extra": nn.Linear(WIDTH, WIDTH).double(),
    }


def four_tasks(handles: Mapping[str, Any]) -> list[Any]:
    """Three tasks that share modules, and one that comes late and brings one of its own."""
    vision, text, audio, head, extra = (handles[name] for name in ("vision", "text", "audio", "head", "extra"))

    @spindle.task(batch_size=SIZES["pair"])
    def pair(batch):
        scores = F.normalize(vision(batch["x"]), dim=-1) @ F.normalize(text(batch["y"]), dim=-1).T
        return F.cross_entropy(scores * 4, torch.arange(scores.shape[0], device=scores.device))

    @spindle.task(batch_size=SIZES["answer"], weight=0.5)
    def answer(batch):
        return spindle.mean((head(text(batch["y"])) - batch["z"]).square().sum(), torch.ones_like(batch["z"]).sum())

    @spindle.task(batch_size=SIZES["sound"], per_sample_mean=True)
    def sound(batch):
        return (audio(batch["a"]) - 1).square().mean()

    @spindle.task(batch_size=SIZES["late"], per_sample_mean=True)
    def late(batch):
        return (extra(audio(batch["a"])) - text(batch["y"])).square().mean()

    return [pair, answer, sound, late]


def batch_of_four(task: str, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * len(task) + number)
    widths = {"x": 4, "y": 3, "a": 2, "z": 2}
    return {
        key: torch.randn(SIZES[task], width, generator=generator, dtype=torch.float64) for key, width in widths.items()
    }


def slow_adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=0.02, weight_decay=0.1)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def changing(name: str, seed: int, shards: str, optimizer: Any = slow_adamw) -> Training:
    """A training with the changes of a name, under random plans, of which "all", "none" or "some" are sharded."""
    return Training(
        workload=partial(build, five_modules, four_tasks, batch_of_four, {}),
        optimizer=optimizer,
        options={"lr_scheduler": halving, "max_grad_norm": CLIP},
        fits=(CHANGES[name],),
        tasks=FIRST_TASKS,
        freezes="text",
        make_plans=partial(random_plans, seed, shards),
    )
