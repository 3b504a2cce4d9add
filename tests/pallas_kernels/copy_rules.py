"""Rules of NVIDIA's chips for asynchronous copies (`cp.async.bulk.tensor`), checked for every copy
that a kernel makes in JAX's simulator, which asks for none of it.

Found on an H200: a copy that began at no multiple of 16 bytes, because of its coordinate along the
last axis, stopped the program with CUDA_ERROR_ILLEGAL_INSTRUCTION.
"""

import math

import jax.numpy as jnp

GLOBAL, SHARED, LONGEST, THREADS = 16, 128, 256, 128  # bytes, bytes, numbers, bytes per copy


def watch(monkeypatch) -> list[str]:
    """What copies from now on do wrong, filled as they are made."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    init, found = gpu_callbacks.AsyncCopyTask.__init__, []

    def checked(self, **given):
        init(self, **given)
        memory = gpu_callbacks._get_shared_memory()
        loads = isinstance(self, gpu_callbacks.AsyncCopyGmemToSmemTask)
        sides = "src", "dst"
        for side, rules in zip(sides[:: 1 if loads else -1], RULES, strict=True):
            shape, dtype = memory.buffer_shape_and_dtype(given[f"{side}_allocation_key"])
            access = given[f"{side}_access"].range
            found.extend(
                f"{rule}: {access} of {dtype} {shape}"
                for rule in rules(access, shape, jnp.dtype(dtype).itemsize)
            )

    monkeypatch.setattr(gpu_callbacks.AsyncCopyTask, "__init__", checked)
    return found


def _in_global(access, shape, size: int):
    """Rules that a part of an array in global memory breaks. access: one slice or int per axis."""
    starts, lengths = _box(access)
    if starts[-1] * size % GLOBAL:
        yield f"begins at no multiple of {GLOBAL} bytes"
    if any(stride * size % GLOBAL for stride in _strides(shape)[:-1]):
        yield f"rows are no multiples of {GLOBAL} bytes"
    if lengths[-1] * size % GLOBAL or max(lengths) > LONGEST:
        yield f"is no multiple of {GLOBAL} bytes, or longer than {LONGEST}"
    if math.prod(lengths) * size % THREADS:
        yield f"is no multiple of {THREADS} bytes in all"


def _in_shared(access, shape, size: int):
    starts, _ = _box(access)
    offset = sum(a * b for a, b in zip(starts, _strides(shape), strict=True))
    if offset * size % SHARED:
        yield f"begins at no multiple of {SHARED} bytes in shared memory"


RULES = _in_global, _in_shared


def _box(access) -> tuple[list[int], list[int]]:
    slices = [a if isinstance(a, slice) else slice(a, a + 1) for a in access]
    return [s.start for s in slices], [s.stop - s.start for s in slices]


def _strides(shape) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
