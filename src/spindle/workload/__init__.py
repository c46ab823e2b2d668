"""Workloads: tasks, modules (chains of layers), flows and batch sizes. Knows no machine."""

from spindle.workload.batches import (
    FILLED,
    LANGUAGE,
    VIDEO,
    VISION,
    Clip,
    Microbatch,
    Packing,
    Sample,
    SampleError,
    even_parts,
    line_of_sample,
    pack_clips,
    pack_images,
    read_samples,
    split_evenly,
)
from spindle.workload.file import read_workload, write_workload
from spindle.workload.workload import Call, Layer, LayerCost, Module, Numerics, Parameter, Task, Workload

__all__ = [
    "FILLED",
    "LANGUAGE",
    "VIDEO",
    "VISION",
    "Call",
    "Clip",
    "Layer",
    "LayerCost",
    "Microbatch",
    "Module",
    "Numerics",
    "Packing",
    "Parameter",
    "Sample",
    "SampleError",
    "Task",
    "Workload",
    "even_parts",
    "line_of_sample",
    "pack_clips",
    "pack_images",
    "read_samples",
    "read_workload",
    "split_evenly",
    "write_workload",
]
