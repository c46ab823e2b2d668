"""Did a simulated step stay within memory?"""

from __future__ import annotations

import numpy as np

from spindle.errors import DoesNotFitError
from spindle.profile import Profile
from spindle.report.quantities import num_bytes
from spindle.timeline import Timeline


def refuse_overfull(timeline: Timeline, profile: Profile) -> None:
    """Raises a DoesNotFitError that names the fullest device when it holds more than it can."""
    peaks = timeline.peak_bytes()
    device = int(np.argmax(peaks))
    limit = profile.cluster.kind.memory_bytes
    if peaks[device] > limit:
        raise DoesNotFitError(
            f"this plan does not fit: device {device} needs {num_bytes(int(peaks[device]))} of the {num_bytes(limit)} "
            f"there ({int(peaks[device]) - limit:,} bytes too many); plan again for this cluster"
        )
