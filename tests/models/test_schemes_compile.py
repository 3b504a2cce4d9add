"""What compilers make of products in 8 bits for chips that are not here: the instructions, library
calls and cycles by which `varjax.nn.schemes` says which chips multiply such numbers."""

import json
import subprocess
import sys

import pytest

from pallas_kernels import chips
from tests.models.compile_products import D_IN, D_OUT, ROWS

SLOW = ("a100", "b200", "l4", "tpu-v6e", "tpu-v5p", "tpu7x")
TARGETS = ["h200", "tpu-v5e", *(pytest.param(t, marks=pytest.mark.slow) for t in SLOW)]
# of Triton's products on GPUs; on an L4 Triton takes no fp8, libraries do
NATIVE = {
    ("a100", "w8a8"): "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32",
    ("l4", "w8a8"): "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32",
    ("h200", "w8a8"): "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8",
    ("h200", "fp8"): "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3",
    ("b200", "fp8"): "tcgen05.mma.cta_group::1.kind::f8f6f4",
}
# cycles of a TPU beside a product in bfloat16
FASTER = {("tpu-v5e", "w8a8"): 0.62, ("tpu-v5p", "w8a8"): 0.55, ("tpu-v6e", "w8a8"): 0.9}
FASTER |= {("tpu7x", "fp8"): 0.6}


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
def test_products_are_native(target):
    if why := chips.why_unavailable(target):
        pytest.skip(why)
    command = [sys.executable, "-m", "tests.models.compile_products", target]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {line["scheme"]: line for line in map(json.loads, done.stdout.splitlines())}
    for scheme, line in found.items():
        if scheme is None:
            continue
        if expected := NATIVE.get((target, scheme)):
            assert line["instructions"] == [expected]
        if (target, scheme) == ("l4", "fp8"):
            assert line["libraries"] == ["__cublas$lt$matmul$f8"]
        elif chips.get_chip(target).platform == "gpu":
            assert not line["libraries"]  # the matrix is no temporary, nor are float32 sums
            assert line["temporaries"] < 1.1 * ROWS * D_IN < D_IN * D_OUT
        if most := FASTER.get((target, scheme)):
            assert line["cycles"] < most * found[None]["cycles"]
