"""What devices exchange while they draw, read from the compiled programs.

JAX_NUM_CPU_DEVICES=8 python -m tests.parallel.collectives        by mesh: {operation: how many}
JAX_NUM_CPU_DEVICES=8 python -m tests.parallel.collectives --automatic    the same program, but
    divided by the compiler from the places of its arguments, in place of `jax.shard_map`
"""

import collections
import json
import re
import sys

import jax

from tests import models_under_test as models
from varjax import Generator
from varjax.engine import program
from varjax.parallel.split import MeshSpec

CASES = [  # model, policy, budget, mesh
    ("c_k5_nol2norm", "h2o", 0.5, "data=2"),
    ("c_k5_nol2norm", "streaming", 0.6, "data=2,model=2"),
    ("llamagen_c2i", "h2o", 0.5, "data=2"),
    ("llamagen_c2i", "h2o", 0.5, "data=2,model=2"),
]
OPERATION = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
    r"(?:-start)?\("
)


def count(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Operations in the text of a program: those of a loop's body once."""
    return dict(collections.Counter(OPERATION.findall(compiled.as_text())))


def automatic(generator: Generator) -> jax.stages.Compiled:
    """The program of codes, divided by the compiler. Only `data`: pools and tables of groups of
    heads have numbers of their own."""
    state, arguments = generator.traced_arguments(None, None)
    traced = program.trace_codes(generator.networks, state, arguments, generator.spec)
    how = {"few_rows": generator.spec.few_rows, "weights_dtype": "float32"}
    return program.compile_codes(traced, **how)[0]


def main(by_compiler: bool) -> None:
    found = {}
    for name, policy, budget, mesh in CASES:
        if by_compiler and "model" in mesh:
            continue
        model, spec = models.fixture_model(name), MeshSpec.parse(mesh)
        generator = Generator(model, policy, budget, batch_size=4, segments="auto", mesh=spec)
        if by_compiler:
            found[f"{name} {mesh}"] = {"codes": count(automatic(generator))}
            continue
        generator.compile()
        programs = {"codes": generator.compiled, "pixels": generator.compiled_decoder}
        counts = {key: count(value) for key, value in programs.items()}
        found[f"{name} {mesh}"] = {**counts, "segments": len(generator.segments)}
    print(json.dumps(found))


if __name__ == "__main__":
    main("--automatic" in sys.argv)
