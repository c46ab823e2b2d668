"""A GPU without CUDA, for code that runs on a GPU alone: tensors are on the CPU, and say that they are on `cuda:0`.

As on a GPU, a tensor of one device cannot be combined with one of the other, a capture needs a stream other than the
default one, and what waits for the device or reads a value there ends it. Streams are an order of the host here, and
events its clock: whether streams wait for each other is not checked. Graphs are those of `replay`. What needs the
driver's library and several processes is not emulated.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # before classes of torch are replaced
from torch import fx
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import replay
from spindle.models import zeros
from spindle.run import graphs
from spindle.run.composed_graph import ComposedGraph

MEMORY_BYTES = 8 << 30
zeros_like = zeros.zeros_like
_NUMBERS = itertools.count(1)


class Stream:
    """Stands for torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream, self.device, self.priority = next(_NUMBERS), torch.device("cuda", 0), priority

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)

    def wait_event(self, event: Event) -> None:
        assert event.is_recorded, "a stream waits for an event that was never recorded"

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        _refuse_in_capture("cudaStreamSynchronize")

    def query(self) -> bool:
        _refuse_in_capture("cudaStreamQuery")
        return True


class Event:
    """Stands for torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self.has_times, self.cuda_event, self.time_s = enable_timing, next(_NUMBERS), 0.0

    @property
    def is_recorded(self) -> bool:
        return self.time_s > 0

    def record(self, stream: Stream | None = None) -> None:
        self.time_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        assert self.is_recorded

    def synchronize(self) -> None:
        _refuse_in_capture("cudaEventSynchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        if not (self.has_times and end.has_times and self.is_recorded and end.is_recorded):
            raise RuntimeError("both events must be recorded, and made with enable_timing=True")
        return max(1e-3, 1e3 * (end.time_s - self.time_s))


class Generator:
    """Stands for a torch.Generator of the GPU."""

    def __init__(self, device: Any = "cuda") -> None:
        self.device = torch.device(device)

    def graphsafe_get_state(self) -> Generator:
        return self

    def graphsafe_set_state(self, state: Generator) -> None:
        assert isinstance(state, Generator)

    def manual_seed(self, seed: int) -> Generator:
        _refuse_in_capture("seeding a generator")
        return self


class _GeneratorKind(type):
    """Makes generators of the CPU by torch."""

    host = torch.Generator

    def __call__(cls, device: Any = "cpu") -> Any:
        return Generator(device) if torch.device(device).type == "cuda" else cls.host(device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Generator | cls.host)


class _AnyGenerator(metaclass=_GeneratorKind):
    """Stands for torch.Generator."""


class Graph(replay.Graph):
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(keep_graph)
        self._noting: replay.Noting | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if _GPU.capture is not None:
            raise RuntimeError("a capture is under way already")
        if _GPU.current is _GPU.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        assert isinstance(pool, replay.Pool)
        assert not self.calls, "a graph is captured once"
        for memory in pool.take_free():
            self.note(torch.ops.aten.fill_.Scalar, (memory, float("nan")), {}, memory.fill_(float("nan")))
        self._noting, _GPU.capture = replay.Noting(self, pool), _GPU.current
        self._noting.__enter__()

    def capture_end(self) -> None:
        assert self._noting is not None
        began_on, _GPU.capture = _GPU.capture, None
        self._noting.__exit__(None, None, None)
        if began_on is not _GPU.current:
            raise RuntimeError("a capture ends on the stream on which it began")

    def register_generator_state(self, generator: Generator) -> None:
        assert isinstance(generator, Generator)

    def replay(self) -> None:
        _refuse_in_capture("cudaGraphLaunch")
        super().replay()


class _GPU:
    """The state of the device."""

    default: Stream
    current: Stream
    capture: Stream | None = None


def _refuse_in_capture(call: str) -> None:
    if _GPU.capture is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {call}")


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "is_on_gpu", False)


def _put(tree: Any, on_gpu: bool) -> Any:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            leaf.untyped_storage().is_on_gpu = on_gpu
    return tree


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


_CROSSING = ("aten.copy_.", "aten._to_copy.", "aten._foreach_copy_.", "aten.set_.")
_INDEXING = ("aten.index.", "aten.index_put", "aten._index_put_impl_.")
_READING = ("aten._local_scalar_dense.", "aten.nonzero.", "aten.equal.", "aten.masked_select.", "aten.unique")


class _Operations(TorchDispatchMode):
    """Results are where their arguments are, which must be on one device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(function)
        given = _tensors((args, kwargs))
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            return function(*args, **kwargs)
        on_gpu = [tensor for tensor in given if is_on_gpu(tensor)]
        others = [tensor for tensor in given if not is_on_gpu(tensor)]
        if on_gpu and name.startswith(_READING):
            _refuse_in_capture(name)
        if name.startswith(_CROSSING):
            if on_gpu and others and not all(tensor.dim() == 0 for tensor in others):
                _refuse_in_capture(f"{name} between devices")
        elif on_gpu and any(tensor.dim() for tensor in others):
            if not (name.startswith(_INDEXING) and is_on_gpu(given[0])):
                shapes = [(tuple(tensor.shape), "cuda" if is_on_gpu(tensor) else "cpu") for tensor in given]
                raise RuntimeError(f"expected all tensors on one device, got {shapes} in {name}")
        elif on_gpu and others and not is_on_gpu(given[0]) and name.split(".")[1].endswith("_"):
            raise RuntimeError(f"{name} changes a tensor on the CPU by one on the GPU")
        result = function(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in given}
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in known:
                tensor.untyped_storage().is_on_gpu = bool(on_gpu)
        return result


def _without_gpu(leaf: Any) -> Any:
    is_gpu = isinstance(leaf, torch.device | str) and str(leaf).split(":")[0] == "cuda"
    return torch.device("cpu") if is_gpu else leaf


def _is_recorded_code() -> bool:
    """Whether code that Spindle has recorded makes a tensor: on the device of fake tensors, which are on the CPU."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code.co_filename.startswith("<")


def _is_faking() -> bool:
    """Whether tensors that are made are fake ones, which know their device themselves."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class _Functions(TorchFunctionMode):
    """Devices in arguments and attributes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
            return NotImplemented  # it records the call, which this mode would not see inside its own
        if torch._C._len_torch_dispatch_stack() == 0 and not _is_faking():  # Spindle has left all modes
            with _Operations():
                return self._called(function, args, dict(kwargs or {}))
        return self._called(function, args, dict(kwargs or {}))

    def _called(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        attribute = getattr(function, "__self__", None)
        if attribute in _ATTRIBUTES:
            return _ATTRIBUTES[attribute](args[0])
        if _is_faking() or any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            # Fake tensors are on the CPU, as all are in truth: autograd asks CUDA for the stream of others.
            args, kwargs = tree_map(_without_gpu, (args, kwargs))
            return function(*args, **kwargs)
        if function in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu):
            return _moved(function, *args, **kwargs)
        if function in (torch.Tensor.numpy, torch.Tensor.__array__) and is_on_gpu(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if function is torch.Tensor.get_device:
            return 0 if is_on_gpu(args[0]) else -1
        if function is torch.Tensor.pin_memory:
            assert not is_on_gpu(args[0]), "only memory of the host is pinned"
            return args[0].clone()
        if function is torch.Tensor.is_pinned:
            return False
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is None:
            return function(*args, **kwargs)
        device = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
        if device.type == "cpu" and _is_recorded_code():
            device = torch.device("cuda", 0)
        if device.type == "cuda":
            _refuse_in_capture("a copy from the host") if function in (torch.tensor, torch.as_tensor) else None
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        return result if device.type == "meta" else _put(result, device.type == "cuda")


_ATTRIBUTES: dict[Any, Any] = {
    torch.Tensor.device: lambda tensor: _device_of(tensor),
    torch.Tensor.is_cuda: lambda tensor: _device_of(tensor).type == "cuda",
    torch.Tensor.is_cpu: lambda tensor: _device_of(tensor).type == "cpu",
}


def _device_of(tensor: torch.Tensor) -> torch.device:
    return torch.device("cuda", 0) if tensor.device.type == "cpu" and is_on_gpu(tensor) else tensor.device


def _moved(function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if tensor.device.type == "meta":
        return function(tensor, *args, **kwargs)
    copies = kwargs.pop("copy", False)
    if function is torch.Tensor.cuda:
        device, dtype, memory_format = torch.device("cuda"), None, None
    elif function is torch.Tensor.cpu:
        device, dtype, memory_format = torch.device("cpu"), None, None
    elif args and isinstance(args[0], torch.Tensor):
        device, dtype, memory_format = _device_of(args[0]), args[0].dtype, None
    else:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "meta":
        return function(tensor, *args, **kwargs)
    options = {key: value for key, value in (("dtype", dtype), ("memory_format", memory_format)) if value is not None}
    moves = device is not None and (device.type == "cuda") != is_on_gpu(tensor)
    if not moves:
        return tensor.to(**options, copy=copies) if options or copies else tensor
    _refuse_in_capture("a copy between devices")
    moved = tensor.to(**options, copy=True) if options else tensor.clone()
    return _put(moved, device.type == "cuda")


def _record_stream(tensor: torch.Tensor, stream: Any) -> None:
    assert isinstance(stream, Stream)
    assert is_on_gpu(tensor), "only memory of the GPU has streams"


def _zeros_like(leaf: Any) -> Any:
    """Zeros on the GPU for a fake tensor, whose own device is the CPU."""
    made = zeros_like(leaf)
    return _put(made, True) if isinstance(leaf, FakeTensor) else made


def _properties(device: Any = None) -> Any:
    return SimpleNamespace(
        name="Emulated GPU",
        total_memory=MEMORY_BYTES,
        multi_processor_count=132,
        major=9,
        minor=0,
        uuid="00000000-0000-0000-0000-000000000000",
    )


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    before = _GPU.current
    _GPU.current = before if stream is None else stream
    try:
        yield
    finally:
        _GPU.current = before


def _synchronize(device: Any = None) -> None:
    _refuse_in_capture("cudaDeviceSynchronize")


def _statistics(device: Any = None) -> dict[str, Any]:
    return {"allocated_bytes": {"all": {"current": 1 << 20, "peak": 1 << 21}}}


def _clear_caches() -> None:
    """Forget the streams that Spindle keeps."""
    for name, module in list(sys.modules.items()):
        if name.startswith("spindle.run"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


@contextmanager
def emulated_gpu() -> Iterator[None]:
    """Inside, this process has one GPU."""
    _GPU.default = _GPU.current = Stream()
    _GPU.capture = None
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "device_of": lambda tensor: nullcontext(),
        "_sleep": lambda cycles: None,
        "memory_snapshot": list,
        "current_stream": lambda device=None: _GPU.current,
        "default_stream": lambda device=None: _GPU.default,
        "stream": _stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph_pool_handle": replay.Pool,
        "synchronize": _synchronize,
        "empty_cache": lambda: _refuse_in_capture("cudaFree"),
        "is_current_stream_capturing": lambda: _GPU.capture is not None,
        "mem_get_info": lambda device=None: (MEMORY_BYTES // 2, MEMORY_BYTES),
        "memory_allocated": lambda device=None: 1 << 20,
        "max_memory_allocated": lambda device=None: 1 << 21,
        "memory_reserved": lambda device=None: 1 << 22,
        "memory_stats_as_nested_dict": _statistics,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
        "get_device_name": lambda device=None: "Emulated GPU",
        "get_device_properties": _properties,
        "get_device_capability": lambda device=None: (9, 0),
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "default_generators": (Generator(),),
    }
    with ExitStack() as stack:
        for name, value in functions.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", _record_stream))
        stack.enter_context(mock.patch.object(torch.backends.cudnn, "is_acceptable", return_value=False))
        for name in ("_cuda_clearCublasWorkspaces", "_cuda_endAllocateToPool", "_cuda_releasePool"):
            stack.enter_context(mock.patch.object(torch._C, name, create=True))
        stack.enter_context(mock.patch.object(torch, "Generator", _AnyGenerator))
        stack.enter_context(mock.patch.object(ComposedGraph, "instantiate"))
        stack.enter_context(mock.patch.object(ComposedGraph, "replay", replay.replay_children))
        stack.enter_context(mock.patch.object(graphs, "RANDOM_LAYERS", False))
        stack.enter_context(mock.patch.object(zeros, "zeros_like", _zeros_like))
        _clear_caches()
        stack.callback(_clear_caches)
        stack.enter_context(_Functions())
        stack.enter_context(_Operations())
        yield
