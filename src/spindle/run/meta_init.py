"""Run a training script without memory for its weights, on a machine without a GPU, to plan it.

All parameters are created on `meta`: they have shapes and no values. Everything else is real, so data loaders, random
numbers and buffers work as usual. GPU devices are replaced by the CPU, where only shapes matter. Large tensors of
checkpoints are not read, and loading them into meta parameters does nothing. Code that reads a weight fails, with a
note.

A parameter's initial values still take memory where code computes them (`torch.randn`), briefly, one parameter at a
time; `torch.empty`, which torch's own layers call, takes no memory until it is written to.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import warnings
import zipfile
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from spindle.errors import InputError
from spindle.launch import innermost_users, is_debugging, line_text

_LARGE = 1 << 16  # elements; smaller tensors may be data that a script looks at
_MOVES = (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu, torch.Tensor.pin_memory)
_ADVICE = (
    "No spindle.Trainer.fit was reached; up to there, a script that is planned runs without weights and without a GPU. "
    "Give a script that trains with a spindle.Trainer; in one that does, run models and use GPUs after fit, or only if "
    "SPINDLE_WORKLOAD is not in the environment, or plan from a profile (spindle profile)."
)


def create_parameters_on_meta() -> None:
    """From now on, until this process ends, create parameters without values."""
    _patch_parameters()
    _replace_gpus_by_cpu()
    _patch_loading()
    _explain_failures()
    # the command's own output goes to stdout, so what the script prints goes to stderr
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def _patch_parameters() -> None:
    make = nn.Parameter.__new__

    def without_values(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) in (torch.Tensor, nn.Parameter) and not data.is_meta:
            data = data.detach().to("meta")
        return make(cls, data, requires_grad)

    nn.Parameter.__new__ = without_values  # type: ignore[method-assign]


class _CpuForGpu(TorchFunctionMode):
    """Replaces GPU devices by the CPU. What is made from a meta tensor stays on `meta`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        is_empty = first is not None and type(first) in (torch.Tensor, nn.Parameter) and first.is_meta
        if func in _MOVES:
            return self._moved(func, args, kwargs, is_empty)
        if func is torch._C._nn._parse_to and args and isinstance(args[0], int):
            args = ("cpu", *args[1:])  # nn.Module.to(0); meta tensors stay on `meta`
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta" if is_empty else _on_cpu(kwargs["device"])
        elif func in _device_constructors() and torch.get_default_device().type == "cuda":
            kwargs["device"] = "cpu"  # under `with torch.device("cuda")`
        return func(*args, **kwargs)

    def _moved(self, func: Any, args: Any, kwargs: dict[str, Any], is_empty: bool) -> Any:
        if func is not torch.Tensor.to:
            return args[0] if is_empty or func is not torch.Tensor.cpu else func(*args, **kwargs)
        moved, *rest = args
        if is_empty and rest and isinstance(rest[0], torch.Tensor):
            rest[0] = rest[0].dtype  # the dtype of another tensor, not its device
        destinations = [*rest[:1], *([kwargs["device"]] if "device" in kwargs else [])]
        named = [destination for destination in destinations if isinstance(destination, str | int | torch.device)]
        if named:
            destination = "meta" if is_empty else _on_cpu(named[0])
            if "device" in kwargs:
                kwargs["device"] = destination
            else:
                rest[0] = destination
        return func(moved, *rest, **kwargs)


def _on_cpu(device: Any) -> Any:
    """The CPU in place of a GPU. An integer also means a GPU."""
    return "cpu" if isinstance(device, int) or re.match("cuda", str(device)) else device


def _replace_gpus_by_cpu() -> None:
    _CpuForGpu().__enter__()  # type: ignore[no-untyped-call]  # to the end of the process
    run = threading.Thread.run

    def run_without(thread: threading.Thread) -> None:
        """Function modes are per thread, and checkpoints are loaded in several threads."""
        with _CpuForGpu():
            run(thread)

    threading.Thread.run = run_without  # type: ignore[assignment, method-assign]
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda device=None: None
    join = dist.init_process_group

    def join_on_cpu(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        join("gloo", *args, **kwargs)

    dist.init_process_group = join_on_cpu


def _patch_loading() -> None:
    read = torch.load

    def mapped(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike) and zipfile.is_zipfile(f):
            kwargs["mmap"] = True
        return read(f, "cpu", *args, **kwargs)

    torch.load = mapped
    warnings.filterwarnings("ignore", message="(?s).*copying from a non-meta parameter")
    try:
        import safetensors
    except ImportError:
        return
    _SafeFile.open_file = staticmethod(safetensors.safe_open)
    safetensors.safe_open = _SafeFile  # type: ignore[assignment, misc]


class _SafeFile:
    """A safetensors file whose large tensors have no values."""

    open_file: Any = None

    def __init__(self, filename: Any, framework: str = "pt", *_: Any, **__: Any) -> None:
        self._file = self.open_file(filename, framework=framework)

    def __enter__(self) -> _SafeFile:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_slice(self, name: str) -> Any:
        tensor_slice = self._file.get_slice(name)
        return tensor_slice if math.prod(tensor_slice.get_shape()) < _LARGE else _SafeSlice(tensor_slice)

    def get_tensor(self, name: str) -> Any:
        tensor_slice = self.get_slice(name)
        return tensor_slice[...] if isinstance(tensor_slice, _SafeSlice) else self._file.get_tensor(name)

    def get_tensors(self) -> dict[str, Any]:
        return {name: self.get_tensor(name) for name in self._file.keys()}  # noqa: SIM118  # no dict


class _SafeSlice:
    """A slice of a large tensor in a safetensors file, on `meta`."""

    def __init__(self, tensor_slice: Any) -> None:
        self._slice = tensor_slice
        self.get_shape, self.get_dtype = tensor_slice.get_shape, tensor_slice.get_dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.empty(self._slice.get_shape(), dtype=self._slice[:0].dtype, device="meta")[index]


def _explain_failures() -> None:
    report = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        frame = innermost_users(trace)
        if frame is not None and _needs_values(error):
            message = str(error).strip().split("\n")[0]
            what = f"{kind.__name__}: {message}" if message else kind.__name__
            line = line_text(frame.tb_frame.f_code.co_filename, frame.tb_lineno)
            refusal = InputError(f"{line}: {what}\n{_ADVICE}")
            if is_debugging():
                refusal.__cause__ = error
            error = refusal
        report(type(error), error, error.__traceback__)

    sys.excepthook = explain


def _needs_values(error: BaseException) -> bool:
    """Whether an error seems to come from what is missing here: values of weights, and GPUs."""
    if isinstance(error, AssertionError):  # assert torch.cuda.is_available()
        return True
    is_torchs = isinstance(error, RuntimeError | TypeError | ValueError)  # not a missing key or file of that name
    return is_torchs and re.search(r"\bmeta\b|cuda|nvidia|accelerator", str(error), re.IGNORECASE) is not None
