"""The memory in which CUDA graphs leave gradients: buckets of reductions, or the memory of the graphs themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spindle.run.backward_split import WeightPart
from spindle.run.captured_slot import CapturedBackward, Chunk, is_shaped_like, storage_of
from spindle.run.gradients import Gradients
from spindle.run.lanes import release_behind_current_stream

GradBuffers = dict[int, torch.Tensor | None]  # by id of the parameter; None: where autograd allocates its gradient


class GraphGradients:
    """Where the captured backward passes of one set of graphs write gradients.

    A pass is captured in the order of the step, so whether it is the first to write a parameter's gradient, or adds to
    it, is known at capture.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._written: set[int] = set()  # ids of parameters whose gradients captured passes have written

    def grad_buffers(self, parameters: Sequence[nn.Parameter]) -> GradBuffers:
        """Where the gradients of a chunk's parameters are written. A gradient that only this chunk writes may stay in
        the graph's memory, without a copy; one that is synchronised, or summed over several chunks, may not."""
        return {
            id(parameter): self._gradients.grad_buffer(parameter)
            if self._gradients.has_grad_buffer(parameter) or id(parameter) in self._written
            else None
            for parameter in parameters
        }

    def differentiate(
        self, chunk: Chunk, pairs: list[tuple[Any, torch.Tensor]], buffers: GradBuffers
    ) -> tuple[Sequence[torch.Tensor | None], list[tuple[nn.Parameter, bool]]]:
        """Compute the gradients of a chunk; those of parameters are written to their buffers. Returns the gradients of
        inputs, and the parameters with a gradient, each with whether this is the first write to it."""
        computed: Sequence[torch.Tensor | None] = torch.autograd.grad(
            [leaf for leaf, _ in pairs],
            [*chunk.inputs, *chunk.parameters],
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
        of_inputs, of_parameters = computed[: len(chunk.inputs)], computed[len(chunk.inputs) :]
        others = [*of_inputs, *(gradient for _, gradient in pairs)]
        return of_inputs, self._write(chunk.parameters, of_parameters, others, buffers)

    def write_weight_gradients(
        self, parts: Sequence[WeightPart], parameters: list[nn.Parameter]
    ) -> tuple[list[tuple[nn.Parameter, bool]], GradBuffers]:
        """Compute the weight gradients of a chunk in their buffers. Returns the parameters with a gradient, like
        `differentiate`, and the buffers."""
        buffers = self.grad_buffers(parameters)
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for part in reversed(parts):
            for number, gradient in enumerate(part.gradients(parameters)):
                total = sums[number]
                sums[number] = gradient if total is None or gradient is None else total + gradient
                if gradient is None:
                    sums[number] = total
        others = [gradient for part in parts for gradient in part.sources]
        return self._write(parameters, sums, others, buffers), buffers

    def _write(
        self,
        parameters: Sequence[nn.Parameter],
        computed: Sequence[torch.Tensor | None],
        others: Sequence[torch.Tensor | None],
        buffers: GradBuffers,
    ) -> list[tuple[nn.Parameter, bool]]:
        """Write the gradients of parameters to their buffers. `others` are further tensors that are in use."""
        written = []
        # Autograd may return one tensor for several gradients, or an output's gradient unchanged. Such gradients are
        # copied, because their memory belongs to another tensor.
        storages = Counter(storage_of(tensor) for tensor in [*computed, *others])
        for parameter, gradient in zip(parameters, computed, strict=True):
            if gradient is None:
                continue
            is_first, buffer = id(parameter) not in self._written, buffers[id(parameter)]
            if buffer is None and storages[storage_of(gradient)] == 1 and is_shaped_like(gradient, parameter):
                buffers[id(parameter)] = gradient
            elif buffer is None:
                buffers[id(parameter)] = torch.empty_like(parameter).copy_(gradient)
            else:
                buffer.copy_(gradient) if is_first else buffer.add_(gradient)
            written.append((parameter, is_first))
        return written

    def attach(
        self,
        chunk: Chunk,
        of_inputs: Sequence[torch.Tensor | None],
        written: list[tuple[nn.Parameter, bool]],
        buffers: GradBuffers,
    ) -> None:
        self.attach_parameters(written, buffers)
        for leaf, gradient in zip(chunk.inputs, of_inputs, strict=True):
            leaf.grad = gradient

    def attach_parameters(self, written: list[tuple[nn.Parameter, bool]], buffers: GradBuffers) -> None:
        for parameter, _ in written:
            self._gradients.use_graph_memory(parameter, buffers[id(parameter)])
        self._written.update(id(parameter) for parameter, _ in written)

    def set_grads(self, backward: CapturedBackward) -> bool:
        """Set `grad` to what a pass has written. Returns whether that launched additions of earlier gradients."""
        has_additions = False
        for parameter, is_first in backward.written:
            buffer = self._gradients.grad_buffer(parameter)
            if is_first and parameter.grad is not None and parameter.grad.data_ptr() != buffer.data_ptr():
                buffer += parameter.grad  # from a slot that ran eagerly, or copied before this micro-step
                has_additions = True
                if buffer.is_cuda:
                    release_behind_current_stream(parameter.grad)
            parameter.grad = buffer
        return has_additions
