"""scripts/setup_venv against a stand-in for Python, so that each case takes milliseconds."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Notes each venv it makes and each run of pip in $LOG. $PIP says what pip does: "ok", "fail" before
# any change, "break" after one, "kill" the script that called it, "slow". A file named "wrong" in
# .venv makes the check fail.
FAKE_PYTHON = """#!/bin/bash
case "$*" in
    "-m venv "*)
        echo venv >>"$LOG"
        mkdir -p "$3/bin" "$3/lib/python3.11/site-packages"
        cp "$0" "$3/bin/python"
        printf '#!/bin/sh\\n%s\\n' "'''exec' \\"$3/bin/python\\"" >"$3/bin/pip"
        ;;
    "-I -m pip install "*)
        echo pip >>"$LOG"
        venv=$(dirname "$(dirname "$0")")
        case "$PIP" in
            fail) exit 1 ;;
            break) touch "$venv/lib/python3.11/site-packages/half"; exit 1 ;;
            kill) kill -9 $PPID ;;
            slow) sleep 0.3 ;;
        esac
        rm -f "$venv/wrong"
        ;;
    "-I - "*) [ ! -e "$(dirname "$(dirname "$0")")/wrong" ] || { echo "rich is 1"; exit 1; } ;;
    "--version") echo Python 3.11.0 ;;
    *"import ensurepip"*) [ -z "$NO_VENV_MODULE" ] ;;
    *"print("*) echo 3.11 ;;
esac
"""


class Checkout:
    def __init__(self, folder: Path):
        self.root = folder / "a checkout"
        self.log = folder / "log"
        self.log.touch()
        self.python = folder / "fake python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        (self.root / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "setup_venv", self.root / "scripts")
        (self.root / "pyproject.toml").write_text("[project]\n")
        (self.root / "constraints.txt").write_text("torch==2.13.0\n")

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    def start(self, pip="ok", **env):
        env = {"PYTHON": str(self.python), "LOG": str(self.log), "PIP": pip, **env}
        return subprocess.Popen(
            [self.root / "scripts" / "setup_venv"],
            cwd="/",
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, pip="ok", **env):
        """Runs the script; returns its exit status, its output and what it had Python do."""
        self.log.write_text("")
        process = self.start(pip, **env)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output, self.log.read_text().split()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.fixture
def ready(checkout):
    status, output, did = checkout.run()
    assert (0, ["venv", "pip", "pip"]) == (status, did), output
    return checkout


def test_second_run_does_nothing(ready):
    status, output, did = ready.run()
    assert (0, []) == (status, did)
    assert "is up to date" in output


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_file_is_installed_into_the_same_environment(ready, name):
    with open(ready.root / name, "a") as file:
        file.write("# changed\n")
    assert (0, ["pip", "pip"]) == ready.run()[::2]
    assert (0, []) == ready.run()[::2]


def test_versions_changed_by_hand_are_put_right(ready):
    (ready.venv / "wrong").touch()
    status, output, did = ready.run()
    assert (0, ["pip", "pip"]) == (status, did)
    assert "rich is 1" in output


def test_environment_made_by_hand_is_kept(ready):
    (ready.venv / ".stamp").unlink()
    assert (0, ["pip", "pip"]) == ready.run()[::2]


def test_moved_environment_is_made_anew(ready):
    ready.root = ready.root.rename(ready.root.with_name("elsewhere"))
    status, output, did = ready.run()
    assert (0, ["venv", "pip", "pip"]) == (status, did)
    assert "was made for another folder" in output


def test_environment_without_its_python_is_made_anew(ready):
    (ready.venv / "bin" / "python").unlink()
    assert (0, ["venv", "pip", "pip"]) == ready.run()[::2]


def test_dangling_link_is_replaced(checkout):
    checkout.venv.symlink_to("nowhere")
    assert (0, ["venv", "pip", "pip"]) == checkout.run()[::2]
    assert not checkout.venv.is_symlink()


def test_killed_run_is_not_trusted(checkout):
    status, _, did = checkout.run(pip="kill")
    assert (-9, ["venv", "pip"]) == (status, did)
    status, output, did = checkout.run()
    assert (0, ["venv", "pip", "pip"]) == (status, did)
    assert "an earlier run was interrupted" in output


def test_killed_update_is_not_trusted(ready):
    (ready.root / "pyproject.toml").write_text("[project]\n# changed\n")
    assert -9 == ready.run(pip="kill")[0]
    assert (0, ["venv", "pip", "pip"]) == ready.run()[::2]


def test_pip_that_fails_before_a_change_leaves_the_environment(ready):
    (ready.root / "pyproject.toml").write_text("[project]\n# changed\n")
    status, output, did = ready.run(pip="fail")
    assert (1, ["pip"]) == (status, did)
    assert "error: pip could not install: torch" in output
    assert (0, ["pip", "pip"]) == ready.run()[::2]


def test_pip_that_fails_halfway_spoils_the_environment(ready):
    (ready.root / "pyproject.toml").write_text("[project]\n# changed\n")
    assert (1, ["pip"]) == ready.run(pip="break")[::2]
    assert (0, ["venv", "pip", "pip"]) == ready.run()[::2]


def test_two_runs_at_once_make_one_environment(checkout):
    runs = [checkout.start(pip="slow") for _ in range(2)]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [0, 0] == [run.returncode for run in runs], outputs
    assert ["venv", "pip", "pip"] == checkout.log.read_text().split()


def test_error_names_the_missing_python(checkout):
    status, output, did = checkout.run(PYTHON="/nowhere/python3.11")
    assert (1, []) == (status, did)
    assert "error: no Python 3.11 or newer (tried /nowhere/python3.11)" in output
    assert not checkout.venv.exists()


def test_error_names_the_missing_debian_package(checkout):
    status, output, did = checkout.run(NO_VENV_MODULE="1")
    assert (1, []) == (status, did)
    assert "apt-get install python3.11-venv" in output


def test_unpinned_torch_is_refused(checkout):
    (checkout.root / "constraints.txt").write_text("torch>=2.11\n")
    status, output, did = checkout.run()
    assert (1, []) == (status, did)
    assert "does not pin torch" in output


def test_file_in_the_place_of_the_environment_is_not_removed(checkout):
    checkout.venv.write_text("mine")
    status, output, did = checkout.run()
    assert (1, []) == (status, did)
    assert "not a folder" in output
    assert "mine" == checkout.venv.read_text()
