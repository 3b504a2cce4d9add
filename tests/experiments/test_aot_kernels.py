"""Kernels, copied weights and loops of compiled programs, counted by hand."""

from pathlib import Path

import pytest

from experiments.aot import kernels
from experiments.aot.hlo import Module, array_bytes


def text_of(name: str) -> str:
    return (Path(__file__).parent / "compiled_texts" / f"{name}.txt").read_text()


# 30 layers: one large slice out of the stack, a product with it, a small change in place of a
# cache, a kernel of ours; after the loop a copy.
GPU = text_of("gpu")
BRANCHES, ROUNDS = text_of("branches"), text_of("rounds")


def started(text: str) -> dict[str, float]:
    """{source of a kernel: how many are started}."""
    return {k.source: k.times for k in kernels.read_kernels(Module.parse(text))}


def test_types_and_shapes():
    types = ("bf16", "f32", "s8", "f8e4m3fn", "pred", "u64")
    assert array_bytes(" ".join(f"{t}[]" for t in types)) == [2, 4, 1, 1, 1, 8]
    assert array_bytes("(bf16[2,64]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s32[])") == [256, 4]
    with pytest.raises(ValueError, match="unknown type 'q7'"):
        array_bytes("q7[]")
    with pytest.raises(ValueError, match="ENTRY"):
        Module.parse("nonsense")


def test_kernels_and_copied_weights():
    found = kernels.read_kernels(Module.parse(GPU))
    assert sum(k.times for k in found) == 30 * 4 + 1
    assert [k.source for k in found if k.ours] == ["attend/pallas_call"]
    assert "fc1/dot_general" in {k.source for k in found}
    # a layer's weights, bfloat16
    assert sum(k.times * k.copied for k in found) == 30 * 2 * 1024 * 2048
    plain = GPU.replace("copy(%out)", "slice(%out), slice={[0:64], [0:1024]}")
    assert kernels.read_kernels(Module.parse(plain))[-1].copied == 0  # below 1 MiB


def test_the_condition_tells_the_length_of_a_loop():
    text = GPU.replace('"known_trip_count":{"n":"30"},', "")
    assert sum(started(text).values()) == 121
    text = text.replace("%n = s32[] constant(30)", "%n = s32[] get-tuple-element(%t.1), index=0")
    assert sum(started(text).values()) == 5  # not known: once


def test_the_longest_branch_counts():
    assert started(BRANCHES) == {"c.1": 1, "c.2": 1}
    assert started(ROUNDS) == {"asked": 50, "c.1": 50, "c.2": 50}
