"""Mosaic GPU kernels in their simulator: shared memory, barriers and asynchronous copies as on the
chip, fresh memory full of NaN, races looked for. JAX has it from 0.11 on. Blackwell's tensor memory
and products are simulated too, as asynchronous as they are."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cache_write, ragged_attention
from pallas_kernels.arg_specs import FILLINGS, SPECS
from pallas_kernels.cache_write import mosaic_gpu as mosaic_write
from pallas_kernels.ragged_attention import mosaic_gpu
from pallas_kernels.sample import mosaic_gpu as mosaic_sample
from pallas_kernels.sample import sample
from pallas_kernels.shared import mosaic_products
from pallas_kernels.tables import BlockTable, block_writes
from tests.pallas_kernels import copy_rules, gpu_simulation
from tests.pallas_kernels import test_sample as choices
from tests.pallas_kernels.gpu_simulation import RACE, UNWAITED, no_races
from tests.pallas_kernels.test_kernels import (
    PLAIN,
    TOLERANCE,
    assert_stored,
    error,
    in_float32,
    written,
)

pytestmark = gpu_simulation.needed
SMALL = SPECS["var-d30-t256"].reduced(heads=2, tokens=72, length=66, entries=9)
OFTEN = {"small": SMALL, "small-int8": replace(SMALL, kv_dtype="int8")}
SPECIAL = {
    "rows": replace(SMALL, per_row=True),
    "block8": replace(SMALL, block_size=8),
    "block32-int8": replace(SMALL, block_size=32, kv_dtype="int8"),
    "wide": SPECS["infinity-2b-t64"].reduced(heads=2),
    "few-tokens": replace(SMALL, tokens=4, length=4),
    "rotated-in-8-bits": SPECS["infinity-2b-t64"].reduced(heads=2, in_8_bits=True),
}
SHAPES = [pytest.param(spec, id=name) for name, spec in OFTEN.items()]
SHAPES += [pytest.param(s, id=name, marks=pytest.mark.slow) for name, s in SPECIAL.items()]
AS_IT_IS = PLAIN.reduced(heads=2, tokens=24, length=20, entries=3)
CAPABILITIES = mosaic_products.PRODUCTS  # Hopper's and Blackwell's


@pytest.fixture(autouse=True)
def copies(monkeypatch):
    """All that the chip asks of them is asked here."""
    broken = copy_rules.watch(monkeypatch)
    yield
    assert not broken, broken[:3]


@pytest.fixture
def traced_anew():
    """What a test changes in a kernel counts in this test alone: traces are kept."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture(params=CAPABILITIES)
def chip(request, monkeypatch):
    """The compute capability of the chip that is traced for."""
    monkeypatch.setattr(mosaic_products.target, "capability", lambda: request.param)
    return request.param


def simulated(operation, **options):
    """`operation` of a Mosaic module in the simulator, as one program for all numbers."""
    return jax.jit(partial(operation, interpret=gpu_simulation.params(), **options))


def check_attend(spec, run, capsys, finite=False):
    args = spec.arguments(poison=not finite)
    args = replace(args, table=replace(args.table, finite=finite))
    out, lse = jax.block_until_ready(run(*args.attend, args.kv_scale))
    assert no_races(capsys), "race"
    chex.assert_tree_all_finite(out)
    exact = in_float32(args)
    options = dict(kv_scale=args.kv_scale, implementation="reference")
    expected, expected_lse = ragged_attention.attend(*exact.attend, return_lse=True, **options)
    real = slice(0, spec.length)
    assert error(out[:, real], expected[:, real]) < TOLERANCE[spec.dtype]
    chex.assert_trees_all_close(lse[..., real], expected_lse[..., real], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("spec", SHAPES)
def test_attend(chip, spec, capsys):
    run = simulated(mosaic_gpu.attend, return_lse=True)
    for filling in FILLINGS:
        check_attend(replace(spec, filling=filling), run, capsys)


@pytest.mark.usefixtures("traced_anew")
def test_finite_values_are_not_cleared(monkeypatch, capsys):
    """Own keys fill their tiles: the chip has zeros behind an array's end, the simulator NaN."""
    monkeypatch.setattr(mosaic_gpu, "_clear", None)
    run = simulated(mosaic_gpu.attend, return_lse=True)
    check_attend(replace(SMALL, tokens=64, length=50), run, capsys, finite=True)


ONE_QUERY = SPECS["llamagen-xl-t1"].reduced(heads=3, entries=5)
SEVERAL = {  # more steps than places
    "one-query": ONE_QUERY,
    "one-warpgroup": replace(SMALL, tokens=24, length=20, entries=17, filling="full"),
    "two-warpgroups": replace(SMALL, tokens=120, length=110, entries=17, filling="full"),
    "three-warpgroups": replace(SMALL, tokens=136, length=130, entries=17, filling="full"),
}


@pytest.mark.usefixtures("traced_anew")
@pytest.mark.parametrize("spec", SEVERAL.values(), ids=SEVERAL)
def test_several_tiles_of_a_program(chip, spec, monkeypatch, capsys):
    """Programs go from tile to tile, of this head and of others. One has more tiles than others."""
    monkeypatch.setattr(mosaic_gpu.mosaic, "programs_at_once", lambda *_: 3)
    check_attend(spec, simulated(mosaic_gpu.attend, return_lse=True), capsys)


@pytest.mark.parametrize("spec", SHAPES)
def test_attention_moments(chip, spec, capsys):
    run = simulated(mosaic_gpu.attention_moments)
    args = spec.arguments()
    exact = in_float32(args)
    options = dict(kv_scale=args.kv_scale, implementation="reference")
    _, lse = ragged_attention.attend(*exact.attend, return_lse=True, **options)
    # of the queries as the kernels round them: with another's, what rounding changes would count
    _, own = simulated(mosaic_gpu.attend, return_lse=True)(*args.attend, args.kv_scale)
    weights = jnp.where(jnp.arange(spec.tokens) < spec.length, 1.0, 0.0)
    found = jax.block_until_ready(run(*args.moments(weights, own, squares=True), args.kv_scale))
    assert no_races(capsys)
    given = exact.moments(weights, lse, squares=True)
    expected = ragged_attention.attention_moments(*given, **options)
    for a, b in zip(found, expected, strict=True):
        assert error(a, b) < TOLERANCE[spec.dtype]


@pytest.mark.parametrize("spec", [*SHAPES, pytest.param(AS_IT_IS, id="as-it-is")])
def test_write(spec, capsys):
    run = simulated(mosaic_write.write)
    for case in written(spec):
        args = case.arguments(poison=False)
        found = jax.block_until_ready(run(*args.write, args.kv_scale))
        assert no_races(capsys)
        options = dict(kv_scale=args.kv_scale, implementation="reference")
        expected = cache_write.write(*args.write, **options)
        assert_stored(found, expected, args.projection)


APART = {
    "small": replace(SMALL, apart=True),
    "one-query": replace(ONE_QUERY, apart=True),
    "few-tokens": replace(SMALL, apart=True, tokens=4, length=4),
    "block8": replace(SMALL, apart=True, block_size=8),
    "as-it-is": replace(AS_IT_IS, apart=True),
    "wide": SPECS["infinity-2b-t64"].reduced(heads=2, apart=True),
    "int8": replace(SMALL, apart=True, kv_dtype="int8"),
    "in-8-bits": replace(SMALL, apart=True, in_8_bits=True),
    "plain-rows-in-8-bits": replace(SMALL, apart=True, tokens=20, length=17, in_8_bits=True),
}
FIRST = ("small", "one-query", "in-8-bits")


def store_and_attend(args, following=None):
    run = simulated(mosaic_gpu.store_and_attend)
    return jax.block_until_ready(run(*args.attend, args.writes, args.kv_scale, following))


@pytest.mark.parametrize(
    "spec",
    [pytest.param(s, id=n, marks=[pytest.mark.slow][n in FIRST :]) for n, s in APART.items()],
)
def test_store_and_attend(spec, capsys):
    """What is read and what is written lie apart. Slots that are neither hold NaN before and
    after."""
    for case in written(spec):
        check_store_and_attend(spec, case.arguments(), capsys)


def check_store_and_attend(spec, args, capsys, following=None):
    out, *found = store_and_attend(args, following)
    assert no_races(capsys), "race"
    options = dict(kv_scale=args.kv_scale, implementation="reference")
    expected = ragged_attention.attend(*in_float32(args).attend, **options)
    real = slice(0, spec.length)
    assert error(out[:, real], expected[:, real]) < TOLERANCE[spec.dtype]
    wanted = cache_write.write(*args.write, **options)
    nan = [jax.tree.map(lambda a: np.isnan(np.float32(a)), b) for b in (tuple(found), wanted)]
    chex.assert_trees_all_equal(*nan)
    assert spec.kv_dtype or nan[0][0].any()
    clean = [jax.tree.map(lambda a: jnp.nan_to_num(a), b) for b in (tuple(found), wanted)]
    assert_stored(*clean, args.projection)


@pytest.mark.parametrize(
    "name", ["small", *(pytest.param(n, marks=pytest.mark.slow) for n in APART if n != "small")]
)
def test_own_keys_are_read_where_they_are_stored(name, capsys):
    """All of them are, one behind another; slots before and behind them hold NaN."""
    spec = replace(APART[name], filling="repeated", entries=17)
    args, heads, size = spec.arguments(), np.arange(spec.heads), spec.block_size
    first = (1 + (spec.heads + heads) * spec.entries) * size + heads + 3
    slots = np.where(np.arange(spec.tokens) < spec.length, np.arange(spec.tokens), -(10**9))
    slots = np.repeat((first[:, None] + slots)[None], 2, axis=0)  # of two layers
    writes = block_writes(slots, size)
    some = writes.source >= 0
    own = writes.ids, some.argmax(-1), some.argmax(-1) + some.sum(-1)
    read = args.table.ids, args.table.start, args.table.stop
    both = map(partial(jnp.concatenate, axis=-1, dtype=jnp.int32), zip(own, read, strict=True))
    following = BlockTable(*both).of_layer(args.table.layer)
    args = replace(args, writes=jax.tree.map(jnp.asarray, writes).of_layer(args.writes.layer))
    check_store_and_attend(spec, args, capsys, following)


def test_nothing_is_stored_by_a_kernel_of_its_own(chip):
    """One kernel less than attention and storing have. What cannot be stored so is stored after
    attention: int8, tables by rows."""

    def names(spec):
        a = spec.abstract()
        run = partial(mosaic_gpu.store_and_attend, interpret=False)
        text = str(jax.make_jaxpr(run)(*a.attend, a.writes, a.kv_scale))
        kernels = ("finish_and_store", "finish", "cache_write", "ragged_attention")
        return {k for k in kernels if f"name={k}\n" in text or f"name={k} " in text}

    assert names(APART["small"]) == {"finish_and_store", "ragged_attention"}
    assert names(replace(APART["small"], kv_dtype="int8")) == {"finish", "ragged_attention"}
    by_row = names(replace(APART["small"], per_row=True))
    assert by_row == {"finish", "cache_write", "ragged_attention"}


# (images, tokens, vocabulary): held by a program, in one part and in two, which overlap; not held;
# rows that begin at no multiple of 16 bytes
VOCABULARIES = [(1, 2, 512), (2, 2, 1000), (1, 1, 4100), (1, 2, 515)]


def simulated_sample(logits, noise, *, tau=None, strength=None, **filters):
    run = simulated(mosaic_sample.sample, **filters)
    return jax.block_until_ready(run(logits, noise, tau=tau, strength=strength))


@pytest.mark.parametrize("shape", VOCABULARIES)
def test_sample(shape, capsys):
    logits, noise, options = choices.numbers(shape)
    filters = {"top_k": 90, "top_p": 0.96}
    found = simulated_sample(logits, noise, **options, **filters)
    assert no_races(capsys)
    expected = sample(logits, noise, **options, **filters, implementation="reference")
    chex.assert_trees_all_equal(found, expected)


# --- mistakes that the simulator has to see -------------------------------------------------------


@pytest.mark.usefixtures("traced_anew")
def test_a_place_that_is_filled_too_early_is_seen(monkeypatch, capsys):
    """Without waiting until a place is free, keys are overwritten while they are used."""
    every = mosaic_gpu.fetch_all

    def without_waits(*given):
        with monkeypatch.context() as patch:
            patch.setattr(mosaic_gpu.plgpu, "barrier_wait", lambda barrier: None)
            every(*given)

    monkeypatch.setattr(mosaic_gpu, "fetch_all", without_waits)
    spec = replace(SMALL, filling="full", entries=24)
    args = spec.arguments()
    with pytest.raises(Exception, match=UNWAITED):
        jax.block_until_ready(
            simulated(mosaic_gpu.attend, return_lse=True)(*args.attend, args.kv_scale)
        )
        assert no_races(capsys), "race"


@pytest.mark.usefixtures("traced_anew")
@pytest.mark.parametrize(
    ("wait", "message"), [("barrier_wait", UNWAITED), ("wait_load_tmem", RACE)]
)
def test_a_product_that_is_not_waited_for_is_seen(wait, message, monkeypatch, capsys):
    """Blackwell: sums that are read before they are there, or overwritten while they are read."""
    monkeypatch.setattr(mosaic_products.target, "capability", lambda: "10.0")
    multiply = mosaic_products.Tcgen05.multiply

    def without_wait(self, refs, group):
        product = multiply(self, refs, group)

        def hasty(*factors):
            with monkeypatch.context() as patch:
                patch.setattr(mosaic_products.plgpu, wait, lambda *barrier: None)
                return product(*factors)

        return hasty

    monkeypatch.setattr(mosaic_products.Tcgen05, "multiply", without_wait)
    with pytest.raises(Exception, match=message):
        check_attend(SMALL, simulated(mosaic_gpu.attend, return_lse=True), capsys)
