"""Profiles of abstract graphs: ops whose times the user already has.

    {"ops": [{"name": "vision", "layers": 32, "time_s": {"1": 0.031, "2": 0.017}}, ...],
     "edges": [["vision", "lm"], ...]}

`time_s` is seconds per layer, forward and backward together, on n devices; a third of it is assumed to be forward.
`forward_s` and `backward_s` may be given instead. An n that is not listed is not allowed. An op may have a `batch` and
a `task` (all ops of one loss; an op without a task belongs to the task of the ops that it is connected with). Sizes of
data are not known, so transfers take no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spindle.artifact import read_integer, read_number
from spindle.cluster import Cluster
from spindle.errors import InputError, ProfileError, WorkloadError
from spindle.graph import MetaGraph, MetaOp
from spindle.profile.curve import Curve
from spindle.profile.profile import Profile

LEAVES_OUT = ("bytes: no transfer, gradient synchronisation, optimizer or memory is counted for an abstract graph",)
# Numbers beyond these limits are surely a mistake, and times could not be counted in integer nanoseconds.
MAX_LAYERS, MAX_BATCH = 1_000_000, 1_000_000_000
SHORTEST_S, LONGEST_S = 1e-9, 1e5
_OP_FIELDS = ("name", "layers", "time_s", "forward_s", "backward_s", "batch", "task")


def abstract_profile(data: Mapping[str, Any], cluster: Cluster, where: str = "graph", name: str = "graph") -> Profile:
    """The profile of an abstract graph given as a JSON object."""
    for key in data:
        if key not in ("ops", "edges"):
            raise InputError(f'{where}: unknown field {key!r}; an abstract graph has "ops" and "edges"')
    ops = data.get("ops")
    if not isinstance(ops, list) or not ops:
        raise InputError(f'{where}: expected "ops", a list of at least one op')
    metaops: list[MetaOp] = []
    curves: list[tuple[Curve, ...]] = []
    positions: dict[str, int] = {}
    for position, entry in enumerate(ops):
        metaop, curve = _read_op(entry, f"{where}: ops[{position}]")
        if metaop.name in positions:
            raise InputError(f"{where}: ops[{position}]: the name {metaop.name!r} is used twice; names must differ")
        positions[metaop.name] = position
        usable = curve.up_to(cluster.num_devices)  # times on more devices than the cluster has are ignored
        if usable is None:
            raise ProfileError(
                f"{where}: op {metaop.name!r} fits on no allowed number of devices: its times start at "
                f"{curve.num_devices[0]} devices, and the cluster has {cluster.num_devices}"
            )
        metaops.append(metaop)
        curves.append((usable,))
    edges = _read_edges(data.get("edges", []), positions, where)
    try:
        graph = MetaGraph(name=name, metaops=_with_tasks(metaops, edges), edges=edges)
    except WorkloadError as error:
        raise InputError(f"{where}: {error}") from error
    return Profile(graph=graph, cluster=cluster, curves=tuple(curves), gangs=True, leaves_out=LEAVES_OUT)


def _read_op(entry: Any, where: str) -> tuple[MetaOp, Curve]:
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected an object with name, layers and time_s, got {entry!r}")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise InputError(f'{where}: expected "name", a string, got {name!r}')
    where = f"{where} ({name})"
    for key in entry:
        if key not in _OP_FIELDS:
            raise InputError(f"{where}: unknown field {key!r}; an op has {', '.join(_OP_FIELDS)}")
    if "layers" not in entry:
        raise InputError(f'{where}: "layers" is missing')
    layers = read_integer(entry["layers"], f"{where}.layers")
    if not 1 <= layers <= MAX_LAYERS:
        raise InputError(
            f"{where}.layers: expected 1 to {MAX_LAYERS:,} layers (an op needs at least one), got {layers}"
        )
    batch = None if entry.get("batch") is None else read_integer(entry["batch"], f"{where}.batch")
    if batch is not None and not 1 <= batch <= MAX_BATCH:
        raise InputError(f"{where}.batch: expected 1 to {MAX_BATCH:,}, got {batch}")
    task = entry.get("task", "")
    if not isinstance(task, str):
        raise InputError(f"{where}.task: expected a string, got {task!r}")
    return MetaOp(name=name, num_layers=layers, batch_size=batch, task=task), _read_curve(entry, where)


def _read_curve(entry: dict[str, Any], where: str) -> Curve:
    parts = {key: entry[key] for key in ("forward_s", "backward_s") if key in entry}
    if "time_s" in entry and parts:
        raise InputError(f"{where}: give either time_s or forward_s and backward_s, not both")
    if "time_s" in entry:
        combined = _read_times(entry["time_s"], f"{where}.time_s")
        forward = {count: value / 3 for count, value in combined.items()}
        backward = {count: value - forward[count] for count, value in combined.items()}
    elif len(parts) == 2:
        forward = _read_times(parts["forward_s"], f"{where}.forward_s")
        backward = _read_times(parts["backward_s"], f"{where}.backward_s")
        if forward.keys() != backward.keys():
            unmatched = min(forward.keys() ^ backward.keys())
            raise InputError(f"{where}: {unmatched} devices have a time in only one of forward_s and backward_s")
    else:
        raise InputError(f"{where}: the op has no time; expected time_s, or forward_s and backward_s")
    counts = tuple(sorted(forward))
    return Curve(
        num_devices=counts,
        forward_s=tuple(forward[count] for count in counts),
        backward_s=tuple(backward[count] for count in counts),
    )


def _read_times(data: Any, where: str) -> dict[int, float]:
    if not isinstance(data, dict) or not data:
        raise InputError(f'{where}: expected times by number of devices, such as {{"1": 0.03, "2": 0.017}}')
    times: dict[int, float] = {}
    for key, value in data.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9) or int(key) < 1:
            raise InputError(f"{where}: {key[:20]!r} is not a number of devices; expected a whole number of at least 1")
        if int(key) in times:
            raise InputError(f"{where}: {int(key)} devices are listed twice")
        time_s = read_number(value, f'{where}["{key}"]')
        if time_s <= 0:
            raise InputError(f'{where}["{key}"]: a time must be above 0, got {time_s}')
        if not SHORTEST_S <= time_s <= LONGEST_S:
            raise InputError(f'{where}["{key}"]: expected {SHORTEST_S:g} to {LONGEST_S:g} seconds, got {time_s:g}')
        times[int(key)] = time_s
    return times


def _read_edges(data: Any, positions: dict[str, int], where: str) -> tuple[tuple[int, int], ...]:
    if not isinstance(data, list):
        raise InputError(f'{where}: expected "edges", a list of [producer, consumer]')
    edges: dict[tuple[int, int], None] = {}
    for number, edge in enumerate(data):
        if not isinstance(edge, list) or len(edge) != 2 or not all(isinstance(end, str) for end in edge):
            raise InputError(f"{where}: edges[{number}]: expected [producer, consumer], got {edge!r}")
        for end in edge:
            if end not in positions:
                raise InputError(f"{where}: edges[{number}]: there is no op {end!r}; ops: {', '.join(positions)}")
        if edge[0] == edge[1]:
            raise InputError(f"{where}: edges[{number}]: {edge[0]!r} feeds itself, which is a cycle")
        edges[(positions[edge[0]], positions[edge[1]])] = None
    return tuple(edges)


def _with_tasks(metaops: list[MetaOp], edges: tuple[tuple[int, int], ...]) -> tuple[MetaOp, ...]:
    """Give every op a task: ops that are connected, or have the same task, belong together (union-find)."""
    root = list(range(len(metaops)))

    def find(position: int) -> int:
        while root[position] != position:
            position = root[position]
        return position

    first_of_task: dict[str, int] = {}
    same_task = [
        (first_of_task.setdefault(op.task, position), position) for position, op in enumerate(metaops) if op.task
    ]
    for first, second in (*edges, *same_task):
        low, high = sorted((find(first), find(second)))
        root[high] = low
    task_of_root: dict[int, str] = {}
    for position, op in enumerate(metaops):
        if op.task:
            task_of_root.setdefault(find(position), op.task)
    return tuple(
        replace(op, task=task_of_root.get(find(position), metaops[find(position)].name))
        for position, op in enumerate(metaops)
    )
