"""The workloads of the experiment: towers, tasks and ready batches, all on one device.

    clip-T-B    the first T = 4, 7, 10 pairs of the recipe, each with B = 16, 32, 64 samples; contrastive
    ofasys-T    the first T = 4, 7 tasks of the recipe, 16 samples each; mean over words
    qwen-val-B  VL, AL and VAL, B samples each (8 without it); mean over words. 576 patches become 144 positions of the
                language model, 500 frames 125, words fill up its 512; the last 240 of these have targets

Batch sizes of the last two are ours: with them, all activations of a step (2.7 and 4.0 GB a sample) fit beside a whole
replica of weights, gradients and Adam's moments (5.4 and 8.6 GB) in an eighth of the card, 16 GiB, at once.

A task's loss is a function of towers by name, so that the same code runs with Spindle's handles, with plain modules and
with graphed ones. Weights and data are bfloat16 on a GPU, float32 elsewhere; `small` makes every tower tiny.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spindle
from spindle.recipes import clip, ofasys
from spindle.train import TaskDefinition
from virtual import models

Towers = Mapping[str, Callable[..., Any]]
Batch = dict[str, Tensor]

SEED = 0
NUM_BATCHES = 2
PADDING = 0
TEMPERATURE = 0.07
OFASYS_BATCH_SIZE = 16
QWEN_BATCH_SIZE = 8
QWEN_TOKENS = {"vision": 576, "audio": 500, "language": 512, "target": 240}
QWEN_TASKS = {"VL": ("vision",), "AL": ("audio",), "VAL": ("vision", "audio")}
NAMES = (
    *(f"clip-{num_tasks}-{size}" for size in (16, 32, 64) for num_tasks in (4, 7, 10)),
    *("ofasys-4", "ofasys-7", "qwen-val"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A loss over a batch of so many samples, and the towers that it calls."""

    name: str
    batch_size: int
    towers: tuple[str, ...]
    loss: Callable[[Towers, Batch], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained. `batches` has a few ready batches for each task, the same on every rank."""

    name: str
    towers: dict[str, nn.Module]
    tasks: tuple[Task, ...]
    batches: dict[str, list[Batch]]

    @property
    def num_steps(self) -> int:
        """Steps to measure: fewer where one takes about a second."""
        return 5 if sum(task.batch_size for task in self.tasks) > 256 else 8

    def spindle_tasks(self, **options: Any) -> list[TaskDefinition]:
        """The tasks as a user of Spindle writes them, with these options of its modules."""
        handles = {name: spindle.module(name, tower, **options) for name, tower in self.towers.items()}
        return [_spindle_task(task, handles) for task in self.tasks]


def _spindle_task(task: Task, towers: Towers) -> TaskDefinition:
    return spindle.task(name=task.name, batch_size=task.batch_size)(lambda batch: task.loss(towers, batch))


def build(name: str, device: torch.device, small: bool = False) -> Workload:
    """The workload of this name."""
    kind, *numbers = name.split("-")
    match kind:
        case "clip":
            return clip_workload(name, int(numbers[0]), int(numbers[1]), device, small)
        case "ofasys":
            return ofasys_workload(name, int(numbers[0]), device, small)
        case "qwen":
            batch_size = int(numbers[1]) if len(numbers) > 1 else QWEN_BATCH_SIZE
            return qwen_val_workload(name, device, small, batch_size)
        case _:
            raise ValueError(f"no workload is called {name!r}; there are {', '.join(NAMES)}")


def clip_workload(name: str, num_tasks: int, batch_size: int, device: torch.device, small: bool = False) -> Workload:
    pairs = [tuple(pair.split("-")) for pair in list(clip.BATCH_SIZES)[:num_tasks]]
    towers = _made(lambda: models.clip_towers({modality for pair in pairs for modality in pair}, small), device)
    draw = _drawing(device, towers["text"].stem.table.num_embeddings)
    batches = {
        "-".join(pair): [
            {modality: draw(modality, number, batch_size, _length(clip.TOKENS[modality], small)) for modality in pair}
            for number in range(NUM_BATCHES)
        ]
        for pair in pairs
    }
    tasks = tuple(_contrastive_task(pair, batch_size) for pair in pairs)
    return Workload(name=name, towers=towers, tasks=tasks, batches=batches)


def _contrastive_task(pair: tuple[str, ...], batch_size: int) -> Task:
    first, second = pair

    def loss(towers: Towers, batch: Batch) -> Tensor:
        return contrastive(towers[first](batch[first]), towers[second](batch[second]))

    return Task(name="-".join(pair), batch_size=batch_size, towers=pair, loss=loss)


def contrastive(one_BD: Tensor, other_BD: Tensor) -> Tensor:
    """A sample and its partner should find each other in the batch."""
    one_BD, other_BD = F.normalize(one_BD.float(), dim=1), F.normalize(other_BD.float(), dim=1)
    logits_BB = one_BD @ other_BD.T / TEMPERATURE
    return -(logits_BB.log_softmax(0) + logits_BB.log_softmax(1)).diagonal().mean() / 2


def ofasys_workload(name: str, num_tasks: int, device: torch.device, small: bool = False) -> Workload:
    shapes = {task: ofasys.SHAPES[task] for task in ofasys.TASKS[:num_tasks]}
    tasks = tuple(
        _sequence_task(task, [modality for modality, _ in shape.inputs], shape.target or "text")
        for task, shape in shapes.items()
    )
    towers = _made(lambda: models.ofasys_towers({tower for task in tasks for tower in task.towers}, small), device)
    draw = _drawing(device, towers["text"].table.num_embeddings)

    def batch(shape: Any, number: int) -> Batch:
        length = _length(shape.target_tokens, small)
        return {
            **{
                modality: draw(modality, number, OFASYS_BATCH_SIZE, _length(tokens, small))
                for modality, tokens in shape.inputs
            },
            "given": draw(shape.target or "text", number, OFASYS_BATCH_SIZE, length),
            "target": draw("target", number, OFASYS_BATCH_SIZE, length),
        }

    batches = {task: [batch(shape, number) for number in range(NUM_BATCHES)] for task, shape in shapes.items()}
    return Workload(name=name, towers=towers, tasks=tasks, batches=batches)


def _sequence_task(name: str, inputs: list[str], target: str) -> Task:
    """Adaptors of the inputs, encoder, decoder behind the adaptor of the target."""

    def loss(towers: Towers, batch: Batch) -> Any:
        memory = towers["encoder"](torch.cat([towers[modality](batch[modality]) for modality in inputs], dim=1))
        return token_mean(towers["decoder"](towers[target](batch["given"]), memory, batch["target"]), batch["target"])

    used = tuple(dict.fromkeys([*inputs, target, "encoder", "decoder"]))
    return Task(name=name, batch_size=OFASYS_BATCH_SIZE, towers=used, loss=loss)


def qwen_val_workload(
    name: str, device: torch.device, small: bool = False, batch_size: int = QWEN_BATCH_SIZE
) -> Workload:
    towers = _made(lambda: models.qwen_val_towers(small), device)
    draw = _drawing(device, towers["words"].table.num_embeddings)
    length = {modality: _length(tokens, small) for modality, tokens in QWEN_TOKENS.items()}

    def batch(inputs: tuple[str, ...], number: int) -> Batch:
        seen = sum(length[modality] // models.POOLED for modality in inputs)
        return {
            **{modality: draw(modality, number, batch_size, length[modality]) for modality in inputs},
            "words": draw("words", number, batch_size, length["language"] - seen),
            "target": draw("target", number, batch_size, length["target"]),
        }

    batches = {task: [batch(inputs, number) for number in range(NUM_BATCHES)] for task, inputs in QWEN_TASKS.items()}
    tasks = tuple(_language_task(task, inputs, batch_size) for task, inputs in QWEN_TASKS.items())
    return Workload(name=name, towers=towers, tasks=tasks, batches=batches)


def _language_task(name: str, inputs: tuple[str, ...], batch_size: int) -> Task:
    """Encoders and words, one behind the other, into the language model."""

    def loss(towers: Towers, batch: Batch) -> Any:
        x_BLD = torch.cat([towers[modality](batch[modality]) for modality in (*inputs, "words")], dim=1)
        return token_mean(towers["language"](x_BLD, batch["target"]), batch["target"])

    return Task(name=name, batch_size=batch_size, towers=(*inputs, "words", "language"), loss=loss)


def token_mean(losses_BN: Tensor, target_BN: Tensor) -> Any:
    """The mean over targets that are no padding."""
    kept_BN = target_BN != PADDING
    return spindle.mean((losses_BN * kept_BN).sum(), kept_BN.sum())


def _made(make: Callable[[], dict[str, nn.Module]], device: torch.device) -> dict[str, nn.Module]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(_dtype(device))
    try:
        with device:
            towers = make()
    finally:
        torch.set_default_dtype(before)
    if device.type != "meta":
        models.initialise(towers, SEED)
    return towers


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _length(tokens: int, small: bool) -> int:
    return max(4, tokens // 16 // 4 * 4) if small else tokens


def _drawing(device: torch.device, vocabulary: int) -> Callable[[str, int, int, int], Tensor]:
    """Draws samples of a modality; tasks that ask for the same get the same tensor."""

    @cache
    def draw(kind: str, number: int, batch_size: int, length: int) -> Tensor:
        if device.type == "meta":
            return torch.empty(batch_size, length, device=device)
        seed = SEED + 1 + number + sum(kind.encode())
        generator = torch.Generator(device).manual_seed(seed)
        if kind in models.FEATURES:
            shape = (batch_size, length, models.FEATURES[kind])
            return torch.randn(shape, dtype=_dtype(device), device=device, generator=generator)
        words_BL = torch.randint(1, vocabulary, (batch_size, length), device=device, generator=generator)
        if kind == "target":
            lengths_B1 = torch.randint(length // 2, length + 1, (batch_size, 1), device=device, generator=generator)
            words_BL = words_BL.where(torch.arange(length, device=device) < lengths_B1, PADDING)
        return words_BL

    return draw
