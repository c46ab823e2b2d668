"""Whole trainings, by a Trainer on some ranks and by a plain PyTorch loop in one process, to be compared."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler, default_collate

import spindle
from backends import graphs_on_any_device, on_cpu, on_gpu, rank_device, to_device
from spindle.cluster import cluster_named
from spindle.graph import MetaGraph
from spindle.profile import Profile, roofline_profile
from spindle.run import Executor
from spindle.train import profiling
from spindle.train import steps as steps_module
from spindle.train.task import Mean
from zoo import Tower

Modules = dict[str, nn.Module]
WIDTH = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Some steps, what a user does to the modules before them, and a plan to go on with, sharded or not."""

    steps: int
    before: Callable[[Modules], None] = lambda modules: None
    plan: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A training. `batch(task, number)` is the task's batch of that number; `on` says which tasks are in a step, where
    not all are."""

    tasks: Callable[[Mapping[str, Any]], list[Any]]  # of handles
    batch: Callable[[str, int], Any]
    modules: Callable[[], Modules]
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    module_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fits: tuple[Fit, ...] = (Fit(steps=4),)
    captures: bool = False

    def make_optimizer(self, named: Any) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer(named)
        return torch.optim.SGD([one for _, one in named], lr=0.05, momentum=0.9, weight_decay=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """How far a rank ended from the plain loop, and what else is asked about."""

    loss: float
    parameter: float
    worst: str
    tasks: tuple[frozenset[str], ...]  # of each step
    notices: tuple[str, ...]
    moved: float  # how far parameters went at all
    captured: int
    recomputed: tuple[str, ...]
    sharded: bool
    kept: int  # elements of the optimizer's state
    pipelined: bool  # its last step had an order of passes of its own


def follow(rank: int, num_ranks: int, name: str, plan: str, shards: bool | None = None) -> Followed:
    """Trains a course with a Trainer, under some legal plan ("plan 3", the planner's own, or "pipeline", over so many
    ranks: "pipeline 2"), and then plainly."""
    course = COURSES[name]()
    planner, _, pipeline_ranks = plan.partition(" ")
    planning = spindle.Planning(shard_optimizer=shards)
    if planner == "pipeline":
        degree = int(pipeline_ranks) if pipeline_ranks else None
        planning = replace(planning, planner=planner, pipeline_parallel_degree=degree)
    course = replace(course, options={**course.options, "planning": planning})
    with unmeasured(), capturing() if course.captures else nullcontext():
        return _follow(course, num_ranks, plan)


def unmeasured() -> Any:
    """Inside, plans are made from guessed times: quick, and the same each time."""

    def guess(graph: Any, code: Any, kinds: Any, examples: Any, axes: Any, world: Any, **named: Any) -> Any:
        return guessed_profile(graph, world.size)

    return mock.patch.object(profiling, "local_profile", guess)


def guessed_profile(graph: MetaGraph, num_devices: int) -> Profile:
    return replace(roofline_profile(graph, cluster_named(f"cpux{num_devices}")), gradients_stay=False)


@contextmanager
def capturing() -> Iterator[None]:
    """Inside, a Trainer captures slots, with or without a GPU."""
    if on_gpu():
        yield
        return
    with graphs_on_any_device(), mock.patch.object(steps_module, "Executor", Capturing):
        yield


class Capturing(Executor):
    """Captures slots though there is no GPU."""

    def __init__(self, *args: Any, cuda_graphs: bool, **named: Any) -> None:
        super().__init__(*args, cuda_graphs=cuda_graphs, **named)
        self._captures = cuda_graphs


def _follow(course: Course, num_ranks: int, plan: str) -> Followed:
    from worlds import random_plan_text

    modules = course.modules()
    begin = {path: one.detach().clone() for path, one in nn.ModuleDict(modules).named_parameters()}
    handles = {name: spindle.module(name, one, **course.module_options.get(name, {})) for name, one in modules.items()}
    tasks = course.tasks(handles)
    optimizers: list[torch.optim.Optimizer] = []

    def make_optimizer(named: Any) -> torch.optim.Optimizer:
        optimizers.append(course.make_optimizer(named))
        return optimizers[-1]

    trainer = spindle.Trainer(tasks, optimizer=make_optimizer, **course.options)
    history: list[dict[str, float]] = []
    asked = dict.fromkeys([one.name for one in tasks], 0)
    captured = 0
    for number, fit in enumerate(course.fits):
        fit.before(modules)

        def loader(task: str) -> Any:
            """Goes on where the last fit ended; reads ahead."""
            place = asked[task]
            while True:
                yield course.batch(task, place)
                place += 1

        loaders = {one.name: loader(one.name) for one in tasks}
        if number == 0 and plan.startswith("plan "):
            first = {one.name: [course.batch(one.name, 0)] for one in tasks}
            trainer.prepare(first, progress=False)
            trainer.replan(plan=random_plan_text(trainer.profile, plan))
        if fit.plan is not None:
            first_line = "# optimizer sharded\n" if fit.plan.endswith(" sharded") else ""
            trainer.replan(plan=first_line + random_plan_text(trainer.profile, fit.plan))
        result = trainer.fit(loaders, steps=fit.steps, progress=False)
        captured = result.num_captured_slots
        history += result.losses
        turns = course.options.get("gradient_accumulation_steps", 1)
        for losses in result.losses:
            for task in asked if "sampling_weights" not in course.options else losses:
                asked[task] += turns
    # In bfloat16 the CPU rounds otherwise than a GPU.
    device = rank_device() if "autocast" in course.options else torch.device("cpu")
    plain = course.modules()
    nn.ModuleDict(plain).to(device)
    expected = train_plainly(course, plain, [set(losses) for losses in history], device)
    loss = max(
        abs(ours[task] - value) / max(abs(value), 1e-3)
        for ours, theirs in zip(history, expected, strict=True)
        for task, value in theirs.items()
    )
    mine, theirs = (dict(nn.ModuleDict(on_cpu(one)).named_parameters()) for one in (modules, plain))
    errors = {
        path: float((mine[path] - one).detach().norm() / max(float(one.detach().norm()), 1e-3))
        for path, one in theirs.items()
    }
    worst = max(errors, key=lambda path: errors[path])
    return Followed(
        loss=loss,
        parameter=errors[worst],
        worst=worst,
        tasks=tuple(frozenset(losses) for losses in history),
        notices=tuple(trainer.notices),
        moved=max(float((theirs[path].detach() - one).norm()) for path, one in begin.items()),
        captured=captured,
        recomputed=trainer.plan.recompute,
        sharded=trainer.plan.shard_optimizer,
        kept=_num_kept(optimizers[-1]) if optimizers else 0,
        pipelined=bool(result.plan.passes),
    )


def _num_kept(optimizer: torch.optim.Optimizer) -> int:
    """Elements of the optimizer's state on this rank, but for single numbers."""
    states = optimizer.state.values()
    return sum(
        value.numel() for state in states for value in state.values() if isinstance(value, torch.Tensor) and value.dim()
    )


def value_of(result: Any) -> torch.Tensor:
    return result.total / result.count if isinstance(result, Mean) else result


def train_plainly(
    course: Course, modules: Modules, tasks_of_steps: list[set[str]], device: torch.device
) -> list[dict[str, float]]:
    """What a person would write for one process."""
    tasks = course.tasks(modules)
    names = [one.name for one in tasks]
    options = course.options
    turns = options.get("gradient_accumulation_steps", 1)
    optimizer = course.make_optimizer(list(nn.ModuleDict(modules).named_parameters()))
    scheduler = options["lr_scheduler"](optimizer) if "lr_scheduler" in options else None
    asked = dict.fromkeys(names, 0)
    history: list[dict[str, float]] = []
    for fit in course.fits:
        fit.before(modules)
        for _ in range(fit.steps):
            step = len(history)
            on = tasks_of_steps[step] if "sampling_weights" in options else set(names)
            optimizer.zero_grad()
            losses: dict[str, list[float]] = {}
            for _ in range(turns):
                total: Any = 0.0
                for one in tasks:
                    if one.name not in on:
                        continue
                    batch = to_device(course.batch(one.name, asked[one.name]), device)
                    asked[one.name] += 1
                    if batch is None:
                        continue
                    dtype = options.get("autocast")
                    with torch.autocast(device.type, dtype=dtype) if dtype else nullcontext():
                        loss = value_of(one(batch))
                    losses.setdefault(one.name, []).append(loss.item())
                    weight = one.weight(step) if callable(one.weight) else one.weight
                    total = total + weight * loss / turns
                if isinstance(total, torch.Tensor):
                    total.backward()
            if "max_grad_norm" in options:
                torch.nn.utils.clip_grad_norm_(nn.ModuleDict(modules).parameters(), options["max_grad_norm"])
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            history.append({name: sum(found) / len(found) for name, found in losses.items()})
    return history


# Courses.


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
            return spindle.mean((wrong * batch["m"]).sum(), batch["m"].sum())

        return [pair, answer]

    return tasks


def normal_batch(task: str, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * len(task) + number)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if task == "pair":
        return {"x": normal(5, 4), "y": normal(5, 3)}
    kept = (torch.rand(7, generator=generator) > 0.4).double()
    kept[0] = 1.0
    return {"y": normal(7, 3), "z": normal(7, 2), "m": kept}


def course(**named: Any) -> Course:
    """The two tasks above, with whatever is tried out."""
    given: dict[str, Any] = {"tasks": pairs_and_answers(), "batch": normal_batch, "modules": two_towers, **named}
    return Course(**given)


def in_bfloat16(**named: Any) -> Course:
    return course(
        modules=lambda: {name: one.float() for name, one in two_towers().items()},
        batch=lambda task, number: {key: leaf.float() for key, leaf in normal_batch(task, number).items()},
        options={"autocast": torch.bfloat16},
        **named,
    )


def grouped(named: Any) -> torch.optim.Optimizer:
    """A group for each module that is there, with settings of its own."""
    rates = {"vision": 0.1, "text": 0.02, "head": 0.05}
    groups = [
        {"params": [one for path, one in named if path.startswith(module)], "lr": rate, "weight_decay": rate}
        for module, rate in rates.items()
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]])


def by_dimensions(named: Any) -> torch.optim.Optimizer:
    """As people do it: matrices decay, the rest does not."""
    groups = [
        {"params": [one for _, one in named if one.ndim >= 2], "weight_decay": 0.4},
        {"params": [one for _, one in named if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.03, amsgrad=True)


class Scaled(torch.optim.Optimizer):
    """Steps as large as the parameter is: not element by element."""

    def __init__(self, named: Any) -> None:
        super().__init__([one for _, one in named], {})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for one in group["params"]:
                    if one.grad is not None:
                        one -= 0.01 * one.grad * one.norm() / (1e-3 + one.grad.norm())


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


def mixed(forms: str, steps: int = 5, **named: Any) -> Course:
    return course(
        **{"tasks": with_or_without_images, "batch": mixed_batch(forms), "fits": (Fit(steps=steps),), **named}
    )


COURSES: dict[str, Callable[[], Course]] = {
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
    "any number of images": lambda: course(
        tasks=images_in_any_number, batch=chat_batch, modules=chatting, fits=(Fit(steps=6),)
    ),
    "by length": lambda: course(tasks=by_length, batch=long_or_short, fits=(Fit(steps=5),)),
    "few samples": lambda: course(tasks=one_sample, batch=few_samples),
    "groups and schedule": lambda: course(
        optimizer=grouped, options={"lr_scheduler": warming}, fits=(Fit(steps=3), Fit(steps=3))
    ),
    "by dimensions": lambda: course(optimizer=by_dimensions, options={"lr_scheduler": warming, "max_grad_norm": 0.3}),
    "not by element": lambda: course(optimizer=Scaled),
    "tied": lambda: course(modules=tied_towers, optimizer=by_dimensions),
    "carried": lambda: course(
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
    "clipped": lambda: course(options={"max_grad_norm": 0.05}),
    "clipped rarely": lambda: course(options={"max_grad_norm": 1e3}),
    "accumulated": lambda: course(
        options={"gradient_accumulation_steps": 3, "max_grad_norm": 0.3}, fits=(Fit(steps=3),)
    ),
    "accumulated, captured": lambda: course(
        options={"gradient_accumulation_steps": 2}, fits=(Fit(steps=5),), captures=True
    ),
    "weight": lambda: course(tasks=pairs_and_answers(weight=lambda step: 0.3 + 0.5 * step)),
    "weight, captured": lambda: course(
        tasks=pairs_and_answers(weight=lambda step: 0.3 + 0.5 * step), fits=(Fit(steps=7),), captures=True
    ),
    "checkpointed": lambda: course(module_options={"vision": {"activation_checkpointing": True}}),
    "sampled": lambda: course(options={"sampling_weights": {"pair": 2.0, "answer": 1.0}}, fits=(Fit(steps=8),)),
    "sampled by step": lambda: course(
        options={"sampling_weights": {"pair": lambda step: float(step < 3), "answer": lambda step: float(step >= 3)}},
        fits=(Fit(steps=6),),
    ),
    "sampled, accumulated": lambda: course(
        options={"sampling_weights": {"pair": 1.0, "answer": 1.0}, "gradient_accumulation_steps": 2, "seed": 1},
        fits=(Fit(steps=6),),
    ),
    "sampled, captured": lambda: course(
        options={"sampling_weights": {"pair": 1.0, "answer": 1.0}}, fits=(Fit(steps=16),), captures=True
    ),
    "frozen": lambda: course(
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


# Data.


class Notes(torch.utils.data.Dataset):
    """Samples with two entries and a goal, which notes who asks for what."""

    def __init__(self, length: int = 20, is_random: bool = False) -> None:
        self.length, self.is_random = length, is_random
        self.asked: list[tuple[int, tuple[str, ...]]] = []
        self.threads: list[str] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return self.entries(number, ("x", "y", "z"))

    @staticmethod
    def batch_of(numbers: Iterable[int]) -> Any:
        return default_collate([Notes()[number] for number in numbers])

    def entries(self, number: int, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        self.asked.append((number, names))
        self.threads.append(threading.current_thread().name)
        generator = torch.Generator().manual_seed(number)
        widths = {"x": 4, "y": 3, "z": WIDTH}
        whole = {key: torch.randn(width, generator=generator, dtype=torch.float64) for key, width in widths.items()}
        if self.is_random:
            whole["x"] = whole["x"] + torch.rand(4, dtype=torch.float64) + random.random() + np.random.random()
        return {name: whole[name] for name in names}


class NotesByField(Notes):
    def get_fields(self, number: int, names: list[str]) -> dict[str, torch.Tensor]:
        return self.entries(number, tuple(names))


class Streamed(torch.utils.data.IterableDataset):
    """The samples one after another."""

    def __iter__(self) -> Any:
        notes = Notes()
        yield from (notes[number] for number in range(notes.length))


def loader_named(kind: str, dataset: Notes) -> Any:
    """What the user gives, over a dataset that is asked."""
    match kind:
        case "dataset":
            return dataset
        case "loader":
            return DataLoader(dataset, batch_size=6, shuffle=True)
        case "weighted":
            weights = torch.arange(1.0, len(dataset) + 1)
            return DataLoader(dataset, batch_size=6, sampler=WeightedRandomSampler(weights.tolist(), 18))
        case "collated":
            return DataLoader(dataset, batch_size=6, shuffle=True, collate_fn=lambda rows: default_collate(rows))
        case "streamed":
            return DataLoader(Streamed(), batch_size=6)
        case "stateful":
            from torchdata.stateful_dataloader import StatefulDataLoader

            return StatefulDataLoader(dataset, batch_size=6, shuffle=True)
        case _:
            raise AssertionError(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBy:
    """What a rank asked its dataset for in the last steps, and what it trained on."""

    losses: tuple[float, ...]
    asked: list[tuple[int, tuple[str, ...]]]
    threads: set[str]


def towers_apart(profile: Any) -> str:
    """Vision on the first rank, everything else on the second."""
    graph = profile.graph
    return "\n".join(
        f"{graph.metaops[place].name}*{graph.metaops[place].num_layers}"
        f"@{0 if graph.metaops[place].module == 'vision' else 1}^{number}000"
        for number, place in enumerate(graph.order)
    )


def rows_apart(profile: Any) -> str:
    """Everything on all ranks, each with its rows."""
    graph = profile.graph
    ranks = ",".join(map(str, range(profile.cluster.num_devices)))
    return "\n".join(
        f"{graph.metaops[place].name}*{graph.metaops[place].num_layers}@{ranks}^{number}000"
        for number, place in enumerate(graph.order)
    )


def read_samples(
    rank: int,
    num_ranks: int,
    kind: str,
    plan: str,
    fits: tuple[int, ...],
    by_field: bool = False,
    is_random: bool = False,
) -> ReadBy:
    """Trains two towers on a dataset."""
    with unmeasured():
        return _read_samples(kind, plan, fits, by_field, is_random)


def _read_samples(kind: str, plan: str, fits: tuple[int, ...], by_field: bool, is_random: bool) -> ReadBy:
    from worlds import random_plan_text

    modules = two_towers()
    vision, text = (spindle.module(name, modules[name]) for name in ("vision", "text"))

    @spindle.task(batch_size=6, per_sample_mean=True)
    def match(batch):
        return (vision(batch["x"]) * text(batch["y"]) - batch["z"]).square().mean()

    dataset = (NotesByField if by_field else Notes)(is_random=is_random)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    trainer = spindle.Trainer([match], optimizer=lambda named: torch.optim.SGD([one for _, one in named], lr=0.01))
    plans = {"towers apart": towers_apart, "rows apart": rows_apart}
    trainer.prepare({"match": [Notes.batch_of(range(6))]}, progress=False)
    make = plans.get(plan, lambda profile: random_plan_text(profile, plan))
    trainer.replan(plan=make(trainer.profile))
    losses: list[float] = []
    for steps in fits:
        marks: list[int] = []
        result = trainer.fit(
            {"match": loader_named(kind, dataset)},
            steps=steps,
            progress=False,
            on_step=lambda step, losses, marks=marks: marks.append(len(dataset.asked)),
        )
        losses += [one["match"] for one in result.losses]
    return ReadBy(
        losses=tuple(losses), asked=dataset.asked[marks[2] :] if len(marks) > 3 else [], threads=set(dataset.threads)
    )


def read_by_towers_alone(rank: int, num_ranks: int) -> ReadBy:
    """Trains two towers whose loss looks at nothing of a batch, and stands on the second rank, alone."""
    with unmeasured():
        modules = two_towers()
        vision, text = (spindle.module(name, modules[name]) for name in ("vision", "text"))

        @spindle.task(batch_size=6)
        def pull(batch):
            return (vision(batch["x"]) * text(batch["y"])).square().mean()

        dataset = Notes()
        trainer = spindle.Trainer(
            [pull], optimizer=lambda named: torch.optim.SGD([one for _, one in named] or [torch.zeros(1)], lr=0.01)
        )
        graph = trainer.prepare({"pull": dataset}, progress=False).graph
        if num_ranks > 1:
            ops = [graph.metaops[place] for place in graph.order]
            trainer.replan(
                plan="\n".join(
                    f"{op.name}*{op.num_layers}@{int('/loss' in op.name)}^{number}000" for number, op in enumerate(ops)
                )
            )
        marks: list[int] = []
        result = trainer.fit(
            {"pull": dataset}, steps=9, progress=False, on_step=lambda step, losses: marks.append(len(dataset.asked))
        )
    return ReadBy(
        losses=tuple(one["pull"] for one in result.losses),
        asked=dataset.asked[marks[2] :],
        threads=set(dataset.threads),
    )


# Evaluation.


def evaluated(rank: int, num_ranks: int) -> tuple[dict[str, float], dict[str, float], list[bool]]:
    """Losses before and after training, each beside those of a plain loop, as the largest error; which parts train."""
    with unmeasured():
        torch.manual_seed(rank)  # ranks start with weights of their own: those of rank 0 count
        modules = {
            "vision": nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)).double(),
            "text": nn.Sequential(nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH)).double(),
            "head": nn.Linear(WIDTH, 2).double(),
        }
        modules["text"][1].eval()
        handles = {name: spindle.module(name, one) for name, one in modules.items()}
        tasks = pairs_and_answers()(handles)
        batches = {one.name: [normal_batch(one.name, number) for number in range(5)] for one in tasks}
        batches["answer"].append({key: leaf[:3] for key, leaf in batches["answer"][0].items()})
        trainer = spindle.Trainer(tasks, optimizer=lambda named: torch.optim.SGD([one for _, one in named], lr=0.1))
        found = [trainer.evaluate(batches)]
        plain = [_evaluated_plainly(batches, modules)]
        trainer.fit({name: some[:5] for name, some in batches.items()}, steps=3, progress=False)
        found.append(trainer.evaluate(batches, steps=4))
        plain.append(_evaluated_plainly({name: some[:4] for name, some in batches.items()}, modules))
        errors = [
            {name: abs(ours[name] - value) / abs(value) for name, value in theirs.items()}
            for ours, theirs in zip(found, plain, strict=True)
        ]
        assert all(abs(found[0][name] - found[1][name]) > 1e-6 for name in found[0])
        # Before training, the weights of other ranks than 0 do not count.
        return (
            errors[0] if rank == 0 else {},
            errors[1],
            [one.training for module in modules.values() for one in module.modules()],
        )


def _evaluated_plainly(batches: Mapping[str, list[Any]], modules: Modules) -> dict[str, float]:
    copies = {name: deepcopy(module).cpu().eval() for name, module in modules.items()}
    losses = {}
    with torch.no_grad():
        for one in pairs_and_answers()(copies):
            parts = [one(batch) for batch in batches[one.name]]
            if isinstance(parts[0], Mean):
                losses[one.name] = float(sum(part.total for part in parts) / sum(part.count for part in parts))
            else:
                losses[one.name] = float(sum(parts) / len(parts))
    return losses
