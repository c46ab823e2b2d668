"""The forecast of a step: its predicted time, and how long its FLOPs would take at peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from spindle.simulate import simulate_step
from spindle.train.config import TrainConfig
from spindle.train.header import BatchHeader
from spindle.train.runtime import RankRuntime
from spindle.train.step_report import LaunchedStep
from spindle.train.steps import StepRun
from spindle.train.utilization import flops_per_sample, peak_flops


class StepForecast:
    """The forecast of the steps under one plan, for callbacks. Without callbacks, nothing is simulated."""

    def __init__(self, runtime: RankRuntime, config: TrainConfig, device: torch.device) -> None:
        self._runtime, self._config = runtime, config
        self._predicted_s: float | None = None  # for a static plan
        self._at_peak_s: dict[str, float] = {}  # how long a sample's FLOPs take at peak, by task variant
        if config.callbacks:
            planned = runtime.planned
            if not runtime.steps.plans_ahead:
                num_micro_steps = config.gradient_accumulation_steps
                self._predicted_s, _ = simulate_step(planned.plan, planned.profile, num_micro_steps)
            peak = peak_flops(planned.profile) if device.type == "cuda" else None
            if peak is not None:
                flops = flops_per_sample(runtime.workload.graph)
                self._at_peak_s = {name: count / peak for name, count in flops.items()}

    def launched(
        self, step: int, headers: Sequence[Mapping[str, BatchHeader]], runs: Sequence[StepRun]
    ) -> LaunchedStep:
        """What is known of a step that was just launched. `headers` are by micro-step and task."""
        trained = [header for row in headers for header in row.values()]
        weights = {task.name: task.weight for task in self._config.tasks if any(task.name in row for row in headers)}
        microbatches = [microbatch for run in runs for microbatch in run.microbatches.values()]
        at_peak_s = [
            self._at_peak_s[microbatch.variant] * microbatch.header.num_rows
            for microbatch in microbatches
            if microbatch.variant in self._at_peak_s
        ]
        return LaunchedStep(
            step=step,
            weights={name: weight(step) if callable(weight) else weight for name, weight in weights.items()},
            num_samples=sum(header.num_rows for header in trained),
            num_tokens=sum(header.tokens for header in trained),
            plan=runs[0].executor.program.plan if runs else self._runtime.planned.plan,
            predicted_s=self._predicted(runs),
            at_peak_s=sum(at_peak_s) if at_peak_s and len(at_peak_s) == len(microbatches) else None,
        )

    def _predicted(self, runs: Sequence[StepRun]) -> float | None:
        if self._runtime.steps.plans_ahead:
            return sum(run.executor.program.plan.makespan_s for run in runs) or None
        is_as_planned = all(run.is_as_planned and len(run.microbatches) == len(run.profile.graph.tasks) for run in runs)
        return self._predicted_s if is_as_planned else None
