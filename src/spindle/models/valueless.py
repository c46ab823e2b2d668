"""What does code do on tensors that have no values? Found by running it on stand-ins: shapes, types and devices are
right, nothing is computed, and no weights need to be in memory. Code that looks at values is run on zeros instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map


def without_values(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What a module gives, as tensors without values; code that looks at values runs on zeros."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = tree_map(lambda leaf: stand_in(mode, leaf), (args, kwargs))
    with Swapped(module, mode, device_of((args, kwargs))) as swapped, as_when_compiling():
        return run_opaque(lambda a, k: module(*a, **k), given, mode, swapped)


def stand_in(mode: FakeTensorMode, leaf: Any) -> Any:
    """A tensor of the same shape without values, dense."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with mode:
        return torch.empty(tuple(map(int, leaf.shape)), dtype=leaf.dtype, device=leaf.device)


def device_of(nest: Any) -> torch.device:
    return next((leaf.device for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)), torch.device("cpu"))


class Swapped:
    """Inside, parameters and buffers of a module have no values. Modules built without memory (on `meta`) count as on
    the given device."""

    def __init__(self, module: nn.Module, mode: FakeTensorMode, device: torch.device) -> None:
        self._places: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        self.owners: dict[int, tuple[nn.Module, str]] = {}  # by the id of the real tensor, and of what stands for it
        made: dict[int, torch.Tensor] = {}
        for one in module.modules():
            for group in (one._parameters, one._buffers):
                for name, tensor in group.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        with mode:
                            empty = torch.empty_strided(
                                tensor.shape,
                                tensor.stride(),
                                dtype=tensor.dtype,
                                device=device if tensor.is_meta else tensor.device,
                            )
                        is_parameter = isinstance(tensor, nn.Parameter)
                        made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                        self.owners[id(tensor)] = self.owners[id(made[id(tensor)])] = (one, name)
                    self._places.append((group, name, tensor, made[id(tensor)]))

    def __enter__(self) -> Swapped:
        for group, name, _, empty in self._places:
            group[name] = empty
        return self

    def __exit__(self, *error: Any) -> None:
        for group, name, tensor, _ in self._places:
            group[name] = tensor

    @contextmanager
    def undone(self) -> Iterator[None]:
        now = [group.get(name) for group, name, _, _ in self._places]
        self.__exit__()
        try:
            yield
        finally:
            for (group, name, _, _), empty in zip(self._places, now, strict=True):
                group[name] = empty


def run_opaque(run: Callable[[Any, Any], Any], given: Any, mode: FakeTensorMode, swapped: Swapped) -> Any:
    """Runs code on tensors without values; on zeros where it looks at values."""
    try:
        with _disable_current_modes(), mode:
            return run(*given)
    except Exception as error:
        with_zeros = tree_map(_zeros, given)
        try:
            devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
            with _disable_current_modes(), swapped.undone(), torch.no_grad(), torch.random.fork_rng(devices):
                result = run(*with_zeros)
        except Exception:
            raise error from None
        return tree_map(lambda leaf: stand_in(mode, leaf), result)


def _zeros(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with _disable_current_modes():
        return torch.zeros(tuple(leaf.shape), dtype=leaf.dtype, device=leaf.device)


@contextmanager
def as_when_compiling() -> Iterator[None]:
    """Models that keep tensors in caches outside of themselves, or look at values to save work, leave that when they
    are compiled. They must here, too: what they see has no values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        with _scripted_functions_in_python(), _without_needless_masks():
            yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def _scripted_functions_in_python() -> Iterator[None]:
    """Functions under `torch.jit.script` run as the Python code that they were made from, as `torch.compile` runs them:
    their fused kernels would read the memory that tensors without values do not have."""
    scripted: Any = torch.jit.ScriptFunction
    call = scripted.__call__

    def call_in_python(function: Any, *args: Any, **kwargs: Any) -> Any:
        python = getattr(function, "_torchdynamo_inline", None)
        return call(function, *args, **kwargs) if python is None else python(*args, **kwargs)

    scripted.__call__ = call_in_python
    try:
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            yield
    finally:
        scripted.__call__ = call


@contextmanager
def _without_needless_masks() -> Iterator[None]:
    """While compiling, transformers before 5.18 makes an attention mask even where the caller gave none. Attention with
    a mask runs without flash kernels, at up to twice the time, so a mask that is not there is not looked at."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    is_tracing = getattr(masking, "is_tracing", None)
    if is_tracing is None:
        yield
        return
    masking.is_tracing = lambda tensor=None: tensor is not None and is_tracing(tensor)
    try:
        yield
    finally:
        masking.is_tracing = is_tracing


@contextmanager
def without_caches(module: nn.Module) -> Iterator[None]:
    """Decoders keep keys and values for generation unless told otherwise, which training does not use. And what is
    recomputed in backward is recomputed by the block itself, when it runs."""
    changed: list[tuple[Any, str]] = []
    for one in module.modules():
        config = getattr(one, "config", None)
        for holder, name in ((config, "use_cache"), (one, "gradient_checkpointing")):
            if holder is not None and getattr(holder, name, None) is True:
                setattr(holder, name, False)
                changed.append((holder, name))
    try:
        yield
    finally:
        for holder, name in changed:
            setattr(holder, name, True)
