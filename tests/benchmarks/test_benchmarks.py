"""The benchmarks run and say what they measured, with tiny sizes."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"


def load(name: str):
    """Imports a benchmark's part, and leaves no bare name behind that another test may mean."""
    names = {path.stem for path in FOLDER.glob("*.py")}
    others = {known: sys.modules.pop(known) for known in names & sys.modules.keys()}
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
        for known in names & sys.modules.keys():
            del sys.modules[known]
        sys.modules.update(others)


def run(count: int, script: str, *arguments: str, folder: Path) -> list[dict]:
    out = folder / "results.jsonl"
    command = [ROOT / "scripts/launch/torchrun_local.sh", "-n", str(count), FOLDER / script]
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments, "--dir", folder, "--out", out],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    assert ["results.jsonl"] == [path.name for path in folder.iterdir()]
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_shardings_are_read_from_text():
    states = load("states")
    found = states.Sharding.of("tp4ep2")
    assert (4, 2, 1, 0, None) == (found.tp, found.ep, found.replicas, found.dim, found.ranks)
    assert 3 == states.Sharding.of("fsdp/3").ranks
    assert 1 == states.Sharding.of("shard1").dim
    for text in ("", "fsdp3", "tp", "flat"):
        with pytest.raises(ValueError, match="no sharding"):
            states.Sharding.of(text)


def test_sizes_come_close_to_the_bytes_asked_for():
    states = load("states")
    for nbytes in (32 << 20, 1 << 30, 20 << 30):
        found = 12 * states.Sizes.of_bytes(nbytes).numel()
        assert abs(found - nbytes) < 0.25 * nbytes, (found, nbytes)


def test_only_reads_from_files_are_counted(tmp_path):
    counting = load("counting")
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    with counting.Reads() as reads:
        number = os.open(path, os.O_RDONLY)
        os.pread(number, 30, 10)
        os.preadv(number, [bytearray(5), bytearray(6)], 0)
        os.close(number)
        with counting.FileSystem().create_stream(path, "rb") as stream:
            stream.read()
    assert 141 == reads.nbytes
    number = os.open(path, os.O_RDONLY)
    os.pread(number, 30, 10)
    os.close(number)
    assert 141 == reads.nbytes


def test_plain_files_hold_the_bytes(tmp_path):
    disk = load("disk")
    torch = disk.torch
    tensors = [torch.arange(1 << 19, dtype=torch.int32), torch.arange(7, dtype=torch.int32)]
    disk.plain_write(tmp_path / "plain", tensors)
    expected = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    assert expected == (tmp_path / "plain").read_bytes()
    large = [torch.zeros_like(tensors[0])]
    disk.plain_read(tmp_path / "plain", large)
    assert torch.equal(tensors[0], large[0])


def test_peak_memory_sees_what_was_held():
    memory = load("peak_memory")
    with memory.PeakMemory() as peak:
        held = bytearray(b"\x01" * (64 << 20))
        time.sleep(0.1)
        del held
    assert 64 << 20 <= peak.host_bytes < 256 << 20


@pytest.mark.gloo
def test_save_and_load(tmp_path):
    rows = run(
        2,
        "bench_save_load.py",
        *("--gib", "0.004", "--rounds", "1", "--load", "tp2", "--async-saves", "1"),
        *("--ways", "own", "stock", "--async-ways", "own", "--step", "0.01"),
        folder=tmp_path,
    )
    assert [] == [row for row in rows if row["kind"] == "error"]
    measured = {(r["kind"], r["way"], r.get("to"), r.get("cache")) for r in rows}
    ways = ("limit", "own", "stock")
    assert {
        *(("save", way, None, None) for way in ways),
        *(("load", way, "fsdp", cache) for way in ways for cache in ("cold", "warm")),
        *(("load", way, "tp2", "cold") for way in ways),
        ("async", "own", None, None),
    } == measured
    for row in rows:
        assert {"command", "date", "hardware", "storage", "versions"} <= row.keys()
        assert str(tmp_path) not in row["command"]


@pytest.mark.gloo
def test_reshard(tmp_path):
    rows = run(2, "bench_reshard.py", "--hidden", "96", "--rounds", "1", folder=tmp_path)
    assert {"reshard"} == {row["kind"] for row in rows}
    factors = {
        (row["way"], row["target"]): row["read_to_needed"]
        for row in rows
        if row["source"] == "rows × 2"
    }
    assert factors["own-unverified", "rows × 2"] < 1.1
    assert factors["stock", "columns × 2"] > 1.9


@pytest.mark.gloo
def test_messages(tmp_path):
    rows = run(2, "bench_messages.py", "--parameters", "30", folder=tmp_path)
    found = {(r["way"], r["save"]): r["collectives"] for r in rows if r["kind"] == "messages"}
    assert [1, 1, 1] == [found["own", save] for save in (1, 2, 3)]
    assert [9, 9, 9] == [found["stock", save] for save in (1, 2, 3)]
