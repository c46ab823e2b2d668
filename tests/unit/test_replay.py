"""Modules whose code reads values: learnt from one batch, right for others, or refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from spindle.errors import GuardError  # noqa: E402
from spindle.models import chain_and_output, open_composite  # noqa: E402

SIZE, LENGTH = 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE, dtype=torch.float64)

    def forward(self, x, mask=None, scale=1.0):
        x = x + scale * self.linear(x).tanh()
        return x if mask is None else x * mask[..., None]


class Stack(nn.Module):
    """Three blocks, with code between them that looks at the mask."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, mask):
        whole, scale = None if mask.all() else mask, 1.0
        if self.kind == "scaled":
            scale = float(mask.sum())
        for block in self.blocks:
            if self.kind == "changed" and not mask.all():
                x = x * mask[..., None]
            if self.kind == "in place":
                x = x * 1.0
                x += int(mask.sum())
            x = block(x, whole, scale=scale)
        if self.kind == "listed" and max(x.abs().sum((1, 2)).tolist()) > 0:
            x = x + 100
        return x


class Pair(nn.Module):
    """Two towers, with code between them that looks at the mask, or at what the first returns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, Tower(kind), Tower("plain")

    def forward(self, x, mask):
        h = self.first(x, mask)
        longest = int(mask.sum(1).max())
        if self.kind == "number":
            h, longest = h
            h = h[:, :longest]
        if self.kind == "in place":
            h += longest
        if self.kind == "changed" and longest < LENGTH:
            h = h * mask[..., None]
        if self.kind == "random":
            h = nn.functional.dropout(h, 0.5, training=True)
        return self.second(h, mask[:, : h.shape[1]]).sum() + h.sum()


class Tower(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, mask):
        for block in self.blocks:
            x = block(x)
        return (x, int(mask.sum(1).max())) if self.kind == "number" else x


def batch(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(length)
    mask = torch.ones(2, LENGTH, dtype=torch.float64)
    mask[1, length:] = 0
    return torch.randn(2, LENGTH, SIZE, dtype=torch.float64), mask


def in_layers(module: nn.Module, first: tuple, then: tuple) -> torch.Tensor | None:
    """What the layers of a module give for a batch, learnt from another; None where it stays one layer."""
    chain, _ = chain_and_output(module, first, {}, values=lambda: (first, {}))
    if len(chain.layers) == 1:
        return None
    values = then
    for layer in chain.layers:
        values = layer.run(*values)
    return values[0]


@pytest.mark.parametrize("kind", ["plain", "scaled", "changed", "in place", "listed"])
@pytest.mark.parametrize(("first", "then"), [(LENGTH, LENGTH), (LENGTH, 3), (3, LENGTH), (4, 3)])
def test_a_stack_is_right_for_every_batch_or_refuses_it(kind, first, then):
    torch.manual_seed(0)
    stack = Stack(kind)
    try:
        output = in_layers(stack, batch(first), batch(then))
    except GuardError:
        assert kind == "changed"
        assert LENGTH in (first, then)
        return
    if output is None:
        assert kind == "listed"
        return
    torch.testing.assert_close(output, stack(*batch(then)), rtol=1e-12, atol=1e-12)


class Keeping(nn.Module):
    """Blocks, with code that reads values and keeps a tensor of this batch: for generation, or for the next batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(Block() for _ in range(2))
        self.last = torch.zeros(SIZE, dtype=torch.float64) if kind == "in place" else None

    def forward(self, x, mask):
        scale = float(mask.sum())
        if self.kind == "read" and self.last is not None:
            x = x + self.last
        if self.kind == "listed" and self.last is not None:
            scale += self.last.tolist()[0]
        for block in self.blocks:
            x = block(x, scale=scale)
        if self.kind == "in place":
            x = x + self.last
            self.last.add_(mask.sum())
        elif self.kind != "reset" or self.last is None:
            self.last = mask.sum(1)[:1].detach()  # "reset": by the first call only
        return x


@pytest.mark.parametrize("kind", ["written", "reset", "read", "listed", "in place"])
def test_a_tensor_that_the_next_batch_reads_keeps_a_module_whole(kind):
    torch.manual_seed(0)
    module = Keeping(kind)
    output = in_layers(module, batch(4), batch(3))
    if kind in ("written", "reset"):
        torch.testing.assert_close(output, module(*batch(3)), rtol=1e-12, atol=1e-12)
    else:
        assert output is None
        source, _ = chain_and_output(Keeping(kind), batch(4), {}, values=lambda: (batch(4), {}))
        assert len(source.layers) == 1


def opened_output(module: nn.Module, first: tuple, then: tuple) -> torch.Tensor | None:
    """What a composite gives part by part; None where it is not opened."""
    opened = open_composite(module, first, {}, lambda: (first, {}))
    if isinstance(opened, str):
        return None
    given = dict(zip((name for name in opened.inputs if name is not None), then, strict=True))
    for call in opened.calls:
        args, kwargs = call.glue.run(*(given[name] for name in call.glue.inputs))
        given[call.name] = call.module(*args, **kwargs)
        for variable, entry in (call.entries or {}).items():
            given[variable] = given[call.name][entry]
    glue = opened.output(opened.index)
    return glue.run(*(given[name] for name in glue.inputs))


@pytest.mark.parametrize("kind", ["plain", "number", "changed", "in place", "random"])
@pytest.mark.parametrize(("first", "then"), [(LENGTH, LENGTH), (LENGTH, 3), (3, LENGTH), (4, 3)])
def test_a_composite_is_right_for_every_batch_or_refuses_it(kind, first, then):
    torch.manual_seed(0)
    pair = Pair(kind)
    try:
        output = opened_output(pair, batch(first), batch(then))
    except GuardError:
        assert kind == "changed"
        assert LENGTH in (first, then)
        return
    if output is None:
        assert kind in ("number", "random")
        return
    torch.testing.assert_close(output, pair(*batch(then)), rtol=1e-12, atol=1e-12)
