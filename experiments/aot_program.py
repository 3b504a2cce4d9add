"""Compile the two programs of a run for a chip that is not here, and measure them.

The programs are those of `varjax.programs`, which `Generator` runs; their arguments are shapes and
types, so no weights are needed and nothing is allocated.
"""

import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments import aot_buffers, settings
from experiments.aot_buffers import Buffer
from pallas_kernels import chips
from pallas_kernels.chips import Chip
from varjax import engine, programs, sampling, sharding
from varjax.cache.plan import CachePlan
from varjax.cache.state import KVState
from varjax.jaxpr_cost import Cost, num_bytes, program_cost, used_inputs
from varjax.memory import show_bytes
from varjax.meshes import MeshSpec
from varjax.models import registry
from varjax.sampling import Sampling
from varjax.segments import Segment
from varjax.sharding import ShardedPlan, ShardedProgram

CONDITION = 2  # the place of the condition among the program's arguments, divided like images


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """What is compiled, apart from the chip and the batch.

    attention: of `pallas_kernels.implementations.NAMES`. or_reference: take the reference where the
      kernel cannot take the shapes, as `Generator` does unless an implementation is named.
    """

    model: settings.AbstractModel
    plan: CachePlan
    sampling: Sampling
    dtype: str
    kv_dtype: str
    segments: tuple[Segment, ...]
    attention: str
    or_reference: bool = False
    precision: str = "default"
    mesh: MeshSpec = field(default_factory=MeshSpec)


class DoesNotFit(Exception):
    """The compiler refused a program because the chip's memory is too small.

    needed: bytes that it asked for.
    """

    def __init__(self, message: str, needed: int):
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True)
class Program:
    """One compiled program; bytes are those of one device.

    arguments, outputs, aliased, temporaries, code: of the compiler's memory analysis; `aliased` is
      the part of the outputs that lies in donated arguments.
    reads: which weights are arguments of this program; `unread`: bytes of the others, which are on
      the device all the same.
    live: temporaries at the moment when they take most (empty: the compiler did not say).
    compile_s: seconds, tracing included.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    reads: list[bool]
    unread: int
    cost: Cost
    compile_s: float
    live: list[Buffer]
    pool_copies: list[str]

    @property
    def resident(self) -> int:
        """Bytes on the device while the program runs: its arguments, results, temporaries and
        code, and the weights that it does not read."""
        own = self.arguments + self.outputs - self.aliased + self.temporaries
        return own + self.code + self.unread


@dataclass(frozen=True)
class Compiled:
    """Both programs for a batch. pipeline, state: shapes, placed on the devices."""

    chip: Chip
    batch_size: int
    codes: Program
    pixels: Program
    state: KVState
    pipeline: Any


def compile_programs(
    request: Request,
    chip: Chip,
    batch_size: int,
    *,
    stop_early: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Compiled:
    """Compile for `batch_size` images.

    Args:
      stop_early: do not compile the decoder if drawing codes does not fit already.
      say: called with progress lines.

    Raises:
      DoesNotFit: a TPU program does not fit (GPU compilers do not look), or `stop_early`.
      NotImplementedError: a kernel cannot take the shapes.
      jax.errors.JaxRuntimeError: the compiler failed otherwise.
    """
    case = _Case(request, chip, batch_size)
    codes, formats = case.codes()
    say(f"codes in {codes.compile_s:.0f} s, {show_bytes(codes.resident)} on the device")
    if stop_early and codes.resident > chip.memory:
        raise DoesNotFit("drawing codes does not fit", codes.resident)
    pixels = case.pixels(formats)
    say(f"pixels in {pixels.compile_s:.0f} s, {show_bytes(pixels.resident)} without the cache")
    return Compiled(chip, batch_size, codes, pixels, case.state, case.pipeline)


class _Case:
    """The arguments of both programs as shapes on the chip's devices."""

    def __init__(self, request: Request, chip: Chip, batch_size: int):
        spec, devices = request.mesh, chips.compile_only_devices
        self.mesh = sharding.make_mesh(spec, devices(chip.name, spec.num_devices))
        self.automatic = chip.platform in programs.AUTO_LAYOUT_PLATFORMS
        self.precision = request.precision
        self.spec = engine.ProgramSpec.of(
            request.plan, request.segments, request.sampling, attention=request.attention
        )
        layout = ShardedPlan(request.plan, spec)
        pipeline, types = _pipeline(request), map(jnp.dtype, (request.kv_dtype, request.dtype))
        state = jax.eval_shape(partial(layout.empty_state, batch_size, *types))
        tables = layout.tables(request.segments, np.zeros(batch_size, np.int32))
        arguments = _arguments(batch_size, tables)
        code_map = jax.eval_shape(lambda: pipeline.empty_code_map(batch_size))
        self.sharded = None
        if spec.num_devices > 1:
            self.sharded = ShardedProgram.of(
                self.mesh, self.spec, layout, pipeline, state, tables, None
            )
        self.pipeline, self.state, *self.arguments = self._placed(
            (pipeline, state, *arguments), slice(None)
        )
        self.code_map = self._placed(code_map, CONDITION)

    def _placed(self, tree, which) -> Any:
        """Shapes on the devices, divided like the argument `which` of the program."""
        if self.sharded is None:
            return _on(tree, NamedSharding(self.mesh, PartitionSpec()))
        return self.sharded.place_shapes(which, tree)

    def kind(self):
        """Kernels ask the mesh for the kind of device."""
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    def codes(self) -> tuple[Program, Any]:
        """The program that draws codes, and the formats of its weights (None: the usual ones)."""

        def lower():
            return programs.lower_codes(
                *(self.pipeline, self.state, tuple(self.arguments), self.spec),
                precision=self.precision,
                auto_layout=self.automatic,
                sharded=self.sharded,
            )

        pool = self.state.kv_pool
        with self.kind():
            traced = self.sharded or partial(engine.generate_codes, spec=self.spec)
            jaxpr = jax.make_jaxpr(traced)(self.pipeline, self.state, *self.arguments)
            program, formats = _compile(
                lower, jaxpr, self.pipeline, pool.sharding.shard_shape(pool.shape)
            )
        return program, formats[0][0] if self.automatic else None

    def pixels(self, formats) -> Program:
        """The program that decodes pixels."""

        def lower():
            return programs.lower_pixels(
                *(self.pipeline, self.code_map),
                precision=self.precision,
                formats=formats,
                sharded=self.sharded,
            )

        decode = programs.decode
        with self.kind():
            traced = decode if self.sharded is None else self.sharded.over_images(decode)
            jaxpr = jax.make_jaxpr(traced)(self.pipeline, self.code_map)
            return _compile(lower, jaxpr, self.pipeline, None)[0]


def _pipeline(request: Request) -> Any:
    """The model as shapes: transformer in the type of the computation, codec in float32."""
    model = request.model
    family = registry.family(model.metadata["family"])
    return family.pipeline(_cast(model.transformer, request.dtype), _cast(model.codec, "float32"))


def _cast(module, dtype):
    dtype = jnp.dtype(dtype)
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape, dtype if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype
        ),
        module,
    )


def _arguments(batch_size: int, tables) -> tuple:
    """Condition, keys, tables and no given tokens, as `Generator` passes them."""
    labels = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    keys = jax.eval_shape(lambda: sampling.image_keys(0, jnp.zeros(batch_size, jnp.int32)))
    return (labels, keys, _on(tables, None), None)


def _on(tree, sharding) -> Any:
    """Shapes and types, placed on devices."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=sharding), tree
    )


def _compile(lower, jaxpr, pipeline, pool_shape) -> tuple[Program, Any]:
    """A program and the formats of its arguments."""
    start = time.perf_counter()
    lowered = lower()
    with tempfile.TemporaryDirectory() as folder:
        try:
            compiled = lowered.compile(
                compiler_options={**aot_buffers.DUMP_OPTIONS, "xla_dump_to": folder}
            )
        except jax.errors.JaxRuntimeError as error:
            if needed := memory_asked(str(error)):
                raise DoesNotFit(first_line(str(error)), needed) from None
            raise
        elapsed = time.perf_counter() - start
        text = compiled.as_text()
        found = aot_buffers.read_dump(Path(folder), text)
    stats = compiled.memory_analysis()
    weights = jax.tree.leaves(pipeline)
    reads = used_inputs(jaxpr)[: len(weights)]
    unread = sum(num_bytes(a) for a, used in zip(weights, reads, strict=True) if not used)
    copies = [] if pool_shape is None else aot_buffers.pool_copies(text, pool_shape)
    if pool_shape is not None and found is not None:
        second = aot_buffers.second_pools(found, pool_shape)
        copies += [f"{b.name}: {b.shape} ({b.source})" for b in second]
    program = Program(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        reads=reads,
        unread=unread,
        cost=program_cost(jaxpr),
        compile_s=elapsed,
        live=[] if found is None else found.live,
        pool_copies=copies,
    )
    return program, compiled.input_formats


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
