"""One table of what result files say: each measurement beside torch's own and the limit.

python benchmarks/summary.py benchmarks/results/*.jsonl
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


class Line(NamedTuple):
    """A line of the table: what was measured, ours, torch's own, what neither can beat."""

    what: str
    own: str
    ours: str
    stock: str
    limit: str


def read(paths: Iterable[Path]) -> list[Row]:
    """Returns the lines of result files."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def of(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Returns the rows that have all these values."""
    return [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} s"


def _median(rows: list[Row]) -> str:
    if not rows:
        return "–"
    row = rows[-1]
    ratio = row.get("to_limit")
    text = _seconds(row["seconds"]["median"])
    return text if ratio is None or row["way"] == "limit" else f"{text}, {ratio:.3g} ×"


def plans(rows: list[Row]) -> Iterator[Line]:
    """Yields lines on planning in one process."""
    for row in of(rows, benchmark="plan", kind="local"):
        what = f"one rank's plan, {row['parameters']:,} parameters: first, unchanged"
        first = row["read_model_s"] + row["first_plan_s"]
        text = f"{_seconds(first)}, {_seconds(row['unchanged_plan_s'])}"
        yield Line(what, text, text, _seconds(row["stock_plan_s"]), "–")
    for row in of(rows, benchmark="plan", kind="global"):
        what = (
            f"all ranks' plan, {row['parameters']:,} parameters × {row['ranks']:,} {row['layout']}"
        )
        own = row["manifest_s"] + row["commit_s"]
        yield Line(
            what,
            f"{_seconds(own)}, {row['manifest_bytes'] / 1e6:.2f} MB",
            f"{_seconds(row['seconds'])}, {row['metadata_bytes'] / 1e6:.2f} MB",
            _seconds(row["stock_seconds"]),
            "–",
        )


def messages(rows: list[Row]) -> Iterator[Line]:
    """Yields lines on what ranks send each other."""
    found = of(rows, benchmark="messages", kind="messages", save=3)
    for ranks, parameters in dict.fromkeys((r["ranks"], r["parameters"]) for r in found):
        texts = {
            row["way"]: f"{row['collectives']}, {row['message_bytes']:,} B"
            for row in of(found, ranks=ranks, parameters=parameters)
        }
        ways = [texts.get(way, "–") for way in ("own", "ours", "stock")]
        yield Line(f"collectives of a save, {ranks} ranks, {parameters} parameters", *ways, "–")
    for row in of(rows, benchmark="messages", kind="megatron"):
        text = f"Megatron-FSDP: {row['seconds_per_tensor'] * 1e3:.3g} ms each"
        yield Line(f"look-up of peers' shards, {row['ranks']} ranks", "none", "none", text, "–")


def save_load(rows: list[Row]) -> Iterator[Line]:
    """Yields lines on saving and loading."""
    found = [r for r in of(rows, benchmark="save_load") if r["kind"] in ("save", "load")]
    keys = ("kind", "state_bytes", "parameters", "ranks", "device", "sharding", "to", "cache")
    for values in dict.fromkeys(tuple(row.get(key) for key in keys) for row in found):
        case = dict(zip(keys, values, strict=True))
        size = f"{case['state_bytes'] / 2**30:.3g} GiB in {case['parameters']:,}, "
        where = f"{case['ranks']} × {case['device']}"
        what = f"{case['kind']} {case['sharding']}"
        if case["kind"] == "load":
            what += f" → {case['to']} {case['cache']}"
        ways = [_median(of(found, **case, way=way)) for way in ("own", "ours", "stock", "limit")]
        yield Line(f"{what}, {size}{where}", *ways)


def held(rows: list[Row]) -> Iterator[Line]:
    """Yields lines on asynchronous saves."""
    found = of(rows, benchmark="save_load", kind="async")
    for device, nbytes, save in dict.fromkeys(
        (r["device"], r["rank_bytes"], r["save"]) for r in found
    ):
        texts, copy = {}, "–"
        for row in of(found, device=device, rank_bytes=nbytes, save=save):
            texts[row["way"]] = f"{_seconds(row['held_s'])}, {row['held_to_copy']:.3g} ×"
            copy = _seconds(row["copy_s"])
        what = f"async save {save} holds training, {nbytes / 2**30:.3g} GiB a rank, {device}"
        own = texts.get("own-stager", texts.get("own", "–"))
        yield Line(what, own, texts.get("ours", "–"), texts.get("stock", "–"), copy)


def reshard(rows: list[Row]) -> Iterator[Line]:
    """Yields lines on bytes read for another layout."""
    found = of(rows, benchmark="reshard", kind="reshard")
    for source, target in dict.fromkeys((r["source"], r["target"]) for r in found):
        texts = {
            row["way"]: "–" if row["read_to_needed"] is None else f"{row['read_to_needed']:.3g} ×"
            for row in of(found, source=source, target=target)
        }
        ways = [texts.get(way, "–") for way in ("own", "ours", "stock")]
        yield Line(f"bytes read ÷ needed, {source} → {target}", *ways, "1 ×")


def main() -> None:
    """Prints the table."""
    rows = read(map(Path, sys.argv[1:]))
    table = Table(title="× is the ratio to the limit", title_justify="left")
    headings = ("measured", "planner + own storage", "planner + torch's", "torch's own", "limit")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for part in (plans, messages, save_load, held, reshard):
        for line in part(rows):
            table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 170).print(table)
    if not table.rows:
        raise SystemExit("no result lines")


if __name__ == "__main__":
    main()
