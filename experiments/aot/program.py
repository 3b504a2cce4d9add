"""Compile the two programs of a run for a chip that is not here, and measure them.

The programs are those of `varjax.engine.program`, which `Generator` runs; their arguments are
shapes and types, so no weights are needed and nothing is allocated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.buffers import Carried
from experiments.aot.compiler import Program, compile_program
from experiments.flags.program import ProgramOptions
from pallas_kernels import chips
from pallas_kernels.chips import Chip
from varjax import sampling
from varjax.cache.plan import CachePlan
from varjax.cache.state import KVState
from varjax.engine import memory, scales
from varjax.engine import program as programs
from varjax.engine.cost import device_bytes
from varjax.engine.memory import show_bytes
from varjax.engine.segments import Segment
from varjax.model import Model
from varjax.parallel import sharding
from varjax.parallel.sharding import ShardedPlan, ShardedProgram
from varjax.sampling import Sampling

CONDITION = 2  # the place of the condition among the program's arguments, divided like images
SHARE_THAT_MATTERS = 0.01  # of the pool's bytes: smaller arrays of the state may be copied


@dataclass(frozen=True, eq=False, kw_only=True)
class Workload:
    """What is compiled, apart from the chip and the batch.

    attention: of `pallas_kernels.implementations.NAMES`. or_reference: take the reference where the
      kernel cannot take the shapes, as `Generator` does unless an implementation is named.
    text_tokens: padded length of texts; None: the most that the model takes.
    """

    model: Model
    plan: CachePlan
    sampling: Sampling
    program: ProgramOptions
    segments: tuple[Segment, ...]
    attention: str
    or_reference: bool
    text_tokens: int | None

    def predict(self, plan: CachePlan, batch_size: int) -> memory.Prediction:
        """Bytes of one device without compiling. plan: what it holds of the cache."""
        kernels = self.attention != "reference"
        return self.program.predict(self.model, plan, batch_size, self.text_tokens, kernels)


@dataclass(frozen=True)
class Compiled:
    """Both programs for a batch. networks, state: shapes, placed on the devices."""

    chip: Chip
    batch_size: int
    codes: Program
    pixels: Program
    state: KVState
    networks: Any


class Compilation:
    """Both programs for a batch: first `compile_codes`, then `finish`.

    say: called with progress lines.

    Both raise `DoesNotFit` where a TPU program does not fit (GPU compilers do not look),
    `NotImplementedError` where a kernel cannot take the shapes, `jax.errors.JaxRuntimeError` where
    the compiler failed otherwise.
    """

    def __init__(
        self,
        workload: Workload,
        chip: Chip,
        batch_size: int,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.chip, self.batch_size, self.say = chip, batch_size, say
        model, plan, self.options = workload.model, workload.plan, workload.program
        spec, devices = self.options.mesh, chips.compile_only_devices
        self.mesh = sharding.make_mesh(spec, devices(chip.name, spec.num_devices))
        self.automatic = chip.platform in programs.AUTO_LAYOUT_PLATFORMS
        self.spec = scales.ProgramSpec.of(
            plan,
            workload.segments,
            workload.sampling,
            model.config,
            attention=workload.attention,
        )
        layout, networks = ShardedPlan(plan, spec), _networks(model, self.options.dtype)
        types = map(jnp.dtype, (self.options.kv_dtype, self.options.dtype))
        state = jax.eval_shape(partial(layout.empty_state, batch_size, *types))
        numbers = np.zeros(batch_size, np.int32)
        inputs = layout.inputs(workload.segments, numbers, model.transformer.resampling)
        condition = model.transformer.condition_shapes(batch_size, workload.text_tokens)
        arguments = (condition, _keys(batch_size), _on(inputs, None), None)
        code_map = jax.ShapeDtypeStruct((batch_size, *model.config.code_map), jnp.float32)
        self.sharded = None
        if spec.num_devices > 1:
            self.sharded = ShardedProgram.of(
                self.mesh, self.spec, layout, networks, state, inputs, None
            )
        self.networks, self.state, *self.arguments = self._placed(
            (networks, state, *arguments), slice(None)
        )
        self.code_map = self._placed(code_map, CONDITION)

    def _placed(self, tree, which) -> Any:
        """Shapes on the devices, divided like the argument `which` of the program."""
        if self.sharded is None:
            return _on(tree, NamedSharding(self.mesh, PartitionSpec()))
        return self.sharded.place_shapes(which, tree)

    def compile_codes(self) -> Program:
        """The program that draws codes."""
        codes, self.formats = self._codes()
        self.codes = codes
        self.say(f"codes in {codes.compile_s:.0f} s, {show_bytes(codes.resident)} on the device")
        return codes

    def finish(self) -> Compiled:
        """Compile the program that decodes pixels too."""
        pixels = self._pixels()
        taken = show_bytes(pixels.resident)
        self.say(f"pixels in {pixels.compile_s:.0f} s, {taken} on the device without the cache")
        return Compiled(self.chip, self.batch_size, self.codes, pixels, self.state, self.networks)

    def _kind(self):
        """Kernels ask the mesh for the kind of device."""
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    def _codes(self) -> tuple[Program, Any]:
        """The program, and the formats of its weights (None: the usual ones)."""
        trace = partial(
            programs.trace_codes,
            self.networks,
            self.state,
            tuple(self.arguments),
            self.spec,
            precision=self.options.matmul_precision,
            auto_layout=self.automatic,
            sharded=self.sharded,
        )
        with self._kind():
            program, formats = compile_program(trace, self.networks, carried_arrays(self.state))
        return program, formats[0][0] if self.automatic else None

    def _pixels(self) -> Program:
        trace = partial(
            programs.trace_pixels,
            self.networks,
            self.code_map,
            precision=self.options.matmul_precision,
            formats=self.formats,
            sharded=self.sharded,
            at_once=self.options.decode_batch,
        )
        with self._kind():
            return compile_program(trace, self.networks)[0]


def carried_arrays(state: KVState) -> list[Carried]:
    """What a program should update in place: the pool, in any type, and the other arrays that take
    at least `SHARE_THAT_MATTERS` of its bytes, in their own."""
    least = SHARE_THAT_MATTERS * device_bytes(state.kv_pool)
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path).lstrip(".")
        shape = leaf.sharding.shard_shape(leaf.shape)
        if name == "kv_pool":
            found.append(Carried(name, shape))
        elif device_bytes(leaf) >= least:
            per_slot = name in ("position", "total_mass")
            found.append(Carried(name, shape, str(leaf.dtype), flat=per_slot))
    return found


def _networks(model: Model, dtype: str) -> dict[str, Any]:
    """The model as shapes: transformer in the type of the computation, codec in float32."""
    types = {"transformer": dtype, "codec": "float32"}

    def shape(leaf, floating: str):
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(floating) if is_float else leaf.dtype)

    return {
        n: jax.tree.map(partial(shape, floating=types[n]), m) for n, m in model.networks.items()
    }


def _keys(batch_size: int):
    """One typed key per image."""
    return jax.eval_shape(lambda: sampling.image_keys(0, jnp.zeros(batch_size, jnp.int32)))


def _on(tree, sharding) -> Any:
    """Shapes and types, placed on devices."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=sharding), tree
    )
