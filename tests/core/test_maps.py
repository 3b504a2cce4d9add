"""Resizing equals torch's area pooling, bicubic and trilinear interpolation, patchify its pixel
shuffle; so does the choice of phi."""

import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from varjax.codecs.vqvae import phi_index
from varjax.core.maps import patchify, resize_area, resize_bicubic, resize_bilinear, unpatchify

FIXTURES = Path(__file__).parents[1] / "fixtures" / "var" / "ops"
INFINITY = Path(__file__).parents[1] / "fixtures" / "infinity" / "interp_vectors.npz"
CASES = [name for name in np.load(FIXTURES / "interp.npz").files if not name.startswith("x_")]
# float32: the reference itself is 2e-7 (area) and 4e-6 (bicubic) away from float64
TOLERANCE = {"area": 1e-6, "bicubic": 2e-5}
PHI = {k: v for k, v in json.loads((FIXTURES / "phi_index.json").read_text()).items() if "_K" in k}


@pytest.mark.parametrize("name", CASES)
def test_matches_torch(name):
    arrays = np.load(FIXTURES / "interp.npz")
    kind, source, _, target = name.split("_")
    x = arrays[f"x_{source}"].transpose(0, 2, 3, 1)
    function = {"area": resize_area, "bicubic": resize_bicubic}[kind]
    found = jax.jit(function, static_argnums=1)(x, tuple(int(n) for n in target.split("x")))
    chex.assert_trees_all_close(
        found, arrays[name].transpose(0, 2, 3, 1), rtol=0, atol=TOLERANCE[kind]
    )


@pytest.mark.parametrize("kind", ["trilinear", "area"])
def test_matches_torch_with_one_frame(kind):
    """(1, 3, 1, h, w) maps, as Infinity's quantiser resizes them, up and down."""
    arrays = np.load(INFINITY)
    function = {"area": resize_area, "trilinear": resize_bilinear}[kind]
    names = [n for n in arrays.files if n.startswith(kind) and not n.endswith("16to16")]
    assert len(names) >= 7
    for name in names:
        source = name.split("_")[1].split("to")[0]
        x = arrays["in_16x16" if source == "16" else f"in_{source}"]
        expected = arrays[name][:, :, 0].transpose(0, 2, 3, 1)
        x = x[:, :, 0].transpose(0, 2, 3, 1)
        found = jax.jit(function, static_argnums=1)(x, expected.shape[1:3])
        chex.assert_trees_all_close(found, expected, rtol=0, atol=1e-5, custom_message=name)


@pytest.mark.parametrize("library", [np, jnp])
def test_patchify_is_pixel_unshuffle(library):
    arrays = np.load(INFINITY)
    narrow, wide = (
        library.asarray(arrays[name].transpose(0, 2, 3, 1))
        for name in ("pixshuf_in", "pixshuf_out")
    )
    chex.assert_trees_all_equal(unpatchify(narrow), wide)
    chex.assert_trees_all_equal(patchify(wide), narrow)
    assert isinstance(patchify(wide), type(wide))


@pytest.mark.parametrize("name", PHI)
def test_phi_index(name):
    kind, scales = name.split("_K")
    share = 0 if kind == "nonshared" else int(kind.removeprefix("share"))
    found = phi_index(int(scales), share or int(scales))
    chex.assert_trees_all_equal(found, np.array(PHI[name]))
