"""The time of one layer as a function of the number of devices."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from spindle.cluster import Cluster
from spindle.errors import ProfileError
from spindle.workload import LayerCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How a layer shares a device with layers on other lanes: (pressure, fill) of each pass.

    *Pressure* is the slowdown, minus one, of a copy of the layer that runs at the same time. *Fill* is the time of
    several concurrent copies over the time of the same number one after another: 1 for a layer that fills the device
    alone. Passes that run together are slowed by the larger of two factors: 1 plus the pressure of the others, and the
    sum of all fills.

    `inputs` and `weights` are for the two halves of a split backward; if they were not measured, `backward` holds for
    both.
    """

    forward: tuple[float, float]
    backward: tuple[float, float]
    inputs: tuple[float, float] | None = None
    weights: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for pressure, fill in (self.forward, self.backward, self.of_inputs, self.of_weights):
            if not (0 <= pressure <= 16 and 0 < fill <= 16):
                raise ProfileError(
                    f"pressure is between 0 and 16 and fill between 0 and 16, got {pressure:g} and {fill:g}"
                )

    @property
    def of_inputs(self) -> tuple[float, float]:
        return self.backward if self.inputs is None else self.inputs

    @property
    def of_weights(self) -> tuple[float, float]:
        return self.backward if self.weights is None else self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SmTimes:
    """How long a layer takes on some of the SMs of a device, and how much it slows down layers on the other SMs.

    `forward` and `backward` are times relative to the whole device, for each measured number of SMs; the last of
    `num_sms` is the whole device. `pressure` is the slowdown, minus one, of each pass of a copy on the same number of
    other SMs, with which it shares bandwidth, caches and power.
    """

    num_sms: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    pressure: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if not self.num_sms or self.num_sms[0] < 1 or any(b <= a for a, b in pairwise(self.num_sms)):
            raise ProfileError(f"numbers of SMs must be increasing and at least 1, got {list(self.num_sms)[:8]}")
        if not len(self.num_sms) == len(self.forward) == len(self.backward):
            raise ProfileError("expected one forward and one backward time for each number of SMs")
        if not all(0 < ratio <= 1024 for ratio in self.forward + self.backward):
            raise ProfileError("times on some SMs, over those on all, are above 0 and at most 1024")
        if not all(0 <= pressure <= 16 for pressure in self.pressure):
            raise ProfileError(f"pressure is between 0 and 16, got {list(self.pressure)}")

    def on(self, num_sms: int) -> tuple[float, float]:
        """Forward and backward time on this many SMs relative to the whole device, interpolated between
        measurements."""
        if not self.num_sms[0] <= num_sms <= self.num_sms[-1]:
            raise ProfileError(f"no time is known for {num_sms} SMs; measured: {self.num_sms[0]} to {self.num_sms[-1]}")
        return (
            float(np.interp(num_sms, self.num_sms, self.forward)),
            float(np.interp(num_sms, self.num_sms, self.backward)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Forward and backward seconds of one layer over its whole batch, for each allowed number of devices.

    A number that is not listed is not allowed: a curve neither interpolates nor extrapolates. `weight_s` is the part of
    `backward_s` that computes weight gradients and may run later; empty if unknown. `launch_s` is the host time to
    launch the forward and the backward kernels of one layer, for any batch size; zero for layers that run as CUDA
    graphs, and if it was not measured. Plans with lanes need `contention` for each number of devices, plans with quotas
    need `sm_times`. `measured` lists the numbers of devices whose times were measured, as opposed to interpolated;
    empty if nothing was measured.
    """

    num_devices: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    tensor_degree: int = 1
    weight_s: tuple[float, ...] = ()
    launch_s: tuple[float, float] = (0.0, 0.0)
    contention: tuple[Contention, ...] = ()
    measured: tuple[int, ...] = ()
    sm_times: SmTimes | None = None

    def __post_init__(self) -> None:
        if not self.num_devices:
            raise ProfileError("a curve needs at least one number of devices")
        if not len(self.num_devices) == len(self.forward_s) == len(self.backward_s):
            raise ProfileError("a curve needs one forward and one backward time for each number of devices")
        if self.num_devices[0] < 1 or any(b <= a for a, b in zip(self.num_devices, self.num_devices[1:], strict=False)):
            raise ProfileError(
                f"numbers of devices must be increasing and at least 1, got {list(self.num_devices)[:8]}"
            )
        if self.tensor_degree < 1 or self.num_devices[0] % self.tensor_degree:
            raise ProfileError(
                f"{self.num_devices[0]} devices cannot be split into tensor groups of {self.tensor_degree}"
            )
        if self.measured and not set(self.measured) <= set(self.num_devices):
            raise ProfileError(
                f"a curve was measured on {list(self.measured)[:8]} devices, and has times for "
                f"{_ranges(self.num_devices)}"
            )
        if not all(0 <= time_s < math.inf for time_s in (*self.forward_s, *self.backward_s, *self.launch_s)):
            raise ProfileError("times must be finite and not negative")
        if self.contention and len(self.contention) != len(self.num_devices):
            raise ProfileError("a curve needs one contention for each number of devices, or none")
        if self.weight_s:
            if len(self.weight_s) != len(self.backward_s):
                raise ProfileError("a curve needs one weight_s for each number of devices, or none")
            if not all(0 <= part <= whole for part, whole in zip(self.weight_s, self.backward_s, strict=True)):
                raise ProfileError("weight_s is a part of backward_s: it must be between 0 and backward_s")

    def allows(self, num_devices: int) -> bool:
        position = bisect_left(self.num_devices, num_devices)
        return position < len(self.num_devices) and self.num_devices[position] == num_devices

    def times_s(self, num_devices: int) -> tuple[float, float]:
        """Forward and backward seconds on exactly this many devices."""
        position = bisect_left(self.num_devices, num_devices)
        if position == len(self.num_devices) or self.num_devices[position] != num_devices:
            raise ProfileError(
                f"no time is known for {num_devices} devices; known: {_ranges(self.num_devices)} "
                "(measure it, or plan with these)"
            )
        return self.forward_s[position], self.backward_s[position]

    def weight_time_s(self, num_devices: int) -> float | None:
        """The part of backward that computes weight gradients, if it is known."""
        self.times_s(num_devices)
        return self.weight_s[bisect_left(self.num_devices, num_devices)] if self.weight_s else None

    def contention_on(self, num_devices: int) -> Contention:
        """The contention of a layer that runs on exactly this many devices; it must have been measured."""
        self.times_s(num_devices)
        return self.contention[bisect_left(self.num_devices, num_devices)]

    def layer_s(self, num_devices: int, recompute: bool = False) -> float:
        """Forward and backward seconds together; recomputation adds a second forward."""
        forward_s, backward_s = self.times_s(num_devices)
        return forward_s * (2 if recompute else 1) + backward_s

    def folded_s(self, recompute: bool = False) -> NDArray[np.float64]:
        """`layer_s` for each allowed number of devices."""
        forward: NDArray[np.float64] = np.asarray(self.forward_s)
        return forward * (2 if recompute else 1) + np.asarray(self.backward_s, dtype=np.float64)

    def up_to(self, num_devices: int) -> Curve | None:
        """The part of the curve for up to `num_devices`, if any."""
        count = bisect_left(self.num_devices, num_devices + 1)
        if count == len(self.num_devices):
            return self
        if count == 0:
            return None
        return replace(
            self,
            num_devices=self.num_devices[:count],
            forward_s=self.forward_s[:count],
            backward_s=self.backward_s[:count],
            weight_s=self.weight_s[:count],
            contention=self.contention[:count],
            measured=tuple(number for number in self.measured if number <= num_devices),
        )

    def scaled(self, factor: float) -> Curve:
        """The curve for a batch `factor` times as large. No pass gets shorter than the host takes to launch it."""
        return replace(
            self,
            forward_s=tuple(max(factor * time_s, self.launch_s[0]) for time_s in self.forward_s),
            backward_s=tuple(max(factor * time_s, self.launch_s[1]) for time_s in self.backward_s),
            weight_s=tuple(factor * time_s for time_s in self.weight_s),
        )

    def on_sms(self, num_sms: int) -> Curve:
        """The curve of a layer that has only this many SMs of each device."""
        if self.sm_times is None:
            raise ProfileError(
                f"no time is known for {num_sms} SMs, only for whole devices; measure with Planning(quotas=True)"
            )
        forward, backward = self.sm_times.on(num_sms)
        return replace(
            self,
            forward_s=tuple(forward * time_s for time_s in self.forward_s),
            backward_s=tuple(backward * time_s for time_s in self.backward_s),
            weight_s=tuple(backward * time_s for time_s in self.weight_s),
        )

    @property
    def launches(self) -> Curve:
        """A curve of the host seconds to launch one layer, in place of its time on the devices."""
        forward_s, backward_s = self.launch_s
        return replace(
            self,
            forward_s=tuple(forward_s for _ in self.num_devices),
            backward_s=tuple(backward_s for _ in self.num_devices),
            weight_s=tuple(
                backward_s * min(1.0, part / max(whole, 1e-30))
                for part, whole in zip(self.weight_s, self.backward_s, strict=bool(self.weight_s))
            ),
        )


def tensor_degrees(cost: LayerCost | None, cluster: Cluster) -> list[int]:
    """The tensor degrees that a layer may have: powers of two up to its maximum, inside one island."""
    max_degree = min(
        1 if cost is None else cost.max_tensor_degree, max(island.num_devices for island in cluster.islands)
    )
    return [1 << power for power in range(max_degree.bit_length())]


def _ranges(numbers: tuple[int, ...]) -> str:
    parts: list[str] = []
    start = previous = numbers[0]
    for number in (*numbers[1:], -1):
        if number != previous + 1:
            parts.append(f"{start}-{previous}" if previous > start else f"{start}")
            start = number
        previous = number
    return ", ".join([*parts[:12], "..."] if len(parts) > 12 else parts)
