"""Plans with passes on real gloo processes: the same numbers as one process, and as torch's own pipelines.

Tolerance: float64 to 1e-9.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from hypothesis import Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from backends import rank_device  # noqa: E402
from comparison import Comparison, assert_close  # noqa: E402
from microbatches import (  # noqa: E402
    NUM_TOKENS,
    WIDTH,
    Case,
    Mix,
    PipelineRun,
    Say,
    Shift,
    microbatches,
    model,
    pipeline,
    profile_of,
    random_order,
    random_plan,
    run_pipeline,
)
from random_plans import plan_text_named  # noqa: E402
from spindle.plan import Piece, assemble_passes, format_plan, parse_plan, setting_of  # noqa: E402
from spindle.profile import Curve, Profile  # noqa: E402
from spindle.program import lower  # noqa: E402
from spindle.run import Executor, LayersCode, ShapeInference, World  # noqa: E402
from spindle.run.backward_split import run_input_part  # noqa: E402
from spindle.run.pytrees import TensorMeta  # noqa: E402
from tensor_parallel import sharing  # noqa: E402
from trainings import Fit, Trained, Training, assert_trained, train  # noqa: E402

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MANY = int(os.environ.get("SPINDLE_EXAMPLES", "5"))  # random schedules


def assert_same(answers: list[PipelineRun]) -> None:
    assert_close([answer.comparison for answer in answers], kinds=("loss", "gradient", "parameter"))


@settings(max_examples=MANY, phases=(Phase.generate,))  # what fails fails in any size, and takes processes down
@given(
    st.builds(
        Case,
        seed=st.integers(0, 10_000),
        num_ranks=st.integers(2, 4),
        num_microbatches=st.integers(1, 6),
        num_chunks=st.integers(1, 3),
        split=st.sampled_from((0.0, 0.5, 1.0)),
        lean=st.sampled_from((0.0, 0.4, 1.0)),
        forms=st.booleans(),
    )
)
def test_random_legal_schedules_give_the_numbers_of_one_process(pool, case):
    assert_same(pool.run(case.num_ranks, run_pipeline, case))


def test_replicas_with_schedules_of_their_own_give_the_numbers_of_one_process(pool):
    case = Case(seed=5, num_ranks=4, num_replicas=2, num_microbatches=5, steps=3)
    answers = pool.run(4, run_pipeline, case)
    assert_same(answers)
    assert all(answer.num_split and answer.num_recomputed for answer in answers)


def test_a_program_that_runs_again_gives_the_numbers_of_one_process(pool):
    assert_same(pool.run(3, run_pipeline, Case(seed=6, num_ranks=3, shares_order=True, steps=3, forms=False)))


@pytest.mark.parametrize("shares_order", [True, False])
def test_a_sharded_optimizer_gives_the_numbers_of_one_process(pool, shares_order):
    case = Case(seed=8, num_ranks=4, num_replicas=2, shares_order=shares_order, shards=True, steps=3)
    assert_same(pool.run(4, run_pipeline, case))


def test_offloaded_bytes_are_counted(pool):
    assert_same(answers := pool.run(2, run_pipeline, Case(seed=7, num_ranks=2, lean=1.0)))
    assert sum(answer.offloaded_bytes for answer in answers) > 0
    answers = pool.run(2, run_pipeline, Case(seed=7, num_ranks=2, lean=0.0))
    assert all(answer.offloaded_bytes == 0 for answer in answers)


def compare_with_torch(rank: int, num_ranks: int, stages_per_rank: int) -> Comparison:
    """Gradients and losses where torch.distributed.pipelining runs the same chain in the same order."""
    sys.path.append(str(BENCHMARKS))
    from pipelined import Setup, by_spindle, by_torch, order_of, torch_schedule

    setup = Setup(
        width=8,
        num_blocks=2 * num_ranks * stages_per_rank,
        length=3,
        rows=2,
        num_microbatches=2 * num_ranks,
        num_ranks=num_ranks,
        stages_per_rank=stages_per_rank,
    )
    ours, theirs = (setup.blocks(torch.float64, rank_device()) for _ in range(2))
    order = order_of(setup, torch_schedule(setup, theirs, rank))
    losses = by_spindle(setup, ours, World(rank, num_ranks, rank_device()), order, torch.float64)()
    expected_losses = by_torch(setup, theirs, rank, torch.float64)()
    own = [number for number in range(setup.num_blocks) if number // setup.blocks_per_stage % num_ranks == rank]
    gradients, expected = (
        {f"{number}.{name}": weight.grad for number in own for name, weight in blocks[number].named_parameters()}
        for blocks in (ours, theirs)
    )
    comparison = Comparison()
    comparison.add_tensors("gradient", gradients, expected)
    if rank == num_ranks - 1:  # which alone has losses
        names = [f"m{number}" for number in range(setup.num_microbatches)]
        comparison.add_losses([dict(zip(names, losses, strict=True))], [dict(zip(names, expected_losses, strict=True))])
    else:
        assert expected_losses == []
    return comparison


@pytest.mark.parametrize(("num_ranks", "stages_per_rank"), [(2, 1), (3, 1), (2, 2)])
def test_torchs_own_pipelines_give_the_same_gradients_in_the_same_order(pool, num_ranks, stages_per_rank):
    assert_close(pool.run(num_ranks, compare_with_torch, stages_per_rank), kinds=("loss", "gradient"))


def plan_text_in_passes(profile: Profile, name: str, degrees: Mapping[str, int]) -> str:
    """A random plan whose passes have an order of their own, seven of ten with backward in two parts."""
    plan = parse_plan(plan_text_named(profile, name, degrees), profile)
    choose = random.Random(name)
    position = {op.name: number for number, op in enumerate(profile.graph.metaops)}
    pieces = []
    for slot in plan.slots:
        recomputed = 0 if slot.op in plan.recompute else choose.randint(0, slot.num_layers)
        pieces.append(
            Piece(op=position[slot.op], num_layers=slot.num_layers, devices=slot.devices, recomputed=recomputed)
        )
    order = random_order(profile.graph, pieces, 0.7, choose)
    return format_plan(assemble_passes(profile, setting_of(plan, profile), "random", pieces, order))


def train_in_passes(rank: int, num_ranks: int, training: Training) -> Trained:
    """Half of every backward is for weights."""
    with mock.patch.object(Curve, "weight_time_s", lambda curve, count: 0.5 * curve.times_s(count)[1]):
        return train(rank, num_ranks, training)


def test_a_trainer_runs_passes_on_tensor_groups(pool):
    fits = [Fit(steps=2, degrees={"language": 2}, plan=f"plan {seed}") for seed in (1, 2)]
    assert_trained(pool.run(4, train_in_passes, sharing("own", *fits, plan_text=plan_text_in_passes)))


def test_random_layers_draw_the_same_however_they_are_kept():
    forward = Mix.forward

    def dropping(layer, x, *repeated):
        return forward(layer, nn.functional.dropout(x, 0.3), *repeated)

    modules, batches = model(1), microbatches(2, 3)
    made = pipeline(modules, batches)
    code = [
        replace(code, layers=tuple(replace(layer, is_random=True) for layer in code.layers))
        if isinstance(code, LayersCode)
        else code
        for code in made.code
    ]
    profile, world = profile_of(made.graph, 1), World(0, 1, torch.device("cpu"))
    gradients = []
    with mock.patch.object(Mix, "forward", dropping):
        for split, lean in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)):
            case = Case(seed=3, num_ranks=1, split=split, lean=lean)
            plan = random_plan(profile, {name: [0] * len(layers) for name, layers in modules.items()}, case, 0)
            axes = dict.fromkeys(batches, (None,) * 9)
            executor = Executor(lower(plan, profile), made.graph, code, made.parameters, axes, world)
            executor.step(0, batches, dict.fromkeys(batches, 1))
            gradients.append([parameter.grad for parameter in made.parameters if parameter.grad is not None])
    for repeated in gradients[1:]:
        torch.testing.assert_close(repeated, gradients[0])


# What crosses cuts.


def test_shapes_are_inferred_without_weights_and_once_for_equal_layers():
    modules = model(0)
    forms = ShapeInference([modules], torch.device("cpu"))
    batches = microbatches(3, 4)
    made = pipeline(modules, batches)
    for parameter in modules.parameters():
        parameter.data = torch.empty(0, dtype=torch.float64)  # another rank has it
    runs = []
    with mock.patch.object(Mix, "forward", lambda self, x, *others: (runs.append(1), (x * self.scale, *others))[1]):
        cuts = forms.of(made.graph, made.code, batches)
        seen = len(runs)
        assert forms.of(made.graph, made.code, batches) == cuts
        cached = len(forms._known)
        with mock.patch("spindle.run.shape_inference._MOST_KNOWN", 0):  # as after many batches of other shapes
            assert forms.of(made.graph, made.code, batches) == cuts
        assert (len(runs), len(forms._known)) == (2 * seen, cached)
        del runs[seen:]
    mixes = sum(
        isinstance(layer.run, Mix) for code in made.code if isinstance(code, LayersCode) for layer in code.layers
    )
    assert len(runs) == seen < mixes
    for number, op in enumerate(made.graph.metaops):
        for layer in range(1, op.num_layers + 1):
            assert ((number, layer) in cuts) == (op.call != "loss")
    last = [number for number, op in enumerate(made.graph.metaops) if op.call == "language"][-1]
    (leaf,) = cuts[last, 1].leaves
    assert leaf == TensorMeta((len(batches["m03"]["tokens"]), NUM_TOKENS), torch.float64, True)


def test_shapes_that_depend_on_values_are_not_inferred():
    modules = model(0)
    batches = microbatches(3, 1)
    made = pipeline(modules, batches)
    with mock.patch.object(Mix, "forward", lambda self, x, *others: (x[x.sum(-1) > 0], *others)):
        cuts = ShapeInference([modules], torch.device("cpu")).of(made.graph, made.code, batches)
    # Each call is known up to its first layer that looks at values, and so is nothing behind it.
    first = {op.call: number for number, op in reversed(list(enumerate(made.graph.metaops)))}
    alone = {number for call, number in first.items() if call not in ("language", "loss")}
    assert {number for number, _ in cuts} >= alone
    assert not any(isinstance(made.code[number].layers[position - 1].run, Mix) for number, position in cuts)
    assert (first["language"] in {number for number, _ in cuts}) == (not alone)


# A backward pass in two parts.


class Counting(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def gradients_of(run, inputs, parameters, apart):
    """Of inputs and parameters, and how many products backward took: in the first part, and in all."""
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    for parameter in parameters:
        parameter.grad = None
    outputs = run(*leaves)
    given = [torch.ones_like(output) * (place + 1) for place, output in enumerate(outputs)]
    taking = [leaf for leaf in leaves if leaf.requires_grad]
    with Counting() as counting:
        if apart:
            rest = run_input_part(outputs, given, taking)
            first = counting.count
            rest.run()
        else:
            first = 0
            pairs = [
                (output, gradient) for output, gradient in zip(outputs, given, strict=True) if output.requires_grad
            ]
            torch.autograd.backward(*zip(*pairs, strict=True))
    return [tensor.grad for tensor in (*leaves, *parameters)], first, counting.count


def cases():
    torch.manual_seed(0)
    first, second, third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    tied = nn.Linear(WIDTH, WIDTH, bias=False)
    tied.weight = first.weight
    biased = nn.Linear(WIDTH, WIDTH)
    biased.bias = first.bias
    table = nn.Embedding(5, WIDTH)
    say, mix = Say(table), Mix()
    arguments = {"behind": 1}
    return {
        "chain": (lambda x, y: (second(torch.tanh(first(x))),), (first, second)),
        "tied": (lambda x, y: (tied(torch.tanh(first(x))) + third(y),), (first, third)),
        "shared as it is": (lambda x, y: (biased(torch.tanh(first(x))), first.bias.exp() * 2), (first, biased)),
        "mixed": (lambda x, y: (mix(x)[0] * y, mix(y)[0]), (mix,)),
        "views and what passes through": (lambda x, y: (first(x).view(-1), y, x[:1]), (first,)),
        "an output of weights alone": (
            lambda x, y: (first.weight * 2, second(x), third.weight + first.weight),
            (first, second, third),
        ),
        "nothing of inputs": (lambda x, y: (table(torch.tensor([1, 2])),), (table,)),
        "no weights": (lambda x, y: (x * y, torch.tanh(x)), ()),
        "an unused input": (lambda x, y: (say(x, None, arguments)[0],), (table,)),
        "over a copy": (lambda x, y: (Shift()(x.clone())[0],), ()),
    }


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", cases())
def test_two_parts_make_the_gradients_of_one(name, frozen):
    run, modules = cases()[name]
    inputs = [torch.randn(3, WIDTH), torch.randn(3, WIDTH)]
    inputs[0].requires_grad_()
    inputs[1].requires_grad_(not frozen)
    parameters = list({id(parameter): parameter for module in modules for parameter in module.parameters()}.values())
    whole, _, products = gradients_of(run, inputs, parameters, apart=False)
    parts, first, in_parts = gradients_of(run, inputs, parameters, apart=True)
    for ours, theirs in zip(parts, whole, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)
    assert in_parts == products
    if name == "chain":
        assert first == products / 2
