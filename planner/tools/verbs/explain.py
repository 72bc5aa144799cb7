"""The verb `explain`: where a parameter's elements lie, in words and numbers."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from ...checkpoints.opened import Checkpoint
from ...checkpoints.own import OwnCheckpoint
from ...cli.options import Json, Trust, opened
from ...cli.output import NO, console, many, number, plain, say_json, stop, verb
from ..recipes.forecast import place
from .panels import locate, of_checkpoint, rank_of
from .steps import Step, ownership, steps
from .subject import Config, Param, Source_, key_of, parameter_of, parse_configuration, source_of


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
    found = source_of(source)
    if isinstance(found, Path):
        with opened(found, trust_pickle) as checkpoint:
            _explain_checkpoint(checkpoint, key_of(checkpoint, param), rank, limit, json_)
        return
    parallel = parse_configuration(found, config)
    if not 0 <= rank < parallel.world_size:
        stop(
            f"--rank {rank}: {parallel.title} has the ranks 0 to {parallel.world_size - 1}.",
            as_json=json_,
        )
    placement = place(found.numbers, parallel)
    parameter = parameter_of(found, param)
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
    way = steps(layout, grid)
    itemsize = next(iter(found.state.values())).itemsize
    writes = ownership(layout, grid, itemsize)
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


def _print_way(way: list[Step], limit: int) -> None:
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
    way = [] if laid is None else steps(*laid)
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
