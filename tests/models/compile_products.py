"""Compile a product of one matrix for a chip that is not here, in every scheme that it takes: one
JSON line each. In a process of its own, since some errors of a compiler end the process.

python -m tests.models.compile_products CHIP [ROWS]
"""

import json
import os
import re
import sys

from pallas_kernels import chips

os.environ.update(chips.quiet_environment())

import jax  # noqa: E402  (after the environment)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from varjax.engine.program import compiler_options  # noqa: E402
from varjax.nn.quantized import quantize  # noqa: E402
from varjax.nn.schemes import SCHEMES, why_not  # noqa: E402

D_IN, D_OUT = 1920, 7680
CALL = r'= \((\w+)\[.*custom_call_target="([^"]*matmul[^"]*)"'  # of a library: type of sums, name


def compiled(chip: chips.Chip, scheme: str | None, rows: int) -> dict:
    """What the compiler makes of the product; scheme None: of bfloat16 weights."""
    mesh = Mesh(np.array(chips.compile_only_devices(chip.name)), ("x",))
    where = NamedSharding(mesh, PartitionSpec())

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=where)

    matrix = quantize(shape(D_IN, D_OUT), SCHEMES[scheme]) if scheme else shape(D_IN, D_OUT)
    matrix = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), matrix)
    options = dict(compiler_options(chip.platform, weights_dtype=scheme))
    product = (lambda q, x: q.product(x)) if scheme else (lambda q, x: x @ q)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(product).trace(matrix, shape(rows, D_IN))
    found = traced.lower().compile(compiler_options=options)
    text = found.as_text()
    cycles = map(int, re.findall(r'estimated_cycles"?:\s*"?(\d+)', text))
    return {
        "scheme": scheme,
        "libraries": re.findall(CALL, text),
        "cycles": max(cycles, default=None),
        "temporaries": found.memory_analysis().temp_size_in_bytes,
    }


if __name__ == "__main__":
    wanted, given = chips.get_chip(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 4096
    for name in (None, *SCHEMES):
        if name is None or why_not(SCHEMES[name], wanted) is None:
            print(json.dumps(compiled(wanted, name, given)))
