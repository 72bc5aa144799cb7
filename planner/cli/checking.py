"""What `verify` and `diff` print."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from ..checkpoints.comparing import Difference
from ..checkpoints.opened import Checkpoint, Fault
from .output import console, many, number, plain, say_json, size


def print_faults(
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


def print_unsound(path: str, error: Exception, *, as_json: bool) -> None:
    """Prints why a checkpoint can't be opened at all."""
    text = str(error)
    if as_json:
        fault = Fault(path, text)
        say_json({"path": path, "sound": False, "faults": [fault._asdict()]})
        return
    out = console()
    out.print(f"[red]✗[/] {plain(text)}", soft_wrap=True)
    out.print(f"[bold red]not sound[/]: {plain(path)}", soft_wrap=True)


def print_differences(
    found: Sequence[Difference],
    shared: int,
    total: int,
    values: bool,
    *,
    limit: int,
    as_json: bool,
) -> None:
    """Prints in what two checkpoints differ, or that they do not."""
    counts: dict[str, int] = {}
    for difference in found:
        counts[difference.kind] = counts.get(difference.kind, 0) + 1
    if as_json:
        differences: list[dict[str, Any]] = [dataclasses.asdict(d) for d in found]
        say_json(
            {
                "equal": not found,
                "shared_keys": shared,
                "values_compared": values,
                "counts": counts,
                "differences": differences,
            }
        )
        return
    out = console()
    if found:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("key", "difference", "A", "B", "elements", "max abs", "max rel"):
            right = name in ("elements", "max abs", "max rel")
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for d in found[:limit]:
            measured = (
                ("", "", "")
                if d.elements is None
                else (number(d.elements), f"{d.max_abs:.3g}", f"{d.max_rel:.3g}")
            )
            cells = (d.key, d.kind, d.a, d.b, *measured)
            table.add_row(*map(plain, cells))
        out.print(table)
        if len(found) > limit:
            out.print(f"… and {number(len(found) - limit)} more (--limit)")
        kinds = ", ".join(f"{kind} {number(count)}" for kind, count in counts.items())
        out.print(f"[bold red]different[/]: {kinds}; {many(shared, 'key')} in both")
        return
    what = f"every value of {size(total)} bit by bit" if values else "keys, shapes and dtypes"
    hint = "" if values else " (values not compared: --values)"
    out.print(f"[bold green]equal[/]: {many(shared, 'key')}, {what}{hint}")
