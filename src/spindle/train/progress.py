"""What a person sees while it runs: on rank 0, on stderr. A bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

_LINES = 10  # of a run that nobody watches


class Progress:
    """Tells of stages, steps and losses. Does nothing when not enabled."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._losses = ""
        self._steps = 0
        self._shown_s = 0.0

    def note(self, text: str) -> None:
        if self._enabled:
            self._console.print(f"note: {text}", soft_wrap=True)

    def stage(self, text: str) -> None:
        if self._enabled and self._console.is_terminal:
            self._console.print(f"{text} ...", style="dim")

    @contextmanager
    def bar(self, text: str) -> Iterator[Callable[[float], None]]:
        """A bar for work that tells which share of it is done."""
        with Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            console=self._console,
            transient=True,
            disable=not (self._enabled and self._console.is_terminal),
        ) as bars:
            task = bars.add_task(text, total=1.0)
            yield lambda share: bars.update(task, completed=share)

    def training(self, steps: int, names: list[str]) -> None:
        self._steps = steps
        if self._enabled and self._console.is_terminal:
            self._bars = Bars(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.description}", markup=False),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
                auto_refresh=False,
            )
            self._bars.start()
            self._task = self._bars.add_task("", total=steps)

    def losses(self, step: int, losses: dict[str, float]) -> None:
        if self._enabled:
            self._losses = "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items())

    def step(self, done: int, step_s: float) -> None:
        if not self._enabled:
            return
        text = f"{self._losses}  {step_s * 1e3:.0f} ms"
        if self._bars is not None and self._task is not None:
            # Drawing costs time that belongs to the step.
            now = time.monotonic()
            if now - self._shown_s > 0.2 or done == self._steps:
                self._shown_s = now
                self._bars.update(self._task, completed=done, description=text, refresh=True)
        elif done == 1 or done == self._steps or done * _LINES // self._steps > (done - 1) * _LINES // self._steps:
            print(f"step {done}/{self._steps}  {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
