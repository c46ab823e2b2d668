"""What a user's script declares: modules by name, and tasks as functions of a batch.

A handle that `module` returns is called like the module itself. While a task is being recorded it notes the call; at
any other time it simply runs the module, so the same script trains in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from spindle.errors import WorkloadError
from spindle.models import Chain, chain_and_output, check_options, resolve_styles, whole_chain
from spindle.train.packed import unpacked


class ModuleHandle:
    """A module under its name, as `spindle.module` registered it. `chain` has its layers once tasks that call it are
    cut."""

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
        self.has_compared_attributes = False  # with other ranks
        self.chain: Chain = whole_chain(nn_module, "it was not called yet")
        self.composite: ModuleHandle | None = None  # of which this is a part
        self.closed_reason = ""  # why a module with towers is not opened into them and its other parts
        self._parts: dict[str, ModuleHandle] = {}
        self._packed: ModuleHandle | None = None

    def part(self, path: str, module: nn.Module | None = None) -> ModuleHandle:
        """The handle of a part of this composite, named by its path; the same one each time."""
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
        """The handle of the same module with a padded output: one layer."""
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
        """The chain of calls with such arguments, and a function that gives their output without values. `values`
        returns the arguments as real tensors."""
        return chain_and_output(self.module, args, kwargs, self.split, values)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracer = recording.get()
        if tracer is None:
            return self.module(*args, **kwargs)
        return tracer.create_proxy("call_function", called_module, (self, *args), kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols such as copying look attributes up before there are any
            raise AttributeError(name)
        raise AttributeError(
            f"spindle.module({self.name!r}) has no attribute {name!r}: a task calls the handle itself. Register a "
            f"module whose forward calls .{name}(...); outside tasks, the registered module is .module",
            name=name,
            obj=self,
        )

    def __repr__(self) -> str:
        return f"spindle.module({self.name!r})"


def styles_of_part(styles: Mapping[str, str], path: str) -> dict[str, str]:
    """The styles of a composite that concern one of its parts, with patterns relative to that part."""
    components = path.split(".") if path else []
    relative = {}
    for pattern, style in styles.items():
        first = pattern.split(".")
        begins = len(first) > len(components) and all(
            mine in (theirs, "*") for mine, theirs in zip(first, components, strict=False)
        )
        if begins:
            relative[".".join(first[len(components) :])] = style
    return relative


def called_part(handle: ModuleHandle, arguments: tuple[Any, Any]) -> Any:
    """Stand in a recorded task for a call of a part of a composite, with the args and kwargs that its glue gives."""
    args, kwargs = arguments
    return handle.module(*args, **kwargs)


def called_module(handle: ModuleHandle, *args: Any, **kwargs: Any) -> Any:
    """Stand in a recorded task for a call of a module."""
    return handle.module(*args, **kwargs)


recording: ContextVar[fx.Tracer | None] = ContextVar("recording", default=None)  # while a task is being recorded


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
    """Register an `nn.Module` under a name that all tasks share.

    It is split into layers automatically; with `split=False` it stays one layer. With `activation_checkpointing`,
    backward recomputes the activations of its layers instead of keeping them. `whole_batch` declares that the samples
    of a batch depend on each other in it, so that it must not run on parts of a batch.

    `tensor_parallel` is a tensor-parallel plan with Hugging Face's style names: `{"layers.*.attention.query":
    "colwise", "layers.*.attention.out": "rowwise", ...}`; Hugging Face's models come with one; `{}` disables it. The
    planner chooses the tensor-parallel degree. With `"sequence_parallel"` for a block, its activations are sharded by
    tokens between its tensor-parallel parts: `{**llm.tp_plan, "model.layers.*": "sequence_parallel"}`.

    With `compile`, its layers are compiled by `torch.compile`, once for each kind of layer, with these arguments where
    it is a dict (`{"mode": "max-autotune-no-cudagraphs"}`). Tensor-parallel layers, and those of pipelines that split
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
    if not name or "/" in name or "#" in name:
        raise WorkloadError(f"spindle.module({name!r}, ...): a name must not be empty or contain '/' or '#'")
    if tensor_parallel is not None:
        where = f"spindle.module({name!r}, tensor_parallel=...)"
        resolve_styles(nn_module, tensor_parallel, where, strict=True)  # refuses what it does not know
    options = {} if compile is True else dict(compile) if compile else None
    if options is not None:
        check_options(options, f"spindle.module({name!r}, compile=...)")
    return ModuleHandle(name, nn_module, whole_batch, activation_checkpointing, split, tensor_parallel, options)


class Mean(NamedTuple):
    """A loss as a total and a count; both are summed over all ranks before dividing."""

    total: Any
    count: Any


def mean(total: Any, count: Any) -> Mean:
    """A mean that can be split over ranks with different counts: over tokens with padding, for example."""
    return Mean(total, count)


class TaskResult(NamedTuple):
    """A task's loss with its metrics."""

    loss: Any
    metrics: dict[str, Any]


def result(loss: Any, **metrics: Any) -> TaskResult:
    """A task's return value with metrics in addition to the loss: `spindle.result(loss, accuracy=...)`.

    A metric is a mean over the samples of the batch, a tensor with a value for each sample, or a pair `(total, count)`
    of sums over samples or tokens. Totals and counts are added up over ranks and micro-steps, and in `evaluate` over
    batches, before dividing.
    """
    return TaskResult(loss, metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDefinition:
    """A task's function with its batch size and weight; callable like the function. The weight may be a function of
    the step; `tokens(batch)` counts what a batch has, for the rate that is shown and to weigh the batches of a step.
    `items` are the entries of a batch with rows for each item: as many as another entry says, or one."""

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

    The loss is computed over the whole batch unless it is a `spindle.mean`, or `per_sample_mean` says that it is the
    mean of a loss of each sample. `weight` is a number or a function of the step; `tokens(batch)` says how many tokens
    a batch has, for the rate that is shown. If the loss is a `spindle.mean`, `tokens(batch)` must be its count: with
    `gradient_accumulation_steps`, the loss of a step is then the total of its batches over their count.

    `items` names entries of a batch that have rows for each item (an image, a clip) instead of each sample: as many as
    another entry says, or one. With `items={"patches": "lengths", "grid": 1}` item i has `lengths[i]` rows of
    `patches` and one of `grid`. Calls that read items alone may run in parts, each with some of the items
    (`Planning(planner="colocate")`).
    """
    if batch_size < 1:
        raise WorkloadError(f"@spindle.task(batch_size={batch_size}): must be at least 1")
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
