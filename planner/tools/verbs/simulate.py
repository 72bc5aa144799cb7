"""The verb `simulate`: what a plan of a whole model does, before it runs."""

import dataclasses
import time
from typing import Annotated, Any

import typer
from rich.table import Table

from shardplan.layouts import LayoutError

from ...cli.options import Json
from ...cli.output import NO, console, many, number, plain, say_json, size, verb
from ..recipes.change import change
from ..recipes.files import Recipe, load_recipe, shipped
from ..recipes.forecast import Forecast, forecast, place
from ..recipes.parallel import Parallel
from ..recipes.trial import stock_bytes_per_chunk, time_planning
from .subject import Config, parse_configuration


@verb
def simulate(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="A shipped recipe's name, or a .toml file."),
    ] = None,
    config: Config = None,
    to: Annotated[
        str | None, typer.Option("--to", help="A second configuration: what loading it reads.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every configuration of the recipe.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--time/--no-time", help="Time the real planner on one rank.")
    ] = True,
    json_: Json = False,
) -> None:
    """Plan a model at full scale, without weights or GPUs: files, bytes and balance of all ranks.

    Exact: bytes are those of the planner's own rules. Without RECIPE, lists the shipped ones.
    Exit status 1 if dimensions do not divide; each is named.
    """
    if recipe is None:
        _list_recipes(json_)
        return
    loaded = load_recipe(recipe)
    chosen = list(loaded.parallel) if every else [parse_configuration(loaded, config)]
    second = None if to is None else parse_configuration(loaded, to)
    results = []
    for parallel in chosen:
        results.append(_simulate(loaded, parallel, second, measure))
    failed = any("error" in result for result in results)
    if json_:
        say_json({"recipe": loaded.name, "source": loaded.source, "configurations": results})
    else:
        for result in results:
            _print_simulation(loaded, result)
    if failed:
        raise typer.Exit(NO)


def _simulate(
    recipe: Recipe, parallel: Parallel, second: Parallel | None, measure: bool
) -> dict[str, Any]:
    sizes = {
        field.name: getattr(parallel, field.name)
        for field in dataclasses.fields(Parallel)
        if field.name != "name"
    }
    result: dict[str, Any] = {
        "name": parallel.title,
        "ranks": parallel.world_size,
        "sizes": sizes,
    }
    begin = time.perf_counter()
    try:
        placement = place(recipe.numbers, parallel)
        other = None if second is None else place(recipe.numbers, second)
    except LayoutError as error:
        return {**result, "error": str(error)}
    found: Forecast = forecast(placement, recipe.state)
    result |= {
        "keys": found.keys,
        "chunks": found.chunks,
        "bytes": found.bytes,
        "files": int((found.rank_bytes > 0).sum()),
        "rank_bytes": _spread(found.rank_bytes),
        "rank_chunks": _spread(found.rank_chunks),
        "balance": round(found.balance, 6),
        "stage_balance": [round(b, 6) for b in _by_stage(found)],
        "stock_metadata_bytes": round(found.chunks * stock_bytes_per_chunk()),
    }
    if measure:
        trial = time_planning(placement, recipe.state)
        result |= {
            "planning_seconds": round(trial.first, 4),
            "planning_again_seconds": round(trial.again, 5),
            "message_bytes": trial.message,
            "layouts_bytes": trial.layouts,
        }
    if other is not None and second is not None:
        reads = change(placement, other, recipe.state)
        needed = int(reads.rank_bytes.sum())
        result["change"] = {
            "to": second.title,
            "ranks": second.world_size,
            "bytes_read": needed,
            "rank_bytes": _spread(reads.rank_bytes),
            "rank_reads": _spread(reads.rank_reads),
            "whole_chunk_bytes": reads.whole_bytes,
            "whole_chunk_factor": round(reads.whole_bytes / max(needed, 1), 4),
        }
    result["seconds"] = round(time.perf_counter() - begin, 3)
    return result


def _spread(values: Any) -> dict[str, float]:
    return {
        "least": int(values.min()),
        "mean": round(float(values.mean()), 1),
        "most": int(values.max()),
    }


def _by_stage(found: Forecast) -> list[float]:
    """Returns the busiest rank over the mean inside each pipeline stage."""
    stages = found.rank_bytes.reshape(found.parallel.pp, -1)
    return [float(s.max() / s.mean()) if s.mean() else 1.0 for s in stages]


def _print_simulation(recipe: Recipe, result: dict[str, Any]) -> None:
    out = console()
    sizes = result["sizes"]
    named = ", ".join(
        f"{axis} {sizes[axis]}"
        for axis in ("tp", "pp", "dp_shard", "dp_replicate", "ep", "etp")
        if sizes[axis] > 1
    )
    out.print(
        f"[bold]{plain(recipe.name)}[/] on {many(result['ranks'], 'rank')}: {named or 'one rank'}, "
        f"fsdp {sizes['fsdp']}"
    )
    if "error" in result:
        out.print(f"[bold red]does not fit[/]: {plain(result['error'])}\n")
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    spread, chunks = result["rank_bytes"], result["rank_chunks"]
    table.add_row("checkpoint", f"{size(result['bytes'])} in {many(result['files'], 'file')}")
    table.add_row("on disk", f"{many(result['keys'], 'tensor')}, {many(result['chunks'], 'chunk')}")
    table.add_row(
        "each rank writes",
        f"{size(spread['least'])} to {size(spread['most'])}, {size(spread['mean'])} on average; "
        f"{number(chunks['least'])} to {many(chunks['most'], 'chunk')}",
    )
    inside = max(result["stage_balance"])
    balance = f"the busiest rank writes {100 * (result['balance'] - 1):.2f} % more than the mean"
    if sizes["pp"] > 1:
        balance += f" ({100 * (inside - 1):.2f} % inside a pipeline stage)"
    table.add_row("balance", balance)
    if "planning_seconds" in result:
        table.add_row(
            "planning, one rank",
            f"{1000 * result['planning_seconds']:.0f} ms the first time, "
            f"{1000 * result['planning_again_seconds']:.1f} ms when nothing changed (measured)",
        )
        table.add_row(
            "messages",
            f"{size(result['message_bytes'])} from each rank, and {size(result['layouts_bytes'])} "
            "of layouts from one rank of each pipeline stage",
        )
    table.add_row(
        "stock .metadata",
        f"{size(result['stock_metadata_bytes'])}, by the size of a pickled sample",
    )
    if "change" in result:
        reads = result["change"]
        table.add_row(
            f"change to {reads['to']}",
            f"{size(reads['bytes_read'])} read by {many(reads['ranks'], 'rank')}, "
            f"{size(reads['rank_bytes']['most'])} and {many(reads['rank_reads']['most'], 'part')} "
            "at most",
        )
        table.add_row("", f"a reader of whole chunks: {reads['whole_chunk_factor']:.2f} times that")
    table.add_row("this took", f"{result['seconds']:.1f} s")
    out.print(table)
    out.print()


def _list_recipes(as_json: bool) -> None:
    found = [load_recipe(name) for name in shipped()]
    if as_json:
        say_json(
            [
                {"name": r.name, "source": r.source, "configurations": [p.name for p in r.parallel]}
                for r in found
            ]
        )
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("recipe", "configurations", "numbers from"):
        table.add_column(column, overflow="fold")
    for r in found:
        table.add_row(r.name, ", ".join(p.name for p in r.parallel), r.source)
    console().print(table)
