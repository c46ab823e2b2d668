"""An attempt that waits in a Ray for devices that another user of it holds: python shared_ray.py ADDRESS NODE FOLDER

A process of its own: how Ray finds itself on loopback is read when it is imported.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from spindle.fleet import NodeShare, ray_engine
from spindle.fleet.engine import RUNNING, AttemptStart
from spindle.fleet.ray_cluster import ID_LABEL, RayCluster
from spindle.fleet.store import Submission


class Holder:
    def answer(self) -> bool:
        return True


def wait(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + 120
    while not condition():
        if time.monotonic() > end_s:
            sys.exit(f"not within 120 s: {what}")
        time.sleep(0.1)


def main(address: str, node: str, folder: str) -> None:
    ray_engine._PENDING_S, ray_engine._OTHERS_S = 0.5, 0.2
    cluster = RayCluster(address)
    engine = ray_engine.RayEngine("another", cluster)

    def num_occupied() -> int:
        return engine.nodes()[node].num_occupied

    try:
        engine.nodes()
        options = {"num_cpus": 0, "num_gpus": 2, "label_selector": {ID_LABEL: cluster.ids[node]}}
        holder = cluster.ray.remote(**options)(Holder).remote()
        cluster.ray.get(holder.answer.remote(), timeout=60)
        submission = Submission(
            command=("sleep", "120"), is_script=False, folder=folder, logs=f"{folder}/logs", environment={}
        )
        share = NodeShare(node=node, num_devices=2)
        engine.start(AttemptStart(job="job", attempt=1, nodes=(share,), submission=submission, grace_s=1.0))
        wait(lambda: num_occupied() == 2 and engine.poll()[0].is_crowded_out, "the other's devices are noticed")
        # A scheduler that is started again knows at once that they are not free.
        print("restarted:", ray_engine.RayEngine("restarted", cluster).nodes()[node].num_occupied, flush=True)
        cluster.ray.kill(holder)
        wait(lambda: num_occupied() == 0 and engine.poll()[0].phase == RUNNING, "they are free again")
        time.sleep(1.0)
        print("of others:", num_occupied(), engine.poll()[0].phase)  # the attempt's own do not count
    finally:
        engine.close(end_machines=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
