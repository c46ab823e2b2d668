"""Whole Hugging Face composites, `model(**batch).loss` as the task, in Spindle and without it:

    python benchmarks/composites.py --output FILE.json [--variants graphs,eager]             # one process
    spindle launch --virtual-devices 8 benchmarks/composites.py --output FILE.json           # one GPU as eight devices
        [--variants wavefront,sequential,ddp]
    both: [--only clip,llava] [--budget-s 300] [--tiny] [--table FILE.md] [--commit HASH]

    clip     CLIP ViT-L/14, 428 M parameters, its own contrastive loss
    llava    LLaVA of 1 B parameters: the vision tower of CLIP ViT-L/14 at 336 pixels, a Llama of 0.7 B; token mean

One process: Spindle with CUDA graphs (its default), or eager, beside a plain PyTorch loop under bfloat16 autocast, in
alternating rounds as in `one_gpu.py`. Several ranks: Spindle's planner, Spindle with every module on all devices
(`sequential`), and torch's DistributedDataParallel over all ranks, with bfloat16 weights. Under DDP, the contrastive
loss is over each rank's own rows, which is cheaper than that of the whole batch.

The time of a step is that from one loss to the next as rank 0 sees them. A cell is one variant of one composite; it is
in the file as soon as it is measured, and cells that the file has are not measured again. Both ways of running write to
the same file, and to the table beside it. What was done is printed with the seconds since the start. In one process,
models are initialised on the GPU: on a host this alone takes ten seconds for each copy.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spindle
from common import markdown
from one_gpu import BEHIND, Case, known_s_of, rows_of
from one_gpu import measure as measure_rounds
from spindle.artifact import write_atomically
from spindle.plan.text import format_plan
from spindle.run import join_world
from virtual.cells import Cells
from virtual.plain import make_optimizer
from virtual.run import Experiment, about, attempt, free, shared_plan

hf.logging.set_verbosity_error()
PAIRS, ROUND_STEPS = 6, 12
WARM_UP, STEPS = 8, 20
ONE_PROCESS = ("graphs", "eager")
PLANNERS = ("wavefront", "sequential")
SEVERAL_RANKS = (*PLANNERS, "ddp")
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Composite:
    """A model, a batch for it of so many rows, and the rows of a step: in one process, and on all ranks."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    rows: int
    rank_rows: int
    options: Mapping[str, Any]

    def loss(self, modules: Mapping[str, Callable[..., Any]], batch: Batch) -> Tensor:
        return modules["model"](**batch, **self.options).loss  # type: ignore[no-any-return]


def clip(tiny: bool) -> Composite:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    size, words = (28, 100) if tiny else (224, 49408)

    def make() -> nn.Module:
        vision = hf.CLIPVisionConfig(**(small if tiny else large), image_size=size, patch_size=14)
        config = hf.CLIPConfig(
            vision_config=vision.to_dict(),
            text_config=hf.CLIPTextConfig(
                **(small if tiny else text), vocab_size=words, eos_token_id=words - 1
            ).to_dict(),
            projection_dim=32 if tiny else 768,
        )
        return hf.CLIPModel(config)

    def batch(rows: int) -> Batch:
        length = 12 if tiny else 77
        ids = torch.randint(3, words - 3, (rows, length))
        ids[:, -1] = words - 1  # the end of a text, at which the text is pooled
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": torch.randn(rows, 3, size, size),
        }

    return Composite(
        make=make, batch=batch, rows=8 if tiny else 64, rank_rows=8 if tiny else 64, options={"return_loss": True}
    )


def llava(tiny: bool) -> Composite:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    llama = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 32}
    size, image_token = (28, 100) if tiny else (336, 32000)
    image_tokens, num_words = (size // 14) ** 2, 8 if tiny else 128

    def make() -> nn.Module:
        vision = hf.CLIPVisionConfig(**(small if tiny else large), image_size=size, patch_size=14)
        text = hf.LlamaConfig(**(small if tiny else llama | {"num_key_value_heads": 8}), vocab_size=image_token + 64)
        # The last layer's output, not that before it: plain loops would run a layer that nothing uses.
        config = hf.LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=image_token,
            vision_feature_layer=-1,
        )
        model = hf.LlavaForConditionalGeneration(config)
        for name, parameter in model.named_parameters():
            if "post_layernorm" in name:
                parameter.requires_grad_(False)  # of the pooled output, which LLaVA does not use: DDP would wait for it
        return model

    def batch(rows: int) -> Batch:
        ids = torch.randint(3, image_token, (rows, image_tokens + num_words))
        ids[:, 4 : 4 + image_tokens] = image_token
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": torch.randn(rows, 3, size, size),
            "labels": ids.masked_fill(ids == image_token, -100),
        }

    return Composite(make=make, batch=batch, rows=8, rank_rows=8 if tiny else 16, options={"use_cache": False})


COMPOSITES = {"clip": clip, "llava": llava}


def one_process(experiment: Experiment, name: str, pairs: int, variants: list[str]) -> None:
    """Spindle and a plain loop in alternating rounds, each variant in a cell of its own."""
    composite = COMPOSITES[name](experiment.small)
    device = experiment.world.device

    def make() -> dict[str, nn.Module]:
        with device:
            return {"model": composite.make()}

    case = Case(
        modules=make,
        tasks={name: (composite.loss, lambda: composite.batch(composite.rows), composite.rows)},
        steps=6 if experiment.small else ROUND_STEPS,
        autocast=torch.bfloat16 if device.type == "cuda" else None,
    )
    until_s = experiment.begin_s + experiment.budget_s
    for variant in experiment.todo(name, variants):
        cell = f"{name}/{variant}"

        def run(variant: str = variant, cell: str = cell) -> dict[str, Any]:
            torch.manual_seed(1)
            result = measure_rounds(name, case, pairs, None, [variant], until_s, partial(_say, experiment, cell))
            return result | {"median_s": statistics.median(result["rounds_s"][variant])}

        experiment.measure(cell, run)
        free()


def _say(experiment: Experiment, cell: str, text: str) -> None:
    if experiment.world.rank == 0:
        print(f"{time.monotonic() - experiment.begin_s:6.0f} s  {cell:26} {text}", flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A composite on this rank's device, and the batch of all ranks."""

    name: str
    composite: Composite
    model: nn.Module
    batch: Batch

    @classmethod
    def build(cls, experiment: Experiment, name: str) -> Replica:
        device = experiment.world.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        composite = COMPOSITES[name](experiment.small)
        torch.manual_seed(0)
        with device:
            model = composite.make().to(dtype)
        torch.manual_seed(1)
        batch = {
            key: value.to(device, dtype if value.is_floating_point() else value.dtype)
            for key, value in composite.batch(composite.rank_rows).items()
        }
        return cls(name=name, composite=composite, model=model, batch=batch)


def several_ranks(experiment: Experiment, name: str, variants: list[str]) -> None:
    """Every variant that has no result yet: Spindle's share a profile, DDP comes last."""
    left = [variant for variant in experiment.todo(name, variants) if variant in PLANNERS]
    if left:
        replica = Replica.build(experiment, name)
        handle = spindle.module("model", replica.model)
        task = spindle.task(batch_size=replica.composite.rank_rows, name=name)(
            lambda batch: replica.composite.loss({"model": handle}, batch)
        )
        trainer = spindle.Trainer([task], optimizer=make_optimizer, seed=0, name=name)
        batches = {name: [replica.batch]}
        _say(experiment, name, "built")
        profile, error = attempt(experiment.world, lambda: trainer.prepare(batches, progress=False))
        _say(experiment, name, "traced and profiled")
        free()
        for variant in left:
            if profile is None:
                experiment.note(lambda cells, variant=variant: cells.finish(f"{name}/{variant}", {"error": error}))
            elif not experiment.measure(
                f"{name}/{variant}", partial(planner_cell, experiment, trainer, batches, variant)
            ):
                break  # weights may be anywhere
            free()
        if profile is not None:
            trainer.replan(keep_optimizer=False)  # releases the groups of its last plan
        del trainer, replica, handle, task, batches
        free()
    if "ddp" in experiment.todo(name, [variant for variant in variants if variant == "ddp"]):
        experiment.measure(f"{name}/ddp", partial(ddp_cell, experiment, name))
        free()


def planner_cell(
    experiment: Experiment, trainer: spindle.Trainer, batches: dict[str, list[Batch]], planner: str
) -> dict[str, Any]:
    assert trainer.profile is not None
    say = partial(_say, experiment, planner)
    plan = shared_plan(experiment, trainer.profile, planner)
    say("planned")
    trainer.replan(plan=plan, keep_optimizer=False)
    warm_up, steps = _steps(experiment)
    known_s: list[float] = []
    trainer.fit(batches, steps=warm_up, progress=False)
    say("warmed up")
    result = trainer.fit(
        batches, steps=steps, progress=False, on_step=lambda step, losses: known_s.append(time.perf_counter())
    )
    return _times(experiment, known_s[:-BEHIND]) | {  # losses of the last steps come when the fit is over
        "predicted_s": result.predicted.makespan_s,
        "losses": result.losses[-1],
        "peak_bytes": result.peak_bytes,
        "captured": result.num_captured_slots,
        "without_graph": dict(result.slots_without_cuda_graph),
        "notices": result.notices,
        "plan": format_plan(result.plan),
    }


def ddp_cell(experiment: Experiment, name: str) -> dict[str, Any]:
    """Torch's DistributedDataParallel, each rank with its part of the rows."""
    world = experiment.world
    replica = Replica.build(experiment, name)
    share = replica.composite.rank_rows // world.size
    rows = slice(world.rank * share, (world.rank + 1) * share)
    batch = {key: value[rows] for key, value in replica.batch.items()}
    model = DistributedDataParallel(replica.model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(list(replica.model.named_parameters()))

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = replica.composite.loss({"model": model}, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    _say(experiment, "ddp", "built")
    warm_up, steps = _steps(experiment)
    known_s_of(step, warm_up)
    world.barrier()
    _say(experiment, "ddp", "warmed up")
    return _times(experiment, known_s_of(step, steps))


def _steps(experiment: Experiment) -> tuple[int, int]:
    """Steps that warm up (graphs are captured within them), and steps that are measured."""
    return (4, 8) if experiment.small else (WARM_UP, STEPS)


def _times(experiment: Experiment, known_s: list[float]) -> dict[str, Any]:
    step_s = [later - earlier for earlier, later in pairwise(known_s[1:])]
    return {"step_s": step_s, "median_s": statistics.median(step_s), "ranks": experiment.world.size}


def table(data: dict[str, Any]) -> str:
    """Tables of the cells that there are."""
    cells = {cell: result for cell, result in data["cells"].items() if "error" not in result}
    parts = []
    rounds = {cell: result for cell, result in cells.items() if cell.split("/")[1] in ONE_PROCESS}
    if rounds:
        rows = [[name, plain, graphs or eager] for name, plain, eager, graphs, _ in rows_of(rounds)]
        parts.append(
            "One process, bfloat16 autocast: the median of "
            f"{min(len(result['rounds_s']['plain']) for result in rounds.values())} or more pairs of rounds, and their "
            "middle half.\n\n" + markdown(["ms per step", "plain", "Spindle / plain"], rows)
        )
    names = [name for name in COMPOSITES if any(f"{name}/{variant}" in cells for variant in SEVERAL_RANKS)]
    if names:
        num_ranks = next(result["ranks"] for result in cells.values() if "ranks" in result)
        rows = []
        for name in names:
            medians = {variant: cells.get(f"{name}/{variant}", {}).get("median_s") for variant in SEVERAL_RANKS}
            ours, ddp = medians["wavefront"], medians["ddp"]
            speedup = f"{ddp / ours:.2f}" if ours and ddp else ""
            rows.append([name, *(f"{time_s * 1e3:.1f}" if time_s else "" for time_s in medians.values()), speedup])
        parts.append(
            f"{num_ranks} ranks, bfloat16 weights.\n\n"
            + markdown(["ms per step", "Spindle", "Spindle, sequential", "DDP", "DDP / Spindle"], rows)
        )
    errors = [f"- {cell}: {result['error']}" for cell, result in data["cells"].items() if "error" in result]
    if errors:
        parts.append("Cells without a result:\n\n" + "\n".join(errors))
    facts = data["about"]
    tiny = ", tiny models" if facts["small"] else ""
    parts.append(
        f"`benchmarks/composites.py`; {facts['device']}{tiny}, torch {facts['torch']}, transformers "
        f"{facts['transformers']}, commit {facts['commit']}, {facts['date']}."
    )
    return "# Whole composites\n\n" + "\n\n".join(parts) + "\n"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Whole composites in Spindle and without it.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default=",".join(COMPOSITES), help="composites")
    parser.add_argument("--variants", default="", help=f"{','.join(ONE_PROCESS)} or {','.join(SEVERAL_RANKS)}")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of rounds in one process")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no cell after so many seconds")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try it out")
    parser.add_argument("--table", type=Path, help="the table; beside the output unless given")
    parser.add_argument("--commit", help="where the tree was copied without its history")
    options = parser.parse_args(arguments)
    variants = ONE_PROCESS if int(os.environ.get("WORLD_SIZE", "1")) == 1 else SEVERAL_RANKS
    options.only = options.only.split(",")
    options.variants = options.variants.split(",") if options.variants else list(variants)
    for chosen, known in ((options.only, tuple(COMPOSITES)), (options.variants, variants)):
        for name in chosen:
            if name not in known:
                parser.error(f"there is no {name!r}; choose from {', '.join(known)}")
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    begin_s = time.monotonic()
    world = join_world()
    cells = Cells(options.output) if world.rank == 0 else None
    experiment = Experiment(
        world=world,
        cells=cells,
        output=options.output,
        small=options.tiny,
        begin_s=begin_s,
        budget_s=options.budget_s,
    )
    _say(experiment, "all ranks", "joined")
    facts = about(world, options.tiny) | {"transformers": hf.__version__}
    facts |= {"commit": options.commit} if options.commit else {}
    experiment.note(lambda cells: cells.describe(facts))
    for name in options.only:
        if world.size == 1:
            one_process(experiment, name, options.pairs, options.variants)
        else:
            several_ranks(experiment, name, options.variants)
        gc.collect()
        if cells is not None:
            text = table(json.loads(options.output.read_text()))
            write_atomically(options.table or options.output.with_suffix(".md"), text)
    if cells is not None:
        print(text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
