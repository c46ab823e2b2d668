"""How large the report's page is and how fast it draws, in Chromium without a GPU.

    python benchmarks/report_page.py

Two measured steps of 64 devices with 2,000 spans each, and 1,024 devices with 500: durations differ from device to
device, as in a run, so nothing folds and little compresses. And a fleet of 1,280 devices with 2,000 jobs under two
policies, simulated. CPU time is that of the page's main thread ("threadTicks"
of the DevTools protocol), and of all processes of the browser together, over a zoom from the whole step to a
two-hundredth of it. The first picture is the one figure by the clock, from the start of navigation.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser import chromium
from common import markdown, publish
from spindle.cli.inputs import nameless_cluster
from spindle.fleet import Injection, Job, SchedulerOptions, StepTime, Trace, TraceJob, simulate_fleet
from spindle.fleet.fleet_file import fleet_named
from spindle.plan import Plan, Slot
from spindle.profile import Profile, abstract_profile
from spindle.program import Program, lower
from spindle.report import FleetReport, ShownTimeline, StepReport, fleet_page_data, page_html, step_page_data
from spindle.simulate import simulate
from spindle.timeline import Timeline, unpack

GROUP = 8  # devices of a slot
SPANS_OF_OP = 6  # on a device: both passes, and what is received and sent for each
MODULES = ("vision", "text", "audio", "depth", "video", "language", "fusion", "head")
FRAMES = 60


def step_of(num_devices: int, spans_per_device: int) -> tuple[Program, Profile, Timeline]:
    """Tasks that move from one group of devices to the next with every op: most spans for the fewest ops."""
    num_groups, num_waves = num_devices // GROUP, round(spans_per_device / SPANS_OF_OP)
    modules = [
        f"{MODULES[(task + wave // 12) % len(MODULES)]}" for task in range(num_groups) for wave in range(num_waves)
    ]
    names = [
        f"task{task}/{modules[task * num_waves + wave]}.{wave}"
        for task in range(num_groups)
        for wave in range(num_waves)
    ]
    generator = np.random.default_rng(0)
    times = (1e-3 * generator.lognormal(0, 0.4, len(names))).round(9).tolist()
    ops = [
        {"name": name, "layers": 1, "batch": GROUP, "time_s": {str(GROUP): time_s}, "task": name.split("/")[0]}
        for name, time_s in zip(names, times, strict=True)
    ]
    edges = [
        [names[task * num_waves + wave], names[task * num_waves + wave + 1]]
        for task in range(num_groups)
        for wave in range(num_waves - 1)
    ]
    cluster = nameless_cluster(num_devices)
    profile = abstract_profile({"ops": ops, "edges": edges}, cluster, "benchmark", name="benchmark")
    slots = tuple(
        Slot(
            op=names[task * num_waves + wave],
            first=0,
            last=1,
            devices=tuple(range(GROUP * ((task + wave) % num_groups), GROUP * ((task + wave) % num_groups) + GROUP)),
            wave=wave,
        )
        for wave in range(num_waves)
        for task in range(num_groups)
    )
    plan = Plan(
        workload="benchmark",
        fingerprint=profile.graph.fingerprint,
        cluster=cluster.name,
        num_devices=num_devices,
        planner="by hand",
        slots=slots,
    )
    program = lower(plan, profile)
    return program, profile, simulate(program, profile)


def as_measured(timeline: Timeline, seed: int) -> Timeline:
    """The step as ranks would have measured it: each span on each rank has a time of its own."""
    generator = np.random.default_rng(seed)
    order = np.lexsort((timeline.start, timeline.lane, timeline.rank))
    duration = ((timeline.end - timeline.start)[order] * generator.uniform(0.9, 1.15, len(order))).astype(np.int64) + 1
    gap = generator.integers(0, 20_000, len(order))
    key = timeline.rank[order] * 64 + timeline.lane[order]
    opens = np.flatnonzero(np.diff(key, prepend=-1))
    total = np.cumsum(duration + gap)
    before = np.repeat(total[opens] - (duration + gap)[opens], np.diff(np.append(opens, len(order))))
    end = np.empty(len(order), dtype=np.int64)
    start = np.empty(len(order), dtype=np.int64)
    end[order], start[order] = total - before, total - before - duration
    return replace(timeline, posted=start - generator.integers(0, 5_000, len(order)), start=start, end=end)


def measured_page(num_devices: int, spans_per_device: int, folder: Path, num_timelines: int) -> dict[str, object]:
    program, profile, simulated = step_of(num_devices, spans_per_device)
    begin_s = time.process_time()
    shown = tuple(
        ShownTimeline(
            name=f"run {seed}", timeline=as_measured(simulated, seed), program=program, profile=profile, measured=True
        )
        for seed in range(num_timelines)
    )
    html = page_html("benchmark", step_page_data(StepReport(title="benchmark", timelines=shown)))
    written_s = time.process_time() - begin_s
    path = folder / f"{num_devices}.html"
    path.write_text(html, encoding="utf-8")
    return {
        "devices": num_devices,
        "timelines": num_timelines,
        "spans": sum(len(entry.timeline.rank) for entry in shown),
        "file_bytes": path.stat().st_size,
        "write_cpu_s": round(written_s, 2),
        **browsed(path),
    }


def fleet_trace(num_jobs: int) -> Trace:
    """Jobs that arrive faster than the fleet can serve them for a while, of all lengths, with seven cells each."""
    generator = np.random.default_rng(0)
    jobs, now_s = [], 0.0
    for number in range(num_jobs):
        now_s += float(generator.exponential(300.0))
        step_s, scaling = float(generator.lognormal(0, 0.5)), float(generator.uniform(0.7, 0.98))
        times = tuple(
            StepTime(kind=kind, num_devices=count, step_s=step_s * factor / count**scaling)
            for kind, factor in (("A100-80GB", 1.0), ("L40S", 1.7))
            for count in (1, 4, 8, 16)
        )
        steps = round(float(generator.lognormal(10.5, 1.0)))
        job = Job(name=f"job-{number:04}", num_steps=steps, requested_kind="A100-80GB", requested_devices=8)
        jobs.append(TraceJob(job=job, arrival_s=now_s, num_steps=steps, times=times))
    return Trace(name="drawn", jobs=tuple(jobs))


def fleet_page(num_jobs: int, folder: Path) -> dict[str, object]:
    machines, injection = fleet_named("a100x640,l40sx640"), Injection(estimation_error=0.1, failures_per_hour=0.1)
    timelines = {
        policy: simulate_fleet(
            fleet_trace(num_jobs), machines, SchedulerOptions(policy=policy), injection, explains=True
        ).timeline
        for policy in ("price", "sia")
    }
    begin_s = time.process_time()
    data = fleet_page_data(FleetReport(title="benchmark", timelines=timelines))
    path = folder / "fleet.html"
    path.write_text(page_html("benchmark", data), encoding="utf-8")
    written_s = time.process_time() - begin_s
    _, columns = unpack(data, "page")
    return {
        "devices": machines.cluster.num_devices,
        "jobs": num_jobs,
        "timelines": len(timelines),
        "spans": sum(len(column) for name, column in columns.items() if name.endswith(".rank")),
        "file_bytes": path.stat().st_size,
        "write_cpu_s": round(written_s, 2),
        **browsed(path),
    }


def browsed(path: Path) -> dict[str, object]:
    """First picture, frames of a zoom, and hovers, of a page."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})

        def cpu_s() -> float:
            metrics = session.send("Performance.getMetrics")["metrics"]
            return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

        whole_browser = browser.new_browser_cdp_session()

        def all_cpu_s() -> float:
            return sum(process["cpuTime"] for process in whole_browser.send("SystemInfo.getProcessInfo")["processInfo"])

        page.goto(path.as_uri())
        page.wait_for_function("window.spindleReport", timeout=120_000)
        first_s = page.evaluate("window.spindleReport.firstPicture / 1e3")
        page.wait_for_timeout(500)
        load_s, before_s, all_before_s = cpu_s(), cpu_s(), all_cpu_s()
        walls = page.evaluate(
            """async (frames) => {
                const report = window.spindleReport, whole = report.state.to, times = [];
                const middle = whole * 0.41;
                for (let frame = 0; frame < frames; frame++) {
                    const size = whole * 200 ** (-frame / (frames - 1));
                    await new Promise((done) => requestAnimationFrame(done));
                    const begin = performance.now();
                    report.zoomTo(middle - size / 2, middle + size / 2);
                    report.paint();
                    times.push(performance.now() - begin);
                }
                return times;
            }""",
            FRAMES,
        )
        frames_s, all_frames_s = cpu_s() - before_s, all_cpu_s() - all_before_s
        hovers = page.evaluate(
            """() => {
                const report = window.spindleReport, begin = performance.now();
                for (let number = 0; number < 2000; number++) {
                    report.textAt(160 + (number * 37) % 1300, 30 + (number * 53) % 560);
                }
                return (performance.now() - begin) / 2000;
            }"""
        )
        return {
            "first_picture_s": round(first_s, 3),
            "load_cpu_s": round(load_s, 3),
            "frame_cpu_ms": round(1e3 * frames_s / FRAMES, 2),
            "frame_all_cpu_ms": round(1e3 * all_frames_s / FRAMES, 2),
            "paint_ms_median": round(float(np.median(walls)), 2),
            "paint_ms_max": round(float(np.max(walls)), 2),
            "hover_ms": round(hovers, 4),
        }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            measured_page(num_devices, spans, Path(folder), timelines)
            for num_devices, spans, timelines in ((64, 2000, 2), (1024, 500, 1))
        ]
        rows.append(fleet_page(2000, Path(folder)))
    header = ["devices", "steps", "spans", "file", "load, CPU", "first picture", "frame, CPU", "all processes", "hover"]
    table = [
        [
            f"{row['devices']:,}" + (f", {row['jobs']:,} jobs" if "jobs" in row else ""),
            f"{row['timelines']}",
            f"{row['spans']:,}",
            f"{row['file_bytes'] / 1e6:.2f} MB",
            f"{row['load_cpu_s']:.2f} s",
            f"{row['first_picture_s']:.2f} s",
            f"{row['frame_cpu_ms']:.1f} ms",
            f"{row['frame_all_cpu_ms']:.1f} ms",
            f"{row['hover_ms'] * 1e3:.0f} µs",
        ]
        for row in rows
    ]
    publish("report_page", {"pages": rows, "load_average": os.getloadavg()}, markdown(header, table))


if __name__ == "__main__":
    main()
