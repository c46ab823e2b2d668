"""Ranks agree: rank 0 records for all ranks, and what ranks derive by themselves is compared before it is used."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402

import zoo  # noqa: E402
from differences import PATCHES, SCRIPTS  # noqa: E402
from spindle.models import NotSerializableError, build_chain, chain_of, dump_chain, load_source  # noqa: E402
from spindle.models.chain import RecordedForward  # noqa: E402
from spindle.train.agreement import canonical_text  # noqa: E402

TESTS = Path(__file__).parent
HASH_SEEDS = ("0", "1")  # under which {"full_attention", "sliding_attention"} has different orders
LIMIT_S = 400  # for two processes on busy cores


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What `scripts/hash_seeds.py` found on each of two ranks, which have different hash seeds."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
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
    assert ranks[0]["kinds"].keys() == (zoo.KINDS | zoo.ALONE).keys()
    for kind, ours in ranks[0]["kinds"].items():
        assert ours["notices"] == [], kind  # all of them can be serialised
        assert ours == ranks[1]["kinds"][kind], kind


@pytest.mark.parametrize("planner", ["plan 2", "pipeline"])
def test_a_forward_that_follows_the_order_of_a_set_trains_like_plain_pytorch(ranks, planner):
    for answers in ranks:
        trained = answers["training"][planner]
        assert trained["ranks"] == [0, 1]
        assert trained["layers"] == 6
        assert trained["loss"] < 1e-9
        assert trained["weights"] < 1e-9


def test_what_cannot_be_serialised_is_recorded_by_every_rank_with_a_notice(ranks):
    for answers in ranks:
        assert answers["unserialisable"]["layers"] == 2
        (notice,) = answers["unserialisable"]["notices"]
        assert re.match(r"module 'calls' is recorded by every rank: .*local", notice)


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
    for message in pool.run(2, "differing", "attribute"):
        assert message.startswith(f"{differs}: rank 0 has 1.0, rank 1 has 2.0; set it alike"), message


@pytest.mark.parametrize("difference", EXPECTED)
def test_a_difference_names_the_rank_the_item_and_both_values_on_all_ranks(pool, difference):
    messages = pool.run(2, "differing", difference)
    item, ours, theirs = EXPECTED[difference]
    pattern = rf"rank 1 differs from rank 0 in {item}: rank 0 has {ours}.*, rank 1 has {theirs}.*; all ranks must"
    assert re.match(pattern, messages[0]), messages[0]
    assert messages[0] == messages[1]


def test_ranks_may_have_different_parameters_groups_and_attributes_that_say_which_rank_it_is(pool):
    assert pool.run(2, "differing", "apart") == ["", ""]


CALLED = "rank 1 differs from rank 0 in what was called in the midst of the fit: rank 0 has "
ALONE = {  # what ranks say
    "in a fit": (
        r"step \d: rank 1 called remove_task, add_task or replan in the midst of the fit, and rank 0 did not",
        r"step \d: rank 1 called remove_task\('push'\) in the midst of the fit, and rank 0 did not",
    ),
    "in the last step": (CALLED + r"'nothing', rank 1 has 'replan'",),
    "which task": (CALLED + r""""remove_task\('pull'\)", rank 1 has "remove_task\('push'\)"; all""",),
    "between fits": (
        r"rank 1 differs .* the Trainer's method .*: rank 0 has 'fit', rank 1 has .remove_task\('push'\)",
    ),
    "frozen": (r"rank 1 differs from rank 0 in the parameters of module 'tower': .*=True.*=False",),
}


@pytest.mark.parametrize("when", ALONE)
def test_a_change_on_one_rank_alone_ends_with_an_error_that_names_it(pool, when):
    messages = pool.run(2, "changing_alone", when)
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
