"""The README's figures, from result files and nothing else.

    python benchmarks/plot.py benchmarks/results/*.jsonl --into docs/pictures

| figure | from | shows |
|---|---|---|
| `planning.svg` | `plan` | the coordinator's time and metadata over the number of ranks |
| `save_load_DEVICE.svg` | `save_load` | each way's time as a multiple of the limit |
| `async_DEVICE.svg` | `save_load` | how long each way holds training, beside the plain copy |
| `reshard.svg` | `reshard` | bytes read ÷ bytes needed for each change of layout |

Of several runs the largest state is drawn. A figure without results is left out.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from summary import Row, of, read

COLORS = {
    "own": "#1b6ca8",
    "own-stager": "#1b6ca8",
    "own-prepared": "#1b6ca8",
    "own-collectives": "#4f9bd0",
    "own-unverified": "#4f9bd0",
    "own-gap": "#2f7f6f",
    "ours": "#8fc1e3",
    "limit": "#444444",
}
OTHERS = "#d98c5f"


def _color(way: str) -> str:
    """Returns the color of a way; numbers of threads make no difference."""
    return COLORS.get(re.sub(r"-t\d+$", "", way), OTHERS)


def planning(rows: list[Row]) -> Any:
    """Returns the figure of planning time over ranks, None without results."""
    plans = of(rows, benchmark="plan", kind="global")
    if not plans:
        return None
    count = max(row["parameters"] for row in plans)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for layout, style in (("even", "o-"), ("flat", "s--")):
        found = sorted(of(plans, parameters=count, layout=layout), key=lambda r: r["ranks"])
        ranks = [row["ranks"] for row in found]
        for way, seconds, nbytes in (
            ("own", [r["commit_s"] for r in found], "manifest_bytes"),
            ("ours", [r["seconds"] for r in found], "metadata_bytes"),
        ):
            label = f"{'own' if way == 'own' else 'stock'} storage, {layout}"
            left.plot(ranks, seconds, style, color=COLORS[way], label=label)
            size = [row[nbytes] / 1e6 for row in found]
            right.plot(ranks, size, style, color=COLORS[way], label=label)
        stock = [row for row in found if row["stock_seconds"] is not None]
        if layout == "even" and stock:
            times = [row["stock_seconds"] for row in stock]
            left.plot([r["ranks"] for r in stock], times, "^", color=OTHERS, label="torch, even")
    for axes, what in ((left, "CPU seconds of the coordinator"), (right, "metadata, MB")):
        axes.set(xscale="log", xlabel="ranks", ylabel=what)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    left.set(yscale="symlog" if left.get_ylim()[1] > 5 else "linear")
    figure.suptitle(f"The whole checkpoint's plan, {count:,} parameters")
    return figure


def save_load(rows: list[Row], device: str) -> Any:
    """Returns the figure of times as multiples of the limit, None without results."""
    found = [
        row
        for row in of(rows, benchmark="save_load", device=device)
        if row["kind"] in ("save", "load") and row["to_limit"] is not None
    ]
    if not found:
        return None
    largest = max(row["state_bytes"] for row in found)
    found = of(found, state_bytes=largest)
    cases = list(dict.fromkeys((r["kind"], r["to"], r["cache"]) for r in found))
    figure, axes = plt.subplots(
        1, len(cases), figsize=(3.1 * len(cases), 3.6), layout="constrained", squeeze=False
    )
    for at, (kind, to, cache) in zip(axes[0], cases, strict=True):
        bars = [r for r in of(found, kind=kind, to=to, cache=cache) if r["way"] != "limit"]
        names = [row["way"] for row in bars][::-1]
        values = [row["to_limit"] for row in bars][::-1]
        drawn = at.barh(names, values, color=[_color(name) for name in names])
        at.bar_label(drawn, fmt="%.2f", padding=2, fontsize=8)
        at.axvline(1, color=COLORS["limit"], linewidth=1)
        at.set_title(kind if to is None else f"{kind} → {to}, {cache}", fontsize=10)
        at.margins(x=0.2)
    row = found[0]
    figure.suptitle(
        f"Time ÷ plain write + fsync, or plain read: {largest / 2**30:.3g} GiB, "
        f"{_ranks(row)}, {_machine(row)}",
        fontsize=10,
    )
    return figure


def asynchronous(rows: list[Row], device: str) -> Any:
    """Returns the figure of how long training is held up, None without results."""
    found = of(rows, benchmark="save_load", kind="async", device=device)
    if not found:
        return None
    largest = max(row["rank_bytes"] for row in found)
    found = of(found, rank_bytes=largest)
    figure, axes = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
    names = [f"{row['way']}, save {row['save']}" for row in found][::-1]
    values = [row["held_s"] for row in found][::-1]
    colors = [_color(row["way"]) for row in found][::-1]
    axes.bar_label(axes.barh(names, values, color=colors), fmt="%.2f", padding=2, fontsize=8)
    copy = sorted(row["copy_s"] for row in found)[len(found) // 2]
    axes.axvline(copy, color=COLORS["limit"], linewidth=1)
    axes.set(xlabel="seconds; the line is the plain copy of the same bytes")
    axes.margins(x=0.15)
    figure.suptitle(
        f"Training held up by an asynchronous save: {largest / 2**30:.3g} GiB a rank,\n"
        f"{_ranks(found[0])}, {_machine(found[0])}",
        fontsize=9,
    )
    return figure


def reshard(rows: list[Row]) -> Any:
    """Returns the figure of bytes read for other layouts, None without results."""
    found = [
        row
        for row in of(rows, benchmark="reshard", kind="reshard")
        if row["read_to_needed"] is not None
    ]
    if not found:
        return None
    found = of(found, hardware=found[0]["hardware"])  # one machine's
    changes = list(dict.fromkeys((row["source"], row["target"]) for row in found))
    ways = list(dict.fromkeys(row["way"] for row in found))
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        bars = {(r["source"], r["target"]): r["read_to_needed"] for r in of(found, way=way)}
        places = [i + number * width for i, change in enumerate(changes) if change in bars]
        values = [bars[change] for change in changes if change in bars]
        drawn = axes.bar(places, values, width, label=way, color=_color(way))
        axes.bar_label(drawn, fmt="%.1f", fontsize=7)
    axes.axhline(1, color=COLORS["limit"], linewidth=1)
    middle = 0.4 - width / 2
    labels = [f"{source}\n→ {target}" for source, target in changes]
    axes.set_xticks([i + middle for i in range(len(changes))], labels, fontsize=8)
    axes.set(ylabel="bytes read ÷ bytes needed")
    axes.legend(frameon=False)
    return figure


def _ranks(row: Row) -> str:
    return "1 rank" if row["ranks"] == 1 else f"{row['ranks']} ranks"


def _machine(row: Row) -> str:
    hardware = row["hardware"]
    if row["device"] == "cuda" and hardware["gpus"]:
        return f"{len(hardware['gpus'])} × {hardware['gpus'][0]}"
    return f"{hardware['cores']} CPU cores"


def main() -> None:
    """Draws all figures for which there are results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON lines files")
    parser.add_argument("--into", type=Path, default=Path("docs/pictures"))
    args = parser.parse_args()
    matplotlib.rcParams.update({"svg.hashsalt": "shardplan", "axes.spines.top": False})
    rows = read(args.results)
    figures = {"planning": planning(rows), "reshard": reshard(rows)}
    for device in ("cpu", "cuda"):
        figures[f"save_load_{device}"] = save_load(rows, device)
        figures[f"async_{device}"] = asynchronous(rows, device)
    args.into.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        if figure is not None:
            path = args.into / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            print(path)


if __name__ == "__main__":
    main()
