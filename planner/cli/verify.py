"""The verb `verify`: whether a checkpoint is sound."""

from collections.abc import Sequence
from typing import Annotated

import typer

from shardplan.layouts import DamagedCheckpointError, IncompleteCheckpointError

from ..checkpoints.opened import Checkpoint, Fault, nbytes
from ..storage.places.files import files_at
from ..storage.unfinished import unfinished
from .options import Checkpoint_, Json, Trust, opened
from .output import NO, console, many, number, plain, progress, say_json, size, verb


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
            _print_faults(
                faults,
                checkpoint,
                total,
                limit=limit,
                as_json=json_,
                checksums=checksums,
                beside=beside,
            )
    except (IncompleteCheckpointError, DamagedCheckpointError) as error:
        _print_unsound(ckpt, error, as_json=json_)
        raise typer.Exit(NO) from None
    if faults:
        raise typer.Exit(NO)


def _print_faults(
    faults: Sequence[Fault],
    checkpoint: Checkpoint,
    total: int,
    *,
    limit: int,
    as_json: bool,
    checksums: bool,
    beside: Sequence[str],
) -> None:
    """Prints what is wrong with a checkpoint, or that nothing is, and what lies beside it."""
    if as_json:
        say_json(
            {
                "path": str(checkpoint.path),
                "format": checkpoint.format,
                "sound": not faults,
                "checksums": checksums and checkpoint.has_checksums,
                "bytes": total,
                "faults": [fault._asdict() for fault in faults],
                "beside": list(beside),
            }
        )
        return
    out = console()
    for text in beside:
        out.print(f"beside it: {plain(text)}")
    for fault in faults[:limit]:
        out.print(f"[red]✗[/] {plain(f'{fault.where}: {fault.what}')}")
    if len(faults) > limit:
        out.print(f"… and {number(len(faults) - limit)} more (--limit)")
    if faults:
        out.print(
            f"[bold red]not sound[/]: {many(len(faults), 'fault')} in {plain(checkpoint.path)}"
        )
        return
    how = "every element once, files whole"
    if checksums and checkpoint.has_checksums:
        how += ", checksums right"
    elif not checkpoint.has_checksums:
        how += "; this format has no checksums"
    else:
        how += "; checksums not compared"
    keys = len(checkpoint.metadata.state_dict_metadata)
    out.print(
        f"[bold green]sound[/]: {many(keys, 'key')}, {size(total)} in {plain(checkpoint.path)}: {how}"
    )


def _print_unsound(path: str, error: Exception, *, as_json: bool) -> None:
    """Prints why a checkpoint can't be opened at all."""
    text = str(error)
    if as_json:
        fault = Fault(path, text)
        say_json({"path": path, "sound": False, "faults": [fault._asdict()]})
        return
    out = console()
    out.print(f"[red]✗[/] {plain(text)}", soft_wrap=True)
    out.print(f"[bold red]not sound[/]: {plain(path)}", soft_wrap=True)
