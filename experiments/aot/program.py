"""Compile the two programs of a run for a chip that is not here, and measure them.

`Generator` runs the same programs (`varjax.generation.program`). Here their arguments are shapes
and types, so no weights are needed and nothing is allocated.
"""

import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from experiments.aot import buffers, kernels
from experiments.aot.buffers import Carried
from experiments.aot.hlo import Module
from experiments.generation import ProgramOptions
from pallas_kernels import chips, implementations
from pallas_kernels.chips import Chip
from varjax.core import sampling, stacked
from varjax.core.drawing import Inputs
from varjax.core.plan import CachePlan
from varjax.core.sampling import Sampling
from varjax.core.sequence import TOKENS
from varjax.core.state import KVState
from varjax.core.token_state import LayerCache
from varjax.generation import build as builds
from varjax.generation import memory, pixels
from varjax.generation import program as programs
from varjax.generation.compiled import Weights, flat
from varjax.generation.cost import Cost, device_bytes, program_cost, times_read
from varjax.generation.mesh import make_mesh
from varjax.generation.sharding import ShardedProgram
from varjax.models.model import Model
from varjax.storage import parameters
from varjax.storage.parameters import peak_bytes

Networks = dict[str, nnx.Module]  # the model's modules by name, shapes in place of arrays
Tree = TypeVar("Tree")  # anything that JAX takes for a tree of arrays
CONDITION = 2  # the condition's place among the program's arguments; images are divided like it
PER_SLOT = ("pool", "scale", "position", "mass")  # arrays of a layer's slots (`LayerCache`)
LISTED = 8  # temporaries of a program
SHARE_THAT_MATTERS = 0.01  # of the pool's bytes: smaller arrays of the state may be copied


# --- one program ---


class DoesNotFit(Exception):
    """The compiler refused a program that needs more bytes (`needed`) than the chip has."""

    def __init__(self, message: str, needed: int):
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True)
class CompiledProgram:
    """One compiled program; bytes are those of one device.

    memory: `jax.stages.Compiled.memory_analysis()`.
    formats: layouts of the positional arguments, and of the named ones.
    times_read: how often each weight is read; 0: it is no argument of this program.
    resident: bytes on the device while it runs: arguments, results, temporaries, code, and weights
      that it does not read.
    copies: {array of the state that is not updated in place: where it exists a second time}.
    compile_s: seconds, tracing included.
    said: what else a report says, as content of a JSON file.
    """

    memory: Any
    formats: tuple[tuple, dict]
    times_read: list[int]
    resident: int
    cost: Cost
    copies: dict[str, list[str]]
    compile_s: float
    said: dict


def compile_program(
    trace: Callable[[], jax.stages.Traced],
    networks: Networks,
    options: Mapping[str, bool | int | str],
    carried: Sequence[Carried],
    mesh: Mesh,
) -> CompiledProgram:
    """Compile and measure a program.

    Args:
      trace: makes the traced program, whose first argument is the weights or the first of them.
      networks: the shapes of all weights.
      options: of the compiler.
      carried: arrays that should be updated in place.
      mesh: the devices.

    Raises:
      DoesNotFit: the compiler refused the program for its size.
    """
    start, context = time.perf_counter(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    # kernels ask the mesh in use for the kind of device that they are traced for
    with context, tempfile.TemporaryDirectory() as folder:
        traced = trace()
        lowered = traced.lower()
        dump = {"xla_dump_hlo_as_text": True, "xla_dump_to": folder}
        try:
            compiled = lowered.compile(compiler_options=dump | dict(options))
        except jax.errors.JaxRuntimeError as error:
            if needed := memory_asked(str(error)):
                raise DoesNotFit(first_line(str(error)), needed) from None
            raise
        elapsed = time.perf_counter() - start
        module = Module.parse(compiled.as_text())
        temporaries = buffers.read_dump(Path(folder), module)
    stats, weights = compiled.memory_analysis(), jax.tree.leaves(networks)
    taken, cost = len(jax.tree.leaves(traced.args_info[0][0])), program_cost(traced.jaxpr)
    reads = times_read(traced.jaxpr)[:taken] + [0] * (len(weights) - taken)
    unread = sum(device_bytes(a) for a, used in zip(weights, reads, strict=True) if not used)
    return CompiledProgram(
        memory=stats,
        formats=compiled.input_formats,
        times_read=reads,
        resident=peak_bytes(compiled) + stats.generated_code_size_in_bytes + unread,
        cost=cost,
        copies=buffers.second_copies(module, temporaries, carried),
        compile_s=elapsed,
        said={
            "temporary_bytes": stats.temp_size_in_bytes,
            "largest_temporaries": [
                {"bytes": b.size, "shape": b.shape, "instruction": b.name, "source": b.source}
                for b in buffers.largest(temporaries, LISTED)
            ],
            "collectives": kernels.exchanged(module),
            **kernels.counts(module, cost),
        },
    )


# --- compilers that refuse ---

_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def memory_asked(message: str) -> int | None:
    """Bytes that a TPU compiler's out-of-memory message names; None for any other message, such as
    one about a kernel's own memory."""
    if "RESOURCE_EXHAUSTED" not in message or "hbm" not in message.lower():
        return None
    asked = re.search(r"Used ([\d.]+)([BKMGT]?) of [\d.]+[BKMGT]? hbm", message)
    asked = asked or re.search(r"temporaries \(([\d.]+)([BKMGT]?)\) exceeds", message)
    return int(float(asked[1]) * _UNITS[asked[2] or "B"]) if asked else None


def first_line(message: str) -> str:
    """The first line of a message, cut to a readable length."""
    return message.strip().splitlines()[0][:300] if message.strip() else ""


def num_bytes(tree: object) -> int:
    """Bytes of all arrays of a tree on one device."""
    return sum(map(device_bytes, jax.tree.leaves(tree)))


# --- the two of a run ---


@dataclass(frozen=True, eq=False, kw_only=True)
class Workload:
    """Everything that decides what is compiled, apart from the chip and the batch.

    attention: one of `pallas_kernels.implementations.NAMES`.
    text_tokens: padded length of texts; None: the most that the model takes.
    """

    model: Model
    plan: CachePlan
    sampling: Sampling
    program: ProgramOptions
    attention: str
    text_tokens: int | None

    def predict(
        self, batch_size: int, platform: str, layers: str | None = None
    ) -> memory.Prediction:
        """Bytes of one device without compiling. layers: in place of those asked for."""
        given = self.model, self.plan, batch_size, self.text_tokens, self.attention != "reference"
        return self.program.predict(*given, platform=platform, layers=layers)


class Compilation:
    """Both programs for a batch. Call `compile_codes` first, then `compile_pixels`.

    networks, state: shapes, placed on the devices.

    Both methods raise `DoesNotFit` where a TPU program does not fit (GPU compilers do not check),
    and `NotImplementedError` where a kernel cannot take the shapes.
    """

    codes: CompiledProgram
    pixels: CompiledProgram

    def __init__(self, workload: Workload, chip: Chip, batch_size: int):
        self.workload, self.chip, self.batch_size = workload, chip, batch_size
        model, plan, options = workload.model, workload.plan, workload.program
        mesh, devices = options.mesh, chips.compile_only_devices
        self.mesh = make_mesh(vars(mesh), devices(chip.name, mesh.num_devices))
        self.automatic = chip.platform in programs.AUTO_LAYOUT_PLATFORMS
        types = {"transformer": options.dtype, "codec": "float32"}
        networks = {name: parameters.shapes(m, types[name]) for name, m in model.networks.items()}
        # not every kernel of models that draw token by token exists under every name: there each
        # operation takes its own best, unless the user named one or the best was refused
        best = implementations.choices(chip.platform, chip.capability)[0]
        own = options.build.attention or workload.attention != best
        self.by_token = plan.geometry.kind == TOKENS
        free = self.by_token and not own
        self.spec = builds.specify(
            networks,
            plan,
            workload.sampling,
            replace(options.build, attention=None if free else workload.attention),
            batch_size=batch_size,
            mesh=mesh,
            platform=chip.platform,
        )
        predict_for = partial(workload.predict, batch_size // mesh.data, chip.platform)
        layers = memory.layers_that_fit(options.build.layers, predict_for, chip.memory)
        builds.arrange_layers(networks, layers, chip.platform, mesh.model)
        apart = stacked.is_separate(networks["transformer"])
        self.layers = builds.UNROLL if apart else builds.SCAN
        dtypes = map(jnp.dtype, (options.kv_dtype, options.dtype))
        state = jax.eval_shape(partial(plan.empty_state, batch_size, *dtypes, groups=mesh.model))
        numbers = np.zeros(batch_size, np.int32)
        tables = self.spec.for_images(self.spec.shared_inputs(model.transformer), numbers)
        condition = model.transformer.condition_shapes(batch_size, workload.text_tokens)
        keys = jax.eval_shape(partial(sampling.image_keys, 0), numbers)
        arguments = (condition, keys, Inputs(self.spec, on(None, tables)))
        code_map = jax.ShapeDtypeStruct((batch_size, *model.code_map), jnp.float32)
        self.sharded = None
        if mesh.num_devices > 1:
            given = networks, arguments[-1], options.kv_dtype
            self.sharded = ShardedProgram.of(self.mesh, *given)
        leaves, tree = jax.tree.flatten(networks)
        leaves, self.state, *self.arguments = self._placed(
            (tuple(leaves), state, *arguments), slice(None)
        )
        self.networks = tree.unflatten(leaves)
        self.code_map = self._placed(code_map, CONDITION)

    def _placed(self, tree: Tree, which: int | slice) -> Tree:
        """Shapes on the devices, divided like the argument `which` of the program."""
        if self.sharded is None:
            return on(NamedSharding(self.mesh, PartitionSpec()), tree)
        return self.sharded.place_shapes(which, tree)

    def compile_codes(self) -> None:
        """Compile the program that draws codes."""
        weights = Weights(self.networks)
        given = self.sharded or flat(weights.tree), weights.arrays(), self.state, self.arguments
        precision = self.workload.program.build.matmul_precision
        jitted, given = programs.jit_codes(*given, auto_layout=self.automatic)

        def trace() -> jax.stages.Traced:
            with programs.products(precision):
                return jitted.trace(*given)

        stored = self.workload.model.weights_dtype
        how = {"few_rows": self.by_token, "weights_dtype": stored}
        options = programs.compiler_options(self.chip.platform, **how)
        carried = carried_arrays(self.state, self.workload.plan.kv_arrays(self.state))
        self.codes = compile_program(trace, self.networks, options, carried, self.mesh)

    def compile_pixels(self) -> None:
        """Compile the program that decodes pixels, with weights in the layouts of the other one."""
        codec = self.networks["codec"]
        count = len(jax.tree.leaves(codec))  # they come first among the weights
        formats = self.codes.formats[0][0][:count] if self.automatic else None
        arguments = codec, self.code_map, self.workload.program.build.decoding
        trace = partial(pixels.trace_pixels, *arguments, formats=formats, sharded=self.sharded)
        options = pixels.compiler_options(self.chip.platform)
        self.pixels = compile_program(trace, self.networks, options, (), self.mesh)


def carried_arrays(
    state: KVState | tuple[LayerCache, ...], stored: Sequence[jax.ShapeDtypeStruct]
) -> list[Carried]:
    """Arrays that a program should update in place: the pool, in any type, and other arrays that
    take at least `SHARE_THAT_MATTERS` of its bytes, in their own type. Where layers have caches of
    their own, one of several equal arrays stands for all. stored: those that hold K and V."""
    least = SHARE_THAT_MATTERS * max(map(device_bytes, jax.tree.leaves(stored)))
    found, shapes = [], set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path).lstrip(".")
        shape = leaf.sharding.shard_shape(leaf.shape)
        if isinstance(state, tuple):  # of layers, whose queries look like many temporaries
            name = name.rpartition(".")[2]
            if (name, shape) in shapes or name not in PER_SLOT:
                continue
            shapes.add((name, shape))
        if name in ("kv_pool", "pool"):
            found.append(Carried(name, shape))
        elif device_bytes(leaf) >= least:
            flat = name in ("position", "total_mass", "mass")
            found.append(Carried(name, shape, str(leaf.dtype), flat=flat))
    return found


def on(where: Sharding | None, tree: Tree) -> Tree:
    """Shapes and types, placed on devices."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=where), tree)
