"""Mosaic GPU kernels compiled for Hopper and Blackwell GPUs that are not here: they lower, are
assembled without spills, their memory on the chip fits, and the pool is changed in place.

By default the shapes that matter most, with --slow all."""

import json
import subprocess
import sys

import pytest

from pallas_kernels import chips
from pallas_kernels.ragged_attention import config
from pallas_kernels.ragged_attention.tune import call_of
from pallas_kernels.sample import mosaic_gpu as sample_kernel
from pallas_kernels.shared import mosaic_products
from pallas_kernels.slot_moves import mosaic_gpu as slot_moves
from tests.often import often
from tests.pallas_kernels import compile_mosaic

# finished keys and values are one; moments take finished queries, too
KERNELS = {"attend": 2, "attention_moments": 3, "write": 2, "layer": 3, "apart": 2, "text": 1}
KERNELS["listed"] = 2
# bytes that CUDA's assembler spills with heads of 128 and rows in 8 bits, one number at a time
MOST_SPILLED = {(t, "ragged_attention"): n for t, n in (("b200", 72), ("h200", 20), ("h100", 20))}
FEW = ("odd", "odd-int8", "wide", "wide-int8", "decode")
ALL = ("h100", "b200")  # with --slow: every shape on each kind of chip
TARGETS = [(target, FEW) for target in ("h200", "b200")]
TARGETS += [pytest.param(t, compile_mosaic.SHAPES, marks=pytest.mark.slow) for t in ALL]


def compiled(target, shapes) -> list[dict]:
    """What `compile_mosaic` finds, in a process of its own."""
    if why := chips.why_unavailable(target):
        pytest.skip(why)
    command = [sys.executable, compile_mosaic.__file__, target, *shapes]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.aot
@pytest.mark.parametrize(("target", "shapes"), TARGETS)
def test_kernels_compile(target, shapes):
    found = compiled(target, shapes)
    assert len(found) == sum(2 if "int8" in name else 7 for name in shapes)
    memory = chips.get_chip(target).gpu.shared_memory[1]
    earlier = {"layer"}  # whose kernels others have as well; a text has no blocks that differ
    for program in found:
        operation, new = program["operation"], program["new"]
        assert program["kernels"] == KERNELS[operation], program
        assert new or operation in earlier, program
        earlier |= {operation} & {"text"}
        for name, kernel in new.items():
            assert kernel["spills"] <= MOST_SPILLED.get((target, name), 0), program
            assert 0 < kernel["shared_memory"] < memory, program
            columns = tensor_columns(name, program) if target == "b200" else 0
            assert kernel["tensor_memory"] == columns, program
        if "attention_moments" in new:  # three programs of 256 threads on a multiprocessor
            assert 3 * 256 * new["attention_moments"]["registers"] <= 65536, program
        spec = compile_mosaic.SHAPES[program["shape"]]
        if "ragged_attention" in new and spec.tokens <= 64 and spec.head_dim == 64:
            attention = new["ragged_attention"]  # three of 128 threads; CUDA takes 1 KiB of each
            # scales and rotations take registers: 182 and 193 on an H200
            most = 2 if spec.in_8_bits or spec.rotated else 3
            assert most * 128 * attention["registers"] <= 65536, program
            together = chips.get_chip(target).gpu.shared_memory[0]
            assert most * (attention["shared_memory"] + 1024) <= together, program
        if operation in ("write", "layer", "apart"):  # no second pool
            assert program["temporaries"] <= program["finished"] * 1.1 + 2**20, program
        if operation == "listed":  # nor finished keys and values
            assert program["temporaries"] <= program["finished"] / 8 + 2**20, program


@pytest.mark.aot
@pytest.mark.parametrize(
    ("target", "shapes"),
    [("h200", ["rows-4096", "rows-65536"])]
    + [pytest.param(t, compile_mosaic.ROWS, marks=pytest.mark.slow) for t in ALL],
)
def test_choosing_compiles(target, shapes):
    """One kernel; of rows that it does not hold, guided logits lie in memory beside the noise."""
    found = compiled(target, shapes)
    assert len(found) == len(shapes)
    for program in found:
        images, tokens, vocabulary = compile_mosaic.ROWS[program["shape"]]
        held = vocabulary <= sample_kernel.MOST
        logits = 0 if held else 4 * images * tokens * vocabulary
        assert program["kernels"] == 1, program
        assert logits <= program["temporaries"] <= logits + 2**20, program
        assert not program["new"]["sample"]["spills"], program
        # of 65536 registers: four programs of 128 threads on a multiprocessor
        assert program["new"]["sample"]["registers"] <= 128, program


FEW_TOKENS = ("tokens", "tokens-h100", "tokens-h128-int8", "tokens-used")


@pytest.mark.aot
@pytest.mark.parametrize(
    ("target", "shapes"),
    [(t, FEW_TOKENS) for t in ("h200", "b200")]
    + [pytest.param(t, compile_mosaic.TOKENS, marks=pytest.mark.slow) for t in ALL],
)
def test_token_attention_compiles(target, shapes):
    """One kernel, sums changed in place; nothing of the pool's size beside it."""
    memory = chips.get_chip(target).gpu.shared_memory
    found = compiled(target, shapes)
    assert len(found) == len(shapes)
    for program in found:
        spec, slots = compile_mosaic.TOKENS[program["shape"]]
        queries = spec.rows * spec.heads * 128 * 4
        assert program["kernels"] == 1, program
        assert program["temporaries"] <= 2 * queries + 2**10, program
        (kernel,) = program["new"].values()
        assert not kernel["spills"], program
        assert kernel["shared_memory"] < memory[1], program
        # programs of 128 threads that a multiprocessor has shared memory for: registers, too
        programs = memory[0] // (kernel["shared_memory"] + 1024)
        assert 128 * programs * kernel["registers"] <= 65536, program
        assert programs >= (3 if spec.dtype == "bfloat16" else 2), program


FEW_ENDS = ("end-xl",)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("target", "shapes"),
    [(t, FEW_ENDS) for t in ("h200", "b200")]
    + [pytest.param(t, compile_mosaic.ENDS, marks=pytest.mark.slow) for t in ALL],
)
def test_end_of_a_stage_compiles(target, shapes):
    """Pools and scores change in place: queries in whole windows are all that exists beside
    them."""
    memory = chips.get_chip(target).gpu.shared_memory
    for program in compiled(target, shapes):
        spec, _, layers = compile_mosaic.ENDS[program["shape"]]
        move = program["operation"] == "move"
        assert program["kernels"] == (-(-layers // slot_moves.LAYERS) if move else 1), program
        queries = spec.rows * spec.heads * 128 * 4
        assert program["temporaries"] <= (0 if move else 2 * queries) + 2**12, program
        for kernel in program["new"].values():
            assert not kernel["spills"], program
            # at least two programs of 128 threads on a multiprocessor
            assert 2 * (kernel["shared_memory"] + 1024) <= memory[0], program
            assert 2 * 128 * kernel["registers"] <= 65536, program


@pytest.mark.parametrize("shape", ["tokens", "tokens-h128-int8"])
def test_token_attention_lowers(shape, monkeypatch):
    """Every version of JAX lowers them, without the chip's compiler."""
    monkeypatch.setattr(mosaic_products.target, "capability", lambda: "9.0")
    run, given = compile_mosaic.token(shape)
    assert "mosaic_gpu" in run.trace(*given).lower(lowering_platforms=("cuda",)).as_text()


def tensor_columns(kernel: str, program: dict) -> int:
    """Columns of tensor memory that a kernel takes. Attention has one to three warpgroups; other
    kernels have one tile. Programs take powers of two, at least 32."""
    spec = compile_mosaic.SHAPES[program["shape"]]
    if kernel == "ragged_attention":
        tiles = config.heuristic(call_of("attend", spec), "mosaic")
        used = tiles.warpgroups * sum(n // 2 for n in {tiles.block_k, spec.head_dim})
        return max(32, 1 << (used - 1).bit_length())
    # one that changes an operand has lost its name: it finishes and stores
    finishes = kernel == "finish" or program["operation"] in ("apart", "listed")
    multiplies = kernel == "attention_moments" or finishes and spec.rotated
    return 32 if multiplies else 0


@pytest.mark.parametrize(
    ("capability", "product", "shape"),
    often([("9.0", "wgmma", "wide")], [("9.0", "wgmma", "wide"), ("10.0", "tcgen05", "wide-int8")]),
)
def test_kernels_lower(capability, product, shape, monkeypatch):
    """Every version of JAX lowers them, without the chip's compiler."""
    monkeypatch.setattr(mosaic_products.target, "capability", lambda: capability)
    spec = compile_mosaic.SHAPES[shape]
    for operation, (run, given) in compile_mosaic.programs(spec).items():
        lowered = run.trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        # the rotation of keys is a product
        multiplies = spec.rotated or operation != "write"
        assert "mosaic_gpu" in lowered and (product in lowered) == multiplies


@pytest.mark.aot
def test_products_of_a_token_compile(target="h200"):
    """Three kernels, without spills; a program per multiprocessor has all registers."""
    memory = chips.get_chip(target).gpu.shared_memory
    found = compiled(target, compile_mosaic.LAYERS)
    assert len(found) == len(compile_mosaic.LAYERS)
    for program in found:
        assert program["kernels"] == 3 == len(program["new"]), program
        for kernel in program["new"].values():
            assert not kernel["spills"], program
            assert kernel["shared_memory"] < memory[1], program
