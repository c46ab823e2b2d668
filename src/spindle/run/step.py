"""What one step holds on one rank, and when its instructions ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from spindle.run.side import Flow


@dataclass(slots=True)
class Piece:
    """A chunk of layers as it ran: the leaves it began with and what it gave."""

    inputs: Any
    outputs: Any


@dataclass(slots=True)
class Arrival:
    """What comes over one flow: the leaves' buffers, or nothing yet while their form is still to come."""

    flow: Flow
    tensors: list[torch.Tensor | None] | None
    requests: list[Any]


@dataclass(slots=True)
class Step:
    """What one step holds on one rank."""

    number: int
    batches: Mapping[str, Any]
    signatures: Mapping[str, int]
    check_losses: bool
    new: frozenset[str]  # tasks whose batch has a shape not seen before
    pieces: dict[int, list[Piece]] = field(default_factory=dict)  # by slot, in forward order
    inputs: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)  # by link: leaves that take gradients
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    arrivals: dict[tuple[int, bool], list[Arrival]] = field(default_factory=dict)
    sending: list[tuple[Any, torch.Tensor]] = field(default_factory=list)  # buffers must live until they are sent
    forwarded: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)  # slots whose backward is over
    done_chunks: set[int] = field(default_factory=set)
    syncs: list[tuple[int, Any, torch.Tensor, list[nn.Parameter]]] = field(default_factory=list)
    next_transfer: int = 0
    next_sync: int = 0


@dataclass(slots=True)
class Spans:
    """When this rank's instructions ran, in nanoseconds of its clock: posted, start, end by instruction number."""

    begin: int
    posted: dict[int, int] = field(default_factory=dict)
    start: dict[int, int] = field(default_factory=dict)
    end: dict[int, int] = field(default_factory=dict)
