"""Parameters scattered from rank 0 to the ranks that hold them, resharded for another plan, and gathered again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from spindle.graph import MetaGraph
from spindle.program import Program, Sharding, Slice, keep_unused, weight_sharding
from spindle.run.resharding import TensorSpec, reshard
from spindle.run.world import World


class Weights:
    """All parameters of a workload, and which rank holds which slice of each during training.

    When gathered, every rank holds every parameter. When scattered, each rank holds the slices of its slots, and the
    rest takes no memory. `split_dims` has, by position, the dimension along which a tensor-parallel group splits a
    parameter.
    """

    def __init__(
        self,
        program: Program,
        graph: MetaGraph,
        parameters: Sequence[nn.Parameter],
        world: World,
        split_dims: Mapping[int, int] | None = None,
    ) -> None:
        self.parameters, self.world = parameters, world
        self.shapes = [parameter.shape for parameter in parameters]
        self.sharding = weight_sharding(program, graph, self.shapes, split_dims)
        # by name, including those of earlier plans that this one does not use
        names = [parameter.name for parameter in graph.parameters]
        self._parameters = dict(zip(names, parameters, strict=True))
        self._wholes = {name: Slice.whole(shape) for name, shape in zip(names, self.shapes, strict=True)}
        self._unused: Sharding = {}

    @property
    def _scattered(self) -> Sharding:
        return {**self._unused, **self.sharding}

    @property
    def held(self) -> dict[str, tuple[nn.Parameter, Mapping[int, Slice]]]:
        """Scattered parameters by name, including those of earlier plans, each with what every rank holds of it."""
        return {name: (self._parameters[name], slices) for name, slices in self._scattered.items()}

    def scatter_parameters(self) -> None:
        """Give the ranks that hold a parameter rank 0's value of it, and free it on all others. Parameters of layers
        that no task runs are unchanged."""
        self._reshard(self._on_rank_0(self.sharding), self.sharding)

    def take_over(self, old: Weights) -> None:
        """Send parameters from the ranks that hold them under another plan to those that hold them under this one.

        Parameters that this plan does not use stay with one rank, in host memory, which no plan counts.
        """
        self._parameters = {**old._parameters, **self._parameters}
        self._wholes = {**old._wholes, **self._wholes}
        before = old._scattered
        after = keep_unused(self.sharding, before)
        self._unused = {name: slices for name, slices in after.items() if name not in self.sharding}
        # a parameter that no earlier plan used is whole on every rank, and rank 0's value counts
        self._reshard({**self._on_rank_0(self.sharding), **before}, after)

    def gather_parameters(self) -> None:
        """Give every rank every parameter, to evaluate or to train on."""
        before, self._unused = self._scattered, {}
        everywhere = {name: dict.fromkeys(range(self.world.size), self._wholes[name]) for name in before}
        self._reshard(before, everywhere)

    def _on_rank_0(self, names: Sharding) -> Sharding:
        return {name: {0: self._wholes[name]} for name in names}

    def _reshard(self, old: Sharding, new: Sharding) -> None:
        tensors = {name: self._parameters[name].data for name in new}
        specs = {name: TensorSpec(self._parameters[name].dtype, self.world.device) for name in new}
        for name, value in reshard(self.world, old, new, tensors, specs):
            del tensors[name]
            parameter = self._parameters[name]
            if value is None:
                parameter.data, parameter.grad = torch.empty(0, dtype=parameter.dtype), None
                continue
            value = value.to("cpu" if name in self._unused else self.world.device)
            # if shape and device stay the same, values go into the old memory, to which optimizers and CUDA graphs
            # refer
            if parameter.shape != value.shape:
                parameter.data, parameter.grad = value, None
            elif parameter.device != value.device:
                parameter.data = value
            elif parameter.data_ptr() != value.data_ptr():
                parameter.data.copy_(value)

    @contextmanager
    def in_shape(self) -> Iterator[None]:
        """A context in which parameters that this rank does not hold whole have their whole shapes, without values or
        memory."""
        absent = [
            (parameter, self._wholes[name].shape, parameter.data)
            for name in self._scattered
            if (parameter := self._parameters[name]).shape != self._wholes[name].shape
        ]
        for parameter, shape, _ in absent:
            # a single element, of which every element of the whole shape is a view
            parameter.data = torch.zeros((), dtype=parameter.dtype, device=self.world.device).expand(shape)
        try:
            yield
        finally:
            for parameter, _, data in absent:
                parameter.data = data
