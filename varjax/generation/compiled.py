"""Both programs of a batch, compiled for the device that is there, and their weights."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import jax
from flax import nnx
from jax.experimental.layout import Format
from jaxtyping import Array, PyTree

from varjax.core.drawing import Inputs, State
from varjax.generation import compilation_cache, pixels, program
from varjax.generation.build import Build
from varjax.generation.sharding import ShardedProgram


class Weights:
    """The arrays of a model's networks as a flat tuple, as programs take them: the codec's come
    first. The modules are walked through once, here. What their parameters hold is read in every
    call: so no arrays are kept, and whoever arranges or changes them need not say so.

    of_codec: how many are the codec's.
    """

    def __init__(self, networks: Mapping[str, nnx.Module]):
        self.networks, is_leaf = networks, lambda leaf: isinstance(leaf, nnx.Variable)
        self._held = jax.tree.leaves(dict(networks), is_leaf=is_leaf)
        self.of_codec = len(jax.tree.leaves(networks["codec"]))

    @property
    def tree(self) -> jax.tree_util.PyTreeDef:
        """The structure of the networks as their layers are arranged now."""
        return jax.tree.structure(dict(self.networks))

    def arrays(self) -> tuple[Array, ...]:
        # raw: `get_value` would copy the tree of layers that are separate
        found = [v.get_raw_value() if isinstance(v, nnx.Variable) else v for v in self._held]
        return tuple(jax.tree.leaves(found))

    def place(self, formats: tuple[Format, ...]) -> None:
        """Puts the weights where a program wants them, in the layout that it wants
        (`Compiled.input_formats[0][0]`). The modules are changed, one array at a time, so that the
        weights never exist twice. Arrays that lie right already stay."""
        wanted = iter(formats)
        for variable in self._held:
            # several where layers are separate
            arrays, tree = jax.tree.flatten(variable.get_value())
            pairs = [(array, next(wanted)) for array in arrays]
            if any(array.format != where for array, where in pairs):
                placed = [a if a.format == to else jax.device_put(a, to) for a, to in pairs]
                variable.set_value(tree.unflatten(placed))


def flat(tree: jax.tree_util.PyTreeDef) -> Callable[..., tuple[dict[str, Array], State]]:
    """`varjax.core.decode` of a tuple of arrays in place of the networks, whose structure is
    `tree`. In every call JAX walks through what a program takes: through a tuple in no time, but
    not through hundreds of modules and parameters."""

    def generate(
        weights: tuple[Array, ...], state: State, condition: PyTree, keys: Array, inputs: Inputs
    ) -> tuple[dict[str, Array], State]:
        told = condition, keys, inputs.tables, inputs.given
        return inputs.spec.generate(tree.unflatten(weights), state, *told)

    return generate


@dataclass(frozen=True, eq=False)
class Program:
    """Both programs of a batch, compiled, and how what they take lies on the devices.

    codes: `(weights, state, condition, keys, inputs) -> (results, state)` (`flat`).
    pixels: `(weights of the codec, code map [B, P, Q, C]) -> images [B, H, W, 3]`.
    empty_state: makes an empty cache as `codes` takes it.
    came: what the compilation cache did about `codes` (`Timing.cache`).
    formats: of the weights, where the compiler has chosen them.
    sharded: what `codes` is for several devices.
    """

    codes: jax.stages.Compiled
    pixels: jax.stages.Compiled
    empty_state: Callable[[], State]
    came: str = "off"
    formats: tuple[Format, ...] | None = None
    sharded: ShardedProgram | None = None

    @classmethod
    def compile(
        cls,
        weights: Weights,
        empty_state: Callable[[], State],
        arguments: tuple,
        code_map: jax.ShapeDtypeStruct,
        build: Build,
        *,
        sharded: ShardedProgram | None = None,
        options: Mapping[str, bool | int | str],
    ) -> "Program":
        """Compiles both ahead of time.

        arguments: of `codes`, after the state; may be shapes. code_map: of a batch.
        options: of the compiler for `codes` (`program.compiler_options`).
        """
        state, where, formats = jax.eval_shape(empty_state), None, None
        if sharded is not None:
            state, where = sharded.place_shapes(1, state), sharded.shardings[1]
            arguments = sharded.place_shapes(slice(2, None), arguments)
        platform = jax.default_backend()
        automatic = platform in program.AUTO_LAYOUT_PLATFORMS
        given = sharded or flat(weights.tree), weights.arrays(), state, arguments
        jitted, given = program.jit_codes(*given, auto_layout=automatic)
        with program.products(build.matmul_precision):
            traced = jitted.trace(*given)
        lowered = traced.lower()

        def of_pixels(formats: tuple[Format, ...] | None = None) -> Callable:
            given = weights.networks["codec"], code_map, build.decoding
            lowered = pixels.trace_pixels(*given, formats=formats, sharded=sharded).lower()
            return partial(lowered.compile, compiler_options=pixels.compiler_options(platform))

        # Beside the codes, except where their program has to choose how the weights lie, and where
        # other processes compile the same in the same order.
        alone = automatic or sharded is not None
        with ThreadPoolExecutor(1) as beside:
            decoded = None if alone else beside.submit(of_pixels())
            # this program only: helpers compile too quickly to be kept, and look cold
            before = compilation_cache.events.copy()
            codes = lowered.compile(compiler_options=dict(options))
            came = compilation_cache.verdict(before)
        if automatic:
            formats, where = codes.input_formats[0][:2]
            decoded = of_pixels(formats[: weights.of_codec])()
        else:
            decoded = of_pixels()() if decoded is None else decoded.result()
        # one program: operations alone are compiled one by one
        empty = jax.jit(empty_state, **({"out_shardings": where} if where else {}))
        return cls(codes, decoded, empty, came, formats, sharded)

    def draw(
        self, weights: Weights, state: State, arguments: tuple, *, keep_cache: bool
    ) -> tuple[dict[str, Array], PyTree]:
        """The results of a batch, pixels included, and its cache if it is kept, not waited for."""
        arrays = weights.arrays()
        results, state = self.codes(arrays, state, *arguments)
        if not keep_cache:
            state = None  # the last reference: decoding may use that memory
        results["images"] = self.pixels(arrays[: weights.of_codec], results["code_map"])
        return results, state


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
