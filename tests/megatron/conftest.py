"""Starts the real Megatron once, and runs scenarios of tests/megatron/drive on gloo ranks."""

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / ".venv-megatron"


class Megatron:
    """A process with Megatron imported, whose forks are the ranks.

    Args:
        kind: "core" for Megatron-Core with all it brings, "fsdp" for megatron-fsdp by itself.
        log: File that takes what the ranks print.
    """

    def __init__(self, kind: str, log: Path) -> None:
        self._log = log
        environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1"}
        server = Path(__file__).parent / "drive" / "server.py"
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(server), kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=environment,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        assert "ready\n" == self._answer(100)

    def _listen(self) -> None:
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, seconds: float) -> str:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            line = ""
        if not line:
            pytest.fail(f"Megatron's process is gone or stuck:\n{self._log.read_text()[-4000:]}")
        return line

    def outcome(self, scenario: str, *, ranks: int = 4, timeout: float = 60, **args: Any) -> Any:
        """Returns results, errors and the ranks that did not end in `timeout` seconds."""
        request = {"scenario": scenario, "ranks": ranks, "timeout": timeout, "args": args}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._answer(timeout + 20))

    def run(self, scenario: str, *, ranks: int = 4, timeout: float = 60, **args: Any) -> list[Any]:
        """Returns each rank's result; an error on any rank fails the test."""
        outcome = self.outcome(scenario, ranks=ranks, timeout=timeout, **args)
        for rank, error in enumerate(outcome["errors"]):
            if error is not None:
                pytest.fail(f"rank {rank} of {scenario}:\n{error}", pytrace=False)
        if outcome["unfinished"]:
            pytest.fail(f"{scenario}: ranks {outcome['unfinished']} hang", pytrace=False)
        return outcome["results"]

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def start(kind: str, log: Path):
    if not PACKAGES.is_dir():
        pytest.skip("the Megatron packages are not there; run scripts/setup_megatron")
    server = Megatron(kind, log)
    yield server
    server.close()


@pytest.fixture(scope="session")
def megatron(tmp_path_factory):
    """Megatron-Core 0.19.2 with its Megatron-FSDP."""
    yield from start("core", tmp_path_factory.mktemp("megatron") / "core.log")


@pytest.fixture(scope="session")
def megatron_fsdp(tmp_path_factory):
    """megatron-fsdp 0.6.1 without Megatron-Core."""
    yield from start("fsdp", tmp_path_factory.mktemp("megatron") / "fsdp.log")
