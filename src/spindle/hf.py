"""From `transformers.Trainer` to `spindle.Trainer`: `TrainingArguments` as options of the Trainer.

`options` are keyword arguments of `spindle.Trainer`; `loader`, `batch_size` and `num_steps` are the data that
`transformers.Trainer` would train on, and `packed` says which patches of a batch belong to which sample. An argument
that was set but has no equivalent here is refused by name. Knows no model: collators, processors, `from_pretrained` and
`save_pretrained` are used as they are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from spindle.errors import TrainingError
from spindle.train.packed import packed as pack

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["batch_size", "loader", "num_steps", "options", "packed"]

_USED = frozenset(
    [
        "per_device_train_batch_size",
        "max_steps",
        "num_train_epochs",
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "optim",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "gradient_accumulation_steps",
        "max_grad_norm",
        "bf16",
        "fp16",
        "seed",
        "data_seed",
        "dataloader_drop_last",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "train_sampling_strategy",
    ]
)
# Arguments that change nothing in a step: how progress is shown, where files go, what only evaluation or the hub reads.
_IGNORED = frozenset(
    [
        "output_dir",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "log_on_each_node",
        "logging_nan_inf_filter",
        "log_level",
        "log_level_replica",
        "disable_tqdm",
        "run_name",
        "project",
        "do_train",
        "do_eval",
        "do_predict",
        "use_cpu",
        "local_rank",
        "remove_unused_columns",
        "label_names",
        "skip_memory_metrics",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "eval_accumulation_steps",
        "ddp_timeout",
        "ddp_backend",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "average_tokens_across_devices",
        "save_total_limit",
        "save_only_model",
        "save_on_each_node",
        "hub_token",
        "hub_private_repo",
        "length_column_name",
    ]
)
_PLANNED = "Spindle plans how a model is divided (see spindle.Planning)"
_SAVE = (
    "spindle.Trainer(checkpoints=spindle.Checkpoints(...)) saves; model.save_pretrained(...) after fit writes the model"
)
_EVALUATE = "call trainer.evaluate(...) after fit, or in on_step"
_RECOMPUTE = "use spindle.module(..., activation_checkpointing=True)"
_ADVICE = {
    "activation_checkpointing": _RECOMPUTE,
    "gradient_checkpointing": _RECOMPUTE,  # its older name, which newer versions of transformers set, too
    "torch_compile": "use spindle.module(..., compile=True)",
    "eval_strategy": _EVALUATE,
    "eval_steps": _EVALUATE,
    "eval_on_start": _EVALUATE,
    "save_strategy": _SAVE,
    "save_steps": _SAVE,
    "load_best_model_at_end": _SAVE,
    "resume_from_checkpoint": "spindle.Trainer(checkpoints=spindle.Checkpoints(...)) resumes",
    "push_to_hub": "call model.push_to_hub(...) after fit",
    "report_to": "give writers to spindle.Trainer: callbacks=[spindle.TensorBoard(...)]",
    "label_smoothing_factor": "compute the loss in the task, with torch's label_smoothing",
    "deepspeed": _PLANNED,
    "fsdp": _PLANNED,
    "fsdp_config": _PLANNED,
    "parallelism_config": _PLANNED,
    "auto_find_batch_size": "plans stay within the memory of a device: recompute activations, or use more devices",
    "tf32": "set torch.backends.cuda.matmul.allow_tf32 = True",
    "full_determinism": "call torch.use_deterministic_algorithms(True)",
    "optim_args": "make the optimizer yourself: spindle.Trainer(..., optimizer=...)",
}
# Without weight decay in transformers.Trainer; and weights of norms, which are vectors.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def options(training_arguments: TrainingArguments, steps: int | None = None) -> dict[str, Any]:
    """Keyword arguments of `spindle.Trainer`: optimizer, learning-rate schedule, gradient clipping and accumulation,
    autocast and seed, as `transformers.Trainer` would use them.

    The schedule ends after `max_steps`, or after `steps` where epochs are given (see `num_steps`).
    """
    _refuse_unsupported(training_arguments)
    total = training_arguments.max_steps if steps is None else steps
    if total <= 0:
        raise TrainingError(
            f"TrainingArguments(num_train_epochs={training_arguments.num_train_epochs}): the learning-rate schedule "
            "needs the number of steps; call spindle.hf.options(arguments, spindle.hf.num_steps(arguments, loader)), "
            "or give TrainingArguments(max_steps=...)"
        )
    autocast = torch.bfloat16 if training_arguments.bf16 else torch.float16 if training_arguments.fp16 else None
    return {
        "optimizer": _make_optimizer(training_arguments),
        "lr_scheduler": _make_lr_scheduler(training_arguments, total),
        "max_grad_norm": training_arguments.max_grad_norm or None,
        "gradient_accumulation_steps": training_arguments.gradient_accumulation_steps,
        "autocast": autocast,
        "seed": training_arguments.seed,
    }


def batch_size(training_arguments: TrainingArguments) -> int:
    """Samples per batch over all ranks: `per_device_train_batch_size` times the number of ranks."""
    return training_arguments.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))


def loader(
    training_arguments: TrainingArguments, dataset: Any, data_collator: Callable[[list[Any]], Any] | None = None
) -> DataLoader[Any]:
    """Batches of `batch_size(training_arguments)` samples, the same on every rank: shuffled by the seed, collated, and
    loaded by `dataloader_num_workers` workers. No columns are removed: the collator chooses."""
    from transformers import default_data_collator

    arguments = training_arguments
    workers: dict[str, Any] = {}
    if arguments.dataloader_num_workers:
        workers = {
            "num_workers": arguments.dataloader_num_workers,
            "persistent_workers": arguments.dataloader_persistent_workers,
            "prefetch_factor": arguments.dataloader_prefetch_factor,
            "multiprocessing_context": arguments.dataloader_multiprocessing_context,
        }
    sampler: Sampler[int] | None = None
    if arguments.train_sampling_strategy not in ("random", "sequential"):
        raise TrainingError(
            f"TrainingArguments(train_sampling_strategy={str(arguments.train_sampling_strategy)!r}): expected 'random' "
            "or 'sequential'; give spindle.Trainer.fit a DataLoader of your own for others"
        )
    if arguments.train_sampling_strategy == "random" and not isinstance(dataset, IterableDataset):
        seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(seed))
    return DataLoader(
        dataset,
        batch_size=batch_size(arguments),
        sampler=sampler,
        collate_fn=default_data_collator if data_collator is None else data_collator,
        drop_last=arguments.dataloader_drop_last,
        pin_memory=arguments.dataloader_pin_memory and torch.cuda.is_available(),
        **workers,
    )


def num_steps(training_arguments: TrainingArguments, loader: DataLoader[Any]) -> int:
    """The number of training steps: `max_steps`, or `num_train_epochs` times a loader's batches."""
    if training_arguments.max_steps > 0:
        return training_arguments.max_steps
    per_epoch = max(1, math.ceil(len(loader) / training_arguments.gradient_accumulation_steps))
    return math.ceil(training_arguments.num_train_epochs * per_epoch)


def _refuse_unsupported(arguments: TrainingArguments) -> None:
    """Refuse every argument that was set, but would be ignored, in one message."""
    from transformers import TrainingArguments

    defaults = TrainingArguments(use_cpu=arguments.use_cpu)
    given, default = _values(arguments), _values(defaults)
    refused = []
    for field in dataclasses.fields(TrainingArguments):
        name = field.name
        if name in _USED or name in _IGNORED or given.get(name) == default.get(name):
            continue
        if given.get(name) in ("no", "none", [], ["none"], None):
            continue  # switched off
        if name.startswith("gradient_checkpointing") and "activation_checkpointing" in given:
            continue  # named once
        if name in ("save_steps", "eval_steps", "eval_delay") and given[f"{name[:4]}_strategy"] == "no":
            continue
        advice = _ADVICE.get(name) or next((_ADVICE[key] for key in _ADVICE if name.startswith(key)), "leave it out")
        refused.append(f"{name}={given[name]!r} ({advice})")
    if given["optim"] not in _OPTIMIZERS:
        refused.append(f"optim={given['optim']!r} (expected one of {', '.join(_OPTIMIZERS)}; {_ADVICE['optim_args']})")
    if given["lr_scheduler_type"] in _NEED_A_METRIC:
        refused.append(
            f"lr_scheduler_type={given['lr_scheduler_type']!r} (give spindle.Trainer an lr_scheduler, and a metric to "
            "trainer.step_lr_scheduler)"
        )
    if refused:
        raise TrainingError(f"these TrainingArguments are not supported: {'; '.join(refused)}")


_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")
_NEED_A_METRIC = ("reduce_lr_on_plateau", "greedy")


def _values(arguments: TrainingArguments) -> dict[str, Any]:
    """Arguments by name, as plain values."""
    values: dict[str, Any] = arguments.to_dict()
    return values


def _make_optimizer(
    arguments: TrainingArguments,
) -> Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]:
    def make(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Biases and norms without weight decay, as in transformers."""
        parameters = list(named)
        plain = {
            name
            for name, parameter in parameters
            if _NO_DECAY.search(name.lower()) or (parameter.dim() < 2 and name.endswith(".weight"))
        }
        decayed = [parameter for name, parameter in parameters if name not in plain]
        undecayed = [parameter for name, parameter in parameters if name in plain]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": arguments.weight_decay},
            {"params": undecayed, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if _values(arguments)["optim"] == "sgd":
            return torch.optim.SGD(groups, lr=arguments.learning_rate)
        betas = (arguments.adam_beta1, arguments.adam_beta2)
        return torch.optim.AdamW(groups, lr=arguments.learning_rate, betas=betas, eps=arguments.adam_epsilon)

    return make


def _make_lr_scheduler(
    arguments: TrainingArguments, steps: int
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    def make(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        from transformers import get_scheduler

        scheduler: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
            arguments.lr_scheduler_type,
            optimizer,
            num_warmup_steps=arguments.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,  # a dict by now
        )
        return scheduler

    return make


def packed(batch: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """A batch in which the patches of all images (and videos) are one sequence, as processors of Qwen-VL give it, with
    the patches and images of each sample declared by `spindle.packed`.

    `config` is the model's: its `image_token_id` and `video_token_id` stand in `input_ids` for the patches of an image,
    `spatial_merge_size` squared of them for each. Images belong to samples in order; that their tokens end where those
    of the samples end is checked.
    """
    declared = dict(batch)
    merged = config.vision_config.spatial_merge_size**2
    for kind, values in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        grid = declared.get(f"{kind}_grid_thw")
        if grid is None:
            continue
        patches = grid.prod(-1).tolist()
        tokens = (declared["input_ids"] == getattr(config, f"{kind}_token_id")).sum(-1).tolist()
        ends = {end: number for number, end in enumerate(itertools.accumulate(patches, initial=0))}
        last = [ends.get(end * merged) for end in itertools.accumulate(tokens, initial=0)]
        if None in last or last[-1] != len(patches):
            raise TrainingError(
                f"spindle.hf.packed: input_ids have {tokens} {kind} tokens by sample, but the grids of {len(patches)} "
                f"{kind}s have {[count // merged for count in patches]}: no {kind} may belong to two samples"
            )
        by_sample = [slice(first, end) for first, end in itertools.pairwise(last)]
        declared[values] = pack(declared[values], [sum(patches[images]) for images in by_sample])
        declared[f"{kind}_grid_thw"] = pack(grid, [len(patches[images]) for images in by_sample])
    return declared
