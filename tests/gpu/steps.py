"""What has not been measured on a GPU yet, or not since the code changed; the most telling first, for `lease.py`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

PYTEST = "python -m pytest -q -o addopts="
EQUALITY = "python tests/gpu/all.py --results {results}/gpu_tests.{name}.jsonl --budget {seconds}"
LANES = "python benchmarks/lanes.py --output {results}/lanes.json --budget-s {seconds}"
CALL_MINUTES = 8.75  # of nine, without packing
COMPILED_LOOPS = "compiled-loops"  # once on every machine
SPINDLE = "python -m spindle.cli"
COLOCATE = "benchmarks/virtual/colocate.py"
RANDOM_PLANS = ",".join(f"random-{seed}-passes" for seed in range(6))
SMALL_LANES = "python benchmarks/lanes.py --output {results}/lanes_small.json --small --only pair"


def side_by_side(*commands: str) -> str:
    """A command that runs others at the same time, and fails if one of them does."""
    begin = " ".join(f'{command} & jobs="$jobs $!";' for command in commands)
    return f"bash -c '{begin} for job in $jobs; do wait $job || failed=1; done; exit $failed'"


def compile_only(*cells: str) -> str:
    """Fill the cache of torch.compile, in one process for each cell and mode."""
    command = "python benchmarks/lanes.py --compile-only --only {} --variants {}"
    return side_by_side(*(command.format(*each) for each in product(cells, ("plain-overhead", "plain-compiled"))))


COMPILED_LOOPS_COMMAND = side_by_side(
    f"{SPINDLE} compare clip-4 --cluster a800x8 --evaluations 20",
    f"{SPINDLE} plan omni-a --planner colocate --microbatches 8",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command, run in the root of the repository, that goes on where its files end when it is run again. In it,
    `{results}` is the folder of results, `{seconds}` what is left to the step and `{name}` its name. It has the GPU to
    itself if it is `alone`: others, which measure nothing, run two at a time. With less than `least_minutes` it would
    end before its first result, and is left for the next call."""

    name: str
    command: str
    minutes: float
    alone: bool
    answers: str
    rehearsal: str  # the smallest form that a CPU runs
    least_minutes: float = 0.5
    begins_with: str = ""  # a file of the repository that its file of results begins with


STEPS = (
    Step(
        name=COMPILED_LOOPS,
        command=COMPILED_LOOPS_COMMAND,
        minutes=1,
        alone=False,
        answers="nothing: later steps find the planners' loops compiled",
        rehearsal=COMPILED_LOOPS_COMMAND,
    ),
    Step(
        name="measured-graphs",
        command=f"{PYTEST} tests/gpu/test_measured_graphs.py",
        minutes=1,
        alone=False,
        answers="copies of large layers do not wait for each other (passes at 0a0371b)",
        rehearsal=f"{PYTEST} tests/gpu/test_measured_graphs.py",
    ),
    Step(
        name="lanes-pair",
        command=f"{LANES} --only pair --variants sequential-passes,weights-passes",
        minutes=1.5,
        alone=True,
        answers="`pair` (1.33 asked, 1.26 to 1.32 measured); whether lanes run at this commit",
        rehearsal=f"{SMALL_LANES} --variants sequential-passes,weights-passes",
    ),
    Step(
        name="colocate-4",
        command=f"{SPINDLE} launch --virtual-devices 4 {COLOCATE} --budget-s {{seconds}} "
        "--output {results}/colocate_4.json",
        minutes=4,
        alone=True,
        answers="as four devices: predicted against measured (17 % too fast before), over `pipeline` and `stage-0`",
        rehearsal=f"{SPINDLE} launch -n 2 {COLOCATE} --small --steps 2 --cells 5:5/colocate,9:1/stage-0 "
        "--output {results}/colocate_small.json",
        least_minutes=2,
    ),
    Step(
        name="fleet-estimates",
        command="python benchmarks/fleet_estimates.py --gpu 1,2,4,8 --budget-s {seconds} "
        "-o {results}/fleet_estimates.json",
        minutes=4,
        alone=True,
        answers="planned against measured on 1, 2, 4, 8 devices",
        rehearsal="python benchmarks/fleet_estimates.py --gloo 1 --jobs towers --budget-s 1 "
        "-o {results}/fleet_estimates_small.json",
        least_minutes=1.5,
    ),
    Step(
        name="lanes-figures",
        command=f"{LANES} --only clip-4-16,clip-4-2,pair --variants sequential-passes,weights-passes,{RANDOM_PLANS}",
        minutes=5,
        alone=True,
        answers="CLIP-4 at 16 samples (1.08 asked, 1.07 to 1.10 measured); 18 random plans, predicted beside measured "
        "(14 are, with the predictions of before)",
        rehearsal=f"{SMALL_LANES} --variants random-2-passes",
        least_minutes=1,
    ),
    Step(
        name="equality-nccl",
        command=f"{EQUALITY} --backend nccl --jobs 3 --ranks 6 --only colocated,data-parallel,features",
        minutes=3,
        alone=False,
        answers="equality under NCCL at this commit, colocated steps first",
        rehearsal=f"{EQUALITY} --backend gloo --jobs 2 --only features --match clipped_by",
        least_minutes=1,
    ),
    Step(
        name="plain-compile",
        command=compile_only("clip-4-2", "clip-4-4"),
        minutes=3,
        alone=False,
        answers="nothing: `lanes-plain` finds its towers compiled (and tuned while tests ran beside)",
        rehearsal="python benchmarks/lanes.py --compile-only --small --only clip-4-2 --variants plain-overhead",
        least_minutes=1,
    ),
    Step(
        name="colocate-8",
        command=f"{SPINDLE} launch --virtual-devices 8 {COLOCATE} --budget-s {{seconds}} "
        "--output {results}/colocate_8.json",
        minutes=5,
        alone=True,
        answers="the same as eight devices; sequence groups on and off",
        rehearsal=f"{SPINDLE} launch -n 2 {COLOCATE} --small --steps 2 --cells 1:9/pipeline,9:1/upfront/off/1 "
        "--output {results}/colocate_small.json",
        least_minutes=2,
    ),
    Step(
        name="lanes-plain",
        command=f"{LANES} --only clip-4-2,clip-4-4 --variants weights,plain,plain-overhead,plain-compiled,compiled",
        minutes=3,
        alone=True,
        answers="over the best plain PyTorch (1.3 asked); peaks of memory",
        rehearsal=f"{SMALL_LANES} --variants weights,plain",
        least_minutes=1,
    ),
    Step(
        name="lanes-early-release",
        command="python tests/gpu/lanes.py --kinds weight --runs 9 --budget-s {seconds}",
        minutes=1.5,
        alone=False,
        answers="whether memory of weight gradients that is released early is noticed in each run now (0 of 4 before), "
        "and lanes pass when each graph overwrites the free memory of its pool",
        rehearsal="python tests/gpu/lanes.py --kinds weight --runs 1 --budget-s 120",
        least_minutes=1,
    ),
    Step(
        name="bfloat16",
        command=f"{EQUALITY} --backend ipc --only features --match test_layers_run_in_bfloat16",
        minutes=1,
        alone=False,
        answers="one rank of virtual devices captured no graph at 874d3d8; why is in the message now",
        rehearsal=f"{EQUALITY} --backend gloo --only features --match test_layers_run_in_bfloat16.1",
    ),
    Step(
        name="lanes-qwen-val",
        command=f"{LANES} --only qwen-val-1,qwen-val-4,clip-10-4 --variants sequential,weights",
        minutes=2,
        alone=True,
        answers="whether sums of shared gradients explain what was predicted 12 % too fast; none may be slower",
        rehearsal=f"{SMALL_LANES} --variants sequential,weights",
    ),
    Step(
        name="equality-ipc",
        command=f"{EQUALITY} --backend ipc --jobs 4 --ranks 6 "
        "--only colocated,data-parallel,features,resuming,composites",
        minutes=8,
        alone=False,
        answers="equality on virtual devices at this commit",
        rehearsal=f"{EQUALITY} --backend gloo --jobs 2 --only data-parallel --match alone_leaves_the_weights",
        least_minutes=1,
    ),
    Step(
        name="equality-nccl-rest",
        command=f"{EQUALITY} --backend nccl --jobs 4 --ranks 6 --only resuming,composites,pipelines",
        minutes=8,
        alone=False,
        answers="and the rest under NCCL",
        rehearsal=f"{EQUALITY} --backend gloo --jobs 2 --only resuming --match bit_for_bit",
        least_minutes=1,
    ),
    Step(
        name="fleet-gloo",
        command="python benchmarks/fleet_estimates.py --gloo 4,2,1 --budget-s {seconds} -o {results}/fleet_gloo.json",
        minutes=3,
        alone=True,
        answers="planned against measured on gloo with 16 cores",
        rehearsal="python benchmarks/fleet_estimates.py --help",
        least_minutes=1.5,
    ),
    Step(
        name="contention-bursts",
        command="python benchmarks/contention.py -o {results}/contention.json --budget-s {seconds}",
        minutes=1,
        alone=True,
        answers="whether contention timed in longer bursts predicts cells above 550 W (7 % too fast today)",
        rehearsal="python benchmarks/contention.py --help",
    ),
    Step(
        name="sequence-groups-equal",
        command=f"{EQUALITY} --backend ipc --jobs 5 --only colocated --match 'sequence_groups_give.*\\[[34]-'",
        minutes=1,
        alone=False,
        answers="sequence groups on virtual devices with 3 and 4 ranks, Qwen2-VL's encoder",
        rehearsal=f"{EQUALITY} --backend gloo --only colocated --match 'sequence_groups_give.*\\[2-'",
    ),
    Step(
        name="lanes-quotas",
        command=f"{LANES} --only clip-4-8,clip-4-16 --variants quotas-passes",
        minutes=2,
        alone=True,
        answers="quotas of SMs (`pair`: 0.87 of lanes that share, `clip-4-2`: 0.54, predicted 0.81)",
        rehearsal=f"{SMALL_LANES} --variants lanes-passes",
        least_minutes=1,
    ),
    Step(
        name="quotas",
        command="python tests/gpu/quotas.py --first 19 --runs 12 --budget-s {seconds}",
        minutes=1,
        alone=True,
        answers="quotas under random delays: 19 runs so far; its partitions are timed",
        rehearsal="python tests/gpu/quotas.py --help",
    ),
    Step(
        name="lanes-ranks",
        command="python tests/gpu/lanes.py --ranks 2,3 --first 52 --runs 60 --budget-s {seconds}",
        minutes=5,
        alone=False,
        answers="lanes of several ranks under random delays: 44 runs so far",
        rehearsal="python tests/gpu/lanes.py --help",
        least_minutes=1,
    ),
    Step(
        name="lanes-one-rank",
        command="python tests/gpu/lanes.py --first 29 --runs 40 --budget-s {seconds}",
        minutes=3,
        alone=False,
        answers="lanes of one rank: 18 runs so far with memory of graphs filled with NaN (15 exact; seeds 29, 33, 35 "
        "by their rounding, to be run again with the tolerance for it)",
        rehearsal="python tests/gpu/lanes.py --first 36 --runs 1 --budget-s 60",
    ),
    Step(
        name="one-gpu-compile",
        command="python benchmarks/one_gpu.py --only 'small towers,dinov2-l + modernbert-l,llama-1b' --compile-only",
        minutes=6,
        alone=True,
        answers="nothing: torch's cache of compiled code (100 to 160 s a case)",
        rehearsal="python benchmarks/one_gpu.py --help",
        least_minutes=3,
    ),
    Step(
        name="one-gpu",
        command="python benchmarks/one_gpu.py --only 'small towers,dinov2-l + modernbert-l,llama-1b' "
        "-o {results}/one_gpu_cases.json --steps 12 --case-s 90",
        minutes=5,
        alone=True,
        answers="one process beside `torch.compile`",
        rehearsal="python benchmarks/one_gpu.py --help",
        least_minutes=2,
    ),
    Step(
        name="alternating",
        command=f"{SPINDLE} launch --virtual-devices 4 benchmarks/virtual/alternating.py "
        "--output {results}/virtual_alternating.json",
        minutes=3,
        alone=True,
        answers="small, changing work: predicted and measured",
        rehearsal="python benchmarks/virtual/alternating.py --help",
        least_minutes=2,
    ),
    Step(
        name="pipeline",
        command=f"{SPINDLE} launch --virtual-devices 4 benchmarks/virtual/pipeline.py "
        "--output {results}/virtual_pipeline.json",
        minutes=4,
        alone=True,
        answers="launch-bound pipelines",
        rehearsal=f"{SPINDLE} launch -n 2 benchmarks/virtual/pipeline.py --small --steps 4 "
        "--output {results}/virtual_pipeline_small.json",
        least_minutes=2,
    ),
    Step(
        name="virtual",
        command=f"{SPINDLE} launch --virtual-devices 8 benchmarks/virtual/run.py --output {{results}}/virtual.json "
        "--only clip-4-16,clip-7-16,clip-10-16 --budget-s {seconds}",
        minutes=10,
        alone=True,
        answers="cells of `virtual.md`",
        rehearsal=f"{SPINDLE} launch -n 2 benchmarks/virtual/run.py --small --only clip-4-16 --budget-s 30 "
        "--output {results}/virtual_small.json",
        least_minutes=2,
    ),
)


def table() -> str:
    """The steps as the table of README.md."""
    rows = [
        f"| {step.minutes:g} | {step.name} | {'yes' if step.alone else ''} | "
        f"`{step.command.replace('python -m spindle.cli', 'spindle').replace('|', chr(92) + '|')}` | {step.answers} |"
        for step in STEPS
    ]
    return "\n".join(["| minutes | step | alone | command | what it answers |", "|---|---|---|---|---|", *rows])


def calls(call_minutes: float = CALL_MINUTES) -> list[list[tuple[str, float]]]:
    """The steps of each call, with the minutes that they get, if each takes as long as it says. A step that a call ends
    goes on in the next one."""
    left = {step.name: step.minutes for step in STEPS}
    made: list[list[tuple[str, float]]] = []
    while left:
        free, call = call_minutes, list[tuple[str, float]]()
        while fitting := [
            step for step in STEPS if step.name in left and free >= min(step.least_minutes, left[step.name])
        ]:
            # Two that measure nothing run side by side.
            beside = [step for step in fitting[:2] if not step.alone]
            longest = 0.0
            for step in fitting[:1] if fitting[0].alone else beside:
                minutes = min(left[step.name], free)
                call.append((step.name, minutes))
                longest = max(longest, minutes)
                left[step.name] -= minutes
                if not left[step.name]:
                    del left[step.name]
            free -= longest
        made.append(call)
    return made


def calls_table(count: int = 3) -> str:
    """The first calls, as the table of README.md."""
    rows = [
        f"| {number} | {', '.join(f'{name} {minutes:g}' for name, minutes in call)} |"
        for number, call in enumerate(calls()[:count], start=1)
    ]
    return "\n".join(["| call | steps, with minutes |", "|---|---|", *rows])
