"""`spindle fleet`: its verbs, one per file."""

from collections.abc import Callable
from typing import Any

from spindle.cli.fleet.compare import compare
from spindle.cli.fleet.down import down
from spindle.cli.fleet.drain import drain
from spindle.cli.fleet.estimate import estimate
from spindle.cli.fleet.explain import explain
from spindle.cli.fleet.logs import logs
from spindle.cli.fleet.nodes import nodes
from spindle.cli.fleet.replay import replay
from spindle.cli.fleet.resume import resume
from spindle.cli.fleet.sbatch import sbatch
from spindle.cli.fleet.simulate import simulate
from spindle.cli.fleet.status import status
from spindle.cli.fleet.stop import stop
from spindle.cli.fleet.submit import submit
from spindle.cli.fleet.up import up

RUN_A_SCRIPT = (submit, sbatch)
# The verbs, as the sections of `spindle fleet --help`.
SECTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Live fleets": (up, submit, status, logs, stop, resume, drain, down, sbatch),
    "Estimates and simulation": (estimate, simulate, compare, explain, nodes, replay),
}
