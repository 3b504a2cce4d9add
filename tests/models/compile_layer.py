"""Compile a layer of VAR whose rows stay in 8 bits for a GPU that is not here: one JSON line that
says what the program consists of. In a process of its own, since JAX compiles these kernels for one
architecture per process.

python -m tests.models.compile_layer CHIP TOKENS
"""

import json
import math
import os
import re
import sys
from collections import Counter
from dataclasses import replace

from pallas_kernels import chips

os.environ.update(chips.quiet_environment())

import jax  # noqa: E402  (after the environment)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from pallas_kernels.arg_specs import SPECS  # noqa: E402
from pallas_kernels.ragged_attention import store_and_attend  # noqa: E402
from pallas_kernels.residual import Vectors  # noqa: E402
from varjax.engine.program import compiler_options  # noqa: E402
from varjax.model import describe  # noqa: E402
from varjax.nn import parameters, stacked  # noqa: E402
from varjax.nn.stream import Stream  # noqa: E402

ROWS, MODEL, SCHEME = 16, "var-d30", "fp8"


def layer(pool, transformer, x, context, args):
    """The second of two layers, with the sum of its branches: the norm of another would do that."""
    number = jnp.int32(1)
    vectors, block = Vectors(context, number), stacked.layer(transformer.blocks, 1)
    x = Stream(x, implementation="mosaic", bits=transformer.bits)
    projection, x = transformer.project_stream(block, vectors, x)
    projection = replace(projection, layer=number, **transformer.attention_vectors())
    given = (projection, args.length, pool, args.table, args.writes)
    attended, pool, _ = store_and_attend(*given, implementation="mosaic")
    x = transformer.post_attention(block, vectors, None, x, attended)
    return x.normalized(vectors, 2, 4, transformer.config.norm_eps), pool


def compiled(name: str, tokens: int) -> dict:
    """What the compiler makes of it: calls of libraries and of our kernels, and fusions that write
    more numbers than there are scales of rows."""
    mesh = Mesh(np.array(chips.compile_only_devices(name)), ("x",))
    where = NamedSharding(mesh, PartitionSpec())

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16)

    transformer = describe(MODEL).quantized(SCHEME).transformer
    transformer = parameters.shapes(transformer, jnp.bfloat16)
    stacked.separate(transformer.blocks, transformer.once)
    width, spec = transformer.config.embed_dim, SPECS["var-d30-t256"]
    args = replace(spec, rows=ROWS, tokens=tokens, length=tokens, apart=True).abstract()
    rest = (transformer, shape(ROWS, tokens, width), shape(30, ROWS, 6, width), args)
    given = jax.tree.map(lambda a: a.update(sharding=where), (args.kv_pool, *rest))
    options = dict(compiler_options("gpu", weights_dtype=SCHEME))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(layer, donate_argnums=0).lower(*given)
    text = lowered.compile(compiler_options=options).as_text()
    results = re.findall(r" = (.*) fusion\(", text[text.index("\nENTRY") :])  # some have several
    dims = [d for result in results for d in re.findall(r"\w\[([\d,]+)\]", result)]
    sizes = [math.prod(map(int, d.split(","))) for d in dims]
    return {
        "calls": Counter(re.findall(r'custom_call_target="([^"]+)"', text)),
        "large_fusions": sum(size > ROWS * 256 for size in sizes),
    }


if __name__ == "__main__":
    print(json.dumps(compiled(sys.argv[1], int(sys.argv[2]))))
