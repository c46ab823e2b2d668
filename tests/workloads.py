"""Small torch workloads by name: tasks as people write them, around every kind of module, or random.

B rows, L tokens, C channels, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import nn

from spindle.train import mean, module, task
from spindle.train.record import handles_of, parameter_names, record_all
from spindle.train.task import ModuleHandle
from zoo import Tower, Workload, by_name, one_kind, random_workload

WIDTH = 8
WORDS = 11


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def words(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(seed))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 2, stride=2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Linear(6, WIDTH)

    def forward(self, pixels_BCHW):
        x = self.stem(pixels_BCHW)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.flatten(2).transpose(1, 2))


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids, attention_mask=None):
        x = self.table(input_ids)
        padded = None if attention_mask is None else attention_mask == 0
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padded)
        return {"last": self.norm(x), "pooled": x[:, 0]}


class Fusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, x, memory, mask=None):
        for block in self.blocks:
            x = block(x, memory, memory_key_padding_mask=mask)
        return self.out(x)


class Contrast(nn.Module):
    """A whole-batch head that gives its loss, with a temperature and negatives that it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("queue", torch.randn(4, WIDTH))

    def forward(self, a, b):
        candidates = torch.cat([F.normalize(b, dim=-1), self.queue])
        return F.cross_entropy(
            F.normalize(a, dim=-1) @ candidates.T * self.scale.exp(), torch.arange(a.shape[0], device=a.device)
        )


def multimodal() -> Workload:
    """Contrast, captions, questions, and two views of an image, over shared encoders."""
    torch.manual_seed(1)
    vision, text = module("vision", Vision().double()), module("text", Text().double())
    fusion, contrast = module("fusion", Fusion().double()), module("contrast", Contrast().double(), whole_batch=True)

    @task(batch_size=6)
    def pairs(batch):
        rest = {key: value for key, value in batch.items() if key != "pixels"}
        return contrast(vision(batch["pixels"]).mean(1), text(**rest)["pooled"])

    @task(batch_size=5, weight=0.3)
    def captions(batch):
        seen, read = vision(batch["pixels"]), text(batch["input_ids"], batch["attention_mask"])
        scores = fusion(read["last"], seen)[:, :-1]
        mask = batch["attention_mask"][:, 1:].to(scores.dtype)
        target = batch["input_ids"][:, 1:]
        importance = torch.linspace(0.5, 1.5, WORDS, dtype=torch.float64, device=scores.device)
        losses = F.cross_entropy(scores.transpose(1, 2), target, weight=importance, reduction="none")
        return mean((losses * mask).sum(), mask.sum())

    @task(batch_size=7, per_sample_mean=True)
    def questions(batch):
        seen, asked = vision(batch["pixels"]), text(batch["input_ids"])["last"]
        scores = fusion(asked, torch.cat([seen, asked], dim=1))[:, 0]
        return F.cross_entropy(scores, batch["input_ids"][:, 0], label_smoothing=0.1)

    @task(batch_size=4)
    def views(batch):
        """What the encoder gives is not row after row, but view after view."""
        rows = batch["pixels"].shape[0]
        z = F.normalize(vision(torch.cat([batch["pixels"], batch["pixels"].flip(-1)])).mean(1), dim=-1)
        scores = (z @ z.T / 0.5).masked_fill(torch.eye(2 * rows, dtype=torch.bool, device=z.device), -1e9)
        return F.cross_entropy(scores, (torch.arange(2 * rows, device=z.device) + rows) % (2 * rows))

    tasks = [pairs, captions, questions, views]

    def batches(step: int) -> dict:
        result = {}
        for number, definition in enumerate(tasks):
            rows, seed, tokens = definition.batch_size, 100 * step + number, 4 + step % 3
            mask = (torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed)) > 0.3).long()
            mask[:, :2] = 1
            result[definition.name] = {
                "pixels": normal(seed, rows, 3, 4 + 2 * (step % 2), 4),
                "input_ids": words(seed, rows, tokens),
                "attention_mask": mask,
            }
        return result

    return Workload(tasks=tasks, batches=batches, handles=by_name(vision, text, contrast, fusion))


def tuples() -> Workload:
    """Batches that are lists and tuples; a layer that two modules share, a module under two names, unused calls."""
    torch.manual_seed(2)
    shared = nn.Linear(WIDTH, WIDTH)
    first = module("one", nn.Sequential(shared, nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double())
    again = module("again", first.module)
    second = module("two", nn.Sequential(shared, nn.GELU()).double())

    @task(batch_size=5)
    def lists(batch):
        x, (y, factor) = batch
        return (first(x) - second(y)).square().mean() + again(x).square().mean() * factor

    @task(batch_size=3)
    def deep(batch):
        x = batch["input"]["deep"]
        seen = first(x)
        second(seen)
        return mean((second(seen.detach()) * seen).sum(), x.shape[0])

    def batches(step: int) -> dict:
        return {
            "lists": [normal(step, 5, WIDTH), (normal(step + 10, 5, WIDTH), 0.5)],
            "deep": {"input": {"deep": normal(step + 20, 3, WIDTH)}, "none": None, "number": torch.tensor(3.0)},
        }

    return Workload(tasks=[lists, deep], batches=batches, handles=by_name(first, second, again))


class Nest(nn.Module):
    """Gives tensors with two entries for a row, with no rows, with rows in second place, of whole numbers; and numbers,
    of which one is the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.prototypes = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, batch):
        x = self.linear(batch["x"])
        return {
            "twice": x.repeat_interleave(2, 0),
            "prototypes": F.normalize(self.prototypes, dim=-1),
            "second": x.unsqueeze(0).expand(2, -1, -1),
            "labels": x.argmax(-1),
            "rows": x.shape[0],
            "factor": 2.5,
        }


def nests() -> Workload:
    torch.manual_seed(3)
    nest = module("nest", Nest().double())
    head = module("head", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double())

    @task(batch_size=5)
    def whole(batch):
        out = nest(batch)
        z = head(out["twice"]).unflatten(0, (-1, 2)).mean(1)
        scores = z @ out["prototypes"].T
        return F.cross_entropy(scores, out["labels"] % 3) + out["second"][1].square().sum() / out["rows"]

    @task(batch_size=6)
    def parts(batch):
        out = nest(batch)
        z = head(out["second"].transpose(0, 1))[:, 0] + out["prototypes"][0]
        losses = F.cross_entropy(head(z), out["labels"], reduction="none")
        return mean(losses.sum() * out["factor"], z.shape[0])

    @task(batch_size=7, per_sample_mean=True)
    def samples(batch):
        out = nest(batch)
        z = head(out["twice"] * 2).unflatten(0, (out["rows"], 2)).sum(1)
        return (z * out["prototypes"].sum(0)).mean()

    def batches(step: int) -> dict:
        return {
            definition.name: {"x": normal(step + 10 * number, definition.batch_size, WIDTH)}
            for number, definition in enumerate(tasks)
        }

    tasks = [whole, parts, samples]
    return Workload(tasks=tasks, batches=batches, handles=by_name(nest, head))


class Nearest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, a, b):
        return self.linear(a * b[torch.cdist(a, b).argmin(1)])


def hard_negatives() -> Workload:
    """Samples pick each other, between calls and inside one. The first two pick themselves, so that they alone show
    nothing of it."""
    torch.manual_seed(5)
    left, right, judge = (module(name, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()) for name in "lrj")
    right.module.load_state_dict(left.module.state_dict())
    nearest = module("nearest", Nearest().double())

    @task(batch_size=6, per_sample_mean=True)
    def between(batch):
        a, b = left(batch["a"]), right(batch["b"])
        return judge(a * b[(a @ b.T).argmax(1)]).square().mean()

    @task(batch_size=5, per_sample_mean=True)
    def inside(batch):
        return nearest(left(batch["a"]), right(batch["b"])).square().mean()

    def batches(step: int) -> dict:
        a = normal(step, 6, WIDTH)
        b = torch.cat([a[:2], a[2:].roll(1, 0)])
        return {"between": {"a": a, "b": b}, "inside": {"a": a[:5], "b": b[:5]}}

    return Workload(tasks=[between, inside], batches=batches, handles=by_name(left, right, judge, nearest))


class Counting(nn.Module):
    """A block that puts another tensor in the place of its buffer each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + 1
        return self.linear(x).tanh()


def counters() -> Workload:
    """A module that replaces its buffers, before one that does not."""
    torch.manual_seed(3)
    counting = module("counting", nn.Sequential(Counting(), Counting()).double())
    behind = module("behind", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)).double())

    @task(batch_size=4, per_sample_mean=True)
    def counted(batch):
        return behind(counting(batch["x"])).mean()

    def batches(step: int) -> dict:
        return {"counted": {"x": normal(step, 4, WIDTH)}}

    return Workload(tasks=[counted], batches=batches, handles=by_name(counting, behind))


def everything() -> Workload:
    """Shared, frozen, tied and twice-called modules; branching flows; whole-batch, token-mean, per-sample losses."""
    torch.manual_seed(0)
    vision, text = module("vision", Tower(4, WIDTH, 3).double()), module("text", Tower(3, WIDTH, 2).double())
    language = module("lm", Tower(WIDTH, WIDTH, 3).double())
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double()
    layers[0].weight = language.module.blocks[0].linear.weight  # tied
    head = module("head", layers)
    frozen = module("frozen", Tower(WIDTH, WIDTH, 2).double().requires_grad_(False))

    @task(batch_size=7)
    def contrast(batch):
        a = F.normalize(vision(batch["x"]), dim=-1)
        b = F.normalize(text(batch["y"]), dim=-1)
        return F.cross_entropy(a @ b.T * 5, torch.arange(a.shape[0], device=a.device))

    @task(batch_size=5, weight=0.5)
    def question(batch):
        seen = vision(batch["x"])
        answer = head(language(seen + text(batch["y"]))) + frozen(seen)
        loss = ((answer - batch["z"]) ** 2).mean(-1)
        return mean((loss * batch["mask"]).sum(), batch["mask"].sum())

    @task(batch_size=4, per_sample_mean=True)
    def plain(batch):
        return (language(language(batch["z"])) ** 2).mean()

    def batches(step: int) -> dict:
        generator = torch.Generator().manual_seed(step)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        mask = (torch.rand(5, generator=generator) > 0.4).double()
        mask[0] = 1.0
        return {
            "contrast": {"x": normal(7, 4), "y": normal(7, 3)},
            "question": {"x": normal(5, 4), "y": normal(5, 3), "z": normal(5, WIDTH), "mask": mask},
            "plain": {"z": normal(4, WIDTH)},
        }

    handles = by_name(vision, text, language, head, frozen)
    return Workload(tasks=[contrast, question, plain], batches=batches, handles=handles)


WORKLOADS = {
    "everything": everything,
    "multimodal": multimodal,
    "tuples": tuples,
    "nests": nests,
    "hard negatives": hard_negatives,
    "counters": counters,
}


def workload_named(name: str, dtype: torch.dtype = torch.float64, seed: int | None = None) -> Workload:
    """One of `WORKLOADS`, `hf T5`, `random 12`, or `in-place tokens`: a module of one kind under one loss; the last two
    also as `float32 random 12`. `seed` is that of a random workload's weights."""
    if name.startswith("float32 "):
        return workload_named(name.removeprefix("float32 "), torch.float32, seed)
    if name in WORKLOADS:
        return WORKLOADS[name]()
    if name.startswith("hf "):
        return import_module("hugging").workload_named(name)  # which takes a while to import
    kind, _, last = name.rpartition(" ")
    if kind == "random":
        return random_workload(int(last), dtype, seed)
    return one_kind(kind, last, dtype=dtype)


def handles_in(workload: Workload) -> dict[str, ModuleHandle]:
    """Handles of the modules that the workload's tasks call, by name."""
    if workload.handles is not None:
        return dict(workload.handles)
    return handles_of(record_all(workload.tasks, workload.batches(0)))


def unique_parameters(handles: Mapping[str, ModuleHandle]) -> dict[str, nn.Parameter]:
    """Every parameter of modules once, under its first name."""
    names = parameter_names(handles)
    return {names[id(weight)]: weight for handle in handles.values() for weight in handle.module.parameters()}
