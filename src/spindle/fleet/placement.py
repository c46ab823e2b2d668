"""Counts first, then nodes: which nodes hold the devices of each cell.

A cell of one node goes to the fullest node with room, a larger one to whole nodes. Only if nothing fits are other jobs
moved, as few devices as possible; each pays for its reallocation. Knows no utility.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spindle.fleet.columns import Columns

Nodes = tuple[tuple[int, int], ...]  # pairs of node and number of devices


@dataclass(slots=True)
class Placement:
    """New nodes by job (row); `failed` are the jobs that could not be placed."""

    nodes: dict[int, Nodes] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)


class _Layout:
    """Free devices of each node, and the jobs inside it. Jobs on several nodes have whole nodes, and are left out."""

    def __init__(self, columns: Columns, free: list[int]) -> None:
        self.fleet, self.free = columns.fleet, free
        self.of_kind, self.node_size = columns.nodes_of_kind, columns.node_size
        self.residents: dict[int, dict[int, int]] = {}

    def settle(self, job: int, nodes: Nodes) -> None:
        for node, count in nodes:
            self.free[node] -= count
        if len(nodes) == 1:
            self.residents.setdefault(nodes[0][0], {})[job] = nodes[0][1]

    def leave(self, job: int, nodes: Nodes) -> None:
        for node, count in nodes:
            self.free[node] += count
        if len(nodes) == 1:
            del self.residents[nodes[0][0]][job]

    def place(self, kind: int, count: int) -> Nodes | None:
        """Nodes for a cell, if there are any free."""
        size = self.node_size[kind]
        free, sizes = self.free, self.fleet.size_of_node
        if count >= size:
            empty = [node for node in self.of_kind[kind] if free[node] == size and sizes[node] == size]
            needed = count // size
            return tuple((node, size) for node in empty[:needed]) if len(empty) >= needed else None
        best, least = -1, size + 1
        for node in self.of_kind[kind]:
            if count <= free[node] < least:
                best, least = node, free[node]
                if least == count:
                    break
        return ((best, count),) if best >= 0 else None

    def make_room(self, kind: int, count: int) -> dict[int, Nodes] | None:
        """Moves of other jobs after which one node of the kind has `count` free devices; as few devices as possible."""
        best: dict[int, Nodes] | None = None
        least = sum(self.fleet.size_of_node) + 1
        for node in self.of_kind[kind]:
            needed = count - self.free[node]
            if self.fleet.size_of_node[node] < count or needed >= least or needed <= 0:
                continue
            leaving = _fewest(self.residents.get(node, {}), needed)
            if leaving is None or sum(leaving.values()) >= least:
                continue
            moves = self._rehome(node, kind, leaving)
            if moves is not None:
                best, least = moves, sum(leaving.values())
        return best

    def _rehome(self, left: int, kind: int, leaving: Mapping[int, int]) -> dict[int, Nodes] | None:
        """Other nodes of the kind for jobs that leave a node."""
        moves: dict[int, Nodes] = {}
        taken: dict[int, int] = {}
        for job, count in sorted(leaving.items(), key=lambda item: (-item[1], item[0])):
            rooms = [
                (self.free[node] - taken.get(node, 0), node)
                for node in self.of_kind[kind]
                if node != left and self.free[node] - taken.get(node, 0) >= count
            ]
            if not rooms:
                return None
            _, node = min(rooms)  # an empty node last: the next large cell may need it
            taken[node] = taken.get(node, 0) + count
            moves[job] = ((node, count),)
        return moves


def _fewest(residents: Mapping[int, int], needed: int) -> dict[int, int] | None:
    """Jobs of a node with at least `needed` devices together, nearly as few devices as possible."""
    single = [(count, job) for job, count in residents.items() if count >= needed]
    chosen: dict[int, int] = {}
    total = 0
    for count, job in sorted(((count, job) for job, count in residents.items()), reverse=True):
        if total < needed and count < needed:
            chosen[job] = count
            total += count
    if total < needed and not single:
        return None
    if single and (total < needed or min(single)[0] <= total):
        count, job = min(single)
        return {job: count}
    return chosen


def place(
    columns: Columns,
    choice: Iterable[int],
    held: Iterable[int],
    fixed: Container[int] = frozenset(),
    ranks: Sequence[int] = (),
) -> Placement:
    """Nodes for the chosen cell of each job (-1 for none); jobs that keep the cell that they hold stay where they are
    unless they must make room, which `fixed` ones never do. Jobs are placed from the highest of `ranks` on, if given,
    and large cells before small ones."""
    cells, holds = list(choice), list(held)
    layout = _Layout(columns, list(columns.free))
    placement = Placement()
    waiting: list[int] = []
    for job, (cell, held_cell) in enumerate(zip(cells, holds, strict=True)):
        nodes = columns.nodes[job]
        if cell >= 0 and cell == held_cell:
            if len(nodes) == 1 and job not in fixed:
                layout.residents.setdefault(nodes[0][0], {})[job] = nodes[0][1]
            continue
        for node, count in nodes:  # left, or never had
            layout.free[node] += count
        if cell >= 0:
            waiting.append(job)
    counts = {job: int(columns.count[cells[job]]) for job in waiting}
    for job in sorted(waiting, key=lambda job: (-ranks[job] if ranks else 0, -counts[job], job)):
        _place_job(layout, placement, columns, job, int(columns.kind[cells[job]]), counts[job])
    return placement


def blocking_jobs(
    columns: Columns, cells: list[int], placement: Placement, failed: int, may_leave: list[bool]
) -> list[int]:
    """Jobs of those that `may_leave` which would have to, so that a job without a place gets one, on the nodes where
    they have the fewest devices; none if that would not be enough."""
    kind, count = int(columns.kind[cells[failed]]), int(columns.count[cells[failed]])
    size = columns.node_size[kind]
    share = min(count, size)
    free = {node: columns.size[node] for node in columns.nodes_of_kind[kind]}
    leaving: dict[int, dict[int, int]] = {node: {} for node in free}
    for job, cell in enumerate(cells):
        if cell < 0 or job == failed or columns.kind[cell] != kind:
            continue
        for node, num_devices in placement.nodes.get(job, () if job in placement.failed else columns.nodes[job]):
            free[node] -= num_devices
            if may_leave[job]:
                leaving[node][job] = num_devices
    options: list[tuple[int, int, dict[int, int]]] = []
    for node, num_free in free.items():
        fewest = _fewest(leaving[node], share - num_free) if num_free < share else {}
        if fewest is not None and columns.size[node] >= share:
            options.append((sum(fewest.values()), node, fewest))
    needed = max(1, count // size)
    if len(options) < needed:
        return []
    return sorted({job for _, _, fewest in sorted(options, key=lambda item: item[:2])[:needed] for job in fewest})


def _place_job(layout: _Layout, placement: Placement, columns: Columns, job: int, kind: int, count: int) -> None:
    nodes = layout.place(kind, count)
    size = columns.node_size[kind]
    undo: list[tuple[int, Nodes, Nodes]] = []
    for _ in range(max(1, count // size)):
        if nodes is not None:
            break
        moves = layout.make_room(kind, min(count, size))
        if moves is None:
            break
        for resident, target in moves.items():
            before = placement.nodes.get(resident, columns.nodes[resident])
            undo.append((resident, before, target))
            layout.leave(resident, before)
            layout.settle(resident, target)
            placement.nodes[resident] = target
        nodes = layout.place(kind, count)
    if nodes is None:
        for resident, before, target in reversed(undo):
            layout.leave(resident, target)
            layout.settle(resident, before)
            if before == columns.nodes[resident]:
                placement.nodes.pop(resident)
            else:
                placement.nodes[resident] = before
        placement.failed.append(job)
        return
    layout.settle(job, nodes)
    placement.nodes[job] = nodes
