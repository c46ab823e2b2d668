"""Jobs whose steps the fleet estimates, and which then run under these plans. Every rank runs this script:

    spindle launch -n 2 benchmarks/scripts/estimated_jobs.py --output FILE.json [--jobs towers,vlm] [--budget-s 60]
        [--profiles FOLDER]

    towers     three encoders and two contrastive tasks over them, as in the CLIP recipes
    vlm        the vision-language model of examples/vlm.py, and its text-only task on the same language model
    bert       masked words, a Hugging Face model from its config

Each job measures its profile in this world, or takes the part of one that `--profiles` has for it, measured with more
processes. From it the fleet makes its planned estimate and the plan, before any step; then that plan runs. Finished
jobs are in the file at once and are not run again.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import spindle
from spindle.artifact import write_atomically
from spindle.cluster import PRESETS, Cluster, Island
from spindle.fleet import Cell, Fleet
from spindle.fleet.estimates import bound_estimate, planned_cell
from spindle.plan import Plan
from spindle.profile import Profile, read_profile, roofline_profile, write_profile
from spindle.recipes import Step
from spindle.run import World, join_world

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "examples"))
import vlm

IS_GPU = torch.cuda.is_available()
SKIPPED, MEASURED = 20, 20  # steps
Modules = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkJob:
    """Modules, and tasks over their handles, with one batch for each task."""

    modules: dict[str, nn.Module]
    tasks: Callable[[Modules], list[Any]]
    batches: dict[str, dict[str, Tensor]]


def encoder(width: int, depth: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
    }


def words(rows: int, length: int) -> dict[str, Tensor]:
    """Sentences of different lengths, padded."""
    mask = (torch.arange(length) < (length - torch.arange(rows) % 4).unsqueeze(1)).long()
    return {"ids": torch.randint(3, 1000, (rows, length)), "mask": mask}


def make_towers() -> BenchmarkJob:
    width, depth, rows = (768, 12, 32) if IS_GPU else (256, 4, 16)
    size = 224 if IS_GPU else 112
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    modules = {
        "vision": hf.ViTModel(hf.ViTConfig(**encoder(width, depth), image_size=size), add_pooling_layer=False),
        "depth": hf.ViTModel(hf.ViTConfig(**encoder(width // 2, depth), image_size=size), add_pooling_layer=False),
        "text": hf.BertModel(hf.BertConfig(**encoder(width, depth), **no_dropout), add_pooling_layer=False),
        "projection": nn.Linear(width // 2, width),
    }

    def mean_of(output: Any) -> Tensor:
        return output.last_hidden_state.mean(1)  # type: ignore[no-any-return]

    def contrast(first: Tensor, second: Tensor) -> Tensor:
        logits = F.normalize(first.float(), dim=-1) @ F.normalize(second.float(), dim=-1).T * 10
        return F.cross_entropy(logits, torch.arange(first.shape[0], device=first.device))

    def tasks(handles: Modules) -> list[Any]:
        @spindle.task(batch_size=rows)
        def image_text(batch):
            text = handles["text"](input_ids=batch["ids"], attention_mask=batch["mask"])
            return contrast(mean_of(handles["vision"](pixel_values=batch["pixels"])), mean_of(text))

        @spindle.task(batch_size=rows)
        def depth_text(batch):
            text = handles["text"](input_ids=batch["ids"], attention_mask=batch["mask"])
            features = handles["projection"](mean_of(handles["depth"](pixel_values=batch["pixels"])))
            return contrast(features, mean_of(text))

        return [image_text, depth_text]

    length = 128 if IS_GPU else 32
    batches = {name: {"pixels": torch.randn(rows, 3, size, size)} | words(rows, length) for name in TWO_TASKS}
    return BenchmarkJob(modules=modules, tasks=tasks, batches=batches)


TWO_TASKS = ("image_text", "depth_text")


def make_vlm() -> BenchmarkJob:
    vlm.SIZES["benchmark"] = (768, 1024, 12) if IS_GPU else (256, 256, 4)
    data = {
        "describe": [vlm.Pictures(16)[number] for number in range(16)],
        "read": [vlm.Texts(24)[number] for number in range(24)],
    }
    batches = {
        name: {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        for name, samples in data.items()
    }
    return BenchmarkJob(
        modules=vlm.make_modules("benchmark"),
        tasks=lambda handles: list(vlm.make_tasks(handles).values()),
        batches=batches,
    )


def make_bert() -> BenchmarkJob:
    width, depth, rows, length = (1024, 16, 32, 256) if IS_GPU else (256, 6, 16, 64)
    config = hf.BertConfig(
        **encoder(width, depth), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, vocab_size=8192
    )

    def tasks(handles: Modules) -> list[Any]:
        @spindle.task(batch_size=rows)
        def masked_words(batch):
            logits = handles["bert"](input_ids=batch["ids"], attention_mask=batch["mask"]).logits
            total = F.cross_entropy(logits.float().transpose(1, 2), batch["ids"], reduction="sum")
            return spindle.mean(total, batch["mask"].sum())

        return [masked_words]

    return BenchmarkJob(
        modules={"bert": hf.BertForMaskedLM(config)}, tasks=tasks, batches={"masked_words": words(rows, length)}
    )


JOBS: dict[str, Callable[[], BenchmarkJob]] = {"towers": make_towers, "vlm": make_vlm, "bert": make_bert}


def one_kind(island: Island, num_devices: int) -> Fleet:
    island = replace(island, num_devices=num_devices)
    return Fleet(cluster=Cluster(name="this machine", islands=(island,)))


def share_of_gpu(island: Island, num_shares: int) -> Island:
    """A preset's device as one of so many equal shares of it."""
    kind = replace(
        island.kind,
        peak_flops=island.kind.peak_flops / num_shares,
        memory_bytes=island.kind.memory_bytes // num_shares,
        memory_bytes_per_s=island.kind.memory_bytes_per_s / num_shares,
    )
    return replace(island, kind=kind)


def planned(fleet: Fleet, profile: Profile) -> tuple[float, Plan]:
    """The fleet's estimate of the cell with all of its devices, and its plan."""
    cell = Cell(kind=fleet.kinds[0].name, num_devices=fleet.cluster.num_devices)

    def step_on(cluster: Cluster) -> Step:
        return Step(profile=lambda sizes: profile)

    bound = bound_estimate(step_on, fleet, cell)
    assert bound is not None
    estimate, plan, _ = planned_cell(step_on, fleet, bound)
    assert plan is not None
    return estimate.step_s, plan


@dataclass(slots=True)
class Estimator:
    """A planner for the Trainer: it plans as the fleet does, and keeps the estimates. Runs on rank 0."""

    estimates: dict[str, Any]

    def __call__(self, profile: Profile) -> Plan:
        size = profile.cluster.num_devices
        island = share_of_gpu(PRESETS["h200"], size) if IS_GPU else PRESETS["cpu"]
        described = one_kind(island, size)
        self.estimates["roofline_s"], _ = planned(described, roofline_profile(profile.graph, described.cluster))
        self.estimates["planned_s"], plan = planned(one_kind(profile.cluster.islands[0], size), profile)
        return plan


def run_job(name: str, world: World, profiles: Path | None) -> dict[str, Any]:
    """The estimates of a job here, and the median of its steps after the 20th."""
    torch.manual_seed(0)
    job = JOBS[name]()
    precision = torch.bfloat16 if IS_GPU else torch.float32

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(precision) if tensor.is_floating_point() else tensor

    handles = {key: spindle.module(key, module.to(precision)) for key, module in job.modules.items()}
    batches = {task: [{key: cast(tensor) for key, tensor in batch.items()}] for task, batch in job.batches.items()}
    record: dict[str, Any] = {}
    known = None if profiles is None else profiles / f"{name}.json"
    has_profile = world.broadcast_object(known is not None and known.exists())
    profile = read_profile(known).up_to(world.size) if has_profile and known is not None else None
    trainer = spindle.Trainer(
        job.tasks(handles),
        optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-5, fused=IS_GPU),
        planning=spindle.Planning(planner=Estimator(record), profile=profile, lanes=1),
    )
    result = trainer.fit(batches, steps=SKIPPED + MEASURED, progress=False)
    if known is not None and not has_profile and world.rank == 0:
        known.parent.mkdir(parents=True, exist_ok=True)
        write_profile(known, result.profile)
    steps_s = sorted(result.step_s[SKIPPED:])
    record |= {
        "measured_s": statistics.median(steps_s),
        "quartiles_s": [steps_s[len(steps_s) // 4], steps_s[3 * len(steps_s) // 4]],
        "num_parameters": sum(parameter.num_elements for parameter in result.profile.graph.parameters),
        "profile_of": profile.cluster.name if profile is not None else "this world",
    }
    return record


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--budget-s", type=float, default=120.0)
    options = parser.parse_args()
    begin_s = time.monotonic()
    world = join_world()
    cells: Mapping[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    for name in options.jobs.split(","):
        key = f"{'H200' if IS_GPU else 'gloo'}/{world.size}/{name}"
        if world.broadcast_object(key in cells or time.monotonic() - begin_s > options.budget_s):
            continue
        record = run_job(name, world, options.profiles)
        if world.rank == 0:
            cells = {**cells, key: record}
            write_atomically(options.output, json.dumps(cells, indent=1) + "\n")
            error = record["planned_s"] / record["measured_s"] - 1
            print(
                f"{time.monotonic() - begin_s:5.0f} s  {key:16} planned {1e3 * record['planned_s']:7.1f} ms  measured "
                f"{1e3 * record['measured_s']:7.1f} ms  {100 * error:+5.1f} %  roofline "
                f"{1e3 * record['roofline_s']:7.1f} ms",
                flush=True,
            )
        gc.collect()
        if IS_GPU:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
