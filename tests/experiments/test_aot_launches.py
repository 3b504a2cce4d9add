"""Command buffers and kernels outside them, from lists as XLA writes them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from experiments.aot.hlo import Module
from experiments.aot.launches import Launches, read, read_dump
from pallas_kernels import chips
from tests.experiments.test_aot_modelled import BRANCHES, GPU, ROUNDS

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
    assert read(LIST, [30]) == Launches(buffers=30, inside=30 * 4, outside=2 + 30)
    assert read(LIST, [None]) == Launches(buffers=1, inside=4, outside=2 + 1 + 1)


@pytest.mark.parametrize("trips", [[], [30, 30]])
def test_a_list_of_other_loops_is_not_read(trips):
    assert read(LIST, trips) is None


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
    assert read(BRANCHED, []) == Launches(buffers=1, inside=2, outside=1)


def test_rounds_of_the_loops_of_a_text():
    found = [(m := Module.parse(text)).all_trips(m.entry) for text in (GPU, ROUNDS, BRANCHES)]
    assert found[:2] == [[30], [50]] and found[2] == []


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
    module = Module.parse(text)
    found = read_dump(tmp_path, module.all_trips(module.entry))
    assert found.buffers == 30 and found.inside >= 30 * 4 and found.outside <= 3
