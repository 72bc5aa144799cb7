"""The verb `export`: a checkpoint as a Hugging Face model; and what it shares with `import`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ...cli.options import Checkpoint_, Json, Overwrite, Trust, opened
from ...cli.output import console, many, plain, progress, say_json, size, stop, verb
from ..huggingface.transfer import export_checkpoint, plan_export
from ..recipes.files import load_recipe
from ..recipes.numbers import Numbers, read_config

Config = Annotated[
    Path | None,
    typer.Option("--config", help="The model's config.json, or the folder that holds it."),
]
Recipe_ = Annotated[
    str | None,
    typer.Option("--recipe", help="Take the model's numbers from a recipe instead; see simulate."),
]


@verb
def export_(
    ckpt: Checkpoint_,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    to: Annotated[Literal["hf"], typer.Option("--to", help="Whose form: Hugging Face's.")] = "hf",
    config: Config = None,
    recipe: Recipe_ = None,
    section: Annotated[
        str | None,
        typer.Option("--section", help="Section of the state dict that holds the model."),
    ] = None,
    shard_size: Annotated[
        str, typer.Option("--shard-size", help="Most bytes of one file: 5GiB, 500MB, ….")
    ] = "5GiB",
    threads: Annotated[int, typer.Option("--threads", help="Files written at a time.")] = 2,
    overwrite: Overwrite = False,
    json_: Json = False,
    trust_pickle: Trust = False,
) -> None:
    """Write a training checkpoint as a Hugging Face model: safetensors, index, config.json.

    Reads any layout and format under Megatron-Core's names; splits QKV, SwiGLU halves and Gated
    DeltaNet components, names experts one by one and drops vocabulary padding. Streams: a few
    blocks of 32 MiB are in memory at a time.
    """
    numbers = numbers_of(config, recipe, None)
    with opened(ckpt, trust_pickle) as checkpoint:
        plan = plan_export(checkpoint, numbers, section=section)
        total = plan.nbytes
        with progress("exporting", total, quiet=json_) as advance:
            export_checkpoint(
                checkpoint,
                out,
                numbers,
                section=section,
                config=config,
                shard_bytes=_bytes(shard_size),
                threads=threads,
                overwrite=overwrite,
                advance=advance,
                plan=plan,
            )
    files = sorted(path.name for path in out.glob("*.safetensors"))
    say_written(out, plan.tensors, plan.left, total, files, json_)
    if config is None and not json_:
        console().print("no config.json was copied: pass --config to make the folder loadable")


def numbers_of(config: Path | None, recipe: str | None, folder: Path | None) -> Numbers:
    """Returns the model's numbers from whichever was given."""
    if recipe is not None:
        return load_recipe(recipe).numbers
    if config is not None:
        return read_config(config)
    if folder is not None:
        return read_config(folder)
    stop(
        "the model's numbers are not known. Pass --config with its config.json (it is copied into "
        "the export), or --recipe with the name of a recipe."
    )


def say_written(
    out: Path, tensors: Any, left: list[str], total: int, files: list[str], as_json: bool
) -> None:
    """Prints what was written, and which keys were left over."""
    if as_json:
        say_json(
            {
                "out": str(out),
                "tensors": len(tensors),
                "bytes": total,
                "files": files,
                "left_over": left,
            }
        )
        return
    text = f"{plain(str(out))}: {many(len(tensors), 'tensor')}, {size(total)} in {many(len(files), 'file')}"
    console().print(text)
    if left:
        shown = plain(", ".join(left[:5])) + (", …" if len(left) > 5 else "")
        console().print(f"left over, not written: {many(len(left), 'key')} ({shown})")


def _bytes(text: str) -> int:
    """Returns a number of bytes from text such as `5GiB`."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", 1):
        units |= {letter: 1024**power, letter + "ib": 1024**power, letter + "b": 1000**power}
    digits = text.strip().lower().rstrip("bikmgt")
    unit = text.strip().lower()[len(digits) :].strip()
    try:
        found = int(float(digits) * units[unit])
    except (KeyError, ValueError):
        found = 0
    if found <= 0:
        stop(f"--shard-size {text}: no number of bytes. Write it as 5GiB or 500MB.")
    return found
