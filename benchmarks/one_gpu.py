"""What Spindle costs on one GPU, where it cannot help: python benchmarks/one_gpu.py [--only CASE,...] [--trace FOLDER]
    [--steps N] [--case-s SECONDS] [-o FILE.json]
    python benchmarks/one_gpu.py --compile-only [--only CASE,...]     # fills torch's cache of compiled code

The same models (built from Hugging Face configs), batches and optimizer in a plain PyTorch loop and in a Trainer, in
alternating rounds, in one process: eager, with CUDA graphs, and the plain loop under `torch.compile`. All read a loss
two steps behind the GPU; the time of a step is that from one loss to the next, without the first and the last ones of a
round. The ratio of each pair of rounds; the median of all pairs and their middle half. Cases that FILE.json has are not
measured again.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

import spindle
from alone import alone, join, measured_alone
from common import markdown, publish
from spindle.train import profiling

PAIRS, BEHIND = 20, 2
LEAST_PAIRS = 3  # even when time is up
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a CPU only to try the script
Modules = dict[str, Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Models, tasks over them (`loss(modules, batch)`) and a batch for each task; `steps` make up a round."""

    modules: Callable[[], dict[str, nn.Module]]
    tasks: dict[str, tuple[Callable[[Modules, Any], Tensor], Callable[[], dict[str, Tensor]], int]]
    steps: int
    autocast: torch.dtype | None = torch.bfloat16
    fused: bool = True


def words(rows: int, length: int) -> dict[str, Tensor]:
    """Sentences of different lengths, padded. Hugging Face models look whether a mask is all ones, and leave it out."""
    lengths = length - torch.arange(rows) % 4
    return {
        "ids": torch.randint(3, 1000, (rows, length)),
        "mask": (torch.arange(length) < lengths.unsqueeze(1)).long(),
    }


def pixels(rows: int, size: int) -> dict[str, Tensor]:
    return {"pixels": torch.randn(rows, 3, size, size)}


def mean_of(output: Any) -> Tensor:
    return output.last_hidden_state.float().mean(1)  # type: ignore[no-any-return]


def contrast(first: Tensor, second: Tensor) -> Tensor:
    logits = F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).T * 10
    return F.cross_entropy(logits, torch.arange(first.shape[0], device=first.device))


def bert_base() -> dict[str, nn.Module]:
    config = hf.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, vocab_size=30522)
    return {"text": hf.BertModel(config, add_pooling_layer=False)}


def vit_large() -> dict[str, nn.Module]:
    config = hf.ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return {"vision": hf.ViTModel(config, add_pooling_layer=False)}


def llama_1b() -> dict[str, nn.Module]:
    config = hf.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        use_cache=False,
    )
    return {"llm": hf.LlamaForCausalLM(config)}


def dino_and_modernbert(**small: int) -> dict[str, nn.Module]:
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16} | small
    text = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 2624} | small
    vision = hf.Dinov2Model(hf.Dinov2Config(**large, image_size=224, patch_size=14))
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return {"vision": vision, "text": hf.ModernBertModel(hf.ModernBertConfig(**text, **ids, vocab_size=1000))}


def small_towers() -> dict[str, nn.Module]:
    modules = dino_and_modernbert(hidden_size=192, num_hidden_layers=6, num_attention_heads=3, intermediate_size=512)
    audio = hf.Wav2Vec2BertConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=512,
        feature_projection_input_dim=32,
        apply_spec_augment=False,
        layerdrop=0.0,
        conformer_conv_dropout=0.0,
    )
    return modules | {"audio": hf.Wav2Vec2BertModel(audio)}


def text_loss(modules: Modules, batch: Any) -> Tensor:
    return mean_of(modules["text"](input_ids=batch["ids"], attention_mask=batch["mask"])).square().mean()


def vision_loss(modules: Modules, batch: Any) -> Tensor:
    return mean_of(modules["vision"](pixel_values=batch["pixels"])).square().mean()


def llm_loss(modules: Modules, batch: Any) -> Tensor:
    logits = modules["llm"](input_ids=batch["ids"]).logits
    return F.cross_entropy(logits[:, :-1].float().transpose(1, 2), batch["ids"][:, 1:])


def image_text(modules: Modules, batch: Any) -> Tensor:
    text = modules["text"](input_ids=batch["ids"], attention_mask=batch["mask"])
    return contrast(mean_of(modules["vision"](pixel_values=batch["pixels"])), mean_of(text))


def audio_text(modules: Modules, batch: Any) -> Tensor:
    text = modules["text"](input_ids=batch["ids"], attention_mask=batch["mask"])
    return contrast(mean_of(modules["audio"](input_features=batch["sound"])), mean_of(text))


CASES = {
    "bert-base": Case(modules=bert_base, tasks={"text": (text_loss, lambda: words(32, 128), 32)}, steps=30),
    "vit-l": Case(modules=vit_large, tasks={"vision": (vision_loss, lambda: pixels(32, 224), 32)}, steps=24),
    "llama-1b": Case(modules=llama_1b, tasks={"llm": (llm_loss, lambda: words(4, 1024), 4)}, steps=20),
    "dinov2-l + modernbert-l": Case(
        modules=dino_and_modernbert,
        tasks={"clip": (image_text, lambda: pixels(16, 224) | words(16, 128), 16)},
        steps=24,
    ),
    "small towers": Case(
        modules=small_towers,
        tasks={
            "image_text": (image_text, lambda: pixels(8, 224) | words(8, 64), 8),
            "audio_text": (audio_text, lambda: {"sound": torch.randn(8, 100, 32)} | words(8, 64), 8),
        },
        steps=24,
    ),
}


class Loop:
    """A plain training loop."""

    def __init__(self, case: Case, batches: dict[str, Any], *, compiled: bool = False) -> None:
        torch.manual_seed(0)
        self._case, self._batches = case, batches
        modules = {name: module.to(DEVICE) for name, module in case.modules().items()}
        self._modules: Modules = {
            name: torch.compile(module) if compiled else module for name, module in modules.items()
        }
        parameters = [named for module in modules.values() for named in module.named_parameters()]
        self._optimizer = make_optimizer(case)(parameters)

    def step(self) -> Tensor:
        self._optimizer.zero_grad()
        total = torch.zeros((), device=DEVICE)
        for name, (loss, _, _) in self._case.tasks.items():
            with torch.autocast(DEVICE.type, dtype=self._case.autocast, enabled=self._case.autocast is not None):
                value = loss(self._modules, self._batches[name])
            value.backward()
            total += value.detach()
        self._optimizer.step()
        return total

    def round_s(self, steps: int) -> float:
        return step_s_of(known_s_of(self.step, steps))


def known_s_of(step: Callable[[], Tensor], steps: int) -> list[float]:
    """The moments at which the losses of steps become known to the host, `BEHIND` steps behind the GPU."""
    losses: list[tuple[Tensor, torch.cuda.Event | None]] = []
    known_s = []
    for _ in range(steps):
        loss = step().to("cpu", non_blocking=True)
        losses.append((loss, torch.cuda.current_stream().record_event() if DEVICE.type == "cuda" else None))
        if len(losses) > BEHIND:
            _, event = losses[-1 - BEHIND]
            if event is not None:
                event.synchronize()
            known_s.append(time.perf_counter())
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return known_s


def step_s_of(known_s: list[float]) -> float:
    """Seconds of a step, from the moments at which losses became known: between the second and the last but one."""
    return (known_s[-2] - known_s[1]) / (len(known_s) - 3)


def make_optimizer(case: Case) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda named: torch.optim.AdamW(
        [parameter for _, parameter in named], lr=1e-5, fused=case.fused and DEVICE.type == "cuda"
    )


class Ours:
    def __init__(self, case: Case, batches: dict[str, Any], *, graphs: bool) -> None:
        torch.manual_seed(0)
        handles: Modules = {name: spindle.module(name, module) for name, module in case.modules().items()}
        tasks = [
            spindle.task(batch_size=rows, name=name)(lambda batch, loss=loss: loss(handles, batch))
            for name, (loss, _, rows) in case.tasks.items()
        ]
        self._batches = {name: [batch] for name, batch in batches.items()}
        self.trainer = spindle.Trainer(
            tasks,
            optimizer=make_optimizer(case),
            autocast=case.autocast,
            planning=spindle.Planning(planner="sequential"),
            cuda_graphs=graphs,
        )
        with mock.patch.object(profiling, "local_profile", measured_alone(profiling.local_profile)):
            self.trainer.prepare(self._batches, progress=False)

    def round_s(self, steps: int) -> float:
        known_s: list[float] = []
        self.trainer.fit(
            self._batches, steps=steps, progress=False, on_step=lambda step, losses: known_s.append(time.perf_counter())
        )
        return step_s_of(known_s[:-BEHIND])  # those of the last steps come when the fit is over


def make_batches(case: Case) -> dict[str, dict[str, Tensor]]:
    return {
        task: {key: tensor.to(DEVICE) for key, tensor in make().items()} for task, (_, make, _) in case.tasks.items()
    }


def measure(
    name: str,
    case: Case,
    pairs: int,
    trace: Path | None,
    variants: Sequence[str],
    until_s: float = math.inf,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Rounds of a plain loop and of these variants, in turn: so many of each, or fewer where `time.monotonic()` passes
    `until_s`. `say` is told what was done."""
    join()
    batches = make_batches(case)
    contenders: dict[str, Any] = {}
    for key in ("plain", *variants):
        match key:
            case "plain" | "compiled":
                contenders[key] = Loop(case, batches, compiled=key == "compiled")
            case _:
                contenders[key] = Ours(case, batches, graphs=key == "graphs")
        say(f"{key}: built" if key in ("plain", "compiled") else f"{key}: traced and profiled")
        contenders[key].round_s(case.steps)  # kernels are chosen, graphs captured, code compiled
        say(f"{key}: warmed up")
    rounds: dict[str, list[float]] = {key: [] for key in contenders}
    for number in range(pairs):
        if number >= LEAST_PAIRS and time.monotonic() > until_s:
            break
        keys = list(contenders)
        with alone():
            for key in keys[number % len(keys) :] + keys[: number % len(keys)]:
                rounds[key].append(contenders[key].round_s(case.steps))
    say(f"{len(rounds['plain'])} pairs of rounds")
    notices = next((ours.trainer.notices for ours in contenders.values() if isinstance(ours, Ours)), [])
    if trace is not None:
        for key, contender in contenders.items():
            with torch.profiler.profile() as profiled:
                contender.round_s(6)
            profiled.export_chrome_trace(str(trace / f"{name.replace(' ', '')}-{key}.json.gz"))
    del contenders
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    return {"rounds_s": rounds, "notices": notices}


def rows_of(results: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, result in results.items():
        rounds = result["rounds_s"]
        row = [name, f"{statistics.median(rounds['plain']) * 1e3:.2f}"]
        for key in ("eager", "graphs", "compiled"):
            if key not in rounds:
                row.append("")
                continue
            ratios = sorted(ours / plain for ours, plain in zip(rounds[key], rounds["plain"], strict=True))
            middle = f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}"
            row.append(f"{statistics.median(ratios):.3f} ({middle})")
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--steps", type=int, help="of a round")
    parser.add_argument("--case-s", type=float, default=math.inf, help="start no pair of a case after so many seconds")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    has_results = arguments.output is not None and arguments.output.exists()
    results: dict[str, Any] = json.loads(arguments.output.read_text()) if has_results else {}
    for name, case in CASES.items():
        if name in results or (arguments.only and name not in arguments.only.split(",")):
            continue
        case = replace(case, steps=arguments.steps or case.steps)
        if arguments.compile_only:
            Loop(case, make_batches(case), compiled=True).round_s(4 + BEHIND)
            continue
        until_s = time.monotonic() + arguments.case_s
        variants = ["eager", "graphs"] + ([] if arguments.no_compile else ["compiled"])
        results[name] = measure(name, case, arguments.pairs, arguments.trace, variants, until_s)
        print(name, rows_of({name: results[name]}), *results[name]["notices"], sep="\n  ", flush=True)
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(results))
    header = ["ms per step", "plain", "Spindle eager / plain", "Spindle graphs / plain", "plain compiled / plain"]
    table = markdown(header, rows_of(results))
    if arguments.only or arguments.trace or arguments.compile_only:
        print(table)
    else:
        gpu = torch.cuda.get_device_name()
        publish("one_gpu", {"gpu": gpu, "torch": torch.__version__, "cases": results}, f"{table}\n\n{gpu}.")


if __name__ == "__main__":
    main()
