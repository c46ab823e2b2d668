"""Layers whose modules are compiled by `torch.compile`, once for each kind of layer.

Dynamo stores what it has compiled with the code of a module's forward, guarded by types and shapes, not by the module,
so equal blocks share it. A module is compiled only inside the layers that the executor runs; it is recorded and traced
uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from spindle.errors import WorkloadError

Run = Callable[..., tuple[Any, ...]]

_CALL = "_compiled_call_impl"  # where `nn.Module` looks for a compiled forward
_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
_MAX_KINDS = 256  # compiled layers with the same code; dynamo falls back to eager beyond its limit


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Refuse options of `torch.compile` that do not go with CUDA graphs of the executor."""
    inductor = options.get("options") or {}
    own_graphs = [
        *(f"mode={mode!r}" for mode in [options.get("mode")] if mode in _CUDA_GRAPH_MODES),
        *(f"backend={backend!r}" for backend in [options.get("backend")] if backend == "cudagraphs"),
        *(f"options={{{name!r}: True}}" for name in ["triton.cudagraphs"] if inductor.get(name)),
    ]
    if own_graphs:
        raise WorkloadError(
            f"{where}: {own_graphs[0]} captures CUDA graphs of its own, which cannot be part of Spindle's; take "
            'mode="max-autotune-no-cudagraphs", or leave it out'
        )
    unknown = sorted(set(options) - {"fullgraph", "dynamic", "backend", "mode", "options"})
    if unknown:
        raise WorkloadError(f"{where}: torch.compile takes no argument {unknown[0]!r}")


def compiled(run: Run, modules: Sequence[nn.Module], options: Mapping[str, Any]) -> Run:
    """A layer in which these modules are compiled."""
    import torch._dynamo  # imported late: it takes a second

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_KINDS)
    calls = [(module, torch.compile(_frame_of(module), **options)) for module in modules]

    def run_compiled(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        with _calling(calls):
            return run(*args, **kwargs)

    return run_compiled


def _frame_of(module: nn.Module) -> Callable[..., Any]:
    """The function for dynamo to compile. Dynamo skips frames of torch's own code, so a module of torch's needs a frame
    around it."""
    from torch._dynamo import external_utils, trace_rules

    if trace_rules.check(module.forward):
        return cast(Callable[..., Any], external_utils.wrap_inline(module._call_impl))
    return module._call_impl


@contextmanager
def _calling(calls: Sequence[tuple[nn.Module, Any]]) -> Iterator[None]:
    before = [vars(module).get(_CALL, _CALL) for module, _ in calls]  # a user may have compiled it
    for module, call in calls:
        vars(module)[_CALL] = call
    try:
        yield
    finally:
        for (module, _), call in zip(calls, before, strict=True):
            if call is _CALL:
                del vars(module)[_CALL]
            else:
                vars(module)[_CALL] = call
