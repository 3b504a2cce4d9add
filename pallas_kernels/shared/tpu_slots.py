"""Grid steps of TPU kernels that go through the slots of all heads, which lie in memory as [R, N,
C, W]."""

from pallas_kernels.implementations import require
from pallas_kernels.shared.tpu_operands import LANES, rounded

HEAD_DIMS = (64, 100, 128)
DTYPES = ("float32", "bfloat16", "int8")
STEP_BYTES = 2**20  # about what a step takes, so that starting it costs little beside its copies
TILE_BYTES = 32  # a tile's extent along slots: 8 in float32, 16 in bfloat16, 32 in int8


def tile(dtype) -> int:
    """Slots of a tile in vector memory."""
    return TILE_BYTES // dtype.itemsize


def plane_bytes(lines: int, width: int, dtype) -> int:
    """Bytes of a matrix in vector memory, padding included."""
    return rounded(lines, tile(dtype)) * rounded(width, LANES) * dtype.itemsize


def steps(pool, operation: str, most: int, more: int = 0) -> tuple[int, int]:
    """(rows, heads) of a grid step: several rows with all of their heads, or heads of one row.
    `NotImplementedError` says what the kernels cannot take, with the verb of `operation`. most:
    bytes that a step may take. more: bytes per head beside its slots."""
    rows, heads, slots, width = pool.shape
    head = plane_bytes(slots, width, pool.dtype) + more
    for right, takes in (
        (width // 2 in HEAD_DIMS, f"heads of {', '.join(map(str, HEAD_DIMS))}"),
        (pool.dtype.name in DTYPES, f"a pool of {', '.join(DTYPES)}"),
        (head <= most, f"heads of up to {most} bytes in a grid step"),
    ):
        found = f"{slots} slots of heads of {width // 2} in {pool.dtype.name}"
        require(right, f"TPU {operation} {takes}, not {found}")
    about = min(STEP_BYTES, most)
    if heads * head > about:
        # a number of heads that divides them all: no grid step is partly empty
        fits = (n for n in range(1, heads + 1) if heads % n == 0 and n * head <= most)
        return 1, max(fits)
    fits = (n for n in range(1, rows + 1) if rows % n == 0 and n * heads * head <= about)
    return max(fits, default=1), heads
