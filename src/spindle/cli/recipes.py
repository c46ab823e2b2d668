"""`spindle recipes`: the papers' workloads that come with Spindle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spindle.cli.options import AsJson

if TYPE_CHECKING:
    from spindle.recipes import MultimodalModel, Recipe


def recipes(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this recipe.", show_default=False)] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="WORKLOAD.json", help="Write the recipe's workload here.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes (the papers' workloads), or write one to a workload file.

    The column of samples counts those of all tasks in one step. Multimodal models are planned batch by batch, as
    pipelines, on the clusters of their paper. A workload file contains tasks, modules and costs, and can be edited; it
    does not contain the fitted roofline of the recipe. Examples:

    spindle plan clip-4 --cluster a800x16

    spindle plan vlm-s --microbatches 16

    spindle recipes clip-4 -o clip-4.json
    """
    from spindle.cli.terminal import notice, refuse_outputs, show, show_json
    from spindle.display import facts
    from spindle.errors import InputError
    from spindle.recipes import MODELS, RECIPES
    from spindle.workload import write_workload

    if name is not None and name not in RECIPES and name not in MODELS:
        raise InputError(f"no recipe is called {name!r}; recipes: {', '.join([*RECIPES, *MODELS])}")
    if output is not None:
        if name is None:
            raise InputError(f"-o {output}: give the name of a recipe, such as clip-4, to write its workload")
        if name in MODELS:
            raise InputError(f"{name} is a multimodal model, whose batches differ, so there is no workload to write")
        refuse_outputs(output)
        write_workload(output, RECIPES[name].workload())
        notice(f"wrote {output}")
        return
    static = [recipe for recipe in RECIPES.values() if name in (None, recipe.name)]
    models = [model for model in MODELS.values() if name in (None, model.name)]
    if as_json:
        listed = [_sizes(recipe) | {"chosen_by_us": list(recipe.chosen)} for recipe in static]
        show_json({"recipes": listed, "models": [_model_sizes(model) for model in models]})
        return
    if static:
        show(facts([_row(recipe) for recipe in static]))
    if models:
        heading = [] if name else ["", "Multimodal models, for plan, compare and simulate:"]
        show(*heading, facts([_model_row(model) for model in models]))


def _row(recipe: Recipe) -> tuple[str, str]:
    from spindle.display import large

    sizes = _sizes(recipe)
    counts = ", ".join(f"{sizes[name]:,} {name}" for name in ("tasks", "modules", "ops", "samples"))
    return recipe.name, f"{recipe.description}\n{counts}, {large(recipe.workload().num_parameters)} weights"


def _model_row(model: MultimodalModel) -> tuple[str, str]:
    from spindle.display import large

    return (
        model.name,
        f"{model.description}, {large(model.num_parameters)} weights\n"
        f"tensor degree {model.tensor_degree} × {model.num_stages} stages, {model.cluster_name}",
    )


def _sizes(recipe: Recipe) -> dict[str, Any]:
    from spindle.graph import metagraph_of

    workload = recipe.workload()
    return {
        "name": recipe.name,
        "description": recipe.description,
        "tasks": len(workload.tasks),
        "modules": len(workload.modules),
        "ops": len(metagraph_of(workload).metaops),
        "samples": sum(task.batch_size for task in workload.tasks),
        "weights": workload.num_parameters,
    }


def _model_sizes(model: MultimodalModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "description": model.description,
        "weights": model.num_parameters,
        "tensor_degree": model.tensor_degree,
        "num_stages": model.num_stages,
        "cluster": model.cluster_name,
    }
