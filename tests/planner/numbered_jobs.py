"""What ranks run in `test_numbered_state`."""

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardplan.planner import LayoutAwareLoadPlanner, LoadPolicies


def sharded(start):
    """Returns a model of two ranks' FSDP2 and its optimizer; rank 1 stores nothing of `1.*`."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([parameters[number] for number in (2, 0, 3, 1)])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for number, parameter in enumerate(parameters):
        optimizer.state[parameter]["exp_avg"].fill_(start + number)
    return model, optimizer


def sharded_by_number(path, names):
    """Saves with stock DCP and loads; returns the values, the report's numbers and what is left."""
    _, optimizer = sharded(1.0)
    dcp.save({"optim": optimizer.state_dict()}, storage_writer=FileSystemWriter(path))
    model, live = sharded(100.0)
    state = get_optimizer_state_dict(model, live) if names else live.state_dict()
    policies = LoadPolicies(unexpected="error")
    planner = LayoutAwareLoadPlanner(model, optimizer=live, policies=policies)
    dcp.load({"optim": state}, storage_reader=FileSystemReader(path), planner=planner)
    moments = [live.state[p]["exp_avg"].full_tensor() for p in model.parameters()]
    return [set(m.flatten().tolist()) for m in moments], planner.report.numbered
