"""Small jobs that share one GPU: python benchmarks/fleet_sharing.py [--jobs 8] [--sizes small,base] [--budget-s 60]
    [-o FILE.json]

The same small job (a Hugging Face encoder from its config, trained by Spindle) alone on the whole GPU, and as many at
once, each in a process of its own with its share of the GPU's multiprocessors and memory (MPS, as for
`--virtual-devices`). All warm up, wait for each other, and then take their measured steps at the same time, so times
are those with busy neighbours. *Gain*: how much sooner all jobs are done together than one after the other. Without a
GPU the script runs on CPU processes, which only tests it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, circumstances, markdown
from spindle.artifact import write_atomically

SIZES = {"small": (256, 4, 16, 64), "base": (768, 12, 8, 128)}  # width, layers, rows, tokens
WARM_UP, STEPS = 25, 60
LIMIT_S = 120.0


def train(size: str, folder: Path, number: int, num_jobs: int) -> None:
    """One job; runs in a process of its own."""
    import torch
    import transformers as hf

    import spindle

    is_gpu = torch.cuda.is_available()
    width, depth, rows, tokens = SIZES[size]
    config = hf.BertConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        vocab_size=4096,
    )
    torch.manual_seed(number)
    precision = torch.bfloat16 if is_gpu else torch.float32
    encoder = spindle.module("encoder", hf.BertModel(config, add_pooling_layer=False).to(precision))

    @spindle.task(batch_size=rows)
    def words(batch):
        return encoder(input_ids=batch["ids"]).last_hidden_state.float().square().mean()

    trainer = spindle.Trainer(
        [words],
        optimizer=lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-5, fused=is_gpu),
        planning=spindle.Planning(lanes=1),
    )
    batches = {"words": [{"ids": torch.randint(0, 4096, (rows, tokens))}]}
    trainer.fit(batches, steps=WARM_UP, progress=False)
    wait_for_all(folder, "ready", number, num_jobs)
    begin_s = time.perf_counter()
    result = trainer.fit(batches, steps=STEPS, progress=False)
    record = {"step_s": statistics.median(result.step_s[5:]), "wall_s": time.perf_counter() - begin_s}
    if is_gpu:
        device = torch.cuda.current_device()
        record["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        limit = (
            torch.cuda.get_per_process_memory_fraction(device) * torch.cuda.get_device_properties(device).total_memory
        )
        record["limit_bytes"] = int(limit)
        record["multiprocessors"] = torch.cuda.get_device_properties(device).multi_processor_count
    (folder / f"result-{number}.json").write_text(json.dumps(record))
    wait_for_all(folder, "done", number, num_jobs)


def wait_for_all(folder: Path, what: str, number: int, num_jobs: int) -> None:
    (folder / f"{what}-{number}").touch()
    end_s = time.monotonic() + LIMIT_S
    while len(list(folder.glob(f"{what}-*"))) < num_jobs:
        if time.monotonic() > end_s:
            sys.exit(f"job {number}: the others are not {what} within {LIMIT_S:.0f} s")
        time.sleep(0.002)


def run_jobs(size: str, num_jobs: int) -> list[dict[str, Any]]:
    """So many jobs at once, each on its share of the GPU."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if has_gpu():
            from spindle.launch.mps import shared_gpu

            environment |= stack.enter_context(shared_gpu(num_jobs))
        command = [sys.executable, __file__, "--train", size, "--folder", name, "--jobs", str(num_jobs)]
        processes = [
            subprocess.Popen([*command, "--number", str(number)], env=environment) for number in range(num_jobs)
        ]
        codes = [process.wait(timeout=2 * LIMIT_S) for process in processes]
        if any(codes):
            raise RuntimeError(f"jobs ended with {codes}")
        return [json.loads((Path(name) / f"result-{number}.json").read_text()) for number in range(num_jobs)]


def has_gpu() -> bool:
    import shutil

    return shutil.which("nvidia-smi") is not None


def report(data: dict[str, Any]) -> str:
    header = [
        "job",
        "at once",
        "step alone, ms",
        "step of each together, ms",
        "gain",
        "memory of each, MiB",
        "limit, MiB",
    ]
    rows = []
    for key, cell in data["cells"].items():
        size, count = key.split("/")
        together_s = statistics.median(record["step_s"] for record in cell["together"])
        alone_s = cell["alone"][0]["step_s"]
        peak = max(record.get("peak_bytes", 0) for record in cell["together"])
        limit = cell["together"][0].get("limit_bytes", 0)
        rows.append(
            [
                size,
                count,
                f"{1e3 * alone_s:.2f}",
                f"{1e3 * together_s:.2f}",
                f"{int(count) * alone_s / together_s:.2f}",
                f"{peak / 2**20:.0f}",
                f"{limit / 2**20:.0f}",
            ]
        )
    about = sorted({f"commit {cell['commit']}, {cell['hardware']}" for cell in data["cells"].values()})
    return f"{markdown(header, rows)}\n\nMeasured at {'; '.join(about)}{', one H200' if has_gpu() else ''}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", default="8")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "fleet_sharing.json")
    parser.add_argument("--train", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.folder, options.number, int(options.jobs))
        return
    begin_s = time.monotonic()
    data: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {"cells": {}}
    alone: dict[str, list[dict[str, Any]]] = {}
    for size in options.sizes.split(","):
        for count in options.jobs.split(","):
            key = f"{size}/{count}"
            if key in data["cells"] or time.monotonic() - begin_s > options.budget_s:
                continue
            if size not in alone:
                alone[size] = run_jobs(size, 1)
            cell = {"alone": alone[size], "together": run_jobs(size, int(count)), **circumstances()}
            data["cells"][key] = cell
            write_atomically(options.output, json.dumps(data, indent=1) + "\n")
            print(f"{time.monotonic() - begin_s:5.0f} s  {key}", flush=True)
    text = report(data)
    write_atomically(options.output.with_suffix(".md"), text + "\n")
    print(text, flush=True)


if __name__ == "__main__":
    main()
