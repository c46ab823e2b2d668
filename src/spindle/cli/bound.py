"""`spindle bound`: how good can any plan be?"""

from __future__ import annotations

from spindle.cli.options import AsJson, ClusterName, Devices, Input


def bound(given: Input, devices: Devices = None, cluster: ClusterName = None, as_json: AsJson = False) -> None:
    """Say how fast any plan can be, and what limits it.

    The LP bound is for the whole graph and every plan that runs each layer over its whole batch at once; the paper's C*
    goes level by level. Both are in folded time: forward and backward together, without transfers. Examples:

    spindle bound graph.json --devices 16

    spindle bound ofasys-7 --cluster a800x16
    """
    from spindle.artifact import to_json
    from spindle.cli.inputs import left_out, load_profile
    from spindle.cli.terminal import show, show_json
    from spindle.report import bound_facts, bound_report, limit_sentences

    report = bound_report(load_profile(given, devices, cluster))
    if as_json:
        show_json(to_json(report) | {"paper_s": report.paper_s, "limit": report.limit})
        return
    show(bound_facts(report), "", *limit_sentences(report), *left_out(report.leaves_out))
