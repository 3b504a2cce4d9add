"""Tile sizes of the attention kernels: a heuristic, and values that the benchmark has tuned.

Tuned values lie in `tuned/<device kind>/<operation>.json` beside this file. Only `python -m
experiments.bench --tune` writes them, on the device that they are for. They are read when a program
is traced for such a device. A file that cannot be used is named in a warning and left out.
"""

import json
import os
import re
import warnings
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import jax
from jax.experimental import pallas as pl

from pallas_kernels.target import device_kind

TUNED = Path(__file__).parent / "tuned"
FORMAT = 1
OPERATIONS = ("attend", "attention_moments")


@dataclass(frozen=True, kw_only=True)
class TritonConfig:
    """Tiles of the Triton kernels. All but `num_stages` are powers of two.

    block_q: queries of a tile.
    block_k: keys of a step, which joins as many cache blocks as that takes.
    num_warps: groups of 32 threads per tile.
    num_stages: steps whose keys are under way or in use.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True)
class TPUConfig:
    """Tiles of the TPU kernels.

    block_q: queries of a tile.
    copy_keys: stored keys that are copied together; blocks are joined to about this many.
    own_keys: own keys of a step.
    """

    block_q: int
    copy_keys: int
    own_keys: int


@dataclass(frozen=True, kw_only=True)
class MosaicConfig:
    """Tiles of the kernels for Hopper and Blackwell.

    warpgroups: one to three that compute, with 64 queries each; three for heads of 64 alone.
    block_k: keys of a step, 64 or 128 and no fewer than a block has.
    buffers: steps whose keys are under way or in use.
    """

    warpgroups: int
    block_k: int
    buffers: int


Config = TritonConfig | TPUConfig | MosaicConfig
KINDS = {"triton": TritonConfig, "tpu": TPUConfig, "mosaic": MosaicConfig}


@dataclass(frozen=True, kw_only=True)
class Call:
    """The properties of a call that its tiles depend on.

    operation: one of `OPERATIONS`.
    queries: T, padded.
    slots: P = M * block_size, the slots of a head's table.
    dtype, kv_dtype: names of the types of own keys and of the pool.
    """

    operation: str
    queries: int
    slots: int
    head_dim: int
    block_size: int
    dtype: str
    kv_dtype: str

    @classmethod
    def of(cls, operation: str, projection, kv_pool, table) -> "Call":
        """The call with these arguments of the operation."""
        _, _, tokens, head_dim = projection.shape
        return cls(
            operation=operation,
            queries=tokens,
            slots=table.ids.shape[-1] * kv_pool.shape[2],
            head_dim=head_dim,
            block_size=kv_pool.shape[2],
            dtype=projection.dtype.name,
            kv_dtype=kv_pool.dtype.name,
        )

    def bucket(self) -> "Call":
        """The call that stands for all of about this size: queries and slots rounded up to powers
        of two."""
        queries, slots = pl.next_power_of_2(self.queries), pl.next_power_of_2(self.slots)
        return replace(self, queries=queries, slots=slots)


def choose(call: Call, implementation: str) -> Config:
    """The tiles of a call: tuned on the device that is traced for, or else the heuristic's.

    implementation: one of `KINDS`.
    """
    found = tuned(device_kind(), call.operation, implementation).get(call.bucket())
    return found or heuristic(call, implementation)


def heuristic(call: Call, implementation: str) -> Config:
    """Tiles that compile and should do well on any device."""
    if implementation == "triton":
        return _triton_heuristic(call)
    if implementation == "tpu":
        # A tile of 512 queries does 512 operations per byte of bfloat16 keys, about what the chips
        # need to be kept busy. Short tables are read 128 keys at a time, so that little of the last
        # group is padding.
        return TPUConfig(block_q=512, copy_keys=128 if call.slots <= 1024 else 256, own_keys=256)
    # Two warpgroups share what is fetched, where there are queries for both, and three those of
    # which they are all: two tiles of two would be a quarter empty. Registers leave room for one
    # such program on a multiprocessor. Its shared memory holds four steps, or two of an
    # int8 pool, which lie there a second time in bfloat16. Of programs of one warpgroup three have
    # room on a multiprocessor, with three steps each (heads of 128: two, with two steps).
    # Steps of 128 keys are faster where registers hold their scores and tables are long enough: 566
    # us in place of 590 for 256 queries of VAR-d30, 217 in place of 199 for 100 (H100, 128 rows).
    scaled = call.kv_dtype == "int8"
    if call.queries > 128 and call.head_dim == 64 and not scaled:
        wide = call.queries > 192
        return MosaicConfig(
            warpgroups=2 if wide else 3, block_k=128 if wide else 64, buffers=2 if wide else 4
        )
    if call.queries > 64:
        return MosaicConfig(warpgroups=2, block_k=64, buffers=2 if scaled else 4)
    return MosaicConfig(warpgroups=1, block_k=64, buffers=2 if scaled or call.head_dim > 64 else 3)


def _triton_heuristic(call: Call) -> TritonConfig:
    """Tiles whose numbers fit the registers of an A100 and an H200. Compiled ahead of time they
    spill no registers (tests/pallas_kernels/test_triton_compile.py)."""
    # A tensor core multiplies at least 16 rows. Compiled for an H200 with 4 warps and heads of 64,
    # tiles of 128 queries took 243 of 255 registers, tiles of 64 took 133.
    wide, queries = call.head_dim > 64, max(16, pl.next_power_of_2(call.queries))
    if call.dtype == "float32":  # products without tensor cores, where full precision is asked for
        # such products keep their factors in registers: smaller tiles, twice the threads
        small = call.kv_dtype != "float32" or (wide and call.operation == "attend")
        block_q = min(16 if small else 32, queries)
        return TritonConfig(block_q=block_q, block_k=16 if wide else 32, num_warps=8, num_stages=2)
    converted = call.kv_dtype not in ("bfloat16", "float16")  # on the way through registers
    # `attend` holds a step of K and of V converted. The moments hold K alone, and keys are the rows
    # of their product, of which Hopper's wgmma takes 64.
    block_k = 32 if converted and call.operation == "attend" else 64
    return TritonConfig(block_q=min(64, queries), block_k=block_k, num_warps=4, num_stages=3)


def tpu_vmem_limit(call: Call, tiles: TPUConfig, *, heads: int, rotated: bool) -> int | None:
    """Bytes of vector memory that a call may use, or None where the compilers' default of 16 MiB
    will do. It does up to 4096 tokens with the heuristic's tiles; a v4 has no more.

    An estimate of arrays of the heads at work and of the next heads, four groups of stored blocks
    on their way, scores of a step and what follows from them.

    heads: heads of a grid step. rotated: whether queries and keys are rotated.
    """
    size = {"float32": 4, "bfloat16": 2, "int8": 1}
    each, stored = size[call.dtype], size[call.kv_dtype]
    together = 1 if call.head_dim > 64 else 2  # heads that share 128 lanes, one after the other
    groups = -(-heads // together)
    # lanes of a row of q, k, v and out (heads that share lanes), and of K beside V
    one, both = (-(-width // 128) * 128 for width in (call.head_dim, 2 * call.head_dim))
    block_q = min(tiles.block_q, -(-call.queries // 128) * 128)
    queries = -(-call.queries // block_q) * block_q
    # Pallas keeps what it fetches or writes back twice, for this grid step and for the next.
    if call.operation == "attend":  # own K and V; tiles of q and of the output
        arrays, finished = 4 * (queries + block_q) * one * each * groups, block_q
    else:  # queries and own keys; two results of 4 bytes per key
        arrays, finished = 4 * queries * one * each * groups, queries
        arrays += 16 * (call.slots + queries) * groups * together
    arrays += together * finished * one * each  # queries as they are multiplied
    arrays += 4 * queries * one if rotated else 0  # cosines and sines, once
    step = 3 * max(tiles.own_keys, tiles.copy_keys) * block_q * 4
    copies = tiles.copy_keys * both * (4 * stored + 4)  # four buffers, one group in float32
    # the running output; and maximum and sum, which are single rows and take 8 sublanes each
    needed = arrays + block_q * (one + 16 * together) * 4 + step + copies
    # 2 MiB of the 16 stay free, and a limit that has to be named is a quarter larger
    return None if needed <= 14 * 2**20 else needed * 5 // 4


# --- tuned values ---


def tuned_path(kind: str, operation: str) -> Path:
    """The file with the tuned values of an operation on a kind of device, in a folder of its name:
    "nvidia-h200" for "NVIDIA H200"."""
    return TUNED / re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") / f"{operation}.json"


@cache
def tuned(kind: str, operation: str, implementation: str) -> dict[Call, Config]:
    """Tuned tiles by bucket, as `write_tuned` wrote them; empty (with a warning) if the file is
    damaged, or of another implementation or format."""
    path = tuned_path(kind, operation)
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise ValueError(f"format is {found['format']}, needed is {FORMAT}")
        if found["implementation"] != implementation:
            raise ValueError(f"tiles of {found['implementation']}, needed are {implementation}")
        tiles = KINDS[implementation]
        return {Call(**entry["call"]): tiles(**entry["config"]) for entry in found["entries"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        foreign = isinstance(error, (KeyError, TypeError))
        reason = f"not a file of tuned tiles: {error}" if foreign else error
        warnings.warn(
            f"tuned tiles are left out: {path}: {reason}; write the file anew with `python -m "
            f"experiments.bench --tune` on this device, or delete it",
            stacklevel=2,
        )
        return {}


def write_tuned(
    kind: str, operation: str, implementation: str, entries: dict[Call, Config]
) -> Path:
    """Write tuned tiles where `choose` finds them; returns that file. For the benchmark only."""
    path = tuned_path(kind, operation)
    contents = {
        "format": FORMAT,
        "device": path.parent.name,
        "operation": operation,
        "implementation": implementation,
        "jax": jax.__version__,
        "entries": [
            {"call": asdict(call.bucket()), "config": asdict(config)}
            for call, config in sorted(entries.items(), key=lambda item: str(item[0]))
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_suffix(f".{os.getpid()}")  # whoever reads sees the old file or the new one
    work.unlink(missing_ok=True)
    with open(work, "x") as file:  # follows no link
        file.write(json.dumps(contents, indent=1) + "\n")
    os.replace(work, path)
    tuned.cache_clear()  # programs traced from now on in this process find them
    return path
