"""The `shardplan` command and its verbs; each one's work stands in a module of its own."""

import fnmatch
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..checkpoints.comparing import compare, total_bytes
from ..checkpoints.converting import FORMATS, convert
from ..checkpoints.opened import nbytes
from ..checkpoints.opening import open_checkpoint
from . import checking, listing
from .output import NO, console, number, progress, say_json, size, stop, verb

app = typer.Typer(
    name="shardplan",
    help="Look into sharded checkpoints, and plan them, without a GPU or a process group. "
    "Exit status: 0 all is well, 1 the answer is no (not sound, different), 2 no answer (error).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Checkpoint_ = Annotated[
    Path, typer.Argument(metavar="CKPT", help="A checkpoint's folder or file, of any known format.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-pickle",
        help="Unpickle what the checkpoint holds, whatever it is. That can run any code: "
        "only for checkpoints whose origin you trust.",
    ),
]
Filter = Annotated[
    str | None,
    typer.Option("--filter", "-f", metavar="PATTERN", help="Only keys that match, with * and ?."),
]


def keys_like(pattern: str | None) -> Callable[[str], bool]:
    """Returns a test for keys; a pattern without `*` matches any part of a key."""
    if pattern is None:
        return lambda key: True
    if not any(mark in pattern for mark in "*?["):
        return lambda key: pattern in key
    match = re.compile(fnmatch.translate(pattern)).match
    return lambda key: match(key) is not None


@app.command("inspect", epilog="Example: `shardplan inspect run7/step-1000 -f '*experts*'`")
@verb
def inspect_(
    ckpt: Checkpoint_,
    filter_: Filter = None,
    table: Annotated[
        bool, typer.Option("--table/--tree", help="One line for each kind of key, or a tree.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="With --json: every key with its chunks.")
    ] = False,
    json_: Json = False,
    trust_pickle: Trust = False,
) -> None:
    """Show what is in a checkpoint: keys, shapes, dtypes, bytes, chunks, files.

    Keys that differ only in numbers share a line: `layers.{0..47}.mlp.weight × 48`.
    """
    with open_checkpoint(ckpt, trust_pickle=trust_pickle) as checkpoint:
        facts = listing.summary(checkpoint)
        wanted = keys_like(filter_)
        if json_:
            found: dict[str, Any] = {**facts, "keys": []}
            for key, stored in checkpoint.metadata.state_dict_metadata.items():
                if wanted(key):
                    found["keys"].append(listing.entry(key, stored, every))
            say_json(found)
            return
        rows = listing.rows(checkpoint, wanted)
        out = console()
        listing.print_summary(out, facts)
        if not rows:
            stop(
                f"no key matches {filter_!r}; there are {number(facts['tensors'])} tensors",
                status=NO,
            )
        out.print()
        if table:
            listing.print_table(out, rows)
        else:
            listing.print_tree(out, rows, "keys" if filter_ is None else f"keys like {filter_}")


@app.command(epilog="Example: `shardplan verify run7/step-1000 && echo sound`")
@verb
def verify(
    ckpt: Checkpoint_,
    checksums: Annotated[
        bool,
        typer.Option("--checksums/--no-checksums", help="Read every byte and compare checksums."),
    ] = True,
    limit: Annotated[int, typer.Option(help="How many faults to print.")] = 20,
    json_: Json = False,
    trust_pickle: Trust = False,
) -> None:
    """Check that a checkpoint is complete: every element once, every file whole, checksums right.

    Exit status 1 if it is not sound; each fault is named.
    """
    with open_checkpoint(ckpt, trust_pickle=trust_pickle) as checkpoint:
        stored = checkpoint.metadata.state_dict_metadata
        total = sum(map(nbytes, stored.values()))
        with progress("verifying", total, quiet=json_) as advance:
            faults = list(checkpoint.faults(checksums=checksums, advance=advance))
        checking.print_faults(
            faults, checkpoint, total, limit=limit, as_json=json_, checksums=checksums
        )
    if faults:
        raise typer.Exit(NO)


@app.command(epilog="Example: `shardplan diff step-1000 step-1000-resharded --values`")
@verb
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint of any known format.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one, of any layout.")],
    values: Annotated[
        bool, typer.Option("--values", help="Compare values too, bit by bit, in bounded memory.")
    ] = False,
    filter_: Filter = None,
    limit: Annotated[int, typer.Option(help="How many differences to print.")] = 50,
    json_: Json = False,
    trust_pickle: Trust = False,
) -> None:
    """Compare two checkpoints: keys, shapes, dtypes and, with --values, every value.

    Exit status 1 if they differ.
    """
    wanted = keys_like(filter_)
    with (
        open_checkpoint(a, trust_pickle=trust_pickle) as left,
        open_checkpoint(b, trust_pickle=trust_pickle) as right,
    ):
        total = total_bytes(left, right, wanted) if values else 0
        with progress("comparing", total, quiet=json_) as advance:
            found = list(
                compare(
                    left,
                    right,
                    values=values,
                    wanted=wanted,
                    trust_pickle=trust_pickle,
                    advance=advance,
                )
            )
        shared = [
            key
            for key in left.metadata.state_dict_metadata
            if wanted(key) and key in right.metadata.state_dict_metadata
        ]
    checking.print_differences(found, len(shared), total, values, limit=limit, as_json=json_)
    if found:
        raise typer.Exit(NO)


@app.command("convert", epilog="Example: `shardplan convert run7/step-1000 model.pt --to torch`")
@verb
def convert_(
    ckpt: Checkpoint_,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder or file to make.")],
    to: Annotated[
        Literal["dcp", "torch", "safetensors"] | None,
        typer.Option(
            "--to", help="Format; by default from OUT's suffix: .pt, .safetensors, or dcp."
        ),
    ] = None,
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Leave out values that are no tensors.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    json_: Json = False,
    trust_pickle: Trust = False,
) -> None:
    """Write a checkpoint in another format: stock DCP, one torch.save file, or safetensors."""
    assert set(FORMATS) == {"dcp", "torch", "safetensors"}
    suffixes = {".pt": "torch", ".pth": "torch", ".bin": "torch", ".safetensors": "safetensors"}
    kind = to or suffixes.get(out.suffix, "dcp")
    check_free(out, overwrite)
    with open_checkpoint(ckpt, trust_pickle=trust_pickle) as checkpoint:
        total = sum(map(nbytes, checkpoint.tensors.values()))
        with progress("converting", total, quiet=json_) as advance:
            convert(
                checkpoint,
                out,
                kind,
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
            f"{out}: {number(facts['tensors'])} tensors, {number(facts['objects'])} other values, "
            f"{size(total)} as {kind}"
        )


def check_free(out: Path, overwrite: bool) -> None:
    """Refuses to write over what is there.

    Raises:
        typer.Exit: If `out` exists and may not be replaced.
    """
    taken = out.exists() and not (out.is_dir() and not any(out.iterdir()))
    if taken and not overwrite:
        stop(f"{out}: exists already. Choose another place, or pass --overwrite.")
    if not out.parent.exists():
        stop(f"{out}: the folder {out.parent} does not exist. Make it first.")


def main() -> None:
    """Runs the command."""
    app()
