"""The verb `show`: who holds what of a tensor, as coloured blocks and as pictures."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.style import Style
from rich.text import Text

from ...cli.options import Json, Trust, opened
from ...cli.output import console, plain, say_json, verb
from ..recipes.forecast import forecast, place
from .panels import Panel, color, of_checkpoint, of_recipe
from .pictures import check_drawable, draw_bytes, draw_panels
from .subject import Config, Param, Source_, key_of, parameter_of, parse_configuration, source_of

_SIGNS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_WIDTH, _HEIGHT = 48, 16


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
    found = source_of(source)
    panels: list[Panel] = []
    loads: list[tuple[str, Any]] = []
    if isinstance(found, Path):
        for path in [found, *([Path(to)] if to else [])]:
            with opened(path, trust_pickle) as checkpoint:
                title = key_of(checkpoint, param)
                panels.append(of_checkpoint(checkpoint, title))
                held = checkpoint.file_bytes()
                loads.append((path.name, [held[name] for name in sorted(held)]))
        what = "in files"
    else:
        parameter = parameter_of(found, param)
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
        _print_panel(screen, panel)
    for path in files:
        screen.print(f"wrote {path}", markup=False)


def _print_panel(out: Console, panel: Panel) -> None:
    """Prints who holds what as a raster of characters; each stands for the element in its middle.

    A character is the rank modulo 62, as one digit.
    """
    heading = f"{panel.title}: {panel.rows} × {panel.columns}"
    out.print(heading, style="bold", markup=False)
    owner = _raster(panel)
    labels = {_cell(start, panel.rows): name for name, start, _ in panel.parts if name}
    width = max((len(name) for name in labels.values()), default=0)
    for row, cells in enumerate(owner):
        line = Text(f"{labels.get(row, ''):>{width}} " if width else "")
        for rank in cells:
            if rank < 0:
                line.append(" ")
                continue
            sign = _SIGNS[rank % len(_SIGNS)]
            r, g, b = (round(255 * part) for part in color(rank, panel.world))
            style = Style(color="black", bgcolor=f"rgb({r},{g},{b})")
            line.append(sign, style)
        out.print(line)
    ranks = sorted({held.rank for held in panel.held})
    copies = {held.copies for held in panel.held}
    shown = ", ".join(map(str, ranks[:12])) + (f", … {ranks[-1]}" if len(ranks) > 12 else "")
    kept = f"; each part on {max(copies)} ranks" if max(copies, default=1) > 1 else ""
    who = panel.who if len(ranks) == 1 else panel.who + "s"
    boxes = f"{len(panel.held)} box{'' if len(panel.held) == 1 else 'es'}"
    out.print(f"{boxes} of {who} {shown}{kept}\n", markup=False)


def _cell(row: int, rows: int) -> int:
    height = min(_HEIGHT, max(rows, 1))
    return min(row * height // max(rows, 1), height - 1)


def _raster(panel: Panel) -> list[list[int]]:
    """Returns which rank holds the element in the middle of each cell, -1 for none."""
    height, width = min(_HEIGHT, max(panel.rows, 1)), min(_WIDTH, max(panel.columns, 1))
    repeat = max(1, 12 // width)
    cells = [[-1] * width for _ in range(height)]
    middles_y = [(2 * y + 1) * panel.rows // (2 * height) for y in range(height)]
    middles_x = [(2 * x + 1) * panel.columns // (2 * width) for x in range(width)]
    for held in panel.held:
        ys = [y for y, m in enumerate(middles_y) if held.rows[0] <= m < held.rows[1]]
        xs = [x for x, m in enumerate(middles_x) if held.columns[0] <= m < held.columns[1]]
        for y in ys:
            for x in xs:
                cells[y][x] = held.rank
    return [[rank for rank in row for _ in range(repeat)] for row in cells]
