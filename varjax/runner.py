"""`Runner`: the two programs of a batch, compiled ahead of time, and the arrays they run with. A
`Generator` is one whose arguments have been checked."""

import contextlib
import time
from dataclasses import dataclass, field
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from pallas_kernels import implementations
from varjax import jax_settings
from varjax import sampling as sampling_lib
from varjax.cache.state import KVState
from varjax.cache.token_state import LayerCache
from varjax.engine import compilation_cache, pixels, program
from varjax.engine.given import Given
from varjax.engine.pixels import Decoding
from varjax.engine.scales import ScaleSpec
from varjax.engine.tokens import TokenSpec
from varjax.errors import UserError
from varjax.logical_axes import make_mesh
from varjax.model import Model
from varjax.nn import stored
from varjax.parallel import sharding, weights
from varjax.parallel.sharding import ShardedProgram


@dataclass
class Timing:
    """Times of a generator, in seconds.

    compile_s: tracing and compiling.
    cache: "warm" if the program that draws codes came from the compilation cache, "cold" if it was
      compiled, "off" if there is no cache.
    runs: each call of the compiled programs, pixels included.
    """

    compile_s: float = 0.0
    cache: str = "off"
    runs: list[float] = field(default_factory=list)


class Runner:
    """Two programs: one draws the codes of a batch, one decodes their pixels. Arguments are those
    of `Generator`. `UserError` for weights that cannot be divided over the mesh, or that lie on
    disk without one.

    Attributes:
      model: its weights are arranged as the programs take them; once they are divided over several
        devices, it is of shapes alone.
      compiled, compiled_decoder: the programs (`jax.stages.Compiled`), None before `compile`.
      timing: seconds of compiling, and of every batch.
    """

    def __init__(
        self,
        model: Model,
        spec: ScaleSpec | TokenSpec,
        *,
        batch_size: int,
        layers: str,
        kv_dtype,
        precision: str,
        decoding: Decoding,
    ):
        self.model, self.spec, self.plan = model, spec, spec.plan
        self.batch_size, self.mesh, self.kv_dtype = batch_size, spec.mesh, kv_dtype
        self.precision, self.decoding, self.timing = precision, decoding, Timing()
        self.networks, self._layers = model.networks, layers
        spec.arrange(self.networks, layers, jax.default_backend())
        # only now: another generator may have left matrices turned, which are never divided
        weights.check_weights(self.networks, self.mesh)
        first = jax.tree.leaves(self.networks)[0]
        if self.mesh.num_devices == 1 and isinstance(first, stored.Stored):
            raise UserError("the weights are on disk, for several devices: give a mesh of these")
        self.compiled = self.compiled_decoder = None
        self._formats = self._cache_formats = self._sharded = self._make_empty = None

    # --- compiling --------------------------------------------------------------------------------

    @jax_settings.pinned()
    def compile(self, condition: PyTree = None, given: np.ndarray | Given | None = None) -> None:
        """Compiles both programs (codes, pixels) ahead of time. `UserError` for a kernel that
        cannot take these shapes, or a device without enough memory.

        condition: arrays of a batch, of the shapes that `run_batch` will get; None: labels, or
          texts as long as the model takes.
        given: tokens of a batch if some will be given.
        """
        if any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(self.networks)):
            raise UserError(f"{self.model.name} was only described: load it with varjax.load")
        start = time.perf_counter()
        automatic = jax.default_backend() in program.AUTO_LAYOUT_PLATFORMS
        try:
            with self._explained("compiling"), compilation_cache.kept():
                # another generator of the same model may have arranged the weights differently
                self.spec.arrange(self.networks, self._layers, jax.default_backend())
                state, arguments = self.traced_arguments(condition, given)
                generate = self._sharded or self.spec.generate
                more = {"precision": self.precision, "auto_layout": automatic}
                codes = program.trace_codes(self.networks, state, arguments, generate, **more)
                how = {"few_rows": self.spec.few_rows, "weights_dtype": self.model.weights_dtype}
                self.compiled, self.timing.cache = program.compile_codes(codes, **how)
                self._make_empty = None
                if automatic:
                    self._formats, self._cache_formats = self.compiled.input_formats[0][:2]
                # after the codes: their program has chosen how the weights lie
                maps = jax.ShapeDtypeStruct((self.batch_size, *self.model.code_map), jnp.float32)
                where = {"formats": self._formats, "sharded": self._sharded}
                traced = pixels.trace_pixels(self.networks, maps, self.decoding, **where)
                self.compiled_decoder = pixels.compile_pixels(traced)
        except NotImplementedError as error:  # a kernel that cannot take these shapes
            raise UserError(str(error)) from error
        self.timing.compile_s = time.perf_counter() - start

    def _explained(self, doing: str) -> contextlib.AbstractContextManager[None]:
        attention = self.spec.options.attention or implementations.preferred()
        return program.explained(f"{doing} a batch of {self.batch_size}", attention)

    def traced_arguments(
        self, condition: PyTree | None, given: np.ndarray | Given | None
    ) -> tuple[PyTree, tuple]:
        """Returns what the program of codes is traced with: shapes of the cache, and the arguments
        after it. Several devices are given their weights on the way. Then only shapes are kept of
        the model, so that its arrays go once nobody else holds them."""
        images, transformer = self.batch_size, self.networks["transformer"]
        if condition is None:
            shapes = transformer.condition_shapes(images)
            condition = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
        arguments = self._arguments(condition, np.zeros(images, np.int32), 0, given, 0)
        state = jax.eval_shape(self.empty_state)
        if self.mesh.num_devices > 1:
            every = jax.devices()  # a smaller mesh takes those of this process
            devices = every if self.mesh.num_devices == len(every) else jax.local_devices()
            mesh, kind = make_mesh(vars(self.mesh), devices), self.kv_dtype
            own = self.spec, self.networks, *arguments[2:]
            self._sharded = ShardedProgram.of(mesh, *own, kind)
            placed = weights.place(self.networks, self._sharded.shardings[0])
            self.model, self.networks = self.model.abstract(), placed
            place = self._sharded.place_shapes
            state, arguments = place(1, state), place(slice(2, None), arguments)
        return state, arguments

    # --- running ----------------------------------------------------------------------------------

    @cached_property
    def _shared_inputs(self) -> tuple:
        """Inputs that no batch changes: put on the device once, for all batches."""
        shared = self.spec.shared_inputs(self.networks["transformer"])
        return jax.device_put(shared)  # `jnp.asarray` would compile a program for each shape

    def _arguments(
        self,
        condition: PyTree,
        image_index: np.ndarray,
        seed: int | np.ndarray,
        given: np.ndarray | Given | None,
        given_scales: int | None,
    ) -> tuple:
        """Condition, keys, inputs and given tokens of a batch, as arrays."""
        inputs = self.spec.for_images(self._shared_inputs, image_index)
        if given is not None:
            given = Given.of(given, self.plan.geometry.schedule, given_scales)
        keys = sampling_lib.image_keys(seed, jnp.asarray(image_index))
        if isinstance(condition, (list, tuple)):  # labels as Python numbers
            condition = np.asarray(condition, np.int32)
        condition, inputs = jax.device_put((condition, inputs))
        return condition, keys, inputs, given

    @jax_settings.pinned()
    def run_batch(
        self,
        condition: PyTree,
        image_index: np.ndarray,
        *,
        seed: int | np.ndarray = 0,
        given: np.ndarray | Given | None = None,
        given_scales: int | None = None,
        keep_cache: bool = True,
    ) -> tuple[dict[str, Array], PyTree]:
        """One full batch: {"images" float32 [B, H, W, 3] in [0, 1], "tokens", "code_map",
        "logits"?} and the final cache.

        condition: arrays with a leading image axis (`Condition.take`); for VAR labels [B].
        image_index: the image's number in its run [B]; seed: of the run, or of each image's.
        given: tokens that replace the draw. An array is taken for the first `given_scales` scales,
          or for so many tokens where they are drawn one by one (None: all); a `Given` says where.
        keep_cache: without it None is returned, and the cache is gone before pixels are decoded.
          Over several devices its rows are those of the first device, then of the next.

        Raises:
          UserError: wrong input, or (`engine.program.OutOfMemory`) a device without enough memory.
        """
        seed = sampling_lib.check_seeds(seed, self.batch_size)
        if self.compiled is None:
            self.compile(condition, given)
        with self._explained("drawing"):
            arguments = self._arguments(condition, image_index, seed, given, given_scales)
            self.spec.arrange(self.networks, self._layers, jax.default_backend())
            if self._formats is not None:
                program.place(self.networks, self._formats)
            if self._sharded is not None:
                arguments = sharding.place(arguments, self._sharded.shardings[2:])
            # a new pool for every batch: the last one was donated, and zeroing is not what is timed
            state = jax.block_until_ready(self.empty_state())
            start = time.perf_counter()
            results, state = self.compiled(self.networks, state, *arguments)
            if not keep_cache:
                state = None  # the last reference: decoding may use that memory
            results["images"] = self.compiled_decoder(self.networks, results["code_map"])
            jax.block_until_ready(results)
            self.timing.runs.append(time.perf_counter() - start)
        return results, state

    @jax_settings.pinned()
    def empty_state(self) -> KVState | tuple[LayerCache, ...]:
        """An empty cache, which lies as the compiled program takes it; over several devices each
        makes its own share."""
        types = self.kv_dtype, self.model.dtype
        make = partial(self.plan.empty_state, self.batch_size, *types, groups=self.mesh.model)
        where = self._cache_formats or (self._sharded and self._sharded.shardings[1])
        if self._make_empty is None:  # one program: operations alone are compiled one by one
            self._make_empty = jax.jit(make, **({"out_shardings": where} if where else {}))
        return self._make_empty()
