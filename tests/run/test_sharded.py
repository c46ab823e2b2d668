"""An optimizer whose state is sharded over the devices that hold each parameter: planned, simulated, and run with the
numbers of one process."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import small  # noqa: E402
from spindle.artifact import artifact_from_json, artifact_text  # noqa: E402
from spindle.errors import ProgramError  # noqa: E402
from spindle.plan import Plan, format_plan, parse_plan  # noqa: E402
from spindle.planners import PlanOptions, make_plan  # noqa: E402
from spindle.profile import state_bytes  # noqa: E402
from spindle.program import (  # noqa: E402
    Forward,
    GatherParameters,
    Memory,
    OptimizerStep,
    SyncGradients,
    flat_pieces,
    format_program,
    lower,
    parse_program,
    verify,
)
from spindle.report.trace import instruction_name  # noqa: E402
from spindle.run.gradients import Gradients  # noqa: E402
from spindle.run.shards import Flat  # noqa: E402
from spindle.simulate import simulate  # noqa: E402
from spindle.train.trial import why_not_sharded  # noqa: E402
from sweeps import chosen  # noqa: E402
from training_cases import Scaled, by_dimensions, train_named  # noqa: E402
from trainings import Fit, adamw, assert_trained, sgd, train, training_of  # noqa: E402

# Planned and simulated.

SHARDED = "# optimizer sharded\n"
TEXT = "x/a#0[0:4]*4@0-1\nx/b#1[0:4]*2@0-3\nx/b#1[0:4]*2@2"


def two_modules(**named):
    return small.workload_profile({"x": ["a", "b"]}, num_devices=4, **named)


def test_plans_and_programs_say_so_in_text_and_in_files():
    profile = two_modules()
    plan = parse_plan(SHARDED + TEXT, profile)
    assert plan.shard_optimizer
    assert parse_plan(format_plan(plan), profile) == plan
    assert not parse_plan(TEXT, profile).shard_optimizer
    program = lower(plan, profile)
    text = format_program(program, profile)
    assert " G" in text
    assert format_program(parse_program(text, profile), profile) == text
    written = json.loads(artifact_text("plan", plan))
    assert artifact_from_json(written, "it", "plan", Plan) == plan
    del written["shard_optimizer"]  # as in files of before
    assert artifact_from_json(written, "it", "plan", Plan) == replace(plan, shard_optimizer=False)


def test_every_bucket_is_gathered_first_and_in_the_order_of_use():
    profile = two_modules()
    program = lower(parse_plan(SHARDED + TEXT, profile), profile)
    verify(program, profile)
    sync = [program.instructions[number] for number in program.lanes[2].of_rank(0).tolist()]
    gathers = [instruction.bucket for instruction in sync if isinstance(instruction, GatherParameters)]
    assert sync[: len(gathers)] == [GatherParameters(bucket) for bucket in gathers]
    assert sorted(gathers) == sorted(
        instruction.bucket for instruction in sync if isinstance(instruction, SyncGradients)
    )
    assert len(gathers) >= 2
    firsts = [min(program.buckets[bucket].parameters) for bucket in gathers]
    assert firsts == sorted(firsts)
    assert "gather" in instruction_name(GatherParameters(0), program)


def test_verify_finds_a_forward_that_would_run_before_its_gather():
    profile = two_modules()
    program = lower(parse_plan(SHARDED + "x/a#0[0:4]*4@0-1\nx/b#1[0:4]*4@0-1", profile), profile)
    verify(program, profile)
    # Gradients first, which wait for backward, and so for that forward.
    lines = [
        " ".join([*line.split()[:3], *reversed(line.split()[3:])]) if " sync " in line else line
        for line in format_program(program, profile).splitlines()
    ]
    with pytest.raises(ProgramError, match=r"deadlock[\s\S]* F0"):
        verify(parse_program("\n".join(lines) + "\n", profile), profile)


def test_verify_finds_a_bucket_that_is_not_gathered():
    profile = two_modules()
    program = lower(parse_plan(SHARDED + TEXT, profile), profile)
    with pytest.raises(ProgramError, match="bucket 0 needs no gather of its parameters"):
        verify(replace(program, plan=replace(program.plan, shard_optimizer=False)), profile)
    unsharded = lower(parse_plan(TEXT, profile), profile)
    with pytest.raises(ProgramError, match="bucket 0 needs one gather of its parameters"):
        verify(replace(unsharded, plan=replace(unsharded.plan, shard_optimizer=True)), profile)


def test_devices_hold_and_update_their_part_of_the_optimizers_state():
    profile = two_modules()
    numerics, elements = profile.graph.numerics, 1_000_000
    whole, sharded = (Memory(lower(parse_plan(text, profile), profile), profile) for text in (TEXT, SHARDED + TEXT))
    weights = elements * (numerics.parameter_bytes + numerics.gradient_bytes)
    # a is on 0 and 1; two layers of b on all four, two on 2 alone.
    assert whole.static_bytes[0] == 6 * (weights + elements * numerics.optimizer_bytes)
    assert sharded.static_bytes[0] == 6 * weights + elements * (4 // 2 + 2 / 4) * numerics.optimizer_bytes
    assert sharded.static_bytes[2] == 4 * weights + elements * (2 / 4 + 2) * numerics.optimizer_bytes
    assert sharded.update_bytes[0] == pytest.approx(elements * (4 / 2 + 2 / 4) * numerics.update_bytes)
    assert state_bytes(profile.graph, 0, num_owners=3) == weights + 333_334 * numerics.optimizer_bytes


def test_a_gather_and_a_sum_into_parts_are_each_half_a_sum_and_forward_waits():
    profile = two_modules(elements=100_000_000)
    both = "x/a#0[0:4]*4@0-3\nx/b#1[0:4]*4@0-3"
    times = {}
    for text in (both, SHARDED + both):
        timeline = simulate(lower(parse_plan(text, profile), profile), profile)
        spans = list(zip(timeline.instruction.tolist(), timeline.start.tolist(), timeline.end.tolist(), strict=True))
        for kind in (SyncGradients, GatherParameters, OptimizerStep, Forward):
            times[text, kind] = [
                (start, end) for number, start, end in spans if isinstance(timeline.instructions[number], kind)
            ]

    def length(text, kind):
        return sum(end - start for start, end in times[text, kind])

    assert length(SHARDED + both, SyncGradients) == pytest.approx(length(both, SyncGradients) / 2, rel=0.15)
    assert length(SHARDED + both, GatherParameters) == pytest.approx(length(both, SyncGradients) / 2, rel=0.15)
    assert length(SHARDED + both, OptimizerStep) == pytest.approx(length(both, OptimizerStep) / 4, rel=0.01)
    gathers = times[SHARDED + both, GatherParameters]
    assert min(start for start, _ in times[SHARDED + both, Forward]) >= min(end for _, end in gathers)


@pytest.mark.parametrize("planner", ["wavefront", "sequential"])
def test_the_planner_shards_where_that_is_faster_or_memory_asks_for_it(planner):
    tasks = {"x": ["a", "b"]}
    free = small.workload_profile(tasks, num_devices=4, elements=20_000_000)
    times = [make_plan(free, planner, PlanOptions(shard_optimizer=sharded)).makespan_s for sharded in (False, True)]
    assert make_plan(free, planner).shard_optimizer == (times[1] < times[0])
    # 8 layers of 20 million parameters are 2.56 GB where all is replicated, 1.12 GB with the optimizer over 4.
    profile = small.workload_profile(tasks, num_devices=4, elements=20_000_000, memory_bytes=1_900_000_000)
    plan = make_plan(profile, planner)
    assert plan.shard_optimizer
    assert plan.num_rounds == 1
    assert not plan.recompute
    assert not make_plan(profile, planner, PlanOptions(shard_optimizer=False)).shard_optimizer
    assert make_plan(
        small.workload_profile(tasks, num_devices=4), planner, PlanOptions(shard_optimizer=True)
    ).shard_optimizer


# Where things stand.


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_parts_are_equal_and_hold_every_element_once(sizes, num_parts):
    part_size, pieces = flat_pieces(sizes, num_parts)
    assert part_size * num_parts >= sum(sizes)
    places = [
        (piece.part, piece.begin + offset)
        for some in pieces
        for piece in some
        for offset in range(piece.last - piece.first)
    ]
    assert places == [divmod(number, part_size) for number in range(sum(sizes))]
    assert all(0 <= part < num_parts for part, _ in places)


def test_a_rank_sees_the_flags_and_the_sum_of_its_part():
    bucket = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(3))]
    flat = Flat([0, 1, 2], bucket, (4, 7), 7)
    flat.attach()
    shapes = [None if owned is None else tuple(owned.shape) for owned in flat.owned]
    assert shapes == [None, (), (3,)]
    gradients = Gradients([bucket], {0: flat})
    bucket[0].grad, bucket[2].grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 6.0, 7.0])
    rows = gradients.fill_bucket(0).view(2, -1)
    assert rows.shape[1] % 16 == 0  # aligned, for vectorized sums
    assert rows[:, :4].tolist() == [[1, 2, 3, 4], [0, 5, 6, 7]]
    assert rows[:, -3:].tolist() == [[1, 0, 1], [1, 0, 1]]
    assert all(parameter.grad is None for parameter in bucket)
    gradients.set_from_bucket(0, gradients.num_contributors(0))
    assert flat.owned[1].grad is None
    assert flat.owned[2].grad.tolist() == [5, 6, 7]
    with torch.no_grad():
        flat.owned[2].add_(1)
    assert bucket[2].tolist() == [1, 1, 1]
    flat.release()
    assert bucket[2].untyped_storage().nbytes() == 12


def test_zeros_for_what_no_gradient_reaches_are_none_in_every_part():
    bucket = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))]
    flat = Flat([0, 1], bucket, (0, 1), 0)
    flat.attach()
    gradients = Gradients([bucket], {0: flat})
    for parameter in bucket:
        parameter.grad = torch.zeros(4)
    gradients.fill_bucket(0, {id(bucket[0])})
    assert gradients.num_contributors(0) == [0, 1]


def test_a_parameter_over_several_parts_has_a_place_of_its_own():
    parameter = nn.Parameter(torch.zeros(6))
    flat = Flat([0], [parameter], (0, 1), 1)
    flat.attach()
    gradients = Gradients([[parameter]], {0: flat})
    place = gradients.grad_buffer(parameter)
    assert place.shape == (6,)
    parameter.grad = place.copy_(torch.arange(6))
    rows = gradients.fill_bucket(0).view(2, -1)
    assert rows[:, :3].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert rows[:, -1].tolist() == [1, 1]


# Which optimizers.


def named(*shapes):
    return [(f"module.{number}", nn.Parameter(torch.zeros(shape))) for number, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    "make",
    [
        by_dimensions,
        lambda some: torch.optim.SGD([parameter for _, parameter in some], lr=0.1, momentum=0.9, nesterov=True),
        lambda some: torch.optim.RMSprop([parameter for _, parameter in some], lr=1e-6),
        lambda some: torch.optim.NAdam([parameter for _, parameter in some]),
    ],
)
def test_optimizers_that_update_each_element_by_itself_are_sharded(make):
    assert why_not_sharded(make, named((30, 20), (7,), (), (1, 1), (3, 2, 2))) is None


@pytest.mark.parametrize(
    "make",
    [
        Scaled,
        lambda some: torch.optim.Adafactor([parameter for _, parameter in some]),
        lambda some: torch.optim.SGD([]),
    ],
)
def test_optimizers_that_couple_elements_are_not_sharded(make):
    assert why_not_sharded(make, named((30, 20), (7,))) is not None


# Run.


@pytest.mark.parametrize(
    ("seed", "num_ranks", "optimizer"),
    chosen([(3, 4, adamw), (4, 2, sgd), (8, 3, sgd)], (12, 2, adamw), (13, 4, sgd), (15, 3, adamw)),
)
def test_random_plans_leave_the_weights_that_plain_pytorch_does(pool, seed, num_ranks, optimizer):
    assert_sharded(pool, num_ranks, training_of(f"random {seed}", optimizer=optimizer), f"plan {seed}")


@pytest.mark.parametrize("kind", ["experts", "lookup", "unused"])
def test_sharded_trainings_match_where_gradients_are_missing_and_layers_recomputed(pool, kind):
    training = training_of(f"{kind} tokens", optimizer=adamw, fits=(Fit(steps=2), Fit(steps=2)))
    assert_sharded(pool, 3, training, "plan 2 recomputed")


def test_sharded_trainings_match_with_short_batches_and_weights_of_their_own(pool):
    assert_sharded(pool, 3, training_of("random 13", short_rows=1, own_weights=True), "plan 13")


def assert_sharded(pool, num_ranks, training, plan):
    answers = pool.run(num_ranks, train, training, plan + " sharded")
    assert_trained(answers)
    assert all(answer.sharded for answer in answers)


def trained(pool, num_ranks, name, plan, limit=1e-9, shards=True):
    answers = pool.run(num_ranks, train_named, name, plan, shard_optimizer=shards)
    assert_trained(answers, limit)
    return answers


@pytest.mark.parametrize(
    ("name", "num_ranks", "plan"),
    chosen(
        [
            ("by dimensions", 2, "plan 3"),
            ("tied", 3, "plan 4"),
            ("accumulated, captured", 2, "plan 3"),
            ("sampled, accumulated", 3, "plan 3"),
            ("frozen", 3, "wavefront"),
            ("mixed, clipped and accumulated", 2, "wavefront"),
        ],
        ("groups and schedule", 3, "plan 5"),
        ("clipped", 3, "plan 2"),
        ("accumulated", 3, "plan 6"),
        ("sampled", 2, "plan 8"),
        ("sampled, captured", 2, "plan 3"),
    ),
)
def test_features_of_training_scripts_work_with_a_sharded_optimizer(pool, name, num_ranks, plan):
    assert all(result.sharded for result in trained(pool, num_ranks, name, plan))


def test_layers_run_in_bfloat16(pool):
    trained(pool, 2, "autocast", "plan 3", limit=2e-2)


def test_optimizer_state_is_carried_from_plan_to_plan(pool):
    trained(pool, 3, "carried", "plan 1", shards=None)


def test_every_element_of_the_state_is_on_one_rank(pool):
    whole = trained(pool, 1, "by dimensions", "plan 0", shards=None)[0].state_elements
    elements = [answer.state_elements for answer in trained(pool, 3, "by dimensions", "wavefront")]
    assert sum(elements) == whole
    assert max(elements) < 0.6 * whole


def test_an_optimizer_that_couples_elements_is_not_sharded_and_a_notice_says_so(pool):
    for result in trained(pool, 2, "not by element", "plan 3"):
        assert not result.sharded
        assert any(
            "the optimizer is not sharded: it does not update each element of" in text for text in result.notices
        )
