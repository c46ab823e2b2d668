"""Calls of modules and of autograd functions, routed through a function while a forward is recorded."""

from __future__ import annotations

import linecache
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

# Called instead of a module or an autograd function: with it, a function that runs it, its args and kwargs.
RecordCall = Callable[[Any, Callable[[Any, Any], Any], Any, Any], Any]

_CALL = "_compiled_call_impl"  # the attribute that nn.Module.__call__ calls instead of the module's forward
_LIBRARIES = ("torch", "builtins", "spindle")
_recording_lock = threading.RLock()


class Interception:
    """Routes calls of some modules, and of all custom autograd functions, through `record_call`, unless paused.

    A module is intercepted by its own `_compiled_call_impl`, which `nn.Module.__call__` calls if it is set
    (`nn.Module.compile` sets it), so no other module is touched. `torch.autograd.Function.apply`,
    `torch.Tensor.__len__`, and `len` in the files that define the classes of `root`, have no such hook and are
    replaced; calls of other threads pass through. One thread records at a time; a recording inside a recording is fine.
    """

    def __init__(self, root: nn.Module, modules: Iterable[nn.Module], record_call: RecordCall) -> None:
        self._modules, self._record_call = list(modules), record_call
        self._files = {base.__module__ for module in root.modules() for base in type(module).__mro__}
        self._is_in_vmap = self.is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which calls are not intercepted."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which calls in this thread are intercepted."""
        apply, length = torch.autograd.Function.__dict__["apply"], torch.Tensor.__len__
        thread = threading.get_ident()

        def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_paused or self._is_in_vmap or threading.get_ident() != thread:
                return apply.__func__(cls, *args, **kwargs)
            if torch._C._are_functorch_transforms_active():
                # The arguments are vmap's wrappers, which have no variables: the operations inside are recorded.
                self._is_in_vmap = True
                try:
                    return apply.__func__(cls, *args, **kwargs)
                finally:
                    self._is_in_vmap = False
            # Activation checkpointing by the model itself. Its function is the first argument.
            if cls is CheckpointFunction:  # the statements inside are recorded; recomputation is up to the run
                return args[0](*args[2:])
            return self._record_call(cls, lambda a, k: apply.__func__(cls, *a, **k), args, kwargs)

        def tensor_length(tensor: torch.Tensor) -> int:
            if threading.get_ident() == thread and _is_length_hint(sys._getframe(1)):
                raise TypeError("a list of unknown length")  # `list` ignores it and appends entry by entry
            return length(tensor)  # type: ignore[no-any-return, no-untyped-call]

        def symbolic_length(value: Any) -> Any:
            # `len` itself returns plain ints only, which would fix the number of samples in the recording.
            if (
                isinstance(value, torch.Tensor)
                and threading.get_ident() == thread
                and value.dim()
                and not self.is_paused
            ):
                return value.shape[0]
            return len(value)

        with _recording_lock, ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(self._intercepted(module, thread))
            torch.Tensor.__len__ = tensor_length  # type: ignore[method-assign]
            for file in self._files:
                stack.enter_context(_global_length(file, symbolic_length))
            torch.autograd.Function.apply = classmethod(apply_function)  # type: ignore[method-assign, assignment]
            try:
                yield
            finally:
                torch.Tensor.__len__ = length  # type: ignore[method-assign]
                torch.autograd.Function.apply = apply  # type: ignore[method-assign]

    @contextmanager
    def _intercepted(self, module: nn.Module, thread: int) -> Iterator[None]:
        """Route calls of one module, in this thread, through `record_call`."""
        attributes = vars(module)
        compiled = attributes.get(_CALL)
        run = module._call_impl if compiled is None else compiled

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_paused or threading.get_ident() != thread:
                return run(*args, **kwargs)
            return self._record_call(module, lambda a, k: run(*a, **k), args, kwargs)

        attributes[_CALL] = call
        try:
            yield
        finally:
            if compiled is None:
                del attributes[_CALL]
            else:
                attributes[_CALL] = compiled


@contextmanager
def _global_length(file: str, length: Callable[[Any], Any]) -> Iterator[None]:
    """A context in which the code of a Python file outside torch sees this function as `len`."""
    names = (
        vars(sys.modules[file]) if file in sys.modules and file.partition(".")[0] not in _LIBRARIES else {"len": len}
    )
    if "len" in names:
        yield
        return
    names["len"] = length
    try:
        yield
    finally:
        del names["len"]


@contextmanager
def intercepted_calls(modules: Iterable[nn.Module], called: RecordCall) -> Iterator[None]:
    """Route calls of modules in this thread through `called`. Calls inside these modules are not intercepted."""
    thread = threading.get_ident()
    is_inside = False

    def route(module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside or threading.get_ident() != thread:
                return run(*args, **kwargs)
            is_inside = True
            try:
                return called(module, lambda a, k: run(*a, **k), args, kwargs)
            finally:
                is_inside = False

        return call

    before = [(vars(module), vars(module).get(_CALL)) for module in modules]
    try:
        for module, (attributes, compiled) in zip(modules, before, strict=True):
            attributes[_CALL] = route(module, module._call_impl if compiled is None else compiled)
        yield
    finally:
        for attributes, compiled in before:
            if compiled is None:
                attributes.pop(_CALL, None)
            else:
                attributes[_CALL] = compiled


def _is_length_hint(frame: types.FrameType) -> bool:
    """Whether this frame runs `list(x)` or `tuple(x)`, which ask for a length only to allocate. Answering would
    needlessly fix the number of entries in the recording."""
    line, last_line, begin, end = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if line is None or line != last_line:
        return False
    text = linecache.getline(frame.f_code.co_filename, line).encode()[begin:end]
    return text.startswith((b"list(", b"tuple("))
