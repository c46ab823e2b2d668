"""Trace a task's function with torch.fx, extended by `torch.no_grad()` and custom autograd functions. Modules are
recorded differently (`models.recording`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from spindle.errors import WorkloadError


class GradientTracer(fx.Tracer):
    """Records the effect of `torch.no_grad()`: results computed under it get no gradient. Other contexts that change
    what code computes are refused."""

    def __init__(self) -> None:
        super().__init__()
        self._outside = self._context()

    @staticmethod
    def _context() -> tuple[bool, bool, bool]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with _recorded_whole():
            return super().trace(root, concrete_args)

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        proxy = super().create_proxy(kind, target, *args, **kwargs)
        context = self._context()
        if context == self._outside or not kind.startswith("call_"):
            return proxy
        if context[1:] != self._outside[1:]:
            raise WorkloadError(
                "it switches torch.autocast on or off, which is not recorded; do it inside the forward of a module, or "
                "around the whole training"
            )
        return super().create_proxy("call_function", without_gradient, (proxy,), {})


@contextmanager
def _recorded_whole() -> Iterator[None]:
    """A context in which some functions are recorded as a single call instead of being traced into: custom autograd
    functions, which have their own backward, and functions that create a tensor of a given size."""
    inner = torch.autograd.Function.__dict__["apply"]
    makers = {name: getattr(torch, name) for name in ("ones", "zeros", "full", "empty", "rand", "randn", "eye")}

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        proxy = _first_proxy((args, kwargs))
        if proxy is None:
            return inner.__func__(cls, *args, **kwargs)

        def applied(*args: Any, **kwargs: Any) -> Any:
            return cls.apply(*args, **kwargs)

        applied.__name__ = applied.__qualname__ = f"apply_{cls.__name__}"
        applied.__module__ = cls.__module__
        return proxy.tracer.create_proxy("call_function", applied, args, kwargs)

    def making(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            proxy = _first_proxy((args, kwargs))
            if proxy is None:
                return make(*args, **kwargs)
            return proxy.tracer.create_proxy("call_function", make, args, kwargs)

        return made

    try:
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
        for name, make in makers.items():
            setattr(torch, name, making(make))
        yield
    finally:
        torch.autograd.Function.apply = inner  # type: ignore[method-assign]
        for name, make in makers.items():
            setattr(torch, name, make)


def _first_proxy(value: Any) -> fx.Proxy | None:
    proxies: list[fx.Proxy] = []
    fx.node.map_aggregate(value, lambda leaf: proxies.append(leaf) if isinstance(leaf, fx.Proxy) else None)
    return proxies[0] if proxies else None


def without_gradient(value: Any) -> Any:
    """The same values, detached."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value)
