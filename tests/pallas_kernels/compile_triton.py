"""Compile the GPU kernels for a GPU that is not here and tell what became of them.

    python tests/pallas_kernels/compile_triton.py TARGET CASES

TARGET: a GPU of pallas_kernels/chips.py. CASES: "few" or "all". Prints one JSON object per kernel:
registers and spilled bytes per thread (null without ptxas), shared memory in bytes, and whether
asynchronous copies and tensor cores are used. A program of its own, because some errors end the
process, and because XLA is told only when it starts where to leave its intermediate files.
"""

import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from pallas_kernels import chips

OPERATIONS = ("attend", "attention_moments", "write")
NAMES = dict(zip(OPERATIONS, ("ragged_attention", "attention_moments", "cache_write"), strict=True))
TENSOR_CORES = ("tcgen05.mma", "wgmma", "mma.sync")  # instructions, the newest first
# (images, tokens, vocabulary) of the rows that tokens are chosen from
FEW_ROWS = [(8, 256, 4096), (1, 256, 65536)]
ALL_ROWS = [*FEW_ROWS, (256, 1, 16384), (8, 9, 1000), (2, 36, 512), (1, 4, 50000), (8, 256, 8192)]
FEW_TYPES = [("bfloat16", None), ("bfloat16", "int8")]
ALL_TYPES = [*FEW_TYPES, ("float32", None), ("float32", "int8")]


def specs(which: str):
    """(shape, full precision) of the calls that are compiled."""
    from pallas_kernels.arg_specs import ArgSpec

    # VAR, Infinity, and a token of LlamaGen
    base = ArgSpec(name="", heads=16, head_dim=64, tokens=256, length=256, entries=27)
    base = replace(base, normalised=True)
    wide = replace(base, head_dim=128, rotated=True)
    token = replace(base, normalised=False, rotated=True, tokens=1, length=1)
    if which == "few":
        found = [replace(b, dtype=d, kv_dtype=p) for b in (base, wide, token) for d, p in FEW_TYPES]
        return [(spec, False) for spec in found]
    found = [base, wide, token, replace(token, head_dim=128)]
    found += [replace(base, head_dim=size) for size in (16, 32)]
    found += [replace(b, block_size=size) for b in (base, wide) for size in (8, 32, 64, 128)]
    found += [replace(b, tokens=t, length=t) for b in (base, wide) for t in (1, 20, 64, 4096)]
    found += [replace(b, per_row=True, block_size=size) for b in (base, wide) for size in (16, 64)]
    found = [replace(b, dtype=d, kv_dtype=p) for b in found for d, p in ALL_TYPES]
    exact = [spec for spec in found if spec.dtype == "float32"]
    return [(spec, False) for spec in found] + [(spec, True) for spec in exact]


def program(operation: str, spec, sharding):
    """(function, arguments without data)."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import cache_write, ragged_attention

    args = spec.abstract(sharding)
    if operation == "attend":
        given = (*args.attend, args.kv_scale)
        return lambda *a: ragged_attention.attend(
            *a[:-1], kv_scale=a[-1], return_lse=True, implementation="triton"
        ), given
    if operation == "write":
        given = (*args.write, args.kv_scale)
        return lambda *a: cache_write.write(*a[:-1], kv_scale=a[-1], implementation="triton"), given
    weights = jax.ShapeDtypeStruct((spec.tokens,), jnp.float32, sharding=sharding)
    lse = jax.ShapeDtypeStruct(args.projection.shape[:3], jnp.float32, sharding=sharding)
    return lambda *a: ragged_attention.attention_moments(
        *a[:-1], kv_scale=a[-1], implementation="triton"
    ), (*args.moments(weights, lse, squares=True), args.kv_scale)


def choice(shape, sharding):
    """The call that chooses tokens from rows, and its arguments."""
    import jax

    from pallas_kernels.sample import sample
    from tests.pallas_kernels.test_sample import abstract

    given = abstract(shape, sharding)
    run = partial(sample, top_k=900, top_p=0.96, implementation="triton")
    return jax.jit(run, out_shardings=sharding), given


def ptxas() -> str | None:
    """The assembler of a CUDA toolkit or of NVIDIA's Python package."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    packages = [file for path in sys.path for file in glob.glob(f"{path}/nvidia/*/bin/ptxas")]
    places = [shutil.which("ptxas"), f"{home}/bin/ptxas", *packages]
    return next((place for place in places if place and Path(place).exists()), None)


def inspect(folder: Path, kernel: str) -> dict:
    """What XLA left in `folder` about a kernel: nothing from jax 0.11 on, which compiles it before
    XLA sees the program. Empties the folder."""
    import jax

    files = list(folder.iterdir())
    every = [f for f in files if f.suffix == ".ptx" and f".entry {kernel}(" in f.read_text()]
    if not every and jax.__version_info__ >= (0, 11):
        for file in files:
            file.unlink()
        return {}
    [ptx] = every
    text = ptx.read_text()
    thunks = "".join(f.read_text() for f in files if f.name.endswith("thunk_sequence.txt"))
    shared = re.search(rf"\b{kernel}\b.*shared_memory: (\d+)", thunks)
    registers, spills = assemble(ptx, text)
    for file in files:
        file.unlink()
    return {
        "registers": registers,
        "spills": spills,
        "shared_memory": int(shared.group(1)) if shared else None,
        "asynchronous": "cp.async" in text,
        "tensor_cores": next((name for name in TENSOR_CORES if name in text), None),
    }


def assemble(ptx: Path, text: str) -> tuple[int | None, int | None]:
    """(registers, bytes of spill stores and loads) per thread."""
    if not (program := ptxas()):
        return None, None
    architecture = re.search(r"\.target (\w+)", text).group(1)
    command = [program, "-v", f"-arch={architecture}", str(ptx), "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return int(re.search(r"Used (\d+) registers", said).group(1)), sum(map(int, spills.groups()))


def main(target: str, which: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kernels-"))
    # as users compile, not as the tests do, whose kernels would be others
    usual = {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_DISABLE_MOST_OPTIMIZATIONS": "false"}
    os.environ |= chips.quiet_environment() | usual
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"
    import jax
    import numpy as np

    mesh = jax.sharding.Mesh(np.array(chips.compile_only_devices(target)), ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    # JAX from 0.11 on asks it what chip that is
    here = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    try:
        for spec, exact in specs(which):
            jax.config.update("jax_default_matmul_precision", "highest" if exact else None)
            for operation in OPERATIONS:
                function, args = program(operation, spec, sharding)
                with here:
                    jax.jit(function, out_shardings=sharding).lower(*args).compile()
                about = {"target": target, "operation": operation, "exact": exact}
                about |= {n: getattr(spec, n) for n in ("dtype", "head_dim", "block_size")}
                about |= {"kv_dtype": spec.pool_dtype.name, "tokens": spec.tokens}
                about |= {n: getattr(spec, n) for n in ("per_row", "normalised", "rotated")}
                about |= inspect(folder, NAMES[operation])
                print(json.dumps(about), flush=True)
        for shape in FEW_ROWS if which == "few" else ALL_ROWS:
            run, given = choice(shape, sharding)
            with here:
                run.lower(**given).compile()
            about = {"target": target, "operation": "sample", "rows": shape}
            print(json.dumps(about | inspect(folder, "sample")), flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
