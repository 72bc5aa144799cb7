"""The rooms of docs/ARCHITECTURE.md: each is there, and imports only rooms above it."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOM = re.compile(r"^\| (?P<names>`[^|]*`) \|", re.MULTILINE)


def rooms():
    """Room of each module's file → position; rooms of one row are on one level and apart."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    found = {}
    for level, row in enumerate(ROOM.findall(text)):
        for name in re.findall(r"`([^`]*)`", row):
            found[name] = level
    return found


def room_of(file, known):
    """Returns the narrowest listed room of a file."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    for length in range(len(parts), 0, -1):
        name = "/".join(parts[:length])
        if name in known:
            return name
    return None


def imports():
    """File → files that it imports."""
    files = [p for top in ("layouts", "planner") for p in (ROOT / top).rglob("*.py")]
    modules = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        modules[parts[:-1] if parts[-1] == "__init__" else parts] = file
    found = defaultdict(set)
    for file in files:
        package = file.relative_to(ROOT).parent.parts
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            base = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = (*package[: len(package) - node.level + 1], *base)
            elif base[:1] == ("shardplan",):
                base = base[1:]
            for alias in node.names:
                target = modules.get((*base, alias.name)) or modules.get(base)
                if target is not None and target != file:
                    found[file].add(target)
    return found


def test_every_file_is_in_a_room_and_every_room_exists():
    known = rooms()
    assert len(known) > 15
    for name in known:
        assert (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file(), name
    homeless = {file for file in imports() if room_of(file, known) is None}
    assert {ROOT / "planner" / "__init__.py"} == homeless


def test_rooms_import_only_what_stands_above_them():
    known = rooms()
    wrong = []
    for file, targets in imports().items():
        own = room_of(file, known)
        for target in targets:
            other = room_of(target, known)
            if own is None or other is None or own == other:
                continue
            if known[other] >= known[own]:
                wrong.append(f"{file.relative_to(ROOT)} imports {target.relative_to(ROOT)}")
    assert [] == sorted(wrong)
