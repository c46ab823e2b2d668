"""Python's garbage collector, kept from stalling steps.

A full collection visits every object of the process: hundreds of thousands with torch imported, which takes tenths of a
second. Ranks reach theirs in different steps, and all others wait each time. So the objects that exist when a fit's
steps begin are frozen, and collections during the fit visit newer objects only.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class _State:
    is_frozen = False  # whether `frozen_objects` has frozen objects


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection. Does nothing if other code has frozen objects,
    because they would be unfrozen afterwards."""
    if _State.is_frozen or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    _State.is_frozen = True
    try:
        yield
    finally:
        _State.is_frozen = False
        gc.unfreeze()


def collect_all() -> None:
    """Also collect garbage among the objects that `frozen_objects` has frozen, such as those of a dropped plan. Objects
    that other code has frozen stay frozen."""
    if not _State.is_frozen:
        gc.collect()
        return
    gc.unfreeze()
    gc.collect()
    gc.freeze()
