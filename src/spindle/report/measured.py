"""Tables of a profile: times of layers by number of samples, and everything else that was measured."""

from __future__ import annotations

from rich import box
from rich.table import Table

from spindle.display import facts, figures, milliseconds, seconds
from spindle.graph import MetaOp
from spindle.profile import Curve, Profile


def profile_table(profile: Profile) -> Table:
    """Forward and backward milliseconds of one layer of each kind on one device, by samples."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{profile.graph.name}: one layer on one device",
        title_justify="left",
        title_style="bold",
        pad_edge=False,
    )
    table.add_column("layers of a module")
    for name in ("samples", "forward ms", "backward ms", "saved MB\na sample"):
        table.add_column(name, justify="right")
    for (name, _), times in _layers(profile).items():
        for place, (rows, (forward_s, backward_s, saved)) in enumerate(sorted(times.items())):
            shown = "-" if saved is None else figures(saved / 1e6)
            table.add_row("" if place else name, str(rows), milliseconds(forward_s), milliseconds(backward_s), shown)
    return table


_Times = dict[int, tuple[float, float, float | None]]  # by samples: forward, backward, bytes saved for each


def _layers(profile: Profile) -> dict[tuple[str, float], _Times]:
    """Times of each run of layers. Equal calls of several tasks were measured once, and are listed once."""
    times_of: dict[tuple[str, float], _Times] = {}
    for op, curves in zip(profile.graph.metaops, profile.curves, strict=True):
        output, saved = (0.0, None) if op.cost is None else (op.cost.output_bytes, op.cost.saved_bytes)
        for curve in curves:
            # Calls on sequences of different lengths differ in their output bytes per sample.
            times = times_of.setdefault((_name(op, curve), output), {})
            for count, forward_s, backward_s in zip(curve.num_devices, curve.forward_s, curve.backward_s, strict=True):
                rows = -(-(op.batch_size or 1) // (count // curve.tensor_degree))
                times.setdefault(rows, (forward_s, backward_s, saved))
    return times_of


def _name(op: MetaOp, curve: Curve) -> str:
    where = f"{op.module or op.name}[{op.first_layer}:{op.first_layer + op.num_layers}]"
    return where if curve.tensor_degree == 1 else f"{where}, tensor degree {curve.tensor_degree}"


def profile_facts(profile: Profile) -> Table:
    """Where a profile was measured, and the measurements that hold for all layers."""
    island, link = profile.cluster.islands[0], profile.cluster.islands[0].link
    rows = [
        ("measured on", profile.measured_on or "nothing: these are no measurements"),
        ("cluster", profile.cluster.name),
        ("link", f"{figures(link.bytes_per_s / 1e9)} GB/s, {seconds(link.latency_s)} for a small message"),
        ("optimizer", f"{figures(island.kind.memory_bytes_per_s / 1e9)} GB/s read and written by an update"),
    ]
    if link.collective_s is not None:
        rows.append(("all-reduce", f"{seconds(link.collective_s)} beside its bytes"))
    if profile.host_rates:
        rates = "  ".join(f"{count}: {rate:.2f}" for count, rate in enumerate(profile.host_rates, start=1))
        rows.append(("rates", f"{rates}  (of each device, while so many are busy)"))
    if max(profile.overlap, profile.exchange_overlap) > 1:
        slower = f"compute {profile.overlap:.2f} ×, exchange of gradients {profile.exchange_overlap:.2f} × as long"
        rows.append(("overlap", f"{slower}, while a device does both"))
    return facts(rows)
