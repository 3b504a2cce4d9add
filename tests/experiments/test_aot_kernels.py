"""Kernels, copied weights, loops and command buffers of compiled programs, counted by hand."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from experiments.aot import kernels
from experiments.aot.hlo import Module, array_bytes
from experiments.aot.launches import Launches, read_dump, read_launches
from pallas_kernels import chips


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


# --- command buffers ---


# As jax 0.10.2 writes it for a loop of two products with what follows them, for an H200
LIST = """\
001: kCopy  [source       | next=003 (2)] kCopy
002: kCopy  [source       | next=003 (1)] kCopy
003: kWhile [prev=002 (1) | sink        ]
condition:
    004: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        005: kDynamicSliceFusion [source       | next=008 (2)] params=1, results=1
            006: kCopy [source | sink] kCopy
        007: kCustomKernel       [source       | sink        ] loop_add_fusion grid: [1, 1, 1]
        008: kCublasLtMatmul     [prev=005 (2) | next=009 (1)] kCublasLtMatmul
        009: kCustomKernel       [prev=008 (1) | next=010 (1)] sort_12_1 grid: [512, 1, 1]
    010: kCustomCall [prev=009 (1) | sink] kCustomCall
    011: kWaitForStreams
"""


def test_what_a_loop_starts():
    """A copy within a fusion that cuts slices is one start. Where the rounds are known nobody asks
    the condition."""
    assert read_launches(LIST, [30]) == Launches(buffers=30, inside=30 * 4, outside=2 + 30)
    assert read_launches(LIST, [None]) == Launches(buffers=1, inside=4, outside=2 + 1 + 1)


@pytest.mark.parametrize("trips", [[], [30, 30]])
def test_a_list_of_other_loops_is_not_read(trips):
    assert read_launches(LIST, trips) is None


BRANCHED = """\
001: kConditional [source | sink]
branch_0:
    002: kCopy [source | sink] kCopy
branch_1:
    000: kCommandBuffer [source | sink]
        003: kKernel [source | sink] a
        004: kKernel [source | sink] b
005: kKernel [source | sink] c
"""


def test_the_branch_that_starts_most_counts():
    assert read_launches(BRANCHED, []) == Launches(buffers=1, inside=2, outside=1)


def test_rounds_of_the_loops_of_a_text():
    found = [Module.parse(text).all_trips() for text in (GPU, ROUNDS, BRANCHES)]
    assert found == [[30], [50], []]


def test_a_dump_without_command_buffers(tmp_path):
    """The compiler writes a second list only where it recorded something."""
    (tmp_path / "module_1.jit_small.thunk_sequence.txt").write_text("001: kCopy kCopy\n")
    (tmp_path / "module_2.jit_f.thunk_sequence.txt").write_text(BRANCHED.replace("Buffer", "s"))
    assert read_dump(tmp_path, []) == Launches(outside=3)
    (tmp_path / "module_2.jit_f.thunk_sequence_after_thunk_passes.txt").write_text(BRANCHED)
    assert read_dump(tmp_path, []) == Launches(buffers=1, inside=2, outside=1)
    assert read_dump(tmp_path / "empty", []) is None


@pytest.mark.aot
def test_an_absent_gpu_records_library_calls_and_kernels(tmp_path):
    """As one that is here: XLA records no library call for a driver that it does not know."""
    if why := chips.why_unavailable("h200"):
        pytest.skip(why)
    where = SingleDeviceSharding(chips.compile_only_devices("h200")[0])

    def layers(x, weights):
        def two(x, w):
            for _ in range(2):
                x = jnp.sort(jnp.tanh(x @ w), -1)
            return x, None

        return jax.lax.scan(two, x, weights)[0]

    shapes = (512, 512), (30, 512, 512)
    given = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=where) for s in shapes)
    options = {"xla_dump_hlo_as_text": True, "xla_dump_to": str(tmp_path)}
    options["xla_gpu_enable_triton_gemm"] = False
    text = jax.jit(layers).lower(*given).compile(compiler_options=options).as_text()
    found = read_dump(tmp_path, Module.parse(text).all_trips())
    assert found.buffers == 30 and found.inside >= 30 * 4 and found.outside <= 3
