"""Modules that tensor groups share, trained by a Trainer and by plain PyTorch, to be compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import spindle
from backends import rank_device, to_device
from courses import capturing, unmeasured
from spindle.errors import SpindleError
from spindle.models import builtin_tp_plan
from spindle.profile import Profile
from spindle.train import analyze, mean, module, task
from spindle.train.tensor import Sharing, find_sharing
from zoo import Tower

WIDTH, HEAD, WORDS, ROWS, LENGTH = 16, 4, 24, 5, 6
LEARNING_RATE = 0.05


class Attention(nn.Module):
    """Heads are counted by their size alone, so some of them do as well."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.RMSNorm(HEAD)

    def forward(self, x):
        query, key, value = (
            one(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(self.norm(query), self.norm(key), value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention, self.after = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.down(F.gelu(self.up(self.after(x))))


class RecomputingDecoder(Decoder):
    """Recomputes itself, whatever the plan says."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Language(nn.Module):
    """A table of words, which the logits share, and blocks in between."""

    def __init__(self, block: type[Decoder] = Decoder) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=WORDS - 1)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids, seen):
        x = self.words(ids) + seen.unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {
    "words": "embedding_rowwise",
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.norm": "replicated_with_grad_allreduce",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}
SEQUENCE_PLAN = {**PLAN, "blocks.*": "sequence_parallel"}


def own(
    seed: int = 0, block: type[Decoder] = Decoder, **options: Any
) -> tuple[list[Any], Callable[[int], dict[str, Any]]]:
    return tasks_of(own_modules(seed, block, **options))


def own_modules(seed: int = 0, block: type[Decoder] = Decoder, **options: Any) -> dict[str, Any]:
    """A language model of our own with a user's plan, beside a vision tower without one."""
    torch.manual_seed(seed)
    language = module("language", Language(block).double(), **{"tensor_parallel": PLAN, **options})
    return {"language": language, "vision": module("vision", Tower(WIDTH, WIDTH, 2).double())}


def tasks_of(modules: Mapping[str, Any]) -> tuple[list[Any], Callable[[int], dict[str, Any]]]:
    language, vision = modules["language"], modules["vision"]

    @task(batch_size=ROWS)
    def describe(batch):
        logits = language(batch["ids"], vision(batch["seen"]))
        losses = F.cross_entropy(logits.transpose(1, 2), batch["ids"], reduction="none")
        return mean((losses * batch["kept"]).sum(), batch["kept"].sum())

    @task(batch_size=3, per_sample_mean=True)
    def guess(batch):
        return language(batch["ids"], batch["seen"]).square().mean()

    def batches(step: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(step)
        made = {}
        for one in (describe, guess):
            rows = one.batch_size
            kept = (torch.rand(rows, LENGTH, generator=generator) > 0.3).double()
            kept[:, 0] = 1.0
            made[one.name] = {
                "ids": torch.randint(WORDS, (rows, LENGTH), generator=generator),
                "seen": torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
                "kept": kept,
            }
        return made

    return [describe, guess], batches


def hugging_face(
    name: str, seed: int = 0, cuts: bool = False, **changes: Any
) -> tuple[list[Any], Callable[[int], dict[str, Any]]]:
    """A model with its own plan, and with sequences cut."""
    hf: Any = import_module("transformers")
    hugging: Any = import_module("hugging")
    torch.manual_seed(seed)
    config = {**hugging.GROUPED, "vocab_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 4, **changes}
    encodes = name == "EuroBert"
    kind = getattr(hf, f"{name}Model" if encodes else f"{name}ForCausalLM")
    model = hugging.without_dropout(kind(getattr(hf, f"{name}Config")(**config)).double().train())
    plan = {**builtin_tp_plan(model), "model.layers.*": "sequence_parallel"} if cuts else None
    language = module("language", model, tensor_parallel=plan)

    @task(batch_size=4)
    def predict(batch):
        out = language(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        if encodes:
            return mean(out.last_hidden_state.square().sum(), batch["attention_mask"].sum())
        return hugging._token_loss(out.logits, batch["input_ids"])

    def batches(step: int) -> dict[str, Any]:
        torch.manual_seed(step)
        return {"predict": hugging.words(4, 7 + step % 2)}

    return [predict], batches


def workload(name: str, seed: int = 0) -> tuple[list[Any], Callable[[int], dict[str, Any]]]:
    kind, *words = name.split()
    cuts, block = "cut" in words, RecomputingDecoder if "recomputing" in words else Decoder
    if kind == "own":
        return own(seed, block, tensor_parallel=SEQUENCE_PLAN if cuts else PLAN)
    return hugging_face(kind, seed, cuts, **({"tie_word_embeddings": True} if "tied" in words else {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Fits one after the other, each with tensor degrees and a seed for a random plan, or none for a planner's."""

    name: str
    fits: tuple[tuple[Mapping[str, int], int | None], ...]
    steps: int = 2
    optimizer: str = "adamw"
    options: Mapping[str, Any] = field(default_factory=dict)
    captures: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far a rank is from one process, at most; by fit, the elements that it trained, of so many."""

    loss: float
    parameter: float
    worst: str
    elements: list[int]
    all_elements: int
    notices: tuple[str, ...]


def make_optimizer(kind: str, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in named]
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)
    if kind == "adafactor":
        return torch.optim.Adafactor(parameters)
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.3)


_SHARING: dict[str, Sharing] = {}  # of the workloads that this process has seen


def sharing_known(name: str) -> Any:
    """Inside, how the modules of a workload can be shared is found out once: trying their layers takes seconds."""

    def find(*args: Any, **named: Any) -> Sharing:
        if name not in _SHARING:
            _SHARING[name] = find_sharing(*args, **named)
        return _SHARING[name]

    return mock.patch.object(analyze, "find_sharing", find)


def train_shared(rank: int, num_ranks: int, training: Training) -> Difference:
    tasks, batches = workload(training.name, seed=rank)  # rank 0's weights count
    elements: list[int] = []

    def make(named):
        if not any(parameter.is_meta for _, parameter in named):  # else ranks compare what it gives for all of them
            elements.append(sum(parameter.numel() for _, parameter in named))
        assert all(parameter.dim() == dims[name] for name, parameter in named)
        return make_optimizer(training.optimizer, named)

    with unmeasured(), sharing_known(training.name), ExitStack() as stack:
        if training.captures:
            stack.enter_context(capturing())
        modules = _modules(tasks, batches(0))
        dims = {f"{name}.{path}": one.dim() for name, each in modules.items() for path, one in each.named_parameters()}
        trainer = spindle.Trainer(tasks, optimizer=make, **training.options)
        losses = []
        for number, (degrees, seed) in enumerate(training.fits):
            first = number * training.steps
            loaders = {
                one.name: [batches(step)[one.name] for step in range(first, first + training.steps)] for one in tasks
            }
            profile = trainer.prepare(loaders, progress=False)
            plan = None if seed is None else shared_plan_text(profile, degrees, seed)
            trainer.replan(plan=plan, tensor_parallel_degrees=degrees)
            losses += trainer.fit(loaders, steps=training.steps, progress=False).losses
    expected_tasks, _ = workload(training.name)
    expected_modules = _modules(expected_tasks, batches(0))
    expected = train_plainly(expected_tasks, expected_modules, batches, training)
    loss, largest, worst = difference(losses, expected, trainer.state_dict(), expected_modules, training.optimizer)
    count = sum(one.numel() for each in expected_modules.values() for one in each.parameters())
    return Difference(
        loss=loss, parameter=largest, worst=worst, elements=elements, all_elements=count, notices=tuple(trainer.notices)
    )


def difference(losses, expected, state, modules: Mapping[str, nn.Module], optimizer: str) -> tuple[float, float, str]:
    """How far losses, and parameters, are from those of one process; and which parameter is farthest."""
    loss = max(
        abs(ours[name] - value) / max(abs(value), 1e-3)
        for ours, theirs in zip(losses, expected, strict=True)
        for name, value in theirs.items()
    )
    worst, largest = "", 0.0
    for name, one in modules.items():
        for path, value in one.state_dict().items():
            ours = state[f"{name}.{path}"].cpu()
            error = float((ours - value).norm() / max(float(value.norm()), 1e-3))
            if optimizer == "adamw":
                # Adam makes steps of gradients that are zero in exact arithmetic (a key's bias).
                error = min(error, 1e-9 * float((ours - value).abs().max()) / (1e-6 * LEARNING_RATE))
            if not error <= largest:
                worst, largest = f"{name}.{path}", error
    return loss, largest, worst


def refusal_of(rank: int, num_ranks: int, degrees: Mapping[str, int], optimizer: str) -> str:
    """What a Trainer says to these degrees, or this optimizer."""
    tasks, batches = own()
    make = partial(make_optimizer, optimizer)
    with unmeasured(), sharing_known("own"):
        planning = spindle.Planning(tensor_parallel_degrees=degrees)
        trainer = spindle.Trainer(tasks, optimizer=make, planning=planning)
        try:
            trainer.fit({one.name: [batches(0)[one.name]] for one in tasks}, steps=1, progress=False)
        except SpindleError as error:
            return str(error)
    return ""


def _modules(tasks, examples) -> dict[str, nn.Module]:
    from spindle.train.record import handles_of, record_all

    return {name: handle.module for name, handle in handles_of(record_all(tasks, examples)).items()}


def train_plainly(tasks, modules, batches, training: Training) -> list[dict[str, float]]:
    from worlds import plain_losses

    together = nn.ModuleDict(modules).to(rank_device())
    named = {id(one): ("", one) for each in modules.values() for one in each.parameters()}
    optimizer = make_optimizer(training.optimizer, list(named.values()))
    history = []
    for step in range(len(training.fits) * training.steps):
        optimizer.zero_grad()
        losses, total = plain_losses(tasks, to_device(batches(step)))
        total.backward()
        if training.options.get("max_grad_norm"):
            nn.utils.clip_grad_norm_([one for _, one in named.values()], training.options["max_grad_norm"])
        optimizer.step()
        history.append({name: loss.item() for name, loss in losses.items()})
    together.cpu()
    return history


def shared_plan_text(
    profile: Profile,
    degrees: Mapping[str, int],
    seed: int,
    has_rounds: bool | None = None,
    recomputes: bool | None = None,
) -> str:
    """Some legal plan with these degrees: ops cut anywhere, on any tensor groups; some rounds, some recomputed, unless
    it is said."""
    choose = random.Random(seed)
    profile = profile.with_degrees(degrees)
    graph, places = profile.graph, profile.cluster.place_in_island
    tasks = choose.sample(graph.tasks, len(graph.tasks))
    num_rounds = choose.choice((1, len(tasks))) if has_rounds is None else len(tasks) if has_rounds else 1
    share = {None: 0.4, True: 0.7, False: 0.0}[recomputes]
    lines = [f"# tensor {name} {degree}" for name, degree in degrees.items() if degree > 1]
    lines += [f"# recompute {op.name}" for op in graph.metaops if op.cost and choose.random() < share]
    wave = 0
    for round_number in range(num_rounds):
        left = {
            position: op.num_layers
            for position, op in enumerate(graph.metaops)
            if tasks.index(op.task) * num_rounds // len(tasks) == round_number
        }
        while left:
            able = [one for one in left if not any(source in left for source in graph.predecessors[one])]
            free = choose.sample(range(profile.cluster.num_devices), profile.cluster.num_devices)
            slots = []
            for position in choose.sample(able, choose.randint(1, len(able))):
                curve = profile.curves[position][0]
                groups, rest = _groups(free, curve.tensor_degree, places)
                counts = [one for one in curve.num_devices if one <= len(groups) * curve.tensor_degree]
                if not counts:
                    continue
                count, layers = choose.choice(counts), choose.randint(1, left[position])
                devices = [device for group in groups[: count // curve.tensor_degree] for device in group]
                free = rest + [device for group in groups[count // curve.tensor_degree :] for device in group]
                slots.append(
                    f"{graph.metaops[position].name}*{layers}@{','.join(map(str, devices))}~{round_number}^{wave}000"
                )
                left[position] -= layers
                if not left[position]:
                    del left[position]
            if slots:
                lines.append(" ".join(slots))
                wave += 1
    return "\n".join(lines)


def _groups(free: list[int], degree: int, places) -> tuple[list[list[int]], list[int]]:
    """Devices in tensor groups, each on a place of its own, side by side or not; and those that are left."""
    by_shard = [[device for device in free if places[device] % degree == shard] for shard in range(degree)]
    count = min(map(len, by_shard))
    groups = [[devices[number] for devices in by_shard] for number in range(count)]
    return groups, [device for devices in by_shard for device in devices[count:]]
