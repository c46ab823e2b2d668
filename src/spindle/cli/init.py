"""`spindle init`: a commented training script to start from."""

from __future__ import annotations

from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

TEMPLATES = {
    "two-tower": "contrastive training of an image tower and a text tower",
    "vlm": "fine-tuning of a Hugging Face vision-language model",
    "multitask": "several tasks in one step, with shared encoders",
}


def init(
    template: Annotated[
        str, typer.Argument(metavar="TEMPLATE", help=f"One of {', '.join(TEMPLATES)}.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="TRAIN.py", help="Write the script here.")] = Path(
        "train.py"
    ),
) -> None:
    """Write a training script to start from: it runs as it is, even on a CPU, and marks the places to change.

    two-tower trains an image and a text tower contrastively. vlm fine-tunes a Hugging Face vision-language model.
    multitask trains three tasks with shared encoders in one step. An existing file is not overwritten. Examples:

    spindle init two-tower -o train.py

    spindle init vlm -o vlm.py
    """
    from spindle.cli.terminal import notice, refuse_outputs, show_text
    from spindle.errors import InputError

    if template not in TEMPLATES:
        described = "; ".join(f"{name}: {text}" for name, text in TEMPLATES.items())
        raise InputError(f"there is no template {template!r}; expected one of {described}")
    if output.exists():
        raise InputError(f"{output}: exists already; give another name with -o, or remove it first")
    refuse_outputs(output)
    output.write_text(script(template, output.name), encoding="utf-8")
    if template == "vlm" and find_spec("transformers") is None:
        notice("this script needs transformers: pip install 'spindle-train[hf]'")
    commands = (f"python {output}", f"spindle launch -n 2 {output}", f"spindle report runs/{template} -o step.html")
    show_text("\n  ".join([f"wrote {output}. Next:", *commands]) + "\n")


def script(template: str, name: str) -> str:
    """The text of a template, as a script with this file name."""
    path = files("spindle.cli") / "templates" / f"{template.replace('-', '_')}.py"
    return path.read_text(encoding="utf-8").replace("{name}", name)
