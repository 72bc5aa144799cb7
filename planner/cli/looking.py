"""The verbs `inspect`, `verify` and `diff`."""

from typing import Annotated, Any

import typer

from shardplan.layouts import DamagedCheckpointError, IncompleteCheckpointError

from ..checkpoints.comparing import compare, total_bytes
from ..checkpoints.opened import nbytes
from ..storage.places.files import files_at
from ..storage.unfinished import unfinished
from . import checking, listing
from .options import Checkpoint_, Filter, Json, Trust, keys_like, opened
from .output import NO, console, number, progress, say_json, stop, verb


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
    with opened(ckpt, trust_pickle) as checkpoint:
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
                f"no key matches {filter_!r}; there are {number(facts['tensors'])} tensors. Give a "
                "part of a key, or a pattern with * and ?; without --filter all are listed.",
                status=NO,
            )
        out.print()
        if table:
            listing.print_table(out, rows)
        else:
            listing.print_tree(out, rows, "keys" if filter_ is None else f"keys like {filter_}")


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

    Exit status 1 if it is not sound, a save that did not end included; each fault is named.
    """
    try:
        with opened(ckpt, trust_pickle) as checkpoint:
            stored = checkpoint.metadata.state_dict_metadata
            total = sum(map(nbytes, stored.values()))
            with progress("verifying", total, quiet=json_) as advance:
                faults = list(checkpoint.faults(checksums=checksums, advance=advance))
            beside = (
                unfinished(files_at(checkpoint.path)) if checkpoint.format == "shardplan" else []
            )
            checking.print_faults(
                faults,
                checkpoint,
                total,
                limit=limit,
                as_json=json_,
                checksums=checksums,
                beside=beside,
            )
    except (IncompleteCheckpointError, DamagedCheckpointError) as error:
        checking.print_unsound(ckpt, error, as_json=json_)
        raise typer.Exit(NO) from None
    if faults:
        raise typer.Exit(NO)


@verb
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint of any known format.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one, of any layout.")],
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
        opened(a, trust_pickle) as left,
        opened(b, trust_pickle) as right,
    ):
        for checkpoint in (left, right):
            mine = filter(wanted, checkpoint.metadata.state_dict_metadata)
            for key, what in checkpoint.coverage_faults(mine):
                raise IncompleteCheckpointError(
                    f"{key}: {what} in {checkpoint.path}. An incomplete checkpoint can't be "
                    "compared; see `shardplan verify`."
                )
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
    if filter_ and not found and not shared:
        stop(
            f"no key of A or B matches {filter_!r}; nothing was compared. See `shardplan inspect`."
        )
    checking.print_differences(found, len(shared), total, values, limit=limit, as_json=json_)
    if found:
        raise typer.Exit(NO)
