"""Pictures with matplotlib: who holds what of a tensor, and bytes per rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.layouts import LayoutError

from ...cli.output import size
from .panels import Panel, Rectangle, color

_INK = "#1f2328"
_LINE = "#ffffff"


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise LayoutError(
            "pictures need matplotlib. Install it with pip install 'shardplan[pictures]', or leave "
            "out --out to see blocks in the terminal."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "font.size": 10,
            "axes.edgecolor": "#8c959f",
            "axes.labelcolor": _INK,
            "text.color": _INK,
            "xtick.color": _INK,
            "ytick.color": _INK,
            "svg.fonttype": "path",
        }
    )
    return pyplot


def check_drawable(stem: Path) -> None:
    """Checks that pictures can be drawn and have a place, before there is any work done.

    Raises:
        LayoutError: If they can't or have none.
    """
    if not stem.parent.is_dir():
        raise LayoutError(f"{stem}: the folder {stem.parent} does not exist. Make it first.")
    _pyplot()


def draw_panels(panels: Sequence[Panel], title: str, stem: Path) -> list[Path]:
    """Draws panels side by side and writes them as PNG and SVG.

    Args:
        panels: One for each layout, before and after.
        title: The tensor's name.
        stem: Path without a suffix.

    Returns:
        The files written.
    """
    plot = _pyplot()
    labelled = any(len(panel.parts) > 1 for panel in panels)
    width = (4.6 if labelled else 4.2) * len(panels) + 0.6
    figure, axes = plot.subplots(
        1, len(panels), figsize=(width, 4.9), squeeze=False, layout="constrained"
    )
    figure.suptitle(title, fontsize=11, fontweight="bold", wrap=True)
    for axis, panel in zip(axes[0], panels, strict=True):
        _panel(axis, panel)
    return _write(figure, plot, stem)


def _panel(axis: Any, panel: Panel) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle as Patch

    patches, colors = [], []
    for held in panel.held:
        (top, bottom), (left, right) = held.rows, held.columns
        patches.append(Patch((left, top), right - left, bottom - top))
        colors.append(color(held.rank, panel.world))
    few = len(panel.held) <= 200
    axis.add_collection(
        PatchCollection(
            patches, facecolor=colors, edgecolor=_LINE if few else "none", linewidth=0.8
        )
    )
    axis.set_xlim(0, panel.columns)
    axis.set_ylim(panel.rows, 0)
    ranks = len({held.rank for held in panel.held})
    copies = max(held.copies for held in panel.held)
    below = f"{len(panel.held):,} boxes on {ranks * copies:,} {panel.who}s"
    if copies > 1:
        below += f", {copies} copies of each"
    axis.set_title(f"{panel.title}\n{below}", fontsize=9.5)
    axis.set_xlabel("columns")
    axis.set_xticks([0, panel.columns])
    axis.set_xticklabels(["0", f"{panel.columns:,}"])
    _rows(axis, panel)
    for spine in axis.spines.values():
        spine.set_visible(False)
    if few:
        _numbers(axis, panel)


def _rows(axis: Any, panel: Panel) -> None:
    """Labels the rows: components where there are several, else first and last."""
    if len(panel.parts) <= 1:
        axis.set_yticks([0, panel.rows])
        axis.set_yticklabels(["0", f"{panel.rows:,}"])
        axis.set_ylabel("rows")
        return
    smallest = panel.rows / 26
    marks, names, reached = [], [], -smallest
    for name, start, stop in panel.parts:
        middle = max((start + stop) / 2, reached + smallest)
        marks.append(middle)
        names.append(f"{name} {stop - start:,}")
        reached = middle
    over = reached - (panel.rows - smallest / 2)
    if over > 0:  # thin components at the end: move their labels up, one under the other
        limit = panel.rows - smallest / 2
        for i in reversed(range(len(marks))):
            marks[i] = min(marks[i], limit)
            limit = marks[i] - smallest
    axis.set_yticks(marks)
    axis.set_yticklabels(names)
    axis.tick_params(axis="y", length=0)
    for _, start, _ in panel.parts[1:]:
        axis.axhline(start, color=_INK, linewidth=1.0)


def _numbers(axis: Any, panel: Panel) -> None:
    """Writes the rank into every rectangle that is large enough."""
    for held in panel.held:
        (top, bottom), (left, right) = held.rows, held.columns
        high = bottom - top
        if high < panel.rows / 36 or right - left < panel.columns / 14:
            continue
        text = _label(held, panel)
        axis.text(
            (left + right) / 2,
            (top + bottom) / 2,
            text,
            ha="center",
            va="center",
            fontsize=8.5 if high >= panel.rows / 26 else 7,
        )


def _label(held: Rectangle, panel: Panel) -> str:
    return f"{held.rank}" if panel.world <= 64 else f"{panel.who} {held.rank}"


def draw_bytes(rows: Sequence[tuple[str, Any]], what: str, title: str, stem: Path) -> list[Path]:
    """Draws bytes per rank, one panel for each layout, and writes PNG and SVG.

    Args:
        rows: Name of the layout and bytes of each rank.
        what: What the bytes are: written, read.
        title: Heading.
        stem: Path without a suffix.

    Returns:
        The files written.
    """
    plot = _pyplot()
    figure, axes = plot.subplots(
        len(rows), 1, figsize=(8.6, 1.2 + 2.3 * len(rows)), squeeze=False, layout="constrained"
    )
    figure.suptitle(title, fontsize=11, fontweight="bold")
    for axis, (name, values) in zip(axes[:, 0], rows, strict=True):
        counts = np.asarray(values, dtype=float)
        unit, label = _unit(float(counts.max()) if len(counts) else 0.0)
        ranks = np.arange(len(counts))
        colors = [color(int(rank), len(counts)) for rank in ranks]
        if len(counts) <= 256:
            axis.bar(ranks, counts / unit, width=0.9, color=colors)
        else:
            axis.fill_between(ranks, counts / unit, step="mid", color="#8fb8de")
        mean = float(counts.mean())
        axis.axhline(mean / unit, color=_INK, linewidth=1.0, linestyle="--")
        busiest = float(counts.max()) / mean if mean else 1.0
        axis.set_title(
            f"{name}: {size(mean)} per rank on average, the busiest {100 * (busiest - 1):.2f} % more",
            fontsize=9.5,
        )
        axis.set_xlim(-0.6, len(counts) - 0.4)
        axis.set_ylim(0, None)
        axis.set_ylabel(f"{label} {what}")
        axis.set_xlabel("rank")
        axis.spines[["top", "right"]].set_visible(False)
    return _write(figure, plot, stem)


def _unit(largest: float) -> tuple[float, str]:
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return float(1024**power), name
    return 1.0, "bytes"


def _write(figure: Any, plot: Any, stem: Path) -> list[Path]:
    written = []
    for suffix in (".png", ".svg"):
        path = stem.with_name(stem.name + suffix)
        metadata = {"Date": None} if suffix == ".svg" else {}
        figure.savefig(path, dpi=120, metadata=metadata, bbox_inches="tight")
        written.append(path)
    plot.close(figure)
    return written
