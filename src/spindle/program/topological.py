"""The compiled loop of `launch_order`: Kahn's algorithm, with a heap of the nodes that are ready."""

from __future__ import annotations

import numpy as np

from spindle.jit import njit


@njit(cache=True)
def topological_order(num_needs, follower_starts, followers):
    """Nodes in topological order, always the lowest of those that are ready; fewer than all if there is a cycle."""
    needs = num_needs.copy()
    order = np.empty(len(needs), np.int64)
    done = 0
    heap = np.empty(len(needs), np.int64)
    size = 0
    for node in range(len(needs)):
        if needs[node] == 0:  # in rising order: a heap already
            heap[size] = node
            size += 1
    while size > 0:
        node = heap[0]
        order[done] = node
        done += 1
        # Move the last one down from the top.
        size -= 1
        moved = heap[size]
        position = 0
        while 2 * position + 1 < size:
            child = 2 * position + 1
            if child + 1 < size and heap[child + 1] < heap[child]:
                child += 1
            if moved < heap[child]:
                break
            heap[position] = heap[child]
            position = child
        heap[position] = moved
        for place in range(follower_starts[node], follower_starts[node + 1]):
            follower = followers[place]
            needs[follower] -= 1
            if needs[follower] == 0:
                position = size
                size += 1
                while position > 0 and heap[(position - 1) >> 1] > follower:
                    heap[position] = heap[(position - 1) >> 1]
                    position = (position - 1) >> 1
                heap[position] = follower
    return order[:done]
