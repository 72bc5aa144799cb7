"""The verbs `convert`, `finalize`, `export` and `import`: a checkpoint in another form."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..checkpoints.converting import convert
from ..checkpoints.opened import nbytes
from ..huggingface.transfer import export_checkpoint, import_checkpoint, plan_export, plan_import
from ..recipes.files import load_recipe
from ..recipes.numbers import Numbers, read_config
from ..storage import finalize
from .options import Checkpoint_, Json, Trust, opened
from .output import console, many, plain, progress, say_json, size, stop, verb

Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace a checkpoint that is there, as a whole, once the new one is complete.",
    ),
]
# What people expect a single file of some other kind under.
_OTHERS = (".ckpt", ".gz", ".h5", ".npy", ".npz", ".onnx", ".pkl", ".tar", ".zip")


@verb
def convert_(
    ckpt: Checkpoint_,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder or file to make.")],
    to: Annotated[
        Literal["dcp", "shardplan", "torch", "safetensors"] | None,
        typer.Option(
            "--to", help="Format; by default from OUT's suffix: .pt, .safetensors, else dcp."
        ),
    ] = None,
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Leave out values that are no tensors.")
    ] = False,
    overwrite: Overwrite = False,
    json_: Json = False,
    trust_pickle: Trust = False,
) -> None:
    """Write a checkpoint in another format: stock DCP, our own, a torch.save file, safetensors.

    OUT appears when it is complete; if anything fails, what was there before is as it was.
    """
    suffixes = {".pt": "torch", ".pth": "torch", ".bin": "torch", ".safetensors": "safetensors"}
    if to is None and out.suffix in _OTHERS:
        stop(
            f"{out}: {out.suffix} is no format of a checkpoint, and a folder of that name would "
            f"look like one. Name the format with --to, or give OUT one of {', '.join(suffixes)}.",
            as_json=json_,
        )
    kind = to or suffixes.get(out.suffix, "dcp")
    with opened(ckpt, trust_pickle) as checkpoint:
        total = sum(map(nbytes, checkpoint.tensors.values()))
        with progress("converting", total, quiet=json_) as advance:
            convert(
                checkpoint,
                out,
                kind,
                overwrite=overwrite,
                tensors_only=tensors_only,
                trust_pickle=trust_pickle,
                advance=advance,
            )
        facts: dict[str, Any] = {
            "out": str(out),
            "format": kind,
            "tensors": len(checkpoint.tensors),
            "objects": 0 if tensors_only else len(checkpoint.objects),
            "bytes": total,
        }
    if json_:
        say_json(facts)
    else:
        console().print(
            f"{plain(str(out))}: {many(facts['tensors'], 'tensor')}, {many(facts['objects'], 'other value')}, "
            f"{size(total)} as {kind}"
        )


@verb
def finalize_(
    ckpt: Annotated[
        str, typer.Argument(metavar="CKPT", help="A checkpoint in our own format: folder or URL.")
    ],
    json_: Json = False,
) -> None:
    """Write stock DCP's .metadata beside a checkpoint in our own format.

    Stock tools then list it. They can also load it if it was saved with
    SafetensorsWriter(stock=True); otherwise a stock load names our reader.
    """
    readable = finalize(ckpt)
    if json_:
        say_json({"path": ckpt, "stock_load": readable})
        return
    can = "list and load" if readable else "list, but not load (save with stock=True for that),"
    console().print(f"{plain(ckpt)}: .metadata is written; stock DCP can {can} this checkpoint")


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
    numbers = _numbers(config, recipe, None)
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
    _say(out, plan.tensors, plan.left, total, files, json_)
    if config is None and not json_:
        console().print("no config.json was copied: pass --config to make the folder loadable")


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
    dcp.load reads the Hugging Face folder directly (shardplan.planner.huggingface).
    """
    numbers = _numbers(config, recipe, source)
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
    _say(ckpt, plan.tensors, plan.left, total, files, json_)


def _numbers(config: Path | None, recipe: str | None, folder: Path | None) -> Numbers:
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


def _say(
    out: Path, tensors: Any, left: list[str], total: int, files: list[str], as_json: bool
) -> None:
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
