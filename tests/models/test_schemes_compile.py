"""What compilers make of products in 8 bits for chips that are not here: the library calls and
cycles by which `varjax.nn.schemes` says which chips multiply such numbers."""

import json
import subprocess
import sys

import pytest

from pallas_kernels import chips
from tests.models.compile_products import D_IN, D_OUT

SLOW = ("a100", "b200", "l4", "tpu-v6e", "tpu-v5p", "tpu7x")
TARGETS = ["h200", "tpu-v5e", *(pytest.param(t, marks=pytest.mark.slow) for t in SLOW)]
# of a GPU: the type of sums, which only operands in 8 bits have, and the library's name
NATIVE = {"w8a8": ["s32", "__cublas$lt$matmul"], "fp8": ["bf16", "__cublas$lt$matmul$f8"]}
# cycles of a TPU beside a product in bfloat16
FASTER = {("tpu-v5e", "w8a8"): 0.62, ("tpu-v5p", "w8a8"): 0.55, ("tpu-v6e", "w8a8"): 0.9}
FASTER |= {("tpu7x", "fp8"): 0.6}


@pytest.mark.aot
@pytest.mark.parametrize("rows", [2, 4096])
@pytest.mark.parametrize("target", TARGETS)
def test_products_are_native(target, rows):
    if why := chips.why_unavailable(target):
        pytest.skip(why)
    command = [sys.executable, "-m", "tests.models.compile_products", target, str(rows)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {line["scheme"]: line for line in map(json.loads, done.stdout.splitlines())}
    for scheme in found.keys() & NATIVE:
        if chips.get_chip(target).platform == "gpu":
            assert found[scheme]["libraries"] == [NATIVE[scheme]]
            # no copy of the matrix: rows, by 16 in fp8, sums and the scratch of the library
            whole = -(-rows // 16) * 16
            assert found[scheme]["temporaries"] < whole * (D_IN + 4 * D_OUT) + 2**22 + 2**16
        elif rows > 2:
            assert found[scheme]["cycles"] < FASTER[target, scheme] * found[None]["cycles"]


@pytest.mark.aot
@pytest.mark.parametrize("target", ["h200", pytest.param("b200", marks=pytest.mark.slow)])
def test_rows_stay_in_8_bits_between_products(target):
    """A layer of VAR-d30 and the norm behind it: four native products and seven kernels of ours
    (three norms, keys and values, attention, two times to 8 bits), and nothing between them."""
    if why := chips.why_unavailable(target):
        pytest.skip(why)
    command = [sys.executable, "-m", "tests.models.compile_layer", target, "256"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["calls"] == {NATIVE["fp8"][1]: 4, "mosaic_gpu_v2": 7}
    assert not found["large_fusions"]
