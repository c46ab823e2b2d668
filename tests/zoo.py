"""Modules of many kinds, and random workloads made of them.

B rows, L tokens, D = WIDTH channels; D is larger than any batch here, so no other axis can be taken for the rows. Every
kind has an `apply(handle, x_BLD, batch)` that gives tokens again, so that a task can put any behind any.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from spindle.train import ModuleHandle, TaskDefinition, mean, module, task

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

WIDTH = 10
LONGEST = 6
VOCABULARY = 13


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Tower(nn.Module):
    """Something before a list of equal blocks, something after it."""

    def __init__(self, width_in: int, width: int, num_blocks: int) -> None:
        super().__init__()
        self.stem = nn.Linear(width_in, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Attention(nn.Module):
    """One head over tokens that are not padded; the bias of its keys has no gradient in exact arithmetic."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask, position):
        query, key, value = self.mix(self.norm(x + position)).chunk(3, dim=-1)
        scores = (query @ key.transpose(1, 2) / 3).masked_fill(~mask[:, None], float("-inf"))
        return x + self.out(scores.softmax(-1) @ value)


class Masked(nn.Module):
    """Blocks that take a mask and positions beside their input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask, position):
        for block in self.blocks:
            x = block(x, mask, position) * mask.unsqueeze(-1)
        return self.head(x)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, table):
        return x + torch.tanh(self.linear(x) * table[: x.shape[1]])


class Table(nn.Module):
    """A learned table, made once before the blocks: a tensor without rows that takes a gradient from every block."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.turn = nn.Parameter(torch.randn(LONGEST, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Shifted() for _ in range(3))

    def forward(self, x):
        table = self.turn(self.table)
        for block in self.blocks:
            x = block(x, table)
        return x


class BareTable(Table):
    """The parameter itself goes from block to block, behind a stem."""

    def forward(self, x):
        x = self.turn(x)
        for block in self.blocks:
            x = block(x, self.table) + self.table[: x.shape[1]]
        return x


class Flat(nn.Module):
    """Blocks over all tokens of all rows; what was known of the shape is needed again behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def forward(self, x):
        rows, tokens, _ = x.shape
        x = self.stem(x).reshape(rows * tokens, WIDTH)
        for block in self.blocks:
            x = block(x)
        return x.view(rows, tokens, WIDTH)


class Second(nn.Module):
    """Blocks with the batch in the second place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, x):
        x = self.stem(x).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return x.transpose(0, 1)


class Several(nn.Module):
    """A dict of tensors; what `apply` leaves out is not used. Something from its middle is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.pool, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        early = self.blocks[0](x)
        late = self.blocks[2](self.blocks[1](early))
        return {"tokens": late, "pairs": (early, None, self.pool(late).mean(1)), "unused": self.unused(late), "two": 2}


class Normal(nn.Module):
    """Batch normalisation couples the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)


class NormalBlock(Normal):
    def forward(self, x):
        return x + super().forward(x)


class Normals(nn.Module):
    """Batch normalisation in blocks, whose running statistics are where their slots are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NormalBlock() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class LazyBlock(Block):
    """A block with a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.forgotten = nn.Parameter(torch.randn(3))


class Lazy(nn.Module):
    """Parameters that nothing uses, inside blocks and beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LazyBlock() for _ in range(2))
        self.forgotten = nn.Linear(2, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Optional(nn.Module):
    """What it does depends on whether it is given a mask. Its first argument has the name of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, input, mask=None, scale: float = 1.0):
        x = self.stem(input) * scale
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        for block in self.blocks:
            x = block(x)
            if mask is None:
                x = x * 0.5
        return self.norm(x)


class Shaped(nn.Module):
    """A shape, a type and a number of rows are needed again behind the blocks; a buffer and a target without gradient
    are used between them. Gives what each block gave."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.register_buffer("shift", torch.arange(WIDTH) / WIDTH)

    def forward(self, x, /, *args, **kwargs):
        shape, dtype, rows = x.shape, x.dtype, x.shape[0]
        x = self.stem(x).flatten(0, 1)
        hidden = []
        for block in self.blocks:
            with torch.no_grad():
                target = block(x)
            x = block(x) + 0.1 * target + self.shift
            hidden.append(x.unflatten(0, (rows, -1)))
        return [x.view(shape).to(dtype), hidden]


class Scaled(nn.Module):
    """Gives a tensor without rows, and one that is a number, beside its tokens; some of its weights are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.scale, self.bias = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.tensor(0.3))
        self.blocks[1].requires_grad_(False)
        self.blocks[2].linear.bias.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x, self.scale.exp(), self.bias * 2


class Prompt(nn.Module):
    """Gives only what it learned, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LONGEST, WIDTH))

    def forward(self, x):
        return self.table[: x.shape[1]]


class Place(nn.Module):
    """Depends on where in the batch a sample is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) * torch.arange(1, x.shape[0] + 1, device=x.device)[:, None, None] / 5


class First(Place):
    """All samples depend on the first, which depends on none."""

    def forward(self, x):
        return self.linear(x - 0.5 * x[:1])


class Experts(nn.Module):
    """Each token goes to one of some experts; one that no token goes to has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        scores, chosen = self.route(x).softmax(-1).max(-1, keepdim=True)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            taken = (chosen == number).squeeze(-1)
            if taken.any():
                total[taken] = total[taken] + expert(x[taken]) * scores[taken]
        return x + total


class Residual(nn.Sequential):
    """A Sequential with a forward of its own."""

    def forward(self, x):
        return x + super().forward(x)


class Temperature(nn.Module):
    """A whole-batch head: the similarities of all pairs, with a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.turn = nn.Parameter(torch.tensor(1.5)), nn.Linear(WIDTH, WIDTH)

    def forward(self, a, b):
        return F.normalize(self.turn(a), dim=-1) @ F.normalize(b, dim=-1).T * self.scale.exp()


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return torch.tanh(x.add_(self.bias)) * 0.9


if triton is not None:

    @triton.jit
    def _negate(source, target, count, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + offsets, -tl.load(source + offsets, mask=offsets < count), mask=offsets < count)


class Negate(torch.autograd.Function):
    """A custom kernel, which takes addresses: a Triton kernel on a GPU, a copy through pointers on a CPU."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        result = torch.empty_like(x)
        if x.is_cuda:
            _negate[(triton.cdiv(x.numel(), 256),)](x, result, x.numel(), BLOCK=256)
            return result
        ctypes.memmove(result.data_ptr(), x.data_ptr(), x.numel() * x.element_size())
        return result.neg_()

    @staticmethod
    def backward(ctx, grad):
        return Negate.apply(grad)


class KernelBlock(Block):
    def forward(self, x):
        return x - Negate.apply(super().forward(x))


class Kernel(nn.Module):
    """Blocks with a custom kernel, which fake tensors must not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KernelBlock(WIDTH) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def in_place() -> nn.Module:
    """Layers that write over their input, the first and the last among them."""
    return nn.Sequential(
        nn.ELU(inplace=True),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(inplace=True),
        nn.Linear(WIDTH, WIDTH),
        *(Shift(), Shift(), Shift()),
    )


def frozen() -> nn.Module:
    return Tower(WIDTH, WIDTH, 2).requires_grad_(False)


def spectral() -> nn.Module:
    """Has buffers that every forward pass changes."""
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(*(norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)))


def evaluated() -> nn.Module:
    """A frozen module in evaluation mode, where neither batch normalisation nor dropout couples or draws."""
    layers = nn.Sequential(
        nn.Conv1d(WIDTH, WIDTH, 1), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Conv1d(WIDTH, WIDTH, 1)
    )
    return layers.requires_grad_(False).eval()


def convolutions() -> nn.Module:
    return nn.Sequential(*(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2)), nn.Tanh())


def encoder() -> nn.Module:
    """PyTorch's own, which looks at its mask."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def plain_call(handle, x, batch):
    return handle(x)


def masked_call(handle, x, batch):
    position = torch.arange(x.shape[1], device=x.device)[None, :, None].to(x.dtype).expand(x.shape[0], x.shape[1], 1)
    return handle(x, mask=mask_of(batch), position=position / LONGEST)


def several_call(handle, x, batch):
    out = handle(x)
    early, _, pooled = out["pairs"]
    return out["tokens"] + early / out["two"] + pooled.unsqueeze(1)


def optional_call(handle, x, batch):
    return handle(input=x, scale=0.7)


def given_call(handle, x, batch):
    return handle(x, mask_of(batch)) + handle(x)


def channels_call(handle, x, batch):
    return handle(x.transpose(1, 2)).transpose(1, 2)


def recurrent_call(handle, x, batch):
    out, last = handle(x)
    return out + last[0].unsqueeze(1)


def encoder_call(handle, x, batch):
    return handle(x, src_key_padding_mask=~mask_of(batch))


def lookup_call(handle, x, batch):
    return handle((batch["ids"] + x.argmax(-1)) % VOCABULARY) + x


def shaped_call(handle, x, batch):
    last, hidden = handle(x)
    return last + hidden[0]


def scaled_call(handle, x, batch):
    x, scale, bias = handle(x)
    return x * scale + bias


def direct_call(handle, x, batch):
    """A module that writes over its input is given a part of the batch."""
    return x + handle(batch["z"])


def prompt_call(handle, x, batch):
    return x + handle(x)


def unused_call(handle, x, batch):
    """A call that nothing uses, one that is used without a gradient, and one that is used."""
    handle(x * 2)
    with torch.no_grad():
        target = handle(x)
    return handle(x) + target


def written_call(handle, x, batch):
    """Code between calls that writes over what it works on."""
    y = handle(x) * 2
    z = y + 1
    y.masked_fill_(~mask_of(batch).unsqueeze(-1), 0.2)
    return F.relu(y, inplace=True) + z


def itself_call(handle, x, batch):
    return handle(handle(x) * 0.5)


def mask_of(batch):
    """Which tokens are no padding."""
    return torch.arange(batch["x"].shape[1], device=batch["x"].device) < batch["lengths"].unsqueeze(1)


Apply = Callable[[ModuleHandle, torch.Tensor, dict], torch.Tensor]

# The kinds, each with how it is made and how it is called.
KINDS: dict[str, tuple[Callable[[], nn.Module], Apply]] = {
    "sequential": (lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Tanh()), plain_call),
    "in-place": (in_place, plain_call),
    "tower": (lambda: Tower(WIDTH, WIDTH, 3), plain_call),
    "itself": (lambda: Tower(WIDTH, WIDTH, 2), itself_call),
    "masked": (Masked, masked_call),
    "table": (Table, plain_call),
    "bare table": (BareTable, plain_call),
    "flat": (Flat, plain_call),
    "second": (Second, plain_call),
    "several": (Several, several_call),
    "normal": (Normal, plain_call),
    "normals": (Normals, plain_call),
    "lazy": (Lazy, plain_call),
    "optional": (Optional, optional_call),
    "given": (Optional, given_call),
    "residual": (lambda: Residual(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), plain_call),
    "convolution": (convolutions, channels_call),
    "recurrent": (lambda: nn.GRU(WIDTH, WIDTH, batch_first=True), recurrent_call),
    "encoder": (encoder, encoder_call),
    "lookup": (lambda: nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), lookup_call),
    "frozen": (frozen, plain_call),
    "evaluated": (evaluated, channels_call),
    "shaped": (Shaped, shaped_call),
    "scaled": (Scaled, scaled_call),
    "prompt": (Prompt, prompt_call),
    "place": (Place, plain_call),
    "first": (First, plain_call),
    "experts": (Experts, plain_call),
    "bare": (lambda: nn.Sequential(nn.Tanh(), nn.Softsign()), plain_call),
    "unused": (lambda: Tower(WIDTH, WIDTH, 2), unused_call),
    "written": (lambda: Tower(WIDTH, WIDTH, 2), written_call),
}
STILL = ("frozen", "evaluated", "bare")  # nothing in them trains
# What a second call of the same module in a step would see changed, so they stand in no random workload.
ALONE: dict[str, tuple[Callable[[], nn.Module], Apply]] = {
    "direct": (in_place, direct_call),
    "kernel": (Kernel, plain_call),
    "spectral": (spectral, plain_call),
}
JOINS = ("add", "join", "normalise", "mask", "scale")
LOSSES = ("contrast", "head", "tokens", "samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tasks, a function from a number to a batch of each, and handles of their modules in the order of their first
    calls. Without handles, tasks are recorded to find them, which takes longer than a step."""

    tasks: list[TaskDefinition]
    batches: Callable[[int], dict]
    handles: Mapping[str, ModuleHandle] | None = None
    kinds: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    ties: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """What a random task does: calls of (module, where its input comes from, glue), and a loss."""

    name: str
    batch_size: int
    calls: tuple[tuple[str, int, str], ...]
    loss: str
    detaches: bool
    weight: float


def random_workload(seed: int, dtype: torch.dtype = torch.float64, weights: int | None = None) -> Workload:
    """One to four tasks over two to five modules; seeds one after the other go through all kinds."""
    choose = random.Random(seed)
    deck = list(KINDS)
    random.Random(7).shuffle(deck)
    count = choose.randint(2, 5)
    kinds = [deck[(2 * seed + number) % len(deck)] if number < 2 else choose.choice(deck) for number in range(count)]
    if all(kind in STILL for kind in kinds):
        kinds.append("tower")
    names = [f"{kind.replace(' ', '_')}{number}" for number, kind in enumerate(kinds)]
    training = [name for name, kind in zip(names, kinds, strict=True) if kind not in STILL]
    recipes = []
    for number in range(choose.randint(1, 4)):
        calls: list[tuple[str, int, str]] = []
        # The first task calls every module, so that each is there; the others some, maybe twice.
        called = choose.choices(names, k=choose.randint(1, 3))
        if number == 0:
            called = sorted(choose.sample(names, len(names)), key=lambda name: name == training[0])
        for name in called:
            calls.append((name, choose.randint(max(0, len(calls) - 2), len(calls)), choose.choice(JOINS)))
        recipes.append(
            _Recipe(
                name=f"task{number}",
                batch_size=choose.choice((2, 3, 4, 5, 5, 6, 7, 7, 8, 9) + (1,) * bool(number)),
                calls=tuple(calls),
                loss=choose.choice(LOSSES),
                detaches=choose.random() < 0.3,
                weight=choose.choice((0.25, 0.5, 1.0, 2.0)),
            )
        )
    return build_workload(seed, kinds, names, recipes, choose.random() < 0.4, dtype, weights)


def one_kind(kind: str, loss: str = "tokens", batch_size: int = 5, dtype: torch.dtype = torch.float64) -> Workload:
    """A task with a trainable tower before and behind a module of one kind."""
    kinds = ["sequential", kind, "sequential"]
    names = ["before", "middle", "behind"]
    calls = (("before", 0, "add"), ("middle", 1, "add"), ("behind", 2, "normalise"))
    recipe = _Recipe(name="alone", batch_size=batch_size, calls=calls, loss=loss, detaches=False, weight=0.5)
    return build_workload(1, kinds, names, [recipe], False, dtype, None)


def build_workload(
    seed: int,
    kinds: list[str],
    names: list[str],
    recipes: list[_Recipe],
    ties: bool,
    dtype: torch.dtype,
    weights: int | None,
) -> Workload:
    torch.manual_seed(1000 + seed if weights is None else weights)
    modules = {name: (KINDS | ALONE)[kind][0]() for name, kind in zip(names, kinds, strict=True)}
    head = Temperature()
    if ties:
        _tie(list(modules.values()))
    handles = {name: module(name, built.to(dtype)) for name, built in modules.items()}
    applies = {name: (KINDS | ALONE)[kind][1] for name, kind in zip(names, kinds, strict=True)}
    head_handle = module("head", head.to(dtype), whole_batch=True)
    tasks = [_task(recipe, handles, applies, head_handle) for recipe in recipes]

    def batches(step: int) -> dict:
        return {
            recipe.name: _batch(1000 * seed + 10 * step + number, recipe.batch_size, dtype)
            for number, recipe in enumerate(recipes)
        }

    called: list[ModuleHandle] = []
    for recipe in recipes:
        called += [handles[name] for name, _, _ in recipe.calls]
        called += [head_handle] if recipe.loss == "head" else []
    losses = tuple(recipe.loss for recipe in recipes)
    return Workload(
        tasks=tasks, batches=batches, handles=by_name(*called), kinds=tuple(kinds), losses=losses, ties=ties
    )


def by_name(*handles: ModuleHandle) -> dict[str, ModuleHandle]:
    return {handle.name: handle for handle in handles}


def _tie(modules: list[nn.Module]) -> None:
    """The first square weight of one module stands for that of all others, as far as they train."""
    square = []
    for inner in modules:
        linears = [part for part in inner.modules() if isinstance(part, nn.Linear)]
        square += [part for part in linears if part.weight.shape == (WIDTH, WIDTH)][:1]
    first, *rest = [part for part in square if part.weight.requires_grad] or [None]
    for part in rest:
        part.weight = first.weight


def _batch(seed: int, rows: int, dtype: torch.dtype) -> dict:
    """Tokens with padding; how long they are changes from step to step, how they are padded from row to row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 2 + int(torch.randint(LONGEST - 1, (1,), generator=generator))
    return {
        "x": torch.randn(rows, tokens, WIDTH, generator=generator, dtype=dtype),
        "y": torch.randn(rows, tokens, WIDTH, generator=generator, dtype=dtype),
        "z": torch.randn(rows, tokens, WIDTH, generator=generator, dtype=dtype),
        "ids": torch.randint(VOCABULARY, (rows, tokens), generator=generator),
        "lengths": torch.randint(1, tokens + 1, (rows,), generator=generator),
        "scale": torch.rand(WIDTH, generator=generator, dtype=dtype),
        "note": "no tensor",
    }


def _task(recipe: _Recipe, handles: dict, applies: dict, head: ModuleHandle) -> TaskDefinition:
    def function(batch):
        values = [batch["x"]]
        for name, source, glue in recipe.calls:
            x = _glued(glue, values[source], values[0], batch)
            values.append(applies[name](handles[name], x, batch))
        before_last = values[-2].detach() if recipe.detaches else values[-2]
        return _loss(recipe.loss, values[-1], before_last, batch, head)

    return task(
        name=recipe.name,
        batch_size=recipe.batch_size,
        weight=recipe.weight,
        per_sample_mean=recipe.loss == "samples",
    )(function)


def _glued(glue: str, x, first, batch):
    """Code between calls, row by row."""
    if glue == "add":
        return x + batch["y"]
    if glue == "join":
        return torch.cat([x, first], dim=-1).unflatten(-1, (2, WIDTH)).mean(-2)
    if glue == "normalise":
        return F.layer_norm(x, (WIDTH,))
    if glue == "mask":
        return torch.where(mask_of(batch).unsqueeze(-1), x, 0.1)
    return x * batch["scale"]


def _loss(kind: str, x, x_before, batch, head):
    mask = mask_of(batch).unsqueeze(-1).to(x.dtype)
    a, b = ((tokens * mask).sum(1) / mask.sum(1) for tokens in (x, x_before))
    if kind == "contrast":
        scores = F.normalize(a, dim=-1) @ F.normalize(b + batch["y"][:, 0], dim=-1).T * 5
        return F.cross_entropy(scores, torch.arange(scores.shape[0], device=scores.device))
    if kind == "head":
        scores = head(a, b + batch["y"][:, 0])
        labels = torch.arange(scores.shape[0], device=scores.device)
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2 + x.square().mean()
    losses = ((x - batch["y"]) ** 2).mean(-1) + 0.1 * x_before.square().mean(-1)
    if kind == "tokens":
        return mean((losses * mask.squeeze(-1)).sum(), mask.sum())
    return losses.mean(1).mean()
