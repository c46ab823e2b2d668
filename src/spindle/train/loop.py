"""Step after step: batches read a step ahead, ranks told of them, the plan run on them, losses told of.

In each step ranks exchange one small header, a step ahead: the samples and shapes of each task's next batch, and their
parts of the losses of a step before.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from spindle.errors import TrainingError
from spindle.run import Watch, World
from spindle.run.recorded import timeline_of
from spindle.simulate import simulate
from spindle.train.buffers import buffers_home, share_buffers
from spindle.train.feed import Batch, Feed
from spindle.train.header import Table, agreed, header, losses_in
from spindle.train.optimizer import optimizer_of
from spindle.train.preparation import Options, Prepared, on_device
from spindle.train.progress import Progress
from spindle.train.record import RecordedTask, record
from spindle.train.result import FitResult
from spindle.train.trace import describe_batch

OnStep = Callable[[int, dict[str, float]], None]
_SAMPLED_STEPS = 9  # whose timelines are kept
# How many steps lie between a step and the header that carries its losses. Reading them waits for a GPU, which must not
# stand still for it.
_LOSSES_BEHIND = {"cpu": 1, "cuda": 2}


class Loop:
    """Trains with one plan."""

    def __init__(
        self,
        prepared: Prepared,
        options: Options,
        world: World,
        feeds: Mapping[str, Feed],
        shown: Progress,
        notices: list[str],
        on_step: OnStep | None,
        same_way: set[tuple[str, int]],
    ) -> None:
        self._prepared, self._options, self._world, self._feeds = prepared, options, world, feeds
        self._shown, self._notices, self._on_step, self._same_way = shown, notices, on_step, same_way
        self._history: list[dict[str, float]] = []

    def run(self, first: int, steps: int) -> FitResult:
        prepared, world, shown, names = self._prepared, self._world, self._shown, self._options.names
        prepared.weights.send_out()
        share_buffers(prepared.bound, world)
        main = prepared.main
        if prepared.optimizer is None:
            parameters = prepared.graph.parameters
            prepared.optimizer = optimizer_of(
                self._options.make_optimizer,
                [
                    (parameters[number].name, prepared.weights.parameters[number])
                    for number in sorted(main.held)
                    if parameters[number].trainable
                ],
            )
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(world.device)
        kept: list[Watch] = []
        sampled = _sampled(steps)
        step_s: list[float] = []
        batches = self._read()
        gathering = world.start_all_gather(header(names, batches, None))
        unsent: deque[torch.Tensor] = deque()  # losses of the last steps, which a GPU may still be at
        carries_losses = False  # the header that is on its way
        shown.training(steps, names)
        for number in range(steps):
            begin = time.perf_counter()
            table = [one.tolist() for one in gathering.wait()]
            if carries_losses:
                self._note(table, first)
            rows, signatures = agreed(table, names, first + number)
            current = batches
            if number + 1 < steps:
                batches = self._read()
                carries_losses = len(unsent) >= _LOSSES_BEHIND[world.device.type]
                losses = unsent.popleft() if carries_losses else None
                gathering = world.start_all_gather(header(names, batches, losses))
            executor = prepared.executor_for(rows)
            is_timed = number in sampled and executor is main
            if is_timed:
                world.meet()  # a timeline needs a common start, as the simulator has
            parts, watch = executor.step(
                first + number,
                {name: on_device(batch.nest, world.device) for name, batch in current.items()},
                signatures,
                prepared.optimizer,
                check_losses=first + number == 0,
                timed=is_timed,
            )
            unsent.append(parts)
            if is_timed:
                kept.append(watch)
            step_s.append(time.perf_counter() - begin)
            shown.step(number + 1, step_s[-1])
        # The losses of the last steps have no header to travel with.
        for losses in unsent:
            self._note([one.tolist() for one in world.start_all_gather(header(names, {}, losses)).wait()], first)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        for name, reason in main.without_graph.items():
            text = f"{name} runs without a CUDA graph: {reason}"
            if text not in self._notices:
                self._notices.append(text)
                shown.note(text)
        peak = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else 0
        prepared.weights.bring_home()
        buffers_home(prepared, world)
        share_buffers(prepared.bound, world)
        return self._result(kept, step_s, peak)

    def _read(self) -> dict[str, Batch]:
        """The next batches of the tasks that this rank needs."""
        wanted = self._prepared.main.reads
        batches = {name: feed.next() for name, feed in self._feeds.items() if name in wanted}
        for name, batch in batches.items():
            self._check_way(self._prepared.bound.tasks[name].recorded, batch)
        return batches

    def _note(self, table: Table, first: int) -> None:
        """Losses have become known."""
        losses, history = losses_in(table, self._options.names), self._history
        step = first + len(history)
        history.append(losses)
        for name, loss in losses.items():
            if not math.isfinite(loss):
                raise TrainingError(
                    f"task {name!r}: its loss is {loss} in step {step}"
                    + (f" (step {step - 1}: {history[-2][name]:.6g})" if len(history) > 1 else "")
                    + "; look at its learning rate, its data and what it divides by"
                )
        self._shown.losses(step, losses)
        if self._on_step is not None:
            self._on_step(step, losses)

    def _check_way(self, recorded: RecordedTask, batch: Batch) -> None:
        """A task that branches on shapes must take the way on which it was recorded."""
        name = recorded.definition.name
        if not recorded.decisions or (name, batch.signature) in self._same_way:
            return
        again = record(replace(recorded.definition, batch_size=batch.num_rows), batch.nest)
        if again.decisions != recorded.decisions:
            raise TrainingError(
                f"task {name!r}: it branches on shapes, and this batch ({describe_batch(batch.nest)}) takes another "
                "way than the first did; it is recorded once: move the branch into a module, or pad batches alike"
            )
        self._same_way.add((name, batch.signature))

    def _result(self, kept: list[Watch], step_s: list[float], peak_bytes: int) -> FitResult:
        """Everything that can be said about the run; timelines on rank 0 alone."""
        prepared, world = self._prepared, self._world
        spans = world.gather_objects([watch.spans() for watch in kept])
        measured = None
        if world.rank == 0 and kept:
            timelines = [timeline_of(prepared.program, step) for step in zip(*spans, strict=True)]
            measured = sorted(timelines, key=lambda one: one.makespan_ns)[len(timelines) // 2]
        return FitResult(
            rank=world.rank,
            losses=tuple(self._history),
            step_s=tuple(step_s),
            plan=prepared.plan,
            program=prepared.program,
            graph=prepared.graph,
            predicted=simulate(prepared.program, prepared.profile),
            measured=measured,
            peak_bytes=tuple(world.gather_objects(peak_bytes)) if peak_bytes else (),
            notices=tuple(self._notices),
            crowded=min(prepared.profile.host_rates, default=1.0) < 1,
        )


def _sampled(steps: int) -> frozenset[int]:
    """Steps whose timelines are kept: a few, spread over the second half of the run; the first ones warm up."""
    count = min(_SAMPLED_STEPS, max(1, steps // 8))
    return frozenset(steps - 1 - (steps // 2) * number // count for number in range(count))
