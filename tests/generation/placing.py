"""What the way of weights to their devices takes: bytes of every device and of the host.

python -m tests.generation.placing make FOLDER LAYERS [WIDTH]    layers of Infinity-8B, random
weights JAX_NUM_CPU_DEVICES=4 python -m tests.generation.placing measure FOLDER scan|unroll
[WEIGHTS_DTYPE]

A CPU device's memory is the host's, so the process may grow by what its devices hold and by one
array. Prints a line of JSON; Linux only.
"""

import collections
import dataclasses
import gc
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import varjax
from varjax.fast import arrange, quantized
from varjax.generation import weights
from varjax.generation.mesh import MeshSpec, make_mesh, shardings
from varjax.models import registry
from varjax.storage import checkpoint, parameters

MODEL = 4  # devices


def make(folder: Path, layers: int, width: int) -> None:
    """A checkpoint in bfloat16 of Infinity-8B with fewer layers, or narrower ones."""
    preset, family = registry.PRESETS["infinity-8b"], registry.FAMILIES["infinity"]
    drawn = np.random.default_rng(0)

    def random(leaf) -> np.ndarray:  # bfloat16 of magnitude 1/128 to 2, which do not pack well
        bits = drawn.integers(0, 2**16, leaf.shape, np.uint16)
        return ((bits & 0x83FF) | 0x3C00).view(jnp.bfloat16)

    parts = {}
    for name in ("transformer", "codec"):
        config = preset.configs[name]
        if name == "transformer":
            sizes = {"depth": layers, "embed_dim": width, "block_chunks": 1}
            config = dataclasses.replace(config, **sizes)
        part = family.parts[name].abstract(config)
        named = parameters.named(part)
        parts[name] = parameters.fill(part, {n: random(leaf) for n, leaf in named.items()})
        parts[name].config = config
    checkpoint.save(folder, family, parts)


def _kilobytes(entry: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(entry))


def _on_devices() -> dict[int, int]:
    # arrays may share memory: one of a mesh is made of those of its devices
    found = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            place = shard.device.id, shard.data.unsafe_buffer_pointer()
            found[place] = shard.data.nbytes
    held = collections.Counter()
    for (device, _), size in found.items():
        held[device] += size
    return held


def measure(folder: Path, layers: str, weights_dtype: str | None) -> dict:
    """Place the weights of the transformer on a mesh of `model=4`; return bytes."""
    model = varjax.load(folder, "bfloat16", on_disk=True, weights_dtype=weights_dtype)
    networks = {"transformer": model.transformer}
    if layers == "unroll":
        transformer = networks["transformer"]
        arrange.separate(transformer.blocks, transformer.once)
    # matrices that become 8-bit ones are read as they are stored
    leaves = [v.get_value().shape for v in quantized.matrices(model.transformer).values()]
    leaves += [leaf.origin.shape for leaf in jax.tree.leaves(networks)]
    largest = 2 * max(map(math.prod, leaves))
    mesh = make_mesh(vars(MeshSpec(model=MODEL)), jax.devices())
    where, most = shardings(weights.names(networks), mesh), collections.Counter()
    put = jax.device_put

    def watched(*arguments):
        found = put(*arguments)
        for device, size in _on_devices().items():
            most[device] = max(most[device], size)
        return found

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before, jax.device_put = _kilobytes("VmRSS"), watched
    placed = weights.place(networks, where)
    jax.device_put = put
    del networks, model
    return {
        "part": dict(_on_devices()),
        "most": dict(most),
        "predicted": weights.bytes_per_device(placed, MODEL),
        "largest": largest,
        "grown": (_kilobytes("VmHWM") - before) * 1024,
        "stays": (_kilobytes("VmRSS") - before) * 1024,
    }


def main(verb: str, folder: str, how: str, more: str | None = None) -> None:
    if verb == "make":
        make(Path(folder), int(how), int(more or 3584))
        return
    print(json.dumps(measure(Path(folder), how, more)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
