"""Run code on fake tensors: shapes, dtypes and devices are right, nothing is computed, and weights need no memory.
Code that reads tensor values is run on zeros instead.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from spindle.models.statements import ValueDependenceError

# errors of code that reads values, or whose shapes depend on them
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
# the loggers with which torch reports, with a traceback, that a function cannot run on fake tensors
_NOISY_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


def fake_mode(shape_env: ShapeEnv | None = None) -> FakeTensorMode:
    """A mode whose tensors raise when code asks for their data pointer, as launchers of Triton kernels do. By default
    that pointer is 0: the kernel would read and write there, and end the process."""
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False
    return mode


def fake_output(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The output of a module as fake tensors."""
    mode = fake_mode()
    arguments = tree_map(lambda leaf: fake_like(mode, leaf), (args, kwargs))
    with FakeWeights(module, mode, device_of((args, kwargs))) as weights, as_when_compiling(), without_caches(module):
        return run_on_fakes(lambda a, k: module(*a, **k), arguments, mode, weights)[0]


def fake_like(mode: FakeTensorMode, leaf: Any) -> Any:
    """A contiguous fake tensor of the same shape, dtype and device. Anything but a tensor is returned unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with mode:
        return torch.empty(tuple(map(int, leaf.shape)), dtype=leaf.dtype, device=leaf.device)


def device_of(nest: Any) -> torch.device:
    """The device of the first tensor in a nest, or the CPU."""
    return next((leaf.device for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)), torch.device("cpu"))


def clone_leaf(leaf: Any) -> Any:
    """A copy of a tensor. Anything else is returned unchanged."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


class FakeWeights:
    """A context in which the parameters and buffers of a module are fake tensors. Those on the `meta` device count as
    being on `device`."""

    def __init__(self, module: nn.Module, mode: FakeTensorMode, device: torch.device) -> None:
        # (the module's dict, attribute name, real tensor, fake tensor)
        self._entries: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
        self.owners: dict[int, tuple[nn.Module, str]] = {}  # by the ids of the real and of the fake tensor
        fakes: dict[int, torch.Tensor] = {}  # by the id of the real tensor: tied weights stay tied
        for submodule in module.modules():
            for tensors in (submodule._parameters, submodule._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in fakes:
                        fake = _fake_weight(tensor, mode, device)
                        fakes[id(tensor)] = fake
                        self.owners[id(tensor)] = self.owners[id(fake)] = (submodule, name)
                    self._entries.append((tensors, name, tensor, fakes[id(tensor)]))

    def __enter__(self) -> FakeWeights:
        for tensors, name, _, fake in self._entries:
            tensors[name] = fake
        return self

    def __exit__(self, *error: Any) -> None:
        for tensors, name, real, _ in self._entries:
            tensors[name] = real

    def replaced_in(self, module: nn.Module) -> list[str]:
        """The parameters and buffers of a module, by name, that the code inside has replaced by other tensors."""
        own = (module._parameters, module._buffers)
        return [
            name
            for tensors, name, _, fake in self._entries
            if any(tensors is group for group in own) and tensors.get(name) is not fake
        ]

    @contextmanager
    def real_weights(self) -> Iterator[None]:
        """Within `with fake_weights`, a context in which the real weights are back."""
        current = [tensors.get(name) for tensors, name, _, _ in self._entries]
        self.__exit__()
        try:
            yield
        finally:
            for (tensors, name, _, _), tensor in zip(self._entries, current, strict=True):
                tensors[name] = tensor


class RandomWeights:
    """A context in which some parameters of a module, on the `meta` device, have random values on the CPU."""

    def __init__(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        self._wanted = {id(parameter) for parameter in parameters if parameter.is_meta}
        self._places = [
            (submodule._parameters, name, parameter)
            for submodule in module.modules()
            for name, parameter in submodule._parameters.items()
            if parameter is not None and id(parameter) in self._wanted
        ]

    def __enter__(self) -> None:
        values: dict[int, torch.Tensor] = {}  # tied weights stay tied
        for parameters, name, parameter in self._places:
            if id(parameter) not in values:
                values[id(parameter)] = _random_weight(parameter)
            parameters[name] = values[id(parameter)]  # type: ignore[assignment]

    def __exit__(self, *error: Any) -> None:
        for parameters, name, parameter in self._places:
            parameters[name] = parameter


def _random_weight(parameter: nn.Parameter) -> torch.Tensor:
    """Random values that keep activations in scale: matrices scaled by their number of inputs, others around 0.5. Not
    an nn.Parameter, because `run.meta_init` creates those without values."""
    weight = torch.empty(parameter.shape, dtype=parameter.dtype)
    if not parameter.is_floating_point():
        return weight.zero_()
    if parameter.dim() < 2:
        return weight.normal_(0.5, 0.1)
    return weight.normal_(std=(len(parameter) / max(1, parameter.numel())) ** 0.5)


def _fake_weight(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=device if tensor.is_meta else tensor.device,
        )
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def run_on_fakes(
    run: Callable[[Any, Any], Any],
    arguments: Any,
    mode: FakeTensorMode,
    weights: FakeWeights,
    *,
    reads_values: bool = False,
) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Call `run(args, kwargs)` on fake tensors.

    If that fails because it reads values, or if it is known that it `reads_values`, call it on zeros with the real
    weights, and return fake tensors like its output. Also returns each such argument and output with its fake tensor.
    """
    failure: Exception | None = None
    if not reads_values:
        try:
            with _disable_current_modes(), mode:
                return run(*arguments), []
        except Exception as error:
            failure = error
    # Most likely the code reads a value, which zeros have. If they fail, too, the first error is more useful.
    zeros = tree_map(_zeros_like, arguments)
    try:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with _disable_current_modes(), weights.real_weights(), torch.no_grad(), torch.random.fork_rng(devices):
            real = run(*zeros)
    except Exception as error:
        raise (failure or error) from None
    if any(isinstance(leaf, int | float) for leaf in tree_leaves(real)):
        # a number that was computed from zeros is wrong for a batch
        raise failure or ValueDependenceError("one of its parts returns a number that follows from values")
    result = tree_map(lambda leaf: fake_like(mode, leaf), real)
    pairs = zip(tree_leaves((zeros, real)), tree_leaves((arguments, result)), strict=True)
    return result, [(leaf, fake) for leaf, fake in pairs if isinstance(leaf, torch.Tensor) and leaf is not fake]


def _zeros_like(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with _disable_current_modes():
        return torch.zeros(tuple(leaf.shape), dtype=leaf.dtype, device=leaf.device)


@contextmanager
def without_torch_logs() -> Iterator[None]:
    """A context without torch's logs of failed operations on fake tensors: real tensors are tried next, and their error
    is reported."""
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled


@contextmanager
def as_when_compiling() -> Iterator[None]:
    """A context in which `torch.compiler.is_compiling()` is true.

    Models that cache tensors outside of themselves, or read values to save work, skip both when they are compiled. They
    must also skip both on fake tensors.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        with _scripted_functions_in_python(), _without_needless_masks():
            yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def _scripted_functions_in_python() -> Iterator[None]:
    """Run functions under `torch.jit.script` as the Python code they were made from, as `torch.compile` does: their
    fused kernels would read memory that fake tensors do not have."""
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
    """A context in which transformers before 5.18 makes no attention mask if the caller gave none. It would do that
    when compiled, and with a mask attention cannot use flash kernels and takes up to twice the time."""
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
    """Switch off `use_cache` and `gradient_checkpointing` of Hugging Face models.

    Decoders keep keys and values for generation by default, which training does not need. Checkpointing would hide a
    block's operations; a block that recomputes itself still does so when it runs.
    """
    switches = [(config, "use_cache") for config in configs_with_caches(module)]
    switches += [(submodule, "gradient_checkpointing") for submodule in module.modules()]
    with _switched_off(switches):
        yield


def configs_with_caches(module: nn.Module) -> list[Any]:
    """The configurations of a module and its submodules that say whether it keeps keys and values for generation."""
    configs = [getattr(submodule, "config", None) for submodule in module.modules()]
    return list({id(config): config for config in configs if hasattr(config, "use_cache")}.values())


def call_without_cache(module: nn.Module, configs: Iterable[Any], args: Any, kwargs: Any) -> Any:
    """Call a module with `use_cache` off. `configs` are its `configs_with_caches`, which take long to find."""
    with _switched_off([(config, "use_cache") for config in configs]):
        return module(*args, **kwargs)


@contextmanager
def _switched_off(switches: Iterable[tuple[Any, str]]) -> Iterator[None]:
    """Set these attributes to False where they are True."""
    switched_off = [(owner, name) for owner, name in switches if getattr(owner, name, None) is True]
    for owner, name in switched_off:
        setattr(owner, name, False)
    try:
        yield
    finally:
        for owner, name in switched_off:
            setattr(owner, name, True)
