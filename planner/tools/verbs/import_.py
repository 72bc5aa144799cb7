"""The verb `import`: a Hugging Face model as a checkpoint."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ...cli.options import Json, Overwrite, opened
from ...cli.output import progress, verb
from ..huggingface.transfer import import_checkpoint, plan_import
from .export import Config, Recipe_, numbers_of, say_written


@verb
def import_(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A Hugging Face model's folder.")],
    ckpt: Annotated[Path, typer.Argument(metavar="CKPT", help="The checkpoint to make.")],
    from_: Annotated[
        Literal["hf"], typer.Option("--from", help="Whose form: Hugging Face's.")
    ] = "hf",
    config: Config = None,
    recipe: Recipe_ = None,
    section: Annotated[
        str, typer.Option("--section", help="Section of the state dict for the model.")
    ] = "model",
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Write a Hugging Face model as a checkpoint that any parallel configuration loads.

    The result is a stock DCP checkpoint under Megatron-Core's names. To load into a running job,
    dcp.load reads the Hugging Face folder directly (shardplan.planner.tools.huggingface).
    """
    numbers = numbers_of(config, recipe, source)
    with opened(source) as checkpoint:
        plan = plan_import(checkpoint, numbers, section=section)
        total = plan.nbytes
        with progress("importing", total, quiet=json_) as advance:
            import_checkpoint(
                checkpoint,
                ckpt,
                numbers,
                section=section,
                overwrite=overwrite,
                advance=advance,
                plan=plan,
            )
    files = sorted(path.name for path in ckpt.glob("*.distcp"))
    say_written(ckpt, plan.tensors, plan.left, total, files, json_)
