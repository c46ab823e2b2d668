"""The report of a live fleet in a browser: it refreshes itself, and shows what it showed before."""

from __future__ import annotations

import http.client
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from browser import chromium, settle, text_of
from fleets import fleet, submitted
from spindle.fleet import SchedulerOptions, Started, State, Ticked, schedule
from spindle.fleet.store import Store
from spindle.report import live_view
from spindle.report.live_view import LOOPBACK, LivePage, make_server


class RecordedFleet:
    """A store to which a test appends events, as a scheduler does."""

    def __init__(self, path: Path) -> None:
        self.store = Store.create(path, fleet({"big": [4]}), SchedulerOptions(min_interval_s=1.0, realloc_s=1.0))
        self.state = State(fleet=self.store.fleet, options=self.store.options)

    def add(self, *events) -> None:
        for event in events:
            self.state, actions = schedule(self.state, event)
            self.store.append(event, actions)

    def run_job(self, name: str, time_s: float) -> None:
        self.add(
            submitted(name, {("big", 2): 1.0}, time_s=time_s),
            Ticked(time_s=time_s + 10),
            Started(time_s=time_s + 20, job=name, attempt=1),
        )


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(live_view, "_MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(live_view, "_SHARE", 1e9)
    made = RecordedFleet(tmp_path / "fleet.db")
    with made.store:
        yield made


@pytest.fixture
def port(recorded):
    server = make_server(LivePage(recorded.store.path), 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def asked(port: int, method: str, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def wait_until(page, condition: str, limit_s: float = 30.0) -> None:
    """As `wait_for_function`, which the page's Content-Security-Policy refuses once it has to wait."""
    end_s = time.monotonic() + limit_s
    while True:
        with suppress(Exception):  # the page is being loaded
            if page.evaluate(f"() => Boolean({condition})"):
                return
        assert time.monotonic() < end_s, condition
        time.sleep(0.1)


def test_the_page_refreshes_itself_and_keeps_zoom_and_job(recorded, port):
    recorded.run_job("early", 0.0)
    recorded.add(Ticked(time_s=100.0))
    with chromium() as browser:
        page = browser.new_context().new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"http://{LOOPBACK}:{port}/")
        wait_until(page, "window.spindleReport")
        assert text_of(page, "#live") == "live"
        assert "late" not in text_of(page, "#jobs")
        page.evaluate("window.spindleReport.chooseJob(0)")
        page.evaluate("window.spindleReport.zoomTo(20e6, 60e6)")
        settle(page)
        before = page.evaluate("[window.spindleReport.state.from, window.spindleReport.state.to]")
        assert before[1] - before[0] == pytest.approx(40e6)
        recorded.run_job("late", 200.0)
        wait_until(page, "window.spindleReport && window.spindleReport.report.groups.length === 2")
        wait_until(page, "window.spindleReport && window.spindleReport.state.from > 0")  # restored
        settle(page)
        after = page.evaluate("[window.spindleReport.state.from, window.spindleReport.state.to]")
        assert after == pytest.approx(before)
        assert page.evaluate("window.spindleReport.chosenJob()") == 0
        assert "late" in text_of(page, "#jobs")
        assert said == []


def test_before_the_first_job_the_page_says_how_to_submit_one(recorded, port):
    status, body = asked(port, "GET", "/")
    assert status == 200
    assert "No job was submitted yet" in body


def test_it_answers_only_to_reads_from_this_machine(recorded, port):
    recorded.run_job("early", 0.0)
    assert asked(port, "GET", "/version") == (200, str(len(recorded.store.entries())))
    assert asked(port, "GET", "/fleet.db")[0] == 404
    assert asked(port, "GET", "/../fleet.db")[0] == 404
    assert asked(port, "POST", "/")[0] == 501
    assert asked(port, "GET", "/", Host=f"attacker.example:{port}")[0] == 403
    assert "/proc" not in asked(port, "GET", "/")[1]


def test_more_requests_than_slots_are_turned_away_and_the_next_are_answered(recorded, port, monkeypatch):
    waiting = [http.client.HTTPConnection(LOOPBACK, port, timeout=10) for _ in range(live_view._MAX_REQUESTS)]
    for connection in waiting:
        connection.connect()  # and asks for nothing
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        asked(port, "GET", "/version")
    for connection in waiting:
        connection.close()
    answers: list[int] = []
    while not answers:
        try:
            answers.append(asked(port, "GET", "/version")[0])
        except (http.client.RemoteDisconnected, ConnectionResetError):
            continue
    assert answers == [200]


def test_the_process_that_serves_ends_with_its_scheduler_and_keeps_its_port(recorded):
    with live_view.serving(recorded.store) as first:
        number = int(first.rstrip("/").rpartition(":")[2])
        assert asked(number, "GET", "/")[0] == 200
    with pytest.raises(ConnectionRefusedError):
        asked(number, "GET", "/")
    with live_view.serving(recorded.store) as second:
        assert second == first
