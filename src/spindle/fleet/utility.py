"""What a cell is worth to the fleet: u = w s (1 - m / h).

s is its rate over the best rate of the job anywhere in the fleet; w = priority (1 h / remaining time at that best
rate)^0.35, so that short jobs come first (`--objective throughput` leaves out the length); m the cost of reallocating
the job there, 0 for the cell that it holds; h two hours, or the remaining time in that cell if shorter, with the
reallocation in it: otherwise a job that is shorter than its own start would be worth nothing anywhere.
"""

from __future__ import annotations

import numpy as np

from spindle.fleet.columns import (
    IS_RUNNING,
    NUM_STEPS,
    REALLOC_S,
    STEP,
    STEP_TIME_S,
    WEIGHT,
    Columns,
    FloatColumn,
)
from spindle.fleet.state import SchedulerOptions

_HOUR_S = 3600.0
_LEAST_S = 1.0  # a job that is nearly done has this much ahead
_BELIEVED_S = 120.0  # for so long, a job that has reported a step before its last one is not past it


def steps_done(columns: Columns, now_s: float) -> FloatColumn:
    """The step that each job has reached, if it proceeds as estimated since its last report."""
    numbers = columns.numbers
    held = columns.held
    rate = np.zeros(columns.num_jobs)
    rate[held >= 0] = columns.rate[held[held >= 0]]
    elapsed_s = np.maximum(0.0, now_s - numbers[STEP_TIME_S])
    done: FloatColumn = numbers[STEP] + numbers[IS_RUNNING] * elapsed_s * rate
    return done


def remaining_steps(columns: Columns, now_s: float) -> FloatColumn:
    """Steps that each job has ahead. One without a length, or past it, is assumed to have as much ahead as behind, and
    at least an hour."""
    numbers = columns.numbers
    done = steps_done(columns, now_s)
    left = numbers[NUM_STEPS] - done
    # One that saves its last checkpoint is expected to be done, and must not be moved.
    is_nearly_done = (numbers[STEP] < numbers[NUM_STEPS]) & (now_s - numbers[STEP_TIME_S] <= _BELIEVED_S)
    left = np.where(is_nearly_done, np.maximum(left, 1.0), left)
    assumed = np.maximum(done, _HOUR_S * columns.best_rate)
    return np.where(left > 0, left, assumed)  # nan is not above 0


def weights(columns: Columns, options: SchedulerOptions, left: FloatColumn) -> FloatColumn:
    """w of each job; `left` are its remaining steps."""
    if options.objective == "throughput":
        priority: FloatColumn = columns.numbers[WEIGHT].copy()
        return priority
    left_s = np.maximum(left / np.maximum(columns.best_rate, 1e-300), _LEAST_S)
    weight: FloatColumn = columns.numbers[WEIGHT] * (_HOUR_S / left_s) ** options.length_exponent
    return weight


def utilities(columns: Columns, options: SchedulerOptions, now_s: float) -> FloatColumn:
    """u of every cell."""
    job = columns.job_of_cell
    left = remaining_steps(columns, now_s)
    held = columns.held
    cost_s = columns.numbers[REALLOC_S][job]
    cost_s[held[held >= 0]] = 0.0
    horizon_s = np.minimum(options.horizon_s, cost_s + np.maximum(left[job] / columns.rate, _LEAST_S))
    share = columns.rate / columns.best_rate[job]
    worth: FloatColumn = weights(columns, options, left)[job] * share * np.maximum(0.0, 1.0 - cost_s / horizon_s)
    return worth
