"""The kernels that choose tokens, step by step with JAX operations, against the reference: the same
tokens, the same logits kept, whatever lies beside a row."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sample import mosaic_gpu, reference, sample
from pallas_kernels.sample.row import Parts
from tests.often import often

KERNELS = ["triton-interpret", "tpu-interpret"]
# (images, tokens, vocabulary): parts that overlap; several programs, the last one not full; a token
# of each image, of which programs hold several
SHAPES = [(2, 5, 1000), (11, 1, 512)]
FILTERS = [(7, 0.0), (0, 0.9)]


def numbers(shape, *, guided: bool = True, seed: int = 0):
    """Logits, noise, and temperature and guidance."""
    images, tokens, vocabulary = shape
    random = np.random.default_rng(seed)
    logits = random.normal(0, 3, ((1 + guided) * images, tokens, vocabulary))
    options = {"tau": jnp.float32(0.7), "strength": jnp.float32(1.3) if guided else None}
    return jnp.float32(logits), jnp.float32(random.gumbel(size=shape)), options


@functools.cache
def runs(kernel: str):
    """`sample` as one program for all numbers of the same shapes."""
    run = partial(sample, implementation=kernel)
    return jax.jit(run, static_argnames=("top_k", "top_p"))


def assert_same(kernel: str, logits, noise, **options) -> None:
    found, expected = (runs(name)(logits, noise, **options) for name in (kernel, "reference"))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_the_reference(kernel, shape):
    logits, noise, options = numbers(shape)
    assert_same(kernel, logits, noise, **options, top_k=900, top_p=0.96)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("top_k,top_p", FILTERS)
def test_filters(kernel, top_k, top_p):
    logits, noise, options = numbers((2, 5, 520), guided=False)
    filters = {"top_k": top_k, "top_p": top_p}
    assert_same(kernel, logits, noise, **options, **filters)
    assert_same(kernel, logits, 10 * noise, **filters)  # as if it were colder


def abstract(shape, sharding=None) -> dict:
    """`numbers` without data, by the names of arguments."""
    found = jax.eval_shape(lambda: numbers(shape))
    found = dict(zip(("logits", "noise"), found[:2], strict=True)) | found[2]
    place = partial(jax.ShapeDtypeStruct, sharding=sharding)
    return {name: place(a.shape, a.dtype) for name, a in found.items()}


# --- which logits survive -------------------------------------------------------------------------


def revealed(run, row: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Which logits of a row survive. Token v's noise lifts entry v above all others, so it is
    chosen unless it was set to -inf."""
    count = len(row)
    logits = np.broadcast_to(row, (1, count, count)).astype(np.float32)
    noise = np.where(np.eye(count, dtype=bool), np.float32(1e30), np.float32(0))[None]
    found = run(logits, noise, tau=None, strength=None, top_k=top_k, top_p=top_p)
    return np.asarray(found)[0] == np.arange(count)


def adversarial(count: int = 144) -> dict[str, np.ndarray]:
    """Rows in which thresholds fall on equal numbers or on peculiar ones."""
    random = np.random.default_rng(1)
    coarse = random.integers(-3, 4, count).astype(np.float32)
    special = random.normal(0, 1, count).astype(np.float32)
    special[:12] = [-np.inf, -np.inf, 1e20, -1e20, 0.0, -0.0, 1e-40, -1e-40, 2.5, 2.5, -2.5, 2.5]
    zeros = np.where(np.arange(count) % 3, 0.0, -0.0).astype(np.float32)
    few = np.where(np.arange(count) < 5, special, -np.inf).astype(np.float32)
    neighbours = np.float32(1) + np.arange(count, dtype=np.float32)[::-1] * np.float32(2**-23)
    return {
        "ties": coarse,
        "special": special,
        "zeros": zeros,
        "fewer than k": few,
        "one rounding apart": neighbours,
    }


filter_logits = jax.jit(reference.filter_logits, static_argnums=(1, 2))


@pytest.mark.parametrize("kernel", often(("tpu-interpret",), KERNELS))
def test_equal_logits_share_their_fate(kernel):
    """Adversarial rows: kernels keep exactly what the reference keeps, for every k, with equal
    logits and with all."""
    for name, row in adversarial().items():
        for top_k, top_p in [(37, 0.0), (1, 0.0), (0, 0.7), (60, 0.9)]:
            kept = revealed(runs(kernel), row, top_k, top_p)
            expected = np.isfinite(filter_logits(row, top_k, top_p))
            np.testing.assert_array_equal(kept, expected, err_msg=f"{name}, {top_k}, {top_p}")


@pytest.mark.parametrize("kernel", often(("tpu-interpret",), ["reference", *KERNELS]))
def test_edges_of_top_p(kernel):
    """Where the rejected mass meets 1 - p, to the last bit of float64, the order of a sum decides
    whether one more logit goes; nothing else may."""
    row = np.random.default_rng(3).normal(0, 2, 144).astype(np.float32)
    order, p = np.argsort(row), np.exp(row.astype(np.float64) - row.max())
    mass = np.cumsum((p / p.sum())[order]).tolist()
    for at in (20, 77, 120):
        kept = revealed(runs(kernel), row, 0, 1 - mass[at])
        # the places in ascending order: gone up to `at` or up to the one before
        assert kept[order].tolist() in (
            [False] * gone + [True] * (144 - gone) for gone in (at, at + 1)
        )
        for shift, gone in ((-1e-5, at), (1e-5, at + 1)):  # away from the edge there is no choice
            kept = revealed(runs(kernel), row, 0, 1 - mass[at] - shift)
            assert kept[order].tolist() == [False] * gone + [True] * (144 - gone)


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_first_of_equal_ones_is_chosen(kernel):
    random = np.random.default_rng(2)
    logits, noise = (jnp.float32(random.integers(0, 4, (2, 30, 700))) for _ in range(2))
    assert_same(kernel, logits, noise)
    assert_same(kernel, logits, 0 * noise, top_k=50)
    assert_same(kernel, logits, noise.at[:, :3].set(-jnp.inf))  # nothing is larger: the first


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_read_beside_a_row(kernel):
    """Rows of other tokens hold NaN; a row that does, too, gives some token of the vocabulary."""
    logits, noise, options = numbers((2, 11, 1000))
    poisoned = logits.at[:, 1::2].set(jnp.nan)
    filters = {"top_k": 90, "top_p": 0.9}
    found = runs(kernel)(poisoned, noise, **options, **filters)
    expected = runs("reference")(logits, noise, **options, **filters)
    np.testing.assert_array_equal(found[:, ::2], expected[:, ::2])
    assert (0 <= found).all() and (found < 1000).all()


# --- parts, refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [4096, 16384])
@pytest.mark.parametrize("length", [128, 1000, 4096, 4097, 16384, 50000])
def test_parts_cover_a_row(length, most):
    """Once each, but for the end of the last one but one, and never beyond it."""
    parts = Parts.of(length, most)
    starts = [parts.start(i) for i in range(parts.count)]
    assert starts[0] == 0 and starts[-1] + parts.size == length
    assert all(b - a <= parts.size for a, b in zip(starts, starts[1:], strict=False))
    assert parts.held == (length <= most) and parts.size <= most // (1 if parts.held else 2)


def test_what_kernels_refuse():
    """A refusal has a reason; `auto` then takes the next kernel."""
    logits = jnp.zeros((1, 1, 100))
    with pytest.raises(NotImplementedError, match="Mosaic chooses from 128 tokens on"):
        sample(logits, logits, implementation="mosaic")
    wide = jax.ShapeDtypeStruct((1, 1, 65537), jnp.float32)
    with pytest.raises(NotImplementedError, match="vocabularies of up to 65536 tokens, not 65537"):
        jax.eval_shape(runs("tpu"), wide, wide)
    with pytest.raises(NotImplementedError, match="'cuda' does not exist"):
        sample(logits, logits, implementation="cuda")


@pytest.mark.parametrize("shape", [(1, 2, 4096), (1, 2, 50000)])
def test_mosaic_lowers(shape):
    """Every version of JAX lowers them, without the chip's compiler."""
    run = partial(mosaic_gpu.sample, top_k=900, top_p=0.9, interpret=False)
    lowered = jax.jit(run).trace(**abstract(shape)).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
