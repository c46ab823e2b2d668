"""A fleet: a cluster of mixed kinds whose islands are nodes, and the teams that share it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from spindle.cluster import Cluster, DeviceKind, Island
from spindle.errors import FleetError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCount:
    """So many devices of a kind."""

    kind: str
    num_devices: int

    def __post_init__(self) -> None:
        if self.num_devices < 0:
            raise FleetError(f"a number of {self.kind!r} devices must not be negative, got {self.num_devices}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """People who share a quota. Guaranteed devices that are idle are lent; limits are never exceeded."""

    name: str
    guaranteed: tuple[DeviceCount, ...] = ()
    limits: tuple[DeviceCount, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Node i is island i of the cluster. Kinds are numbered in the order of their first node.

    `storage_bytes_per_s` is what checkpoints are written and read at.
    """

    cluster: Cluster
    node_names: tuple[str, ...] = ()
    teams: tuple[Team, ...] = ()
    storage_bytes_per_s: float = 2e9
    kinds: tuple[DeviceKind, ...] = field(init=False, repr=False, compare=False)
    kind_of_node: tuple[int, ...] = field(init=False, repr=False, compare=False)
    size_of_node: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        islands = self.cluster.islands
        if not self.node_names:
            object.__setattr__(self, "node_names", tuple(f"node{number}" for number in range(len(islands))))
        if len(self.node_names) != len(islands) or len(set(self.node_names)) != len(islands):
            raise FleetError(
                f"fleet {self.cluster.name!r}: expected {len(islands)} different node names, "
                f"got {len(set(self.node_names))}"
            )
        kinds: dict[str, DeviceKind] = {}
        for island in islands:
            if kinds.setdefault(island.kind.name, island.kind) != island.kind:
                raise FleetError(
                    f"fleet {self.cluster.name!r}: two kinds of device are called {island.kind.name!r}; rename one"
                )
        numbers = {name: number for number, name in enumerate(kinds)}
        object.__setattr__(self, "kinds", tuple(kinds.values()))
        object.__setattr__(self, "kind_of_node", tuple(numbers[island.kind.name] for island in islands))
        object.__setattr__(self, "size_of_node", tuple(island.num_devices for island in islands))
        if not self.storage_bytes_per_s > 0:
            raise FleetError(f"storage_bytes_per_s must be above 0, got {self.storage_bytes_per_s}")
        self._check_teams(numbers)

    def _check_teams(self, numbers: dict[str, int]) -> None:
        totals = [0] * len(numbers)
        names = [team.name for team in self.teams]
        if len(set(names)) != len(names):
            raise FleetError(f"fleet {self.cluster.name!r}: two teams have the same name: {', '.join(sorted(names))}")
        for team in self.teams:
            for count in (*team.guaranteed, *team.limits):
                if count.kind not in numbers:
                    raise FleetError(
                        f"team {team.name!r}: unknown kind {count.kind!r}; the fleet has {', '.join(numbers)}"
                    )
            for count in team.guaranteed:
                totals[numbers[count.kind]] += count.num_devices
        for number, total in enumerate(totals):
            if total > self.num_devices(number):
                raise FleetError(
                    f"teams are guaranteed {total} devices of {self.kinds[number].name!r}, the fleet has "
                    f"{self.num_devices(number)}; lower the guarantees"
                )

    def num_devices(self, kind: int) -> int:
        """Devices of a kind, in all nodes."""
        return sum(size for size, of in zip(self.size_of_node, self.kind_of_node, strict=True) if of == kind)

    def node_size(self, kind: int) -> int:
        """Devices in the largest nodes of a kind: cells beyond that many take whole such nodes."""
        return max(size for size, of in zip(self.size_of_node, self.kind_of_node, strict=True) if of == kind)

    def most_devices(self, kind: int) -> int:
        """Devices of the largest cell of a kind: in all its nodes of full size."""
        size = self.node_size(kind)
        return size * sum(
            of == kind and size_of == size for size_of, of in zip(self.size_of_node, self.kind_of_node, strict=True)
        )

    def can_hold(self, kind: int, num_devices: int) -> bool:
        """Whether a cell of this size is one of the fleet's: in one node, or in whole ones."""
        size = self.node_size(kind)
        return num_devices <= size or (num_devices % size == 0 and num_devices <= self.most_devices(kind))

    def is_within_limit(self, team: str, kind: str, num_devices: int) -> bool:
        """Whether the limit of a team leaves it so many devices of a kind."""
        limits = (limit for entry in self.teams if entry.name == team for limit in entry.limits)
        return all(num_devices <= limit.num_devices for limit in limits if limit.kind == kind)

    def kind_number(self, name: str) -> int:
        """The kind of this name; an unambiguous beginning will do (`a100` for `A100-80GB`, `a100/8` for a share)."""
        names = [kind.name for kind in self.kinds]
        if name in names:
            return names.index(name)
        begin, _, shares = name.lower().partition("/")
        matching = [
            number
            for number, kind in enumerate(self.kinds)
            if kind.name.lower().startswith(begin) and str(kind.num_shares) == (shares or "1")
        ]
        if name and len(matching) == 1:
            return matching[0]
        raise FleetError(f"unknown kind of device {name!r}; the fleet has {', '.join(names)}")

    def node_number(self, name: str) -> int:
        try:
            return self.node_names.index(name)
        except ValueError:
            raise FleetError(f"unknown node {name!r}; the fleet has {', '.join(self.node_names[:20])}") from None

    def team(self, name: str) -> Team:
        for team in self.teams:
            if team.name == name:
                return team
        if not name:
            return Team(name="")
        raise FleetError(
            f"unknown team {name!r}; the fleet has {', '.join(team.name for team in self.teams) or 'none'} "
            "([[teams]] of its .toml file)"
        )

    def counts(self, kind: int) -> Iterator[int]:
        """Sizes of cells of a kind: 1, 2, 3, 4, 6, 8, 12, 16 … in one node; beyond it, such numbers of whole nodes. Of
        shares of GPUs, 1: who needs more takes whole GPUs."""
        if self.kinds[kind].num_shares > 1:
            yield 1
            return
        size = self.node_size(kind)
        num_nodes = self.most_devices(kind) // size
        yield from (count for count in _round_counts(size))
        if size not in set(_round_counts(size)):
            yield size
        yield from (size * count for count in _round_counts(num_nodes) if count > 1)

    def cluster_of(self, kind: int, num_devices: int) -> Cluster:
        """The cluster of one kind that a cell of so many devices is planned on: the fewest nodes that hold them."""
        island = next(
            island
            for island, of in zip(self.cluster.islands, self.kind_of_node, strict=True)
            if of == kind and island.num_devices == self.node_size(kind)
        )
        full, rest = divmod(num_devices, island.num_devices)
        islands: tuple[Island, ...] = (island,) * full
        if rest:
            islands += (Island(kind=island.kind, num_devices=rest, link=island.link, uplink=island.uplink),)
        return Cluster(name=f"{num_devices} x {island.kind.name}", islands=islands)


def _round_counts(most: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 … up to `most`."""
    count = 1
    while count <= most:
        yield count
        if count >= 2 and count * 3 // 2 <= most:
            yield count * 3 // 2
        count *= 2
