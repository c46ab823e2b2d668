"""stub"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    seed: int = 0
    evaluations: int = 100_000


def plan_wavefront(profile, effort):
    raise NotImplementedError
