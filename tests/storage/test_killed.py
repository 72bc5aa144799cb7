"""A rank that is killed while it saves never costs the checkpoint that was there."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(390)  # on a busy machine each of the survivors waits longer
def test_thirty_kills(tmp_path):
    script = Path(__file__).with_name("killed.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path / "checkpoint", "30", "7"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'killed': 30" in done.stdout
