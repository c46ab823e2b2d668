"""One of two ranks with different hash seeds: rank 0 records modules, rank 1 builds their layers from what it is sent,
and both train together. Writes what test_agreement.py compares. Run with the folder for its output."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import warnings
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

import hugging
import spindle
import zoo
from comparison import Comparison
from internals import unmeasured
from random_plans import plan_text_named
from spindle.models import build_chain, chain_of, dump_chain, load_source, source_text
from spindle.run.world import join_world
from spindle.train.record import record_all
from spindle.train.trace_broadcast import trace_on_rank_0
from sweeps import spread
from trainings import sgd, train_plainly

warnings.simplefilter("ignore")
torch.set_num_threads(1)
WORLD = join_world()
ROWS, LENGTH = 4, 9
MODELS = {"ModernBERT", *spread(hugging.MODELS, 8)}  # in ModernBERT, a set decides which layers come first
KINDS = spread(zoo.KINDS | zoo.ALONE, 4)


def digest_of(nest) -> str:
    """Equal for nests of the same values."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(nest):
        digest.update(leaf.detach().numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
    return digest.hexdigest()


def model_as_sent(name: str) -> dict:
    """A model's chain, recorded on rank 0 and built on rank 1: its text, and what it gives."""
    model = hugging.made(name).eval()
    batch = hugging.batch_of(name, ROWS, LENGTH)
    chain = chain_of(model, **batch) if WORLD.rank == 0 else None
    data = WORLD.broadcast_object(None if chain is None else dump_chain(chain))
    if chain is None:
        chain = build_chain(model, load_source(model, data, WORLD.device))
    with torch.no_grad():
        return {"layers": len(chain.layers), "text": source_text(chain), "output": digest_of(chain(**batch))}


def kind_as_sent(kind: str) -> dict:
    """A workload around a module of one kind, traced on rank 0: the text of every layer, and what each call gives."""
    workload = zoo.one_kind(kind)
    examples = workload.batches(0)
    notices: list[str] = []
    traced = trace_on_rank_0(record_all(workload.tasks, examples), examples, WORLD, notices.append)
    texts, outputs = [], {}
    for task in traced:
        for call in task.recorded.calls:
            torch.manual_seed(0)
            args, kwargs = call.arguments(examples[task.name], *(outputs[source] for source in call.sources))
            outputs[call.name] = call.chain(*args, **kwargs)
            texts.append(source_text(call.chain))
    layers = [repr(task.layers) for task in traced]
    return {"text": "\n".join(texts), "traced": layers, "output": digest_of(outputs), "notices": notices}


def task_over(text):
    @spindle.task(batch_size=ROWS)
    def pull(batch):
        return text(**batch).last_hidden_state.square().mean()

    return pull


def trained(planner: str) -> dict:
    """How far losses and weights of ModernBERT are from those of plain PyTorch, after a few steps."""
    model = hugging.made("ModernBERT")
    plain = copy.deepcopy(model)
    handle = spindle.module("text", model)
    batches = [hugging.batch_of("ModernBERT", ROWS, length) for length in (9, 9, 13, 9)]
    planning = spindle.Planning(planner="pipeline") if planner == "pipeline" else None
    accumulation = 2 if planner == "pipeline" else 1
    steps = len(batches) // accumulation
    with unmeasured():
        trainer = spindle.Trainer(
            [task_over(handle)], optimizer=sgd, planning=planning, gradient_accumulation_steps=accumulation
        )
        if planner.startswith("plan"):
            profile = trainer.prepare({"pull": batches}, progress=False)
            trainer.replan(plan=plan_text_named(profile, planner))
        result = trainer.fit({"pull": batches}, steps=steps, progress=False)
    handle_of_plain = spindle.module("text", plain)
    microbatches = [
        [{"pull": batch} for batch in batches[step * accumulation :][:accumulation]] for step in range(steps)
    ]
    expected = train_plainly([task_over(handle_of_plain)], sgd(plain.named_parameters()), microbatches)
    comparison = Comparison()
    comparison.add_losses(result.losses, expected)
    comparison.add_tensors("parameter", dict(model.named_parameters()), dict(plain.named_parameters()))
    return {
        "errors": {kind: error for kind, (error, _) in comparison.largest.items()},
        "layers": len(handle.chain.layers),
        "ranks": sorted({device for slot in result.plan.slots for device in slot.devices}),
        "notices": list(result.notices),
    }


def unserialisable() -> dict:
    """A module whose recording names a local function: both ranks record it."""

    def local(x):
        return x * 2

    class Calls(zoo.Tower):
        def forward(self, x):
            for block in self.blocks:
                x = block(x, local)
            return x

    class Applied(zoo.Block):
        def forward(self, x, function):
            return super().forward(function(x))

    torch.manual_seed(0)
    model = Calls(zoo.WIDTH, zoo.WIDTH, 2).double()
    model.blocks = torch.nn.ModuleList(Applied(zoo.WIDTH) for _ in range(2)).double()
    handle = spindle.module("calls", model)

    @spindle.task(batch_size=ROWS)
    def pull(batch):
        return handle(batch["x"]).square().mean()

    notices: list[str] = []
    examples = {"pull": {"x": torch.ones(ROWS, zoo.WIDTH, dtype=torch.float64)}}
    (traced,) = trace_on_rank_0(record_all([pull], examples), examples, WORLD, notices.append)
    return {"layers": len(traced.recorded.calls[0].chain.layers), "notices": notices}


answers = {
    "order": list({"full_attention", "sliding_attention"}),
    "models": {name: model_as_sent(name) for name in sorted(MODELS)},
    "kinds": {kind: kind_as_sent(kind) for kind in KINDS},
    "training": {planner: trained(planner) for planner in ("plan 2", "pipeline")},
    "unserialisable": unserialisable(),
}
Path(sys.argv[1], f"rank-{WORLD.rank}.json").write_text(json.dumps(answers))
WORLD.barrier()
