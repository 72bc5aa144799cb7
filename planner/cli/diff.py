"""The verb `diff`: in what two checkpoints differ."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from shardplan.layouts import IncompleteCheckpointError

from ..checkpoints.comparing import Difference, compare, total_bytes
from .options import Filter, Json, Trust, keys_like, opened
from .output import NO, console, many, number, plain, progress, say_json, size, stop, verb


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
    _print_differences(found, len(shared), total, values, limit=limit, as_json=json_)
    if found:
        raise typer.Exit(NO)


def _print_differences(
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
