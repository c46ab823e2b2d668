"""The experiment on one GPU as several devices (benchmarks/virtual), tried out on the CPU with tiny towers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from preloaded import run_spindle
from spindle.models import chain_of
from spindle.program import Backward, Exchange, Forward, OptimizerStep
from spindle.recipes import clip, ofasys
from spindle.run import World
from spindle.timeline import Timeline

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from virtual import models, plain, report, run, workloads
from virtual.cells import Cells
from virtual.split import split_of

SCRIPT = Path(run.__file__)
ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A small run on two ranks, and what it said."""
    output = tmp_path_factory.mktemp("virtual") / "results.json"
    return output, launched(output)


def launched(output: Path) -> str:
    options = ["--small", "--output", str(output), "--only", "clip-4-16"]
    options += ["--variants", "wavefront,sequential,ddp-eager,ddp-graphed"]
    done = run_spindle("launch", "-n", "2", str(SCRIPT), *options, environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_measures_every_cell_that_can_run_here(measured):
    output, said = measured
    data = json.loads(output.read_text())
    assert set(data["cells"]) == {"clip-4-16/wavefront", "clip-4-16/sequential", "clip-4-16/ddp-eager"}, said
    assert not data["begun"]
    assert data["workloads"]["clip-4-16"]["bound_s"] > 0
    for name, cell in data["cells"].items():
        assert len(cell["step_s"]) == run.SMALL_STEPS, name
    ours = data["cells"]["clip-4-16/wavefront"]
    parts = [ours["measured"][part] for part in ("compute_s", "optimizer_s", "sync_s", "wait_s")]
    assert sum(parts) == pytest.approx(ours["measured"]["step_s"])
    assert output.with_name("results.clip-4-16.profile.json").exists()


def test_plans_train_as_one_process_does(measured):
    cells = json.loads(measured[0].read_text())["cells"]
    workload = workloads.build("clip-4-16", ALONE.device, small=True)
    alone = plain.measure_plain(workload, "ddp-eager", ALONE, run.SMALL_WARM_UP, run.SMALL_STEPS)
    for planner in ("wavefront", "sequential"):
        assert cells[f"clip-4-16/{planner}"]["losses"] == pytest.approx(alone.losses, rel=1e-4)


def test_a_second_run_measures_nothing_again(measured):
    output, _ = measured
    before = json.loads(output.read_text())
    assert launched(output) == ""
    assert json.loads(output.read_text())["cells"] == before["cells"]


def test_a_report_shows_the_cells_and_draws_them(measured, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report.main([str(measured[0]), "--folder", str(tmp_path)])
    text = capsys.readouterr().out
    assert text.strip() == (tmp_path / "virtual.md").read_text().strip()
    assert "| clip-4-16 |" in text
    assert "Losses of the last step differ by at most" in text
    assert (tmp_path / "virtual.png").stat().st_size > 10_000


def test_speedups_are_geometric_means_over_what_was_tried(tmp_path):
    def cell(time_s: float) -> dict[str, float]:
        return {"median_s": time_s}

    cells = {f"clip-{count}-16/{report.OURS}": cell(1.0) for count in (4, 7)}
    cells |= {"clip-4-16/paper": cell(1.0), "clip-7-16/paper": cell(4.0)}
    cells |= {f"clip-4-16/{planner}": cell(2.0) for planner in ("sequential", "distmm")}
    cells |= {"clip-4-16/task-level": {"error": "no memory"}, "clip-7-16/sequential": cell(9.0)}
    path = tmp_path / "cells.json"
    path.write_text(json.dumps({"about": {}, "workloads": {}, "cells": cells}))
    table = report.speedups_table(report.Results([path])).splitlines()
    assert table[2].split(" | ")[1] == "2.00 (1 of 3)"  # the other has baselines that nobody tried
    assert table[3].split(" | ")[1] == "2.00 (2 of 3)"


def arguments_of(tower):
    """Two samples of eight positions, as a tower takes them."""
    words = torch.ones(2, 8, dtype=torch.long)
    if isinstance(tower, models.Encoder):
        match tower.stem:
            case models.Words():
                return (words,)
            case models.FeatureStem(project=project):
                return (torch.zeros(2, 8, project.in_features),)
    x = torch.zeros(2, 8, next(tower.blocks.parameters()).shape[0])  # that of a norm
    match tower:
        case models.Encoder():
            return (x,)
        case models.Decoder():
            return x, x, words
        case models.Language():
            return x, words


@pytest.mark.parametrize("small", [False, True])
def test_towers_with_blocks_are_cut_into_stem_blocks_and_end(small):
    with torch.device("meta"):
        families = (
            (models.clip_towers(set(clip.TOWERS), small), clip.TOWERS),
            (models.ofasys_towers(set(ofasys.TOWERS), small), ofasys.TOWERS),
            (models.qwen_val_towers(small), models.QWEN_VAL),
        )
    for towers, sizes in families:
        for name, tower in towers.items():
            num_layers = len(getattr(tower, "blocks", ()))
            if num_layers > 1:
                chain = chain_of(tower, *arguments_of(tower))
                assert not chain.reason, (name, chain.reason)
                assert len(chain.layers) == num_layers + 1 + hasattr(tower, "stem")
                assert small or num_layers == sizes[name].num_layers


def test_the_towers_have_the_sizes_of_the_recipes():
    with torch.device("meta"):
        billions = [
            models.num_parameters(towers) / 1e9
            for towers in (
                models.clip_towers(set(clip.TOWERS), small=False),
                models.ofasys_towers(set(ofasys.TOWERS), small=False),
                models.qwen_val_towers(small=False),
            )
        ]
    assert 1.1 < billions[0] < 1.2  # 1.14 in blocks, 0.05 in the table of words
    assert billions[1] == pytest.approx(0.67, abs=0.01)
    assert billions[2] == pytest.approx(1.07, abs=0.01)


@pytest.mark.parametrize("name", ["ofasys-7", "qwen-val"])
def test_token_losses_train_in_plain_pytorch(name):
    workload = workloads.build(name, ALONE.device, small=True)
    result = plain.measure_plain(workload, "ddp-eager", ALONE, warm_up=0, steps=2)
    assert set(result.losses) == {task.name for task in workload.tasks}
    assert all(3 < loss < 6 for loss in result.losses.values())  # about the logarithm of 101 words


@pytest.mark.parametrize(("name", "num_graphs"), [("clip-4-16", 6), ("ofasys-4", 9), ("qwen-val", 3)])
def test_tasks_share_the_graphs_of_a_tower_at_one_shape(monkeypatch, name, num_graphs):
    replays = []

    def graphed(call, sample, num_warmup_iters):
        return lambda *inputs: (replays.append(call), call(*inputs))[1]

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graphed)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(plain._Graphs, "_free_bytes", lambda self: 1 << 40)
    workload = workloads.build(name, ALONE.device, small=True)
    result = plain.measure_plain(workload, "ddp-graphed", ALONE, warm_up=0, steps=1)
    assert (result.num_graphs, result.num_eager) == (num_graphs, 0)
    # All calls of towers with blocks go through graphs.
    calls = [tower for task in workload.tasks for tower in task.towers if hasattr(workload.towers[tower], "blocks")]
    assert len(replays) == len(calls)


def test_the_task_with_most_parameters_runs_last():
    workload = workloads.build("clip-7-16", torch.device("meta"))
    assert plain.in_order(workload)[-1].name == "vision-text"


def test_the_parts_of_a_step_add_up():
    instructions = (
        Forward(slot=0),
        Backward(slot=0, first=0, last=1),
        OptimizerStep(),
        Exchange(link=0, backward=False),
    )
    spans = np.array(  # rank, lane, instruction, start, end
        [[0, 0, 0, 10, 30], [0, 0, 1, 30, 60], [0, 0, 2, 75, 90], [1, 0, 0, 0, 20], [1, 1, 3, 20, 40]]
    ).T
    nothing = np.zeros(5, dtype=np.int64)
    timeline = Timeline(
        instructions=instructions,
        num_ranks=2,
        rank=spans[0],
        lane=spans[1],
        instruction=spans[2],
        posted=spans[3],
        start=spans[3],
        end=spans[4],
        bytes_at_start=nothing,
        bytes_at_end=nothing,
        static_bytes=nothing[:2],
    )
    split = split_of(timeline)
    in_ns = [round(2e9 * part) for part in (split.compute_s, split.optimizer_s, split.sync_s, split.wait_s)]
    assert in_ns == [50 + 20, 15, 15, 10 + 70]
    assert split.idle == pytest.approx(95 / 180)


def test_a_cell_that_ended_the_job_twice_is_left_out(tmp_path):
    path = tmp_path / "cells.json"
    for _ in range(2):
        cells = Cells(path)
        assert "clip-4-16/paper" not in cells.done()
        cells.begin("clip-4-16/paper")
    assert "clip-4-16/paper" in Cells(path).done()
    assert "ended in this cell 2 times" in json.loads(path.read_text())["cells"]["clip-4-16/paper"]["error"]


def test_an_error_on_all_ranks_is_a_result():
    result, error = run.attempt(ALONE, lambda: 1 // 0)
    assert result is None
    assert error.startswith("ZeroDivisionError")


def test_each_function_whose_host_time_is_measured_exists():
    from virtual import host_overhead

    assert all(hasattr(owner, name) for owner, names in host_overhead.TIMED.items() for name in names)
