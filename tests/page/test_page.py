"""The report's page in a browser, as it was written: by mouse and by keyboard, light and dark, on paper."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import small
from browser import chromium, opened_page, settle, text_of
from spindle.program import lower
from spindle.report import ShownTimeline, StepReport, page_html, step_page_data
from spindle.report.causes import last_needs
from spindle.simulate import simulate
from spindle.timeline import Timeline
from step_sums import critical_path, time_sums


def stretched(timeline: Timeline) -> Timeline:
    """A step as if it were measured: everything a tenth later and longer; the first span twice as long."""
    end = timeline.end * 11 // 10
    return dataclasses.replace(timeline, posted=timeline.posted * 11 // 10, start=timeline.start * 11 // 10, end=end)


@pytest.fixture(scope="module")
def report() -> StepReport:
    profile = small.workload_profile(small.TWO_TASKS)
    program = lower(small.crossing_plan(profile), profile)
    timeline = simulate(program, profile)
    names = ("predicted", "measured, step 7")
    shown = [
        ShownTimeline(name=name, timeline=entry, program=program, profile=profile, measured=name != "predicted")
        for name, entry in zip(names, (timeline, stretched(timeline)), strict=True)
    ]
    lines = [{"step": step, "loss": 2.0 / (1 + step), "losses/b": 1.0, "step_s": 0.25} for step in range(20)]
    plans = [{"step": step, "plan": "paper", "predicted_s": 0.2} for step in (0, 10)]
    return StepReport(title="two <tasks>", timelines=tuple(shown), steps=plans + lines, notes=("A note.",))


@pytest.fixture(scope="module")
def file(report, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "step.html"
    path.write_text(page_html(report.title, step_page_data(report)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser, file):
    yield from opened_page(browser, file)


def place_of(page, timeline: int, span: int) -> tuple[float, float]:
    """The middle of a span, in pixels of the viewport."""
    box = page.locator("#overlay").bounding_box()
    x, y = page.evaluate("([timeline, span]) => window.spindleReport.place(timeline, span)", [timeline, span])
    return box["x"] + x, box["y"] + y


def pixel_at(page, timeline: int, span: int) -> str:
    """The colour that is painted in the middle of a span, beside labels and stripes: the most frequent around it."""
    return page.evaluate(
        """([timeline, span]) => {
            const [x, y] = window.spindleReport.place(timeline, span), canvas = document.getElementById("pixels");
            const data = canvas.getContext("2d").getImageData(Math.round(x) - 2, Math.round(y) - 4, 5, 8).data;
            const counts = new Map();
            for (let place = 0; place < data.length; place += 4) {
                const hex = "#" + [0, 1, 2].map((part) => data[place + part].toString(16).padStart(2, "0")).join("");
                counts.set(hex, (counts.get(hex) || 0) + 1);
            }
            return [...counts].sort((one, other) => other[1] - one[1])[0][0];
        }""",
        [timeline, span],
    )


def widest(page, timeline: int, kind: str) -> int:
    """The longest span of a kind."""
    return page.evaluate(
        """([timeline, kind]) => {
            const { report, timelines } = window.spindleReport, spans = timelines[timeline];
            let best = -1;
            for (let span = 0; span < spans.start.length; span++) {
                if (report.kinds[spans.program.kinds[spans.instruction[span]]] !== kind) continue;
                if (best < 0 || spans.end[span] - spans.start[span] > spans.end[best] - spans.start[best]) best = span;
            }
            return best;
        }""",
        [timeline, kind],
    )


def state(page) -> dict:
    return page.evaluate(
        """() => {
            const { state } = window.spindleReport;
            const { from, to, range, selected } = state;
            return { from, to, range, selected: selected && selected.span };
        }"""
    )


def test_it_shows_every_step_curve_loss_and_assumption(page):
    assert page.title() == "two <tasks>"
    assert "predicted" in text_of(page, "#overview")
    assert page.locator("#run .chart").count() >= 2
    assert page.locator("#curves .chart").count() >= 2
    assert "A note." in text_of(page, "#assumptions")
    assert "two <tasks>" in text_of(page, "h1")


def test_sums_of_the_page_are_those_of_the_timeline_to_the_nanosecond(page, report):
    for number, shown in enumerate(report.timelines):
        expected = time_sums(shown.timeline, shown.program, shown.profile)
        makespan = shown.timeline.makespan_ns
        whole = page.evaluate("([n, to]) => window.spindleReport.deviceSums(n, 0, to)", [number, makespan])
        assert whole == expected.tolist()
        # Ranges that meet add up.
        cut = makespan // 3
        parts = [
            page.evaluate("([n, from, to]) => window.spindleReport.deviceSums(n, from, to)", [number, *ends])
            for ends in ((0, cut), (cut, makespan))
        ]
        assert np.abs(np.sum(parts, axis=0) - expected).max() == 0


def test_the_critical_path_is_the_programs(page, report):
    shown = report.timelines[0]
    path = critical_path(shown.timeline, last_needs(shown.timeline, shown.program))
    names = page.evaluate(
        """() => { const { timelines, criticalPath } = window.spindleReport, spans = timelines[0];
            return criticalPath(0).map((span) => [spans.rank[span], spans.instruction[span]]); }"""
    )
    assert [tuple(pair) for pair in names] == [
        (int(shown.timeline.rank[span]), int(shown.timeline.instruction[span])) for span in path
    ]


def test_a_span_has_the_colour_of_its_module_and_backward_a_darker_one(page, report):
    span = widest(page, 0, "forward")
    expected = page.evaluate(
        """(span) => { const { report, timelines } = window.spindleReport, spans = timelines[0];
            return report.colours[spans.program.groups[spans.instruction[span]]]; }""",
        span,
    )
    assert pixel_at(page, 0, span) == expected
    assert pixel_at(page, 0, widest(page, 0, "backward")) != expected
    page.select_option("#colour", "kind")
    settle(page)
    assert pixel_at(page, 0, span) == "#0072b2"
    assert pixel_at(page, 0, widest(page, 0, "backward")) == "#e69f00"
    page.select_option("#colour", "difference")
    settle(page)
    # A tenth longer than predicted: a light shade in the measured row, the opposite in the predicted one.
    assert pixel_at(page, 0, span) != pixel_at(page, 1, span)


def test_the_mouse_zooms_to_one_span_and_back_hovers_drags_and_selects_a_range(page, report):
    whole = state(page)
    span = widest(page, 0, "forward")
    x, y = place_of(page, 0, span)
    page.mouse.move(x, y)
    assert "forward" in text_of(page, "#tip")
    page.mouse.dblclick(x, y)
    settle(page)
    closer = state(page)
    assert closer["to"] - closer["from"] < 0.8 * (whole["to"] - whole["from"])
    assert closer["selected"] == span
    assert "waited" in text_of(page, "#details")
    for _ in range(3):
        page.keyboard.down("Control")
        page.mouse.wheel(0, -100)
        page.keyboard.up("Control")
    settle(page)
    assert state(page)["to"] - state(page)["from"] < closer["to"] - closer["from"]
    before = state(page)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 120, y, steps=4)
    page.mouse.up()
    settle(page)
    assert state(page)["from"] > before["from"]
    page.click("#whole")
    settle(page)
    assert state(page)["to"] == whole["to"]
    page.keyboard.down("Shift")
    page.mouse.move(x - 60, y)
    page.mouse.down()
    page.mouse.move(x + 60, y, steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")
    settle(page)
    first, last = state(page)["range"]
    assert last > first
    assert "From" in text_of(page, "#sums-range")


def test_a_click_on_a_gap_says_what_it_waits_for(page):
    gap = page.evaluate(
        """() => {
            const spans = window.spindleReport.timelines[0];
            let best = null;
            for (const rows of spans.rows) for (let span = rows[0].from + 1; span < rows[0].to; span++) {
                const size = spans.start[span] - spans.end[span - 1];
                const time = (spans.start[span] + spans.end[span - 1]) / 2;
                if (!best || size > best.size) best = { size, time, rank: spans.rank[span] };
            }
            return best;
        }"""
    )
    assert gap["size"] > 0
    box = page.locator("#overlay").bounding_box()
    x, y = page.evaluate("({ rank, time }) => window.spindleReport.at(0, rank, time)", gap)
    page.mouse.click(box["x"] + x, box["y"] + y)
    settle(page)
    text = text_of(page, "#details")
    assert "is idle for" in text
    assert "waits to begin" in text


def test_every_gap_goes_back_to_a_span_that_had_begun_before_it(page, report):
    gaps = page.evaluate(
        """() => {
            const { timelines, causes } = window.spindleReport, spans = timelines[0], found = [];
            spans.rows.forEach((rows, rank) => {
                for (let span = rows[0].from + 1; span < rows[0].to; span++) {
                    if (spans.start[span] <= spans.end[span - 1]) continue;
                    const gap = causes(0, rank, (spans.start[span] + spans.end[span - 1]) / 2);
                    const times = gap.chain.map((cause) => [spans.start[cause], spans.end[cause]]);
                    found.push({ ...gap, times, expected: [spans.end[span - 1], spans.start[span], span] });
                }
            });
            return found;
        }"""
    )
    assert gaps
    for gap in gaps:
        assert [gap["from"], gap["to"], gap["next"]] == gap["expected"]
        assert gap["chain"], "nothing but the program's dependencies makes a simulated device wait"
        ends = [gap["to"], *(end for _, end in gap["times"])]
        assert ends == sorted(ends, reverse=True)
        # All but the last lie in the gap; the last had begun before it, or waited for nothing.
        assert all(start > gap["from"] for start, _ in gap["times"][:-1])
        assert gap["times"][-1][0] <= gap["from"] or gap["from"] == 0


def test_the_keyboard_alone_does_it_all(page):
    page.locator("#first").focus()
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "overlay":
            break
    assert page.evaluate("document.activeElement.id") == "overlay"
    whole = state(page)
    page.keyboard.press("+")
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    settle(page)
    moved = state(page)
    assert moved["from"] > 0
    assert moved["to"] - moved["from"] < whole["to"] - whole["from"]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("p")
    page.keyboard.press("p")
    first = state(page)["selected"]
    page.keyboard.press("n")
    assert state(page)["selected"] == first + 1
    page.keyboard.press("p")
    assert state(page)["selected"] == first
    page.keyboard.press("Enter")
    settle(page)
    assert state(page)["to"] - state(page)["from"] < moved["to"] - moved["from"]
    page.keyboard.press("r")
    assert state(page)["range"] is not None
    page.keyboard.press("c")
    assert page.is_checked("#critical")
    assert re.search(r"predicted: \d+ spans; .*forward", text_of(page, "#details"))
    page.keyboard.press("c")
    page.keyboard.press("g")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("vision")
    page.keyboard.press("Enter")
    assert re.match(r"1 of \d+ spans", text_of(page, "#hits"))
    assert "vision" in text_of(page, "#details")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    settle(page)
    assert state(page)["to"] == whole["to"]
    assert state(page)["range"] is None


def test_a_search_dims_what_does_not_match(page):
    span = widest(page, 0, "forward")
    colour = pixel_at(page, 0, span)
    page.fill("#search", "no such name")
    settle(page)
    assert text_of(page, "#hits") == "0 spans"
    assert pixel_at(page, 0, span) != colour
    name = page.evaluate(
        "(s) => { const t = window.spindleReport.timelines[0]; return t.program.names[t.instruction[s]]; }", span
    )
    page.fill("#search", name)
    settle(page)
    assert pixel_at(page, 0, span) == colour


def test_other_timelines_layouts_and_folds_are_shown(page):
    heights = {}
    for layout in ("pairs", "stacked", "overlaid"):
        page.select_option("#layout", layout)
        settle(page)
        heights[layout] = page.evaluate("document.getElementById('spacer').offsetHeight")
    assert heights["overlaid"] < heights["pairs"]
    page.select_option("#fold", "work")
    settle(page)
    assert page.evaluate("document.getElementById('spacer').offsetHeight") <= heights["overlaid"]
    page.select_option("#second", "")
    settle(page)
    assert not page.is_visible("#comparison")
    page.select_option("#first", "1")
    settle(page)
    assert "measured" in page.evaluate("document.querySelector('#first').selectedOptions[0].textContent")


def test_light_dark_and_paper_have_no_serious_accessibility_faults(browser, file, tmp_path):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    backgrounds = set()
    for scheme in ("light", "dark"):
        for page in opened_page(browser, file, color_scheme=scheme):
            page.click("summary")
            found = axe.Axe().run(page).response["violations"]
            serious = [fault for fault in found if fault["impact"] in ("serious", "critical")]
            assert serious == [], [(fault["id"], fault["nodes"][0]["html"]) for fault in serious]
            backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2


def test_it_prints_on_a4_in_colours_of_paper(browser, file, tmp_path):
    for page in opened_page(browser, file, color_scheme="dark"):
        page.pdf(path=tmp_path / "step.pdf", format="A4")
        content = (tmp_path / "step.pdf").read_bytes()
        pages = len(re.findall(rb"/Type\s*/Page\b(?!s)", content))
        assert 1 <= pages <= 8
        page.emulate_media(media="print")
        settle(page)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth + 1")
