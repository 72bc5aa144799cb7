"""A save takes no more memory than the state it saves and a bounded buffer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("peak_memory.py")
BUFFER = 64  # MiB, whatever the state's size


def extra(mibibytes, kind, folder):
    command = [sys.executable, str(SCRIPT), str(mibibytes), kind, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stderr
    return float(result.stdout.split()[-1])


@pytest.mark.parametrize("kind", ["whole", "views"])
def test_256_mib(kind, tmp_path):
    """Whole tensors through torch's writer; views of one storage through ours, which keeps no clone."""
    assert extra(256, kind, tmp_path) < 0.1 * 256 + BUFFER


@pytest.mark.slow
@pytest.mark.skipif("SHARDPLAN_SLOW" not in os.environ, reason="writes 2 GiB; set SHARDPLAN_SLOW=1")
@pytest.mark.parametrize("kind", ["whole", "views"])
def test_2_gib(kind, tmp_path):
    assert extra(2048, kind, tmp_path) < 0.1 * 2048 + BUFFER
