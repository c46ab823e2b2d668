"""Measured times on disk: found again, told apart, named when broken, done without when they cannot be kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from spindle.measure.cache import Cache, Times, cache_folder  # noqa: E402
from spindle.profile import Contention, SmTimes  # noqa: E402
from test_measure import Tower, measured, one_task  # noqa: E402

MACHINE = {"device": "abacus", "torch": "2.13", "busy devices": "1"}
NUM_POINTS = 6  # of `one_task`: stem, blocks and loss on 2 and 4 rows


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path, notices):
    def make(machine=MACHINE, fresh=False, folder=tmp_path):
        return Cache(machine, notices.append, folder=folder, fresh=fresh)

    return make


def files(folder: Path) -> list[Path]:
    return sorted((folder / "layers").glob("*"))


def num_timed(cache, tower=None):
    return measured([one_task(tower or Tower())], cache=cache)[1].num_timed


def test_what_was_measured_is_found_again_and_equal(cache, tmp_path, notices):
    first, meter = measured([one_task(Tower())], cache=cache())
    assert meter.num_timed == len(files(tmp_path)) == NUM_POINTS
    second, meter = measured([one_task(Tower())], cache=cache())
    assert meter.num_timed == 0
    assert meter.longest is not None
    assert second == first
    assert notices == []


def test_a_fresh_cache_measures_again_and_keeps_that(cache, tmp_path):
    num_timed(cache())
    before = [path.read_text() for path in files(tmp_path)]
    assert num_timed(cache(fresh=True)) == NUM_POINTS
    assert [path.read_text() for path in files(tmp_path)] != before
    assert num_timed(cache()) == 0


@pytest.mark.parametrize("fact", MACHINE)
def test_another_machine_has_times_of_its_own(cache, fact):
    num_timed(cache())
    assert num_timed(cache(machine=MACHINE | {fact: "another"})) == NUM_POINTS


def frozen():
    tower = Tower()
    tower.requires_grad_(False)
    return tower


@pytest.mark.parametrize(
    "other",
    [
        lambda: Tower(width=5),
        lambda: Tower(times=2),
        lambda: Tower().double(),
        lambda: Tower().eval(),
        frozen,
        lambda: type("Tower", (Tower,), {"forward": lambda self, x: Tower.forward(self, x) * 2})(),
    ],
    ids=["shape", "setting", "dtype", "mode", "frozen", "code"],
)
def test_another_layer_has_times_of_its_own(cache, other):
    num_timed(cache())
    tower = other()
    batch = {"x": torch.ones(4, 3, dtype=next(tower.parameters()).dtype)}
    assert measured([one_task(tower)], cache=cache(), batch=batch)[1].num_timed > 0


def test_other_rows_have_times_of_their_own(cache):
    num_timed(cache())
    assert measured([one_task(Tower())], num_devices=4, cache=cache())[1].num_timed == 3  # one row


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("", "is empty"),
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ('{"spindle": "plan", "version": 1}', "expected a Spindle layer-time"),
        ('{"spindle": "layer-time", "version": 9}', "reads version 1"),
        ({"forward_s": None}, "forward_s: expected a number, got null"),
        ({"forward_s": float("nan")}, "forward_s: expected a finite number"),
        ({"backward_s": -1.0}, "times must not be negative"),
        ({"key": []}, "contains the time of another layer"),
        ({"extra": 1}, "unknown field 'extra'"),
    ],
)
def test_a_broken_file_is_named_measured_again_and_replaced(cache, tmp_path, notices, broken, says):
    num_timed(cache())
    path = files(tmp_path)[2]
    whole = json.loads(path.read_text())
    path.write_text(broken if isinstance(broken, str) else json.dumps(whole | broken))
    assert num_timed(cache()) == 1
    (notice,) = notices
    assert str(path) in notice
    assert says in notice
    assert notice.endswith("; it is measured again")
    assert json.loads(path.read_text())["key"] == whole["key"]
    assert num_timed(cache()) == 0


def test_a_file_without_a_field_is_broken(cache, tmp_path, notices):
    num_timed(cache())
    path = files(tmp_path)[0]
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "key"}))
    assert num_timed(cache()) == 1
    assert "the field 'key' is missing" in notices[0]


def test_a_folder_that_cannot_be_written_is_named_once_and_done_without(cache, tmp_path, notices):
    (tmp_path / "file").write_text("no folder")
    assert num_timed(cache(folder=tmp_path / "file")) == NUM_POINTS
    (notice,) = notices
    assert notice.startswith("measured times are not cached: ")
    assert str(tmp_path / "file") in notice


def test_the_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("SPINDLE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "spindle"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/spindle")
    monkeypatch.setenv("SPINDLE_CACHE", "/mine")
    assert cache_folder() == Path("/mine")


CONTENTION = Contention(forward=(0.25, 0.5), backward=(0.5, 0.75), inputs=(0.1, 0.4), weights=(0.2, 0.3))


def test_contention_is_found_again_beside_the_times_of_its_layer(cache, notices):
    point = {"layer": "block", "splits": "True"}
    cache().store(point, Times(1.0, 2.0))
    cache().store_contention(point, CONTENTION, 0.4)
    assert cache().find_contention(point) == (CONTENTION, 0.4)
    assert cache().find(point) == Times(1.0, 2.0)
    assert cache().find_contention(point | {"splits": "False"}) is None
    assert cache(machine=MACHINE | {"device": "another"}).find_contention(point) is None
    assert cache(fresh=True).find_contention(point) is None
    assert notices == []


def test_times_on_some_of_the_sms_are_found_again(cache, notices):
    point = {"layer": "linear", "SM groups": "15 of 8"}
    sm_times = SmTimes(num_sms=(16, 132), forward=(4.0, 1.0), backward=(5.0, 1.0), pressure=(0.1, 0.2))
    cache().store_contention(point, CONTENTION, 0.4)
    cache().store_sm_times(point, sm_times)
    assert cache().find_sm_times(point) == sm_times
    assert cache().find_contention(point) == (CONTENTION, 0.4)
    assert cache().find_sm_times(point | {"SM groups": "66 of 2"}) is None
    assert not notices


def test_broken_contention_is_named_and_measured_again(cache, tmp_path, notices):
    point = {"layer": "block"}
    cache().store_contention(point, CONTENTION, None)
    (path,) = files(tmp_path)
    path.write_text(path.read_text().replace("0.75", "99"))
    assert cache().find_contention(point) is None
    assert "fill between 0 and 16" in notices[0]
