"""Real processes: a save without collectives sends nothing but DCP's barrier."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.gloo
def test_saves_send_one_barrier(tmp_path):
    script = Path(__file__).with_name("gloo_save.py")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run([*launch, script, tmp_path], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert 2 == done.stdout.count("right")
