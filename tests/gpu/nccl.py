"""Real NCCL with several ranks on one GPU: `python tests/gpu/nccl.py NUM_RANKS SCRIPT [ARGUMENTS]...`

NCCL refuses two ranks on one GPU if they say that they are on one host, so each says that it is on another. Everything
goes over loopback sockets: right for semantics (communicators, streams, order, failures), not for speed. MPS lets the
ranks' kernels run side by side; without it a kernel that waits for its peer holds its turn on the GPU.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT_S = 240


@contextmanager
def nccl_environment(num_ranks: int) -> Iterator[list[dict[str, str]]]:
    """The environments of ranks that share one GPU, while MPS runs."""
    from spindle.launch.mps import VIRTUAL_VARIABLE, shared_gpu

    with shared_gpu(num_ranks) as client, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        common = {key: value for key, value in client.items() if key != VIRTUAL_VARIABLE}
        common |= {
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        yield [os.environ | common | {"RANK": str(rank), "NCCL_HOSTID": f"host{rank}"} for rank in range(num_ranks)]


def run(num_ranks: int, command: list[str], limit_s: float = LIMIT_S) -> int:
    """Runs a command on all ranks; prints rank 0's output, and that of a rank that fails. Ends all when one does."""
    with nccl_environment(num_ranks) as environments, tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}" for rank in range(num_ranks)]
        ranks = [
            subprocess.Popen(command, env=one, stdout=log.open("w"), stderr=subprocess.STDOUT)
            for one, log in zip(environments, logs, strict=True)
        ]
        end_s = time.monotonic() + limit_s
        codes: list[int | None] = [None]
        while None in codes and not any(codes) and time.monotonic() < end_s:
            time.sleep(0.1)
            codes = [rank.poll() for rank in ranks]
        time.sleep(1.0 if any(codes) else 0.0)
        is_late = None in codes and not any(codes)
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGABRT if is_late else signal.SIGKILL)  # where faulthandler is on, says where
        for rank in ranks:
            rank.wait()
        print(logs[0].read_text())
        for number, (code, log) in enumerate(zip(codes, logs, strict=True)):
            if number and (code or is_late):
                print(f"== rank {number}, exit code {code}{', stopped' if is_late else ''}\n{log.read_text()[-6000:]}")
        return max((abs(code) for code in codes if code), default=124 if is_late else 0)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), [sys.executable, "-X", "faulthandler", *sys.argv[2:]]))
