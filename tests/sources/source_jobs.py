"""What real ranks do for one source: save it, load it, both with either planner."""

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from sources import SOURCES, Net, expected, objects_in, state_of, tensors_in

from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner


def save(name: str, path: str, how: str) -> None:
    """Saves a source's state: `own`, `stock` or `async`."""
    state, given = SOURCES[name].make()
    if how == "stock":
        dcp.save(state, checkpoint_id=path)
        return
    planner = LayoutAwareSavePlanner(**given)
    if how == "own":
        dcp.save(state, checkpoint_id=path, planner=planner)
    elif how == "async":
        future = dcp.async_save(state, checkpoint_id=path, planner=planner)
        for tensor in tensors_in(state):
            tensor.detach().fill_(-1)  # training goes on: only the copy may be written
        future.result()
    else:
        raise ValueError(how)


def save_whole(name: str, path: str) -> None:
    """Saves the state of one process with whole tensors, under a source's keys."""
    if name == "torchtitan":
        state, given = SOURCES[name].make()
    else:
        module, state = state_of(Net, SOURCES[name].shapes)
        given = {"model": module}
    dcp.save(state, checkpoint_id=path, planner=LayoutAwareSavePlanner(**given))


def load_tensors(name: str, path: str) -> None:
    """Loads a source's checkpoint into whole tensors on one process."""
    tensors = {key: torch.full_like(t, -1) for key, t in expected(SOURCES[name]).items()}
    dcp.load(tensors, checkpoint_id=path, planner=LayoutAwareLoadPlanner())
    wanted = expected(SOURCES[name])
    assert [] == [key for key, tensor in wanted.items() if not torch.equal(tensor, tensors[key])]


def load(name: str, path: str, how: str, policies: Any = None) -> dict[str, Any]:
    """Fills a source's emptied state from a checkpoint; returns what is not as it was."""
    state, given = SOURCES[name].make()
    wanted = [t.detach().clone() for t in tensors_in(state)]
    objects = objects_in(state)
    for tensor in tensors_in(state):
        tensor.detach().fill_(-1)
    _forget(state)
    if how == "stock":
        dcp.load(state, checkpoint_id=path)
        report = None
    else:
        planner = LayoutAwareLoadPlanner(**given, policies=policies)
        dcp.load(state, checkpoint_id=path, planner=planner)
        report = planner.report
    found = tensors_in(state)
    wrong = [i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if not torch.equal(a, b)]
    return {
        "wrong": wrong,
        "objects": objects == objects_in(state) or (objects, objects_in(state)),
        "report": report,
    }


def _forget(state: Any) -> None:
    """Sets numbers in a state dict to others, so that a load must set them."""
    for key, value in state.items():
        if hasattr(value, "state"):
            _forget(value.state)
        elif isinstance(value, dict):
            _forget(value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for entry in value:
                _forget(entry)
        elif isinstance(value, int | float):
            state[key] = type(value)(-1)
