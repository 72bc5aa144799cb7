"""The examples in docstrings of both packages, under the names that users import."""

import doctest
import importlib
import pkgutil

import pytest

import shardplan.layouts
import shardplan.planner

MODULES = [
    name
    for package in (shardplan.layouts, shardplan.planner)
    for name in (
        package.__name__,
        *(found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")),
    )
    if not name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert 0 == failed


def test_there_are_examples_and_they_are_found():
    finder = doctest.DocTestFinder()
    count = sum(
        len(example.examples)
        for name in MODULES
        for example in finder.find(importlib.import_module(name))
    )
    assert 10 <= count
    assert "shardplan.layouts.slab" in MODULES
