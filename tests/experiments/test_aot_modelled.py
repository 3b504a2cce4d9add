"""The cost model of compiled programs, on texts whose answers are counted by hand."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.aot import program
from experiments.aot.hlo import Array, Module, arrays, shape_bytes, type_bytes
from experiments.aot.kernels import REACHED, START
from experiments.aot.modelled import PALLAS_REACHED, Modelled
from pallas_kernels.chips import CHIPS
from varjax.engine.cost import PallasWork

H200, V5E = CHIPS["h200"], CHIPS["tpu-v5e"]


def text_of(name: str) -> str:
    return (Path(__file__).parent / "compiled_texts" / f"{name}.txt").read_text()


# 30 layers: one large slice out of the stack, a product with it, a small change in place of a
# cache, a kernel of ours; after the loop a copy.
GPU = text_of("gpu")

WEIGHTS, X, Y = 2 * 1024 * 2048, 2 * 64 * 1024, 2 * 64 * 2048
FLOPS = 2 * 64 * 1024 * 2048


def modelled(text: str, chip=H200, pallas=()) -> Modelled:
    return Modelled.of(text, chip, Counter(dict(pallas)))


def test_types_and_shapes():
    assert [type_bytes(t) for t in ("bf16", "f32", "s8", "f8e4m3fn", "pred", "u64")] == [
        *(2, 4, 1, 1, 1, 8)
    ]
    shape = "(bf16[2,64]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s32[])"
    assert arrays(shape) == [Array("bf16", (2, 64)), Array("s32", ())]
    assert shape_bytes(shape) == 260
    with pytest.raises(ValueError, match="unknown type 'q7'"):
        type_bytes("q7")


def test_kernels_of_a_gpu():
    found = modelled(GPU)
    assert found.calls() == 30 * 4 + 1
    assert found.total("flops") == 30 * FLOPS
    # read in the stack, written beside it
    assert found.total("bytes", "weights") == 30 * (2 * WEIGHTS + 4)
    assert found.total("bytes", "product") == 30 * (X + WEIGHTS + Y)
    # a change of two rows: read where it comes from, written; indices are numbers of 4 bytes
    changed = [k for k in found.kernels if k.name == "c.1"]
    assert [k.bytes for k in changed] == [2 * 4 * 2 * 256 + 4]
    [copy] = [k for k in found.kernels if k.name == "copy"]
    assert copy.bytes == 2 * X and copy.loop == "" and copy.times == 1
    assert found.unknown == [] and found.loops_of_unknown_length == 0


def test_seconds_of_a_gpu():
    found = modelled(GPU)
    [product] = [k for k in found.kernels if k.kind == "product"]
    moving = (X + WEIGHTS + Y) / (REACHED["bandwidth"] * H200.bandwidth)
    assert product.seconds == pytest.approx(moving + START)  # few rows: memory decides
    slow = modelled(GPU, replace(H200, bf16_flops=1e9))
    [product] = [k for k in slow.kernels if k.kind == "product"]
    assert product.seconds == pytest.approx(FLOPS / (REACHED["flops"] * 1e9) + START)


def test_kernels_of_ours_count_by_their_estimate():
    work = PallasWork("attend", flops=1e12, bytes=1.0, known=True)
    found, without = modelled(GPU, pallas={work: 30}), modelled(GPU)
    each = 1e12 / H200.bf16_flops / PALLAS_REACHED
    assert found.seconds - without.seconds == pytest.approx(30 * each)
    assert without.calls("pallas") == 30  # started, all the same
    equal = modelled(GPU, pallas={work: 60})  # half of them were found to be equal to the others
    assert equal.pallas_seconds == pytest.approx(found.pallas_seconds)
    unnamed = PallasWork("elsewhere", work.flops, work.bytes, True)
    assert modelled(GPU, pallas={unnamed: 60}).pallas_seconds == 2 * found.pallas_seconds
    assert without.total("seconds", "pallas") == pytest.approx(30 * START)


def test_loops_and_the_costliest_operations():
    found = modelled(GPU)
    loops = dict(found.by_loop())
    assert list(loops) == ["body (30 x)", ""] and loops["body (30 x)"].times == 120
    first = found.costliest(1)[0]
    assert first.kind == "weights" and first.times == 30
    sources = [k.source for k in found.costliest(10)]
    assert "fc1/dot_general" in sources


def test_the_condition_tells_the_length_of_a_loop():
    text = GPU.replace('"known_trip_count":{"n":"30"},', "")
    assert modelled(text).calls() == 121
    text = text.replace("%n = s32[] constant(30)", "%n = s32[] get-tuple-element(%t.1), index=0")
    found = modelled(text)
    assert found.calls() == 5 and found.loops_of_unknown_length == 1


def test_what_is_not_known_is_counted_and_listed():
    text = GPU.replace("copy(%out)", "frobnicate(%out)")
    found = modelled(text)
    assert found.unknown == ["copy"] and found.total("bytes", "unknown") == 2 * X
    assert found.total("seconds", "unknown") > START
    text = GPU.replace("copy(%out)", 'custom-call(%out), custom_call_target="mystery"')
    assert modelled(text).unknown == ["copy"]


LIBRARY = text_of("library")


def test_library_calls():
    gemm, conv = modelled(LIBRARY).kernels
    assert gemm.flops == FLOPS and gemm.kind == "product"
    assert gemm.bytes == X + WEIGHTS + Y  # and not its scratch
    assert conv.flops == 2 * (2 * 16 * 16 * 32) * 3 * 3 * 8


@pytest.mark.parametrize("precision", ["", ", operand_precision={highest,highest}"])
def test_float32_products_run_at_the_rate_of_their_units(precision):
    """In full float32 by the units for it, otherwise in TF32 by tensor cores."""
    chip = replace(H200, bandwidth=1e18)
    rate = 2 * 132 * 128 * 1.98e9 if precision else H200.bf16_flops / 2
    inside = GPU.replace("bf16", "f32")
    inside = inside.replace("rhs_contracting_dims={0}", f"rhs_contracting_dims={{0}}{precision}")
    [product] = [k for k in modelled(inside, chip).kernels if k.kind == "product"]
    assert product.seconds == pytest.approx(FLOPS / (REACHED["flops"] * rate) + START)
    text = LIBRARY.replace("bf16", "f32").replace(", custom_call", f"{precision}, custom_call")
    for kernel in modelled(text, chip).kernels:
        expected = kernel.flops / (REACHED["flops"] * rate) + START
        assert kernel.seconds == pytest.approx(expected)


@pytest.mark.parametrize(("kind", "rate"), [("s8", "int8_flops"), ("f8e4m3fn", "fp8_flops")])
def test_products_in_8_bits_have_a_rate_of_their_own(kind, rate):
    """Where both operands are in 8 bits, in a fusion and in a library call."""
    chip = replace(H200, bandwidth=1e18, **{rate: 5e15})
    inside = GPU.replace("bf16", kind)
    [product] = [k for k in modelled(inside, chip).kernels if k.kind == "product"]
    assert product.seconds == pytest.approx(FLOPS / (REACHED["flops"] * 5e15) + START)
    gemm, _ = modelled(LIBRARY.replace("bf16", kind), chip).kernels
    assert gemm.seconds == pytest.approx(FLOPS / (REACHED["flops"] * 5e15) + START)
    slow = replace(chip, **{rate: None})  # a chip that has none converts them
    [product] = [k for k in modelled(inside, slow).kernels if k.kind == "product"]
    assert product.seconds == pytest.approx(FLOPS / (REACHED["flops"] * H200.bf16_flops) + START)


BRANCHES = text_of("branches")


def test_the_costliest_branch_counts():
    assert modelled(BRANCHES).calls() == 2


ROUNDS = text_of("rounds")


def test_a_branch_of_one_round_counts_once():
    copies = [k.times for k in modelled(ROUNDS).kernels if k.name.startswith("c.")]
    assert copies == [1, 1]
    turned = ROUNDS.replace("true_computation=%twice, false_computation=%same", "").replace(
        "conditional(%asked, %x, %x),",
        "conditional(%asked, %x, %x), branch_computations={%twice, %same}",
    )
    assert modelled(turned).total("bytes") - modelled(ROUNDS).total("bytes") == 48 * 4 * 8 * 4
    every = 49 * 4 * 8 * 4  # the costliest in every round
    computed = ROUNDS.replace("%ten = s32[] constant(10)", "%ten = s32[] remainder(%p.0, %p.0)")
    assert modelled(computed).total("bytes") - modelled(ROUNDS).total("bytes") == every
    unknown = turned.replace('{"known_trip_count":{"n":"50"}}', "{}")
    assert [k.times for k in modelled(unknown).kernels if k.name.startswith("c.")] == [1, 1]
    for other in ("direction=LT", "direction=EQ, type=FLOAT"):
        text = ROUNDS.replace("direction=EQ", other)
        text = text.replace("s32[] parameter(0)\n  %ten = s32", "f32[] parameter(0)\n  %ten = f32")
        assert modelled(text).total("bytes") - modelled(ROUNDS).total("bytes") == 49 * 4 * 8 * 4


TPU = text_of("tpu")


def test_cycles_of_a_tpu():
    found = modelled(TPU, V5E, pallas={PallasWork("attend", 0.0, 819e9, True): 1})
    assert found.total("cycles") == 1500  # those of our kernel are estimated another way
    assert found.cycles == pytest.approx(1500 + 1 / PALLAS_REACHED * 1.5e9)
    assert found.calls("product") == 1
    assert modelled(GPU).cycles is None


WRITTEN = """\
HloModule written

ENTRY %main (p: bf16[64,96,128], q: bf16[64,8,128], r: s32[]) -> bf16[64,96,128] {
  %p = bf16[64,96,128]{2,1,0} parameter(0)
  %q = bf16[64,8,128]{2,1,0} parameter(1)
  %r = s32[] parameter(2)
  %zero = s32[] constant(0)
  %once = bf16[64,96,128]{2,1,0} dynamic-update-slice(%p, %q, %zero, %r, %zero)
  ROOT %other = bf16[64,96,128]{2,1,0} mystery(%once)
}
"""


def test_what_a_tpu_changes_in_place_without_cycles_counts_what_is_written():
    """Another operation without them is counted whole, and named."""
    found = modelled(WRITTEN, V5E)
    written, whole = (2 * 64 * n * 128 * 2 / V5E.bandwidth for n in (8, 96))
    assert found.total("seconds", "other") == pytest.approx(written)
    assert found.unknown == ["other"] and found.seconds == pytest.approx(written + whole)


def test_cycles_that_are_no_estimate_are_none():
    """A fusion of VAR-d36's training step on a v5p came with 2**63 - 1 of them."""
    never = WRITTEN.replace(
        "mystery(%once)", 'mystery(%once), backend_config={"estimated_cycles":"X"}'
    )
    found = modelled(never.replace("X", str(2**63 - 1)), V5E)
    assert found.seconds == modelled(WRITTEN, V5E).seconds and found.unknown == ["other"]
    assert modelled(never.replace("X", "1500"), V5E).unknown == []


def test_not_a_program():
    with pytest.raises(ValueError, match="ENTRY"):
        Module.parse("nonsense")


def test_a_tpu_whose_clock_is_not_published_has_cycles_only():
    found, same = modelled(TPU, CHIPS["tpu7x"]), modelled(TPU, V5E)
    assert found.seconds is None and found.cycles == same.cycles > 0


def test_a_text_of_another_kind_takes_nothing_else_down():
    assert program.modelled("HloModule of some later version", H200, Counter()) is None


SCATTER = """\
HloModule scatter

%stored (p.0: bf16[256,96,128], p.1: s32[64,2], p.2: bf16[64,128]) -> bf16[256,96,128] {
  %p.0 = bf16[256,96,128]{2,1,0} parameter(0)
  %whole = bf16[24576,128]{1,0} bitcast(%p.0)
  %p.1 = s32[64,2]{1,0} parameter(1)
  %p.2 = bf16[64,128]{1,0} parameter(2)
  %changed = bf16[24576,128]{1,0} scatter(%whole, %p.1, %p.2), to_apply=%second
  ROOT %again = bf16[256,96,128]{2,1,0} bitcast(%changed)
}

ENTRY %main (a: bf16[256,96,128], b: s32[64,2], c: bf16[64,128]) -> bf16[256,96,128] {
  %a = bf16[256,96,128]{2,1,0} parameter(0)
  %b = s32[64,2]{1,0} parameter(1)
  %c = bf16[64,128]{1,0} parameter(2)
  ROOT %fused = bf16[256,96,128]{2,1,0} fusion(%a, %b, %c), kind=kInput, calls=%stored
}
"""


def test_a_scatter_in_place_counts_what_it_changes():
    """Indices, and what is stored, which is read and written; not its target. Read from its target,
    that counts as well."""
    [kernel] = modelled(SCATTER).kernels
    assert kernel.bytes == 64 * 2 * 4 + 2 * 64 * 128 * 2
    plain = SCATTER.replace(
        "fusion(%a, %b, %c), kind=kInput, calls=%stored", "scatter(%a, %b, %c), to_apply=%second"
    )
    [kernel] = modelled(plain).kernels
    assert kernel.bytes == 2 * 64 * 128 * 2
    reading = SCATTER.replace("(%whole, %p.1, %p.2)", "(%other, %p.1, %p.2)").replace(
        "%whole = bf16[24576,128]{1,0} bitcast(%p.0)",
        "%other = bf16[24576,128]{1,0} negate(%p.0)",
    )
    [kernel] = modelled(reading).kernels
    assert kernel.bytes == 256 * 96 * 128 * 2 + 64 * 2 * 4 + 2 * 64 * 128 * 2
