"""Layers whose modules are compiled by `torch.compile`, once for each kind of layer.

Dynamo compiles the forward of a module and keeps the result with its code, guarded by the types and shapes it saw, not
by the module: equal blocks share it. A module is compiled only inside the layers that the executor runs. While it is
recorded, or traced without values, it is the module that the user wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from spindle.errors import WorkloadError

Run = Callable[..., tuple[Any, ...]]

_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
_MAX_KINDS = 64  # of layers whose modules have the same forward; then dynamo would give up


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Refuse options of `torch.compile` that do not go with CUDA graphs of the executor."""
    if options.get("mode") in _CUDA_GRAPH_MODES:
        raise WorkloadError(
            f"{where}: mode={options['mode']!r} captures CUDA graphs of its own, which cannot be part of Spindle's; "
            'take mode="max-autotune-no-cudagraphs", or leave it out'
        )
    unknown = sorted(set(options) - {"fullgraph", "dynamic", "backend", "mode", "options"})
    if unknown:
        raise WorkloadError(f"{where}: torch.compile takes no argument {unknown[0]!r}")


def compiled(run: Run, modules: Sequence[nn.Module], options: Mapping[str, Any]) -> Run:
    """A layer in which these modules are compiled."""
    import torch._dynamo  # not before it is needed: it takes a second

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_KINDS)
    calls = [(module, torch.compile(module._call_impl, **options)) for module in modules]

    def run_compiled(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        with _calling(calls):
            return run(*args, **kwargs)

    return run_compiled


@contextmanager
def _calling(calls: Sequence[tuple[nn.Module, Any]]) -> Iterator[None]:
    before = [module._compiled_call_impl for module, _ in calls]
    for module, call in calls:
        module._compiled_call_impl = call
    try:
        yield
    finally:
        for (module, _), call in zip(calls, before, strict=True):
            module._compiled_call_impl = call
