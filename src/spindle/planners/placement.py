"""Which devices? From pieces with a number of devices to pieces with devices, communication first (§3.5).

Piece by piece in start order, among devices that are free then: stay where the data is, stay inside one island, go
where the weights already are. What changes a state of a module goes where the first piece that did went. When a piece
finds no room, earlier pieces are placed again by rules that look less at communication and more at memory, the latest
first; the number of such backtracks is limited.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spindle.errors import DoesNotFitError
from spindle.graph import MetaGraph
from spindle.plan import Piece
from spindle.planners.problem import Timed
from spindle.profile import Profile, Setting, backward_bytes, bytes_text, saved_bytes, state_bytes
from spindle.program import counts_bytes

NEAR_DATA, NEAR_WEIGHTS, EMPTIEST, FULLEST = range(4)
MAX_RETURNS = 16
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class _NoRoom(Exception):
    """No devices with enough free memory for a piece."""

    piece: int
    device: int
    needed_bytes: int


def place(profile: Profile, setting: Setting, timed: Sequence[Timed]) -> list[Piece]:
    """Choose the devices of every piece. Raises a DoesNotFitError that names the device, the bytes needed and the bytes
    available."""
    placement = _Placement(profile, setting)
    rules = [NEAR_DATA] * len(timed)
    first: _NoRoom | None = None
    failure: _NoRoom | None = None
    changed = 0
    for _ in range(MAX_RETURNS):
        # Whether a piece fits depends on earlier pieces, so a different rule for this piece alone would not help.
        if failure is None or changed < failure.piece:
            try:
                return placement.run(timed, rules)
            except _NoRoom as error:
                failure = error
                first = first or error
        movable = [number for number in range(failure.piece + 1) if rules[number] < FULLEST]
        if not movable:
            break
        changed = movable[-1]
        rules[changed] += 1
        for number in range(changed + 1, len(rules)):
            rules[number] = rules[changed]
    assert first is not None
    limit = profile.cluster.kind.memory_bytes
    op = profile.graph.metaops[timed[first.piece].op].name
    raise DoesNotFitError(
        f"{op} does not fit: device {first.device} would need {bytes_text(first.needed_bytes)} "
        f"of the {bytes_text(limit)} there ({first.needed_bytes - limit:,} bytes too many)",
        first.needed_bytes,
    )


class _Placement:
    """The state of the placement: what each device holds, and until when it is busy."""

    def __init__(self, profile: Profile, setting: Setting) -> None:
        self.profile, self.setting, self.graph = profile, setting, profile.graph
        self.island = np.asarray(profile.cluster.island_of)
        self.counts_bytes = counts_bytes(profile)
        self.memory_bytes = profile.cluster.kind.memory_bytes
        self.units_of = {degree: self._units(degree) for degree in set(setting.tensor_degrees)}
        self.parameter_state = {
            degree: np.array(
                [state_bytes(self.graph, p, degree) for p in range(len(self.graph.parameters))], dtype=float
            )
            for degree in self.units_of
        }
        # bytes per parameter that its devices share: the optimizer state, or nothing
        self.shared_state = {
            degree: whole
            - np.array([_unshared_bytes(self.graph, p, degree) for p in range(len(self.graph.parameters))], dtype=float)
            if setting.shard_optimizer
            else np.zeros_like(whole)
            for degree, whole in self.parameter_state.items()
        }

    def _reset(self) -> None:
        num_devices = self.profile.cluster.num_devices
        self.free_at_s = np.zeros(num_devices)
        self.op_end_s = np.zeros(len(self.graph.metaops))
        self.next_layer = [0] * len(self.graph.metaops)
        self.last_devices: dict[int, np.ndarray] = {}
        self.team_devices: dict[str, np.ndarray] = {}
        self.state_devices: dict[str, np.ndarray] = {}
        # Memory: which weights are there, bytes of state, bytes of activations in the current round.
        self.held = np.zeros((len(self.graph.parameters), num_devices), dtype=bool)
        self.num_holders = np.zeros(len(self.graph.parameters), dtype=np.int64)
        self.state = np.zeros(num_devices)
        self.activations = np.zeros(num_devices)
        self.working = np.zeros(num_devices)  # the largest working space of a backward pass
        self.round = 0

    def run(self, timed: Sequence[Timed], rules: Sequence[int]) -> list[Piece]:
        self._reset()
        pieces: list[Piece] = []
        late = False
        for number, piece in enumerate(timed):
            if piece.round != self.round:
                self.round = piece.round
                self.activations[:] = 0
                self.working[:] = 0
            parameters = self._parameters(piece)
            new_state = self._new_state(piece, parameters)
            saved, working = self._new_activations(piece)
            devices = self._choose(number, piece, rules[number], new_state, saved, working)
            late |= bool(self.free_at_s[devices].max() > piece.start_s + _SLACK * (1 + piece.start_s))
            self._take(piece, devices, parameters, new_state, saved, working)
            pieces.append(
                Piece(
                    op=piece.op,
                    num_layers=piece.num_layers,
                    devices=tuple(devices.tolist()),
                    round=piece.round,
                    not_before_s=piece.start_s if piece.wave is not None else 0.0,
                    wave=piece.wave,
                )
            )
        if late:
            # Memory forced a piece onto devices that were still busy, so the requested waves cannot be kept.
            return [replace(piece, wave=None, not_before_s=0.0) for piece in pieces]
        return pieces

    def _choose(
        self, number: int, piece: Timed, rule: int, device_state: np.ndarray, saved: np.ndarray, working: float
    ) -> np.ndarray:
        """The devices of a piece that adds these bytes of state and activations to each of them."""
        degree = self.setting.tensor_degrees[piece.op]
        units = self.units_of[degree]
        num_units = piece.num_devices // degree
        new_state = device_state[units].max(axis=1)
        held = self.state + self.activations + saved + np.maximum(self.working, working)
        needed = held[units].max(axis=1) + new_state
        state = _state_of(self.graph, piece.op)
        if state in self.state_devices:
            needed = np.where(np.isin(units[:, 0], self.state_devices[state]), needed, np.inf)
        fits = needed <= (self.memory_bytes if self.counts_bytes else sys.float_info.max)
        if fits.sum() < num_units:
            worst = int(np.argsort(needed, kind="stable")[min(num_units, len(units)) - 1])
            raise _NoRoom(number, int(units[worst, 0]), int(needed[worst]))
        if rule == FULLEST:
            # pack: the fullest device that can still hold the piece, even if it is busy
            chosen = np.flatnonzero(fits)[np.argsort(-needed[fits], kind="stable")[:num_units]]
            return self._in_share_order(piece.op, units[np.sort(chosen)]).ravel()
        free_at = self.free_at_s[units].max(axis=1)
        start_s = max(piece.start_s, self._data_at(piece.op))
        free = fits & (free_at <= start_s + _SLACK * (1 + start_s))
        if free.sum() < num_units:
            # Tensor groups or memory left too few devices free at that time, so take those that are free soonest.
            soonest = np.sort(free_at[fits])[num_units - 1]
            free = fits & (free_at <= soonest)
        data = self._data_share(piece.op)[units].mean(axis=1)
        if piece.team is not None and piece.team in self.team_devices:
            data += np.isin(units[:, 0], self.team_devices[piece.team])
        order = self._order(rule, np.flatnonzero(free), num_units, units, data, new_state, needed)
        chosen = np.sort(order[:num_units])
        return self._in_share_order(piece.op, units[chosen]).ravel()

    def _units(self, degree: int) -> np.ndarray:
        """Groups of devices that can hold a tensor group, one per row."""
        if degree == 1:
            return np.arange(len(self.island))[:, None]
        return np.array(self.profile.cluster.tensor_groups(degree))

    def _order(
        self,
        rule: int,
        free: np.ndarray,
        num_units: int,
        units: np.ndarray,
        data: np.ndarray,
        new_state: np.ndarray,
        needed: np.ndarray,
    ) -> np.ndarray:
        """Free units in the order of preference."""
        if rule == EMPTIEST:
            return free[np.lexsort((free, needed[free]))]
        first, second = (-data, new_state) if rule == NEAR_DATA else (new_state, -data)
        island = self.island[units[:, 0]]
        best_first = free[np.lexsort((free, second[free], first[free]))]
        # Rank islands by their best units. An island that can hold the whole piece comes before any that cannot.
        num_islands = int(self.island[-1]) + 1
        num_free = np.bincount(island[free], minlength=num_islands)
        place_in_island = np.zeros(len(units), dtype=np.int64)
        for_island = island[best_first]
        stable = np.argsort(for_island, kind="stable")
        starts = np.searchsorted(for_island[stable], np.arange(num_islands))
        place_in_island[best_first[stable]] = np.arange(len(best_first)) - starts[for_island[stable]]
        counted = best_first[place_in_island[best_first] < num_units]
        offer_first = np.bincount(island[counted], weights=first[counted], minlength=num_islands)
        offer_second = np.bincount(island[counted], weights=second[counted], minlength=num_islands)
        too_small = num_free < num_units
        # Among islands that fit, the fullest; among those that do not, the emptiest.
        tightness = np.where(too_small, -num_free, num_free)
        rank_keys: tuple[np.ndarray, ...]
        if (too_small | (num_free == 0)).all():
            average = np.maximum(num_free, 1)
            rank_keys = (np.arange(num_islands), offer_second / average, tightness, offer_first / average)
        else:
            rank_keys = (np.arange(num_islands), tightness, offer_second, offer_first, too_small)
        rank = np.empty(num_islands, dtype=np.int64)
        rank[np.lexsort(rank_keys)] = np.arange(num_islands)
        return best_first[np.argsort(rank[island[best_first]], kind="stable")]

    def _data_at(self, op: int) -> float:
        if self.next_layer[op]:
            return float(self.op_end_s[op])
        return max((float(self.op_end_s[producer]) for producer in self.graph.predecessors[op]), default=0.0)

    def _sources(self, op: int) -> list[np.ndarray]:
        """Lists of devices, in the order of shares, that hold this op's next input."""
        givers = [op] if self.next_layer[op] else self.graph.predecessors[op]
        return [self.last_devices[giver] for giver in givers if giver in self.last_devices]

    def _data_share(self, op: int) -> np.ndarray:
        """How much of this op's input is on each device."""
        share = np.zeros(len(self.island))
        for devices in self._sources(op):
            share[devices] += 1 / len(devices)
        return share

    def _in_share_order(self, op: int, units: np.ndarray) -> np.ndarray:
        """Order units so that as many rows as possible stay where they are."""
        count = len(units)
        for devices in self._sources(op):
            centre = np.full(len(self.island), -1.0)
            centre[devices] = (np.arange(len(devices)) + 0.5) / len(devices)
            wanted = centre[units[:, 0]]
            ordered = np.full(count, -1, dtype=np.int64)
            rest = []
            for unit in range(count):
                share = int(wanted[unit] * count) if wanted[unit] >= 0 else -1
                if share >= 0 and ordered[share] < 0:
                    ordered[share] = unit
                else:
                    rest.append(unit)
            ordered[ordered < 0] = rest
            return units[ordered]
        return units

    def _parameters(self, piece: Timed) -> np.ndarray:
        layers = self.graph.metaops[piece.op].parameters
        first = self.next_layer[piece.op]
        names = {parameter for layer in layers[first : first + piece.num_layers] for parameter in layer}
        return np.array(sorted(names), dtype=np.int64)

    def _new_state(self, piece: Timed, parameters: np.ndarray) -> np.ndarray:
        """The bytes of state that each device would have to add."""
        sizes = self._sizes(piece.op, parameters, at_least=piece.num_devices)
        added: np.ndarray = sizes @ ~self.held[parameters]
        return added

    def _sizes(self, op: int, parameters: np.ndarray, at_least: int = 1) -> np.ndarray:
        """The bytes of each parameter on a device that holds it, if at least `at_least` devices hold it."""
        degree = self.setting.tensor_degrees[op]
        sizes: np.ndarray = self.parameter_state[degree][parameters]
        if self.setting.shard_optimizer:
            owners = np.maximum(self.num_holders[parameters], at_least) // degree
            sizes = sizes - self.shared_state[degree][parameters] * (1 - 1 / np.maximum(1, owners))
        return sizes

    def _new_activations(self, piece: Timed) -> tuple[np.ndarray, float]:
        """The bytes that each device would keep for a piece's backward, including input from other devices, and its
        working space."""
        op, degree = self.graph.metaops[piece.op], self.setting.tensor_degrees[piece.op]
        saved = np.zeros(len(self.island))
        if op.batch_size is None or op.cost is None:
            return saved, 0.0
        rows = -(-op.batch_size // (piece.num_devices // degree))
        saved += saved_bytes(op, rows, piece.num_layers, degree, self.setting.recompute[piece.op])
        givers = [piece.op] if self.next_layer[piece.op] else self.graph.predecessors[piece.op]
        for giver in givers:
            cost = self.graph.metaops[giver].cost
            if giver in self.last_devices and cost is not None:
                arrives = np.ones(len(self.island), dtype=bool)
                arrives[self.last_devices[giver]] = False
                saved += arrives * rows * cost.output_bytes
        return saved, backward_bytes(op, rows, degree, self.setting.recompute[piece.op])

    def _take(
        self,
        piece: Timed,
        devices: np.ndarray,
        parameters: np.ndarray,
        new_state: np.ndarray,
        saved: np.ndarray,
        working: float,
    ) -> None:
        """Assign devices to a piece: they are busy until it ends, and hold its parameters and activations."""
        layer_s = (piece.end_s - piece.start_s) / piece.num_layers
        start_s = max(
            piece.start_s if piece.wave is not None else 0.0,
            self._data_at(piece.op),
            float(self.free_at_s[devices].max()),
        )
        end_s = start_s + piece.num_layers * layer_s
        if self.setting.shard_optimizer:
            # devices that hold these parameters already have a smaller share of their state now
            self.state -= self._sizes(piece.op, parameters) @ self.held[parameters]
        else:
            self.state[devices] += new_state[devices]
        self.activations[devices] += saved[devices]
        self.working[devices] = np.maximum(self.working[devices], working)
        self.held[parameters[:, None], devices] = True
        self.num_holders[parameters] = self.held[parameters].sum(axis=1)
        if self.setting.shard_optimizer:
            self.state += self._sizes(piece.op, parameters) @ self.held[parameters]
        self.free_at_s[devices] = end_s
        self.op_end_s[piece.op] = end_s
        self.next_layer[piece.op] += piece.num_layers
        if piece.team is not None:
            self.team_devices[piece.team] = np.union1d(devices, self.team_devices.get(piece.team, devices))
        if state := _state_of(self.graph, piece.op):
            self.state_devices[state] = devices
        self.last_devices[piece.op] = devices[:: self.setting.tensor_degrees[piece.op]]


def _state_of(graph: MetaGraph, op: int) -> str:
    cost = graph.metaops[op].cost
    return "" if cost is None else cost.state


def _unshared_bytes(graph: MetaGraph, parameter: int, tensor_degree: int) -> int:
    """What a device holds of a parameter however many devices share its optimizer state."""
    elements = graph.parameters[parameter].num_elements
    numerics = graph.numerics
    owned = -(-elements // tensor_degree) * numerics.optimizer_bytes if graph.parameters[parameter].trainable else 0
    return state_bytes(graph, parameter, tensor_degree) - owned
