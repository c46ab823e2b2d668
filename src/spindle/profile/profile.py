"""A graph on a cluster with the curves of its ops: the input of planners and of the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spindle.cluster import Cluster, Link
from spindle.display import count_of, facts, html_of, seconds
from spindle.errors import ProfileError
from spindle.graph import MetaGraph
from spindle.profile.curve import Curve
from spindle.profile.host import HostOverhead
from spindle.profile.items import ItemTimes

_MAX_SHOWN = 40  # ops, in a notebook


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Decisions that are made before scheduling: the tensor degree of each op, which ops are recomputed, and whether
    optimizer state is sharded.

    Ops of one module have the same degree, because a device always holds the same shard of its weights.
    """

    tensor_degrees: tuple[int, ...]
    recompute: tuple[bool, ...]
    shard_optimizer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profile:
    """Curves of every op: one for each tensor degree that it may have, in increasing degree.

    - `gangs`: times on n devices are opaque (given by hand), so the devices of a slot start together.
    - `host_rates[k - 1]`: the relative speed of each device while k devices of its island are busy; empty if it does
      not depend on k.
    - `overlap`: slowdown of compute on a device that reduces gradients at the same time; `exchange_overlap`: slowdown
      of that reduction.
    - `gradients_stay`: gradients keep their memory from step to step, as with CUDA graphs.
    - `lane_bytes`: memory that libraries allocate for each lane.
    - `sends_stay`: sent gradients keep their memory until the step ends, as under gloo, which does not report when a
      send has completed.
    - `host`: launch overhead of hosts, which may be slower than their GPUs; None if it is not modelled.
    - `leaves_out`: what is not modelled, in words.
    - `measured_on`: where and when the profile was measured; empty if it was not.
    - `item_times`: by op of an item call, how long single items take.
    - `all_to_all`: the link inside an island as measured with all-to-alls.
    - `gradient_sum_bytes_per_s`: rate of adding gradients to those of other slots that train the same parameter; None
      if the measured times of layers include it, or if it is not modelled.
    """

    graph: MetaGraph
    cluster: Cluster
    curves: tuple[tuple[Curve, ...], ...]
    gangs: bool = False
    host_rates: tuple[float, ...] = ()
    overlap: float = 1.0
    exchange_overlap: float = 1.0
    gradients_stay: bool = True
    lane_bytes: int = 0
    sends_stay: bool = False
    host: HostOverhead | None = None
    leaves_out: tuple[str, ...] = ()
    measured_on: str = ""
    item_times: tuple[tuple[str, ItemTimes], ...] = ()
    all_to_all: Link | None = None
    gradient_sum_bytes_per_s: float | None = None
    families: tuple[frozenset[str], ...] = field(init=False, repr=False, compare=False)  # modules with tied weights

    def __post_init__(self) -> None:
        object.__setattr__(self, "families", _families(self.graph))
        if len(self.curves) != len(self.graph.metaops):
            raise ProfileError(f"expected curves for {len(self.graph.metaops)} ops, got them for {len(self.curves)}")
        for op, curves in zip(self.graph.metaops, self.curves, strict=True):
            if not curves:
                raise ProfileError(
                    f"op {op.name!r} fits on no allowed number of devices: "
                    f"the cluster {self.cluster.name!r} has {self.cluster.num_devices}"
                )
            if max(curve.num_devices[-1] for curve in curves) > self.cluster.num_devices:
                raise ProfileError(
                    f"op {op.name!r} has times for more devices than the {self.cluster.num_devices} of the cluster"
                )
        if self.host_rates and min(self.host_rates) <= 0:
            raise ProfileError(f"host_rates must be above 0, got {self.host_rates}")
        if self.gradient_sum_bytes_per_s is not None and not self.gradient_sum_bytes_per_s > 0:
            raise ProfileError(f"gradient_sum_bytes_per_s must be above 0, got {self.gradient_sum_bytes_per_s}")
        if not min(self.overlap, self.exchange_overlap) >= 1:
            raise ProfileError(
                f"overlap and exchange_overlap must be at least 1, got {self.overlap} and {self.exchange_overlap}"
            )

    def __repr__(self) -> str:
        measured = f", measured on {self.measured_on}" if self.measured_on else ""
        ops = count_of(len(self.graph.metaops), "op")
        return f"Profile({self.graph.name!r} on {self.cluster.name!r}, {ops}{measured})"

    def _repr_html_(self) -> str:
        """What notebooks show: the time of each op on the smallest number of devices that it may have."""
        rows = [("", repr(self))]
        for op, (curve, *_) in zip(self.graph.metaops[:_MAX_SHOWN], self.curves[:_MAX_SHOWN], strict=True):
            time_s = op.num_layers * (curve.forward_s[0] + curve.backward_s[0])
            rows.append((op.name, f"{seconds(time_s)} on {count_of(curve.num_devices[0], 'device')}"))
        if len(self.curves) > _MAX_SHOWN:
            rows.append((f"and {len(self.curves) - _MAX_SHOWN} more", ""))
        return html_of(facts(rows))

    @property
    def exchange_link(self) -> Link:
        """The link for all-to-alls inside an island: as measured, else the slowest link of any island."""
        if self.all_to_all is not None:
            return self.all_to_all
        return min((island.link for island in self.cluster.islands), key=lambda link: link.bytes_per_s)

    @property
    def default_setting(self) -> Setting:
        """The smallest degree of each module; nothing is recomputed except what the user asked for."""
        return self.setting({})

    def family_of(self, module: str) -> frozenset[str]:
        """A module and all modules that share weights with it, directly or through others; they have the same tensor
        degree."""
        return next((family for family in self.families if module in family), frozenset({module}))

    def setting(
        self, degrees: dict[str, int], recompute: frozenset[str] = frozenset(), shard_optimizer: bool = False
    ) -> Setting:
        """Make a setting from tensor degrees by module and names of ops to recompute.

        A module without a degree takes the largest degree given for its family, else its own smallest.
        """
        degree_of = dict(degrees)
        for module in self.graph.modules if degrees else ():
            if module not in degrees:
                in_family = [degrees[relative] for relative in self.family_of(module) if relative in degrees]
                if in_family:
                    degree_of[module] = max(in_family)
        return Setting(
            tensor_degrees=tuple(
                degree_of.get(op.module or "", curves[0].tensor_degree)
                for op, curves in zip(self.graph.metaops, self.curves, strict=True)
            ),
            recompute=tuple(
                op.name in recompute or (op.cost is not None and op.cost.recompute) for op in self.graph.metaops
            ),
            shard_optimizer=shard_optimizer,
        )

    def degrees_of(self, module: str) -> tuple[int, ...]:
        """The tensor degrees for which every op of a module and its family has a curve."""
        family = self.family_of(module)
        choices = [
            {curve.tensor_degree for curve in curves}
            for op, curves in zip(self.graph.metaops, self.curves, strict=True)
            if op.module in family
        ]
        return tuple(sorted(set.intersection(*choices)))

    def with_degrees(self, degrees: Mapping[str, int]) -> Profile:
        """The profile in which these modules and their families have only these tensor degrees."""
        # A degree that is given for one module holds for all that share weights with it.
        required = {relative: degree for module, degree in degrees.items() for relative in self.family_of(module)}
        for module, degree in {**required, **degrees}.items():
            if module not in self.graph.modules:
                raise ProfileError(
                    f"tensor degree {degree} is given for {module!r}, which is not a module; modules: "
                    f"{', '.join(self.graph.modules)}"
                )
            if degree not in self.degrees_of(module) or required[module] != degree:
                raise ProfileError(
                    f"tensor degree {degree} is given for module {module!r}, which can have "
                    f"{', '.join(map(str, self.degrees_of(module)))}"
                    + (f" and shares weights with {', '.join(sorted(self.family_of(module) - {module}))}")
                    * (len(self.family_of(module)) > 1)
                )
        curves = tuple(
            tuple(
                curve for curve in curves if curve.tensor_degree == required.get(op.module or "", curve.tensor_degree)
            )
            for op, curves in zip(self.graph.metaops, self.curves, strict=True)
        )
        return replace(self, curves=curves)

    def restricted(self, graph: MetaGraph, names_here: Mapping[str, str] | None = None) -> Profile:
        """The profile of a graph with a subset of the ops (fewer tasks). `names_here` maps names of its ops to their
        names in this profile, if they differ."""
        curves_of = {op.name: curves for op, curves in zip(self.graph.metaops, self.curves, strict=True)}
        names = {op.name for op in graph.metaops}
        item_times = tuple(entry for entry in self.item_times if entry[0] in names)
        curves = tuple(curves_of[(names_here or {}).get(op.name, op.name)] for op in graph.metaops)
        return replace(self, graph=graph, curves=curves, item_times=item_times)

    def up_to(self, num_devices: int) -> Profile:
        """The profile on the first `num_devices` devices of the cluster; points of curves on more are left out."""
        if num_devices >= self.cluster.num_devices:
            return self
        curves = tuple(tuple(filter(None, (curve.up_to(num_devices) for curve in each))) for each in self.curves)
        return replace(self, cluster=self.cluster.up_to(num_devices), curves=curves)

    def repeated(self, count: int) -> Profile:
        """The profile of a step of `count` batches of each task, as in `MetaGraph.repeated`."""
        return replace(self, graph=self.graph.repeated(count), curves=self.curves * count, item_times=())

    def on_one_device(self) -> Profile:
        """The profile in which every op runs on one device, like the stages of a pipeline."""
        return replace(self, curves=tuple((_time_on_one_device(curves),) for curves in self.curves))

    def curve(self, op: int, setting: Setting) -> Curve:
        """The curve of an op at the setting's degree."""
        degree = setting.tensor_degrees[op]
        for curve in self.curves[op]:
            if curve.tensor_degree == degree:
                return curve
        raise ProfileError(
            f"op {self.graph.metaops[op].name!r} has no curve for tensor degree {degree}; "
            f"it has {', '.join(str(curve.tensor_degree) for curve in self.curves[op])}"
        )


def _time_on_one_device(curves: Sequence[Curve]) -> Curve:
    """The time of a layer on one device. If that was not measured, n times its time on the smallest number of devices
    n."""
    curve = min(
        (curve for curve in curves if curve.tensor_degree == 1), key=lambda curve: curve.num_devices[0], default=None
    )
    if curve is None:
        raise ProfileError("a pipeline runs each layer on one device, but a module has times for tensor groups only")
    count = curve.num_devices[0]
    return Curve(
        num_devices=(1,),
        forward_s=(count * curve.forward_s[0],),
        backward_s=(count * curve.backward_s[0],),
        launch_s=curve.launch_s,
    )


def _families(graph: MetaGraph) -> tuple[frozenset[str], ...]:
    """Groups of two or more modules that share weights, directly or through others."""
    users: dict[int, set[str]] = {}
    for op in graph.metaops:
        for layer in op.parameters:
            for parameter in layer:
                users.setdefault(parameter, set()).add(op.module or "")
    # Merge sets of modules that have a parameter in common, until all are disjoint.
    families: list[set[str]] = []
    for modules in users.values():
        merged = set(modules)
        for family in [family for family in families if family & merged]:
            families.remove(family)
            merged |= family
        families.append(merged)
    return tuple(frozenset(family) for family in families if len(family) > 1)
