"""The loss scale of float16 training: torch's `GradScaler` with one scale for all ranks.

Losses are multiplied by the scale before backward, and gradients divided by it before clipping. Where any rank finds a
gradient that is not finite, all ranks skip the step and lower the scale; after a number of steps without one they raise
it. All of this runs on the device: ranks all-reduce `found_inf` together with the gradient norm, so all have the same
scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ScaleState:
    """The loss scale, and the number of steps since it last changed."""

    scale: float
    growth_steps: int


class LossScale:
    """One rank's copy of the loss scale. `settings` has its initial value, factors and interval; it is not modified."""

    def __init__(self, settings: torch.amp.GradScaler, device: torch.device, state: ScaleState | None) -> None:
        self._settings = settings
        if state is None:
            state = ScaleState(settings.get_scale(), 0)
        self.scale = torch.full((), state.scale, dtype=torch.float32, device=device)
        self._growth_steps = torch.full((), state.growth_steps, dtype=torch.int32, device=device)

    def unscale(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """Divide gradients by the scale. Returns 1.0 if any of them is not finite, otherwise 0.0."""
        found_inf = torch.zeros((), dtype=torch.float32, device=self.scale.device)
        inverse = self.scale.double().reciprocal().float()
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for same_dtype in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, found_inf, inverse)
        return found_inf

    def update(self, found_inf: torch.Tensor) -> None:
        """Lower the scale, or raise it after enough steps. `found_inf` is above 0 if any rank has gradients that are
        not finite."""
        settings = self._settings
        torch._amp_update_scale_(
            self.scale,
            self._growth_steps,
            found_inf,
            settings.get_growth_factor(),
            settings.get_backoff_factor(),
            settings.get_growth_interval(),
        )

    def state(self) -> ScaleState:
        """The state, for the next plan or a resumed run. Waits for the GPU."""
        return ScaleState(float(self.scale), int(self._growth_steps))


def step_unless(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> None:
    """Run the optimizer's step unless `found_inf` is above 0. A fused optimizer decides on the GPU; for any other, the
    host waits for `found_inf`, as torch's `GradScaler` does."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        vars(optimizer).update(grad_scale=None, found_inf=found_inf)
        try:
            optimizer.step()
        finally:
            del vars(optimizer)["grad_scale"], vars(optimizer)["found_inf"]
    elif not found_inf.item():
        optimizer.step()
