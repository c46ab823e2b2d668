"""What a user's script declares: modules by name, and tasks as functions of a batch.

A handle that `module` returns is called like the module itself. While a task is being recorded it notes the call; at
any other time it simply runs the module, so the same script trains in plain PyTorch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import fx, nn

from spindle.errors import WorkloadError
from spindle.models import Chain, chain_and_output, check_options, resolve_styles, whole_chain
from spindle.train.packed import unpacked


class HandleAttributeError(AttributeError):
    """An attribute that the handle of a module does not have."""


class ModuleHandle:
    """A module under the name with which `spindle.module` registered it. `chain` has its layers once tasks that call it
    are cut."""

    def __init__(
        self,
        name: str,
        nn_module: nn.Module,
        whole_batch: bool,
        activation_checkpointing: bool = False,
        split: bool = True,
        tensor_parallel: Mapping[str, str] | None = None,
        compile: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.module, self.whole_batch = name, nn_module, whole_batch
        self.activation_checkpointing, self.split = activation_checkpointing, split
        self.tensor_parallel, self.compile = tensor_parallel, compile
        self.has_compared_attributes = False  # whether its attributes were compared between ranks
        self.chain: Chain = whole_chain(nn_module, "it was not called yet")
        self.composite: ModuleHandle | None = None  # the composite of which this is a part
        self.closed_reason = ""  # why a module with towers is not opened into its parts
        self._parts: dict[str, ModuleHandle] = {}
        self._packed: ModuleHandle | None = None

    def part(self, path: str, module: nn.Module | None = None) -> ModuleHandle:
        """The handle of a part of this composite, named by its path; always the same handle."""
        if path not in self._parts:
            assert module is not None
            name = f"{self.name}.{path}" if path else self.name
            styles = None if self.tensor_parallel is None else styles_of_part(self.tensor_parallel, path)
            handle = ModuleHandle(
                name, module, self.whole_batch, self.activation_checkpointing, True, styles, self.compile
            )
            handle.composite = self
            self._parts[path] = handle
        return self._parts[path]

    def packed(self, wrap: Callable[[nn.Module], nn.Module]) -> ModuleHandle:
        """The handle of the same module with a padded output, as one layer."""
        if self._packed is None:
            self._packed = ModuleHandle(
                self.name, wrap(self.module), self.whole_batch, self.activation_checkpointing, False, {}
            )
            self._packed.composite = self.composite or self
        return self._packed

    def has_part(self, path: str) -> bool:
        return path in self._parts

    def cut(
        self, args: Any, kwargs: Any, values: Callable[[], tuple[Any, Any]] | None = None
    ) -> tuple[Chain, Callable[[], Any]]:
        """The chain of layers for calls with such arguments, and a function that gives their output without values.
        `values` returns the arguments as real tensors."""
        return chain_and_output(self.module, args, kwargs, self.split, values)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracer = recording.get()
        if tracer is None:
            return self.module(*args, **kwargs)
        return tracer.create_proxy("call_function", called_module, (self, *args), kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols such as copying look attributes up before there are any
            raise AttributeError(name)
        if recording.get() is None:
            what = f"its .module has: write .module.{name}" if hasattr(self.module, name) else "nor has its .module"
        else:
            what = f"a task calls the handle itself. Register a module whose forward calls .{name}(...)"
        # Without `name` and `obj`, because Python would suggest attributes that scripts should not use.
        raise HandleAttributeError(f"spindle.module({self.name!r}) has no attribute {name!r}: {what}")

    def __repr__(self) -> str:
        return f"spindle.module({self.name!r})"


def styles_of_part(styles: Mapping[str, str], path: str) -> dict[str, str]:
    """The tensor-parallel styles of a composite that apply to one of its parts, with patterns relative to that part."""
    components = path.split(".") if path else []
    relative = {}
    for pattern, style in styles.items():
        first = pattern.split(".")
        begins = len(first) > len(components) and all(
            given in (component, "*") for given, component in zip(first, components, strict=False)
        )
        if begins:
            relative[".".join(first[len(components) :])] = style
    return relative


def called_part(handle: ModuleHandle, arguments: tuple[Any, Any]) -> Any:
    """Stands in a recorded task for a call of a composite's part, with the arguments that its glue computes."""
    args, kwargs = arguments
    return handle.module(*args, **kwargs)


def called_module(handle: ModuleHandle, *args: Any, **kwargs: Any) -> Any:
    """Stands in a recorded task for a call of a module."""
    return handle.module(*args, **kwargs)


recording: ContextVar[fx.Tracer | None] = ContextVar("recording", default=None)  # set while a task is being recorded


def module(
    name: str,
    nn_module: nn.Module,
    *,
    whole_batch: bool = False,
    activation_checkpointing: bool = False,
    split: bool = True,
    tensor_parallel: Mapping[str, str] | None = None,
    compile: bool | Mapping[str, Any] = False,
) -> ModuleHandle:
    """Register an `nn.Module` under a name, so that several tasks can use it.

    It is split into layers automatically; with `split=False` it stays one layer. With `activation_checkpointing`,
    backward recomputes the activations of its layers instead of keeping them. `whole_batch` declares that the samples
    of a batch depend on each other in this module, so that it must not run on parts of a batch.

    `tensor_parallel` is a tensor-parallel plan with Hugging Face's style names: `{"layers.*.attention.query":
    "colwise", "layers.*.attention.out": "rowwise", ...}`. Hugging Face models come with one; `{}` disables it. The
    planner chooses the tensor-parallel degree. With `"sequence_parallel"` for a block, the activations between its
    tensor-parallel submodules are sharded by tokens: `{**llm.tp_plan, "model.layers.*": "sequence_parallel"}`.

    With `compile`, its layers are compiled with `torch.compile`, once for each kind of layer; a dict is passed on as
    arguments (`{"mode": "max-autotune-no-cudagraphs"}`). Tensor-parallel layers, and those of pipelines that split
    backward in two, run uncompiled.
    """
    if not isinstance(nn_module, nn.Module):
        raise WorkloadError(f"spindle.module({name!r}, ...): expected an nn.Module, got {type(nn_module).__name__}")
    scripted = next((part for part in nn_module.modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise WorkloadError(
            f"spindle.module({name!r}, ...): TorchScript modules ({type(scripted).__name__}) cannot be split into "
            "layers; register the module as it was before torch.jit.script or torch.jit.trace"
        )
    if isinstance(nn_module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise WorkloadError(
            f"spindle.module({name!r}, ...): {type(nn_module).__name__} synchronises gradients itself, which Spindle "
            "does: register the module inside it, and leave out torch.distributed.init_process_group"
        )
    synchronised = next((path for path, part in nn_module.named_modules() if isinstance(part, nn.SyncBatchNorm)), None)
    if synchronised is not None:
        raise WorkloadError(
            f"spindle.module({name!r}, ...): {synchronised or 'it'} is a SyncBatchNorm, which exchanges statistics "
            "between ranks itself: leave out convert_sync_batchnorm, because Spindle normalises over the whole batch"
        )
    if not name or "/" in name or "#" in name:
        raise WorkloadError(f"spindle.module({name!r}, ...): a name must not be empty or contain '/' or '#'")
    if tensor_parallel is not None:
        where = f"spindle.module({name!r}, tensor_parallel=...)"
        # Raises an error for styles and paths that it does not know.
        resolve_styles(nn_module, tensor_parallel, where, strict=True)
    options = {} if compile is True else dict(compile) if compile else None
    if options is not None:
        check_options(options, f"spindle.module({name!r}, compile=...)")
    handle = ModuleHandle(name, nn_module, whole_batch, activation_checkpointing, split, tensor_parallel, options)
    _registered.add(handle)
    return handle


_registered: WeakSet[ModuleHandle] = WeakSet()


def all_registered() -> list[ModuleHandle]:
    """All registered modules that are in use."""
    return list(_registered)


def registered(name: str) -> ModuleHandle | None:
    """The module of this name. None if there is none, or if several are in use, for other Trainers."""
    if sum(handle.name == name for handle in _registered) > 1:
        gc.collect()  # handles and what uses them refer to each other
    handles = [handle for handle in _registered if handle.name == name]
    return handles[0] if len(handles) == 1 else None


class Mean(NamedTuple):
    """A loss as total and count, which are both summed over all ranks before dividing."""

    total: Any
    count: Any


def mean(total: Any, count: Any) -> Mean:
    """A mean that can be split over ranks with different counts, for example over tokens with padding."""
    return Mean(total, count)


class TaskResult(NamedTuple):
    """A task's loss with its metrics."""

    loss: Any
    metrics: dict[str, Any]


def result(loss: Any, **metrics: Any) -> TaskResult:
    """Return metrics in addition to the loss: `return spindle.result(loss, accuracy=...)`.

    A metric is a mean over the samples of the batch, a tensor with one value per sample, or a pair `(total, count)` of
    sums over samples or tokens. Totals and counts are summed over ranks and micro-steps, and in `evaluate` over
    batches, before dividing.
    """
    return TaskResult(loss, metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDefinition:
    """A task's function with its batch size and weight. It can be called like the function.

    The weight may be a function of the step. `tokens(batch)` counts tokens, to report throughput and to weight the
    batches of a step. `items` are the entries of a batch with rows per item: as many as another entry says, or one.
    """

    name: str
    function: Callable[[Any], Any]
    batch_size: int
    weight: float | Callable[[int], float] = 1.0
    per_sample_mean: bool = False
    tokens: Callable[[Any], int] | None = None
    items: Mapping[str, str | int] = field(default_factory=dict)

    def __call__(self, batch: Any) -> Any:
        return self.function(unpacked(batch))


def task(
    *,
    batch_size: int,
    weight: float | Callable[[int], float] = 1.0,
    name: str | None = None,
    per_sample_mean: bool = False,
    tokens: Callable[[Any], int] | None = None,
    items: Mapping[str, str | int] | None = None,
) -> Callable[[Callable[[Any], Any]], TaskDefinition]:
    """Turn a function from a batch to its loss into a task.

    The loss is computed over the whole batch, unless it is a `spindle.mean`, or `per_sample_mean` declares it to be the
    mean of one loss per sample. `weight` is a number or a function of the step.

    `tokens(batch)` counts the tokens of a batch, to report throughput. If the loss is a `spindle.mean`, `tokens(batch)`
    must be its count: with `gradient_accumulation_steps`, the loss of a step is then the total of its batches divided
    by their count.

    `items` names entries of a batch that have rows per item (an image, a clip) instead of per sample: as many as
    another entry says, or one. With `items={"patches": "lengths", "grid": 1}`, item i has `lengths[i]` rows of
    `patches` and one row of `grid`. Calls that read only items may run in parts, each with some of the items
    (`Planning(planner="colocate")`).
    """
    if batch_size < 1:
        raise WorkloadError(f"@spindle.task(batch_size={batch_size}): must be at least 1")
    if not isinstance(items, Mapping | None):
        raise WorkloadError(
            f"@spindle.task(items={items!r}): expected a dict of entries of a batch, each with the entry that has the "
            'rows of its items, or 1, such as items={"patches": "lengths", "grid": 1}'
        )
    for entry, rows in (items or {}).items():
        if not isinstance(entry, str) or not (isinstance(rows, str) or rows == 1) or rows == entry:
            raise WorkloadError(
                f"@spindle.task(items={{{entry!r}: {rows!r}}}): expected the name of the entry with the rows of each "
                'item, or 1, such as items={"patches": "lengths", "grid": 1}'
            )

    def define(function: Callable[[Any], Any]) -> TaskDefinition:
        return TaskDefinition(
            name=name or function.__name__,
            function=function,
            batch_size=batch_size,
            weight=weight,
            per_sample_mean=per_sample_mean,
            tokens=tokens,
            items=dict(items or {}),
        )

    return define
