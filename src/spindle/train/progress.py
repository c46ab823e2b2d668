"""Progress on stderr, from rank 0: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column

from spindle.report import loss_text

_LINES = 10  # seconds between lines, without a terminal


class Progress:
    """Reports stages, steps and losses on stderr, if enabled, and warnings in any case, unless it is `silent`."""

    def __init__(self, enabled: bool, *, silent: bool = False) -> None:
        self._enabled, self._silent = enabled, silent
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._losses: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        self._steps = 0
        self._shown_s = 0.0

    def note(self, text: str) -> None:
        if self._enabled:
            self._console.print(f"note: {text}", soft_wrap=True)

    def warn(self, text: str) -> None:
        if not self._silent:
            self._console.print(f"warning: {text}", soft_wrap=True)

    def stage(self, text: str) -> None:
        if self._enabled:
            self._console.print(f"{text} ...", style="dim")

    @contextmanager
    def bar(self, text: str) -> Iterator[Callable[[float], None]]:
        """A progress bar for work that reports which share of it is done; a line of text without a terminal."""
        if not self._console.is_terminal:
            self.stage(text)
        with Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            console=self._console,
            transient=True,
            disable=not (self._enabled and self._console.is_terminal),
        ) as bars:
            task = bars.add_task(text, total=1.0)
            yield lambda share: bars.update(task, completed=share)

    def training(self, steps: int) -> None:
        self._steps = steps
        if self._enabled and self._console.is_terminal:
            # Losses of many tasks are cut off where they do not fit; the other columns never are.
            self._bars = Bars(
                TextColumn("step"),
                MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(steps)) + 1)),
                BarColumn(bar_width=10),
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
                TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=len("0:00:00"))),
                expand=True,
                console=self._console,
                transient=True,
                auto_refresh=False,
            )
            self._bars.start()
            self._task = self._bars.add_task("", total=steps)

    def losses(self, losses: dict[str, float]) -> None:
        """Update the losses that are shown. A task that is not in the step keeps its last loss."""
        self._losses.update(losses)

    def step(self, done: int, step_s: float, *, samples: int = 0, tokens: int = 0, idle: float | None = None) -> None:
        """Report a step: its time, samples and tokens, and the idle share of the last timed step."""
        if not self._enabled:
            return
        text = "  ".join(
            [
                *(f"{name} {loss_text(loss)}" for name, loss in self._losses.items()),
                f"{step_s * 1e3:.0f} ms",
                *(f"{self._rate(unit, count / step_s)} {unit}/s" for unit, count in _counts(samples, tokens)),
                *([] if idle is None else [f"idle {idle:.0%}"]),
            ]
        )
        if self._bars is not None and self._task is not None:
            # drawing takes time that would count as part of the step
            now = time.monotonic()
            if now - self._shown_s > 0.2 or done == self._steps:
                self._shown_s = now
                self._bars.update(self._task, completed=done, description=text, refresh=True)
        elif done == 1 or done == self._steps or done * _LINES // self._steps > (done - 1) * _LINES // self._steps:
            print(f"step {done}/{self._steps}  {text}", file=sys.stderr, flush=True)

    def _rate(self, unit: str, per_s: float) -> str:
        """A moving average over about ten steps."""
        self._rates[unit] = 0.9 * self._rates.get(unit, per_s) + 0.1 * per_s
        return f"{self._rates[unit]:,.0f}"

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def _counts(samples: int, tokens: int) -> list[tuple[str, int]]:
    return [(unit, count) for unit, count in (("samples", samples), ("tokens", tokens)) if count]
