"""Saves or opens one state under the torch that runs it; scripts/check_torch_versions runs it twice.

python scripts/torch_versions.py save FOLDER    with the planner and with stock
python scripts/torch_versions.py load FOLDER    both, with either; exit status 1 if anything differs
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
)


def state(empty: bool) -> dict[str, Any]:
    """A module with tied weights, its optimizer, every common dtype and plain Python values."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    bits = torch.zeros(8, dtype=torch.uint8) if empty else torch.arange(8, dtype=torch.uint8) % 2
    made = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "dtypes": {str(dtype): bits.to(dtype) for dtype in DTYPES},
        "plain": {"step": 0 if empty else 7, "names": [] if empty else ["a", "ü"], 3: None},
    }
    for tensor in tensors(made) if empty else ():
        tensor.detach().zero_()
    return made


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [t for child in value.values() for t in tensors(child)]
    return [value] if isinstance(value, torch.Tensor) else []


def differing(found: Any, wanted: Any, path: str = "") -> list[str]:
    if isinstance(wanted, dict):
        return [f for k in wanted for f in differing(found[k], wanted[k], f"{path}.{k}")]
    if isinstance(wanted, torch.Tensor):
        same = torch.equal(found.float(), wanted.float())
    else:
        same = found == wanted
    return [] if same else [path.lstrip(".")]


def main() -> int:
    verb, folder = sys.argv[1], Path(sys.argv[2])
    if verb == "save":
        dcp.save(state(False), checkpoint_id=folder / "own", planner=LayoutAwareSavePlanner())
        dcp.save(state(False), checkpoint_id=folder / "stock")
        print(f"saved under torch {torch.__version__}")
        return 0
    faults = []
    for writer in ("own", "stock"):
        for reader in ("own", "stock"):
            target = state(True)
            planner = LayoutAwareLoadPlanner() if reader == "own" else None
            dcp.load(target, checkpoint_id=folder / writer, planner=planner)
            wanted = state(False)
            if reader == "stock":  # stock turns integer keys into text and adds them beside
                target.pop("plain"), wanted.pop("plain")
                target.pop("optimizer"), wanted.pop("optimizer")
            faults += [f"{writer} → {reader}: {key}" for key in differing(target, wanted)]
    result = "equal" if not faults else f"DIFFERS: {', '.join(faults)}"
    print(f"{folder.name} opened under torch {torch.__version__}: {result}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
