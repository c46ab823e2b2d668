"""A captured slot: its CUDA graphs with the tensors that they read and write, and functions on such tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from spindle.errors import TrainingError
from spindle.models import host_random_state
from spindle.run.backward_split import WeightPart
from spindle.run.op_code import LossCode
from spindle.run.pytrees import leaves_of, takes_gradient
from spindle.run.rank_program import RankSlot
from spindle.run.step import Piece

InputsByCall = dict[str, Any]  # a slot's inputs by the calls that produce them
_ROUNDING = 0.05  # the largest rounding error relative to a tensor's norm, in bfloat16


@dataclass(slots=True)
class SlotOutput:
    """The results of a slot's forward pass: its pieces, and its output (a loss, or a pytree of tensors)."""

    pieces: list[Piece]
    outputs: Any


@dataclass(frozen=True, slots=True)
class Chunk:
    """Layers whose backward runs as one: their outputs, and the leaves that get gradients."""

    outputs: list[Any]
    inputs: list[torch.Tensor]
    parameters: list[nn.Parameter]


@dataclass(slots=True)
class CapturedSlot:
    """A captured slot. Backward graphs are by the first layer of their chunk."""

    forward: torch.cuda.CUDAGraph | None  # None: it is part of the step's graph
    compute: Callable[[InputsByCall], SlotOutput] | None  # runs forward again; until its backward is captured
    inputs: InputsByCall
    output: SlotOutput  # with its autograd graph until then
    generators: dict[int, torch.Generator]  # by layer that draws random numbers
    backward: dict[int, CapturedBackward] = field(default_factory=dict)
    # Weight gradients with graphs of their own.
    weights: dict[int, CapturedBackward] = field(default_factory=dict)
    parts: dict[int, list[WeightPart]] = field(default_factory=dict)  # kept until the capturing step is finished


@dataclass(slots=True)
class CapturedBackward:
    """The backward pass of a chunk of a captured slot."""

    graph: torch.cuda.CUDAGraph | None  # None: nothing needs a gradient
    gradients: list[torch.Tensor | None]  # of the outputs, if other slots compute them
    written: list[tuple[nn.Parameter, bool]]  # and whether this pass is the first to write its gradient


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a capture failed."""

    reason: str
    is_out_of_memory: bool


def failure_of(error: Exception) -> Failure:
    cause = error.__context__ or error  # ending a failed capture raises, too
    is_out_of_memory = isinstance(error, torch.OutOfMemoryError) or isinstance(cause, torch.OutOfMemoryError)
    return Failure((str(cause).splitlines() or [type(cause).__name__])[0], is_out_of_memory)


def copy_gradients(slot: RankSlot, backward: CapturedBackward, gradients: Sequence[torch.Tensor | None]) -> None:
    """Copy the gradients of a slot's outputs to where its backward reads them."""
    for target, gradient in zip(backward.gradients, gradients, strict=True):
        if (target is None) != (gradient is None):
            raise TrainingError(
                f"{slot.name} got gradients for other outputs than when it was captured in a CUDA graph; "
                "train with spindle.Trainer(cuda_graphs=False)"
            )
        copy_into(target, gradient)


def draws_same_numbers(slot: RankSlot, output: SlotOutput, compute: Callable[[], SlotOutput]) -> bool:
    """Whether a slot computes eagerly what its graph has computed: different random numbers change the output far more
    than rounding. Its buffers (running statistics) stay as the graph has left them."""
    with torch.no_grad(), buffers_restored(slot):
        eager = compute().outputs
        return all(
            float((replayed - expected).norm()) <= _ROUNDING * max(float(expected.norm()), 1e-6)
            for replayed, expected in zip(tree_leaves(output.outputs), tree_leaves(eager), strict=True)
            if isinstance(replayed, torch.Tensor) and replayed.is_floating_point()
        )


@contextmanager
def buffers_restored(slot: RankSlot) -> Iterator[None]:
    """A context after which a slot's buffers are restored, because the slot has already run in this step."""
    code = slot.code
    buffers = [] if isinstance(code, LossCode) else [buffer for layer in code.layers for buffer in layer.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)  # without a version bump


def copy_into(target: Any, value: Any) -> Any:
    """Copy values into the tensors of a pytree, unless they are there already."""
    with torch.no_grad():
        for old, new in zip(tree_leaves(target), tree_leaves(value), strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.detach().copy_(new, non_blocking=True)
    return target


def writable(leaf: Any) -> Any:
    """A leaf, or a copy of it if its elements overlap in memory, so that it can be written to."""
    if not isinstance(leaf, torch.Tensor) or 0 not in leaf.stride():
        return leaf
    return leaf.detach().clone(memory_format=torch.contiguous_format).requires_grad_(leaf.requires_grad)


def gradient_pairs(chunk: Chunk, gradients: list[torch.Tensor | None]) -> list[tuple[Any, torch.Tensor]]:
    """The outputs of a chunk that have a gradient, where its backward starts, with these gradients."""
    return [
        (leaf, gradient)
        for leaf, gradient in zip(chunk.outputs, gradients, strict=True)
        if gradient is not None and takes_gradient(leaf)
    ]


def addresses(tree: Any) -> list[int | None]:
    return [leaf.data_ptr() if isinstance(leaf, torch.Tensor) else None for leaf in leaves_of(tree)]


def storage_of(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.untyped_storage().data_ptr()


def is_shaped_like(gradient: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Whether a gradient can be a parameter's `grad` without a copy: it fills its storage, with equal strides."""
    num_bytes = gradient.numel() * gradient.element_size()
    return gradient.stride() == parameter.stride() and gradient.untyped_storage().nbytes() == num_bytes


def detached_leaf(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def host_generators() -> tuple[Any, ...]:
    """The states of the random generators on the host, which a replay would not advance."""
    return bytes(torch.get_rng_state().numpy()), host_random_state()


def is_hooked(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
