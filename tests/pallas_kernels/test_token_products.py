"""Products of one token (norm, rotation, gate, residual sum) against plain JAX in float32. GPU:
simulated (JAX from 0.11 on), which fills fresh memory with NaN and looks for races. The simulator
multiplies float32, which the chip's kernels refuse: there the arithmetic is checked to 1e-5."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import implementations, token_products
from pallas_kernels.token_attention import QuerySum
from pallas_kernels.token_products import Angles, RMSNorm, mosaic_gpu, reference
from tests.pallas_kernels import copy_rules, gpu_simulation
from tests.pallas_kernels.gpu_simulation import RACE, no_races
from tests.pallas_kernels.test_kernels import TOLERANCE, error
from tests.pallas_kernels.test_kernels import in_float32 as wide
from varjax.models import registry

EPS = 1e-3


@dataclass(frozen=True)
class Shape:
    """rows; width of the stream and of the feed-forward; heads of queries and of keys, their size;
    whether they are turned by halves; whether rows have angles of their own."""

    dtype: str = "float32"
    rows: int = 6
    width: int = 128
    hidden: int = 192
    heads: int = 2
    keys: int = 2
    size: int = 64
    halves: bool = False
    own: bool = False
    summed: bool = True


SMALL = Shape()
CASES = {
    "float32": SMALL,
    "bfloat16": replace(SMALL, dtype="bfloat16"),
    "one-row": replace(SMALL, rows=1),
    "two-tiles-of-rows": replace(SMALL, rows=70, dtype="bfloat16"),
    "heads-of-16": replace(SMALL, width=64, heads=4, keys=4, size=16),
    "heads-of-100": replace(SMALL, width=64, heads=16, keys=16, size=100, dtype="bfloat16"),
    "halves-of-128-shared": Shape(width=256, heads=2, keys=1, size=128, halves=True, own=True),
}
MARKED = [pytest.param(case, id=name) for name, case in CASES.items()]


def arguments(shape: Shape) -> dict:
    rng = np.random.default_rng(0)

    def normal(*sizes, type=jnp.float32):
        return jnp.asarray(rng.standard_normal(sizes, np.float32), type)

    def matrix(columns, rows):
        return normal(columns, rows, type=shape.dtype) * columns**-0.5

    d, q, k = shape.width, shape.heads * shape.size, shape.keys * shape.size
    turns = normal(shape.rows if shape.own else 1, shape.size)
    sizes = {"queries": q, "keys": k, "halves": shape.halves}
    return {
        "x": normal(shape.rows, d),
        "norms": (1 + 0.2 * normal(2, d)).astype(shape.dtype),
        "gate": matrix(d, 2 * shape.hidden),
        "down": matrix(shape.hidden, d),
        "qkv": matrix(d, q + 2 * k),
        "angles": Angles(jnp.cos(turns), jnp.sin(turns), scale=shape.size**-0.5, **sizes),
        "total": QuerySum(normal(shape.rows, q), jnp.float32(1), jnp.float32(0.5))
        if shape.summed
        else None,
    }


def layer(products, x, norms, gate, down, qkv, angles, total, **how):
    """What a feed-forward gives, the stream behind it, what the next layer projects."""
    norms = [RMSNorm(norms, jnp.int32(i)) for i in range(2)]
    stream = products.start(x, norms[0], EPS, qkv.dtype, **how)
    gated = products.gate(stream, gate, **how)
    stream = products.add(stream, gated, down, norms[1], **how)
    heads, total = products.project(stream, qkv, angles, total, **how)
    return {"gated": gated, "x": stream.x, "heads": heads, "total": total}


def expected(given: dict):
    """The same in float32."""
    return layer(reference, **wide(given))


def found(given: dict) -> dict:
    how = {"interpret": gpu_simulation.params()}
    return jax.block_until_ready(jax.jit(lambda given: layer(mosaic_gpu, **given, **how))(given))


def check(shape: Shape, results: dict, given: dict, rows=slice(None)) -> None:
    limit, right = TOLERANCE[shape.dtype], expected(given)
    results = jax.tree.map(lambda a: a[: shape.rows], results)
    jax.tree.map(lambda a, b: check_close(a[rows], b[rows], limit), results, right)


def check_close(a, b, limit: float) -> None:
    assert a.shape == b.shape and error(a, b) < limit


@pytest.fixture
def in_float32(monkeypatch):
    """Also in float32."""
    monkeypatch.setattr(mosaic_gpu, "DTYPES", ("float32", *mosaic_gpu.DTYPES))


@gpu_simulation.needed
@pytest.mark.parametrize("shape", MARKED)
def test_simulated(shape, in_float32, monkeypatch, capsys):
    broken, given = copy_rules.watch(monkeypatch), arguments(shape)
    check(shape, found(given), given)
    assert no_races(capsys)
    assert not broken, broken[:3]


@gpu_simulation.needed
def test_rows_stay_apart(in_float32):
    """What is not finite in one row is seen in no other; neither is a sum that begins anew."""
    given = arguments(SMALL)
    total = replace(
        given["total"], total=jnp.full_like(given["total"].total, jnp.nan), keep=jnp.float32(0)
    )
    given |= {"x": given["x"].at[3, 5].set(jnp.nan), "total": total}
    results, others = found(given), np.delete(np.arange(SMALL.rows), 3)
    check(SMALL, results, given, others)
    assert np.isnan(results["x"][3]).all() and np.isnan(results["heads"][2][3]).all()


@gpu_simulation.needed
def test_mistakes_are_seen(in_float32, monkeypatch, capsys):
    """A tile that is copied out, or multiplied, before every warp has stored its part."""
    given = arguments(SMALL)
    with pytest.raises(Exception, match=f"{RACE}|assert"):
        with monkeypatch.context() as patch:
            patch.setattr(mosaic_gpu.plgpu, "commit_smem", lambda: None)
            check(SMALL, found(given), given)
            assert no_races(capsys), "race"


def test_the_reference_is_the_model():
    """Norm, gate and residual sum are those of a decoder's layer, bit by bit."""
    from varjax.core import layers

    given = arguments(replace(SMALL, dtype="bfloat16"))
    results = layer(reference, **given)
    normal = layers.rms_norm(given["x"], given["norms"][0], EPS, jnp.bfloat16)
    gates, values = jnp.split(jnp.dot(normal, given["gate"]), 2, axis=-1)
    gated = jax.nn.silu(gates) * values
    np.testing.assert_array_equal(results["gated"], gated)
    x = given["x"] + jnp.dot(gated, given["down"]).astype(jnp.float32)
    np.testing.assert_array_equal(results["x"], x)


# --- shapes of published models -------------------------------------------------------------------


def abstract(shape: Shape, dtype="bfloat16"):
    shape = replace(shape, dtype=dtype)
    return jax.eval_shape(lambda: arguments(shape))


def published(name: str, rows: int) -> Shape:
    config = registry.preset(name).configs["transformer"]
    halves = "llamagen" not in name
    return Shape(
        rows=rows,
        width=config.embed_dim,
        hidden=config.hidden_dim,
        heads=config.num_heads * config.queries_per_head,
        keys=config.num_heads,
        size=config.head_dim,
        halves=halves,
        own=halves,
    )


def run(given, name="mosaic"):
    return layer(token_products, **given, implementation=name)


NAMES = "llamagen-xl-384 llamagen-xxl-384 llamagen-3b-384 janus-pro-1b janus-pro-7b".split()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("llamagen-b-256", 2), *((n, 64) for n in NAMES)])
def test_published_widths_fit(name, rows, monkeypatch):
    monkeypatch.setattr(implementations.target, "capability", lambda: "9.0")
    shape = published(name, rows)
    results = jax.eval_shape(run, abstract(shape))
    assert results["gated"].shape == (-(-rows // 64) * 64, shape.hidden)


@pytest.mark.parametrize(
    ("changes", "dtype", "capability", "reason"),
    [
        ({}, "float32", "9.0", "take bfloat16 and float16, not float32"),
        ({"hidden": 200}, "bfloat16", "9.0", "multiples of 64 columns.* 'gates': 200"),
        ({"width": 8256}, "bfloat16", "9.0", "a width of up to 8192, not .*8256"),
        (
            {"size": 96, "halves": True},
            "bfloat16",
            "9.0",
            "heads of 16 or 32 or 64 or 128 that are turned by halves, not of 96",
        ),
        ({}, "bfloat16", "10.0", "compute capability 9.0, not 10.0"),
    ],
)
def test_refused(changes, dtype, capability, reason, monkeypatch):
    monkeypatch.setattr(implementations.target, "capability", lambda: capability)
    with pytest.raises(NotImplementedError, match=reason) as refusal:
        jax.eval_shape(run, abstract(replace(SMALL, **changes), dtype))
    assert "--attention=reference" in str(refusal.value)
