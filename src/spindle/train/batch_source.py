"""The batches of a fit's steps, read a step ahead: each rank reads those of the tasks that it runs.

All ranks count the batches of all tasks, whether or not they read them, so that a rank that starts to read a task,
under a new plan or in the next fit, continues where the others are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
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

MakeFeed = Callable[[TaskDefinition, Any], Feed]  # of a task's loader
StepHeaders = list[dict[str, BatchHeader]]  # by micro-step and task
StepBatches = list[dict[str, Batch]]  # by micro-step and task: those that this rank reads


class BatchSource:
    """The feeds of a fit's tasks, and how far they are read. `feeds` changes with the tasks."""

    def __init__(self, session: TrainSession, feeds: dict[str, Feed], make_feed: MakeFeed) -> None:
        self._session, self._world = session, session.world
        self.feeds, self._make_feed = feeds, make_feed
        self.num_asked = dict.fromkeys(session.config.task_names, 0)  # batches of each task that any rank asked for
        self._num_read_ahead: dict[str, int] = {}  # of these, for the step that is about to run

    @property
    def num_trained(self) -> dict[str, int]:
        """The batches of each task that this fit has trained on, before the step that is about to run."""
        return {name: count - self._num_read_ahead.get(name, 0) for name, count in self.num_asked.items()}

    def positions(self, names: Collection[str] | None = None) -> dict[str, LoaderPosition]:
        """The positions of the loaders of all tasks, or of some, before the step that is about to run."""
        trained = self.num_trained
        return {name: self.feeds[name].position(trained[name]) for name in (trained if names is None else names)}

    def saved_positions(self) -> dict[str, SavedLoader]:
        """The positions of loaders that this rank reads; of the other tasks, how many batches are trained."""
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
        if resumed is not None:  # the first step, as it was read before the state was saved
            step_tasks, known = resumed
            sampled = [name for name in names if name in (step_tasks if name in known else sampled)]
        num_micro_steps = config.gradient_accumulation_steps
        for name in sampled:
            self.feeds[name].prepare(self.num_asked[name])
        batches = [
            {name: self._next(name, micro_step) for name in sampled if self._reads(name)}
            for micro_step in range(num_micro_steps)
        ]
        self._num_read_ahead = dict.fromkeys(sampled, num_micro_steps)
        for name in sampled:
            self.num_asked[name] += num_micro_steps
        return batches

    def _next(self, task: str, micro_step: int) -> Batch:
        variants, runtime = self._session.variants, self._session.current_runtime
        batch = self._fetch(task, self.num_asked[task] + micro_step)
        return replace(batch, variant=variants.key_of(task, batch, runtime.weights.in_shape))

    def upcoming(self) -> StepBatches | None:
        """On rank 0, the batches behind those that were read last by micro-step and task variant, without values; none
        where a variant is new. None where a task has no balanced data, or none are decoded ahead."""
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
                batch = feeds[name].shapes_at(self.num_asked[name] + micro_step)
                variant = variants.get(name, variants.key_of(name, batch, runtime.weights.in_shape))
                if variant is None:
                    return []
                rows[-1][variant.name] = batch
        return rows

    def end_reading(self) -> None:
        """The step that is about to run is the last one, for which everything is read."""
        self._num_read_ahead = {}

    def leave_out_read_ahead(self) -> None:
        """Forget the batches that were read for a step that will not run: the next fit starts with them."""
        self.num_asked = self.num_trained
        self._num_read_ahead = {}

    def note_trained(self) -> None:
        """The step whose batches were read last but for those read ahead is done."""
        for name, number in self.num_trained.items():
            self.feeds[name].note_trained(number)

    def _reads(self, task: str) -> bool:
        """Whether this rank needs batches of any variant of a task."""
        return self._session.current_runtime.steps.reads(self._session.variants.names_of(task))

    def _fetch(self, task: str, number: int) -> Batch:
        """A task's batch of this number; only the rows that this rank needs, if it can be read in parts.

        A loss that is still to be checked needs all of it, and so does a task that may take several variants.
        """
        # Only a map-style dataset can be read in parts; loaders give whole batches, the same to all ranks.
        feed, variant = self.feeds[task], self._session.variants.only(task)
        if not isinstance(feed, SampleFeed):
            return feed.at(number)
        if variant is None or variant.name not in self._session.checked or not feed.divides:
            return feed.at(number, None)
        return feed.at(number, self._session.current_runtime.steps.needs(variant.name))

    def change_tasks(
        self, config: TrainConfig, loaders: Mapping[str, Any], headers: StepHeaders, batches: StepBatches
    ) -> None:
        """End and add feeds before a step whose `batches` are read: what was read of tasks that end is left out, and
        tasks that join have none yet."""
        ended = {name for name in self.feeds if name not in config.task_names or name in loaders}
        for name in ended:
            self.feeds.pop(name).close()
            self._num_read_ahead.pop(name, None)
            # The batch that was read for this step is not trained on; a dataset that comes back starts with it.
            self._session.num_batches[name] += self.num_asked.pop(name) - sum(name in row for row in headers)
        for task in config.tasks:
            if task.name not in self.feeds:
                self.feeds[task.name] = self._make_feed(task, loaders[task.name])
                self.num_asked[task.name] = 0
        headers[:] = [{name: header for name, header in row.items() if name not in ended} for row in headers]
        batches[:] = [{name: batch for name, batch in row.items() if name not in ended} for row in batches]

    def share(self, headers: StepHeaders, batches: StepBatches) -> None:
        """Under a new plan, give the batches that are already read to ranks that start to read their tasks; batches
        that are read in parts are divided anew."""
        for number, row in enumerate(headers):
            for task, header in row.items():
                if isinstance(self.feeds[task], SampleFeed | BalancedFeed):
                    if self._reads(task):
                        position = self.num_asked[task] - len(headers) + number
                        batches[number][task] = replace(self._fetch(task, position), variant=header.variant)
                else:
                    batch = self.broadcast(batches[number].get(task), header.reader)
                    batches[number].setdefault(task, batch)

    def broadcast(self, batch: Batch | None, source: int) -> Batch:
        """Broadcast one rank's batch; through the host, because ranks have different devices."""
        if batch is not None and self._world.rank == source:
            batch = batch.loaded()
            batch = replace(batch, nest=on_device(batch.nest, torch.device("cpu")))
        result: Batch = self._world.broadcast_object(batch, source)
        return result
