"""The report's page of a fleet in a browser: devices coloured by job, jobs with their cells and waits, two policies."""

from __future__ import annotations

from pathlib import Path

import pytest

import fleets
from browser import chromium, opened_page, settle, text_of
from spindle.fleet import Injection, Job, SchedulerOptions, StepTime, Trace, TraceJob, simulate_fleet
from spindle.report import FleetReport, fleet_page_data, page_html


def trace() -> Trace:
    """Jobs that want more than there is, so that some wait; the last is alone for long."""
    jobs = []
    for number in range(8):
        times = tuple(StepTime(kind="big", num_devices=count, step_s=1.0 / count) for count in (1, 2, 4))
        times += tuple(StepTime(kind="small", num_devices=count, step_s=2.0 / count) for count in (1, 2))
        job = Job(
            name=f"job-{number}",
            num_steps=20_000,
            requested_kind="big",
            requested_devices=4,
            team=("<vision>", "text")[number % 2],
        )
        jobs.append(TraceJob(job=job, arrival_s=600.0 * number, num_steps=20_000, times=times))
    return Trace(name="eight jobs", jobs=tuple(jobs), notes=("drawn by hand",))


@pytest.fixture(scope="module")
def report() -> FleetReport:
    teams = tuple(fleets.Team(name=name) for name in ("<vision>", "text"))
    machines = fleets.fleet({"big": [4, 4], "small": [2]}, teams)
    injection = Injection(seed=1, estimation_error=0.2, failures_per_hour=0.5, repair_s=1800.0)
    timelines = {
        policy: simulate_fleet(trace(), machines, SchedulerOptions(policy=policy), injection, explains=True).timeline
        for policy in ("price", "fcfs")
    }
    return FleetReport(title="fleet <of> three", timelines=timelines)


@pytest.fixture(scope="module")
def file(report, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "fleet.html"
    path.write_text(page_html(report.title, fleet_page_data(report)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser, file):
    yield from opened_page(browser, file)


def test_policies_are_compared_over_time_with_queue_prices_and_bound(page, report):
    overview = text_of(page, "#overview")
    assert "price" in overview
    assert "fcfs" in overview
    titles = page.locator("#run h3").all_inner_texts()
    assert titles[:3] == [
        "Jobs waiting after each round",
        "Devices that jobs hold",
        "Utility of each round and its bound",
    ]
    assert "Price of a device: price" in titles
    assert "Of 8 jobs in both" in text_of(page, "#comparison")
    assert "Drawn by hand." in text_of(page, "#assumptions")
    assert not page.is_visible("#critical")
    assert not page.is_visible("#curves-section")


def test_sums_are_the_device_time_of_the_timeline_to_the_microsecond(page, report):
    for number, timeline in enumerate(report.timelines.values()):
        end = round(timeline.end_s * 1e6)
        sums = page.evaluate("([n, to]) => window.spindleReport.deviceSums(n, 0, to)", [number, end])
        total = [sum(each) for each in zip(*sums, strict=True)]
        micros = [
            (s.num_devices, *(round(t * 1e6) for t in (s.start_s, s.ready_s, s.end_s, s.lost_s)))
            for s in timeline.spans
        ]
        lost = sum(count * lost for count, _, _, _, lost in micros)
        training = sum(count * (end - ready) for count, _, ready, end, _ in micros) - lost
        reallocation = sum(count * (ready - start) for count, start, ready, _, _ in micros)
        sizes = {node.name: node.num_devices for node in timeline.nodes}
        down = sum(
            sizes[fault.node] * (min(end, round(fault.end_s * 1e6)) - round(fault.start_s * 1e6))
            for fault in timeline.faults
            if fault.start_s < timeline.end_s
        )
        assert total[:4] == [training, reallocation, lost, down]
        assert sum(total) == end * timeline.num_devices


def test_a_device_has_the_colour_of_the_job_that_it_trains(page, report):
    page.select_option("#height", "18")
    settle(page)
    places = page.evaluate(
        """() => {
            const { report, timelines, place } = window.spindleReport, spans = timelines[0], seen = [];
            for (let span = 0; span < spans.start.length && seen.length < 6; span++) {
                const kind = spans.program.kinds[spans.instruction[span]];
                if (spans.end[span] - spans.start[span] < 3600e6 || kind) continue;
                const [x, y] = place(0, span), canvas = document.getElementById("pixels");
                if (y > canvas.height - 20) continue;
                const data = canvas.getContext("2d").getImageData(Math.round(x), Math.round(y) + 6, 1, 1).data;
                const hex = "#" + [0, 1, 2].map((part) => data[part].toString(16).padStart(2, "0")).join("");
                seen.push([hex, report.colours[spans.program.groups[spans.instruction[span]] % report.colours.length]]);
            }
            return seen;
        }"""
    )
    assert len(places) == 6
    assert len({expected for _, expected in places}) > 1
    assert all(painted == expected for painted, expected in places)


def test_a_job_shows_its_cells_the_chosen_ones_estimates_beside_measurements_and_why_it_waited(page, report):
    waits = [wait for wait in report.timelines["price"].waits if wait.reason]
    assert waits, "somebody has to wait"
    page.select_option("#second", "")
    page.fill("#search", waits[0].job)
    page.locator("#jobs button").first.click()
    settle(page)
    text = text_of(page, "#job")
    assert f"Job {waits[0].job}" in text
    assert waits[0].reason[:60] in text
    assert "● " in text
    attempts = [span for span in report.timelines["price"].spans if span.job == waits[0].job]
    measured = next(span for span in attempts if span.step_s)
    assert f"{measured.step_s / measured.estimated_step_s:.2f} ×" in text
    assert f"{len(attempts)} attempt" in text
    assert "measured" in text


def test_a_span_leads_to_its_job_and_a_gap_to_who_waited(page):
    page.locator("#overlay").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("n")
    settle(page)
    job = text_of(page, "#details strong")
    assert text_of(page, "#job h3") == f"Job {job}"
    for _ in range(12):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("g")
    text = text_of(page, "#details")
    assert "of node" in text
    assert "is idle for" in text or "no later gap" in text


def test_light_and_dark_have_no_serious_accessibility_faults_and_a4_is_enough(browser, file, tmp_path):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    for scheme in ("light", "dark"):
        for page in opened_page(browser, file, color_scheme=scheme):
            page.locator("#jobs button").first.click()
            found = axe.Axe().run(page).response["violations"]
            serious = [fault for fault in found if fault["impact"] in ("serious", "critical")]
            assert serious == [], [(fault["id"], fault["nodes"][0]["html"]) for fault in serious]
            page.emulate_media(media="print")
            settle(page)
            assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth + 1")
