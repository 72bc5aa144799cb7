"""The verbs `explain` and `show`: where a parameter's elements lie, in words and in pictures."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from shardplan.layouts import LayoutError

from ..checkpoints.opened import Checkpoint
from ..checkpoints.own import OwnCheckpoint
from ..recipes.files import Recipe, load_recipe, shipped
from ..recipes.forecast import forecast, place
from ..recipes.parameters import Parameter
from . import blocks, chain
from .drawing import check_drawable, draw_bytes, draw_panels
from .holders import Panel, find_parameters, locate, of_checkpoint, of_recipe, rank_of
from .options import Json, Trust, keys_like, opened
from .output import NO, console, errors, many, number, plain, say_json, stop, verb
from .planning import Config, parse_configuration

Source_ = Annotated[
    str, typer.Argument(metavar="CKPT|RECIPE", help="A checkpoint, or a recipe's name or file.")
]
Param = Annotated[
    str, typer.Option("--param", "-p", help="The tensor: its name, a part of it, or a pattern.")
]


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
        stop(
            f"--rank {rank}: {parallel.title} has the ranks 0 to {parallel.world_size - 1}.",
            as_json=json_,
        )
    placement = place(found.numbers, parallel)
    parameter = _parameter(found, param)
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
        out.print(f"              … and {number(len(boxes) - limit)} more (--limit)")


def _key(checkpoint: Checkpoint, pattern: str) -> str:
    """Returns the first key that a pattern means; says so if there are others.

    Raises:
        CheckpointError: If there is none; some that look like it are named.
    """
    wanted = keys_like(pattern)
    if pattern in checkpoint.tensors:
        return pattern
    found = [key for key in checkpoint.tensors if wanted(key)]
    if not found:
        checkpoint.tensor(pattern)  # raises, with keys that look like it
    _hint(pattern, found)
    return found[0]


def _parameter(recipe: Recipe, pattern: str) -> Parameter:
    """Returns the first of a recipe's parameters that a pattern means; says so if there are others."""
    found = find_parameters(recipe.numbers, keys_like(pattern), pattern)
    _hint(pattern, [parameter.name for parameter in found])
    return found[0]


def _hint(pattern: str, found: list[str]) -> None:
    """Says that a pattern means several tensors, of which the first is shown."""
    if len(found) > 1:
        others = ", ".join(found[1:4]) + (", …" if len(found) > 4 else "")
        text = (
            f"{pattern!r} means {many(len(found), 'tensor')}; this is the first. Others: {others}"
        )
        errors().print(plain(text))


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
    if laid is None and isinstance(checkpoint, OwnCheckpoint) and rank >= len(files):
        stop(
            f"rank {rank} is not in this checkpoint; {many(len(files), 'rank')} saved it, from 0",
            as_json=as_json,
        )
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
        if not boxes:
            raise typer.Exit(NO)
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
        out.print(f"  it wrote nothing of it; {panel.who} {shown} did")
        raise typer.Exit(NO)
    for name, start, length, offsets, sizes in boxes[:limit]:
        ranges = ", ".join(f"{o}:{o + s}" for o, s in zip(offsets, sizes, strict=True))
        text = f"{name}, bytes {start}:{start + length} → global [{ranges}]"
        out.print(f"  {plain(text)}")
    if len(boxes) > limit:
        out.print(f"  … and {number(len(boxes) - limit)} more (--limit)")


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
    if out is not None:
        check_drawable(out)
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
        parameter = _parameter(found, param)
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
