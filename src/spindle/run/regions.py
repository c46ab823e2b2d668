"""Regions: passes of a rank, on one or several lanes, that are launched together as one CUDA graph.

With several ranks a step cannot be one graph, because communication comes in between. But there are long runs of passes
that wait for no other rank: all lanes up to the first message, or all layers of a tower. The graphs of these passes
become children of one graph, in which lanes are branches, so that no lane waits for the host between its passes.

A region does not make any pass wait longer, except that it follows the fourth region before it, which is launched from
the same stream. Whatever the region waits for as a whole, each of its passes waits for anyway. Work outside waits for
single passes, by events that the graph records, not for the whole region. A new region begins where that is impossible,
or where a pass launches more than its graph (it joins rows of several ranks, or sums gradients of several consumers).
Passes without a graph run eagerly in between. A step that is timed launches pass by pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from spindle.run.composed_graph import ComposedGraph


class Region:
    """Passes by instruction number, in the order in which the host launches them.

    `needs` has, for each pass, those passes of the region that it follows on its lane or waits for. `awaited` are
    passes that something outside the region waits for.
    """

    def __init__(self, needs: Mapping[int, frozenset[int]], awaited: Collection[int] = ()) -> None:
        self.needs, self._awaited = needs, tuple(awaited)
        # Events after passes that are awaited, recorded anew in each replay.
        self.events: dict[int, torch.cuda.Event] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._composed: ComposedGraph | None = None
        self.failure: str | None = None  # why its graphs are launched one by one, if they are

    @classmethod
    def of_one(cls, position: int) -> Region:
        """A region of a single instruction."""
        return cls({position: frozenset()})

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(self.needs)

    def add_graph(self, position: int, graph: torch.cuda.CUDAGraph) -> None:
        """Add the graph of a pass, captured with `keep_graph`. A pass that has nothing to run has no graph."""
        self._graphs[position] = graph

    def replay(self) -> None:
        """Launch all passes on the current stream."""
        if self._composed is None and self.failure is None:
            try:
                self._composed = self._compose()
            except RuntimeError as error:  # an error of the driver
                self.failure = str(error)
        if self._composed is not None:
            self._composed.replay()
            return
        for graph in self._graphs.values():
            graph.replay()
        for event in self.events.values():
            event.record()

    def _compose(self) -> ComposedGraph:
        composed = ComposedGraph()
        graphs_before: dict[int, frozenset[int]] = {}  # by pass: the graphs after which it is done
        for position, needs in self.needs.items():
            graphs = frozenset[int]().union(*(graphs_before[needed] for needed in needs))
            graphs_before[position] = graphs
            if position in self._graphs:
                composed.add(position, self._graphs[position], graphs)
                graphs_before[position] = frozenset([position])
        for position in self._awaited if torch.cuda.is_available() else ():
            self.events[position] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.events[position].record()  # torch creates a CUDA event when it is first recorded
        for position, event in self.events.items():
            composed.record_event(event.cuda_event, graphs_before[position])
        composed.instantiate()
        return composed


def region_positions(
    positions: Sequence[int],
    needs: Mapping[int, Collection[int]],
    can_begin: Callable[[int], bool],
    can_follow: Callable[[int], bool],
) -> list[tuple[int, ...]]:
    """Cut passes, in host order, into regions. A pass that cannot be in a region is alone.

    `needs` has what each pass waits for: other passes, including the one before it on its lane, and messages.
    """
    # The ancestors of each pass, as sets of bits: everything that it waits for, directly or not. A pass joins a region
    # if it waits for everything that the region waits for, and if all passes of the region wait for its own additional
    # needs.
    ancestors: dict[int, int] = {}
    direct = {position: _bits(needs.get(position, ())) for position in positions}
    for position in positions:
        ancestors[position] = direct[position]
        for needed in needs.get(position, ()):
            ancestors[position] |= ancestors.get(needed, 0)
    regions: list[list[int]] = []
    members = outside = common = 0
    is_open = False
    for position in positions:
        added = direct[position] & ~members
        if is_open and can_follow(position) and not outside & ~ancestors[position] and not added & ~common:
            regions[-1].append(position)
            members, outside, common = members | 1 << position, outside | added, common & ancestors[position]
            continue
        regions.append([position])
        is_open = can_begin(position)
        members, outside, common = 1 << position, direct[position], ancestors[position]
    return [tuple(region) for region in regions]


def _bits(numbers: Collection[int]) -> int:
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits
