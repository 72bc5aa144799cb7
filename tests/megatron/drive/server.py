"""Runs scenarios on gloo ranks that are forked from one process with Megatron imported already.

Reads one JSON request a line, `{"scenario": "module:function", "ranks": 4, "timeout": 60,
"args": {...}}`, and answers one JSON line: each rank's result (null where it did not end in time)
and each rank's error text. Ranks meet at a file, so no port is taken.
"""

import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings

warnings.filterwarnings("ignore")
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the first step of a compiled model takes a minute
os.environ["OMP_NUM_THREADS"] = "1"
WITH_CORE = sys.argv[1] == "core"


def prepare() -> None:
    import machine

    if WITH_CORE:
        machine.without_triton()
        machine.without_fla()
        machine.without_mamba()
    else:
        sys.modules["megatron"] = None  # megatron-fsdp by itself
    import torch

    torch.set_num_threads(1)
    machine.without_cuda()
    if WITH_CORE:
        import megatron.core.distributed.fsdp.mcore_fsdp_adapter
        import megatron.core.models.gpt
        import megatron.core.optimizer
        import megatron.training.checkpointing  # noqa: F401
    else:
        import megatron_fsdp.experimental  # noqa: F401
    import torch.distributed.checkpoint

    import shardplan.planner  # noqa: F401


def rank_main(rank: int, folder: str, request: dict) -> None:
    import datetime

    import torch.distributed as dist

    outcome = {"result": None, "error": None}
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=request["ranks"],
            timeout=datetime.timedelta(seconds=request["timeout"]),
        )
        os.environ["LOCAL_RANK"] = str(rank)
        module, _, name = request["scenario"].partition(":")
        outcome["result"] = getattr(importlib.import_module(module), name)(**request["args"])
    except BaseException:
        outcome["error"] = traceback.format_exc()
    with open(f"{folder}/{rank}.part", "w") as file:
        json.dump(outcome, file)
    os.replace(f"{folder}/{rank}.part", f"{folder}/{rank}.json")
    os._exit(0)


def serve(request: dict) -> dict:
    folder = tempfile.mkdtemp(prefix="megatron-ranks-")
    children = {}
    try:
        for rank in range(request["ranks"]):
            child = os.fork()
            if child == 0:
                sys.stdout = sys.stderr
                rank_main(rank, folder, request)
            children[rank] = child
        deadline = time.monotonic() + request["timeout"]
        waiting = set(children)
        while waiting and time.monotonic() < deadline:
            for rank in tuple(waiting):
                if os.waitpid(children[rank], os.WNOHANG)[0]:
                    waiting.discard(rank)
                    children.pop(rank)
            time.sleep(0.01)
            if waiting and any(error_of(folder, rank) for rank in range(request["ranks"])):
                deadline = min(deadline, time.monotonic() + 2.0)  # the others may wait for it
        outcomes = []
        for rank in range(request["ranks"]):
            try:
                with open(f"{folder}/{rank}.json") as file:
                    outcomes.append(json.load(file))
            except FileNotFoundError:
                outcomes.append({"result": None, "error": None})
        return {
            "results": [outcome["result"] for outcome in outcomes],
            "errors": [outcome["error"] for outcome in outcomes],
            "unfinished": sorted(waiting),
        }
    finally:
        for child in children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        shutil.rmtree(folder, ignore_errors=True)


def error_of(folder: str, rank: int) -> bool:
    try:
        with open(f"{folder}/{rank}.json") as file:
            return json.load(file)["error"] is not None
    except FileNotFoundError:
        return False


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever Megatron prints goes to stderr
    prepare()
    print("ready", file=answers)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
