"""Tree search over orders (PipeWeaver §4.1), compiled.

A node at depth d fixes the d-th token of the order; the root's children fix the base. Selection by upper confidence
with the best score below a node, score = bound / makespan; it stops at a node that is not fully expanded (descending to
a leaf would grow one path only). A new node is scored by rollouts: the rest of the order follows the best known order,
each token drawn from the first few that are left.

Pruned, soundly: of microbatches that are each other's equal, the later one does not begin before the earlier; nothing
is searched once the bound is reached. Pruned, as a heuristic: a node has children only for the first `WIDTH` tokens
left of the starting order, so that the tree grows deep in few evaluations.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from spindle.planners.anneal import random_below, random_share
from spindle.planners.pipeline.evaluate import evaluate

# Scores lie close to each other and to 1: the power pulls them apart.
ALPHA = 8.0
BETA = 0.05
WIDTH = 6
ROLLOUTS = 8

# Entries of the control array, through which another thread watches a search and ends it.
STOP, DONE = 0, 1


@njit(cache=True, nogil=True)
def upper_confidence(score, parent_visits, visits, alpha, beta):
    return score**alpha + beta * np.sqrt(np.log(parent_visits) / visits)


@njit(cache=True, nogil=True)
def _may_follow(load, is_used, has_begun, token):
    if is_used[token]:
        return False
    microbatch = load.microbatch_of[token >> 1]
    twin = load.twin[microbatch]
    return has_begun[microbatch] or twin < 0 or has_begun[twin]


@njit(cache=True, nogil=True)
def search_tree(load, scratch, bound, start, first_base, seed, evaluations, spread, control, best_order, found):
    """Searches from a starting order; `best_order` holds the best on entry and exit, `found` its [makespan, base].

    `spread`: mean distance by which rollouts leave the best order; 0 draws them evenly. Returns (evaluations, makespan)
    of every improvement."""
    tokens = start.size
    num_bases = load.base_gate.size
    capacity = evaluations // ROLLOUTS + 2
    parent = np.full(capacity, -1, np.int64)
    entry = np.full(capacity, -1, np.int64)
    first_child = np.full(capacity, -1, np.int64)
    sibling = np.full(capacity, -1, np.int64)
    visits = np.zeros(capacity, np.int64)
    best_score = np.zeros(capacity)
    is_closed = np.zeros(capacity, np.bool_)
    num_nodes = 1
    state = np.array([seed * 2 + 1], np.uint64)
    for _ in range(16):
        random_share(state)
    is_used = np.zeros(tokens, np.bool_)
    has_begun = np.zeros(load.twin.size, np.bool_)
    is_child = np.zeros(max(tokens, num_bases), np.bool_)
    order = np.empty(tokens, np.int64)
    rest = np.empty(tokens, np.int64)
    record = np.empty((evaluations + 1, 2), np.int64)
    num_records = 0
    done = 0
    while done < evaluations and found[0] > bound and num_nodes < capacity and not is_closed[0]:
        # Selection.
        is_used[:] = False
        has_begun[:] = False
        node = 0
        depth = -1
        base = first_base
        grown = -1
        while True:
            # Which entries may follow, and which of them are children already.
            is_child[:] = False
            child = first_child[node]
            while child >= 0:
                is_child[entry[child]] = True
                child = sibling[child]
            num_open = 0
            if depth < 0:
                for one in range(num_bases):
                    if not is_child[one]:
                        # The base that did best so far is tried first.
                        if num_open == 0 or one == first_base:
                            grown = one
                        num_open += 1
            else:
                width = 0
                for place in range(tokens):
                    token = start[place]
                    if _may_follow(load, is_used, has_begun, token):
                        width += 1
                        if not is_child[token]:
                            if num_open == 0:
                                grown = token
                            num_open += 1
                        if width == WIDTH:
                            break
            if num_open > 0:
                break
            chosen = -1
            chosen_value = -1.0
            child = first_child[node]
            while child >= 0:
                if not is_closed[child]:
                    value = upper_confidence(best_score[child], visits[node], visits[child], ALPHA, BETA)
                    if value > chosen_value:
                        chosen = child
                        chosen_value = value
                child = sibling[child]
            if chosen < 0:
                # All children are searched to the end.
                is_closed[node] = True
                break
            node = chosen
            depth += 1
            if depth == 0:
                base = entry[node]
            else:
                token = entry[node]
                order[depth - 1] = token
                is_used[token] = True
                has_begun[load.microbatch_of[token >> 1]] = True
        if is_closed[node]:
            continue
        # Expansion.
        new = num_nodes
        num_nodes += 1
        parent[new] = node
        entry[new] = grown
        sibling[new] = first_child[node]
        first_child[node] = new
        depth += 1
        if depth == 0:
            base = grown
        else:
            order[depth - 1] = grown
            is_used[grown] = True
            has_begun[load.microbatch_of[grown >> 1]] = True
        is_closed[new] = depth == tokens
        # Rollouts.
        score = 0.0
        for rollout in range(ROLLOUTS):
            if done == evaluations or (rollout > 0 and depth == tokens):
                break
            num_rest = 0
            for place in range(tokens):
                if not is_used[best_order[place]]:
                    rest[num_rest] = best_order[place]
                    num_rest += 1
            for place in range(depth, tokens) if depth > 0 else range(tokens):
                pick = 0
                if spread == 0:
                    pick = random_below(state, num_rest)
                elif rollout > 0:
                    while pick < num_rest - 1 and random_share(state) < spread / (1.0 + spread):
                        pick += 1
                order[place] = rest[pick]
                num_rest -= 1
                for later in range(pick, num_rest):
                    rest[later] = rest[later + 1]
            makespan = evaluate(load, base, order, scratch)
            done += 1
            score = max(score, bound / makespan)
            if makespan < found[0]:
                found[0] = makespan
                found[1] = base
                best_order[:] = order
                record[num_records, 0] = done
                record[num_records, 1] = makespan
                num_records += 1
        # The best goes up.
        while new >= 0:
            visits[new] += 1
            best_score[new] = max(best_score[new], score)
            new = parent[new]
        control[DONE] = done
        if control[STOP]:
            break
    return record[:num_records]
