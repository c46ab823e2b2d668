"""A rank's part of the update of a step: the step of one optimizer, or of one for each trial of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from spindle.errors import TrainingError
from spindle.program import Sharding
from spindle.train.grad_scaler import LossScale
from spindle.train.optimizer import OptimizerUpdate
from spindle.train.optimizer_reshard import OptimizerState

_AFTER_RATES = 3  # entries of a report: the squared gradient norm, the loss scale, whether the step is skipped


class Update:
    """The update of all parameters that this rank trains. Each part updates parameters of its own."""

    def __init__(self, parts: Sequence[OptimizerUpdate]) -> None:
        self._parts = tuple(parts)
        self.sharding: Sharding = {name: slices for part in parts for name, slices in part.sharding.items()}

    @property
    def trials(self) -> tuple[str, ...]:
        return tuple(part.trial for part in self._parts)

    @property
    def lr_groups(self) -> tuple[str, ...]:
        """The names of parameter groups; in a sweep, as `trial/group`."""
        return tuple(
            f"{part.trial}/{group}" if part.trial else group for part in self._parts for group in part.lr_groups
        )

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale of all losses. A sweep has none."""
        return self._parts[0].loss_scale

    def step(self) -> None:
        for part in self._parts:
            part.step()

    @property
    def read_report(self) -> Callable[[], list[float]]:
        """A function that returns the numbers of the last step: learning rates of all groups, the squared gradient norm
        of each trial, the loss scale, and whether the step is skipped."""
        reads = [part.read_report for part in self._parts]

        def read() -> list[float]:
            rows = [read() for read in reads]
            rates = [rate for row in rows for rate in row[:-_AFTER_RATES]]
            return [*rates, *(row[-_AFTER_RATES] for row in rows), *rows[0][1 - _AFTER_RATES :]]

        return read

    def step_scheduler(self, metric: float, trial: str = "") -> None:
        """Step a scheduler that takes a metric; in a sweep, that of a trial."""
        part = next((part for part in self._parts if part.trial == trial), None)
        if part is None:
            expected = f"trial=, one of {', '.join(self.trials)}" if self.trials[0] else "no trial="
            raise TrainingError(f"step_lr_scheduler(trial={trial!r}): expected {expected}")
        part.step_scheduler(metric)

    def wait_for(self, copied: torch.cuda.Event | None) -> None:
        """Let the next step wait until the tensors that it overwrites have been copied."""
        for part in self._parts:
            part.wait_for(copied)

    def settle_copies(self) -> None:
        """Wait for that copy, before parameters and state are moved."""
        for part in self._parts:
            part.settle_copies()

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that it keeps from step to step, other than parameters and gradients."""
        for part in self._parts:
            yield from part.tensors()

    @property
    def left_out(self) -> list[str]:
        """The parameters with gradients that no optimizer updates."""
        return [name for part in self._parts for name in part.left_out]

    def group_settings(self) -> dict[str, dict[str, Any]]:
        """The optimizer's class, and the group settings of the parameters that this rank trains, by name."""
        return {name: settings for part in self._parts for name, settings in part.group_settings().items()}

    def state(self, *, to_host: bool = False) -> OptimizerState:
        """This rank's share of the state, for the optimizers of another plan."""
        first, *others = (part.state(to_host=to_host) for part in self._parts)
        for other in others:
            first = replace(
                first,
                sharding={**first.sharding, **other.sharding},
                states={**first.states, **other.states},
                settings={**first.settings, **other.settings},
                old_settings={**first.old_settings, **other.old_settings},
                lr_schedulers={**first.lr_schedulers, **other.lr_schedulers},
            )
        return first


def split_state(
    state: OptimizerState | None, owners: Mapping[str, str], trials: Sequence[str]
) -> dict[str, OptimizerState | None]:
    """Split the state by trial; `owners` says which trial has a parameter. The state of parameters without a trial (of
    one that has ended) stays with the first trial."""
    if state is None or len(trials) == 1:
        return dict.fromkeys(trials, state)

    def of(trial: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if owners.get(name, trials[0]) == trial}

    return {
        trial: replace(
            state,
            sharding=of(trial, state.sharding),
            states=of(trial, state.states),
            settings=of(trial, state.settings),
            old_settings=of(trial, state.old_settings),
        )
        for trial in trials
    }
