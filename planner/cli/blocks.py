"""Panels as coloured blocks in the terminal."""

import colorsys

from rich.console import Console
from rich.style import Style
from rich.text import Text

from .holders import Panel

_SIGNS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_WIDTH, _HEIGHT = 48, 16


def color(rank: int, world: int) -> tuple[float, float, float]:
    """Returns a rank's colour, the same in every picture: red, green and blue from 0 to 1.

    Few ranks have colours far apart; many run once through the spectrum.
    """
    if world <= 16:
        hue = (rank * 0.618034) % 1.0
        light = 0.70 + 0.08 * (rank % 2)
    else:
        hue = 0.83 * rank / max(world - 1, 1)
        light = 0.60 + 0.08 * (rank % 2)
    return colorsys.hls_to_rgb(hue, light, 0.62)


def print_panel(out: Console, panel: Panel) -> None:
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
