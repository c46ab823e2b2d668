"""Python's garbage collector, kept from stalling steps.

A full collection visits every object of the process: hundreds of thousands with torch imported, which takes tenths of a
second. Each rank gets to one in another step, and all others wait for it. So what exists when a fit's steps begin is
frozen, and collections during the fit visit newer objects only.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Keep the objects that exist now out of collections. Does nothing where somebody else has frozen objects."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def collect_all() -> None:
    """Collect garbage among frozen objects, too: those of a plan that is dropped are."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
