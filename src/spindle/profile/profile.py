"""A graph on a cluster with its curves: what planners plan from and what the simulator times with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from spindle.cluster import Cluster
from spindle.errors import ProfileError
from spindle.graph import MetaGraph
from spindle.profile.curve import Curve
from spindle.profile.host import HostOverhead


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is decided before anything is scheduled: a tensor degree for each module, what is recomputed, and whether
    the devices that hold a parameter share its optimizer state.

    The first two are by op position; ops of one module have the same degree, because a device always holds the same
    shard.
    """

    tensor_degrees: tuple[int, ...]
    recompute: tuple[bool, ...]
    shard_optimizer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Curves of every op, one for each tensor degree it may have, in rising degree.

    `gangs` says that a time on n devices is a black box: the devices of a slot then start each layer run together,
    because nothing is known of how they share it. `host_rates[k - 1]` is the rate of each of k busy devices of one
    island; empty means that neighbours do not matter. `overlap` is how many times longer compute takes on a device that
    exchanges gradients meanwhile, `exchange_overlap` how many times longer that exchange takes. `gradients_stay` says
    that gradients keep their memory from step to step, as captured graphs have it. `host` is what hosts take to give
    their GPUs work, where that may hold them up. `leaves_out` is what this model knows it does not know; `measured_on`
    says where and when it was measured, if it was.
    """

    graph: MetaGraph
    cluster: Cluster
    curves: tuple[tuple[Curve, ...], ...]
    gangs: bool = False
    host_rates: tuple[float, ...] = ()
    overlap: float = 1.0
    exchange_overlap: float = 1.0
    gradients_stay: bool = True
    host: HostOverhead | None = None
    leaves_out: tuple[str, ...] = ()
    measured_on: str = ""
    families: tuple[frozenset[str], ...] = field(init=False, repr=False, compare=False)  # modules that share weights

    def __post_init__(self) -> None:
        object.__setattr__(self, "families", _families(self.graph))
        if len(self.curves) != len(self.graph.metaops):
            raise ProfileError(f"{len(self.graph.metaops)} ops need as many curves, got {len(self.curves)}")
        for op, curves in zip(self.graph.metaops, self.curves, strict=True):
            if not curves:
                raise ProfileError(
                    f"op {op.name!r} fits on no allowed number of devices: "
                    f"the cluster {self.cluster.name!r} has {self.cluster.num_devices}"
                )
            if max(curve.num_devices[-1] for curve in curves) > self.cluster.num_devices:
                raise ProfileError(f"op {op.name!r} has times beyond the {self.cluster.num_devices} devices there are")
        if self.host_rates and min(self.host_rates) <= 0:
            raise ProfileError(f"host_rates must be above 0, got {self.host_rates}")
        if not min(self.overlap, self.exchange_overlap) >= 1:
            raise ProfileError(
                f"overlap and exchange_overlap must be at least 1, got {self.overlap} and {self.exchange_overlap}"
            )

    @property
    def default_setting(self) -> Setting:
        """The smallest degree each module has, nothing recomputed but what the user wants."""
        return self.setting({})

    def family_of(self, module: str) -> frozenset[str]:
        """A module with all it shares weights with, through others too: they are sharded alike or not at all."""
        return next((family for family in self.families if module in family), frozenset({module}))

    def setting(
        self, degrees: dict[str, int], recompute: frozenset[str] = frozenset(), shard_optimizer: bool = False
    ) -> Setting:
        """A setting from degrees by module and names of ops to recompute.

        A module that is not named takes the largest degree given to one that it shares weights with, else its smallest.
        """
        named = dict(degrees)
        for module in self.graph.modules if degrees else ():
            if module not in degrees:
                known = [degrees[other] for other in self.family_of(module) if other in degrees]
                if known:
                    named[module] = max(known)
        return Setting(
            tensor_degrees=tuple(
                named.get(op.module or "", curves[0].tensor_degree)
                for op, curves in zip(self.graph.metaops, self.curves, strict=True)
            ),
            recompute=tuple(
                op.name in recompute or (op.cost is not None and op.cost.recompute) for op in self.graph.metaops
            ),
            shard_optimizer=shard_optimizer,
        )

    def degrees_of(self, module: str) -> tuple[int, ...]:
        """Degrees that every op of a module, and of all it shares weights with, has a curve for."""
        family = self.family_of(module)
        choices = [
            {curve.tensor_degree for curve in curves}
            for op, curves in zip(self.graph.metaops, self.curves, strict=True)
            if op.module in family
        ]
        return tuple(sorted(set.intersection(*choices)))

    def with_degrees(self, degrees: Mapping[str, int]) -> Profile:
        """The profile in which these modules, and all they share weights with, have these tensor degrees and no
        others."""
        wanted = {other: degree for module, degree in degrees.items() for other in self.family_of(module)}
        for module, degree in {**wanted, **degrees}.items():
            if module not in self.graph.modules:
                raise ProfileError(
                    f"tensor degree {degree} is wanted for {module!r}, which is no module; modules: "
                    f"{', '.join(self.graph.modules)}"
                )
            if degree not in self.degrees_of(module) or wanted[module] != degree:
                raise ProfileError(
                    f"tensor degree {degree} is wanted for module {module!r}, which may have "
                    f"{', '.join(map(str, self.degrees_of(module)))}"
                    + (f" and shares weights with {', '.join(sorted(self.family_of(module) - {module}))}")
                    * (len(self.family_of(module)) > 1)
                )
        curves = tuple(
            tuple(curve for curve in curves if curve.tensor_degree == wanted.get(op.module or "", curve.tensor_degree))
            for op, curves in zip(self.graph.metaops, self.curves, strict=True)
        )
        return replace(self, curves=curves)

    def restricted(self, graph: MetaGraph) -> Profile:
        """The profile of a graph of some of the same ops: with fewer tasks, say."""
        known = {op.name: curves for op, curves in zip(self.graph.metaops, self.curves, strict=True)}
        return replace(self, graph=graph, curves=tuple(known[op.name] for op in graph.metaops))

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


def _families(graph: MetaGraph) -> tuple[frozenset[str], ...]:
    """Modules that share weights, in groups of two and more."""
    users: dict[int, set[str]] = {}
    for op in graph.metaops:
        for layer in op.parameters:
            for parameter in layer:
                users.setdefault(parameter, set()).add(op.module or "")
    families: list[set[str]] = []
    for using in users.values():
        joined = set(using)
        for family in [family for family in families if family & joined]:
            families.remove(family)
            joined |= family
        families.append(joined)
    return tuple(frozenset(family) for family in families if len(family) > 1)
