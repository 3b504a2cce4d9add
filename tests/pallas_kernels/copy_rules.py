"""Rules of NVIDIA's chips for asynchronous copies (`cp.async.bulk.tensor`), checked for every copy
that a kernel makes in JAX's simulator, which asks for none of it.

Found on an H200: a copy that began at no multiple of 16 bytes, because of its coordinate along the
last axis, stopped the program with CUDA_ERROR_ILLEGAL_INSTRUCTION. The other rules are CUDA's, for
tensor maps and for barriers that count bytes.
"""

import math
import threading
from collections import defaultdict
from dataclasses import dataclass

import jax
import jax.numpy as jnp

GLOBAL, SHARED, LONGEST, THREADS = 16, 128, 256, 128  # bytes, bytes, numbers, bytes per copy
AXES, PHASE = 5, 2**20  # of a box; bytes that a barrier counts in a phase stay below


def watch(monkeypatch) -> list[str]:
    """What copies from now on do wrong, filled as they are made."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    found, phases = [], _Phases()
    for name, loads in (("copy_gmem_to_smem", True), ("copy_smem_to_gmem", False)):
        make = getattr(gpu_callbacks, name)

        def checked(*, make=make, loads=loads, **given):
            copy = _copy(gpu_callbacks, loads, given)
            broken = [*copy.broken(), *(phases.broken(gpu_callbacks, copy, given) if loads else ())]
            found.extend(f"{rule}: {copy}" for rule in broken)
            return make(**given)

        monkeypatch.setattr(gpu_callbacks, name, checked)
    return found


@dataclass(frozen=True)
class Copy:
    """A copy between global and shared memory.

    box: what it covers of the global array, one slice or number per axis.
    place: the same of the array in shared memory.
    shape, place_shape: of the arrays.
    dtype: of both.
    tiling: rows and columns of a piece in shared memory, or None.
    swizzle: bytes within which pieces are swizzled, or None.
    """

    box: tuple
    shape: tuple[int, ...]
    place: tuple
    place_shape: tuple[int, ...]
    dtype: jnp.dtype
    tiling: tuple[int, ...] | None = None
    swizzle: int | None = None

    @property
    def bytes(self) -> int:
        return math.prod(_sides(self.box)[1]) * self.dtype.itemsize

    def broken(self):
        """The rules that it breaks."""
        size, (starts, lengths) = self.dtype.itemsize, _sides(self.box)
        if starts[-1] * size % GLOBAL:
            yield f"begins at no multiple of {GLOBAL} bytes"
        if any(stride * size % GLOBAL for stride in _strides(self.shape)[:-1]):
            yield f"rows are no multiples of {GLOBAL} bytes"
        if lengths[-1] * size % GLOBAL or max(lengths) > LONGEST:
            yield f"is no multiple of {GLOBAL} bytes, or longer than {LONGEST}"
        if self.bytes % THREADS:
            yield f"is no multiple of {THREADS} bytes in all"
        if self._axes() > AXES:
            yield f"has more than {AXES} axes"
        inner = self.tiling[-1] if self.tiling else lengths[-1]
        if self.swizzle and (inner * size != self.swizzle or lengths[-1] % inner):
            found = f"{lengths[-1] * size} bytes in rows of {inner * size} bytes"
            yield f"has {found}, swizzled within {self.swizzle}"
        offsets = zip(_sides(self.place)[0], _strides(self.place_shape), strict=True)
        if sum(a * b for a, b in offsets) * size % SHARED:
            yield f"begins at no multiple of {SHARED} bytes in shared memory"

    def _axes(self) -> int:
        """Axes of the box, as JAX makes it: tiled axes are two each, axes of 1 left out, and those
        with a number joined to one where there are too many."""
        numbers = [not isinstance(a, slice) for a in self.box]
        kept = [a for a, n in zip(self.shape, numbers, strict=True) if not n]
        if tiles := self.tiling:
            split = kept[-len(tiles) :]
            whole = [-(-a // b) for a, b in zip(split, tiles, strict=True)]
            kept = [*kept[: -len(tiles)], *whole, *tiles]
        single = sum(n and a > 1 for a, n in zip(self.shape, numbers, strict=True))
        kept = sum(a > 1 for a in kept)
        return kept + (single if kept + single <= AXES else min(single, 1))


class _Phases:
    """Bytes that barriers wait for, by phase."""

    def __init__(self):
        self.bytes, self.lock = defaultdict(int), threading.Lock()
        self.seen = {}  # barriers, kept so that no two have one id

    def broken(self, gpu_callbacks, copy: Copy, given):
        key = given["barrier_allocation_key_as_array"]
        key = gpu_callbacks.HostAllocationKey.from_array(key)
        barrier = gpu_callbacks._get_shared_memory().get_barrier(key)
        with self.lock:
            self.seen[id(barrier)] = barrier
            phase = id(barrier), barrier.phase
            self.bytes[phase] += copy.bytes
            if self.bytes[phase] >= PHASE:
                yield f"makes a barrier wait for {PHASE} bytes or more"


def _copy(gpu_callbacks, loads: bool, given) -> Copy:
    memory = gpu_callbacks._get_shared_memory()

    def side(name):
        key = gpu_callbacks.HostAllocationKey.from_array(given[f"{name}_allocation_key_as_array"])
        transforms = gpu_callbacks._remove_noop_transforms(given[f"{name}_transforms"])
        access = memory.access(key, jax.tree.map(int, transforms))
        return tuple(access.range), memory.buffer_shape_and_dtype(key)

    outside, inside = ("src", "dst") if loads else ("dst", "src")
    (box, (shape, dtype)), (place, (place_shape, _)) = side(outside), side(inside)
    layout = {}
    for transform in given[f"{inside}_transforms"]:
        for name in ("tiling", "swizzle"):
            if hasattr(transform, name):
                layout[name] = getattr(transform, name)
    return Copy(box, tuple(shape), place, tuple(place_shape), jnp.dtype(dtype), **layout)


def _sides(access) -> tuple[list[int], list[int]]:
    """(where it begins, how long it is), along every axis."""
    slices = [a if isinstance(a, slice) else slice(a, a + 1) for a in access]
    return [s.start for s in slices], [s.stop - s.start for s in slices]


def _strides(shape) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
