"""Measured times on disk: one small file for each point, under `layers/` in Spindle's cache folder.

The folder is `$SPINDLE_CACHE`, or `spindle` in `$XDG_CACHE_HOME`, or `~/.cache/spindle`. A file is named by a digest of
its key and holds the key itself, so a file that does not belong where it lies is noticed. Nothing here is needed: a
file that cannot be read is named and measured again, a folder that cannot be written is named once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spindle.artifact import read_artifact, write_artifact
from spindle.errors import InputError, ProfileError

FOLDER_VARIABLE = "SPINDLE_CACHE"
_FORMAT = 3  # of what is measured and how; another one is another key
_KIND = "layer-time"

Key = tuple[tuple[str, str], ...]


class Times(NamedTuple):
    """Seconds of one layer on the device, and of the host to launch its kernels (zero for CUDA graphs and on CPUs)."""

    forward_s: float
    backward_s: float
    forward_launch_s: float = 0.0
    backward_launch_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """The times of one layer, under the key that says of what and where."""

    key: Key
    forward_s: float
    backward_s: float
    forward_launch_s: float = 0.0
    backward_launch_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.times) < 0:
            raise ProfileError(f"times must not be negative, got {self.times}")

    @property
    def times(self) -> Times:
        return Times(self.forward_s, self.backward_s, self.forward_launch_s, self.backward_launch_s)


def cache_folder() -> Path:
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "spindle"


class Cache:
    """Times measured before on a machine, which `machine` describes. A fresh one looks nothing up, and only stores."""

    def __init__(
        self, machine: Mapping[str, str], notify: Callable[[str], None], *, folder: Path | None = None, fresh: bool
    ) -> None:
        self._folder = (folder or cache_folder()) / "layers"
        self._machine, self._notify, self._fresh = {**machine, "format": str(_FORMAT)}, notify, fresh
        self._writes = True

    def find(self, point: Mapping[str, str]) -> Times | None:
        """What was measured at a point, if anything was."""
        path, key = self._place(point)
        try:
            if self._fresh or not path.exists():
                return None
            found = read_artifact(path, _KIND, LayerTime)
            if found.key != key:
                raise InputError(f"{path}: holds the time of another layer")
        except (InputError, OSError) as error:
            self._notify(f"{error}; it is measured again")
            return None
        return found.times

    def store(self, point: Mapping[str, str], times: Times) -> None:
        if not self._writes:
            return
        path, key = self._place(point)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_artifact(path, _KIND, LayerTime(key=key, **times._asdict()))
        except (InputError, OSError) as error:
            self._writes = False
            self._notify(f"measured times are not kept: {error}")

    def _place(self, point: Mapping[str, str]) -> tuple[Path, Key]:
        key = tuple(sorted({**self._machine, **point}.items()))
        digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
        return self._folder / f"{digest}.json", key
