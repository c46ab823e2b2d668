"""What people hand in: workloads, clusters, files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import small
from spindle.artifact import read_artifact, write_artifact, write_atomically
from spindle.cluster import PRESETS, cluster_named, read_cluster_file
from spindle.errors import ClusterError, InputError, WorkloadError
from spindle.graph import metagraph_of
from spindle.recipes import RECIPES
from spindle.workload import Call, Task, Workload, read_workload, write_workload

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from paper_cells import CELLS


def test_planning_and_simulating_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from spindle.cli import main\n"
        "import spindle.report.figure, spindle.recipes\n"
        "from spindle.cluster import cluster_named\n"
        "from spindle.profile import abstract_profile\n"
        "from spindle.planners import make_plan\n"
        "graph = {'ops': [{'name': 'a', 'layers': 2, 'time_s': {'1': 0.1}}]}\n"
        "print(make_plan(abstract_profile(graph, cluster_named('a800x2')), 'sequential').makespan_s)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(0.2)


def test_a_workload_comes_back_from_its_file_equal(tmp_path):
    for workload in (small.workload({"x": ["vision", "lm"], "y": ["lm", "lm"]}), RECIPES["ofasys-4"].workload()):
        write_artifact(tmp_path / "workload.json", "workload", workload)
        assert read_artifact(tmp_path / "workload.json", "workload", Workload) == workload


def test_a_mistake_in_a_workload_file_is_named_with_its_place(tmp_path):
    write_artifact(tmp_path / "w.json", "workload", small.workload({"x": ["vision"]}))
    data = json.loads((tmp_path / "w.json").read_text())
    data["tasks"][0]["calls"][0]["costs"][0][1]["forward_flops"] = "many"
    (tmp_path / "w.json").write_text(json.dumps(data))
    with pytest.raises(
        InputError, match=r'tasks\[0\]\.calls\[0\]\.costs\[0\]\[1\]\.forward_flops: expected a number, got "many"'
    ):
        read_artifact(tmp_path / "w.json", "workload", Workload)
    del data["tasks"][0]["batch_size"]
    (tmp_path / "w.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"tasks\[0\]: the field 'batch_size' is missing"):
        read_artifact(tmp_path / "w.json", "workload", Workload)


def test_another_kind_of_artifact_is_refused(tmp_path):
    write_artifact(tmp_path / "w.json", "workload", small.workload({"x": ["vision"]}))
    with pytest.raises(InputError, match=r"expected a Spindle plan .* this is a Spindle workload"):
        read_artifact(tmp_path / "w.json", "plan", Workload)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "there" / "w.json"
    with pytest.raises(InputError, match="cannot be written"):
        write_artifact(target, "workload", small.workload({"x": ["vision"]}))
    assert not target.parent.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_flow_to_a_call_that_is_not_there_is_refused():
    with pytest.raises(WorkloadError, match=r"the flow 'a' -> 'b' names 'b', which is not one of its calls: a"):
        Task(name="t", batch_size=1, calls=(Call(name="a", module="m", costs=()),), flows=(("a", "b"),))


def test_flows_in_a_circle_are_refused_by_name():
    workload = small.workload({"x": ["vision", "lm"]})
    task = workload.tasks[0]
    circle = Task(name="x", batch_size=4, calls=task.calls, flows=(*task.flows, ("lm#1", "vision#0")))
    with pytest.raises(WorkloadError, match=r"cycle: .*vision.* -> .*lm.*|cycle: .*lm.* -> .*vision"):
        metagraph_of(Workload(name="w", modules=workload.modules, parameters=workload.parameters, tasks=(circle,)))


def test_a_module_called_twice_in_a_row_gives_two_metaops_with_the_same_parameters():
    graph = metagraph_of(small.workload({"x": ["lm", "lm"]}))
    assert [op.name for op in graph.metaops] == ["x/lm#0[0:4]", "x/lm#1[0:4]"]
    assert graph.metaops[0].parameters == graph.metaops[1].parameters
    assert graph.edges == ((0, 1),)


@pytest.mark.parametrize("kind", ["a100", "a800", "h100", "h800", "h200", "h20", "l40s", "cpu"])
def test_every_preset_is_there_in_islands_of_eight(kind):
    cluster = cluster_named(f"{kind}x20")
    assert [island.num_devices for island in cluster.islands] == [8, 8, 4]
    assert cluster.kind == PRESETS[kind].kind


@pytest.mark.parametrize("name", ["b999x8", "a800", "a800x", "a800x0", "x8", "a800x-1"])
def test_a_cluster_that_is_not_there_is_refused(name):
    with pytest.raises(ClusterError, match=r"cluster"):
        cluster_named(name)


CLUSTER = """
name = "two hosts"
[kinds.big]
peak_flops = 312e12
memory_bytes = 80e9
memory_bytes_per_s = 2.0e12
[[islands]]
kind = "big"
count = 2
num_devices = 4
link = {bytes_per_s = 200e9, latency_s = 5e-6}
uplink = {bytes_per_s = 25e9}
"""


def test_a_cluster_of_ones_own_comes_from_a_file(tmp_path):
    (tmp_path / "c.toml").write_text(CLUSTER)
    cluster = read_cluster_file(tmp_path / "c.toml")
    assert cluster.name == "two hosts"
    assert cluster.num_devices == 8
    assert cluster.island_of == (0, 0, 0, 0, 1, 1, 1, 1)
    assert cluster.kind.memory_bytes == 80_000_000_000


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("peak_flops = 312e12", "peak_flops = -1", r"kinds\.big: .*peak_flops must be above 0"),
        ("memory_bytes = 80e9", "memory_bytes = nan", r"kinds\.big\.memory_bytes: expected a finite number"),
        ("memory_bytes = 80e9", 'name = "z"', r"kinds\.big: the name of a kind is in its heading"),
        ("memory_bytes = 80e9", "", r"kinds\.big: the field 'memory_bytes' is missing"),
        ('kind = "big"', 'kind = "small"', r"islands\[0\]\.kind: unknown kind 'small'; this file has big"),
        ('kind = "big"', 'kind = ["big"]', r"islands\[0\]\.kind: unknown kind"),
        ("count = 2", "count = 1000000000", r"islands\[0\]\.count: must be 1 to"),
        ("num_devices = 4", "num_devices = 0", r"islands\[0\]: an island needs at least one device"),
        ("[[islands]]", "[islands]", r"expected one or more \[\[islands\]\]"),
        ('name = "two hosts"', 'names = "x"', r"unknown key 'names'"),
        ("[kinds.big]", "[kinds.big", r"not TOML"),
    ],
)
def test_a_mistake_in_a_cluster_file_is_named(tmp_path, old, new, message):
    (tmp_path / "c.toml").write_text(CLUSTER.replace(old, new))
    with pytest.raises(InputError, match=message):
        read_cluster_file(tmp_path / "c.toml")


def test_islands_that_are_no_tables_are_refused(tmp_path):
    (tmp_path / "c.toml").write_text("islands = [1]")
    with pytest.raises(InputError, match=r"islands\[0\]: expected a table"):
        read_cluster_file(tmp_path / "c.toml")


def test_a_cluster_of_mixed_kinds_is_refused_for_one_workload():
    mixed = cluster_named("a800x8").islands + cluster_named("h100x8").islands
    from spindle.cluster import Cluster

    with pytest.raises(ClusterError, match=r"mixes A800-80GB, H100-SXM"):
        _ = Cluster(name="mixed", islands=mixed).kind


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_workload_read_from_its_file_has_the_same_fingerprint(name, tmp_path):
    workload = RECIPES[name].workload()
    write_workload(tmp_path / "workload.json", workload)
    read = read_workload(tmp_path / "workload.json")
    assert metagraph_of(read).fingerprint == metagraph_of(workload).fingerprint


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_contracts_and_has_about_the_papers_parameters(name):
    billions = {"clip": 1.20, "ofasys": 0.66, "qwen-val-3": 9.25, "qwen-val-30b": 30, "qwen-val-70b": 70}
    expected = next(value for prefix, value in reversed(billions.items()) if name.startswith(prefix))
    workload = RECIPES[name].workload()
    assert workload.num_parameters / 1e9 == pytest.approx(expected, rel=0.06)
    assert len(metagraph_of(workload).tasks) == len(workload.tasks)


def test_the_papers_seventeen_cells_are_there():
    assert len(CELLS) == 17
    for cell in CELLS:
        assert cell.deepspeed_ms / cell.spindle_ms == pytest.approx(cell.spindle, rel=0.02)


def test_a_link_stays_a_link_and_its_target_is_written(tmp_path):
    target, link = tmp_path / "target.txt", tmp_path / "link.txt"
    link.symlink_to(target.name)
    for text in ("first", "second"):  # the first time, nothing is at the end of the link
        write_atomically(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_is_written_again_keeps_its_mode(tmp_path):
    path = tmp_path / "secret.txt"
    path.write_text("old")
    path.chmod(0o600)
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_no_regular_file_is_never_replaced(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(InputError, match="it is not a regular file but a pipe"):
            write_atomically(path, "text")
    with pytest.raises(InputError, match="it is a directory"):
        write_atomically(tmp_path, "text")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="cannot be written"):
        write_atomically(tmp_path / "loop", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "loop", "pipe"]
    assert pipe.is_fifo()


def test_a_workload_file_leaves_its_defaults_out(tmp_path):
    write_artifact(tmp_path / "w.json", "workload", small.workload({"x": ["vision"]}))
    data = json.loads((tmp_path / "w.json").read_text())
    assert "numerics" not in data
    assert "trainable" not in data["parameters"][0]
