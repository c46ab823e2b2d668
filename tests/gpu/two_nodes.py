"""Two agents of torchrun on one machine, as two nodes: python tests/gpu/two_nodes.py [--backend nccl|gloo] [--ranks 2]

Islands must come out of the nodes, and losses must be those of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "nodes.py"
LIMIT_S = 150


def run_nodes(backend: str, ranks_per_node: int, num_nodes: int = 2) -> dict[str, object]:
    """What rank 0 of the training says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        "SPINDLE_TEST_BACKEND": backend,
    }
    if backend == "gloo":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(num_nodes)]
    torchrun += ["--nproc-per-node", str(ranks_per_node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    agents = [
        subprocess.Popen(
            [*torchrun, "--node-rank", str(node), str(SCRIPT)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(num_nodes)
    ]
    try:
        said = [agent.communicate(timeout=LIMIT_S) for agent in agents]
    except subprocess.TimeoutExpired:
        for agent in agents:
            agent.terminate()  # which ends its ranks
        raise
    for agent, (_, errors) in zip(agents, said, strict=True):
        assert agent.returncode == 0, errors
    answer: dict[str, object] = json.loads(said[0][0].splitlines()[-1])
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    parser.add_argument("--ranks", type=int, default=2, help="of each node")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    from spindle.launch.mps import VIRTUAL_VARIABLE, shared_gpu

    with shared_gpu(2 * options.ranks) if options.backend == "nccl" else nullcontext({}) as shared:
        os.environ |= {name: value for name, value in shared.items() if name != VIRTUAL_VARIABLE}
        answer = run_nodes(options.backend, options.ranks)
    print(json.dumps(answer))
    assert answer["islands"] == [options.ranks] * 2, answer
    assert float(str(answer["error"])) < 1e-9, answer
    return 0


if __name__ == "__main__":
    sys.exit(main())
