"""The batches of a fit's steps, read a step ahead: each rank reads those of the tasks that it runs.

All ranks count the batches of all tasks, whether or not they read them, so that a rank that starts to read a task,
under a new plan or in the next fit, continues where the others are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from spindle.checkpoint import SavedLoader
from spindle.run import on_device
from spindle.train.balanced_feed import BalancedFeed
from spindle.train.config import TrainConfig
from spindle.train.feed import Batch, Feed, LoaderPosition
from spindle.train.header import BatchHeader
from spindle.train.plain_json import to_plain
from spindle.train.samples import SampleFeed
from spindle.train.sampling import tasks_in_step
from spindle.train.session import TrainSession
from spindle.train.task import TaskDefinition

MakeFeed = Callable[[TaskDefinition, Any], Feed]  # from a task and its loader
StepHeaders = list[dict[str, BatchHeader]]  # batches by micro-step and task
StepBatches = list[dict[str, Batch]]  # by micro-step and task, only those that this rank reads


class BatchSource:
    """The feeds of a fit's tasks, and how far they are read. `feeds` changes with the tasks."""

    def __init__(self, session: TrainSession, feeds: dict[str, Feed], make_feed: MakeFeed) -> None:
        self._session, self._world = session, session.world
        self.feeds, self._make_feed = feeds, make_feed
        # The number of batches of each task that were read on any rank.
        self.num_read = dict.fromkeys(session.config.task_names, 0)
        self._num_read_ahead: dict[str, int] = {}  # of these, how many are for the step that is about to run

    @property
    def num_trained(self) -> dict[str, int]:
        """The number of batches of each task that this fit has trained on before the step that is about to run."""
        return {name: count - self._num_read_ahead.get(name, 0) for name, count in self.num_read.items()}

    def positions(self, names: Collection[str] | None = None) -> dict[str, LoaderPosition]:
        """The positions of the loaders of all tasks, or of the named ones, before the step that is about to run."""
        trained = self.num_trained
        return {name: self.feeds[name].position(trained[name]) for name in (trained if names is None else names)}

    def saved_positions(self) -> dict[str, SavedLoader]:
        """The positions of the loaders that this rank reads, and the number of trained batches of all other tasks."""
        names = [name for name in self._session.config.task_names if self._reads(name)]
        positions = self.positions(names)
        counts = self._session.num_batches + Counter(self.num_trained)
        saved = {name: SavedLoader(num_batches=count, position=None, facts={}) for name, count in counts.items()}
        return saved | {
            name: SavedLoader(
                num_batches=counts[name],
                position=to_plain(positions[name].values(), f"the position of the loader of task {name!r}"),
                facts=dict(self.feeds[name].facts),
            )
            for name in names
        }

    def read(self, step: int) -> StepBatches:
        """The batches of a step that this rank needs."""
        config, names = self._session.config, self._session.config.task_names
        num_tasks = min(config.tasks_per_step, len(names))
        sampled = tasks_in_step(config.sampling_weights, names, num_tasks, config.seed, step)
        resumed, self._session.next_step_tasks = self._session.next_step_tasks, None
        # The first step of a resumed run has the tasks that were drawn before the state was saved.
        if resumed is not None:
            step_tasks, known = resumed
            sampled = [name for name in names if name in (step_tasks if name in known else sampled)]
        num_micro_steps = config.gradient_accumulation_steps
        for name in sampled:
            self.feeds[name].prepare(self.num_read[name])
        batches = [
            self._next([name for name in sampled if self._reads(name)], micro_step)
            for micro_step in range(num_micro_steps)
        ]
        self._num_read_ahead = dict.fromkeys(sampled, num_micro_steps)
        for name in sampled:
            self.num_read[name] += num_micro_steps
        return batches

    def _next(self, names: Sequence[str], micro_step: int) -> dict[str, Batch]:
        """The next batch of each of these tasks."""
        variants, runtime = self._session.variants, self._session.current_runtime
        read: dict[int, Batch] = {}  # by feed, because all trials of a sweep share one feed and one batch
        batches = {}
        for name in names:
            feed = id(self.feeds[name])
            if feed not in read:
                read[feed] = self._fetch(name, self.num_read[name] + micro_step)
            batch = self._with_tokens_of_trial(name, read[feed])
            batches[name] = replace(batch, variant=variants.key_of(name, batch, runtime.weights.in_shape))
        return batches

    def _with_tokens_of_trial(self, task: str, batch: Batch) -> Batch:
        """The batch of a sweep with the token count of this trial."""
        config = self._session.config
        if not config.is_sweep or not batch.num_rows:
            return batch
        tokens = next(definition.tokens for definition in config.tasks if definition.name == task)
        return replace(batch, tokens=0 if tokens is None else int(tokens(batch.nest)))

    def upcoming(self) -> StepBatches | None:
        """On rank 0, the batches that come after those read last, by micro-step and task variant, without values.

        None if a task has no balanced data, or if nothing is decoded ahead. Variants that are not planned yet are left
        out.
        """
        names = self._session.config.task_names
        feeds = {name: feed for name, feed in self.feeds.items() if isinstance(feed, BalancedFeed)}
        if len(feeds) < len(names) or self._session.config.sampling_weights is not None:
            return None
        if not any(feed.decodes_ahead for feed in feeds.values()):
            return None
        variants, runtime = self._session.variants, self._session.current_runtime
        rows: StepBatches = []
        for micro_step in range(self._session.config.gradient_accumulation_steps) if self._world.rank == 0 else ():
            rows.append({})
            for name in names:
                batch = feeds[name].shapes_at(self.num_read[name] + micro_step)
                variant = variants.get(name, variants.key_of(name, batch, runtime.weights.in_shape))
                if variant is None:
                    return []
                rows[-1][variant.name] = batch
        return rows

    def end_reading(self) -> None:
        """Note that the step about to run is the last one: all its batches are read already."""
        self._num_read_ahead = {}

    def drop_read_ahead(self) -> None:
        """Drop the batches that were read for a step that will not run; the next fit starts with them."""
        self.num_read = self.num_trained
        self._num_read_ahead = {}

    def note_trained(self) -> None:
        """Note that the current step is done: the next one trains on the batches that were read ahead."""
        for name, number in self.num_trained.items():
            self.feeds[name].note_trained(number)

    def _reads(self, task: str) -> bool:
        """Whether this rank needs batches of any variant of a task. In a sweep, it may need the shared batch only for
        another trial, which computes what this one uses."""
        config, variants = self._session.config, self._session.variants
        names = config.task_names if config.is_sweep else [task]
        return self._session.current_runtime.steps.reads(
            [variant for name in names for variant in variants.names_of(name)]
        )

    def _fetch(self, task: str, number: int) -> Batch:
        """Read a batch of a task; only the rows that this rank needs, if the batch can be read in parts.

        The whole batch is needed while its split loss is still to be checked, and if the task may take several
        variants.
        """
        # Only map-style datasets can be read in parts; other loaders yield the same whole batches on all ranks.
        session, feed = self._session, self.feeds[task]
        if not isinstance(feed, SampleFeed):
            return feed.at(number)
        tasks = session.config.task_names if session.config.is_sweep else [task]
        variants = [session.variants.only(name) for name in tasks]
        names = [variant.name for variant in variants if variant is not None]
        if len(names) < len(tasks) or not session.checked.issuperset(names) or not feed.divides:
            return feed.at(number, None)
        return feed.at(number, session.current_runtime.steps.needs(names))

    def change_tasks(
        self, config: TrainConfig, loaders: Mapping[str, Any], headers: StepHeaders, batches: StepBatches
    ) -> None:
        """Remove and add feeds before a step whose `batches` are read already. Batches of removed tasks are dropped;
        added tasks have no batch in this step."""
        ended = {name for name in self.feeds if name not in config.task_names or name in loaders}
        for name in ended:
            feed = self.feeds.pop(name)
            if feed not in self.feeds.values():  # another trial of the sweep continues to read this feed
                feed.close()
            self._num_read_ahead.pop(name, None)
            # The batch that was read for this step is not trained on. A dataset that is added again starts with it.
            self._session.num_batches[name] += self.num_read.pop(name) - sum(name in row for row in headers)
        for task in config.tasks:
            if task.name not in self.feeds:
                self.feeds[task.name] = self._make_feed(task, loaders[task.name])
                self.num_read[task.name] = 0
        headers[:] = [{name: header for name, header in row.items() if name not in ended} for row in headers]
        batches[:] = [{name: batch for name, batch in row.items() if name not in ended} for row in batches]

    def share(self, headers: StepHeaders, batches: StepBatches) -> None:
        """After a change of plan, give batches that are already read to ranks that start to read their tasks. Batches
        that are read in parts are divided anew."""
        for number, row in enumerate(headers):
            read: dict[int, Batch] = {}  # by feed, because all trials of a sweep share one
            for task, header in row.items():
                if isinstance(self.feeds[task], SampleFeed | BalancedFeed):
                    if self._reads(task):
                        position = self.num_read[task] - len(headers) + number
                        feed = id(self.feeds[task])
                        if feed not in read:
                            read[feed] = self._fetch(task, position)
                        batch = self._with_tokens_of_trial(task, read[feed])
                        batches[number][task] = replace(batch, variant=header.variant)
                else:
                    batch = self.broadcast(batches[number].get(task), header.reader)
                    batches[number].setdefault(task, batch)

    def broadcast(self, batch: Batch | None, source: int) -> Batch:
        """Broadcast one rank's batch, through the host because ranks have different devices."""
        if batch is not None and self._world.rank == source:
            batch = batch.loaded()
            batch = replace(batch, nest=on_device(batch.nest, torch.device("cpu")))
        result: Batch = self._world.broadcast_object(batch, source)
        return result
