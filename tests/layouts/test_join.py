"""Join: components put together in a row or woven in groups, against torch."""

import pytest
import torch

from shardplan.layouts import Concat, Grid, Join, Layout, LayoutError, Shard, Whole
from shardplan.layouts.serial import stage_from_json, stage_to_json

ONE = Grid(("tp",), (1,), (0,))


def filled(layout, grids, local):
    """What all ranks' slabs write, by key."""
    out = {}
    for grid, tensor in zip(grids, local, strict=True):
        for slab in layout.slabs(grid):
            target = out.setdefault(slab.key, torch.full(slab.global_shape, -1))
            index = tuple(slice(o, o + n) for o, n in zip(slab.offsets, slab.sizes, strict=True))
            assert bool((target[index] == -1).all())
            target[index] = tensor.as_strided(slab.sizes, slab.strides, slab.start)
    return out


def test_in_a_row():
    tensor = torch.arange(14).reshape(7, 2)
    stages = (
        Whole((7, 2)),
        Concat(0, (("a", 4), ("b", 2), ("c", 1))),
        Join(0, (("ca", ("c", "a"), 1), ("bb", ("b",), 1))),
    )
    found = filled(Layout("w", "w.", stages), [ONE], [tensor])
    assert {"w.ca", "w.bb"} == set(found)
    assert torch.equal(torch.cat([tensor[6:], tensor[:4]]), found["w.ca"])
    assert torch.equal(tensor[4:6], found["w.bb"])


def test_woven_under_tensor_parallelism():
    """Two key heads: q 2, k 2, v 4, z 4 rows each; every rank holds one head of each."""
    heads, rows = 2, {"q": 2, "k": 2, "v": 4, "z": 4}
    whole = {n: torch.arange(100 * i, 100 * i + heads * r) for i, (n, r) in enumerate(rows.items())}
    expected = torch.cat(
        [whole[n][h * r : (h + 1) * r] for h in range(heads) for n, r in rows.items()]
    )
    parts = tuple(rows.items())
    stages = (
        Whole((12,)),
        Concat(0, parts),
        Shard(0, "tp"),
        Join(0, (("qkvz", ("q", "k", "v", "z"), heads),)),
    )
    grids = [Grid(("tp",), (2,), (r,)) for r in range(2)]
    local = [torch.cat([whole[n][r * s : (r + 1) * s] for n, s in parts]) for r in range(2)]
    found = filled(Layout("w", "", stages), grids, local)
    assert expected.tolist() == found["qkvz"].tolist()


def test_wrong_components_and_groups_are_named():
    stages = (Whole((6,)), Concat(0, (("a", 4), ("b", 2))))
    with pytest.raises(LayoutError, match=r"components \['a', 'b'\] can't be joined as \['a'\]"):
        Layout("w", "w", (*stages, Join(0, (("x", ("a",), 1),)))).slabs(ONE)
    with pytest.raises(LayoutError, match=r"a: shape \(4,\) can't be cut into 3 equal parts"):
        Layout("w", "w", (*stages, Join(0, (("x", ("a", "b"), 3),)))).slabs(ONE)


def test_plain_data():
    stage = Join(0, (("x", ("a", "b"), 2),))
    assert stage == stage_from_json(stage_to_json(stage))
