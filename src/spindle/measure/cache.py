"""A cache of measured times: one small file per point, under `layers/` in Spindle's cache folder.

The folder is `$SPINDLE_CACHE`, or `spindle` in `$XDG_CACHE_HOME`, or `~/.cache/spindle`. A file is named by a digest of
its key and contains the key, so that a misplaced file is detected. The cache is optional: if a file cannot be read, a
notice names it and the point is measured again; if the folder cannot be written, one notice says so.
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
_FORMAT = 3  # part of the key; increased when measurements change
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
    """The times of one layer; the key says which layer, and on which machine."""

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
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "spindle"


class Cache:
    """Times that were measured before on the machine that `machine` describes. With `fresh`, times are stored and never
    looked up."""

    def __init__(
        self, machine: Mapping[str, str], notify: Callable[[str], None], *, folder: Path | None = None, fresh: bool
    ) -> None:
        self._folder = (folder or cache_folder()) / "layers"
        self._machine, self._notify, self._fresh = {**machine, "format": str(_FORMAT)}, notify, fresh
        self._is_writable = True

    def find(self, point: Mapping[str, str]) -> Times | None:
        """The times that were measured for a point, if any."""
        path, key = self._entry(point)
        try:
            if self._fresh or not path.exists():
                return None
            cached = read_artifact(path, _KIND, LayerTime)
            if cached.key != key:
                raise InputError(f"{path}: contains the time of another layer")
        except (InputError, OSError) as error:
            self._notify(f"{error}; it is measured again")
            return None
        return cached.times

    def store(self, point: Mapping[str, str], times: Times) -> None:
        if not self._is_writable:
            return
        path, key = self._entry(point)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_artifact(path, _KIND, LayerTime(key=key, **times._asdict()))
        except (InputError, OSError) as error:
            self._is_writable = False
            self._notify(f"measured times are not cached: {error}")

    def _entry(self, point: Mapping[str, str]) -> tuple[Path, Key]:
        key = tuple(sorted({**self._machine, **point}.items()))
        digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
        return self._folder / f"{digest}.json", key
