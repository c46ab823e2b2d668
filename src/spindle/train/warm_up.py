"""What takes long before the first step of any training, done ahead: by ranks on standby (`spindle.launch.standby`)."""

from __future__ import annotations

import importlib
import os

import torch

from spindle import jit


def warm_up() -> None:
    """Import everything that a fit imports and that was not imported yet. Rank 0 verifies programs with compiled loops,
    so it loads these, too."""
    importlib.import_module("torch._dynamo")
    if os.environ.get("RANK", "0") == "0":
        jit.warm_up()
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # the rank has no device yet
