"""The code behind an op, as the executor needs it. Whoever makes it knows tasks and modules; the executor does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spindle.models import ChainLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersCode:
    """Layers of a module. An op that begins a call has `arguments(batch, *outputs)`, over the outputs of `sources`."""

    layers: tuple[ChainLayer, ...]
    arguments: Callable[..., Any] | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCode:
    """A loss over the outputs of `sources`: a value, or with `is_mean` a total and a count to sum before dividing."""

    loss: Callable[..., Any]
    sources: tuple[str, ...]
    weight: float
    is_mean: bool
    per_sample_mean: bool


OpCode = LayersCode | LossCode
