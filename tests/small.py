"""Small profiles for planners: graphs, workloads and clusters of a few lines."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import strategies as st

from spindle.cluster import PRESETS, Cluster, DeviceKind, Island, Link, uniform_cluster
from spindle.graph import metagraph_of
from spindle.plan import Plan, parse_plan
from spindle.profile import Profile, Roofline, abstract_profile, roofline_profile
from spindle.workload import Call, Layer, LayerCost, Module, Parameter, Task, Workload

# The golden cases of the paper's reference: name, batch, layers, a, b (ms), and the task where it matters.
CASE_A = [("a", 16, 10, 1, 0.5), ("b", 16, 12, 1, 0.25), ("c", 16, 6, 0.5, 0.1)]
CASE_B = [
    ("xau", 32, 12, 1, 0.10),
    ("xtx", 32, 12, 1, 0.05),
    ("yvi", 16, 24, 1.5, 0.60),
    ("ytx", 16, 12, 1, 0.05),
    ("xlm", 32, 16, 1, 0.2),
    ("ylm", 16, 16, 1, 0.2),
]
CASE_B_EDGES = [("xau", "xlm"), ("xtx", "xlm"), ("yvi", "ylm"), ("ytx", "ylm")]
CASE_C = [
    ("t1/text", 64, 12, 1, 0.05, "t1"),
    ("t1/audio", 64, 12, 1, 0.15, "t1"),
    ("t2/vision", 64, 32, 1.5, 0.40, "t2"),
    ("t2/depth", 64, 12, 1, 0.20, "t2"),
    ("t3/audio", 32, 12, 1, 0.15, "t3"),
    ("t3/thermal", 32, 12, 1, 0.18, "t3"),
    ("t4/imu", 128, 6, 0.8, 0.10, "t4"),
    ("t4/thermal", 128, 12, 1, 0.18, "t4"),
]


def devices(count: int, per_island: int = 8) -> Cluster:
    island = Island(
        kind=PRESETS["a800"].kind, num_devices=per_island, link=PRESETS["a800"].link, uplink=PRESETS["a800"].uplink
    )
    return uniform_cluster(f"{count} devices", island, count)


def linear_graph(ops, edges=(), num_devices=8, divisors_only=False) -> dict:
    """An abstract graph whose layers take a + b * ceil(batch / n) milliseconds."""
    entries = []
    for name, batch, layers, a, b, *task in ops:
        times = {
            str(n): (a + b * math.ceil(batch / n)) * 1e-3
            for n in range(1, min(num_devices, batch) + 1)
            if not divisors_only or batch % n == 0
        }
        entries.append(
            {"name": name, "layers": layers, "batch": batch, "time_s": times} | ({"task": task[0]} if task else {})
        )
    return {"ops": entries, "edges": [list(edge) for edge in edges]}


def linear_profile(ops, edges=(), num_devices=8, divisors_only=False) -> Profile:
    profile = abstract_profile(linear_graph(ops, edges, num_devices, divisors_only), devices(num_devices))
    _RECIPE_OF[profile.graph.fingerprint] = (list(ops), list(edges))
    return profile


# What a linear profile was made of, by its graph.
_RECIPE_OF: dict[str, tuple[list, list]] = {}


def abstract_on(profile: Profile, num_devices: int) -> Profile:
    """The same linear graph on another number of devices."""
    ops, edges = _RECIPE_OF[profile.graph.fingerprint]
    return linear_profile(ops, edges, num_devices)


def two_towers(num_devices: int = 4) -> Profile:
    """Vision and text towers under one head, with times for every number of devices."""
    return linear_profile(
        [("vision", 16, 12, 1, 0.5), ("text", 16, 6, 1, 0.1), ("head", 16, 1, 0.5, 0.1)],
        [("vision", "head"), ("text", "head")],
        num_devices,
    )


def plan(text: str, profile: Profile) -> Plan:
    return parse_plan(text, profile)


COST = LayerCost(
    forward_flops=2e11,
    backward_flops=4e11,
    traffic_bytes=1e6,
    saved_bytes=4e6,
    output_bytes=1e6,
    tensor_bytes=2e6,
    max_tensor_degree=4,
)


def chain_module(name: str, num_layers: int, elements: int = 1_000_000) -> tuple[Module, tuple[Parameter, ...]]:
    parameters = tuple(Parameter(name=f"{name}.{layer}", num_elements=elements) for layer in range(num_layers))
    layers = tuple(Layer(kind="block", parameters=(parameter.name,)) for parameter in parameters)
    return Module(name=name, layers=layers), parameters


def workload(
    tasks: dict[str, list[str]],
    batch_sizes: dict[str, int] | None = None,
    num_layers: int = 4,
    elements: int = 1_000_000,
    flows: bool = True,
) -> Workload:
    """Tasks as lists of modules, each feeding the next; modules of the same name are shared."""
    names = dict.fromkeys(module for modules in tasks.values() for module in modules)
    built = {name: chain_module(name, num_layers, elements) for name in names}
    return Workload(
        name="small",
        modules=tuple(module for module, _ in built.values()),
        parameters=tuple(parameter for _, parameters in built.values() for parameter in parameters),
        tasks=tuple(
            Task(
                name=task,
                batch_size=(batch_sizes or {}).get(task, 16),
                calls=tuple(
                    Call(name=f"{module}#{number}", module=module, costs=(("block", COST),))
                    for number, module in enumerate(modules)
                ),
                flows=tuple((f"{a}#{number}", f"{b}#{number + 1}") for number, (a, b) in enumerate(pairwise(modules)))
                if flows
                else (),
            )
            for task, modules in tasks.items()
        ),
    )


def workload_profile(
    tasks: dict[str, list[str]], num_devices: int = 4, per_island: int = 8, memory_bytes: int = 80 << 30, **kwargs
) -> Profile:
    preset = PRESETS["a800"]
    kind = DeviceKind(name="test", peak_flops=312e12, memory_bytes=memory_bytes, memory_bytes_per_s=2e12)
    island = Island(kind=kind, num_devices=per_island, link=preset.link, uplink=Link(bytes_per_s=50e9, latency_s=12e-6))
    cluster = uniform_cluster("test", island, num_devices)
    return roofline_profile(metagraph_of(workload(tasks, **kwargs)), cluster, Roofline())


def crossing_plan(profile: Profile) -> Plan:
    """A plan of `TWO_TASKS` on four devices, whose towers send rows to other devices."""
    return plan(
        "a/vision#0[0:4]*4@0-2 b/text#0[0:4]*4@3\na/lm#1[0:4]*4@0-1 b/lm#1[0:4]*4@2-3\n",
        profile,
    )


TWO_TASKS = {"a": ["vision", "lm"], "b": ["text", "lm"]}


@st.composite
def graphs(draw, max_ops=5, max_layers=6, max_devices=8):
    """A random abstract profile on a random number of devices, forward a third of every layer."""
    num_devices = draw(st.integers(1, max_devices))
    num_ops = draw(st.integers(1, max_ops))
    ops, edges = [], []
    for number in range(num_ops):
        batch = draw(st.integers(1, 24))
        layers = draw(st.integers(1, max_layers))
        a = draw(st.integers(1, 20)) / 10
        b = draw(st.integers(1, 20)) / 40
        ops.append((f"op{number}", batch, layers, a, b, f"task{draw(st.integers(0, 2))}"))
        edges += [(f"op{producer}", f"op{number}") for producer in range(number) if draw(st.integers(0, 3)) == 0]
    return linear_profile(ops, edges, num_devices)


@st.composite
def odd_graphs(draw):
    """A random graph whose ops split their time between the passes each in its own way, on some numbers of devices."""
    num_devices = draw(st.integers(2, 6))
    ops, edges = [], []
    for number in range(draw(st.integers(2, 5))):
        counts = draw(st.sets(st.integers(1, num_devices), min_size=1))
        work, share = draw(st.integers(1, 50)) / 1000, draw(st.integers(1, 9)) / 10
        times = {count: work * (0.2 + 0.8 / count) for count in counts}
        ops.append(
            {
                "name": f"op{number}",
                "layers": draw(st.integers(1, 5)),
                "forward_s": {str(count): time_s * share for count, time_s in times.items()},
                "backward_s": {str(count): time_s * (1 - share) for count, time_s in times.items()},
            }
        )
        edges += [[f"op{producer}", f"op{number}"] for producer in range(number) if draw(st.integers(0, 3)) == 0]
    return abstract_profile({"ops": ops, "edges": edges}, devices(num_devices))
