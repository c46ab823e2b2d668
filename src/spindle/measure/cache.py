"""A cache of measured times, on all SMs and some, and of contention: one small file per point, under `layers/` in
Spindle's cache folder.

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
from typing import NamedTuple, TypeVar

from spindle.artifact import read_artifact, write_artifact
from spindle.errors import InputError, ProfileError
from spindle.profile import Contention, SmTimes

FOLDER_VARIABLE = "SPINDLE_CACHE"
_FORMAT = 4  # part of the key; increase it when measurements change
_KIND, _CONTENTION_KIND, _SMS_KIND = "layer-time", "layer-contention", "layer-sm-times"

Key = tuple[tuple[str, str], ...]
Record = TypeVar("Record", "LayerTime", "LayerContention", "LayerSmTimes")


class Times(NamedTuple):
    """Seconds of one layer on the device, and of the host to launch its kernels (zero for CUDA graphs and on CPUs)."""

    forward_s: float
    backward_s: float
    forward_launch_s: float = 0.0
    backward_launch_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """The times of one layer. The key says which layer, and on which machine."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContention:
    """How much copies of one layer slow each other down on one device, and the share of weight gradients in its
    backward."""

    key: Key
    contention: Contention
    weight_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSmTimes:
    """How long one layer takes on some of the SMs of a device."""

    key: Key
    sm_times: SmTimes


def cache_folder() -> Path:
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "spindle"


class Cache:
    """Times that were measured before on the machine that `machine` describes. With `fresh`, times are stored but never
    looked up."""

    def __init__(
        self, machine: Mapping[str, str], notify: Callable[[str], None], *, folder: Path | None = None, fresh: bool
    ) -> None:
        self._folder = (folder or cache_folder()) / "layers"
        self._machine, self._notify, self._fresh = {**machine, "format": str(_FORMAT)}, notify, fresh
        self._is_writable = True

    def find(self, point: Mapping[str, str]) -> Times | None:
        """The times that were measured for a point; None if there are none."""
        cached = self._read(point, _KIND, LayerTime)
        return None if cached is None else cached.times

    def store(self, point: Mapping[str, str], times: Times) -> None:
        self._write(_KIND, LayerTime(key=self._key(point, _KIND), **times._asdict()))

    def find_contention(self, point: Mapping[str, str]) -> tuple[Contention, float | None] | None:
        cached = self._read(point, _CONTENTION_KIND, LayerContention)
        return None if cached is None else (cached.contention, cached.weight_share)

    def store_contention(self, point: Mapping[str, str], contention: Contention, weight_share: float | None) -> None:
        key = self._key(point, _CONTENTION_KIND)
        self._write(_CONTENTION_KIND, LayerContention(key=key, contention=contention, weight_share=weight_share))

    def find_sm_times(self, point: Mapping[str, str]) -> SmTimes | None:
        cached = self._read(point, _SMS_KIND, LayerSmTimes)
        return None if cached is None else cached.sm_times

    def store_sm_times(self, point: Mapping[str, str], sm_times: SmTimes) -> None:
        self._write(_SMS_KIND, LayerSmTimes(key=self._key(point, _SMS_KIND), sm_times=sm_times))

    def _read(self, point: Mapping[str, str], kind: str, record: type[Record]) -> Record | None:
        key = self._key(point, kind)
        path = self._path(key)
        try:
            if self._fresh or not path.exists():
                return None
            cached = read_artifact(path, kind, record)
            if cached.key != key:
                raise InputError(f"{path}: contains the time of another layer")
        except (InputError, OSError) as error:
            self._notify(f"{error}; it is measured again")
            return None
        return cached

    def _write(self, kind: str, record: LayerTime | LayerContention | LayerSmTimes) -> None:
        if not self._is_writable:
            return
        path = self._path(record.key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_artifact(path, kind, record)
        except (InputError, OSError) as error:
            self._is_writable = False
            self._notify(f"measured times are not cached: {error}")

    def _key(self, point: Mapping[str, str], kind: str) -> Key:
        return tuple(sorted({**self._machine, **point, "kind": kind}.items()))

    def _path(self, key: Key) -> Path:
        digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
        return self._folder / f"{digest}.json"
