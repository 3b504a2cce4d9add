"""Sums, norms and rows in 8 bits between products: the kernel is simulated and compared with the
reference, the reference with plain NumPy."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.residual import (
    Branch,
    Norm,
    Sums,
    Vectors,
    add_and_normalize,
    mosaic_gpu,
    reference,
)
from pallas_kernels.residual.operands import TILE
from tests.pallas_kernels import gpu_simulation
from varjax.fast.schemes import FP8, SCHEMES, W8A8

GELU = partial(jax.nn.gelu, approximate=True)
LAYERS, LAYER, EPS = 3, 1, 1e-6
# (rows, tokens, width): tiles of four rows that overlap or not, single rows, rows of a warpgroup
SHAPES = {"tiles": (2, 8, 256), "overlap": (2, 9, 384), "single": (3, 1, 128), "wide": (1, 5, 2688)}
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def numbers(seed: int, *shape: int, dtype="float32", size: float = 1.0):
    return (size * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def sums_of(shape, dtype, eight: bool) -> Sums:
    """A product with a bias. eight: it was one in 8 bits, so scales are still to come."""
    array, bias = numbers(1, *shape, dtype=dtype), numbers(2, shape[-1], dtype=dtype)
    if not eight:
        return Sums(array, bias=bias)
    rows = jnp.abs(numbers(3, *shape[:2], 1)) + 0.1
    return Sums(array, rows, jnp.abs(numbers(4, shape[-1])) + 0.1, bias, jnp.dtype(dtype))


def case(name: str, dtype: str, bits=None, eight: bool = False):
    """Arguments of `add_and_normalize`."""
    shape = rows, _, width = SHAPES[name]
    # tokens have other means and sizes, which the norm has to find
    stream = numbers(5, *shape, dtype=dtype) * 3 + numbers(6, *shape[:2], 1, dtype=dtype)
    vectors = Vectors(numbers(7, LAYERS, rows, 6, width, dtype=dtype, size=0.5), LAYER)
    branch = Branch(sums_of(shape, dtype, eight), replace(vectors, layer=LAYER - 1), 1)
    kind = jnp.dtype(dtype)
    return stream, branch, Norm(vectors, 2, 4, EPS, kind, bits)


def difference(found, wanted) -> float:
    """Relative error; NaN has to be where it is wanted."""
    found, wanted = (np.asarray(a, np.float32) for a in (found, wanted))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    found, wanted = (np.nan_to_num(a, nan=0.0) for a in (found, wanted))
    return np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30)


def simulated(operation, *given):
    """`operation` of the kernels in the simulator, as one program."""
    run = jax.jit(partial(operation, interpret=gpu_simulation.params()))
    return jax.block_until_ready(run(*jax.block_until_ready(given)))


def values(rows):
    """What rows in 8 bits stand for."""
    return rows.numbers.astype(jnp.float32) * scales(rows)


def scales(rows):
    """Those of tokens, without what a kernel may leave behind them."""
    assert rows.scale.shape[1] in (rows.shape[1], -(-rows.shape[1] // TILE) * TILE)
    return rows.scale[:, : rows.shape[1]]


def in_float32(tree):
    """Operands without rounding between the steps of the reference."""
    wide = jnp.dtype("float32")
    return jax.tree.map(
        lambda a: a.astype(wide) if getattr(a, "dtype", None) == jnp.bfloat16 else a, tree
    )


def exact(arguments, **changes):
    """What the reference finds in float32."""
    stream, branch, norm = in_float32(arguments)
    if branch is not None:
        branch = replace(branch, sums=replace(branch.sums, dtype=jnp.dtype("float32")))
    norm = replace(norm, dtype=jnp.dtype("float32"), **changes)
    return add_and_normalize(stream, branch, norm, implementation="reference")


def test_the_reference_is_what_numpy_finds():
    stream, branch, norm = case("overlap", "float32", eight=True)
    found, added = add_and_normalize(stream, branch, norm, implementation="reference")
    sums, vectors = branch.sums, np.asarray(norm.vectors.array)
    wide = np.asarray(sums.array) * np.asarray(sums.row_scale) * np.asarray(sums.channel_scale)
    wide = (wide + np.asarray(sums.bias)) * vectors[LAYER - 1, :, None, 1]
    x = np.asarray(stream) + wide
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS)
    wanted = normal * (1 + vectors[LAYER, :, None, 2]) + vectors[LAYER, :, None, 4]
    assert difference(added, x) < 1e-6 and difference(found, wanted) < 1e-5


@gpu_simulation.needed
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SHAPES)
def test_norms(name, dtype, capsys):
    given = case(name, dtype)
    found, added = simulated(mosaic_gpu.add_and_normalize, *given)
    wanted, sum_wanted = exact(given)
    assert found.dtype == added.dtype == jnp.dtype(dtype)
    assert difference(found, wanted) < TOLERANCE[dtype]
    assert difference(added, sum_wanted) < TOLERANCE[dtype]
    assert gpu_simulation.no_races(capsys)


@pytest.mark.parametrize("run", ["reference", pytest.param("kernel", marks=gpu_simulation.needed)])
def test_a_float32_stream_with_vectors_that_all_rows_share(run):
    """As in Infinity: branch and normalised rows are bfloat16."""
    stream, branch, norm = case("overlap", "bfloat16")
    stream = numbers(5, *stream.shape)
    one = Vectors(numbers(8, LAYERS, 1, 3, stream.shape[-1], size=0.5), LAYER)
    each = replace(one, array=jnp.repeat(one.array, len(stream), axis=1))
    operation = reference.add_and_normalize
    if run == "kernel":
        operation = partial(simulated, mosaic_gpu.add_and_normalize)
    places = dict(scale=0, shift=1)
    found, repeated = (
        operation(stream, replace(branch, gates=v, place=2), replace(norm, vectors=v, **places))
        for v in (one, each)
    )
    jax.tree.map(np.testing.assert_array_equal, found, repeated)
    assert [a.dtype for a in found] == [jnp.bfloat16, jnp.float32]
    given = stream, replace(branch, gates=one, place=2), replace(norm, vectors=one, **places)
    for a, wanted in zip(found, exact(given), strict=True):
        assert difference(a, wanted) < 1e-2


@gpu_simulation.needed
@pytest.mark.parametrize("scheme", [FP8, W8A8])
@pytest.mark.parametrize("name", ["overlap", "single", "wide"])
def test_norms_in_8_bits(name, scheme):
    given = case(name, "bfloat16", SCHEMES[scheme], eight=True)
    found, added = simulated(mosaic_gpu.add_and_normalize, *given)
    wanted, sum_wanted = exact(given)
    assert found.numbers.dtype == SCHEMES[scheme].dtype
    assert difference(added, sum_wanted) < 1e-2
    assert difference(scales(found), wanted.scale) < 1e-2
    plain, _ = exact(given, bits=None)
    # no further from the row than the reference is, in its own rounding to 8 bits
    assert difference(values(found), plain) < 1.1 * difference(values(wanted), plain)


@gpu_simulation.needed
@pytest.mark.parametrize("activation", [None, GELU])
@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("name", ["overlap", "single", "wide"])
def test_products_in_8_bits(name, eight, activation):
    sums, bits = sums_of(SHAPES[name], "bfloat16", eight), SCHEMES[FP8]
    found = simulated(partial(mosaic_gpu.to_8_bits, bits=bits, activation=activation), sums)
    wide = replace(in_float32(sums), dtype=jnp.dtype("float32")).finished()
    wanted, plain = reference.rows_8(wide, bits, activation), wide
    plain = activation(wide) if activation else wide
    assert difference(scales(found), wanted.scale) < 1e-3
    assert difference(values(found), plain) < 1.1 * difference(values(wanted), plain)


@gpu_simulation.needed
@pytest.mark.parametrize("bits", [None, SCHEMES[FP8]], ids=["bfloat16", FP8])
def test_nan_stays_in_its_row(bits):
    stream, branch, norm = case("overlap", "bfloat16", bits)
    spoiled = stream.at[1, 6, 3].set(jnp.nan)
    found, _ = simulated(mosaic_gpu.add_and_normalize, spoiled, branch, norm)
    clean, _ = simulated(mosaic_gpu.add_and_normalize, stream, branch, norm)
    found, clean = (np.array(a if bits is None else values(a), np.float32) for a in (found, clean))
    assert np.isnan(found[1, 6]).all()
    found[1, 6] = clean[1, 6]
    np.testing.assert_array_equal(found, clean)


@gpu_simulation.needed
def test_widths_that_no_warp_can_share_are_refused():
    given = numbers(0, 1, 4, 96)
    vectors = Vectors(numbers(1, 1, 6, 96))
    norm = Norm(vectors, 2, 4, EPS, jnp.dtype("float32"))
    with pytest.raises(NotImplementedError, match="multiple of 128.*not 96: use"):
        add_and_normalize(given, None, norm, implementation="mosaic-interpret")
