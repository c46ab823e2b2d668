"""The feeds of a session's tasks, made from the loaders that a fit is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import DistributedSampler

from spindle.data import Balanced, RandomState, random_state
from spindle.errors import CheckpointError, TrainingError
from spindle.run import World
from spindle.train.agreement import compare
from spindle.train.balanced_feed import BalancedFeed
from spindle.train.feed import Feed, LoaderPosition, draw
from spindle.train.samples import StreamedSamples, by_number, is_streaming, sample_feed
from spindle.train.session import TrainSession
from spindle.train.task import TaskDefinition

_SWEEP = "sweep"  # the name of the feed that all trials share


def make_feeds(session: TrainSession, loaders: Mapping[str, Any], *, drop_last: bool) -> dict[str, Feed]:
    """Make a feed for each task. Refuses missing loaders, and loaders without a task."""
    names = session.config.task_names
    problems = [f"none for {name!r}" for name in names if name not in loaders]
    loaders = {name: by_number(loader) for name, loader in loaders.items() if name not in session.absent_tasks}
    problems += [f"{name!r} is no task (tasks: {', '.join(names)})" for name in loaders if name not in names]
    if problems:
        raise TrainingError(f"fit needs one loader for each task: {'; '.join(problems)}")
    for name, loader in loaders.items():
        _refuse_distributed_sampler(name, loader)
    items: dict[str, Any] = {f"the length of the loader of task {name!r}": _length_of(loaders[name]) for name in names}
    items |= {
        f"whether the balanced data of task {name!r} have num_workers": loaders[name].num_workers > 0
        for name in names
        if isinstance(loaders[name], Balanced)
    }
    compare(session.world, items)
    # A state that was saved during a fit has all positions, so no random state is drawn.
    is_resumed = set(names) <= session.loader_positions.keys()
    state = None if is_resumed else shared_random_state(session.world)
    if session.config.is_sweep:
        return dict.fromkeys(names, _feed_of_trials(session, loaders[names[0]], drop_last=drop_last, state=state))
    return {
        task.name: make_feed(session, task, loaders[task.name], drop_last=drop_last, state=state)
        for task in session.config.tasks
    }


def _feed_of_trials(session: TrainSession, loader: Any, *, drop_last: bool, state: RandomState | None) -> Feed:
    """The feed that all trials of a sweep share. It has a name of its own, so that the order of samples does not depend
    on which trials there are."""
    tasks = session.config.tasks
    if isinstance(loader, Balanced):
        raise TrainingError("a sweep of trials cannot read balanced data; give a loader of batches, or a dataset")
    task = replace(next((task for task in tasks if task.tokens is not None), tasks[0]), name=_SWEEP)
    names = [task.name for task in tasks]
    return make_feed(session, task, loader, drop_last=drop_last, state=state, trials=names)


def make_feed(
    session: TrainSession,
    definition: TaskDefinition,
    loader: Any,
    *,
    drop_last: bool,
    state: RandomState | None = None,
    trials: Sequence[str] = (),
) -> Feed:
    """The feed of a task, or the shared feed of the `trials` of a sweep.

    A dataset continues after the batches of earlier fits. `state` is the random state of its loader, by default rank
    0's.
    """
    config, world = session.config, session.world
    _refuse_distributed_sampler(definition.name, loader)
    loader = by_number(loader)
    facts = _facts_of(definition, loader)
    position = None
    names = trials or (definition.name,)
    for name in names:
        saved = session.loader_positions.pop(name, None)
        position = saved if position is None else position  # all trials have read equally many batches
        _check_facts(name, session.loader_facts.pop(name, None), facts)
    if position is None:
        position = LoaderPosition(random_state=shared_random_state(world) if state is None else state)
    shared: dict[str, Any] = {
        "definition": definition,
        "drop_last": drop_last,
        "position": position,
        "notify": session.notify,
        "compared": world.size > 1,
        "facts": facts,
        "bar": session.progress.bar,
    }
    if isinstance(loader, Balanced):
        degree, num_microbatches = config.planning.pipeline_parallel_degree, config.gradient_accumulation_steps
        if config.planning.is_pipelined and degree and num_microbatches < world.size // degree:
            raise TrainingError(
                f"task {definition.name!r}: a step of balanced data needs a microbatch for each of the "
                f"{world.size // degree} replicas of the pipeline, got gradient_accumulation_steps={num_microbatches}; "
                "raise it, or take a larger pipeline_parallel_degree"
            )
        what = f"the sources of the balanced data of task {definition.name!r} whose lengths are read"
        compare(world, {what: sorted(loader.read_lengths)})
        return BalancedFeed(loader, config.gradient_accumulation_steps, world=world, **shared)
    feed = sample_feed(loader, config.seed, session.num_batches[names[0]], **shared)
    if feed is None:
        return Feed(loader=loader, **shared)
    feed.num_again = config.gradient_accumulation_steps
    return feed


def _facts_of(definition: TaskDefinition, loader: Any) -> dict[str, Any]:
    """The properties that a loader must share with the loader whose position a checkpoint stores."""
    return {"class": type(loader).__name__, "length": _length_of(loader), "batch_size": definition.batch_size}


def _check_facts(task: str, saved: Mapping[str, Any] | None, present: Mapping[str, Any]) -> None:
    for key, value in present.items() if saved else ():  # empty if no loader of the task was read then
        if saved and saved.get(key) != value:
            raise CheckpointError(
                f"task {task!r}: the {_FACTS[key]} was {saved.get(key)} when the checkpoint was saved, and is {value} "
                "now; its data would continue in a different order"
            )


_FACTS = {"class": "class of its loader", "length": "length of its loader", "batch_size": "batch size"}


def _refuse_distributed_sampler(task: str, loader: Any) -> None:
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    if any(isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1 for sampler in samplers):
        raise TrainingError(
            f"task {task!r}: its loader has a DistributedSampler, which gives each rank different samples. Here all "
            "ranks read the same batches, and each trains on its part: leave the sampler out, "
            "DataLoader(dataset, batch_size=..., shuffle=True), with the batch size of all ranks together"
        )
    if is_streaming(getattr(loader, "dataset", None)) and not isinstance(loader, StreamedSamples):
        raise TrainingError(
            f"task {task!r}: its loader reads a StreamingDataset, whose iterator waits for all ranks of a host, of "
            "which some need not read: give the dataset itself instead of a DataLoader of it"
        )


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # it has no length
        return None


def shared_random_state(world: World) -> RandomState:
    """Rank 0's random state, from which loaders draw their order. Later draws start from a different state."""
    state: RandomState = world.broadcast_object(random_state())
    draw()
    return state
