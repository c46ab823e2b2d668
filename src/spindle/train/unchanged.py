"""Forwards that leave no traces in their modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from spindle.errors import WorkloadError
from spindle.models import ModuleSnapshot
from spindle.run import fingerprint_of


@contextmanager
def unchanged(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """A context after which attributes and buffers of modules (caches, running statistics) and the random state are
    restored. Parameters are not copied, and must not be written."""
    modules = list(modules)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    snapshot, before = ModuleSnapshot(modules), list(map(_parameters_state, modules))
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        snapshot.restore()
    for module, state in zip(modules, before, strict=True):
        if _parameters_state(module) != state:
            raise WorkloadError(
                f"the forward of {type(module).__name__} changes parameters of the module itself, and it runs several "
                "times before the first step, to be measured. Hold what a forward updates in buffers "
                "(register_buffer), which are put back: docs/training.md shows it for a momentum teacher. "
                "Trainer(ema=...) keeps an average of the weights"
            )


def _parameters_state(module: torch.nn.Module) -> tuple[int, list[int]]:
    """A digest of the values of parameters, and how often frozen ones were written: a momentum teacher that still
    equals its student is written with the values that it has. Limits (a clamp of a trained parameter, `max_norm` of an
    embedding) may write them."""
    parameters = [parameter for parameter in module.parameters() if not parameter.is_meta]
    limited = {id(each.weight) for each in module.modules() if getattr(each, "max_norm", None) is not None}
    return fingerprint_of(parameters), [
        value._version
        for value in parameters
        if not (value.requires_grad or value.is_inference() or id(value) in limited)
    ]
