"""megatron-fsdp by itself, without Megatron-Core: version 1 and the experimental version 2."""

import torch
import torch.distributed as dist
from counting import Calls
from megatron_fsdp import MixedPrecisionPolicy, experimental, fully_shard
from megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardplan.planner.megatron import load_checkpoint, save_checkpoint
from shardplan.planner.planning.table import build_table


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.inner(x)
        for layer in self.layers:
            x = layer(x)
        return x


def described(chunk_list, tensor) -> list:
    """The boxes that Megatron-FSDP has gathered for a DTensor; empty shards have none."""
    boxes = [(list(c.offsets), list(c.sizes)) for c in chunk_list if 0 not in c.sizes]
    return [list(tensor.shape), boxes]


def boxes_of(table) -> dict:
    (chunk,) = table.chunks
    return {
        layout.name: [list(f.shape), [(list(b.offsets), list(b.sizes)) for b in f.boxes]]
        for layout in chunk.layouts.values()
        for f in layout.frames(chunk.grids.of(layout.family))
    }


def network_v1(*, mesh: dict, zero="optim_grads_params", outer="no_shard", half=False):
    """A network under version 1, its optimizer, and the mesh's roles as `fully_shard` takes them."""
    torch.manual_seed(0)
    net = Net().bfloat16() if half else Net()
    main = torch.float32 if half else None
    grid = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    roles = {"dp_shard_dim": "dp", "tp_dim": "tp"}
    if "outer" in mesh:
        roles |= {
            "dp_outer_dim": "outer",
            "hybrid_fsdp_group": grid["outer", "dp"]._flatten("all").get_group(),
        }
    model, optimizer = fully_shard(
        net,
        torch.optim.Adam(net.parameters(), lr=1e-2),
        device_mesh=grid,
        **roles,
        fsdp_unit_modules=[Block],
        zero_dp_strategy=zero,
        outer_dp_sharding_strategy=outer,
        device=torch.device("cpu"),
        calculate_per_token_loss=True,  # gloo has no averaging reduction
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=main),
    )
    return model, optimizer


def compare_v1(**options) -> dict:
    model, _ = network_v1(**options)
    with Calls() as theirs:
        state = model.state_dict()
    expected = {}
    for name, value in state.items():
        chunks = value.__create_chunk_list__() if hasattr(value, "__create_chunk_list__") else None
        assert isinstance(value, DTensor), name
        expected[name.removeprefix("module.")] = described(chunks, value)
    with Calls() as ours:
        actual = boxes_of(build_table(model))
    return {
        "tensors": len(expected),
        "differences": [
            [name, expected[name], actual.get(name)]
            for name in expected
            if actual.get(name) != expected[name]
        ],
        "theirs": theirs.count,
        "ours": ours.count,
    }


def train_v1(path: str, load_from: str | None = None, steps: int = 2, **options) -> dict:
    """Trains on data that depends on the step alone; saves; returns losses."""
    model, optimizer = network_v1(**options)
    first = 0
    if load_from is not None:
        loaded = load_checkpoint(model, optimizer, load_from)
        first = loaded.iteration
    losses = []
    for step in range(first, first + steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        x = x.bfloat16() if options.get("half") else x
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    with Calls() as calls:
        save_checkpoint(model, optimizer, path, iteration=first + steps)
    return {"losses": losses, "collectives": calls.by_name}


def network_v2(*, mesh: dict, optimizer_axes: list, half=False):
    torch.manual_seed(0)
    net = Net().bfloat16() if half else Net()
    grid = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    flat = [experimental.Flat() if cut else experimental.Replicate() for cut in optimizer_axes]
    partial = [
        experimental.Flat() if cut else experimental.Partial(dist.ReduceOp.SUM)
        for cut in optimizer_axes
    ]
    placements = experimental.Placements(
        dp_axes=list(range(len(mesh))), parameter=flat, gradient=partial, optimizer=flat
    )
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    for layer in net.layers:
        experimental.fully_shard(
            layer, mesh=grid, placements=placements, mixed_precision_policy=policy
        )
    experimental.fully_shard(net, mesh=grid, placements=placements, mixed_precision_policy=policy)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    experimental.fully_shard_optimizer(optimizer)
    return net, optimizer


def compare_v2(**options) -> dict:
    net, _ = network_v2(**options)
    expected = {}
    with Calls() as theirs:
        for name, parameter in net.named_parameters():
            chunk = gather_and_compute_chunk_metadata(parameter)
            expected[name] = described([chunk], parameter)
    with Calls() as ours:
        actual = boxes_of(build_table(net))
    return {
        "tensors": len(expected),
        "differences": [
            [name, expected[name], actual.get(name)]
            for name in expected
            if actual.get(name) != expected[name]
        ],
        "theirs": theirs.count,
        "ours": ours.count,
    }


def roundtrip_v2(path: str, save: bool, **options) -> dict:
    """Numbers the elements of every parameter and moment; saves them, or loads and compares."""
    net, optimizer = network_v2(**options)
    boxes = boxes_of(build_table(net))

    def mine(number, name, parameter, slot):
        start = 1000.0 * number + (0.5 if slot else 0.0)
        whole = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
        rows = [(o[0], o[0] + s[0]) for o, s in boxes[name][1]] or [(0, 0)]
        return whole[slice(*rows[0])] + start

    def held(parameter, slot):
        return optimizer.state.get(parameter, {}).get(slot) if slot else parameter

    if save:
        with torch.no_grad():
            for number, (name, parameter) in enumerate(net.named_parameters()):
                parameter._local_tensor.copy_(mine(number, name, parameter, ""))
                if parameter._local_tensor.numel():
                    moment = torch.zeros_like(parameter)
                    moment._local_tensor.copy_(mine(number, name, parameter, "exp_avg"))
                    optimizer.state[parameter] = {
                        "step": torch.tensor(3.0),
                        "exp_avg": moment,
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        save_checkpoint(net, optimizer, path, iteration=5)
        return {}
    loaded = load_checkpoint(net, optimizer, path)
    wrong = {}
    for number, (name, parameter) in enumerate(net.named_parameters()):
        for slot in ("", "exp_avg"):
            tensor, wanted = held(parameter, slot), mine(number, name, parameter, slot)
            if tensor is None and not wanted.numel():
                continue
            local = wanted.new_full(wanted.shape, -1) if tensor is None else tensor._local_tensor
            if not torch.equal(local, wanted):
                wrong[f"{name} {slot}"] = int((local != wanted).sum())
    # The weights that the next forward gathers are those that were loaded.
    for group in {id(g): g for layer in net.modules() for g in groups_of(layer)}.values():
        main, compute = group.main_weight.local_buffer, group.model_weight.local_buffer
        if not torch.equal(main.to(group.dtype), compute):
            wrong[f"compute weights of {group.parameter_names}"] = -1
    return {"wrong": wrong, "iteration": loaded.iteration}


def groups_of(module):
    return getattr(module, "_parameter_groups", ())
