"""Check that ranks agree: what each rank derives by itself is compared by digest before it is used.

One all-gather of two integers per comparison; texts travel only when digests differ, from rank 0 and from the first
rank that differs, for the error that every rank then raises. Texts must be equal where ranks do the same: no addresses,
no order of sets, nothing of the rank itself.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn

from spindle.errors import TrainingError
from spindle.run import Cuts, World
from spindle.train.config import TrainConfig
from spindle.train.kinds import graph_text, tensor_text
from spindle.train.optimizer import (
    MakeLRScheduler,
    MakeOptimizer,
    Named,
    NamedGroups,
    group_settings,
    named_groups,
    optimizer_of,
    scheduler_of,
    settings_of,
)
from spindle.train.record import RecordedTask, handles_of, parameter_names
from spindle.train.task import ModuleHandle, TaskDefinition

_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LARGEST_SHOWN = 4096  # elements; of a larger array, the text contains a digest instead
_PLAIN_TYPES = frozenset({bool, int, float, str, type(None)})
# Words in the names of attributes that may differ: flags of the first rank, rank numbers, and attributes that do not
# affect what a module computes.
_FIRST_RANK = re.compile(
    r"(^|_)(rank0|rank|main|master|primary|verbose|debug|log|logs|logging|print|prints|progress)(_|$)"
)
_RANK_NUMBER = re.compile(r"(^|_)(rank|device|gpu|index|id|worker|process|node)(_|$)")
_INDIFFERENT = re.compile(r"(^|_)(time|date|start|started|host|hostname|pid|port|calls|counter)(_|$)")
_EXCERPT = 60  # characters on either side of the first difference
_ADVICE = "all ranks must run the same script with the same options, data and versions"


def compare(world: World, items: Mapping[str, Any]) -> None:
    """Raise a TrainingError on all ranks that names the rank, the item and both values, unless all ranks have the same
    items. All ranks must call it."""
    if world.size == 1:
        return
    texts = {name: canonical_text(value) for name, value in items.items()}
    digests = {name: _digest(text) for name, text in texts.items()}
    if _is_text_equal_on_all_ranks(world, repr(list(digests.items()))):
        return
    digests_by_rank: list[dict[str, bytes]] = world.broadcast_object(world.gather_objects(digests))
    name, rank = _first_difference(digests_by_rank)
    reference, difference = (world.broadcast_object(texts.get(name), source) for source in (0, rank))
    raise TrainingError(_message(name, 0, reference, rank, difference))


def _is_text_equal_on_all_ranks(world: World, text: str) -> bool:
    """Whether all ranks have the same text."""
    digest = np.frombuffer(_digest(text), dtype=np.int64)
    table = world.start_all_gather(torch.from_numpy(digest.copy())).wait()
    return all(torch.equal(table[0], row) for row in table[1:])


def compare_overlapping(world: World, names: Sequence[str], items: Mapping[str, Any], kind: str) -> None:
    """Compare items of which each rank holds only some: an item that several ranks hold must be equal on them. `names`
    are all items that any rank may hold, the same on all ranks."""
    if world.size == 1:
        return
    # Thousands of parameters share the settings of a few groups.
    distinct = {id(value): canonical_text(value) for value in {id(item): item for item in items.values()}.values()}
    numbers = {key: int.from_bytes(_digest(text)[:7], "big") + 1 for key, text in distinct.items()}
    # 0 is for items that this rank does not hold.
    column = torch.tensor([numbers[id(items[name])] if name in items else 0 for name in names], dtype=torch.int64)
    table = torch.stack(world.start_all_gather(column).wait())
    largest = table.amax(0)
    differs = ((table != 0) & (table != largest)).any(0)
    if not differs.any():
        return
    position = int(differs.nonzero()[0])
    holding = table[:, position].tolist()
    first = next(rank for rank, digest in enumerate(holding) if digest)
    second = next(rank for rank, digest in enumerate(holding) if digest not in (0, holding[first]))
    name = names[position]
    text = distinct[id(items[name])] if name in items else None
    reference, difference = (world.broadcast_object(text, source) for source in (first, second))
    raise TrainingError(_message(f"{kind} {name!r}", first, reference, second, difference))


def compare_attributes(world: World, handles: Mapping[str, ModuleHandle]) -> None:
    """Refuse plain attributes of modules (numbers, strings, flags and tuples of these) that differ between ranks,
    because the forward of a rank's own blocks may use them.

    Called once for each module, before it is trained; later, ranks that run a layer may count or cache something in it.
    Not compared: attributes that begin with an underscore (private), that not all ranks have, paths, those that
    identify the rank, those named after times, hosts or counters, and attributes of other types (functions, lists,
    configurations).
    """
    new = {name: handle for name, handle in handles.items() if not handle.has_compared_attributes}
    if world.size == 1 or not new:
        return
    for handle in new.values():
        handle.has_compared_attributes = True
    attributes = _attributes(new)
    if _is_text_equal_on_all_ranks(world, repr(attributes)):
        return
    reference = world.broadcast_object(attributes)
    differing = {
        place: attributes[place]
        for place in reference
        if place in attributes and not _equal(attributes[place], reference[place])
    }
    absent = reference.keys() - attributes.keys()
    local_rank = int(os.environ.get("LOCAL_RANK", world.rank))
    table = world.broadcast_object(world.gather_objects((local_rank, differing, absent)))
    for place in dict.fromkeys(place for _, values_by_place, _ in table for place in values_by_place):
        module, name = place
        if any(place in without for _, _, without in table):
            continue
        values = [values_by_place.get(place, reference[place]) for _, values_by_place, _ in table]
        local_ranks = [local_rank for local_rank, _, _ in table]
        if _identifies_rank(name, values, range(world.size)) or _identifies_rank(name, values, local_ranks):
            continue
        rank = next(rank for rank, value in enumerate(values) if not _equal(value, values[0]))
        raise TrainingError(
            f"rank {rank} differs from rank 0 in attribute {name!r} of module {module!r}: rank 0 has {values[0]!r}, "
            f"rank {rank} has {values[rank]!r}; set it to the same value on all ranks, or, if what the module "
            "computes does not depend on it, begin its name with an underscore"
        )


def _attributes(handles: Mapping[str, ModuleHandle]) -> dict[tuple[str, str], Any]:
    """Plain attributes of all submodules, by the submodule's path and the attribute's name."""
    return {
        (".".join(filter(None, (module, path))), name): value
        for module, handle in handles.items()
        for path, submodule in handle.module.named_modules()
        for name, value in vars(submodule).items()
        if name[0] != "_" and name != "training" and not _INDIFFERENT.search(name) and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    """Whether a value can be compared. A path cannot: each host may have its own."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN_TYPES and not (type(value) is str and "/" in value)


def _equal(value: Any, reference: Any) -> bool:
    return value == reference or repr(value) == repr(reference)  # equal NaNs


def _identifies_rank(name: str, values: Sequence[Any], ranks: Sequence[int]) -> bool:
    """Whether an attribute identifies its rank: the rank's number, a string that contains it (`cuda:1`), or a flag of
    rank 0."""
    kinds = {type(value) for value in values}
    if kinds == {int}:
        is_rank = all(value == rank for value, rank in zip(values, ranks, strict=True))
        return is_rank and _RANK_NUMBER.search(name) is not None
    if kinds == {str}:
        return all(re.fullmatch(rf"\w+:{rank}", value) for value, rank in zip(values, ranks, strict=True))
    is_first = all(value is (rank == 0) for value, rank in zip(values, ranks, strict=True))
    return is_first and _FIRST_RANK.search(name) is not None


def _first_difference(digests_by_rank: Sequence[Mapping[str, bytes]]) -> tuple[str, int]:
    """The first item, in the order of rank 0, that differs on some rank, and the first such rank."""
    names = dict.fromkeys(name for digests in digests_by_rank for name in digests)
    for name in names:
        for rank, digests in enumerate(digests_by_rank):
            if digests.get(name) != digests_by_rank[0].get(name):
                return name, rank
    rank = next(rank for rank, digests in enumerate(digests_by_rank) if list(digests) != list(digests_by_rank[0]))
    raise TrainingError(f"rank {rank} compares items in a different order from rank 0: {list(digests_by_rank[rank])}")


def _message(name: str, first: int, reference: str | None, rank: int, difference: str | None) -> str:
    expected, differing = _excerpts(reference, difference)
    return (
        f"rank {rank} differs from rank {first} in {name}: rank {first} has {expected}, rank {rank} has {differing}; "
        f"{_ADVICE}"
    )


def _excerpts(first: str | None, second: str | None) -> tuple[str, str]:
    """Both texts around their first difference."""
    left, right = first or "", second or ""
    place = next((place for place, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        place = min(len(left), len(right))
    # Start the excerpt at a whole word.
    begin = max(0, left.rfind(" ", 0, max(0, place - _EXCERPT)) + 1) if place > _EXCERPT else 0

    def excerpt(text: str | None) -> str:
        if text is None:
            return "nothing"
        end = place + _EXCERPT
        shown = f"{'…' if begin else ''}{text[begin:end]}{'…' if end < len(text) else ''}"
        return repr(shown.replace("\n", " | "))

    return excerpt(first), excerpt(second)


def _digest(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=16).digest()


def canonical_text(value: Any) -> str:
    """A value as text, the same in every process that has the same value."""
    if isinstance(value, str):
        return value
    parts: list[str] = []
    _append_text(value, parts)
    return "".join(parts)


def _append_text(value: Any, parts: list[str]) -> None:
    match value:
        case enum.Enum():
            parts.append(str(value))
        case None | bool() | int() | float() | complex() | str() | bytes():
            parts.append(repr(value))
        case torch.Tensor():
            parts.append(tensor_text(value))
        case np.ndarray():
            text = str(value.tolist()) if value.size <= _LARGEST_SHOWN else _digest(value.tobytes()).hex()
            parts.append(f"{value.dtype} {value.shape} {text}")
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [field.name for field in dataclasses.fields(value) if field.init]
            parts.append(type(value).__name__)
            _append_entries([(f"{name}=", getattr(value, name)) for name in fields], "()", parts)
        case Mapping():
            entries = sorted((canonical_text(key), key) for key in value)
            _append_entries([(f"{text}: ", value[key]) for text, key in entries], "{}", parts)
        case Set():
            _append_entries([("", text) for text in sorted(map(canonical_text, value))], "{}", parts)
        case tuple() | list():
            _append_entries([("", entry) for entry in value], "()", parts)
        case _ if hasattr(value, "__qualname__"):
            parts.append(f"{value.__module__}.{value.__qualname__}")
        case _:
            parts.append(_ADDRESS.sub("", repr(value)))


def _append_entries(entries: Iterable[tuple[str, Any]], brackets: str, parts: list[str]) -> None:
    parts.append(brackets[0])
    for number, (name, value) in enumerate(entries):
        parts.append(f", {name}" if number else name)
        _append_text(value, parts)
    parts.append(brackets[1])


# What is compared


def version_items() -> dict[str, str]:
    return {
        "the version of Python": ".".join(map(str, sys.version_info[:2])),
        "the version of torch": torch.__version__,
        "the version of Spindle": import_module("spindle").__version__,
    }


_TRIED_STEPS = 3  # a scheduler's class stands for its rule, which may be a function
_RATES = ("_lr", "_lrs", "lambdas")
_COMPARED_ARGUMENTS = (
    "max_grad_norm",
    "gradient_accumulation_steps",
    "autocast",
    "sampling_weights",
    "tasks_per_step",
    "checkpoints",
    "seed",
    "name",
    "cuda_graphs",
    "ema",
    "run_folder",
    "profiler_steps",
)


def config_items(config: TrainConfig) -> dict[str, Any]:
    """The Trainer's arguments, and the tasks. Rank 0 alone reads the planner, the plan and whether to shard; what the
    optimizer and lr_scheduler functions do is compared when they are called."""
    planning = config.planning
    items = {f"Trainer({name}=...)": getattr(config, name) for name in _COMPARED_ARGUMENTS}
    items["Trainer(lr_scheduler=...)"] = _given(config.lr_scheduler)
    scaler = config.loss_scaling
    items["Trainer(grad_scaler=...)"] = None if scaler is None else scaler.state_dict()
    items["Trainer(callbacks=...)"] = [type(callback).__qualname__ for callback in config.callbacks]
    items["Planning(tensor_parallel_degrees=...)"] = planning.tensor_parallel_degrees
    items["Planning(memory_limit_bytes=...)"] = planning.memory_limit_bytes
    items["Planning(profile=...)"] = _given(planning.profile)
    items["Planning(planner=...)"] = "a pipeline" if planning.is_pipelined else "no pipeline"
    items["the names of the tasks"] = config.task_names
    for trial in config.trials:
        items[f"spindle.Trial({trial.name!r}, ...)"] = trial.max_grad_norm, _given(trial.lr_scheduler)
    return items | {f"the definition of task {task.name!r}": definition_text(task) for task in config.tasks}


def _given(value: object) -> str:
    """A `Planning` option as text: the text of a plan, or the type of a function or profile."""
    return "not given" if value is None else "given"


def definition_text(definition: TaskDefinition) -> str:
    return (
        f"batch_size={definition.batch_size}, weight={canonical_text(definition.weight)}, "
        f"per_sample_mean={definition.per_sample_mean}, items={dict(definition.items)}"
    )


def optimizer_items(
    make: MakeOptimizer,
    make_scheduler: MakeLRScheduler | None,
    parameters: Iterable[tuple[str, nn.Parameter, torch.Size]],
) -> tuple[dict[str, str], NamedGroups]:
    """What the user's functions return for all trained parameters, by name and with their whole shapes; and the
    optimizer's groups.

    Each rank makes its optimizer of the parameters that it holds, so groups may differ from rank to rank, but the rule
    by which they are made must not. The functions are called here with parameters on the meta device. Not detected: a
    rule that depends on values of parameters, or that fails on meta parameters, because the same error on all ranks
    counts as equal.
    """
    named: list[Named] = []
    for name, parameter, shape in parameters:
        stand_in = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"))
        stand_in.__dict__.update(parameter.__dict__)  # names and shapes, by which the function may choose groups
        named.append((name, stand_in))
    what = "what the functions of the optimizer and its scheduler give for parameters without values"
    items: dict[str, str] = {}
    try:
        optimizer = optimizer_of(make, named)
        if optimizer is None:
            return {}, ()
        if make_scheduler is not None:
            scheduler = scheduler_of(make_scheduler, optimizer, _TRIED_STEPS)
            items["the scheduler"] = canonical_text((type(scheduler), _without_rates(scheduler.state_dict())))
        settings = group_settings(optimizer, named)
    except Exception as error:  # the user's code may raise anything; if it is a mistake, the real call raises it again
        # without numbers, which may be the rank's
        return {what: f"{type(error).__name__}: {_NUMBER.sub('#', str(error))}"}, ()
    texts = {id(setting): canonical_text(setting) for setting in settings.values()}
    by_name = {
        f"the optimizer's settings of parameter {name!r}": texts[id(setting)] for name, setting in settings.items()
    }
    # Parameters that no group has here are included: their group may not follow from their names.
    groups = [canonical_text(settings_of(group)) for group in optimizer.param_groups]
    items |= {"the settings of the optimizer's groups": "\n".join(sorted(groups))}
    return {what: "no error"} | by_name | items, named_groups(optimizer, named)


def _without_rates(state: Any) -> Any:
    """A scheduler's state without its per-group entries: the order of groups may differ."""
    match state:
        case Mapping():
            return {key: _without_rates(value) for key, value in state.items() if not str(key).endswith(_RATES)}
        case tuple() | list():
            return [_without_rates(value) for value in state]
        case _:
            return state


def module_items(handles: Mapping[str, ModuleHandle]) -> dict[str, str]:
    """Names, classes, shapes and modes of everything in modules; values are broadcast from rank 0 at the start."""
    names = parameter_names(handles)
    items: dict[str, str] = {}
    for name, handle in handles.items():
        parameters = [
            f"{path} {tuple(parameter.shape)} {parameter.dtype} requires_grad={parameter.requires_grad}"
            + (f", tied to {names[id(parameter)]}" if names[id(parameter)] != f"{name}.{path}" else "")
            for path, parameter in handle.module.named_parameters(remove_duplicate=False)
        ]
        buffers = [f"{path} {tuple(buffer.shape)} {buffer.dtype}" for path, buffer in handle.module.named_buffers()]
        parts = [
            f"{path} {type(part).__qualname__}{'' if part.training else ' in evaluation mode'}"
            for path, part in handle.module.named_modules()
        ]
        arguments = ("whole_batch", "activation_checkpointing", "split", "tensor_parallel", "compile")
        items[f"the parameters of module {name!r}"] = "\n".join(parameters)
        items[f"the buffers of module {name!r}"] = "\n".join(buffers)
        items[f"the submodules of module {name!r}"] = "\n".join(parts)
        items[f"spindle.module({name!r}, ...)"] = canonical_text(
            {argument: getattr(handle, argument) for argument in arguments}
        )
    return items


def task_items(tasks: Sequence[RecordedTask], examples: Mapping[str, Any]) -> dict[str, str]:
    """The recorded functions of tasks, the batches they were recorded on, and everything in their modules."""
    items = module_items(handles_of(tasks))
    for task in tasks:
        name = task.definition.name
        items[f"the definition of task {name!r}"] = definition_text(task.definition)
        items[f"the first batch of task {name!r}"] = form_text(examples[name])
        lines = [f"{call.name} of {call.sources}: {graph_text(call.arguments, values=True)}" for call in task.calls]
        lines.append(f"loss of {task.loss_sources}: {graph_text(task.loss, values=True)}")
        lines.append(f"is_mean={task.is_mean}, is_sum={task.is_sum}, metrics {task.metrics}, branches {task.decisions}")
        items[f"the recorded graph of task {name!r}"] = "\n".join(lines)
    return items


def form_text(nest: Any) -> str:
    """The structure, shapes and types of a nest of tensors."""
    match nest:
        case torch.Tensor():
            return f"{nest.dtype} {tuple(nest.shape)}"
        case Mapping():
            return f"{{{', '.join(f'{key!r}: {form_text(value)}' for key, value in nest.items())}}}"
        case tuple() | list():
            return f"{type(nest).__name__}({', '.join(map(form_text, nest))})"
        case _:
            return canonical_text(nest)


def shape_items(cuts: Mapping[str, Cuts]) -> dict[str, str]:
    """Shapes that cross cuts between layers, by microbatch."""
    return {
        f"the shapes between the layers of {name}": "\n".join(
            f"op {op} layer {layer}: {canonical_text(form.leaves)} of {_ADDRESS.sub('', str(form.spec))}"
            for (op, layer), form in forms.items()
        )
        for name, forms in cuts.items()
    }
