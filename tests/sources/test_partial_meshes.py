"""DTensors on meshes with some of the ranks, or of a root without names: stored right, or refused.

Four real processes; what they do is in `mesh_jobs`.
"""

import mesh_jobs
import pytest
import ranks

STORAGES = ("torch", "own", "own, apart")
pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def four():
    with ranks.started(4) as started:
        yield started


@pytest.mark.parametrize("mesh", mesh_jobs.MESHES)
@pytest.mark.parametrize("storage", STORAGES)
def test_stages_with_keys_of_their_own(four, tmp_path, mesh, storage):
    four.run("mesh_jobs:stages", 4, mesh, storage, str(tmp_path / "c"), "")


@pytest.mark.parametrize("mesh", mesh_jobs.MESHES)
@pytest.mark.parametrize("given", ["model", "grid", "model, grid"])
def test_stages_with_a_model_or_a_grid(four, tmp_path, mesh, given):
    four.run("mesh_jobs:stages", 4, mesh, "torch", str(tmp_path / "c"), given)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_mesh_without_some_ranks(four, tmp_path, storage):
    four.run("mesh_jobs:submesh", 4, storage, str(tmp_path / "c"))


@pytest.mark.parametrize("mesh", mesh_jobs.MESHES)
def test_equal_values_under_one_key_are_stored_once(four, tmp_path, mesh):
    four.run("mesh_jobs:one_key", 4, mesh, "torch", str(tmp_path / "c"), True)


@pytest.mark.parametrize("mesh", mesh_jobs.MESHES)
@pytest.mark.parametrize("storage", STORAGES)
def test_different_values_under_one_key_are_refused(four, tmp_path, mesh, storage):
    text = r"w: ranks 0 and 2 hold different values of the box at \(0, 0\).*grid=Grids\.from_sizes"
    with pytest.raises(ranks.RankFailure, match=text):
        four.run("mesh_jobs:one_key", 4, mesh, storage, str(tmp_path / "c"), False)
    assert not (tmp_path / "c" / ".metadata").exists()
    assert not (tmp_path / "c" / "checkpoint.json").exists()


@pytest.mark.parametrize("mesh", ["apart", "unflattened"])
def test_numbers_of_parameters_are_refused_where_ranks_may_number_others(four, tmp_path, mesh):
    text = r"optim: its parameters are numbered, and every rank may number others so.*grid="
    with pytest.raises(ranks.RankFailure, match=text):
        four.run("mesh_jobs:numbered", 4, mesh, str(tmp_path / "c"))


@pytest.mark.parametrize("name", ["experts", "routed", "moe_inner"])
@pytest.mark.parametrize(
    "given", ["", "model", "model, grid", "model, layouts", "model, grid, layouts"]
)
def test_experts_are_told_by_their_mesh_before_their_name(four, tmp_path, name, given):
    four.run("mesh_jobs:experts", 4, name, str(tmp_path / "c"), given)


@pytest.mark.parametrize("storage", STORAGES)
def test_keys_in_any_order(four, tmp_path, storage):
    four.run("mesh_jobs:key_order", 4, storage, str(tmp_path / "c"))


@pytest.mark.parametrize("case", mesh_jobs.ORDERS)
@pytest.mark.parametrize("given", ["", "model"])
@pytest.mark.parametrize("storage", STORAGES)
def test_meshes_of_the_same_names_in_another_order_of_ranks(four, tmp_path, case, given, storage):
    four.run("mesh_jobs:orders", 4, case, storage, str(tmp_path / "c"), given)


def test_grid_in_another_order_than_the_mesh_is_refused(four, tmp_path):
    text = r"u: its mesh .* has this rank at \{'dp_shard': 2\}, but the grid has it at \{'dp_shard': 1\}"
    with pytest.raises(ranks.RankFailure, match=text):
        four.run("mesh_jobs:orders", 4, "1-d", "torch", str(tmp_path / "c"), "grid")
