"""The verb `inspect`: what is in a checkpoint, names that differ only in numbers as one line."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.tree import Tree
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..checkpoints.opened import Checkpoint, nbytes
from .options import Checkpoint_, Filter, Json, Trust, keys_like, opened
from .output import NO, console, many, number, plain, say_json, size, stop, verb

_NUMBER = re.compile(r"(?<![0-9])[0-9]{1,18}(?![0-9])")


@verb
def inspect_(
    ckpt: Checkpoint_,
    filter_: Filter = None,
    table: Annotated[
        bool, typer.Option("--table/--tree", help="One line for each kind of key, or a tree.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="With --json: every key with its chunks.")
    ] = False,
    json_: Json = False,
    trust_pickle: Trust = False,
) -> None:
    """Show what is in a checkpoint: keys, shapes, dtypes, bytes, chunks, files.

    Keys that differ only in numbers share a line: `layers.{0..47}.mlp.weight × 48`.
    """
    with opened(ckpt, trust_pickle) as checkpoint:
        facts = _summary(checkpoint)
        wanted = keys_like(filter_)
        if json_:
            found: dict[str, Any] = {**facts, "keys": []}
            for key, stored in checkpoint.metadata.state_dict_metadata.items():
                if wanted(key):
                    found["keys"].append(_entry(key, stored, every))
            say_json(found)
            return
        lines = _rows(checkpoint, wanted)
        out = console()
        _print_summary(out, facts)
        if not lines:
            stop(
                f"no key matches {filter_!r}; there are {number(facts['tensors'])} tensors. Give a "
                "part of a key, or a pattern with * and ?; without --filter all are listed.",
                status=NO,
            )
        out.print()
        if table:
            _print_table(out, lines)
        else:
            _print_tree(out, lines, "keys" if filter_ is None else f"keys like {filter_}")


@dataclass(slots=True)
class _Row:
    """Keys that differ only in numbers and have one shape and dtype.

    Attributes:
        pattern: The key, each number replaced by 0.
        dtype: Their dtype, `object` for Python values.
        shape: Their shape.
        keys: How many there are.
        bytes: Bytes of all their elements.
        chunks: Chunks of all of them.
        numbers: The values of each number.
    """

    pattern: str
    dtype: str
    shape: tuple[int, ...]
    keys: int = 0
    bytes: int = 0
    chunks: int = 0
    numbers: list[set[int]] = field(default_factory=list)

    @property
    def tokens(self) -> list[str]:
        """The tokens of the key, each number as the range of its values."""
        ranges = map(_ranges, self.numbers)
        return [_NUMBER.sub(lambda _: next(ranges), token) for token in self.pattern.split(".")]

    @property
    def name(self) -> str:
        """The key, each number as the range of its values."""
        return ".".join(self.tokens)


def _rows(checkpoint: Checkpoint, wanted: Callable[[str], bool]) -> list[_Row]:
    """Returns a checkpoint's keys, grouped."""
    found: dict[tuple[str, str, tuple[int, ...]], _Row] = {}
    for key, stored in checkpoint.metadata.state_dict_metadata.items():
        if not wanted(key):
            continue
        pattern = _NUMBER.sub("0", key)
        shape: tuple[int, ...] = ()
        dtype, chunks = "object", 1
        if isinstance(stored, TensorStorageMetadata):
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            shape, chunks = tuple(stored.size), len(stored.chunks)
        row = found.setdefault((pattern, dtype, shape), _Row(pattern, dtype, shape))
        row.keys += 1
        row.bytes += nbytes(stored)
        row.chunks += chunks
        for place, text in enumerate(_NUMBER.findall(key)):
            if place == len(row.numbers):
                row.numbers.append(set())
            row.numbers[place].add(int(text))
    return list(found.values())


def _summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns what is known of a whole checkpoint."""
    files = checkpoint.file_bytes()
    tensors = checkpoint.tensors
    dtypes: dict[str, int] = {}
    for stored in tensors.values():
        name = str(stored.properties.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + math.prod(stored.size)
    found: dict[str, Any] = {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "tensors": len(tensors),
        "objects": len(checkpoint.objects),
        "elements": sum(dtypes.values()),
        "bytes": sum(map(nbytes, tensors.values())),
        "chunks": sum(len(stored.chunks) for stored in tensors.values()),
        "files": len(files),
        "bytes_in_files": sum(files.values()),
        "largest_file": max(files.values(), default=0),
        "smallest_file": min(files.values(), default=0),
        "dtypes": dtypes,
    }
    for name in ("step", "iteration"):
        for key in checkpoint.objects:
            if key == name or (key.endswith("." + name) and "optim" not in key):
                found["step"] = checkpoint.load_object(key)
                break
    return {**found, **checkpoint.facts()}


def _print_summary(out: Console, facts: dict[str, Any]) -> None:
    """Prints what is known of the whole."""
    dtypes = ", ".join(f"{name} {number(count)}" for name, count in facts["dtypes"].items())
    between = " to ".join(
        dict.fromkeys((size(facts["smallest_file"]), size(facts["largest_file"])))
    )
    out.print(f"[bold]{plain(facts['path'])}[/]  ({facts['format']})")
    out.print(
        f"{many(facts['tensors'], 'tensor')}, {many(facts['objects'], 'other value')}, "
        f"{many(facts['elements'], 'element')} ({dtypes or 'none'}), {size(facts['bytes'])}"
    )
    out.print(f"{many(facts['chunks'], 'chunk')} in {many(facts['files'], 'file')} of {between}")
    known = {
        "path", "format", "tensors", "objects", "elements", "bytes", "chunks", "files",
        "bytes_in_files", "largest_file", "smallest_file", "dtypes",
    }  # fmt: skip
    for name, value in facts.items():
        if name not in known:
            out.print(plain(f"{name}: {value}"))


def _print_table(out: Console, found: Iterable[_Row]) -> None:
    """Prints rows one below the other."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("key", overflow="fold")
    table.add_column("dtype")
    table.add_column("shape")
    for name in ("keys", "chunks", "bytes"):
        table.add_column(name, justify="right")
    for row in found:
        shape = "" if row.dtype == "object" else str(list(row.shape))
        cells = (row.name, row.dtype, shape, number(row.keys), number(row.chunks))
        table.add_row(*map(plain, cells), size(row.bytes))
    out.print(table)


def _print_tree(out: Console, found: list[_Row], root: str) -> None:
    """Prints rows as a tree of their names' tokens, with the bytes of every branch."""
    branches: dict[str, Any] = {}
    for row in found:
        at = branches
        for token in row.tokens:
            at = at.setdefault(token, {})
        at[""] = row
    top = Tree(f"[bold]{plain(root)}[/]  {size(sum(r.bytes for r in found))}")
    _grow(top, branches)
    out.print(top)


def _grow(tree: Tree, branches: dict[str, Any]) -> None:
    for token, below in branches.items():
        if token == "":
            continue
        names = [token]
        while len(below) == 1 and "" not in below:
            name, below = next(iter(below.items()))
            names.append(name)
        row = below.get("")
        text = plain(".".join(names))
        if row is not None:
            shape = "" if row.dtype == "object" else plain(f" {list(row.shape)}")
            times = f" × {number(row.keys)}" if row.keys > 1 else ""
            text += f"  [cyan]{row.dtype}{shape}[/]{times}  {size(row.bytes)}"
        else:
            text += f"  {size(_bytes(below))}"
        _grow(tree.add(text), below)


def _bytes(branches: dict[str, Any]) -> int:
    return sum(b.bytes if t == "" else _bytes(b) for t, b in branches.items())


def _ranges(numbers: set[int]) -> str:
    """Returns numbers as `{0..3,7}`, a single one as itself."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return str(ordered[0])
    spans: list[list[int]] = []
    for value in ordered:
        if spans and spans[-1][1] == value - 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    texts = [str(a) if a == b else f"{a}..{b}" for a, b in spans]
    if len(texts) > 4:
        texts = [*texts[:2], "…", texts[-1]]
    return "{" + ",".join(texts) + "}"


def _entry(key: str, stored: Any, chunks: bool) -> dict[str, Any]:
    """Returns what is known of one key, for JSON."""
    if not isinstance(stored, TensorStorageMetadata):
        return {"key": key, "kind": "object"}
    found: dict[str, Any] = {
        "key": key,
        "kind": "tensor",
        "dtype": str(stored.properties.dtype).removeprefix("torch."),
        "shape": list(stored.size),
        "bytes": nbytes(stored),
        "chunks": len(stored.chunks),
    }
    if chunks:
        found["boxes"] = [[list(c.offsets), list(c.sizes)] for c in stored.chunks]
    return found
