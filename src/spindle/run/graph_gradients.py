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

Places = dict[int, torch.Tensor | None]  # of gradients, by id of the parameter; None: where autograd allocates them


class GraphGradients:
    """Where the captured backward passes of one set of graphs write gradients.

    A pass is captured in the order of the step, so whether it is the first to write a parameter's gradient, or adds to
    it, is known at capture.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._written: set[int] = set()  # ids of parameters whose gradients captured passes have written

    def places_of(self, parameters: Sequence[nn.Parameter]) -> Places:
        """Where the gradients of a chunk's parameters go. A gradient that only this chunk writes may stay in the
        graph's memory, without a copy. Others have a place in a bucket, or are summed over several chunks."""
        return {
            id(parameter): None
            if self._gradients.is_free(parameter) and id(parameter) not in self._written
            else self._gradients.place(parameter)
            for parameter in parameters
        }

    def differentiate(
        self, chunk: Chunk, pairs: list[tuple[Any, torch.Tensor]], places: Places
    ) -> tuple[Sequence[torch.Tensor | None], list[tuple[nn.Parameter, bool]]]:
        """Compute the gradients of a chunk; those of parameters are written to their places. Returns the gradients of
        inputs, and the parameters with a gradient, each with whether this is the first write to it."""
        computed: Sequence[torch.Tensor | None] = torch.autograd.grad(
            [leaf for leaf, _ in pairs],
            [*chunk.inputs, *chunk.parameters],
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
        of_inputs, of_parameters = computed[: len(chunk.inputs)], computed[len(chunk.inputs) :]
        others = [*of_inputs, *(gradient for _, gradient in pairs)]
        return of_inputs, self._write(chunk.parameters, of_parameters, others, places)

    def write_weight_gradients(
        self, parts: Sequence[WeightPart], parameters: list[nn.Parameter]
    ) -> tuple[list[tuple[nn.Parameter, bool]], Places]:
        """Compute the weight gradients of a chunk in their places. Returns the parameters with a gradient, like
        `differentiate`, and the places."""
        places = self.places_of(parameters)
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for part in reversed(parts):
            for number, gradient in enumerate(part.gradients(parameters)):
                total = sums[number]
                sums[number] = gradient if total is None or gradient is None else total + gradient
                if gradient is None:
                    sums[number] = total
        others = [gradient for part in parts for gradient in part.sources]
        return self._write(parameters, sums, others, places), places

    def _write(
        self,
        parameters: Sequence[nn.Parameter],
        computed: Sequence[torch.Tensor | None],
        others: Sequence[torch.Tensor | None],
        places: Places,
    ) -> list[tuple[nn.Parameter, bool]]:
        """Write the gradients of parameters to their places. `others` are further tensors that are in use."""
        written = []
        # Autograd may return one tensor for several gradients, or an output's gradient unchanged. Such memory has
        # another owner, so it is copied.
        storages = Counter(storage_of(tensor) for tensor in [*computed, *others])
        for parameter, gradient in zip(parameters, computed, strict=True):
            if gradient is None:
                continue
            is_first, place = id(parameter) not in self._written, places[id(parameter)]
            if place is None and storages[storage_of(gradient)] == 1 and is_shaped_like(gradient, parameter):
                places[id(parameter)] = gradient
            elif place is None:
                places[id(parameter)] = torch.empty_like(parameter).copy_(gradient)
            else:
                place.copy_(gradient) if is_first else place.add_(gradient)
            written.append((parameter, is_first))
        return written

    def attach(
        self,
        chunk: Chunk,
        of_inputs: Sequence[torch.Tensor | None],
        written: list[tuple[nn.Parameter, bool]],
        places: Places,
    ) -> None:
        self.attach_parameters(written, places)
        for leaf, gradient in zip(chunk.inputs, of_inputs, strict=True):
            leaf.grad = gradient

    def attach_parameters(self, written: list[tuple[nn.Parameter, bool]], places: Places) -> None:
        for parameter, _ in written:
            self._gradients.take(parameter, places[id(parameter)])
        self._written.update(id(parameter) for parameter, _ in written)

    def set_grads(self, known: CapturedBackward) -> bool:
        """Set `grad` to what a pass has written. Returns whether that launched additions of earlier gradients."""
        has_more = False
        for parameter, is_first in known.written:
            place = self._gradients.place(parameter)
            if is_first and parameter.grad is not None and parameter.grad.data_ptr() != place.data_ptr():
                place += parameter.grad  # from a slot that ran eagerly, or copied before this micro-step
                has_more = True
                if place.is_cuda:
                    release_behind_current_stream(parameter.grad)
            parameter.grad = place
        return has_more
