"""Compile the decoders of the fixtures for a chip that is not here, in a process of its own:

    python tests/engine/compile_pixels.py h200

prints a line of JSON for each family and dtype: the types of operands of convolutions, and the
precisions of convolutions and of products by cuBLAS, as the compiled text has them. "default"
allows TF32 where operands are float32, "highest" does not.
"""

import json
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from pallas_kernels import chips  # noqa: E402

os.environ.update({**chips.quiet_environment(), "JAX_ENABLE_COMPILATION_CACHE": "0"})

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from varjax.codecs import arithmetic  # noqa: E402
from varjax.engine import pixels  # noqa: E402
from varjax.errors import UserError  # noqa: E402

TARGETS = ("h200", "a100", "tpu-v5e")
FIXTURES = ("c_k5_nol2norm", "infinity_a", "llamagen_c2i", "janus_tiny", "lumina_tiny")
FEW = FIXTURES[:1]  # a TPU's compiler takes seconds for each convolution
IMAGES = 2
# a convolution's line: cuDNN's on a GPU; on a TPU the compiler's own, inside fusions
CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv|\bconvolution\(')
PRECISION = re.compile(r"operand_precision=\{(\w+),(\w+)[,}]")  # a bias may have its own
# cuBLAS' products name theirs in a configuration
PRODUCT = re.compile(r'"operand_precision":\["(\w+)","(\w+)"\]')
OPERAND = re.compile(r"%([\w.-]+)")
DEFINITION = re.compile(r"%([\w.-]+) = (\w+)\[")


def convolutions(text: str) -> list[tuple[list[str], set[str]]]:
    """(types of image and filter, precisions of both) of every convolution in a compiled text."""
    types = dict(DEFINITION.findall(text))
    found = []
    for line in text.splitlines():
        if CONVOLUTION.search(line):
            given = re.search(r"(?:custom-call|convolution)\(([^)]*)\)", line)[1]
            operands = [types[name] for name in OPERAND.findall(given)[:2]]
            precision = PRECISION.search(line)
            precisions = set(precision.groups() if precision else ("default",))
            found.append((operands, precisions))
    return found


def decoder(name: str, dtype: str, sharding: NamedSharding, platform: str) -> dict:
    """Compile the decoder of a fixture."""
    from tests.models_under_test import fixture_model

    def shape(a):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    model = fixture_model(name)
    networks = jax.tree.map(shape, {"codec": model.codec})
    code_map = shape(jax.ShapeDtypeStruct((IMAGES, *model.code_map), jnp.float32))
    traced = pixels.trace_pixels(networks, code_map, pixels.Decoding(dtype))
    compiled = traced.lower().compile(compiler_options=pixels.compiler_options(platform))
    text = compiled.as_text()
    found = convolutions(text)
    return {
        "fixture": name,
        "dtype": dtype,
        "convolutions": len(found),
        "operands": sorted({kind for operands, _ in found for kind in operands}),
        "precisions": sorted(set().union(*(precisions for _, precisions in found))),
        "algorithms": sum("__cudnn$" in s and '"algorithm":{' in s for s in text.splitlines()),
        "products": sorted({name.lower() for pair in PRODUCT.findall(text) for name in pair}),
    }


def fixtures(chip: chips.Chip) -> tuple[str, ...]:
    """The fixtures whose decoders are compiled for a chip."""
    return FIXTURES if chip.platform == "gpu" else FEW


def main(target: str) -> None:
    chip = chips.get_chip(target)
    mesh = Mesh(np.array(chips.compile_only_devices(chip.name)), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    for name in fixtures(chip):
        for dtype in arithmetic.DTYPES:
            try:
                arithmetic.resolve(dtype, chip.platform, chip.capability, chip.name)
            except UserError:
                continue  # a TPU has no TF32
            print(json.dumps(decoder(name, dtype, sharding, chip.platform)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
