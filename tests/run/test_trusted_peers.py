"""No code of a stranger runs in a rank: what is unpickled is signed, and nothing listens for other hosts."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


from preloaded import run_spindle  # noqa: E402
from spindle.errors import PeerLostError, TrainingError  # noqa: E402
from spindle.launch import variables  # noqa: E402
from spindle.run import World, signed_pickle  # noqa: E402
from spindle.run.pytrees import meta_from_bytes  # noqa: E402
from spindle.run.world import peers  # noqa: E402


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("secret", ["", "ours"])
def test_a_signed_value_comes_back_and_another_is_not_unpickled(secret, tmp_path, monkeypatch):
    monkeypatch.setenv(variables.SECRET, secret)
    assert signed_pickle.loads(signed_pickle.dumps({"a": [1, 2]})) == {"a": [1, 2]}
    planted = Planted(tmp_path / "planted")
    stranger = [pickle.dumps(planted), b"\0" * 32 + pickle.dumps(planted), b"", b"short"]
    monkeypatch.setenv(variables.SECRET, "theirs")
    for message in [*stranger, signed_pickle.dumps(planted)]:
        monkeypatch.setenv(variables.SECRET, secret)
        for read in (signed_pickle.loads, meta_from_bytes):
            with pytest.raises(TrainingError, match="does not have the signature of this job"):
                read(message)
    assert not planted.path.exists()


def receive_from_a_stranger(rank: int, size: int, folder: str) -> list[str]:
    """Rank 1 has another secret, and takes part in every operation that sends pickled values."""
    world = World(rank, size, torch.device("cpu"))
    os.environ[variables.SECRET] = "theirs" if rank == 1 else "ours"
    planted = Planted(Path(folder) / "planted")
    world.group("loss", (0, 1))
    refused = []
    try:
        for operation in (
            lambda: world.broadcast_object(planted, source=1),
            lambda: world.gather_objects(planted if rank == 1 else None),
            lambda: world.all_gather_objects(planted if rank == 1 else None, "loss", (0, 1)),
        ):
            try:
                operation()
            except TrainingError as error:
                refused.append(str(error))
    finally:
        del os.environ[variables.SECRET]
    return refused


def test_ranks_with_other_secrets_run_nothing_that_they_are_sent(pool, tmp_path):
    refused, _ = pool.run(2, receive_from_a_stranger, str(tmp_path))
    assert len(refused) == 3
    assert all("ranks were started with different SPINDLE_SECRET" in text for text in refused)
    assert list(tmp_path.iterdir()) == []


def exchange_objects(rank: int, size: int) -> tuple:
    world = World(rank, size, torch.device("cpu"))
    world.group("loss", (0, 2))
    sent = {"from": rank, "long": "x" * (10 ** (2 * rank))}
    some = world.all_gather_objects(rank, "loss", (0, 2)) if rank != 1 else None
    return [value["from"] for value in world.gather_objects(sent)], world.broadcast_object(rank, source=2), some


def test_values_of_all_lengths_reach_the_ranks_they_are_for(pool):
    assert pool.run(3, exchange_objects) == [([0, 1, 2], 2, [0, 2]), ([], 2, None), ([], 2, [0, 2])]


SOCKETS = """
import os, re
from pathlib import Path

from spindle.run import join_world

world = join_world()
assert world.broadcast_object(world.rank) == 0
world.barrier()
inodes = set()
for descriptor in Path("/proc/self/fd").iterdir():
    try:
        inodes |= set(re.findall(r"socket:\\[(\\d+)\\]", os.readlink(descriptor)))
    except OSError:
        pass
listening = []
for table in ("tcp", "tcp6"):
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[9] in inodes and fields[3] == "0A":
            listening.append(fields[1].partition(":")[0])
print(sorted(set(world.broadcast_object(world.gather_objects(listening))[0])))
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_under_our_launcher_nothing_listens_but_on_loopback(tmp_path):
    (tmp_path / "sockets.py").write_text(SOCKETS)
    done = run_spindle("launch", "-n", "2", str(tmp_path / "sockets.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['0100007F']\n"  # 127.0.0.1


def test_memory_that_cannot_be_allocated_is_no_lost_peer():
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as failed, peers("moving parameters"):
        torch.empty(1 << 50)
    assert not isinstance(failed.value, PeerLostError)
    with pytest.raises(PeerLostError, match="noticed while moving parameters"), peers("moving parameters"):
        raise RuntimeError("Connection closed by peer")


def test_a_worker_of_a_loader_that_is_lost_during_an_exchange_is_no_lost_rank():
    # torch raises it in a signal handler, in the middle of whatever the main thread does
    error = "DataLoader worker (pid 7) is killed by signal: Killed."
    with pytest.raises(RuntimeError, match="DataLoader worker") as failed, peers("waiting for it"):
        raise RuntimeError(error)
    assert not isinstance(failed.value, PeerLostError)
