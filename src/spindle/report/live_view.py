"""The report of a live fleet, served to browsers of this machine: `spindle fleet up --view`.

    store ── new events ──▶ History ── FleetTimeline ──▶ page ◀── GET / ── browser ── GET /version, every 2 s

It is a process of its own, so that no browser delays the scheduler, and ends when the scheduler closes its standard
input. It is read-only: it listens on loopback and answers GET of two paths. The Host header must name this address, so
that other sites cannot read it by DNS rebinding. It renders pages for at most a tenth of its time.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from spindle.errors import InputError, SpindleError
from spindle.fleet import State
from spindle.fleet.history import History
from spindle.fleet.store import Store
from spindle.report.fleet_page import FleetReport, fleet_page_data
from spindle.report.html import page_html

LOOPBACK = "127.0.0.1"
_MAX_REQUESTS = 8  # that are answered at once; more are turned away
_REQUEST_S = 10.0  # that a browser may take to ask, or to read
_SHARE = 0.1  # of this process's time may be spent on rendering
_MIN_INTERVAL_S = 1.0  # between two pages
_EMPTY = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<title>{title}</title></head><body><h1>{title}</h1><p>No job was submitted yet: spindle fleet submit train.py</p>
</body></html>"""


class LivePage:
    """The newest page of a store. A version is the number of an event."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._history: History | None = None
        self._num_events = 0
        self._page, self._page_events, self._next_s = b"", -1, 0.0

    def version(self) -> str:
        """The version of the page that a browser would get now."""
        with self._lock:
            self._update()
            return str(self._page_events)

    def page(self) -> bytes:
        with self._lock:
            self._update()
            return self._page

    def _update(self) -> None:
        begin_s = time.monotonic()
        if begin_s < self._next_s:
            return
        with Store.open(self._path) as store:
            new = store.entries(after=self._num_events)
            if self._history is None:
                self._history = History(State(fleet=store.fleet, options=store.options))
        for event, _ in new:
            self._history.add(event)
        self._num_events += len(new)
        if self._page_events != self._num_events:
            self._page = self._rendered(self._history)
            self._page_events = self._num_events
        spent_s = time.monotonic() - begin_s
        self._next_s = time.monotonic() + max(_MIN_INTERVAL_S, spent_s / _SHARE)

    def _rendered(self, history: History) -> bytes:
        timeline = history.timeline(self._path.name)
        title = f"{timeline.trace} on {timeline.fleet}"
        if not timeline.jobs:
            return _EMPTY.format(title=escape(title)).encode()
        report = FleetReport(title=title, timelines={timeline.policy: timeline})
        return page_html(title, fleet_page_data(report), version=str(self._num_events)).encode()


def make_server(page: LivePage, port: int) -> ThreadingHTTPServer:
    """A server of a page on loopback; port 0 is any that is free."""
    slots = threading.BoundedSemaphore(_MAX_REQUESTS)

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_S

        def do_GET(self) -> None:
            if self.headers.get("Host", "").rpartition(":")[0] not in (LOOPBACK, "localhost"):
                self.send_error(403, "this page is for browsers of this machine")
                return
            try:
                match self.path:
                    case "/":
                        self._answer(page.page(), "text/html; charset=utf-8")
                    case "/version":
                        self._answer(page.version().encode(), "text/plain")
                    case _:
                        self.send_error(404)
            except SpindleError as error:
                self.send_error(503, "the store cannot be read", str(error))

        def _answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
                ("Cross-Origin-Resource-Policy", "same-origin"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def process_request(self, request: Any, client_address: Any) -> None:
            if slots.acquire(blocking=False):
                super().process_request(request, client_address)
            else:
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                slots.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a browser that went away

    return Server((LOOPBACK, port), Handler)


@contextmanager
def serving(store: Store) -> Iterator[str]:
    """Serve the report of a store from a process of its own: yields its address, the same as the last time if it is
    free."""
    command = [sys.executable, "-m", "spindle.report.live_view", str(store.path.absolute())]
    command.append(store.meta("view_port") or "0")
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        if not port.isdigit():
            raise InputError(f"--view: the report cannot be served on {LOOPBACK}; see the message above")
        store.set_meta("view_port", port)
        yield f"http://{LOOPBACK}:{port}/"
    finally:
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def main(path: str, port: str) -> None:
    """Serve a store until standard input ends; the first line of output is the port."""
    page = LivePage(Path(path))
    try:
        server = make_server(page, int(port))
    except OSError:  # another process has that port now
        server = make_server(page, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    with suppress(KeyboardInterrupt):
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
