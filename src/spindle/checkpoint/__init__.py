"""Checkpoints on disk: folders, indexes, bytes, and checks of them. Knows neither torch nor processes."""

from spindle.checkpoint.attempts import claim, newest_attempt
from spindle.checkpoint.export import export_safetensors
from spindle.checkpoint.files import (
    DATA_FILE,
    PLAN,
    PROFILE,
    finish,
    folder_name,
    has_part,
    partial_folder,
    prune,
    remove_unfinished,
    steps_in,
    sync_folder,
    write_part,
)
from spindle.checkpoint.index import (
    DTYPE_BYTES,
    Index,
    Part,
    SavedGroup,
    SavedLoader,
    SavedState,
    StoredBox,
    StoredTensor,
)
from spindle.checkpoint.read import SavedCheckpoint, folder_of_step, open_checkpoint
from spindle.checkpoint.writers import checkpoint_bytes, cut, writers_of

__all__ = [
    "DATA_FILE",
    "DTYPE_BYTES",
    "PLAN",
    "PROFILE",
    "Index",
    "Part",
    "SavedCheckpoint",
    "SavedGroup",
    "SavedLoader",
    "SavedState",
    "StoredBox",
    "StoredTensor",
    "checkpoint_bytes",
    "claim",
    "cut",
    "export_safetensors",
    "finish",
    "folder_name",
    "folder_of_step",
    "has_part",
    "newest_attempt",
    "open_checkpoint",
    "partial_folder",
    "prune",
    "remove_unfinished",
    "steps_in",
    "sync_folder",
    "write_part",
    "writers_of",
]
