"""The verbs `simulate`, `explain` and `show`: what a plan does, before it runs."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from shardplan.layouts import LayoutError

from ..checkpoints.opened import Checkpoint
from ..checkpoints.own import OwnCheckpoint
from ..recipes.change import change
from ..recipes.files import Recipe, load_recipe, shipped
from ..recipes.forecast import Forecast, forecast, place
from ..recipes.parallel import Parallel
from ..recipes.trial import stock_bytes_per_chunk, time_planning
from . import blocks, chain
from .drawing import draw_bytes, draw_panels
from .holders import Panel, find_parameter, locate, of_checkpoint, of_recipe, rank_of
from .options import Json, Trust, keys_like, opened
from .output import NO, console, number, plain, say_json, size, stop, verb

Source_ = Annotated[
    str, typer.Argument(metavar="CKPT|RECIPE", help="A checkpoint, or a recipe's name or file.")
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config", "-c", help="Configuration: its name in the recipe, or tp=2,ep=8,dp_shard=64."
    ),
]
Param = Annotated[
    str, typer.Option("--param", "-p", help="The tensor: its name, a part of it, or a pattern.")
]


def parse_configuration(recipe: Recipe, text: str | None) -> Parallel:
    """Returns a configuration by its name in the recipe, or from sizes such as `tp=2,ep=8`.

    Raises:
        LayoutError: If there is none of that name, or a size is no number.
    """
    if text is None or "=" not in text:
        return recipe.configuration(text)
    values: dict[str, Any] = {}
    known = [f.name for f in dataclasses.fields(Parallel)]
    for pair in text.replace(" ", "").split(","):
        name, _, value = pair.partition("=")
        if name not in known:
            raise LayoutError(f"--config {text}: no axis {name!r}. There are {', '.join(known)}.")
        try:
            values[name] = value if name in ("fsdp", "name") else int(value)
        except ValueError:
            raise LayoutError(f"--config {text}: {name} is {value!r}, not a number.") from None
    return Parallel(**values)


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
        f"[bold]{plain(recipe.name)}[/] on {number(result['ranks'])} ranks: {named or 'one rank'}, "
        f"fsdp {sizes['fsdp']}"
    )
    if "error" in result:
        out.print(f"[bold red]does not fit[/]: {plain(result['error'])}\n")
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    spread, chunks = result["rank_bytes"], result["rank_chunks"]
    table.add_row("checkpoint", f"{size(result['bytes'])} in {number(result['files'])} files")
    table.add_row("on disk", f"{number(result['keys'])} tensors, {number(result['chunks'])} chunks")
    table.add_row(
        "each rank writes",
        f"{size(spread['least'])} to {size(spread['most'])}, {size(spread['mean'])} on average; "
        f"{number(chunks['least'])} to {number(chunks['most'])} chunks",
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
            f"{size(reads['bytes_read'])} read by {number(reads['ranks'])} ranks, "
            f"{size(reads['rank_bytes']['most'])} and {number(reads['rank_reads']['most'])} parts "
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


def _source(text: str) -> Recipe | Path:
    """Returns the recipe or the checkpoint that an argument means."""
    path = Path(text)
    if path.exists() and path.suffix != ".toml":
        return path
    try:
        return load_recipe(text)
    except LayoutError as error:
        if path.suffix == ".toml" or "neither a recipe" not in str(error):
            raise
        raise LayoutError(
            f"{text}: neither a checkpoint that exists nor a recipe. Shipped recipes: "
            f"{', '.join(shipped())}."
        ) from None


@verb
def explain(
    source: Source_,
    param: Param,
    rank: Annotated[int, typer.Option("--rank", "-r", help="The rank.")] = 0,
    config: Config = None,
    limit: Annotated[int, typer.Option(help="How many boxes of each space to print.")] = 8,
    json_: Json = False,
    trust_pickle: Trust = False,
) -> None:
    """Follow one parameter on one rank through all spaces: storage, local, component, global.

    Of a checkpoint: which of the rank's bytes are which part of the tensor.
    """
    found = _source(source)
    if isinstance(found, Path):
        with opened(found, trust_pickle) as checkpoint:
            _explain_checkpoint(checkpoint, _key(checkpoint, param), rank, limit, json_)
        return
    parallel = parse_configuration(found, config)
    if not 0 <= rank < parallel.world_size:
        stop(f"--rank {rank}: {parallel.title} has the ranks 0 to {parallel.world_size - 1}.")
    placement = place(found.numbers, parallel)
    parameter = find_parameter(found.numbers, keys_like(param), param)
    layout, home = locate(placement, parameter)
    grid = parallel.grids(rank).of(layout.family)
    for axis, what in (("pp", "pipeline stage"), ("ep", "expert-parallel rank")):
        held = parameter.expert is not None or axis == "pp"
        if held and grid.index(axis) != home.index(axis):
            stop(
                f"{parameter.name}: rank {rank} is {what} {grid.index(axis)} ({grid.facts()}) and "
                f"does not hold it; {what} {home.index(axis)} does.",
                as_json=json_,
                status=NO,
            )
    way = chain.steps(layout, grid)
    itemsize = next(iter(found.state.values())).itemsize
    writes = chain.ownership(layout, grid, itemsize)
    if json_:
        say_json(
            {
                "parameter": parameter.name,
                "rank": rank,
                "configuration": parallel.title,
                "coordinate": dict(zip(grid.axes, grid.coordinate, strict=True)),
                "steps": [dataclasses.asdict(step) for step in way],
                "writes": writes,
            }
        )
        return
    out = console()
    out.print(f"[bold]{plain(parameter.name)}[/] on rank {rank} of {plain(parallel.title)}")
    out.print(f"  {plain(grid.facts())}\n")
    _print_way(way, limit)
    out.print(f"\n{plain(writes)}")


def _print_way(way: list[chain.Step], limit: int) -> None:
    out = console()
    last = ""
    for step in way:
        arrow = "  " if step.space == "storage" else "→ "
        name = step.space if step.space != last else ""
        last = step.space
        out.print(f"{arrow if name else '  '}[bold cyan]{name:<10}[/]{plain(step.words)}")
        _print_boxes(step.boxes, limit)


def _print_boxes(boxes: Any, limit: int) -> None:
    out = console()
    for key, shape, text in boxes[:limit]:
        short = key.rpartition(".")[2] if len(key) > 40 else key
        out.print(f"              {plain(f'{short} {list(shape)} {text}')}")
    if len(boxes) > limit:
        out.print(f"              … and {number(len(boxes) - limit)} more boxes (--limit)")


def _key(checkpoint: Checkpoint, pattern: str) -> str:
    """Returns the first key that a pattern means.

    Raises:
        CheckpointError: If there is none; some that look like it are named.
    """
    wanted = keys_like(pattern)
    if pattern in checkpoint.tensors:
        return pattern
    for key in checkpoint.tensors:
        if wanted(key):
            return key
    checkpoint.tensor(pattern)  # raises, with keys that look like it
    return pattern


def _explain_checkpoint(
    checkpoint: Checkpoint, key: str, rank: int, limit: int, as_json: bool
) -> None:
    panel = of_checkpoint(checkpoint, key)
    stored = checkpoint.tensor(key)
    files = sorted(checkpoint.file_bytes())
    boxes = []
    for chunk in stored.chunks:
        name, start, length = checkpoint.chunk_bytes(key, chunk)
        mine = (rank_of(name) if panel.who == "rank" else files.index(name)) == rank
        if mine:
            boxes.append((name, start, length, list(chunk.offsets), list(chunk.sizes)))
    laid = checkpoint.layout(key, rank) if isinstance(checkpoint, OwnCheckpoint) else None
    way = [] if laid is None else chain.steps(*laid)
    if as_json:
        names = ("file", "start", "length", "offsets", "sizes")
        say_json(
            {
                "key": key,
                "shape": list(stored.size),
                "rank": rank,
                "grid": None if laid is None else laid[1].facts(),
                "steps": [dataclasses.asdict(step) for step in way],
                "chunks": [dict(zip(names, box, strict=True)) for box in boxes],
            }
        )
        return
    out = console()
    dtype = str(stored.properties.dtype).removeprefix("torch.")
    shape = plain(str(list(stored.size)))
    out.print(f"[bold]{plain(key)}[/] {dtype} {shape} as {panel.who} {rank} wrote it")
    if laid is None:
        out.print("  [dim]this format holds no layouts: storage → global[/]")
    else:
        out.print(f"  {plain(laid[1].facts())}\n")
        _print_way(way, limit)
        out.print()
    if not boxes:
        holders = sorted({held.rank for held in panel.held})
        shown = ", ".join(map(str, holders[:16])) + (" …" if len(holders) > 16 else "")
        out.print(f"  it wrote nothing of it; {panel.who}s {shown} did")
        raise typer.Exit(NO)
    for name, start, length, offsets, sizes in boxes[:limit]:
        ranges = ", ".join(f"{o}:{o + s}" for o, s in zip(offsets, sizes, strict=True))
        text = f"{name}, bytes {start}:{start + length} → global [{ranges}]"
        out.print(f"  {plain(text)}")
    if len(boxes) > limit:
        out.print(f"  … and {number(len(boxes) - limit)} more chunks (--limit)")


@verb
def show(
    source: Source_,
    param: Param,
    config: Config = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", help="What to show beside it: a second configuration, or another checkpoint."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write OUT.png and .svg, OUT-bytes.png and .svg."),
    ] = None,
    json_: Json = False,
    trust_pickle: Trust = False,
) -> None:
    """Show who holds what of a tensor: boxes coloured by rank, before and after a change.

    Prints blocks in the terminal; with --out draws pictures, and a second one of bytes per rank.
    """
    found = _source(source)
    panels: list[Panel] = []
    loads: list[tuple[str, Any]] = []
    if isinstance(found, Path):
        for path in [found, *([Path(to)] if to else [])]:
            with opened(path, trust_pickle) as checkpoint:
                title = _key(checkpoint, param)
                panels.append(of_checkpoint(checkpoint, title))
                held = checkpoint.file_bytes()
                loads.append((path.name, [held[name] for name in sorted(held)]))
        what = "in files"
    else:
        parameter = find_parameter(found.numbers, keys_like(param), param)
        title = f"{found.name}: {parameter.name}"
        wanted = [config, *([to] if to else [])]
        for text in wanted:
            placement = place(found.numbers, parse_configuration(found, text))
            panels.append(of_recipe(placement, parameter))
            loads.append((panels[-1].title, forecast(placement, found.state).rank_bytes))
        what = "written"
    files: list[Path] = []
    if out is not None:
        files += draw_panels(panels, title, out)
        heading = found.name if isinstance(found, Path) else f"{found.name}: bytes per rank"
        files += draw_bytes(loads, what, heading, out.with_name(out.name + "-bytes"))
    if json_:
        say_json(
            {
                "tensor": title,
                "panels": [dataclasses.asdict(panel) for panel in panels],
                "files": [str(path) for path in files],
            }
        )
        return
    screen = console()
    screen.print(f"[bold]{plain(title)}[/]\n")
    for panel in panels:
        blocks.print_panel(screen, panel)
    for path in files:
        screen.print(f"wrote {path}", markup=False)
