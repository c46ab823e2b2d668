"""A training with every kind of loader, that is cut and goes on from its checkpoints: what one rank does in it."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import internals
import spindle

SIZE, ROWS = 8, 6


class Waves(Dataset):
    """Samples by number, some of which draw random numbers; `num_fetched` counts them."""

    def __init__(self, length: int = 20, noise: float = 0.0) -> None:
        self.length, self.noise, self.num_fetched = length, noise, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        self.num_fetched += 1
        values = torch.sin(torch.arange(SIZE, dtype=torch.float64) * (number + 1))
        return {"x": values + self.noise * torch.rand(SIZE, dtype=torch.float64) if self.noise else values}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return (Waves()[number] for number in torch.randperm(20).tolist())


def stacked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([sample["x"] for sample in samples])}


def stateful(dataset: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, ROWS, shuffle=True, **options)


def weighted(**options: Any) -> Any:
    """With a sampler that has a generator of its own."""
    dataset = Waves()
    weights = torch.arange(1.0, len(dataset) + 1)
    sampler = WeightedRandomSampler(weights, len(dataset), generator=torch.Generator().manual_seed(5))
    return DataLoader(dataset, ROWS, sampler=sampler, drop_last=True, **options)


def endless() -> Iterator[Any]:
    while True:
        yield {"x": torch.randn(ROWS, SIZE, dtype=torch.float64) + random.random()}


LOADERS: dict[str, Callable[[], Any]] = {
    "dataset": lambda: Waves(noise=0.1),
    "stacking": lambda: DataLoader(Waves(), ROWS, shuffle=True, drop_last=True),
    "collating": lambda: DataLoader(Waves(noise=0.1), ROWS, shuffle=True, collate_fn=stacked),
    "stateful": lambda: stateful(Waves(noise=0.1)),
    "list": lambda: [stacked([Waves()[7 * number + row] for row in range(ROWS)]) for number in range(3)],
    "iterable": lambda: DataLoader(Stream(), ROWS),
    "generator": endless,
    "weighted": weighted,
    "weighted collating": lambda: weighted(collate_fn=stacked),
    "stateful with a generator": lambda: stateful(Waves(noise=0.1), generator=torch.Generator().manual_seed(5)),
}


if importlib.util.find_spec("torchdata") is None:
    print("note: no torchdata here: runs go without its loader", file=sys.stderr)
    del LOADERS["stateful"], LOADERS["stateful with a generator"]


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)

    def tower(*extra: nn.Module) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(3)), *extra).double()

    return {"left": tower(), "right": tower(nn.BatchNorm1d(SIZE))}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One start of the script."""

    steps: int
    folder: str | None = None
    every: int | None = 4  # often enough apart for one to be written before the next
    keep: int | None = 2
    memory_every: int | None = None
    planning: Mapping[str, Any] = field(default_factory=dict)
    loaders: tuple[str, ...] = ("dataset", "stacking", "collating", "stateful")  # those that can be had here
    accumulated: int = 2  # batches of each task in a step
    ends_at: int | None = None  # the last task ends when the losses of this step are known
    signalled_at: int | None = None  # rank 1 gets SIGTERM when the losses of this step are known
    splits: bool = False  # `left` has tensor parallel blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    losses: tuple[dict[str, float], ...]
    state: dict[str, torch.Tensor]
    notices: tuple[str, ...]
    exit_code: int | None
    plan: str


def run(rank: int, num_ranks: int, options: Run) -> Ran:
    loaders = [name for name in options.loaders if name in LOADERS]
    torch.manual_seed(rank)  # what ranks draw by themselves must not matter
    random.seed(rank)
    named = modules()
    if options.splits:
        torch.manual_seed(1)
        named["left"] = nn.Sequential(*(Block() for _ in range(2))).double()
    style = {"*.up": "colwise", "*.down": "rowwise"} if options.splits else None
    left = spindle.module("left", named["left"], tensor_parallel=style)
    right = spindle.module("right", named["right"])

    def task_of(number: int, name: str) -> Any:
        def loss(batch: Any) -> Any:
            both = left(batch["x"]) if number else right(left(batch["x"]))  # whose running statistics follow one call
            return (both - number).square().mean()

        return spindle.task(batch_size=ROWS, name=name, per_sample_mean=True)(loss)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        biases = [parameter for name, parameter in parameters if name.endswith("bias")]
        others = [parameter for name, parameter in parameters if not name.endswith("bias")]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
        # With a small eps Adam would blow up the rounding errors of gradients that are all but zero.
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01, eps=1e-3)

    trainer = spindle.Trainer(
        [task_of(number, name) for number, name in enumerate(loaders)],
        optimizer=adamw,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        max_grad_norm=1.0,
        ema=0.9,
        gradient_accumulation_steps=options.accumulated,
        sampling_weights=dict.fromkeys(loaders, 1.0),
        tasks_per_step=max(1, len(loaders) - 1),
        planning=spindle.Planning(**{"profile": internals.guessed_profile, **options.planning}),
        checkpoints=None
        if options.folder is None
        else spindle.Checkpoints(
            options.folder, every=options.every, keep=options.keep, memory_every=options.memory_every
        ),
    )

    def on_step(step: int, losses: dict[str, float]) -> None:
        if step == options.signalled_at and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if step == options.ends_at:
            trainer.remove_task(loaders[-1])

    losses: tuple[dict[str, float], ...] = ()
    exit_code = None
    with internals.sharing_found_once("resuming") if options.splits else nullcontext():
        try:
            result = trainer.fit(
                {name: LOADERS[name]() for name in loaders},
                steps=options.steps,
                progress=False,
                on_step=on_step,
            )
            losses = result.losses
        except SystemExit as exit_:
            exit_code = exit_.code
    state: dict[str, torch.Tensor] = {}
    for ema in () if exit_code else (False, True):
        state |= {f"{name} {ema}": value.clone() for name, value in trainer.state_dict(ema=ema).items()}
    return Ran(
        losses=losses,
        state=state,
        notices=tuple(trainer.notices),
        exit_code=exit_code,
        plan="" if trainer.plan is None else trainer.plan.planner,
    )


def drop_newest(folder: Path) -> int:
    """As if the job had been killed before it saved its last checkpoint. Returns the step of the one before."""
    steps = sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
    for path in (folder / f"step-{steps[-1]}").iterdir():
        path.unlink()
    (folder / f"step-{steps[-1]}").rmdir()
    return steps[-2]


def error(ran: Ran, expected: Ran) -> float:
    """The largest difference of losses and state from those of a run that was not interrupted."""
    assert ran.state.keys() == expected.state.keys()
    differences = [float((ran.state[name].cpu() - value.cpu()).abs().max()) for name, value in expected.state.items()]
    later = expected.losses[len(expected.losses) - len(ran.losses) :]
    for losses, expected_losses in zip(ran.losses, later, strict=True):
        assert losses.keys() == expected_losses.keys()
        differences += [abs(losses[name] - value) for name, value in expected_losses.items()]
    return max(differences)
