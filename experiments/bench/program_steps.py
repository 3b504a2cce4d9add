"""Steps of `experiments.bench --machine` that run whole programs: products, starts of kernels,
codes and pixels of models with random weights."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import varjax
from experiments.aot.modelled import Modelled
from experiments.aot.occupancy import plan_occupancy
from experiments.aot.program import modelled
from experiments.aot.work import Work
from experiments.bench import products, random_models
from experiments.bench.kernel_steps import WrongResult
from experiments.bench.rows import Call, Found, Row
from experiments.bench.scope import Scope
from pallas_kernels import bench
from varjax import metrics, sampling
from varjax.cache.plan import CachePlan
from varjax.codecs import arithmetic
from varjax.engine import memory
from varjax.engine import program as programs
from varjax.engine.cost import Cost, program_cost
from varjax.engine.device_errors import OutOfMemory
from varjax.engine.memory import show_bytes
from varjax.engine.pixels import Decoding, compile_pixels, trace_pixels
from varjax.errors import MissingExtra, UserError
from varjax.generator import Generator
from varjax.model import Model
from varjax.nn.compiled import peak_bytes

SINGLE = "python -m experiments.bench --machine --step={}"  # repeats a step
CODE_MAP = 0.5  # spread of random code maps

# --- products and starts ---


def product_times(scope: Scope, name: str) -> Found:
    """Products of a layer and of the head: of the first scale or token, and of the last scale. Each
    is timed there and back (`products.Pair`); a row is the mean of the two."""
    config, rows = random_models.abstract(name, scope.small).config, []
    most = max(h * w for h, w in config.token_maps) if hasattr(config, "schedule") else 1
    options = programs.compiler_options(jax.default_backend())
    for images in scope.images:
        for tokens in sorted({1, most}):
            for pair in products.of_model(config, 2 * images * tokens):
                rows.append(_pair(scope, name, pair, images, options))
    return Found(rows)


def _pair(scope: Scope, name: str, pair: products.Pair, images: int, options: Mapping) -> Row:
    shape = f"{name} {pair.name} {pair.rows}x{pair.width}x{pair.columns}"
    row = Row(Call("products", shape, "xla", scope.dtype, images))
    try:
        candidate, count = pair.run(scope.dtype, 1 if scope.small else products.MOST)
        seconds = bench.measure(candidate, scope.repeats, options) / count
    except Exception as error:  # out of memory above all
        return replace(row, note=bench.short(error))
    flops, moved = pair.work(scope.dtype)
    row, chip = replace(row, seconds=seconds, flops=flops, bytes=moved), scope.chip
    if chip is None or chip.gpu is None:
        return row
    return row.with_work({Work("products", False, moved, flops, chip.bf16_flops): 1.0}, chip)


def start_times(scope: Scope) -> Found:
    """Seconds from the start of a kernel that does nothing to the start of the next one."""
    candidate, count = products.starts()
    seconds = bench.measure(candidate, scope.repeats) / count
    call = Call("starts", f"{count} kernels, one after another", "xla", "float32")
    return Found([Row(call, seconds)])


# --- models ---


def draw(scope: Scope, name: str, policy: str, images: int, step: str) -> Found:
    """Times of codes and pixels of a batch. step: the name of this step."""
    model, share = random_models.abstract(name, scope.small), 1.0
    if policy != "full":
        share = scope.share
    plan = varjax.plan(model, policy=policy, budget=None if policy == "full" else share)
    calls = [Call(part, name, policy, scope.dtype, images, share) for part in ("codes", "pixels")]
    if why := _too_large(scope, model, plan, images):
        return Found([Row(call, note=why) for call in calls])
    model = random_models.with_weights(model, scope.dtype)
    drawn = _Drawn(scope, Generator(model, plan=plan, batch_size=images), images)
    try:
        pixels = drawn.once()
    except OutOfMemory as error:
        why = f"does not fit: {bench.short(error)}"
        return Found([Row(call, note=why) for call in calls])
    if not np.isfinite(pixels).all():
        words = f"{model.name}, {policy}, {images} images: {np.isnan(pixels).mean():.1%} of the "
        raise WrongResult(f"{words}pixels are no numbers", SINGLE.format(step))
    return Found([drawn.codes(calls[0]), drawn.pixels(calls[1])])


def _too_large(scope: Scope, model: Model, plan: CachePlan, images: int) -> str | None:
    """Why a batch will not fit the device, or None."""
    options = {"text_tokens": random_models.TEXT}
    need = memory.predict(model, plan, images, scope.dtype, scope.dtype, **options).total
    there = memory.available_bytes()
    if there is None or need <= memory.SAFETY * there:
        return None
    return f"does not fit: needs {show_bytes(need)}, {show_bytes(there)} are there"


class _Drawn:
    """The two programs of a generator, run one by one."""

    def __init__(self, scope: Scope, generator: Generator, images: int):
        self.scope, self.generator, self.images = scope, generator, images
        self.networks = generator.model.networks
        self.condition = random_models.condition(self.networks["transformer"], images)

    def once(self) -> np.ndarray:
        """Compile, draw a batch and return its pixels."""
        numbers = np.arange(self.images)
        results, _ = self.generator.run_batch(self.condition, numbers, keep_cache=False)
        self.code_map = results["code_map"]
        return np.asarray(results["images"])

    def codes(self, call: Call) -> Row:
        """The row of the program that draws codes."""
        compiled = self.generator.compiled
        arguments = self._arguments()

        def run():
            return compiled(self.networks, state, *arguments)

        seconds = []
        for _ in range(self.scope.repeats):
            # each run gives its cache away
            state = jax.block_until_ready(self.generator.empty_state())
            seconds.append(_seconds(run))
        cost, found = self._modelled(arguments)
        note = f"{show_bytes(peak_bytes(compiled))} on the device"
        row = Row(call, statistics.median(seconds), _flops(cost), note=note)
        return _with_model(row, found, self.scope)

    def pixels(self, call: Call) -> Row:
        """The row of the program that decodes pixels."""
        compiled, chip = self.generator.compiled_decoder, self.scope.chip
        run = partial(compiled, self.networks, self.code_map)
        seconds = [_seconds(run) for _ in range(self.scope.repeats)]
        found = modelled(compiled.as_text(), chip, Counter()) if chip else None
        flops = found.total("flops") if found else 0.0
        return _with_model(Row(call, statistics.median(seconds), flops), found, self.scope)

    def _arguments(self) -> tuple:
        """Condition, keys and inputs of the program, and no given tokens."""
        drawing, numbers = self.generator.drawing, np.arange(self.images, dtype=np.int32)
        inputs = drawing.for_images(drawing.shared_inputs(self.networks["transformer"]), numbers)
        keys = sampling.image_keys(0, jnp.asarray(numbers))
        condition, inputs = jax.tree.map(jnp.asarray, (self.condition, inputs))
        return condition, keys, inputs, None

    def _modelled(self, arguments: tuple) -> tuple[Cost, Modelled | None]:
        """What the program computes, and the cost model's opinion of its compiled text."""
        generator, chip = self.generator, self.scope.chip
        state = jax.eval_shape(generator.empty_state)
        automatic = jax.default_backend() in programs.AUTO_LAYOUT_PLATFORMS
        traced = programs.trace_codes(
            self.networks, state, arguments, generator.spec, auto_layout=automatic
        )
        occupancy = plan_occupancy(generator.plan, generator.segments)
        cost = program_cost(traced.jaxpr, occupancy)
        text = generator.compiled.as_text()
        return cost, modelled(text, chip, cost.kernels) if chip else None


def _seconds(run: Callable) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _flops(cost: Cost) -> float:
    return cost.flops + sum(calls * work.flops for work, calls in cost.kernels.items())


def _with_model(row: Row, found: Modelled | None, scope: Scope) -> Row:
    """With what the model says of a whole program."""
    if found is None or not found.seconds:
        return row
    if scope.chip.gpu:
        row = row.with_work(found.work(), scope.chip)
    return replace(row, bytes=found.total("bytes"), modelled=found.seconds)


# --- types of the decoder ---


def decoder_times(scope: Scope, name: str) -> Found:
    """Pixels in every type of the decoder: times, bytes, and how far they are from float32."""
    model = random_models.with_weights(random_models.abstract(name, scope.small), scope.dtype)
    rows = []
    for images in scope.images[:2]:
        shape = (images, *model.code_map)
        code_map = CODE_MAP * jax.random.normal(jax.random.key(0), shape)
        exact = None
        for dtype in reversed(arithmetic.DTYPES):  # float32 first, which the others meet
            row, exact = _decoded(scope, model, code_map, dtype, exact)
            rows.append(replace(row, call=replace(row.call, shape=name)))
    return Found(rows)


def _decoded(
    scope: Scope, model: Model, code_map: jax.Array, dtype: str, exact: np.ndarray | None
) -> tuple[Row, np.ndarray]:
    networks: Mapping = model.networks
    row = Row(Call("pixels, by type", "", "xla", dtype, len(code_map)))
    try:
        decoding = Decoding(arithmetic.resolve_here(dtype))
        compiled = compile_pixels(partial(trace_pixels, networks, code_map, decoding))
        run = partial(compiled, networks, code_map)
        found = np.asarray(run())
        seconds = [_seconds(run) for _ in range(scope.repeats)]
    except (jax.errors.JaxRuntimeError, UserError) as error:  # out of memory; no such type here
        return replace(row, note=bench.short(error)), exact
    # weights that it does not read (the transformer's) are no arguments of the compiled program
    given = compiled.memory_analysis().argument_size_in_bytes
    note = f"{show_bytes(peak_bytes(compiled) - given)} beside the weights"
    if exact is not None:
        note += _distance(found, exact)
    row = replace(row, seconds=statistics.median(seconds), note=note)
    return row, found if exact is None else exact


def _distance(found: np.ndarray, exact: np.ndarray) -> str:
    try:
        return f", {metrics.psnr(found, exact).mean():.1f} dB from float32"
    except MissingExtra as error:  # times are worth having without it
        return f" ({error})"
