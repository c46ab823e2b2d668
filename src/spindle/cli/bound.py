"""`spindle bound`: how good can any plan be?"""

from __future__ import annotations

from spindle.cli.options import AsJson, Assumptions, BatchSeed, ClusterName, Devices, Input, Microbatches, Mix, Samples


def bound(
    given: Input,
    devices: Devices = None,
    cluster: ClusterName = None,
    microbatches: Microbatches = None,
    batch_seed: BatchSeed = None,
    samples: Samples = None,
    mix: Mix = None,
    assumptions: Assumptions = False,
    as_json: AsJson = False,
) -> None:
    """Compute how fast any plan can be, and what limits it.

    The LP bound covers all plans that run each layer over its whole batch at once; the paper's bound C* goes level by
    level. Both count forward and backward together, without transfers. For a batch of a multimodal model, one bound
    covers all pipelines: any size of sub-microbatches, layout, placement of encoders and order. Examples:

    spindle bound graph.json --devices 16

    spindle bound ofasys-7 --cluster a800x16

    spindle bound vlm-s --microbatches 16
    """
    from spindle.artifact import to_json
    from spindle.cli.inputs import left_out, load_step
    from spindle.cli.terminal import show, show_json
    from spindle.planners import pipeline_bound
    from spindle.recipes import BatchOptions
    from spindle.report import bound_facts, bound_report, limit_sentences, pipeline_bound_facts

    batch = BatchOptions(num_microbatches=microbatches, seed=batch_seed, samples=samples, mix=mix)
    step = load_step(given, devices, cluster, batch)
    if step.pipeline_ranks is not None:
        profiles = [*step.split_profiles(), *step.part_profiles()]
        bounds = [pipeline_bound(profile, step.pipeline_ranks) for profile in profiles]
        least = min(bounds, key=lambda bound: bound.bound_s)
        sizes = dict(enumerate(step.sizes)).get(bounds.index(least), {})
        whole = step.whole
        if as_json:
            named = {"workload": whole.graph.name, "cluster": whole.cluster.name, "sub_microbatches": dict(sizes)}
            show_json(named | {"bound_s": least.bound_s} | to_json(least))
        else:
            show(pipeline_bound_facts(least, whole, sizes), *left_out(whole.leaves_out, assumptions))
        return
    report = bound_report(step.whole)
    if as_json:
        show_json(to_json(report) | {"paper_s": report.paper_s, "limit": report.limit})
        return
    show(bound_facts(report), "", *limit_sentences(report), *left_out(report.leaves_out, assumptions))
