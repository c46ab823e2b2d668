"""`spindle fleet`: its verbs, one per file."""

from spindle.cli.fleet.compare import compare
from spindle.cli.fleet.estimate import estimate
from spindle.cli.fleet.explain import explain
from spindle.cli.fleet.nodes import nodes
from spindle.cli.fleet.replay import replay
from spindle.cli.fleet.simulate import simulate

VERBS = (estimate, simulate, compare, explain, nodes, replay)
