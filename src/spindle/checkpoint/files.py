"""Checkpoint folders: written under a temporary name, and renamed once they are complete.

Ranks write `rank-N.bin` and `rank-N.json` into `step-400.part`. Rank 0 joins the parts, writes index and state, and
renames the folder. Files and folders are synced before that, so that what has its final name is on disk.

If a scheduler numbers the attempts of a job (`attempts`), attempt 7 writes into `step-400.attempt-7.part`, so that
concurrent attempts never write into the same folder. A newer attempt first records its number, then renames the
unfinished folders of older ones, so that these can no longer rename them to a final name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from spindle.artifact import from_json, read_json_file, to_json
from spindle.checkpoint.attempts import check_newest
from spindle.checkpoint.index import Index, Part, SavedLoader, SavedState, StoredBox, StoredTensor, joined
from spindle.errors import CheckpointError
from spindle.program import Box

VERSION = 1
STATE, INDEX, PLAN, PROFILE = "state.json", "index.json", "plan.json", "profile.json"
DATA_FILE = "rank-{rank}.bin"
_PART_FILE = "rank-{rank}.json"
_STEP = re.compile(r"step-(0|[1-9]\d{0,17})")
_UNFINISHED = re.compile(rf"{_STEP.pattern}(\.attempt-\d+)?(\.part|\.removed|\.part\.removed)")
_DIGEST = re.compile(rb',"sha256":"([0-9a-f]{64})"\}\n')
_DIGEST_BYTES = len(',"sha256":""}\n') + 64


def folder_name(step: int) -> str:
    return f"step-{step}"


def partial_folder(folder: Path, step: int, attempt: int = 0) -> Path:
    return folder / f"{folder_name(step)}{f'.attempt-{attempt}' if attempt else ''}.part"


def steps_in(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, in order."""
    try:
        # One scan: between a listing and a look at each entry, a job that trains removes the oldest and adds others.
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        names = []
    return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))


def write_part(
    folder: Path,
    rank: int,
    memory: memoryview,
    boxes: Iterable[tuple[str, str, tuple[int, ...], Box, int, int]],
    fragments: Mapping[str, Any],
) -> None:
    """Write a rank's bytes and their description. Each of `boxes` has the name, dtype and shape of its tensor, the box,
    and the offset and length of its bytes. `fragments` are the other fields of a `Part`."""
    file = DATA_FILE.format(rank=rank)
    tensors: dict[str, StoredTensor] = {}
    for name, dtype, shape, box, offset, length in boxes:
        crc32 = zlib.crc32(memory[offset : offset + length])
        stored = StoredBox(box=box, file=file, offset=offset, length=length, crc32=crc32)
        known = tensors.setdefault(name, StoredTensor(name=name, dtype=dtype, shape=shape, boxes=()))
        tensors[name] = replace(known, boxes=(*known.boxes, stored))
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / file, memory)
    part = Part(tensors=tuple(tensors.values()), **fragments)
    text = json.dumps({field.name: to_json(getattr(part, field.name)) for field in fields(part)})
    path = folder / _PART_FILE.format(rank=rank)
    _write(path.with_suffix(".unfinished"), text.encode())
    path.with_suffix(".unfinished").rename(path)


def has_part(folder: Path, rank: int) -> bool:
    """Whether a rank has finished writing its part."""
    return (folder / _PART_FILE.format(rank=rank)).exists()


def finish(folder: Path, state: SavedState, artifacts: Mapping[str, str], attempt: int = 0) -> Path:
    """Join the parts of all ranks, and give the checkpoint its final name. Raises a SupersededError if there is a newer
    attempt of the job. `artifacts` are texts of further files, by name."""
    partial, final = partial_folder(folder, state.step, attempt), folder / folder_name(state.step)
    paths = [partial / _PART_FILE.format(rank=rank) for rank in range(state.num_ranks)]
    parts = [from_json(Part, read_json_file(path), str(path)) for path in paths]
    data: dict[str, SavedLoader] = {}
    for part in parts:  # the position in a task's data is taken from the first rank that reads it
        data |= {task: entry for task, entry in part.data.items() if task not in data or data[task].position is None}
    # Ranks that run no slot count no updates, and their loss scale and learning-rate scheduler are out of date: take
    # these from ranks with the most updates.
    counts = [part.extra.get("num_updates", state.num_updates) for part in parts]
    latest = [part.extra for part, count in zip(parts, counts, strict=True) if count == max(counts)]
    extra = {name: value for values in latest for name, value in values.items() if name != "num_updates"}
    state = replace(
        state,
        data=data,
        num_updates=max(counts),
        optimizer_values={name: values for part in parts for name, values in part.optimizer_values.items()},
        groups=tuple(group for part in parts for group in part.groups),
        extra={**state.extra, **extra},
    )
    files = {INDEX: json.dumps(to_json(joined(parts))).encode()}
    files |= {name: text.encode() for name, text in artifacts.items()}
    for name, content in files.items():
        _write(partial / name, content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    _write(partial / STATE, state_text(state, digests))
    for path in paths:
        path.unlink()
    sync_folder(partial)
    check_newest(folder, attempt)
    if final.exists():  # damaged, or from a run that was resumed from an earlier step
        _remove(final)
    partial.rename(final)
    sync_folder(folder)
    return final


def state_text(state: SavedState, digests: Mapping[str, str]) -> bytes:
    """The content of `state.json`, which ends with its own digest."""
    values = {field.name: to_json(getattr(state, field.name)) for field in fields(state)}
    content = json.dumps({"spindle": "checkpoint", "version": VERSION, "files": digests, **values}).encode()
    return content[:-1] + f',"sha256":"{hashlib.sha256(content).hexdigest()}"}}\n'.encode()


def read_state(path: Path) -> tuple[SavedState, dict[str, str]]:
    """Read what `state_text` wrote: the state, and the digests of the other files."""
    data = read_json_file(path)
    if data.get("spindle") != "checkpoint":
        raise CheckpointError(f"{path}: not the state of a Spindle checkpoint")
    if data.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: format {data.get('version')!r} was written by another version of Spindle; this one reads format "
            f"{VERSION}"
        )
    content = path.read_bytes()
    match = _DIGEST.fullmatch(content[-_DIGEST_BYTES:])
    if match is None or hashlib.sha256(content[:-_DIGEST_BYTES] + b"}").hexdigest() != match[1].decode():
        raise CheckpointError(f"{path}: is damaged: its contents do not match its digest")
    body = {key: value for key, value in data.items() if key not in ("spindle", "version", "files", "sha256")}
    return from_json(SavedState, body, str(path)), from_json(dict[str, str], data.get("files"), f"{path}: files")


def read_verified(folder: Path, name: str, digests: Mapping[str, str]) -> dict[str, Any]:
    """Read a JSON file and compare it with its digest in the state."""
    path = folder / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if hashlib.sha256(content).hexdigest() != digests.get(name):
        raise CheckpointError(f"{path}: is damaged: its contents do not match their digest in {STATE}")
    return read_json_file(path)


def read_index(folder: Path, digests: Mapping[str, str]) -> Index:
    return from_json(Index, read_verified(folder, INDEX, digests), str(folder / INDEX))


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished checkpoints of earlier runs. An older attempt that is still writing one cannot finish it
    any more."""
    for entry in list(folder.iterdir()) if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(entry.name) and entry.is_dir():
            with suppress(FileNotFoundError):  # renamed by the attempt that wrote it
                _remove(entry)


def prune(folder: Path, keep: int | None, needed: Sequence[int] = (), damaged: Collection[int] = ()) -> None:
    """Remove all checkpoints except the newest `keep` and the steps in `needed`. Checkpoints known to be damaged do not
    count among the newest."""
    if keep is None:
        return
    steps = steps_in(folder)
    newest = [step for step in steps if step not in damaged][-keep:]
    for step in steps:
        if step not in newest and step not in needed:
            _remove(folder / folder_name(step))


def _remove(folder: Path) -> None:
    """Remove a folder, renaming it first, because a folder with the name of a checkpoint must be complete."""
    if folder.suffix != ".removed":
        doomed = folder.with_name(f"{folder.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        folder = folder.rename(doomed)
    shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, content: bytes | memoryview) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
