"""From the arguments of a verb to a profile, a plan, and the planners that take it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from spindle.artifact import artifact_from_json, read_json_file, read_text_file
from spindle.cli.script import script_words, workload_of_script
from spindle.cli.terminal import printable
from spindle.cluster import MAX_DEVICES, Cluster, DeviceKind, Island, Link, cluster_named, read_cluster_file
from spindle.display import count_of
from spindle.errors import InputError, PlanError, ProfileError, SpindleError
from spindle.graph import metagraph_of
from spindle.plan import Plan, check, is_text_file, ops_in, read_plan, spans
from spindle.planners import (
    PLANNERS,
    Planner,
    PlanOptions,
    choose_colocation,
    choose_layout,
    pipeline_bound_s,
    planner_of,
    planners_of,
)
from spindle.profile import Profile, Roofline, abstract_profile, roofline_profile
from spindle.recipes import MODELS, RECIPES, BatchOptions, Step, step_of
from spindle.workload import Workload

MAX_NAME = 500  # letters
# What --json prints in addition to a plan: which effects its times leave out, and the history of the search.
REMARKS = frozenset({LEAVES_OUT := "leaves_out", SEARCH := "search"})


def load_step(
    given: str,
    num_devices: int | None,
    cluster_name: str | None,
    batch: BatchOptions = BatchOptions(),  # noqa: B008
) -> Step:
    """The step of an input: a recipe's (for a multimodal model, of one batch), or that of a profile."""
    if given in MODELS:
        model = MODELS[given]
        has_cluster = num_devices is not None or cluster_name is not None
        cluster = _real_cluster(given, num_devices, cluster_name) if has_cluster else model.cluster
        return step_of(model, cluster, batch)
    options = {
        "--microbatches": batch.num_microbatches,
        "--batch-seed": batch.seed,
        "--samples": batch.samples,
        "--mix": batch.mix,
    }
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} is for multimodal models ({', '.join(MODELS)}); leave it out for {given}")
    if given in RECIPES:
        return step_of(RECIPES[given], _real_cluster(given, num_devices, cluster_name))
    return _load_step(given, num_devices, cluster_name)


def load_profile(given: str, num_devices: int | None, cluster_name: str | None) -> Profile:
    """The profile of an input; refuses a multimodal model, whose profile depends on the batch."""
    if given in MODELS:
        raise InputError(
            f"{given} is a multimodal model, planned batch by batch; "
            "the verbs plan, compare, bound and simulate take it"
        )
    return load_step(given, num_devices, cluster_name).whole


def refuse_planner(planner: str, given: str, step: Step) -> None:
    """Refuse a planner that does not exist, or does not plan this kind of step."""
    names = planners_of(step.is_pipeline)
    if planner not in PLANNERS:
        raise InputError(f"no planner is called {planner!r}; there are {', '.join(names)}")
    if planner not in names:
        what = "plans no pipelines" if step.is_pipeline else "plans pipelines only"
        raise InputError(f"planner {planner!r} {what}; for {given} there are {', '.join(names)}")


def left_out(leaves_out: Iterable[str], in_full: bool) -> list[str]:
    """What the times of a profile leave out: one line per effect, or one line with their number."""
    texts = list(leaves_out)
    if in_full or len(texts) == 1:
        return [f"Left out: {text}." for text in texts]
    return [f"{count_of(len(texts), 'effect')} left out of these times; --assumptions lists them."] if texts else []


def _load_step(given: str, num_devices: int | None, cluster_name: str | None) -> Step:
    """A measured profile, an abstract graph with its own times, or a roofline of a workload or a training script."""
    if (words := script_words(given)) is not None:
        if not Path(words[0]).exists():
            raise InputError(f"{words[0]}: no such file")
        cluster = _real_cluster(given, num_devices, cluster_name)  # before the script runs
        workload = workload_of_script(*words)
        _refuse_unprintable(words[0], _names(workload))
        return _step_of_workload(words[0], workload, cluster)
    path = Path(given)
    if not path.exists() and path.suffix != ".json":
        raise InputError(
            f"{given}: no such file, and no recipe of that name; recipes: {', '.join([*RECIPES, *MODELS])}"
        )
    data = read_json_file(path)
    if "spindle" not in data and "ops" in data:
        name = printable(path.stem.replace("\n", " "))
        profile = abstract_profile(data, any_cluster(num_devices, cluster_name), given, name=name)
        names = [(f"ops[{position}].name", op.name) for position, op in enumerate(profile.graph.metaops)]
        _refuse_unprintable(given, [*names, *(("task", task) for task in profile.graph.tasks)])
        return Step(profile=lambda sizes: profile)
    if data.get("spindle") == "profile":
        measured = _measured(data, given, num_devices, cluster_name)
        return Step(profile=lambda sizes: measured)
    workload = _workload(data, given)
    _refuse_unprintable(given, _names(workload))
    return _step_of_workload(given, workload, _real_cluster(given, num_devices, cluster_name))


def machines_of_plan(
    path: Path, given: str, num_devices: int | None, cluster_name: str | None
) -> tuple[int | None, str | None]:
    """--devices and --cluster for an input and its plan; those of the plan by default."""
    if num_devices is not None or cluster_name is not None or given in MODELS or is_profile(given):
        return num_devices, cluster_name
    data = read_json_file(path)
    if data.get("spindle") != "plan":
        raise InputError(f"{path}: expected a plan that `spindle plan` wrote")
    name, count = data.get("cluster"), data.get("num_devices")
    if isinstance(count, int) and 0 < count <= MAX_DEVICES and name == nameless_cluster(count).name:
        return count, None
    with suppress(SpindleError):
        cluster_named(str(name))
        return None, str(name)
    return None, None


def is_profile(given: str) -> bool:
    """Whether an input is a measured profile, which brings its machines."""
    try:
        return Path(given).suffix == ".json" and read_json_file(Path(given)).get("spindle") == "profile"
    except InputError:
        return False


def planner_input(step: Step, planner: Planner, options: PlanOptions) -> tuple[Profile, PlanOptions]:
    """What a planner is given of a step. For pipelines: the bound over all ways to split microbatches, and where the
    planner splits them, the profile and the layout that are best for this batch."""
    if step.pipeline_ranks is None:
        return step.whole, options
    profiles, in_parts = step.split_profiles(), step.part_profiles()
    options = replace(options, bound_s=pipeline_bound_s([*profiles, *in_parts], step.pipeline_ranks))
    if planner.takes_parts:
        profile, layout = choose_colocation(planner.name, in_parts, profiles, step.pipeline_ranks)
        return profile, replace(options, layouts=(layout,))
    if not planner.splits_microbatches:
        return step.whole, options
    profile, layout = choose_layout(profiles, step.pipeline_ranks)
    return profile, replace(options, layouts=(layout,))


def with_sizes(plan: Plan, step: Step, profile: Profile) -> Plan:
    """The plan, whose settings say how microbatches are split."""
    sizes = next((sizes for sizes in step.sizes if sizes and step.profile(sizes) is profile), None)
    if not sizes:
        return plan
    parts = [f"sub-microbatches of up to {size} for {module}" for module, size in sizes.items()]
    return replace(plan, settings="; ".join([*parts, plan.settings]))


def profile_of_plan(path: Path, step: Step) -> Profile:
    """The profile of a step that a plan file was made for; by default the one with whole microbatches."""
    profiles = chain((step.profile(sizes) for sizes in step.sizes), step.part_profiles())
    if is_text_file(path):
        ops = set(ops_in(read_text_file(path)))
        return next((profile for profile in profiles if ops == profile.graph.positions.keys()), step.whole)
    fingerprint = read_json_file(path).get("fingerprint")
    return next((profile for profile in profiles if profile.graph.fingerprint == fingerprint), step.whole)


def load_plan(path: Path, profile: Profile, given: str = "") -> Plan:
    """Read a plan file, or what `spindle plan --json` printed; refuses one that is not legal for this profile."""
    data = {} if is_text_file(path) else read_json_file(path)
    is_other = data.get("workload") == profile.graph.name and data.get("fingerprint") != profile.graph.fingerprint
    if given in MODELS and is_other:  # only the batch differs
        raise InputError(
            f"{path}: this plan was made for another batch of {given}; give --microbatches, --batch-seed, --samples "
            "and --cluster as they were when it was planned, or plan this batch"
        )
    if REMARKS & data.keys():
        body = {key: value for key, value in data.items() if key not in REMARKS}
        plan = artifact_from_json(body, str(path), "plan", Plan)
    else:
        plan = read_plan(path, profile)
    _refuse_unprintable(str(path), [("workload", plan.workload), ("cluster", plan.cluster), ("planner", plan.planner)])
    try:
        check(plan, profile)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    # The plan may have been made from other times of the same graph.
    return replace(plan, folded_s=max(span.end_s for span in spans(plan, profile)))


def _step_of_workload(given: str, workload: Workload, cluster: Cluster) -> Step:
    try:
        profile = roofline_profile(metagraph_of(workload), cluster, Roofline()).with_degrees(
            dict(workload.tensor_degrees)
        )
    except ProfileError as error:
        raise InputError(f"{given}: {error}") from error
    planner, reason = planner_of(workload)
    return Step(
        profile=lambda sizes: profile,
        planner=planner,
        num_micro_steps=workload.gradient_accumulation_steps,
        not_own_planner=reason,
    )


def _names(workload: Workload) -> Iterator[tuple[str, str]]:
    yield "name", workload.name
    for number, module in enumerate(workload.modules):
        yield f"modules[{number}].name", module.name
    for number, task in enumerate(workload.tasks):
        yield f"tasks[{number}].name", task.name
        for position, call in enumerate(task.calls):
            yield f"tasks[{number}].calls[{position}].name", call.name


def _refuse_unprintable(where: str, names: Iterable[tuple[str, str]]) -> None:
    """Refuse names with control characters or lone surrogates, which terminals, files and figures cannot show."""
    for what, name in names:
        if not name.isprintable():
            raise InputError(f"{where}: {what}: a name must be printable, got {name!r}")
        if len(name) > MAX_NAME:
            raise InputError(f"{where}: {what}: a name has at most {MAX_NAME} letters, got one of {len(name):,}")


def _measured(data: dict[str, Any], given: str, num_devices: int | None, cluster_name: str | None) -> Profile:
    """A profile from a file. Its times hold only for the machines it was measured on."""
    if num_devices is not None or cluster_name is not None:
        option = "--devices" if cluster_name is None else "--cluster"
        raise InputError(f"{given}: a profile holds for the machines it was measured on; leave {option} out")
    profile = artifact_from_json(data, given, "profile", Profile)
    names = [(f"graph.metaops[{place}].name", op.name) for place, op in enumerate(profile.graph.metaops)]
    names += [("task", task) for task in profile.graph.tasks] + [("module", module) for module in profile.graph.modules]
    texts = [("graph.name", profile.graph.name), ("cluster.name", profile.cluster.name)]
    _refuse_unprintable(given, [*names, *texts, ("measured_on", profile.measured_on)])
    return profile


def _workload(data: dict[str, Any], where: str) -> Workload:
    if "spindle" not in data:
        raise InputError(
            f'{where}: expected an abstract graph (an object with "ops") or a Spindle workload '
            f'or profile ("spindle": "workload"); this has {", ".join(map(repr, list(data)[:6])) or "nothing in it"}'
        )
    return artifact_from_json(data, where, "workload", Workload)


def _real_cluster(given: str, num_devices: int | None, cluster_name: str | None) -> Cluster:
    """A cluster whose devices have a kind, which a roofline needs."""
    if cluster_name is None:
        count = num_devices if num_devices is not None and num_devices > 0 else 32
        got = "" if num_devices is None else f" instead of --devices {num_devices}"
        raise InputError(
            f"{given}: times of layers depend on the machines: give --cluster{got} (a800x{count}, or a .toml file)"
        )
    return any_cluster(num_devices, cluster_name)


def any_cluster(num_devices: int | None, cluster_name: str | None) -> Cluster:
    if num_devices is not None and cluster_name is not None:
        raise InputError(f"give either --devices {num_devices} or --cluster {cluster_name}, not both")
    if cluster_name is not None:
        is_file = cluster_name.endswith(".toml")
        cluster = read_cluster_file(Path(cluster_name)) if is_file else cluster_named(cluster_name)
        _refuse_unprintable(cluster_name, [("name", cluster.name)])
    elif num_devices is not None:
        cluster = nameless_cluster(num_devices)
    else:
        raise InputError("on how many devices? give --devices N, or --cluster NAME (a800x32, or a .toml file)")
    return cluster


def nameless_cluster(num_devices: int) -> Cluster:
    """Devices of no particular kind in one island, for abstract graphs, which come with times and without bytes."""
    if num_devices < 1:
        raise InputError(f"--devices: expected at least 1, got {num_devices}")
    if num_devices > MAX_DEVICES:
        raise InputError(f"--devices: expected at most {MAX_DEVICES}, got {num_devices}")
    unlimited = 1 << 62
    link = Link(bytes_per_s=unlimited)
    kind = DeviceKind(name="any", peak_flops=unlimited, memory_bytes=unlimited, memory_bytes_per_s=unlimited)
    name = f"{num_devices} device{'' if num_devices == 1 else 's'}"
    return Cluster(name=name, islands=(Island(kind=kind, num_devices=num_devices, link=link, uplink=link),))
