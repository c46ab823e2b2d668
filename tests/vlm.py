"""A small vision-language model over images of different sizes: items of a batch, encoded before they are mixed with
tokens."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import internals
import spindle
from spindle.planners import Job, natural_answer
from spindle.planners.colocate import planner
from spindle.planners.colocate.layouts import layouts_with
from spindle.planners.options import DEDICATED, FIRST, REPLICATED
from spindle.planners.pipeline.rank_parameters import ranks_of_whole
from spindle.train import item_parts, microbatches, plan
from trainings import Training
from zoo import Workload

WIDTH, HEADS, VOCABULARY, MERGE = 12, 6, 11, 4
IMAGE_TOKEN, SOUND_TOKEN = 0, 1


class Attention(nn.Module):
    """Self-attention inside each item of a packed sequence, or over all of it."""

    def __init__(self, is_per_item: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_per_item = is_per_item

    def forward(self, x_PD: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x_PD).reshape(len(x_PD), 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
        item = torch.searchsorted(lengths.cumsum(0), torch.arange(len(x_PD), device=x_PD.device), right=True)
        mask = item[:, None] == item[None] if self.is_per_item else None
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        return self.out(mixed.transpose(0, 1).reshape(x_PD.shape))


class Block(nn.Module):
    def __init__(self, is_per_item: bool = True) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(is_per_item)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x_PD: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_PD = x_PD + self.attention(self.norm(x_PD), lengths)
        return x_PD + self.mlp(x_PD), lengths


class Encoder(nn.Module):
    """Patches of images in one sequence; four of them become a row of the output."""

    def __init__(self, num_layers: int, patch_size: int, is_per_item: bool = True, normalises: bool = False) -> None:
        super().__init__()
        self.embed: nn.Module = nn.Linear(patch_size, WIDTH)
        if normalises:
            self.embed = nn.Sequential(self.embed, nn.BatchNorm1d(WIDTH))
        self.blocks = nn.ModuleList(Block(is_per_item) for _ in range(num_layers))
        self.merge = nn.Linear(MERGE * WIDTH, WIDTH)

    def forward(self, patches: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x_PD = self.embed(patches)
        for block in self.blocks:
            x_PD, lengths = block(x_PD, lengths)
        return self.merge(x_PD.reshape(-1, MERGE * WIDTH))


def qwen2_encoder() -> nn.Module:
    """The encoder of Qwen2-VL, small. It splits packed sequences by the lengths of images, on the host."""
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    config = Qwen2VLConfig(
        vision_config={
            "depth": 2,
            "embed_dim": 24,
            "hidden_size": WIDTH,
            "num_heads": 6,
            "mlp_ratio": 2,
            "patch_size": 2,
        }
    ).vision_config
    config._attn_implementation = "sdpa"
    return Qwen2VisionTransformerPretrainedModel(config)


class Language(nn.Module):
    """A causal language model over embeddings."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        mask = torch.full((x_BLD.shape[1], x_BLD.shape[1]), float("-inf"), dtype=x_BLD.dtype, device=x_BLD.device)
        mask = mask.triu(1)
        for block in self.blocks:
            x_BLD = block(x_BLD, src_mask=mask)
        return self.head(x_BLD)


def vlm_batch(number: int, rows: int, images: Sequence[int], tokens: int = 24, patch_size: int = 3) -> Any:
    """A batch of `rows` sequences with images of so many output rows each, anywhere in them; without images the entries
    are missing."""
    generator = torch.Generator().manual_seed(1000 + number)
    ids = torch.randint(1, VOCABULARY, (rows, tokens), generator=generator)
    total = sum(images)
    assert total < rows * tokens
    places = torch.randperm(rows * tokens, generator=generator)[:total]
    ids.view(-1)[places] = IMAGE_TOKEN
    batch = {"ids": ids, "labels": torch.randint(0, VOCABULARY, (rows, tokens), generator=generator)}
    if images:
        lengths = MERGE * torch.tensor(images)
        patches = torch.randn(int(lengths.sum()), patch_size, generator=generator, dtype=torch.float64)
        batch |= {"patches": patches, "lengths": lengths}
    return batch


def images_of(number: int) -> tuple[int, ...]:
    """Sizes of the images of a batch: five in the first, then 0 to 5, of 1 to 9 output rows."""
    generator = torch.Generator().manual_seed(77 + number)
    count = int(torch.randint(0, 6, (1,), generator=generator)) if number else 5
    return tuple(torch.randint(1, 10, (count,), generator=generator).tolist())


IMAGES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "some": images_of,
    "few": lambda number: (7,) if number % 2 == 0 else (),
    "equal": lambda number: (4,) * (number % 3 + 1),
    "steps without": lambda number: images_of(number) if number < 3 else (),
    "steps with": lambda number: images_of(number) if number > 2 else (),
    "none": lambda number: (),
    "one long": lambda number: (17, 1, 1) if number % 2 else (1, 17, 2),
}


def vlm(
    rows: int = 2,
    images: str = "some",
    num_layers: tuple[int, int] = (3, 4),
    freezes: tuple[str, ...] = (),
    is_per_item: bool = True,
    mean: bool = True,
    counts: bool = False,
    audio: bool = False,
    hugging_face: bool = False,
    detached: bool = False,
    recompute: bool = False,
    projects_tokens: bool = False,
    empty: bool = False,
    normalises: bool = False,
) -> Workload:
    """A vision-language model. With `counts`, batches differ in how many tokens their loss counts, and say so a step
    ahead; with `audio`, recordings pass an encoder of their own and the same projector; with `projects_tokens`,
    embeddings of tokens pass it, too; with `empty`, batches without images have none in their entries; with
    `hugging_face`, the encoder is that of Qwen2-VL; `detached` images get no gradient, though their encoder is
    trained; with `normalises`, it has a batch normalisation."""
    torch.manual_seed(3)
    patch_size = 24 if hugging_face else 3
    encoder = qwen2_encoder() if hugging_face else Encoder(num_layers[0], patch_size, is_per_item, normalises)
    modules = {
        "vision": encoder.double(),
        "projector": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).double(),
        "embed": nn.Embedding(VOCABULARY, WIDTH).double(),
        "language": Language(num_layers[1]).double(),
        **({"hearing": Encoder(2, 2).double()} if audio else {}),
    }
    for name in freezes:
        modules[name].requires_grad_(False)
    handles = {
        name: spindle.module(name, module, activation_checkpointing=recompute and name == "vision")
        for name, module in modules.items()
    }
    vision, projector, embed, language = (handles[name] for name in ("vision", "projector", "embed", "language"))
    items: dict[str, Any] = {"patches": "lengths"}
    items |= {"frames": "frame_lengths"} if audio else {}
    items |= {"grid": 1} if hugging_face else {}

    @spindle.task(batch_size=rows, items=items, tokens=counted if counts else None)
    def describe(batch):
        x = embed(batch["ids"])
        x = projector(x) if projects_tokens else x
        if batch.get("patches") is not None and (not empty or len(batch["patches"])):
            if hugging_face:
                seen = projector(vision(batch["patches"], grid_thw=batch["grid"]).pooler_output)
            else:
                seen = projector(vision(batch["patches"], batch["lengths"]))
            seen = seen.detach() if detached else seen
            x = x.masked_scatter((batch["ids"] == IMAGE_TOKEN)[..., None], seen)
        if audio and batch["frames"] is not None:
            heard = projector(handles["hearing"](batch["frames"], batch["frame_lengths"]))
            x = x.masked_scatter((batch["ids"] == SOUND_TOKEN)[..., None], heard)
        losses = F.cross_entropy(language(x).flatten(0, 1), batch["labels"].flatten(), reduction="none")
        if counts:
            is_counted = (batch["labels"] != 0).flatten()
            return spindle.mean((losses * is_counted).sum(), is_counted.sum())
        return spindle.mean(losses.sum(), losses.shape[0]) if mean else losses.mean()

    def batches(number: int) -> Any:
        batch = vlm_batch(number, rows, IMAGES[images](number), patch_size=patch_size)
        if hugging_face and "lengths" in batch:
            batch["grid"] = torch.tensor([(1, 2, length // 2) for length in batch["lengths"].tolist()])
        if empty and "patches" not in batch:
            batch["patches"] = torch.zeros(0, patch_size, dtype=torch.float64)
            batch["lengths"] = torch.zeros(0, dtype=torch.int64)
        if counts and number % 2:
            batch["labels"][:, number % 5 :] = 0  # nothing is left in every tenth
        return {"describe": with_sound(batch, number) if audio else batch}

    return Workload(tasks=[describe], batches=batches, handles=handles)


def counted(batch: Any) -> int:
    return int((batch["labels"] != 0).sum())


def with_sound(batch: Any, number: int) -> Any:
    """The batch with recordings of one or two output rows, or None for them in every third."""
    batch |= {"patches": batch.get("patches"), "lengths": batch.get("lengths")}
    if number % 3 == 2:
        return batch | {"frames": None, "frame_lengths": None}
    rows = (1, 2, 1)[: 1 + number % 3]
    flat = batch["ids"].view(-1)
    text = (flat != IMAGE_TOKEN).nonzero()[:, 0]
    flat[text] = flat[text].clamp(min=2)
    flat[text[: sum(rows)]] = SOUND_TOKEN
    generator = torch.Generator().manual_seed(number)
    frames = torch.randn(MERGE * sum(rows), 2, generator=generator, dtype=torch.float64)
    return batch | {"frames": frames, "frame_lengths": MERGE * torch.tensor(rows)}


def vlm_training(micro_steps: int = 3, **options: Any) -> Training:
    return Training(workload=partial(vlm, **options), options={"gradient_accumulation_steps": micro_steps})


# Balanced data.


class Pages:
    """Documents of text with images, of different lengths; counts what was decoded."""

    def __init__(self, name: str, num_samples: int, most_images: int, gets_items: bool = True) -> None:
        self.name, self.decoded = name, []  # type: ignore[var-annotated]
        generator = torch.Generator().manual_seed(len(name))
        self._samples = []
        for _ in range(num_samples):
            count = int(torch.randint(most_images + 1, (1,), generator=generator))
            images = torch.randint(1, 4, (count,), generator=generator).tolist()
            text = int(torch.randint(2, 9, (1,), generator=generator))
            self._samples.append((text, images))
        if gets_items:
            self.get_items = self._get_items

    def __len__(self) -> int:
        return len(self._samples)

    def lengths(self, number: int) -> tuple[int, list[int]]:
        text, images = self._samples[number]
        return text + sum(images), [MERGE * rows for rows in images]

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * len(self.name) + number)

    def get_fields(self, number: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        self.decoded.append((number, tuple(sorted(names))))
        text, images = self._samples[number]
        generator = self._generator(number)
        ids = torch.randint(2, VOCABULARY, (text + sum(images),), generator=generator)
        ids[: sum(images)] = IMAGE_TOKEN
        labels = torch.randint(1, VOCABULARY, (len(ids),), generator=generator)
        return {name: {"ids": ids, "labels": labels}[name] for name in names}

    def _get_items(self, number: int, names: Sequence[str], items: Sequence[int]) -> dict[str, torch.Tensor]:
        self.decoded += [(number, item) for item in items]
        images = [self._image(number, item) for item in items]
        return {"patches": torch.cat(images)}

    def _image(self, number: int, item: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * number + item)
        rows = MERGE * self._samples[number][1][item]
        return torch.randn(rows, 3, generator=generator, dtype=torch.float64)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        images = range(len(self._samples[number][1]))
        sample = self.get_fields(number, ("ids", "labels"))
        if images:
            sample["patches"] = torch.cat([self._image(number, item) for item in images])
        return sample


def with_processes(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls a function on a rank of the pool, a daemon, which could not have processes of its own otherwise."""
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        return function(*arguments, **options)


def pages(**options: Any) -> Any:
    sources = {"web": Pages("web", 13, 2), "scans": Pages("scans", 7, 4, gets_items=False)}
    mix = {"web": 3, "scans": lambda step: 1 + step}
    return spindle.data.balanced(sources, **{"max_tokens": 24, "mix": mix, "seed": 5, "padding": {"ids": 2}} | options)


# Random layouts, parts and orders.


class PlansInProcess:
    """Stands for the planning process, in which nothing can be replaced."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}

    def request_plan(self, job: Job) -> None:
        self._jobs[job.number] = job

    def best(self, number: int) -> tuple[Any, bool]:
        answer = natural_answer(self._jobs[number])
        if answer.error is not None:
            raise answer.error
        return answer.program, True

    def is_final(self, number: int) -> bool:
        return True

    def keep(self, numbers: Any) -> None:
        """Nothing is searched any more."""

    def close(self) -> None:
        """There is no process."""


@contextmanager
def random_parts(seed: int, sequence_degree: int = 1) -> Iterator[list[int]]:
    """Inside, layouts are drawn at random, items are grouped into random parts, and parts stand on random devices. With
    a `sequence_degree`, encoders are on all ranks, the longest item of a batch is a part of its own, and every part
    that may goes to a random sequence group of so many. Yields the degrees that were planned so far."""
    planned: list[int] = []

    def parts_of_group(group: Any, code: Any, batch: Any, part_tokens: int) -> list[list[int]]:
        known = item_parts.item_code(code[group[0]])
        num_items = known.num_items(batch.nest, batch.lengths)
        choose = random.Random(f"{seed} {sorted(batch.lengths.items())}")
        items = choose.sample(range(num_items), num_items)
        if sequence_degree > 1 and num_items:
            longest = max(items, key=lambda item: batch.lengths[known.length_entry][item])
            items.remove(longest)
            bounds = sorted({0, len(items), *(choose.randrange(num_items) for _ in range(choose.randrange(3)))})
            return [[longest], *(items[first:last] for first, last in pairwise(bounds))]
        bounds = sorted({0, num_items, *(choose.randrange(num_items) for _ in range(choose.randrange(4)))})
        return [items[first:last] for first, last in pairwise(bounds)]

    def choose_layout(
        workload: Any, profile: Any, config: Any, num_ranks: int, measured: Any, sample: Any, shards: bool | None
    ) -> tuple[Any, int]:
        variants = list(workload.bound.tasks)
        key = tuple(((name, 2, 0),) for name in variants)
        batches = {(name, 0): measured[name] for name in variants}
        scales: dict[tuple[str, int], dict[int, float]] = {(name, 0): {} for name in variants}
        settings = item_parts.PartSettings(1, measured)
        step = microbatches.step_graph(
            key, profile, workload.code, scales, None, dict.fromkeys(variants, 1), batches, settings
        )
        placements = (REPLICATED, DEDICATED, FIRST) if sequence_degree == 1 else (REPLICATED,)
        layouts = layouts_with(step.profile, num_ranks, placements, shards is not False)
        return random.Random(seed).choice(layouts), 1

    def assigned_parts(profile: Any, layout: Any, replica: Any, *rules: Any) -> list[tuple[int, int]]:
        choose = random.Random(seed + len(replica.parts))
        assigned = []
        for part in replica.parts:
            ranks = ranks_of_whole(layout, part.chain)
            degree = sequence_degree if sequence_degree in part.stages else 1
            assigned.append((choose.choice(ranks[: len(ranks) - degree + 1]), degree))
        planned.extend(degree for _, degree in assigned)
        return assigned

    with (
        mock.patch.object(microbatches, "parts_of_group", parts_of_group),
        mock.patch.object(plan, "_choose_colocation", choose_layout),
        mock.patch.object(planner, "assigned_parts", assigned_parts),
        mock.patch.object(microbatches, "BackgroundPlanner", PlansInProcess),
    ):
        yield planned


@contextmanager
def cut_backwards() -> Iterator[list[int]]:
    """Inside, half of every backward is known to be for weights, so plans of `colocate` may cut backwards. Yields how
    many each plan cut."""
    step_graph, plan_of_orders = microbatches.step_graph, planner.plan_of_orders
    num_cut: list[int] = []

    def with_weight_times(*arguments: Any) -> Any:
        step = step_graph(*arguments)
        curves = tuple(
            tuple(replace(curve, weight_s=tuple(0.5 * part for part in curve.backward_s)) for curve in by_degree)
            for by_degree in step.profile.curves
        )
        return replace(step, profile=replace(step.profile, curves=curves))

    def counted(*arguments: Any) -> Any:
        num_cut.append(sum(len(order.split) for order in arguments[-1]))
        return plan_of_orders(*arguments)

    with (
        mock.patch.object(microbatches, "step_graph", with_weight_times),
        mock.patch.object(planner, "plan_of_orders", counted),
    ):
        yield num_cut


@contextmanager
def random_memory(seed: int) -> Iterator[list[tuple[int, int]]]:
    """Inside, stages and parts of planner `colocate` recompute and offload random layers, whatever memory allows.
    Yields how many layers of parts each plan recomputes and offloads."""
    plan_of_orders, guessed_profile = planner.plan_of_orders, internals.guessed_profile
    counts: list[tuple[int, int]] = []

    def with_random_memory(profile: Any, *arguments: Any) -> Any:
        choose = random.Random(seed)
        op_of = {op.name: op for op in profile.graph.metaops}
        plan, slots, recomputed, offloaded = plan_of_orders(profile, *arguments), [], 0, 0
        for slot in plan.slots:
            if op_of[slot.op].module is not None:
                kept = choose.randrange(slot.num_layers + 1)
                again = choose.randrange(kept + 1)
                slot = replace(slot, recomputed=again, offloaded=kept - again)
            slots.append(slot)
            if op_of[slot.op].items:
                recomputed, offloaded = recomputed + slot.recomputed, offloaded + slot.offloaded
        counts.append((recomputed, offloaded))
        return replace(plan, slots=tuple(slots))

    def with_host(graph: Any, num_devices: int) -> Any:
        profile = guessed_profile(graph, num_devices)
        islands = tuple(
            replace(island, kind=replace(island.kind, host_bytes_per_s=1e9, host_memory_bytes=1 << 30))
            for island in profile.cluster.islands
        )
        return replace(profile, cluster=replace(profile.cluster, islands=islands))

    with (
        mock.patch.object(planner, "plan_of_orders", with_random_memory),
        mock.patch.object(internals, "guessed_profile", with_host),
    ):
        yield counts
