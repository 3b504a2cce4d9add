"""Timings of all operations, and of JAX's attention that they compete with, on the device that is
there; and checks of their results there."""

from dataclasses import replace

import jax

from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.bench.scales import SCALES, candidate, dense
from pallas_kernels.bench.timing import Candidate, Operation, measure, short
from pallas_kernels.bench.tokens import TOKENS

OPERATIONS: dict[str, Operation] = SCALES | TOKENS
REFERENCE, DENSE = "reference", "dense"


def ways(operation: str, spec: ArgSpec, kernel: str) -> list[str]:
    """Names of the ways to do an operation on this device. `kernel` is first if the operation has
    it."""
    found = [kernel, REFERENCE] if OPERATIONS[operation].has(kernel) else [REFERENCE]
    if operation == "attend":
        # what `jax.nn.dot_product_attention` offers here for this type
        on_gpu = jax.default_backend() == "gpu"
        cudnn = on_gpu and spec.dtype in ("bfloat16", "float16")
        found += [f"{DENSE} xla", f"{DENSE} cudnn"] if cudnn else [f"{DENSE} xla"]
    return list(dict.fromkeys(found))


def prepare(operation: str, spec: ArgSpec, share: float, way: str) -> Candidate:
    """One of `ways`, ready to be timed. Every head owns `share` of the cache, in whole blocks and
    at least one; in `DENSE` ways all of it."""
    if way.startswith(DENSE):
        return dense(spec, way.removeprefix(DENSE).strip())
    own = replace(spec, filling="full", entries=max(1, round(spec.entries * share)))
    return OPERATIONS[operation].candidate(own, way)


@jax.default_matmul_precision("highest")
def errors(operation: str, spec: ArgSpec, name: str) -> dict[str, float]:
    """Differences between implementation `name` and the reference in float32, by result: relative
    Frobenius errors. Results that have to be equal count the share that is not, or 1."""
    return dict(OPERATIONS[operation].errors(spec, name))
