"""JAX's global settings and pictures: equal under each, or one line that refuses it."""

import contextlib
import json

import jax
import numpy as np
import pytest

from tests import models_under_test as models
from tests.often import often
from varjax import Generator, UserError, jax_settings
from varjax.core.sampling import Sampling
from varjax.generation import compiled

OTHERS = {
    "jax_enable_x64": True,
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_high_dynamic_range_gumbel": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_default_matmul_precision": "bfloat16",
    "jax_numpy_dtype_promotion": "strict",
    "jax_transfer_guard": "disallow",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_debug_key_reuse": True,
    "jax_legacy_prng_key": "error",
}
TOKEN_POLICIES = ["headkv", "h2o", "rkv", "snapkv", "linear", "streaming", "full"]


@contextlib.contextmanager
def told(settings: dict):
    """JAX with these settings for the whole process, as its environment would give them."""
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, getattr(value, "value", value))


USUAL = []  # pictures without any of them


@pytest.fixture(autouse=True)
def without_flags(monkeypatch):
    """The suite has some of its own."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


FLAT = compiled.flat


@pytest.fixture
def drawn(call, checkpoint, tmp_path, monkeypatch):
    """Draws by `experiments.run`, whose programs are traced anew: (pictures, report)."""
    monkeypatch.setattr(compiled, "flat", FLAT)

    def draw(folder: str):
        flags = ("--policy=headkv", "--budget=0.5", "--labels=3,7", "--top_p=0.9", "--segments=1")
        status, _, err = call("run", checkpoint, *flags, f"--out={tmp_path / folder}")
        assert status == 0, err
        report = json.loads((tmp_path / folder / "report.json").read_text())
        return np.load(tmp_path / folder / "samples.npz")["arr_0"], report

    return draw


@pytest.mark.parametrize("name", often(["jax_enable_x64"], OTHERS))
def test_pictures_do_not_depend_on_it(name, drawn):
    usual = USUAL or [drawn("usual")[0]]
    USUAL[:] = usual
    with told({name: OTHERS[name]}):
        pictures, report = drawn("other")
    np.testing.assert_array_equal(pictures, usual[0])
    assert report.get("compiler", {}) == jax_settings.of_compiler()


def token_images(policy: str) -> tuple:
    generator = Generator(
        models.fixture_model("llamagen_c2i"),
        policy,
        0.5 if policy != "full" else None,
        batch_size=1,
    )
    results, caches = generator.run_batch(np.array([3], np.int32), np.arange(1))
    return np.asarray(results["tokens"]), [np.asarray(c.position) for c in caches]


@pytest.mark.slow
@pytest.mark.parametrize("policy", TOKEN_POLICIES)
def test_token_by_token_in_64_bits(policy):
    expected = token_images(policy)
    with told({"jax_enable_x64": True}):
        found = token_images(policy)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("name", "value"), [("jax_random_seed_offset", 3), ("jax_disable_jit", True)]
)
def test_refused(name, value, call, checkpoint, tmp_path):
    with told({name: value}):
        status, _, err = call("run", checkpoint, "--labels=1", f"--out={tmp_path / 'out'}")
        with pytest.raises(UserError, match=name.upper()):
            Generator(models.fixture_model("llamagen_c2i"), sampling=Sampling())
    assert status == 2 and err.startswith(f"error: {name.upper()}={value}") and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_remains_is_said(drawn, monkeypatch):
    """And part of what a run that goes on compares, as all that decides it."""
    before, name = jax_settings.of_compiler(), "jax_allow_f16_reductions"
    with told({name: False}):
        assert drawn("other")[1]["compiler"] == before | {name: False}
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_dump_to=x")
    assert jax_settings.of_compiler() == before
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert jax_settings.of_compiler()["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=true"
