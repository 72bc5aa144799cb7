"""The project as it is installed: its names, its files, its declared needs and its scripts."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("layouts", "planner")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS = sorted(
    path
    for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"]
    if path.is_file() and path.read_bytes().startswith(b"#!")
)


def run(code: str, cwd: Path, pythonpath: Path | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if pythonpath is not None:
        env["PYTHONPATH"] = str(pythonpath)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=100
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def files_under(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_bare_folder_name_is_refused_before_anything_is_loaded(folder):
    code = f"""
import sys
try:
    import {folder}
except ImportError as error:
    print(error)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "shardplan")))
"""
    message, loaded = run(code, cwd=ROOT).splitlines()
    assert message.startswith(f"{folder}: ")
    assert f"import shardplan.{folder}." in message
    assert "[]" == loaded


@pytest.mark.parametrize("folder", FOLDERS)
def test_installed_name_leads_to_this_checkout(folder):
    module = importlib.import_module(f"shardplan.{folder}")
    assert ROOT / folder / "__init__.py" == Path(module.__file__).resolve()


def test_installed_version_is_the_projects():
    assert PROJECT["version"] == metadata.version("shardplan")


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_are_declared_dependencies(folder):
    """A package that only the tools bring would be missing for a user.

    Only what a module imports unconditionally counts; optional imports stand in functions or `try`.
    What a user's own tests import (`testing.py`) may need the extra `test` too.
    """
    declared = {Requirement(line).name for line in PROJECT["dependencies"]}
    for_tests = {Requirement(line).name for line in PROJECT["optional-dependencies"]["test"]}
    undeclared = set()
    for path in (ROOT / folder).rglob("*.py"):
        known = declared | {"shardplan"} | (for_tests if path.name == "testing.py" else set())
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            else:
                continue
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names:
                if top not in known:
                    undeclared.add((path.relative_to(ROOT).as_posix(), top))
    assert set() == undeclared


def test_every_requirement_has_a_tested_version_that_satisfies_it():
    lines = (line.split("#")[0] for line in (ROOT / "constraints.txt").read_text().splitlines())
    pins = dict(line.strip().split("==") for line in lines if line.strip())
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in (Requirement(line) for group in groups for line in group):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), (
            requirement
        )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the tree, since building writes into it and would see an earlier build's files."""
    copy = tmp_path_factory.mktemp("source")
    folders = [*FOLDERS, "scripts", "tests", "benchmarks"]
    names = ["pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md"]
    for name in folders:
        if (ROOT / name).is_dir():
            leave = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=leave)
    for name in [*names, "constraints.txt"]:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, copy)
    return copy


def build(kind: str, source: Path, into: Path) -> Path:
    """Builds as pip does, but in this environment, so that it needs no network."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(into)!r}))"
    return into / run(code, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked_sdist(source, tmp_path_factory):
    into = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", source, into)) as tar:
        tar.extractall(into, filter="data")
    return into / f"shardplan-{PROJECT['version']}"


def test_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel, source):
    """Fails for a subpackage that pyproject.toml does not list, and for unlisted data files."""
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"shardplan-{PROJECT['version']}.dist-info/"
    expected = {f"shardplan/{f}/{name}" for f in FOLDERS for name in files_under(source / f)}
    assert expected == {name for name in names if not name.startswith(info)}
    assert {"shardplan/layouts/py.typed", "shardplan/planner/py.typed"} <= expected
    assert f"{info}licenses/LICENSE" in names


def test_wheel_works_without_the_checkout(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "\n".join(f"import shardplan.{f}; print(shardplan.{f}.__file__)" for f in FOLDERS)
    expected = [str(tmp_path / "shardplan" / f / "__init__.py") for f in FOLDERS]
    assert expected == run(code, cwd=tmp_path, pythonpath=tmp_path).splitlines()


def test_sdist_holds_what_a_packager_needs_and_no_second_copy(unpacked_sdist, source):
    left_out = re.compile(r"build/|shardplan\.egg-info/|scripts/typing/")
    expected = {name for name in files_under(source) if not left_out.match(name)}
    names = files_under(unpacked_sdist)
    assert {"PKG-INFO", "setup.cfg"} == {
        name for name in names - expected if not name.startswith("shardplan.egg-info/")
    }
    assert set() == expected - names


def test_sdist_builds_the_same_wheel(unpacked_sdist, wheel, tmp_path):
    again = build("wheel", unpacked_sdist, tmp_path)
    expected = set(zipfile.ZipFile(wheel).namelist())
    assert expected == set(zipfile.ZipFile(again).namelist())


@pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="an sdist leaves the links out")
@pytest.mark.parametrize("folder", FOLDERS)
def test_type_checkers_follow_a_link_to_the_folder(folder):
    link = ROOT / "scripts" / "typing" / "shardplan" / folder
    assert f"../../../{folder}" == os.readlink(link)
    assert ROOT / folder == link.resolve()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_executable_and_parses(script):
    assert os.access(script, os.X_OK)
    text = script.read_text()
    if "bash" in text.splitlines()[0]:
        subprocess.run(["bash", "-n", script], check=True)
    else:
        ast.parse(text)


def test_scripts_without_a_suffix_say_what_runs_them():
    plain = {p for p in (ROOT / "scripts").iterdir() if p.is_file() and not p.suffix}
    assert {ROOT / "scripts" / "setup_venv", ROOT / "scripts" / "test"} <= plain
    assert set() == plain - set(SCRIPTS)
