"""The state of a training run without its weights: what a resumed run needs to continue with the same numbers.

Random layers are seeded by seed, step and task variant, and sampled tasks by seed and step, so neither has a state of
its own beyond the step and the names of variants. What is left out: weights and buffers (`Trainer.state_dict`), the
plan, which follows from the machines, and functions of the script (sampling weights, loss weights, schedules).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

from spindle.data import RandomState, random_state, set_random_state
from spindle.errors import TrainingError
from spindle.train.config import TrainConfig
from spindle.train.feed import LoaderPosition
from spindle.train.optimizer_reshard import OptimizerState
from spindle.train.session import TrainSession


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """Where a task's data continues: after the batches of all fits so far.

    A map-style dataset continues there in the next fit. Any other loader starts again with each fit, so it has a
    position only during a fit.
    """

    num_batches: int
    loader: LoaderPosition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The state of a training before step `step`."""

    step: int
    tasks: tuple[str, ...]
    data: Mapping[str, DataPosition]  # by task, including tasks that have ended
    random_state: RandomState  # of torch, Python and numpy, on this rank
    sampling_weights: Mapping[str, float | None] | None  # None for weights that are functions of the step
    variants: Mapping[tuple[str, int], str]  # names of task variants, by task and key
    optimizer: OptimizerState  # this rank's share, by parameter, and the state of the learning-rate scheduler


def take_state(
    session: TrainSession, step: int, num_batches: Mapping[str, int], loaders: Mapping[str, LoaderPosition]
) -> TrainState:
    """The state of a session before this step, after `num_batches` batches of each task in all fits. All ranks must
    call it. `loaders` are the positions of loaders during a fit."""
    config = session.config
    weights = config.sampling_weights
    return TrainState(
        step=step,
        tasks=tuple(config.task_names),
        data={name: DataPosition(num_batches=count, loader=loaders.get(name)) for name, count in num_batches.items()},
        random_state=random_state(),
        sampling_weights=None
        if weights is None
        else {name: None if callable(weight) else float(weight) for name, weight in weights.items()},
        variants=session.variants.names,
        optimizer=deepcopy(session.optimizer_state()),  # a copy, because training continues to change it
    )


def restore_state(session: TrainSession, state: TrainState) -> None:
    """Continue a session from a state: its next fit begins with step `state.step`.

    The session must not have trained yet. All ranks must call this, each with its own state.
    """
    config = _restored_config(session.config, state)
    if session.runtime is not None or session.num_batches:
        raise TrainingError("a Trainer that has trained already cannot load another state; make a new Trainer")
    session.config = config
    session.num_batches.update({name: position.num_batches for name, position in state.data.items()})
    session.loader_positions = {
        name: position.loader for name, position in state.data.items() if position.loader is not None
    }
    session.variants.restore_names(state.variants)
    session.restore_optimizer_state(deepcopy(state.optimizer))
    set_random_state(state.random_state)


def _restored_config(config: TrainConfig, state: TrainState) -> TrainConfig:
    if config.task_names != list(state.tasks):
        raise TrainingError(
            f"the state is of a training of the tasks {', '.join(state.tasks)}, this Trainer has "
            f"{', '.join(config.task_names)}; make one with the same tasks, in the same order"
        )
    if (config.sampling_weights is None) != (state.sampling_weights is None):
        raise TrainingError(
            "the state was saved without sampling_weights, but this Trainer has them; give it the same arguments"
            if state.sampling_weights is None
            else "the state was saved with sampling_weights, but this Trainer has none; give it the same arguments"
        )
    if state.sampling_weights is None or config.sampling_weights is None:
        return config
    saved = {name: weight for name, weight in state.sampling_weights.items() if weight is not None}
    return replace(config, sampling_weights={**config.sampling_weights, **saved})
