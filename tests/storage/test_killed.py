"""A rank that is killed while it saves never costs the checkpoint that was there."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_fifty_kills(tmp_path):
    script = Path(__file__).with_name("killed.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path / "checkpoint", "50", "7"],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'killed': 50" in done.stdout
