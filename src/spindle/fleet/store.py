"""The store of a live fleet: one SQLite file.

    meta        the version of this format, the fleet and the scheduler's options, the clock's origin, the engine's own
    events      the log, append-only: events as `event_json` writes them, in the order the scheduler saw them
    actions     what the scheduler answered to an event, in order; `done_s` is NULL until it was executed
    commands    requests of users (submit, stop, drain, ...); `answer` is NULL until the scheduler has answered
    jobs        how a job is started: its command and folders, as `Submission`
    plans       plans of cells, with the profile that they were made from
    attempts    starts of jobs and their progress, for `status` and reports; no decision depends on it

An action is written in the transaction of its event, before it is executed. So after a crash at any instruction the
events give the scheduler's state (`schedule` is pure), and actions without `done_s` are those that may have to be
executed again. Commands are rows, so users need no port, and `status` needs no scheduler.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spindle.artifact import from_json, to_json
from spindle.errors import InputError, StoreError
from spindle.fleet.cells import Cell, Estimate
from spindle.fleet.events import (
    Action,
    Event,
    NodeShare,
    Submitted,
    action_from_json,
    action_json,
    event_from_json,
    event_json,
)
from spindle.fleet.fleet import Fleet
from spindle.fleet.state import SchedulerOptions

VERSION = 1
_KIND = "fleet-store"
_MAGIC = b"SQLite format 3\0"
_BUSY_S = 15.0
_LOCK_S = 2.0  # in which a reader that probes the lock has let go of it
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p"})
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE events (number INTEGER PRIMARY KEY, time_s REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE actions (
    number INTEGER PRIMARY KEY, event INTEGER NOT NULL REFERENCES events, body TEXT NOT NULL, done_s REAL
);
CREATE TABLE commands (
    number INTEGER PRIMARY KEY, unix_s REAL NOT NULL, body TEXT NOT NULL, answered_s REAL, answer TEXT
);
CREATE TABLE jobs (name TEXT PRIMARY KEY, submission TEXT NOT NULL);
CREATE TABLE plans (
    job TEXT NOT NULL, kind TEXT NOT NULL, num_devices INTEGER NOT NULL, plan TEXT NOT NULL, profile TEXT NOT NULL,
    PRIMARY KEY (job, kind, num_devices)
);
CREATE TABLE attempts (
    job TEXT NOT NULL, attempt INTEGER NOT NULL, cell TEXT NOT NULL, nodes TEXT NOT NULL, start_s REAL NOT NULL,
    ready_s REAL, end_s REAL, step INTEGER, step_s REAL, saved_step INTEGER, checkpoints TEXT NOT NULL DEFAULT '',
    outcome TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (job, attempt)
);
CREATE TRIGGER events_stay BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER events_last BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """How a job is started. `command` is a training script with its arguments (`is_script`), or any program with its
    own; it runs in `folder`, with `environment` added, and its ranks write to `logs`. `workload` is what the script
    trains, from which its cells are planned; `profiles` are measurements of it, by kind of device. `sweep` is the
    option at the end of the command whose values are trials, with these values."""

    command: tuple[str, ...]
    is_script: bool
    folder: str
    logs: str
    environment: dict[str, str]
    workload: dict[str, Any] | None = None
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    sweep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """A cell's plan, and the profile that it was made from, as JSON."""

    cell: Cell
    plan: str
    profile: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Adds trials to a waiting job: its new submission, estimates and plans, if its submission is still `before`."""

    job: str
    before: Submission
    submission: Submission
    estimates: tuple[Estimate, ...]
    plans: tuple[StoredPlan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A user's request: `body` is an object whose `command` names it."""

    number: int
    unix_s: float
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """A start of a job, and its progress. Times are on the fleet's clock. `ready_s` is the time of its first step,
    `saved_step` the step of its newest checkpoint, in the folder `checkpoints`. `outcome` is empty while it runs."""

    job: str
    attempt: int
    cell: Cell
    nodes: tuple[NodeShare, ...]
    start_s: float
    ready_s: float | None = None
    end_s: float | None = None
    step: int | None = None
    step_s: float | None = None
    saved_step: int | None = None
    checkpoints: str = ""
    outcome: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAction:
    number: int
    event: int
    action: Action
    is_done: bool


def is_store(path: Path) -> bool:
    """Whether a file is a SQLite database. Not for a process that has opened it as a store: POSIX drops all locks of a
    process on a file when it closes any descriptor of it, and SQLite relies on them."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


class Store:
    """An open store. Every method is one transaction."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self._connection = path, connection
        self._lock: int | None = None
        meta = dict(connection.execute("SELECT key, value FROM meta"))
        where = str(path)
        self.fleet = from_json(Fleet, json.loads(meta["fleet"]), f"{where}: fleet")
        self.options = from_json(SchedulerOptions, json.loads(meta["options"]), f"{where}: options")
        self.origin_unix_s = float(meta["origin_unix_s"])

    # Open and close.

    @classmethod
    def create(
        cls, path: Path, fleet: Fleet, options: SchedulerOptions, settings: Mapping[str, str] | None = None
    ) -> Store:
        """A new store, whose clock starts now, with these settings of its engine. The file appears under its name when
        it is complete."""
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        try:
            os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except OSError as error:
            raise InputError(f"{path}: the store of a fleet cannot be created ({error.strerror})") from error
        try:
            with _errors(path), closing(_connect(part)) as connection:
                values = {
                    **(settings or {}),
                    "spindle": _KIND,
                    "version": str(VERSION),
                    "fleet": json.dumps(to_json(fleet)),
                    "options": json.dumps(to_json(options)),
                    "origin_unix_s": repr(time.time()),
                }
                connection.executescript(f"BEGIN; {_SCHEMA}")
                connection.executemany("INSERT INTO meta VALUES (?, ?)", values.items())
                connection.execute("COMMIT")
            os.link(part, path)  # unlike a rename, refused where there is a file
        except OSError as error:
            raise InputError(f"{path}: the store of a fleet cannot be created ({error.strerror})") from error
        finally:
            part.unlink()
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Store:
        """The store of a fleet, of this version."""
        if not path.is_file():
            problem = "is no file" if path.exists() else "no such file"
            raise InputError(f"{path}: {problem}; start a fleet with `spindle fleet up`, or name its --store")
        with _errors(path):
            connection = _connect(path)
            try:
                _check_meta(path, connection)
                _configure(path, connection)  # only now: it writes
                return cls(path, connection)
            except BaseException:
                connection.close()
                raise

    def close(self) -> None:
        self._connection.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # One scheduler.

    def take_lock(self) -> None:
        """Become the scheduler of this store until the process ends; refused while another one runs."""
        descriptor = os.open(_lock_path(self.path), os.O_RDWR | os.O_CREAT, 0o600)
        end_s = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    os.close(descriptor)
                    raise InputError(
                        f"{self.path}: in use: another scheduler runs this fleet; stop it (Ctrl-C, or `spindle fleet "
                        "down`), or give another --store"
                    ) from None
                time.sleep(0.05)
        os.set_inheritable(descriptor, False)
        self._lock = descriptor
        self.set_meta("scheduler", json.dumps({"pid": os.getpid(), "host": os.uname().nodename}))

    def has_scheduler(self) -> bool:
        """Whether a scheduler runs on this store, as far as this host can see."""
        if self._lock is not None:
            return True
        try:
            descriptor = os.open(_lock_path(self.path), os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)

    # Events and actions.

    def append(
        self,
        event: Event,
        actions: Sequence[Action],
        *,
        submission: Submission | None = None,
        plans: Iterable[StoredPlan] = (),
        answers: Iterable[tuple[int, str]] = (),
        attempts: Iterable[AttemptRecord] = (),
    ) -> list[int]:
        """Append an event with the scheduler's actions, the submission of a job that is new or has changed, plans of
        the event's job, answers to commands and the attempts that it ends, all or nothing. Plans of what a job was
        before are dropped. Returns the numbers of the actions."""
        with self._transaction() as cursor:
            body = _dump(event_json(event))
            number = cursor.execute("INSERT INTO events (time_s, body) VALUES (?, ?)", (event.time_s, body)).lastrowid
            numbers = []
            for action in actions:
                row = (number, _dump(action_json(action)))
                numbers.append(cursor.execute("INSERT INTO actions (event, body) VALUES (?, ?)", row).lastrowid or 0)
            job = getattr(event, "job", "")
            name = job if isinstance(job, str) else job.name
            if submission is not None and isinstance(event, Submitted):
                cursor.execute("INSERT INTO jobs VALUES (?, ?)", (name, _dump(to_json(submission))))
            elif submission is not None:
                cursor.execute("UPDATE jobs SET submission = ? WHERE name = ?", (_dump(to_json(submission)), name))
                cursor.execute("DELETE FROM plans WHERE job = ?", (name,))
            rows = [(name, each.cell.kind, each.cell.num_devices, each.plan, each.profile) for each in plans]
            cursor.executemany("INSERT OR REPLACE INTO plans VALUES (?, ?, ?, ?, ?)", rows)
            _answer(cursor, answers)
            _write_attempts(cursor, attempts)
            return numbers

    def confirm(self, action: int, time_s: float) -> None:
        """Note that an action was executed."""
        with self._transaction() as cursor:
            cursor.execute("UPDATE actions SET done_s = ? WHERE number = ?", (time_s, action))

    def entries(self, *, after: int = 0) -> list[tuple[Event, tuple[str, ...]]]:
        """All events after the one with this number, with the text of their actions."""
        with _errors(self.path):
            # Events first: a scheduler may append one between the two, and actions without an event are left out.
            query = "SELECT number, body FROM events WHERE number > ? ORDER BY number"
            rows = self._connection.execute(query, (after,)).fetchall()
            texts: dict[int, list[str]] = {}
            query = "SELECT event, body FROM actions WHERE event > ? ORDER BY number"
            for event, body in self._connection.execute(query, (after,)):
                texts.setdefault(event, []).append(body)
        return [
            (event_from_json(json.loads(body), f"{self.path}: event {number}"), tuple(texts.get(number, ())))
            for number, body in rows
        ]

    def snapshot(self) -> tuple[int, str]:
        """The number of an event and the state after it, as JSON; 0 and nothing if there is none."""
        number, _, text = (self.meta("snapshot") or "0:").partition(":")
        return int(number), text

    def write_snapshot(self, state: str) -> None:
        """Keep the state after the newest event, so that a reader need not replay all of them."""
        with _errors(self.path):
            (number,) = self._connection.execute("SELECT max(number) FROM events").fetchone()
        self.set_meta("snapshot", f"{number or 0}:{state}")

    def actions(self) -> list[WrittenAction]:
        with _errors(self.path):
            rows = self._connection.execute(
                "SELECT number, event, body, done_s FROM actions ORDER BY number"
            ).fetchall()
        return [
            WrittenAction(
                number=number,
                event=event,
                action=action_from_json(json.loads(body), f"{self.path}: action {number}"),
                is_done=done_s is not None,
            )
            for number, event, body, done_s in rows
        ]

    # Commands.

    def request(self, body: dict[str, Any]) -> int:
        """Write a command for the scheduler; returns its number."""
        with self._transaction() as cursor:
            row = (time.time(), _dump(body))
            return cursor.execute("INSERT INTO commands (unix_s, body) VALUES (?, ?)", row).lastrowid or 0

    def pending(self) -> list[Command]:
        with _errors(self.path):
            query = "SELECT number, unix_s, body FROM commands WHERE answer IS NULL ORDER BY number"
            rows = self._connection.execute(query).fetchall()
        return [Command(number=number, unix_s=unix_s, body=json.loads(body)) for number, unix_s, body in rows]

    def answer(self, number: int) -> str | None:
        """The scheduler's answer to a command; None until there is one."""
        with _errors(self.path):
            row = self._connection.execute("SELECT answer FROM commands WHERE number = ?", (number,)).fetchone()
        return None if row is None else row[0]

    def answer_command(self, number: int, answer: str) -> None:
        with self._transaction() as cursor:
            _answer(cursor, ((number, answer),))

    # Jobs, plans, attempts.

    def submission(self, job: str) -> Submission:
        with _errors(self.path):
            row = self._connection.execute("SELECT submission FROM jobs WHERE name = ?", (job,)).fetchone()
        if row is None:
            raise InputError(f"{self.path}: no job is called {job!r}; `spindle fleet status` lists them")
        return from_json(Submission, json.loads(row[0]), f"{self.path}: job {job!r}")

    def plan(self, job: str, cell: Cell) -> tuple[str, str] | None:
        """A cell's plan and profile, as JSON, if it was planned."""
        with _errors(self.path):
            query = "SELECT plan, profile FROM plans WHERE job = ? AND kind = ? AND num_devices = ?"
            row = self._connection.execute(query, (job, cell.kind, cell.num_devices)).fetchone()
        return None if row is None else (row[0], row[1])

    def write_attempts(self, records: Iterable[AttemptRecord]) -> None:
        with self._transaction() as cursor:
            _write_attempts(cursor, records)

    def attempts(self) -> list[AttemptRecord]:
        """Every start of a job, in order."""
        with _errors(self.path):
            rows = self._connection.execute("SELECT * FROM attempts ORDER BY start_s, job, attempt").fetchall()
        return [
            AttemptRecord(
                job=job,
                attempt=attempt,
                cell=from_json(Cell, json.loads(cell), f"{self.path}: attempt {attempt} of {job!r}"),
                nodes=from_json(tuple[NodeShare, ...], json.loads(nodes), f"{self.path}: attempt {attempt} of {job!r}"),
                start_s=start_s,
                ready_s=ready_s,
                end_s=end_s,
                step=step,
                step_s=step_s,
                saved_step=saved_step,
                checkpoints=checkpoints,
                outcome=outcome,
            )
            for (
                job,
                attempt,
                cell,
                nodes,
                start_s,
                ready_s,
                end_s,
                step,
                step_s,
                saved_step,
                checkpoints,
                outcome,
            ) in rows
        ]

    def set_waits(self, reasons: dict[str, str]) -> None:
        """Store why jobs that have devices do not start, for `status`."""
        text = _dump(reasons)
        if text != (self.meta("waits") or "{}"):
            self.set_meta("waits", text)

    def waits(self) -> dict[str, str]:
        return json.loads(self.meta("waits") or "{}")  # type: ignore[no-any-return]

    # Settings of the engine.

    def meta(self, key: str) -> str | None:
        with _errors(self.path):
            row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def set_meta(self, key: str, value: str) -> None:
        with self._transaction() as cursor:
            cursor.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        with _errors(self.path):
            cursor = self._connection.cursor()
            cursor.execute("BEGIN IMMEDIATE")
            try:
                yield cursor
                cursor.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # a full disk has rolled it back
                    cursor.execute("ROLLBACK")
                raise


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)


def _check_meta(path: Path, connection: sqlite3.Connection) -> None:
    """Refuse files that are not the store of a fleet, and stores of another version."""
    try:
        meta = dict(connection.execute("SELECT key, value FROM meta WHERE key IN ('spindle', 'version')"))
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
            expected = "expected the store of a fleet (a SQLite file that `spindle fleet up` made)"
            raise InputError(f"{path}: {expected}") from error
        if "no such table" not in str(error):
            raise
        meta = {}
    if meta.get("spindle") != _KIND:
        raise InputError(f"{path}: expected the store of a fleet, got another SQLite file")
    if meta["version"] != str(VERSION):
        raise InputError(
            f"{path}: a store of version {meta['version']}, this Spindle reads version {VERSION}; use the "
            "Spindle that wrote it, or start a fleet with another --store"
        )


def _configure(path: Path, connection: sqlite3.Connection) -> None:
    # A write-ahead log needs shared memory between processes, which a network file system does not offer.
    connection.execute(f"PRAGMA journal_mode = {'DELETE' if network_file_system(path) else 'WAL'}")
    connection.execute("PRAGMA synchronous = FULL")


def network_file_system(path: Path) -> str:
    """The type of the network file system that a path is on; empty for a local one."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    target, best, kind = os.path.realpath(path), "", ""
    for line in mounts:
        left, _, right = line.partition(" - ")
        point = left.split()[4].encode().decode("unicode_escape")
        if len(point) >= len(best) and (target == point or target.startswith(point.rstrip("/") + "/")):
            best, kind = point, right.split()[0]
    return kind if kind in _NETWORK else ""


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _answer(cursor: sqlite3.Cursor, answers: Iterable[tuple[int, str]]) -> None:
    rows = [(time.time(), answer, number) for number, answer in answers]
    cursor.executemany("UPDATE commands SET answered_s = ?, answer = ? WHERE number = ? AND answer IS NULL", rows)


def _write_attempts(cursor: sqlite3.Cursor, records: Iterable[AttemptRecord]) -> None:
    rows = [
        (
            *(record.job, record.attempt, _dump(to_json(record.cell)), _dump(to_json(record.nodes))),
            *(record.start_s, record.ready_s, record.end_s, record.step, record.step_s, record.saved_step),
            *(record.checkpoints, record.outcome),
        )
        for record in records
    ]
    cursor.executemany("INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Turn errors of SQLite into one error that names the store."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"{path}: the store of the fleet cannot be used ({error})") from error
