"""All weights on every rank, and evaluation with them: ranks take turns with whole batches, and sum their losses.

With all weights on every rank, evaluation needs no plan, and gives the same numbers as one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset

from spindle.data import Balanced, RandomState, random_state, restored_random_state, set_random_state
from spindle.errors import TrainingError
from spindle.launch import recorder
from spindle.run import World, metric_sums, on_device, plain, send_tensors
from spindle.train.agreement import compare_attributes
from spindle.train.analyze import autocast_of
from spindle.train.config import TrainConfig
from spindle.train.ema import averaged_weights
from spindle.train.feed import form_of_batch, is_empty
from spindle.train.record import handles_of, named_parameters, record, record_all, root_handles
from spindle.train.samples import by_number
from spindle.train.session import TrainSession
from spindle.train.task import Mean, TaskDefinition, TaskResult

_END = object()


@contextmanager
def whole_weights(session: TrainSession, *, ema: bool, is_fitting: bool) -> Iterator[None]:
    """A context in which every rank has all weights, or with `ema` their averages. During a fit they are gathered
    first."""
    session.callbacks.has_gathered = True
    decay = session.config.ema
    if ema and decay is None:
        raise TrainingError("ema=True: there is no average of the weights; give the Trainer ema=0.999, for example")
    if is_fitting:
        if session.world.device.type == "cuda":
            torch.cuda.synchronize(session.world.device)
        session.gather_parameters()
    averages: AbstractContextManager[None] = nullcontext()
    if ema and decay is not None:
        state = session.optimizer_state() if session.update is None else session.update.state()
        averages = averaged_weights(session.world, state, named_parameters(session.handles), decay)
    with averages:
        yield
    if is_fitting:
        session.scatter_parameters()


def state_dict(session: TrainSession) -> dict[str, torch.Tensor]:
    """Weights and buffers of all modules by name. Every rank must have all of them."""
    handles = root_handles(session.handles or handles_of(record_all(session.config.tasks)))
    return {
        f"{name}.{path}": value
        for name, handle in handles.items()
        for path, value in handle.module.state_dict().items()
    }


def evaluate(
    config: TrainConfig,
    loaders: Mapping[str, Iterable[Any]],
    steps: int | None,
    state: RandomState,
    world: World,
    *,
    share_weights: bool,
) -> dict[str, float]:
    """The mean loss of each task over its loader, or over the first `steps` batches of it, and its metrics by
    `task/name`."""
    tasks = {task.name: task for task in config.tasks}
    names: list[str] = []
    sums: list[torch.Tensor] = []
    for name, loader in loaders.items():
        if name not in tasks:
            raise TrainingError(f"evaluate: {name!r} is not a task (tasks: {', '.join(tasks)})")
        if isinstance(loader, Balanced):
            raise TrainingError(f"evaluate: balanced data, as of task {name!r}, have no end; give a loader of batches")
        loss, metrics = _loss_and_metric_sums(tasks[name], loader, steps, state, config, world, share_weights)
        names += [name, *(f"{name}/{metric}" for metric in metrics)]
        sums += [loss, *metrics.values()]
    totals = sum(world.start_all_gather(torch.stack(sums)).wait()) if sums else torch.zeros(0, 2)
    means = {}
    for name, (total, count) in zip(names, totals.tolist(), strict=True):  # type: ignore[union-attr]
        if not count and name in loaders:
            raise TrainingError(f"evaluate: the loader of task {name!r} yields no samples")
        means[name] = total / count if count else math.nan
    return means


def _loss_and_metric_sums(
    task: TaskDefinition,
    loader: Iterable[Any],
    steps: int | None,
    state: RandomState,
    config: TrainConfig,
    world: World,
    share_weights: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This rank's sum of losses and its divisor (the counts of a `spindle.mean`, otherwise the number of samples), and
    the total and count of each metric. The metrics are the same on all ranks."""
    sums = torch.zeros(2, dtype=torch.float64)
    metrics: dict[str, torch.Tensor] = {}
    seen: dict[str, nn.Module] = {}
    forms: set[str] = set()
    with ExitStack() as after, torch.no_grad(), autocast_of(config, world):
        for number, nest in enumerate(islice(_batches(loader, task.batch_size, state), steps)):
            recorder.num_events += 1  # an evaluation in `on_step` may take longer than the limit for hung ranks
            if is_empty(nest):
                continue
            form = form_of_batch(nest)
            if form not in forms:  # on all ranks
                forms.add(form)
                recorded = record(task, nest)
                for name in recorded.metrics:
                    metrics.setdefault(name, torch.zeros(2, dtype=torch.float64))
                for name, handle in handles_of([recorded]).items():
                    if name not in seen:
                        compare_attributes(world, {name: handle})
                        seen[name] = handle.module.to(world.device)
                        after.callback(_mode_restorer(handle.module))
                        handle.module.eval()
                        if share_weights:
                            _broadcast_weights(handle.module, world)
            if number % world.size == world.rank:
                loss = task(on_device(nest, world.device))
                num_samples = _num_samples(nest)
                if isinstance(loss, TaskResult):
                    loss, values = loss
                    pairs = metric_sums(list(values.values()), num_samples, world.device).cpu().view(-1, 2)
                    for name, pair in zip(values, pairs, strict=True):
                        metrics[name] += pair
                total, count = loss if isinstance(loss, Mean) else (loss, 1)
                samples = 1 if isinstance(loss, Mean) else num_samples
                sums += torch.tensor([float(total) * samples, float(count) * samples], dtype=torch.float64)
    return sums, metrics


def _num_samples(nest: Any) -> int:
    """The most common length of a batch's tensors. (Which tensors have one row per sample is known only for training
    batches.)"""
    lengths = [len(leaf) for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf)]
    return max(lengths, key=lengths.count)


def _batches(loader: Any, batch_size: int, state: RandomState) -> Iterator[Any]:
    """The batches of a loader, in the same order on all ranks whatever else they draw. A dataset is read in its own
    order."""
    loader = by_number(loader)
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        loader = DataLoader(loader, batch_size)
    iterator: Iterator[Any] | None = None
    while True:
        with restored_random_state():
            set_random_state(state)
            iterator = iter(loader) if iterator is None else iterator
            nest = next(iterator, _END)
            state = random_state()
        if nest is _END:
            return
        yield plain(nest)


def _mode_restorer(module: nn.Module) -> Any:
    """A function that restores the train or eval mode of all submodules."""
    modes = [(part, part.training) for part in module.modules()]

    def restore() -> None:
        for part, mode in modes:
            part.training = mode

    return restore


def _broadcast_weights(module: nn.Module, world: World) -> None:
    """Broadcast rank 0's weights, as the first fit would."""
    tensors = [*module.parameters(), *module.buffers()]
    send_tensors(world, tensors, [0] * len(tensors), range(world.size))
