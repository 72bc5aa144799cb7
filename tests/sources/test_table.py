"""The table in docs/sources.md has a row for every source, and every cell names a test that is there."""

import re
from pathlib import Path

import test_meshes
import test_sources
from sources import SOURCES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "sources.md").read_text()
COLUMNS = ("test_save", "test_load", "test_reshard", "test_async")


def rows():
    table = TEXT.split("\n\n## Values")[0]
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return {cells[0].strip(): [c.strip() for c in cells[1:]] for cells in lines[1:]}


def test_every_source_has_a_row_with_its_number_of_ranks():
    assert {name: str(source.world) for name, source in SOURCES.items()} == {
        name: cells[0] for name, cells in rows().items()
    }


def test_every_cell_names_its_test_and_says_what_is_refused():
    for name, cells in rows().items():
        for cell, test in zip(cells[1:], COLUMNS, strict=True):
            refused = test == "test_async" and name in test_sources.REFUSED
            assert cell.endswith(f"`{test}`"), (name, cell)
            assert refused == cell.startswith("refused"), (name, cell)


def test_every_test_that_is_named_exists():
    for test in set(re.findall(r"`(test_\w+)`", TEXT)):
        assert callable(getattr(test_sources, test)), test
    for file in set(re.findall(r"`(test_\w+\.py)`", TEXT)):
        found = [path for path in (ROOT / "tests").rglob(file)]
        assert len(found) >= 1, file
    assert test_meshes.__doc__


def test_the_readme_shows_the_same_table():
    text = (ROOT / "README.md").read_text()
    table = text.split("## What the planners take")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    shown = {cells[0].strip(): [c.strip() for c in cells[1:]] for cells in lines[1:]}
    expected = {
        name: [cell.split(":")[0] if cell.startswith("refused") else "✓" for cell in cells[1:]]
        for name, cells in rows().items()
    }
    assert expected == shown
