"""The verb `convert`: a checkpoint in another format."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..checkpoints.converting import convert
from ..checkpoints.opened import nbytes
from .options import Checkpoint_, Json, Overwrite, Trust, opened
from .output import console, many, plain, progress, say_json, size, stop, verb

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
