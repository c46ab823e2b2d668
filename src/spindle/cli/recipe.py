"""`spindle recipe`: a recipe as a workload file, to read or to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def recipe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of `spindle recipes`.", show_default=False)],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="WORKLOAD.json", help="Write the workload here.", show_default=False),
    ],
) -> None:
    """Write a recipe's workload to a file.

    The file has tasks, modules and costs; the fitted roofline stays with the recipe's name. Example:

    spindle recipe clip-4 -o clip-4.json
    """
    from spindle.cli.pipelines import refuse_multimodal
    from spindle.cli.terminal import notice, refuse_outputs
    from spindle.errors import InputError
    from spindle.recipes import RECIPES
    from spindle.workload import write_workload

    refuse_multimodal(name)
    if name not in RECIPES:
        raise InputError(f"no recipe is called {name!r}; recipes: {', '.join(RECIPES)}")
    refuse_outputs(output)
    write_workload(output, RECIPES[name].workload())
    notice(f"wrote {output}")
