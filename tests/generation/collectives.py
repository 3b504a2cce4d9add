"""What devices exchange while they draw, read from the compiled programs.

JAX_NUM_CPU_DEVICES=8 python -m tests.generation.collectives        by mesh: {operation: how many}
"""

import collections
import json
import re

import jax

from tests import models_under_test as models
from varjax import Generator
from varjax.generation.mesh import MeshSpec

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


def main() -> None:
    found = {}
    for name, policy, budget, mesh in CASES:
        model, spec = models.fixture_model(name), MeshSpec.parse(mesh)
        generator = Generator(model, policy, budget, batch_size=4, mesh=spec)
        generator.compile()
        programs = {"codes": generator.program.codes, "pixels": generator.program.pixels}
        counts = {key: count(value) for key, value in programs.items()}
        found[f"{name} {mesh}"] = {**counts, "segments": len(generator.spec.segments)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
