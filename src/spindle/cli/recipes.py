"""`spindle recipes`: the paper's workloads that come with Spindle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spindle.cli.options import AsJson

if TYPE_CHECKING:
    from spindle.recipes import MultimodalModel, Recipe


def recipes(as_json: AsJson = False) -> None:
    """List the recipes: the papers' workloads, ready to plan.

    Samples are of all tasks in one step. Multimodal models are planned batch by batch, as pipelines; their clusters are
    those of the paper. Examples:

    spindle plan clip-4 --cluster a800x16

    spindle plan vlm-s --microbatches 16
    """
    from spindle.cli.terminal import show, show_json
    from spindle.recipes import MODELS, RECIPES
    from spindle.report.facts import facts
    from spindle.report.quantities import large

    if as_json:
        listed = [_sizes(recipe) | {"chosen_by_us": list(recipe.chosen)} for recipe in RECIPES.values()]
        show_json({"recipes": listed, "models": [_model_sizes(model) for model in MODELS.values()]})
        return
    rows = []
    for recipe in RECIPES.values():
        sizes = _sizes(recipe)
        counts = ", ".join(f"{sizes[name]:,} {name}" for name in ("tasks", "modules", "ops", "samples"))
        rows.append((recipe.name, f"{recipe.description}\n{counts}, {large(recipe.workload().num_parameters)} weights"))
    models = [
        (
            model.name,
            f"{model.description}, {large(model.num_parameters)} weights\n"
            f"tensor degree {model.tensor_degree} × {model.num_stages} stages, {model.cluster_name}",
        )
        for model in MODELS.values()
    ]
    show(facts(rows), "", "Multimodal models, for plan, compare, search and simulate:", facts(models))


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
