"""Public traces, read from folders of the user's: the tables and the workload of Arena, the arrivals of ElasticFlow.

Arena's 1,938 jobs have models, batch sizes and requests that its authors drew at random, with arrivals of cluster08 of
microsoft/elasticflow-traces. ElasticFlow's jobs have no model and no kind of device: both are drawn here from a seed,
among Arena's models that run on as many devices. Only cells on the fewest nodes that hold them are taken.
"""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Iterator
from pathlib import Path

from spindle.artifact import read_json_file, read_text_file
from spindle.cluster import Cluster, DeviceKind, Island, Link
from spindle.errors import InputError
from spindle.fleet.fleet import Fleet
from spindle.fleet.job import Job
from spindle.fleet.trace import StepTime, Trace, TraceJob

# Devices per node, and what their data sheets say.
_ARENA_KINDS = (
    ("a100", 4, 312e12, 40, 1.555e12),
    ("v100", 16, 125e12, 32, 0.9e12),
    ("a40", 2, 149.7e12, 48, 0.696e12),
    ("a10", 2, 125e12, 24, 0.6e12),
)
_ITERATIONS_STORED = 5  # the workload stores iteration counts times 5


def arena_fleet(devices_per_kind: int = 320) -> Fleet:
    """Arena's simulated cluster: so many each of A100, V100, A40 and A10."""
    islands: list[Island] = []
    for name, size, flops, memory_gib, bandwidth in _ARENA_KINDS:
        kind = DeviceKind(name=name, peak_flops=flops, memory_bytes=memory_gib << 30, memory_bytes_per_s=bandwidth)
        link = Link(bytes_per_s=25e9, latency_s=5e-6)
        island = Island(kind=kind, num_devices=size, link=link, uplink=Link(bytes_per_s=12.5e9, latency_s=12e-6))
        islands += [island] * (devices_per_kind // size)
    return Fleet(cluster=Cluster(name=f"arena-{4 * devices_per_kind}", islands=tuple(islands)))


def arena_models(folder: Path) -> dict[str, tuple[StepTime, ...]]:
    """Measured step times by model and batch size, of cells on the fewest nodes."""
    path = folder / "optimal_iter_time_s.json"
    sizes = {name: size for name, size, *_ in _ARENA_KINDS}
    models: dict[str, tuple[StepTime, ...]] = {}
    for model, shapes in read_json_file(path).items():
        times = []
        for shape, step_s in shapes.items():
            hosts, kind, _, _, devices, _ = shape.split("_")
            count = int(hosts) * int(devices)
            if step_s > 0 and int(hosts) == -(-count // sizes[kind]):
                times.append(StepTime(kind=kind, num_devices=count, step_s=step_s))
        models[model] = tuple(sorted(times, key=lambda time: (time.kind, time.num_devices)))
    return models


def arena_trace(folder: Path) -> Trace:
    """The workload of the published simulation, without jobs whose request is not in the table."""
    models = arena_models(folder)
    jobs, num_excluded, first_s = [], 0, None
    path = folder / "sim_trace_1938jobs.csv"
    columns = ("job_id", "submission_time", "num_iteration", "model_name", "batch_size", "num_gpu", "gpu_type")
    for number, row in _rows(path, columns):
        where = f"{path}, line {number}"
        arrival_s = _number(row["submission_time"], f"{where}, submission_time")
        first_s = arrival_s if first_s is None else first_s
        model = f"{row['model_name'].replace('__', '_')}_{row['batch_size']}"
        if model not in models:
            raise InputError(f"{where}, model_name: unknown model {model!r}; the table has {', '.join(sorted(models))}")
        count = int(_number(row["num_gpu"], f"{where}, num_gpu"))
        if not _has(models[model], row["gpu_type"], count):
            num_excluded += 1
            continue
        steps = max(1, int(_number(row["num_iteration"], f"{where}, num_iteration")) // _ITERATIONS_STORED)
        jobs.append(
            _trace_job(
                f"{number - 1:04d}-{row['job_id'][:8]}",
                arrival_s - first_s,
                steps,
                row["gpu_type"],
                count,
                models[model],
            )
        )
    notes = (
        "models, batch sizes, device counts and kinds drawn by Arena's authors; arrivals of ElasticFlow's cluster08",
    )
    return Trace(name="arena", jobs=tuple(jobs), num_excluded=num_excluded, notes=notes)


def elasticflow_trace(path: Path, arena_folder: Path, num_devices: int, load: float, seed: int) -> Trace:
    """A cluster of ElasticFlow with drawn models and kinds, its arrivals scaled to an offered load.

    A job's length is what it takes on its number of devices of the drawn kind to run as long as in the trace.
    """
    models = arena_models(arena_folder)
    generator = random.Random(f"{path.stem} {seed}")
    kinds = [name for name, *_ in _ARENA_KINDS]
    drawn: list[tuple[str, float, int, str, int, tuple[StepTime, ...]]] = []
    num_excluded, device_s, arrivals = 0, 0.0, []
    for number, row in _rows(path, ("job_id", "submission_time", "duration", "num_gpu")):
        where = f"{path}, line {number}"
        count = int(_number(row["num_gpu"], f"{where}, num_gpu"))
        kind = generator.choice(kinds)
        names = [name for name, times in models.items() if _has(times, kind, count)]
        if not names:
            num_excluded += 1
            continue
        times = models[generator.choice(names)]
        duration_s = _number(row["duration"], f"{where}, duration")
        step_s = next(time.step_s for time in times if time.kind == kind and time.num_devices == count)
        steps = max(1, round(duration_s / step_s))
        arrival_s = _number(row["submission_time"], f"{where}, submission_time")
        arrivals.append(arrival_s)
        device_s += steps * step_s * count
        drawn.append((f"{number - 1:04d}-{row['job_id'][:8]}", arrival_s, steps, kind, count, times))
    span_s = device_s / (num_devices * load)  # how long all arrivals must take to offer this load
    scale = span_s / (arrivals[-1] - arrivals[0])
    jobs = tuple(
        _trace_job(name, (arrival_s - arrivals[0]) * scale, steps, kind, count, times)
        for name, arrival_s, steps, kind, count, times in drawn
    )
    notes = (
        f"models and kinds drawn from seed {seed} among Arena's; lengths by the durations of the trace; arrivals "
        f"scaled by {scale:.3g} to a load of {load:g} on {num_devices} devices",
    )
    return Trace(name=path.stem, jobs=jobs, num_excluded=num_excluded, notes=notes)


def _trace_job(name: str, arrival_s: float, steps: int, kind: str, count: int, times: tuple[StepTime, ...]) -> TraceJob:
    job = Job(name=name, num_steps=steps, requested_kind=kind, requested_devices=count)
    return TraceJob(job=job, arrival_s=arrival_s, num_steps=steps, times=times)


def _has(times: tuple[StepTime, ...], kind: str, count: int) -> bool:
    return any(time.kind == kind and time.num_devices == count for time in times)


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Lines of a CSV with these columns, numbered from 2; the header is line 1."""
    reader = csv.DictReader(io.StringIO(read_text_file(path)))
    for column in columns:
        if column not in (reader.fieldnames or ()):
            raise InputError(
                f"{path}: the column {column!r} is missing; it has {', '.join(reader.fieldnames or ()) or 'none'}"
            )
    yield from enumerate(reader, 2)


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except (TypeError, ValueError):
        raise InputError(f"{where}: expected a number, got {text!r}") from None
    if not value >= 0:
        raise InputError(f"{where}: expected a number that is not negative, got {text!r}")
    return value
