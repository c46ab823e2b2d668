"""The program `spindle`: its verbs put together, and what its exit codes mean.

    0   done
    1   the answer is no: nothing fits
    2   misuse: arguments, or a file that is not what it should be
    130 stopped by Ctrl-C
    141 whoever read the output has gone

A refusal is one line on stderr, never a traceback: a traceback is a bug of ours.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from spindle import __version__
from spindle.cli.bound import bound
from spindle.cli.compare import compare
from spindle.cli.explain import explain
from spindle.cli.plan import plan
from spindle.cli.recipe import recipe
from spindle.cli.recipes import recipes
from spindle.cli.simulate import simulate
from spindle.cli.terminal import CLOSED_PIPE
from spindle.errors import DoesNotFitError, SpindleError

# The family of "no such option": click's own up to typer 0.25, typer's since; both name it through one member.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
VERBS = (plan, simulate, compare, bound, explain, recipes, recipe)


def make_app() -> typer.Typer:
    """The command line as typer knows it; errors come out of it as exceptions."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_root)
    for verb in VERBS:
        app.command()(verb)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"spindle {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Plan and rehearse training steps that run several multimodal tasks at once.

    Give it a graph of ops with their times, or the name of a recipe, and the machines. Start with:

    spindle recipes

    spindle compare clip-4 --cluster a800x16

    spindle plan graph.json --devices 16 -o plan.json
    """


def run(arguments: Sequence[str]) -> int:
    """Runs one command; returns its exit code."""
    try:
        code = make_app()(args=list(arguments), prog_name="spindle", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SpindleError as error:
        print(f"error: {str(error).rstrip()}", file=sys.stderr)
        return 1 if isinstance(error, DoesNotFitError) else 2
    except _USAGE_ERROR as error:
        if text := _message(error):
            print(f"error: {text} (see spindle --help)", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except SystemExit:
        return CLOSED_PIPE  # the one reason for which rich, typer and we leave at once


def _message(error: Exception) -> str:
    return str(error.format_message())  # type: ignore[attr-defined]


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may lack a letter of the Gantt
    sys.exit(run(sys.argv[1:]))
