"""Machines as values: islands of equal devices, joined inside by fast links and to each other by uplinks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spindle.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """What one device can do at its peak; what a layer reaches of it is the profile's business.

    `host_bytes_per_s` is one direction of its link to the host's memory, `host_memory_bytes` its share of that memory;
    0 means that there is none, or that it is not known.
    """

    name: str
    peak_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    host_bytes_per_s: float = 0.0
    host_memory_bytes: int = 0

    def __post_init__(self) -> None:
        _positive(f"device kind {self.name!r}", self, "peak_flops", "memory_bytes", "memory_bytes_per_s")
        for name in ("host_bytes_per_s", "host_memory_bytes"):
            if not getattr(self, name) >= 0:
                raise ClusterError(f"device kind {self.name!r}: {name} must be at least 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a link; both directions run at this rate at once.

    `collective_s` is what a collective takes beside its bytes, where that was measured; else it is the hops of a tree.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    collective_s: float | None = None

    def __post_init__(self) -> None:
        _positive("link", self, "bytes_per_s")
        for name, value in (("latency_s", self.latency_s), ("collective_s", self.collective_s or 0.0)):
            if not value >= 0:
                raise ClusterError(f"link: {name} must be at least 0, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """Devices joined by fast links; links between islands are slower.

    `link` is each device's own port inside the island; `uplink` is shared by all its devices.
    """

    kind: DeviceKind
    num_devices: int
    link: Link
    uplink: Link

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise ClusterError(f"an island needs at least one device, got num_devices={self.num_devices}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Islands in order; devices are numbered through them from 0."""

    name: str
    islands: tuple[Island, ...]

    def __post_init__(self) -> None:
        if not self.islands:
            raise ClusterError(f"cluster {self.name!r} has no islands; it needs at least one")

    @property
    def num_devices(self) -> int:
        return sum(island.num_devices for island in self.islands)

    @property
    def island_of(self) -> tuple[int, ...]:
        """The island number of each device."""
        return tuple(number for number, island in enumerate(self.islands) for _ in range(island.num_devices))

    @property
    def place_in_island(self) -> tuple[int, ...]:
        """Where each device stands in its island; with tensor degree d it holds shard `place % d`."""
        return tuple(place for island in self.islands for place in range(island.num_devices))

    def tensor_groups(self, degree: int) -> tuple[tuple[int, ...], ...]:
        """The groups of devices that can hold a tensor group of this degree: side by side inside one island."""
        groups = []
        first = 0
        for island in self.islands:
            for start in range(first, first + island.num_devices - degree + 1, degree):
                groups.append(tuple(range(start, start + degree)))
            first += island.num_devices
        return tuple(groups)

    def with_memory(self, memory_bytes: int) -> Cluster:
        """The same cluster, every device of which has so much memory."""
        islands = tuple(
            replace(island, kind=replace(island.kind, memory_bytes=memory_bytes)) for island in self.islands
        )
        return replace(self, islands=islands)

    @property
    def kind(self) -> DeviceKind:
        """The one kind of device there is; planners for a single workload need it to be one."""
        kinds = {island.kind for island in self.islands}
        if len(kinds) > 1:
            raise ClusterError(
                f"cluster {self.name!r} mixes {', '.join(sorted(kind.name for kind in kinds))}; "
                "one workload is planned on devices of one kind"
            )
        return self.islands[0].kind


def _positive(what: str, value: object, *names: str) -> None:
    for name in names:
        if not getattr(value, name) > 0:
            raise ClusterError(f"{what}: {name} must be above 0, got {getattr(value, name)}")
