"""The program `spindle`: its verbs and exit codes.

    0   done
    1   the answer is no: nothing fits, or a launched job failed (its own code, if it gave one)
    2   misuse: arguments, or a file that is not what it should be
    129 a launched job was stopped by SIGHUP
    130 stopped by Ctrl-C
    141 the reader of stdout has closed it (SIGPIPE)
    143 a launched job was stopped by SIGTERM

A refusal is one line on stderr, never a traceback: a traceback is a bug of ours.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
import typer.core

from spindle import __version__
from spindle.cli.bound import bound
from spindle.cli.checkpoints import checkpoints
from spindle.cli.compare import compare
from spindle.cli.doctor import doctor
from spindle.cli.explain import explain
from spindle.cli.export import export
from spindle.cli.fleet import RUN_A_SCRIPT as FLEET_RUN_A_SCRIPT
from spindle.cli.fleet import SECTIONS as FLEET_SECTIONS
from spindle.cli.init import init
from spindle.cli.launch import JobEnded, launch
from spindle.cli.plan import plan
from spindle.cli.profile import profile
from spindle.cli.recipes import recipes
from spindle.cli.report import report
from spindle.cli.simulate import simulate
from spindle.cli.terminal import CLOSED_PIPE, leave_closed_pipe, printable, unwritable_output
from spindle.errors import DoesNotFitError, SpindleError

# The base class of "no such option": click's up to typer 0.25, typer's own since. This member exists in both.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
# Messages of click, and of newer versions of typer, for arguments that are not numbers.
_OUR_WORDS = (
    (r"'(.*)' is not a valid integer( range)?\.", r"expected a whole number, got '\1'"),
    (r"'(.*)' is not a valid float( range)?\.", r"expected a number, got '\1'"),
    (r"Input should be a valid integer.*", "expected a whole number"),
    (r"Input should be a valid number.*", "expected a number"),
    (r"Input should be greater than or equal to (\S+)", r"expected at least \1"),
    (r"Input should be less than or equal to (\S+)", r"expected at most \1"),
)
INTERRUPTED = 130
# The verbs, as the sections of `spindle --help`.
SECTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "Train": (init, doctor, launch, profile, report, checkpoints, export),
    "Plan without training": (recipes, compare, plan, simulate, bound, explain),
}
_RUN_A_SCRIPT = (launch, profile)
_FLEET_HELP = "Run or simulate many jobs on a cluster of mixed GPUs."


def _paragraphs(text: str) -> str:
    """A docstring with each paragraph on one line, for a terminal of any width to break."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def _without_values(parameters: list[Any]) -> list[Any]:
    """Parameters of which flags show no value: newer versions of typer print --help and --show-completion as a <bool>
    to be given."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) or parameter.name in ("install_completion", "show_completion"):
            parameter.metavar = ""
    return parameters


class _Command(typer.core.TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _without_values(super().get_params(ctx))


class _Group(typer.core.TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _without_values(super().get_params(ctx))


def make_app() -> typer.Typer:
    """Build the typer app; errors come out of it as exceptions."""
    app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False)
    app.callback()(_root)
    for section, verbs in SECTIONS.items():
        for verb in verbs:
            _add_verb(app, verb, section, takes_script=verb in _RUN_A_SCRIPT)
    fleet = typer.Typer(cls=_Group, no_args_is_help=True, help=_FLEET_HELP)
    for section, verbs in FLEET_SECTIONS.items():
        for verb in verbs:
            _add_verb(fleet, verb, section, takes_script=verb in FLEET_RUN_A_SCRIPT)
    app.add_typer(fleet, name="fleet", rich_help_panel="Schedule many jobs")
    return app


def _add_verb(app: typer.Typer, verb: Callable[..., Any], section: str, *, takes_script: bool) -> None:
    # Everything after a script is passed to it, even if it looks like an option.
    settings = {"allow_interspersed_args": not takes_script}
    text = _paragraphs(verb.__doc__ or "")
    app.command(cls=_Command, help=text, rich_help_panel=section, context_settings=settings)(verb)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"spindle {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", metavar="", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train several multimodal tasks in one step without leaving GPUs idle.

    Most commands take a training script, or the name of a recipe from the papers. Planning needs no GPU. Start with:

    spindle init two-tower -o train.py

    spindle launch -n 4 train.py

    spindle plan train.py --cluster h100x16

    spindle compare clip-4 --cluster a800x16
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit code."""
    try:
        code = make_app()(args=list(arguments), prog_name="spindle", standalone_mode=False)
        if isinstance(code, JobEnded):
            return code.code
        if code == INTERRUPTED:  # how newer versions of typer report Ctrl-C
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except SpindleError as error:
        _say(f"error: {str(error).rstrip()}")
        return 1 if isinstance(error, DoesNotFitError) else 2
    except _USAGE_ERROR as error:
        if text := _message(error):
            _say(f"error: {text} (see {_command(error)} --help)")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted, nothing written")
        return INTERRUPTED
    except OSError as error:
        if error.filename is not None:
            raise
        _say(f"error: {unwritable_output(error)}")  # from help, which rich prints
        return 2
    except SystemExit as exit_:
        return CLOSED_PIPE if exit_.code else 0  # rich, typer and we leave a closed pipe so; completion ends with 0


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr)


def _message(error: Exception) -> str:
    text = str(error.format_message())  # type: ignore[attr-defined]
    for pattern, words in _OUR_WORDS:
        text = re.sub(pattern, words, text)
    context = getattr(error, "ctx", None)
    if context is not None and text.startswith("Missing argument"):
        expected = [str(entry.metavar) for entry in context.command.params if entry.param_type_name == "argument"]
        text = f"{text.rstrip('.')}; expected {' '.join([_command(error), *expected])}"
    return text


def _command(error: Exception) -> str:
    """The command of a usage error: `spindle fleet submit`."""
    context = getattr(error, "ctx", None)
    return "spindle" if context is None else str(context.command_path)


def main() -> None:
    if sys.stderr is None:  # closed by the caller; print would write errors to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # as long as the program
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may lack a Gantt's letter
    sys.exit(_run_and_flush(sys.argv[1:]))


def _run_and_flush(arguments: Sequence[str]) -> int:
    """Run a command and flush stdout, whose last bytes may still fail to be written."""
    code = run(arguments)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        leave_closed_pipe()
    except OSError as error:
        _say(f"error: {unwritable_output(error)}")
        return 2
    return code
