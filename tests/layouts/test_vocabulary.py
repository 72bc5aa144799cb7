"""Vocabulary padding: (12, h) at TP 2 and (16, h) at TP 4 are one (10, h) on disk."""

import types

import pytest
import torch

from shardplan.layouts import (
    Grids,
    LayoutError,
    LayoutRegistry,
    Level,
    ParamInfo,
    TensorParallel,
    Unpad,
    VocabularyPadding,
    model_layouts,
    prove,
)


def layout(tp, rows, size=10):
    grids = Grids.from_sizes(0, tp=tp)
    registry = LayoutRegistry([TensorParallel({"*": 0}), VocabularyPadding({"*": size})])
    found = registry.layout(ParamInfo("embedding.weight", (rows, 3), grids.dense))
    prove(found, grids.dense)
    return [
        [(s.global_shape, s.offsets, s.sizes, s.start) for s in found.slabs(place)]
        for place in grids.dense.walk(("tp",))
    ]


def test_padded_to_12_over_two_ranks():
    assert [
        [((10, 3), (0, 0), (6, 3), 0)],
        [((10, 3), (6, 0), (4, 3), 0)],
    ] == layout(2, 6)


def test_padded_to_16_over_four_ranks():
    """Rank 2 holds rows 8 and 9 and two of padding, rank 3 only padding."""
    assert [
        [((10, 3), (0, 0), (4, 3), 0)],
        [((10, 3), (4, 0), (4, 3), 0)],
        [((10, 3), (8, 0), (2, 3), 0)],
        [],
    ] == layout(4, 4)


def test_without_padding_nothing_changes():
    assert [[((10, 3), (0, 0), (5, 3), 0)], [((10, 3), (5, 0), (5, 3), 0)]] == layout(2, 5)


def test_a_vocabulary_larger_than_the_padded_tensor_is_refused():
    with pytest.raises(LayoutError) as error:
        layout(2, 4)
    assert str(error.value) == (
        "embedding.weight: the true size 10 of dim 0 is larger than the padded tensor's 8 "
        "(tp 0/2). Padding can only add."
    )


def test_patterns():
    provider = VocabularyPadding({"*.word_embeddings.weight": 10, "output_layer.*": 11})
    grid = Grids.from_sizes(0).dense
    assert Level.PADDING is provider.level
    for fqn, stages in (
        ("embedding.word_embeddings.weight", (Unpad(0, 10),)),
        ("output_layer.weight", (Unpad(0, 11),)),
        ("embedding.position_embeddings.weight", ()),
    ):
        param = ParamInfo(fqn, (12, 3), grid)
        assert bool(stages) == provider.claims(param)
        assert stages == provider.stages(param)


class Embedding(torch.nn.Module):
    """An embedding that is padded and knows its true size, as shardplan asks."""

    def __init__(self, rows, vocab_size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, 3))
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0
        if vocab_size is not None:
            self.vocab_size = vocab_size


class Model(torch.nn.Module):
    def __init__(self, vocab_size=10):
        super().__init__()
        self.vocab_size = 12  # of a model, not of what owns the weight
        self.embedding = Embedding(6, vocab_size)
        self.norm = torch.nn.LayerNorm(3)


@pytest.mark.parametrize(("vocab_size", "shape"), [(10, (10, 3)), (None, (12, 3))])
def test_a_live_owner_knows_the_true_size(vocab_size, shape):
    grids = Grids.from_sizes(0, tp=2)
    registry = LayoutRegistry([TensorParallel(), VocabularyPadding()])
    layouts = model_layouts(Model(vocab_size), grids, registry)
    assert shape == layouts["embedding.weight"].slabs(grids.dense)[0].global_shape
    assert (3,) == layouts["norm.weight"].slabs(grids.dense)[0].global_shape


def test_other_parameters_of_a_module_with_a_vocabulary_are_left_alone():
    """minGPT's model owns its position embedding itself, and knows the size of its vocabulary."""

    class Owner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.vocab_size = 10
            self.weight = torch.nn.Parameter(torch.zeros(12, 3))
            self.positions = torch.nn.Parameter(torch.zeros(1, 4, 3))
            self.scale = torch.nn.Parameter(torch.zeros(()))

    grids = Grids.from_sizes(0)
    layouts = model_layouts(Owner(), grids, LayoutRegistry([VocabularyPadding()]))
    assert {"weight": (10, 3), "positions": (1, 4, 3), "scale": ()} == {
        fqn: layout.slabs(grids.dense)[0].global_shape for fqn, layout in layouts.items()
    }


def test_a_vocab_size_that_is_no_number_is_not_one():
    owner = types.SimpleNamespace(vocab_size="10")
    param = ParamInfo("w", (12, 3), Grids.from_sizes(0).dense, owners=(("", owner),))
    assert not VocabularyPadding().claims(param)
