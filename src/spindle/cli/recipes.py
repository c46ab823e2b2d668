"""`spindle recipes`: the paper's workloads that come with Spindle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spindle.cli.options import AsJson

if TYPE_CHECKING:
    from spindle.recipes import Recipe


def recipes(as_json: AsJson = False) -> None:
    """List the recipes: the paper's workloads, ready to plan.

    Samples are of all tasks in one step. Example:

    spindle plan clip-4 --cluster a800x16
    """
    from spindle.cli.terminal import show, show_json
    from spindle.recipes import RECIPES
    from spindle.report.facts import facts
    from spindle.report.quantities import large

    if as_json:
        show_json({"recipes": [_sizes(recipe) | {"chosen_by_us": list(recipe.chosen)} for recipe in RECIPES.values()]})
        return
    rows = []
    for recipe in RECIPES.values():
        sizes = _sizes(recipe)
        counts = ", ".join(f"{sizes[name]:,} {name}" for name in ("tasks", "modules", "ops", "samples"))
        rows.append((recipe.name, f"{recipe.description}\n{counts}, {large(recipe.workload().num_parameters)} weights"))
    show(facts(rows))


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
