"""Layouts of live Megatron-FSDP models beside the metadata that Megatron gathers, every DTensor."""

import pytest

pytestmark = pytest.mark.gloo

# Tensors after Megatron's own splitting, with 2 layers (GDN, attention), each with 4 experts.
ALL_EXPERTS, HALF_OF_THEM = 58, 46

CONFIGURATIONS = {
    "tp1": ({}, ALL_EXPERTS),
    "tp2": ({"tp": 2}, ALL_EXPERTS),
    "ep2": ({"ep": 2}, HALF_OF_THEM),
    "tp2 ep2": ({"tp": 2, "ep": 2}, HALF_OF_THEM),
    "tp2 etp2": ({"tp": 2, "etp": 2}, ALL_EXPERTS),
    "etp2": ({"etp": 2}, ALL_EXPERTS),
    "tp2 ep2 etp2": ({"tp": 2, "ep": 2, "etp": 2}, HALF_OF_THEM),
    "ep2 etp2": ({"ep": 2, "etp": 2}, HALF_OF_THEM),
    "hsdp": ({"outer": 2}, ALL_EXPERTS),
    "hybrid": ({"outer": 2, "outer_zero": "optim"}, ALL_EXPERTS),
    "hybrid tp2": ({"tp": 2, "outer": 2, "outer_zero": "optim"}, ALL_EXPERTS),
    "zero1": ({"zero": "optim"}, ALL_EXPERTS),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_layouts_equal_what_megatron_gathers(megatron, name):
    parallel, tensors = CONFIGURATIONS[name]
    results = megatron.run("metadata:compare", parallel=parallel)
    for result in results:
        assert [] == result["differences"]
        assert [] == result["only_planned"]
        assert tensors == result["tensors"]
        assert 0 == result["ours"]["collectives"]
    assert all(result["theirs"]["collectives"] > tensors for result in results)
    # What rank 0 says of the other ranks is what they say of themselves.
    for coordinate, boxes in results[0]["of_others"]:
        (found,) = [r["own"] for r in results if r["coordinate"] == coordinate]
        assert found == boxes
    assert [] == [fault for result in results for fault in result["unproved"]]
    print(f"{name}: {tensors} tensors; theirs {results[0]['theirs']}, ours {results[0]['ours']}")
