"""Kills a random rank at a random moment of a save over an older checkpoint, again and again.

    python killed.py FOLDER KILLS SEED

Ranks are forks of this process, which has torch imported, and need no process group. After each
round the checkpoint must be the old one or the new one, whole; prints how often it was which.
"""

import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import alone
import torch

from shardplan.layouts import Cut, DTensorStorage, Grids
from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner
from shardplan.planner.storage import SafetensorsReader, SafetensorsWriter

RANKS, ROWS = 3, 3 * 40_000
SHAPES = {"w": (ROWS, 8), "b": (ROWS,)}
TIMEOUT = 0.6  # of those who survive


def planner(kind, rank, ranks):
    rules = {name: (Cut(0, "dp_shard"),) for name in SHAPES}
    grid = Grids.from_sizes(rank, dp_shard=ranks)
    return kind(SHAPES, grid=grid, layouts=[DTensorStorage(rules)])


def state(step, ranks):
    sizes = {name: (shape[0] // ranks, *shape[1:]) for name, shape in SHAPES.items()}
    tensors = {name: torch.full(size, float(step)) for name, size in sizes.items()}
    return {"model": tensors, "step": step}


def save(path, rank, step, timeout, save_id):
    writer = SafetensorsWriter(path, overwrite=True, timeout=timeout, save_id=save_id)
    alone.drive(rank, state(step, RANKS), writer, planner(LayoutAwareSavePlanner, rank, RANKS))


def round_of_saves(path, step, victim, delay):
    """Returns the exit codes of the ranks; -9 for one that was killed in time."""
    children, save_id = [], secrets.token_hex(8)
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            code = 1
            try:
                save(path, rank, step, 20 if victim is None else TIMEOUT, save_id)
                code = 0
            except Exception as error:
                if os.environ.get("SHOW"):
                    print(rank, error, file=sys.stderr)
            finally:
                os._exit(code)
        children.append(child)
    if victim is not None:
        time.sleep(delay)
        os.kill(children[victim], signal.SIGKILL)
    codes = []
    for child in children:
        _, status = os.waitpid(child, 0)
        codes.append(os.waitstatus_to_exitcode(status))
    return codes


def load(path):
    """Returns the step that the checkpoint holds everywhere."""
    values = state(-1, 1)
    reader = SafetensorsReader(path)
    load_planner = planner(LayoutAwareLoadPlanner, 0, 1)
    load_planner.set_up_planner(values, reader.read_metadata(), True)
    plan = load_planner.finish_plan(load_planner.create_local_plan())
    reader.read_data(plan, load_planner).wait()
    found = {float(x) for tensor in values["model"].values() for x in tensor.unique()}
    assert found == {float(values["step"])}, f"a mix of {found} and step {values['step']}"
    return values["step"]


def main():
    path, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(seed)
    for _ in range(2):
        began = time.monotonic()
        assert round_of_saves(path, 0, None, 0) == [0] * RANKS
        whole = time.monotonic() - began
    assert load(path) == 0
    current, step, counted = 0, 0, Counter()
    while counted["killed"] < kills:
        step += 1
        victim = draw.randrange(RANKS)
        codes = round_of_saves(path, step, victim, draw.uniform(0, 0.7 * whole))
        loaded = load(path)
        assert loaded in (current, step), f"{loaded} after {current}, while saving {step}"
        if -9 not in codes:
            assert codes != [0] * RANKS or loaded == step, codes
            counted["too late to kill"] += 1
        else:
            counted["killed"] += 1
            counted["then the new one" if loaded == step else "then the old one"] += 1
        current = loaded
    codes = round_of_saves(path, step + 1, None, 0)
    assert codes == [0] * RANKS, codes
    assert load(path) == step + 1
    left = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
    assert len(left) == 2 and "checkpoint.json" in left, left
    print(dict(counted), f"a whole save takes {whole:.2f} s")


if __name__ == "__main__":
    main()
