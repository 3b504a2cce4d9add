"""The operations that can be measured, by name, and the ways to do them on this device."""

from dataclasses import replace

import jax

from pallas_kernels.arg_specs import ArgSpec
from pallas_kernels.bench.scales import DENSE, SCALES, dense
from pallas_kernels.bench.timing import Candidate, Operation
from pallas_kernels.bench.tokens import TOKENS

OPERATIONS: dict[str, Operation] = SCALES | TOKENS
REFERENCE = "reference"


def compressed(spec: ArgSpec, share: float) -> ArgSpec:
    """The call when every head owns that share of the cache, in whole blocks and at least one."""
    return replace(spec, filling="full", entries=max(1, round(spec.entries * share)))


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
    """One of `ways`, ready to be timed. Heads own `share` of the cache, in `DENSE` ways all of
    it."""
    if way.startswith(DENSE):
        return dense(spec, way.removeprefix(DENSE).strip())
    return OPERATIONS[operation].candidate(compressed(spec, share), way)


def holds_scores(operation: str, way: str) -> bool:
    """Whether a way has a matrix of queries by keys in memory."""
    return way == f"{DENSE} xla" or way == REFERENCE and OPERATIONS[operation].holds_scores


@jax.default_matmul_precision("highest")
def errors(operation: str, spec: ArgSpec, name: str) -> dict[str, float]:
    """Differences between implementation `name` and the reference in float32, by result: relative
    Frobenius errors. Results that have to be equal count the share that is not, or 1."""
    return dict(OPERATIONS[operation].errors(spec, name))
