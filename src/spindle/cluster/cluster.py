"""Clusters: islands of equal devices, connected by fast links inside and by uplinks to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spindle.errors import ClusterError

MAX_DEVICES = 1 << 20  # in a cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class SmGroups:
    """How the SMs (streaming multiprocessors) of a GPU can be split into disjoint parts: in groups of `group_sms`.

    If the groups do not cover the GPU, one part can have the `rest_sms` remaining SMs in addition to its groups.
    """

    group_sms: int
    num_groups: int
    rest_sms: int = 0

    def __post_init__(self) -> None:
        _positive("SM groups", self, "group_sms", "num_groups")
        if self.rest_sms < 0:
            raise ClusterError(f"SM groups: rest_sms must be at least 0, got {self.rest_sms}")

    @property
    def num_sms(self) -> int:
        return self.group_sms * self.num_groups + self.rest_sms

    def parts(self, quotas: Sequence[int]) -> tuple[tuple[int, bool], ...]:
        """For each quota (in SMs), the number of groups that it takes, and whether it has the remaining SMs as well.
        Raises a ClusterError if the GPU cannot be split this way."""
        granted = ", ".join(map(str, quotas))
        parts = []
        for quota in quotas:
            # With groups of 8 SMs and 12 remaining SMs, a quota of 68 is seven groups and the remaining SMs.
            has_rest = quota % self.group_sms != 0 and quota >= self.rest_sms
            left = quota - self.rest_sms if has_rest else quota
            if quota < 1 or left % self.group_sms:
                raise ClusterError(
                    f"a quota of {quota} SMs is not granted; expected a multiple of {self.group_sms}"
                    + (f", or {self.rest_sms} more than one for one lane" if self.rest_sms else "")
                )
            parts.append((left // self.group_sms, has_rest))
        if sum(has_rest for _, has_rest in parts) > 1:
            raise ClusterError(f"only one lane can have the {self.rest_sms} SMs that are left over, got {granted}")
        if sum(num_groups for num_groups, _ in parts) > self.num_groups:
            raise ClusterError(
                f"quotas of {granted} SMs are more than there are: {self.num_groups} groups of {self.group_sms}"
                + (f", and {self.rest_sms} left over" if self.rest_sms else "")
            )
        return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """The peak performance of a kind of device; the efficiency of layers is part of a profile.

    `host_bytes_per_s` is one direction of its link to host memory, `host_memory_bytes` its share of that memory; 0
    means none, or unknown. If `num_shares` is above 1, the device is one of that many equal parts of a GPU. `sm_groups`
    is None if its SMs cannot be split, or if it is unknown how.
    """

    name: str
    peak_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    host_bytes_per_s: float = 0.0
    host_memory_bytes: int = 0
    num_shares: int = 1
    sm_groups: SmGroups | None = None

    def __post_init__(self) -> None:
        _positive(f"device kind {self.name!r}", self, "peak_flops", "memory_bytes", "memory_bytes_per_s", "num_shares")
        for name in ("host_bytes_per_s", "host_memory_bytes"):
            if not getattr(self, name) >= 0:
                raise ClusterError(f"device kind {self.name!r}: {name} must be at least 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a full-duplex link.

    `collective_s` is the measured overhead of a collective besides its bytes; if None, it is the latency of a tree.
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
    """Devices connected by fast links; links between islands are slower.

    `link` is each device's own port inside the island; `uplink` is shared by all its devices.
    """

    kind: DeviceKind
    num_devices: int
    link: Link
    uplink: Link

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise ClusterError(f"an island needs at least one device, got num_devices={self.num_devices}")


def shared(island: Island, num_shares: int) -> Island:
    """The island with each GPU divided into `num_shares` devices (`spindle launch --virtual-devices`). All are assumed
    busy, so each has an equal share of the compute, memory and bandwidth of its GPU."""
    if num_shares == 1:
        return island
    kind = island.kind
    part = replace(
        kind,
        name=f"{kind.name}/{num_shares}",
        num_shares=num_shares,
        peak_flops=kind.peak_flops / num_shares,
        memory_bytes=kind.memory_bytes // num_shares,
        memory_bytes_per_s=kind.memory_bytes_per_s / num_shares,
        host_bytes_per_s=kind.host_bytes_per_s / num_shares,
        host_memory_bytes=kind.host_memory_bytes // num_shares,
    )
    return replace(island, kind=part, num_devices=num_shares * island.num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Islands in order; devices are numbered across them from 0."""

    name: str
    islands: tuple[Island, ...]

    def __post_init__(self) -> None:
        if not self.islands:
            raise ClusterError(f"cluster {self.name!r} has no islands; it needs at least one")
        if self.num_devices > MAX_DEVICES:
            raise ClusterError(f"{self.num_devices} devices are more than Spindle plans for ({MAX_DEVICES})")

    @property
    def num_devices(self) -> int:
        return sum(island.num_devices for island in self.islands)

    @property
    def island_of(self) -> tuple[int, ...]:
        """The island number of each device."""
        return tuple(number for number, island in enumerate(self.islands) for _ in range(island.num_devices))

    @property
    def place_in_island(self) -> tuple[int, ...]:
        """The position of each device in its island; with tensor degree d the device holds shard `position % d`."""
        return tuple(number for island in self.islands for number in range(island.num_devices))

    def tensor_groups(self, degree: int) -> tuple[tuple[int, ...], ...]:
        """The groups of devices that can be a tensor group of this degree: consecutive, inside one island."""
        groups = []
        first = 0
        for island in self.islands:
            for start in range(first, first + island.num_devices - degree + 1, degree):
                groups.append(tuple(range(start, start + degree)))
            first += island.num_devices
        return tuple(groups)

    def up_to(self, num_devices: int) -> Cluster:
        """The first `num_devices` devices of the cluster."""
        islands, left = [], num_devices
        for island in self.islands:
            if left > 0:
                islands.append(replace(island, num_devices=min(left, island.num_devices)))
            left -= island.num_devices
        return replace(self, islands=tuple(islands))

    def num_tensor_groups(self, degree: int) -> int:
        return sum(island.num_devices // degree for island in self.islands)

    def with_memory(self, memory_bytes: int) -> Cluster:
        """The same cluster with this much memory on every device."""
        islands = tuple(
            replace(island, kind=replace(island.kind, memory_bytes=memory_bytes)) for island in self.islands
        )
        return replace(self, islands=islands)

    @property
    def kind(self) -> DeviceKind:
        """The kind of all devices. Raises a ClusterError if there are several: a workload is planned on equal
        devices."""
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
