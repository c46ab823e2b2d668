"""Ranks agree: rank 0 records for all ranks, and what ranks derive by themselves is compared before it is used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import spindle  # noqa: E402
import zoo  # noqa: E402
from internals import unmeasured  # noqa: E402
from spindle.errors import TrainingError  # noqa: E402
from spindle.models import NotSerializableError, build_chain, chain_of, dump_chain, load_source  # noqa: E402
from spindle.models.layer_source import RecordedForward  # noqa: E402
from spindle.profile import Profile  # noqa: E402
from spindle.run.pytrees import TensorMeta  # noqa: E402
from spindle.run.shape_inference import ShapeInference  # noqa: E402
from spindle.train import analyze, plan, profiling  # noqa: E402
from spindle.train.agreement import canonical_text  # noqa: E402
from sweeps import spread  # noqa: E402
from trainings import sgd  # noqa: E402
from zoo import Tower  # noqa: E402

TESTS = Path(__file__).resolve().parents[1]
HASH_SEEDS = ("0", "1")  # under which {"full_attention", "sliding_attention"} has different orders
LIMIT_S = 400  # for two processes on busy cores


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What `scripts/hash_seeds.py` found on each of two ranks, which have different hash seeds."""
    folder = tmp_path_factory.mktemp("ranks")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 finds the store instead of starting one
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = []
    for rank, seed in enumerate(HASH_SEEDS):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONHASHSEED": seed}
        command = [sys.executable, str(TESTS / "scripts" / "hash_seeds.py"), str(folder)]
        with (folder / f"rank-{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=shared | own, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = [(folder / f"rank-{rank}.log").read_text() for rank in range(len(processes))]
    assert codes == [0, 0], "\n".join(logs)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(len(processes))]


def test_the_two_ranks_have_different_orders_of_a_set(ranks):
    assert ranks[0]["order"] == ranks[1]["order"][::-1]


def test_every_model_that_rank_0_records_is_built_alike_on_rank_1(ranks):
    for name, ours in ranks[0]["models"].items():
        assert ours["layers"] > 1, name
        assert ours == ranks[1]["models"][name], name


def test_every_kind_of_module_that_rank_0_traces_is_built_alike_on_rank_1(ranks):
    assert [*ranks[0]["kinds"]] == spread(zoo.KINDS | zoo.ALONE, 4)
    for kind, ours in ranks[0]["kinds"].items():
        assert ours["notices"] == [], kind  # all of them can be serialised
        assert ours == ranks[1]["kinds"][kind], kind


@pytest.mark.parametrize("planner", ["plan 2", "pipeline"])
def test_a_forward_that_follows_the_order_of_a_set_trains_like_plain_pytorch(ranks, planner):
    for answers in ranks:
        trained = answers["training"][planner]
        assert trained["ranks"] == [0, 1]
        assert trained["layers"] == 6
        assert trained["errors"].keys() == {"loss", "parameter"}
        assert all(error < 1e-9 for error in trained["errors"].values())


def test_what_cannot_be_serialised_is_recorded_by_every_rank_with_a_notice(ranks):
    for answers in ranks:
        assert answers["unserialisable"]["layers"] == 2
        (notice,) = answers["unserialisable"]["notices"]
        assert re.match(r"module 'calls' is recorded by every rank: .*local", notice)


# A small training in which rank 1 has something else than rank 0, by name.

WIDTH, ROWS = 6, 4


@dataclass
class Script:
    """What the training script of a rank says."""

    batch_size: int = ROWS
    weight: float = 1.0
    per_sample_mean: bool = False
    width: int = WIDTH
    rate: float = 0.1
    decay: float = 0.0
    scale: float = 1.0
    constant: float = 1.0
    loader_columns: int = WIDTH
    steps: int = 1
    gamma: float = 0.9
    place: Callable[[int], str] = lambda number: "0-1"  # ranks of the op of this number
    prepare: Callable[[nn.Module], Any] = lambda module: None
    options: dict[str, Any] = field(default_factory=dict)


def plan_text(profile: Profile, place: Callable[[int], str]) -> str:
    """A plan that runs every op on ranks that are given for its number, as far as it can be split."""
    counts = [curves[0].num_devices[-1] for curves in profile.curves]
    ops = enumerate(zip(profile.graph.metaops, counts, strict=True))
    return "\n".join(f"{op.name}*{op.num_layers}@{place(number) if count > 1 else '0'}" for number, (op, count) in ops)


def changed(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: change(function(*args, **kwargs))


def patched(module: ModuleType, name: str, change: Callable[[Any], Any]) -> Any:
    """A function that a module calls, whose result is another."""
    return mock.patch.object(module, name, changed(getattr(module, name), change))


def with_other_plan(program: Any) -> Any:
    return replace(program, plan=replace(program.plan, evaluations=77))


def with_other_name(bound: Any) -> Any:
    return replace(bound, workload=replace(bound.workload, name="elsewhere"))


def with_other_shapes(cuts: Any) -> Any:
    (place, form), *rest = cuts.items()
    leaf = form.leaves[0]
    longer = replace(form, leaves=(TensorMeta((1, 77), leaf.dtype, leaf.requires_grad), *form.leaves[1:]))
    return {place: longer, **dict(rest)}


class NormalisedTwice(nn.LayerNorm):
    def forward(self, x):
        return super().forward(super().forward(x))


def untied(tower: nn.Module) -> None:
    tower.blocks[1].linear.weight = nn.Parameter(tower.blocks[1].linear.weight.detach().clone())


PIPELINE = {"planning": spindle.Planning(planner="pipeline"), "gradient_accumulation_steps": 2}
APART = {"place": lambda number: str(min(number, 1))}  # no parameter is on both ranks
SCRIPTS: dict[str, dict[str, Any]] = {  # what rank 1's script has otherwise
    "max_grad_norm": {"options": {"max_grad_norm": 2.0}},
    "gradient_accumulation_steps": {"options": {"gradient_accumulation_steps": 3}},
    "autocast": {"options": {"autocast": torch.bfloat16}},
    "seed": {"options": {"seed": 5}},
    "cuda_graphs": {"options": {"cuda_graphs": False}},
    "sampling_weights": {"options": {"sampling_weights": {"pull": 0.5}}},
    "planner": {"options": {"planning": spindle.Planning(planner="pipeline")}},
    "batch_size": {"batch_size": 5},
    "weight": {"weight": 0.5},
    "per_sample_mean": {"per_sample_mean": True},
    "shape": {"width": 7},
    "dtype": {"prepare": lambda tower: tower.norm.float()},
    "requires_grad": {"prepare": lambda tower: tower.norm.requires_grad_(False)},
    "tied": {"prepare": untied},
    "buffer": {"prepare": lambda tower: tower.register_buffer("table", torch.ones(3))},
    "class": {"prepare": lambda tower: setattr(tower, "norm", NormalisedTwice(WIDTH).double())},
    "mode": {"prepare": lambda tower: tower.norm.eval()},
    "graph": {"scale": 2.0},
    "constant": {"constant": 3.0},
    "batch": {"loader_columns": 9},
    "steps": {"steps": 3},
    "lr": {"rate": 0.2},
    "weight_decay": {"decay": 0.01},
    "attribute": {"prepare": lambda tower: setattr(tower.blocks[1].linear, "scale", 2.0)},
    "recorded apart": {},
    "apart": {**APART},
    "lr apart": {"rate": 0.2, **APART},
    "weight_decay apart": {"decay": 0.01, **APART},
    "scheduler": {"gamma": 0.8, **APART},
}
PATCHES: dict[str, Callable[[], Any]] = {  # what Spindle makes of it otherwise on rank 1
    "Python": lambda: mock.patch("spindle.train.agreement.sys", SimpleNamespace(version_info=(3, 99))),
    "torch": lambda: mock.patch.object(torch, "__version__", "2.99.0"),
    "Spindle": lambda: mock.patch.object(spindle, "__version__", "9.9"),
    "workload": lambda: patched(analyze, "bind", with_other_name),
    "profile": lambda: patched(profiling, "local_profile", lambda profile: replace(profile, overlap=3.0)),
    "plan": lambda: patched(plan, "lower", with_other_plan),
    "program": lambda: patched(plan, "lower", lambda program: replace(program, owning_ranks=((0, (0, 1)),))),
    "shapes": lambda: mock.patch.object(ShapeInference, "of", changed_method(ShapeInference.of)),
}


def changed_method(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: with_other_shapes(method(self, *args))


@contextmanager
def difference(name: str, rank: int) -> Iterator[Script]:
    common: dict[str, Any] = {"options": PIPELINE} if name == "shapes" else {}
    common |= APART if SCRIPTS.get(name, {}).keys() & APART.keys() else {}
    script = Script(**common) if rank == 0 or name in PATCHES else Script(**SCRIPTS[name])
    if rank == 1 and name in PATCHES:
        with PATCHES[name]():
            yield script
    else:
        yield script


def local_function(rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that cannot be pickled, so every rank records the module that is given it."""
    return lambda x: x


class Calls(nn.Module):
    """Gives its blocks a function, and does more between them on rank 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Given() for _ in range(2))
        self.rank, self.function = rank, local_function(rank)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.function) * (1 + self.rank)
        return x


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x, function):
        return self.inner(function(x))


def mark(tower: nn.Module, rank: int) -> None:
    """Attributes that may be others on other ranks."""
    tower.rank, tower.place, tower.is_main = rank, f"cuda:{rank}", rank == 0
    tower._num_calls = 3 * rank
    tower.origin = f"/home/{'abc'[rank]}/weights"
    if rank == 0:
        tower.longest = 7


def differing(rank: int, num_ranks: int, name: str) -> str:
    """The error of a training whose ranks differ in what the name says; nothing if there is none."""
    torch.manual_seed(0)
    with unmeasured(), difference(name, rank) as script:
        tower = Tower(WIDTH, script.width, 2).double()
        tower.blocks[1].linear.weight = tower.blocks[0].linear.weight
        tower.blocks[1].linear.scale = 1.0
        mark(tower, rank)
        script.prepare(tower)
        handle = spindle.module("tower", Calls(rank).double() if name == "recorded apart" else tower)
        constant = torch.full((1,), script.constant, dtype=torch.float64)

        @spindle.task(
            batch_size=script.batch_size, weight=script.weight, per_sample_mean=script.per_sample_mean, name="pull"
        )
        def pull(batch):
            y = handle(batch["x"][:, :WIDTH]) * constant
            return (y * 2.0 if script.scale == 2.0 else y + 1.0).square().mean()

        def optimizer(named):
            decayed = [parameter for path, parameter in named if "norm" not in path]
            rest = [parameter for path, parameter in named if "norm" in path]
            groups = [{"params": decayed, "weight_decay": script.decay}, {"params": rest, "weight_decay": 0.0}]
            return torch.optim.AdamW([group for group in groups if group["params"]], lr=script.rate)

        batch = {"x": torch.randn(script.batch_size, script.loader_columns, dtype=torch.float64)}
        try:
            trainer = spindle.Trainer(
                [pull],
                optimizer=optimizer,
                lr_scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: script.gamma**step),
                **script.options,
            )
            profile = trainer.prepare({"pull": [batch]}, progress=False)
            if name != "shapes":
                trainer.replan(plan=plan_text(profile, script.place))
            trainer.fit({"pull": [batch]}, steps=script.steps, progress=False)
        except TrainingError as error:
            return str(error)
    return ""


def changing_alone(rank: int, num_ranks: int, when: str) -> str:
    """The error of a training in which rank 1 changes something that rank 0 does not, at the time that is named."""
    torch.manual_seed(0)
    tower = Tower(WIDTH, WIDTH, 2)
    handle = spindle.module("tower", tower)
    tasks = [
        spindle.task(batch_size=ROWS, name=name)(lambda batch: handle(batch).square().mean())
        for name in ("pull", "push")
    ]
    loaders = {name: [torch.ones(ROWS, WIDTH)] for name in ("pull", "push")}

    def on_step(step: int, losses: Any) -> None:
        if rank == 1 and when == "in a fit" and step == 2:  # before a step that is not timed, which starts at once
            trainer.remove_task("push")
        if rank == 1 and when == "in the last step" and step == 5:
            trainer.replan()
        if when == "which task" and step == 1:
            trainer.remove_task(["pull", "push"][rank])
        if when == "frozen" and step == 1:
            tower.norm.requires_grad_(rank == 0)
            trainer.replan()

    with unmeasured():
        trainer = spindle.Trainer(tasks, optimizer=sgd)
        try:
            profile = trainer.prepare(loaders, progress=False)
            # On rank 0 alone, so that it does not wait for rank 1 during a step.
            trainer.replan(plan="\n".join(f"{op.name}*{op.num_layers}@0" for op in profile.graph.metaops))
            trainer.fit(loaders, steps=6, progress=False, on_step=on_step)
            if rank == 1 and when == "between fits":
                trainer.remove_task("push")
            trainer.fit(loaders, steps=1, progress=False)
        except TrainingError as error:
            return str(error)
    return ""


# Items by the name of the difference, with what both ranks have.
EXPECTED = {
    "Python": ("the version of Python", r"'3\.\d+'", "'3.99'"),
    "torch": ("the version of torch", re.escape(repr(str(torch.__version__))), "'2.99.0'"),
    "Spindle": ("the version of Spindle", r"'\d.*'", "'9.9'"),
    "workload": ("the workload", r".*name='training'", ".*name='elsewhere'"),
    "profile": ("the profile", r".*overlap=1\.0", r".*overlap=3\.0"),
    "plan": ("the plan", ".*evaluations=0", ".*evaluations=77"),
    "program": ("the program", r".*owning_ranks: \(\)", r".*owning_ranks: \(\(0, \(0, 1\)\)\)"),
    "shapes": (r"the shapes between the layers of pull@0", r".*shape=\(4, 6\)", r".*shape=\(1, 77\)"),
    "max_grad_norm": (r"Trainer\(max_grad_norm=\.\.\.\)", "'None'", "'2.0'"),
    "gradient_accumulation_steps": (r"Trainer\(gradient_accumulation_steps=\.\.\.\)", "'1'", "'3'"),
    "autocast": (r"Trainer\(autocast=\.\.\.\)", "'None'", "'torch.bfloat16'"),
    "seed": (r"Trainer\(seed=\.\.\.\)", "'0'", "'5'"),
    "cuda_graphs": (r"Trainer\(cuda_graphs=\.\.\.\)", "'True'", "'False'"),
    "sampling_weights": (r"Trainer\(sampling_weights=\.\.\.\)", "'None'", "'{pull: 0.5}'"),
    "planner": (r"Planning\(planner=\.\.\.\)", "'no pipeline'", "'a pipeline'"),
    "batch_size": ("the definition of task 'pull'", "'batch_size=4", "'batch_size=5"),
    "weight": ("the definition of task 'pull'", ".*weight=1.0", ".*weight=0.5"),
    "per_sample_mean": ("the definition of task 'pull'", ".*mean=False", ".*mean=True"),
    "shape": ("the parameters of module 'tower'", r".*stem.weight \(6, 6\)", r".*stem.weight \(7, 6\)"),
    "dtype": ("the parameters of module 'tower'", r".*norm.weight \(6,\) torch.float64", ".*torch.float32"),
    "requires_grad": ("the parameters of module 'tower'", ".*norm.weight .*=True", ".*norm.weight .*=False"),
    "tied": ("the parameters of module 'tower'", ".*tied to tower.blocks.0.linear.weight", ".*blocks.1.linear.weight"),
    "buffer": ("the buffers of module 'tower'", "''", r"'table \(3,\) torch.float32'"),
    "class": ("the submodules of module 'tower'", ".*norm LayerNorm", ".*norm NormalisedTwice"),
    "mode": ("the submodules of module 'tower'", ".*norm LayerNorm'", ".*norm LayerNorm in evaluation mode'"),
    "graph": ("the recorded graph of task 'pull'", ".*_operator.add .*1.0", ".*_operator.mul .*2.0"),
    "constant": ("the recorded graph of task 'pull'", r".*\[1\.0\]", r".*\[3\.0\]"),
    "batch": ("the first batch of task 'pull'", r".*\(4, 6\)", r".*\(4, 9\)"),
    "steps": (r"fit\(steps=\.\.\.\)", "'1 ", "'3 "),
    "lr": ("the optimizer's settings of parameter 'tower.stem.weight'", ".*lr: 0.1", ".*lr: 0.2"),
    "weight_decay": (
        "the optimizer's settings of parameter 'tower.stem.weight'",
        r".*decay: 0\.0\}",
        r".*decay: 0\.01\}",
    ),
    "lr apart": ("the optimizer's settings of parameter 'tower.stem.weight'", ".*lr: 0.1", ".*lr: 0.2"),
    "weight_decay apart": ("the optimizer's settings of parameter 'tower.stem.weight'", ".*: 0.0", ".*: 0.01"),
    "scheduler": ("the optimizer's settings of parameter 'tower.stem.weight'", ".*lr: 0.07", ".*lr: 0.05"),
    "recorded apart": ("the layers of tower#0 in task 'pull'", r".*o2_\(t2, 1\)", r".*o2_\(t2, 2\)"),
}


def test_every_difference_has_its_expectation():
    assert EXPECTED.keys() | {"apart", "attribute"} == {**PATCHES, **SCRIPTS}.keys()


def test_an_attribute_that_forward_may_use_must_not_differ(pool):
    differs = "rank 1 differs from rank 0 in attribute 'scale' of module 'tower.blocks.1.linear'"
    for message in pool.run(2, differing, "attribute"):
        assert message.startswith(f"{differs}: rank 0 has 1.0, rank 1 has 2.0; set it to the same value"), message


@pytest.mark.parametrize("difference", EXPECTED)
def test_a_difference_names_the_rank_the_item_and_both_values_on_all_ranks(pool, difference):
    messages = pool.run(2, differing, difference)
    item, ours, theirs = EXPECTED[difference]
    pattern = rf"rank 1 differs from rank 0 in {item}: rank 0 has {ours}.*, rank 1 has {theirs}.*; all ranks must"
    assert re.match(pattern, messages[0]), messages[0]
    assert messages[0] == messages[1]


def test_ranks_may_have_different_parameters_groups_and_attributes_that_say_which_rank_it_is(pool):
    assert pool.run(2, differing, "apart") == ["", ""]


def failing_to_make_an_optimizer(rank: int, num_ranks: int) -> str:
    handle = spindle.module("tower", nn.Linear(WIDTH, WIDTH))

    def optimizer(named):
        if rank == 1:
            raise ValueError(f"process {rank} has no file of learning rates")
        return sgd(named)

    with unmeasured():
        task = spindle.task(batch_size=ROWS, name="pull")(lambda batch: handle(batch).square().mean())
        trainer = spindle.Trainer([task], optimizer=optimizer)
        with pytest.raises(TrainingError) as caught:
            trainer.fit({"pull": [torch.ones(ROWS, WIDTH)]}, steps=1, progress=False)
    return str(caught.value)


def test_an_optimizer_that_cannot_be_made_on_one_rank_says_why_on_all(pool):
    for message in pool.run(2, failing_to_make_an_optimizer):
        assert "rank 1 has 'ValueError: process # has no file of learning rates'" in message


CALLED = r"rank 1 differs from rank 0 in what was called during fit\(\): rank 0 has "
ALONE = {  # what ranks say
    "in a fit": (
        r"step \d: rank 1 called remove_task, add_task or replan during fit\(\), and rank 0 did not",
        r"step \d: rank 1 called remove_task\('push'\) during fit\(\), and rank 0 did not",
    ),
    "in the last step": (CALLED + r"'nothing', rank 1 has 'replan'",),
    "which task": (CALLED + r""""remove_task\('pull'\)", rank 1 has "remove_task\('push'\)"; all""",),
    "between fits": (
        r"rank 1 differs .* the Trainer method called: rank 0 has 'fit', rank 1 has .remove_task\('push'\)",
    ),
    "frozen": (r"rank 1 differs from rank 0 in the parameters of module 'tower': .*=True.*=False",),
}


@pytest.mark.parametrize("when", ALONE)
def test_a_change_on_one_rank_alone_ends_with_an_error_that_names_it(pool, when):
    messages = pool.run(2, changing_alone, when)
    for rank, message in enumerate(messages):
        assert re.match(ALONE[when][rank % len(ALONE[when])], message), messages


def test_texts_do_not_follow_addresses_or_the_order_of_sets_and_dicts():
    assert canonical_text(object()) == canonical_text(object())
    words = [f"word {number}" for number in range(20)]
    assert canonical_text({*words}) == canonical_text({*reversed(words)})
    assert canonical_text(dict.fromkeys(words)) == canonical_text(dict.fromkeys(reversed(words)))
    assert canonical_text({"rate": 0.1}) != canonical_text({"rate": 0.2})
    assert canonical_text(torch.zeros(100)) != canonical_text(torch.cat([torch.zeros(99), torch.ones(1)]))


class Blocks(nn.Module):
    """Blocks that are given something beside their input."""

    def __init__(self, given) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Ignoring() for _ in range(2))
        self.given = [given]

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.given[0])
        return x


class Ignoring(zoo.Block):
    def __init__(self) -> None:
        super().__init__(zoo.WIDTH)

    def forward(self, x, given):
        return super().forward(x)


X = torch.ones(3, zoo.WIDTH)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (torch.Generator(), "it uses a torch.Generator"),
        (nn.Linear(2, 2), "it uses a Linear that does not belong to it"),
        (torch.ones(2, requires_grad=True), "it uses a Tensor that does not belong to it"),
        (torch.ones(1 << 20), "it uses a tensor of 4194304 bytes that does not belong to it"),
        (lambda x: x, "lambda"),
    ],
)
def test_what_must_be_one_object_for_all_is_not_serialised(given, reason):
    chain = chain_of(Blocks(given), X)
    assert len(chain.layers) == 2, chain.reason
    with pytest.raises(NotSerializableError, match=reason):
        dump_chain(chain)


def test_a_gpu_becomes_that_of_the_receiver():
    module = Blocks(torch.device("cuda", 0))
    chain = chain_of(module, X)
    source = load_source(module, dump_chain(chain), torch.device("cuda", 3))
    assert isinstance(source, RecordedForward)
    assert torch.device("cuda", 3) in source.namespace.values()
    assert torch.equal(build_chain(module, source)(X), module(X))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 5


class Between(zoo.Tower):
    def forward(self, x):
        for block in self.blocks:
            x = Doubled.apply(block(x))
        return x


def test_an_autograd_function_between_blocks_is_found_by_its_name():
    module = Between(zoo.WIDTH, zoo.WIDTH, 2)
    chain = chain_of(module, X)
    assert len(chain.layers) == 3, chain.reason
    built = build_chain(module, load_source(module, dump_chain(chain), torch.device("cpu")))
    weight = module.blocks[0].linear.weight
    gradients = [torch.autograd.grad(run(X).sum(), weight)[0] for run in (chain, built, module)]
    assert torch.equal(gradients[0], gradients[2])
    assert torch.equal(gradients[1], gradients[2])
