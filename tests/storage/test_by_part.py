"""Arrays that are read by part: the same numbers as those that Orbax reads whole."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from varjax.core.errors import UserError
from varjax.fast import quantized
from varjax.fast.schemes import SCHEMES
from varjax.storage import arrays

DRAWN = np.random.default_rng(0).normal(size=(3, 32, 48)).astype(np.float32)
QKV = ((8, 16), (24, 32), (40, 48))  # the second half of every section


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("stored") / "params"
    arrays.write_arrays(found, {"blocks/qkv/kernel": DRAWN, "count": np.arange(4, dtype=np.int32)})
    return found


def stored(folder, dtype="float32"):
    return arrays.by_part(folder, "blocks/qkv/kernel", DRAWN.shape, jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_are_those_of_the_whole(folder, dtype):
    named = {"blocks/qkv/kernel": DRAWN, "count": np.zeros(4, np.int32)}
    wanted = {"blocks/qkv/kernel": dtype}
    (whole,) = arrays.read_arrays(folder, named, wanted, "model.json", on_host=True).values()
    array = stored(folder, dtype)
    assert array.dtype == whole.dtype and array.shape == whole.shape
    np.testing.assert_array_equal(np.asarray(array), whole)
    sections = np.concatenate([whole[..., slice(*r)] for r in QKV], -1)
    np.testing.assert_array_equal(array.part(2, QKV), sections)
    np.testing.assert_array_equal(array.part(1, ((4, 8),)), whole[:, 4:8])
    for layer in range(3):
        np.testing.assert_array_equal(array[layer].part(1, QKV), sections[layer])
        turned = array[layer].T.part(0, QKV)
        np.testing.assert_array_equal(turned, sections[layer].T)
        assert turned.flags.c_contiguous and array[layer].T.origin is array


def test_layers_of_a_part_are_read_once(folder):
    array, read = stored(folder), []
    plain = array.read
    array.read = lambda *part: read.append(part) or plain(*part)
    for ranges in (QKV, ((0, 8),)):
        for layer in range(3):
            array[layer].part(1, ranges)
    assert read == [(2, QKV), (2, ((0, 8),))]
    array[0].forget()
    array[0].part(1, ((0, 8),))
    assert len(read) == 3


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("axis", [1, 2])
def test_eight_bits_by_part(folder, scheme, axis):
    """A share has the numbers and scales that the whole matrix has there."""
    whole = quantized.quantize(DRAWN, SCHEMES[scheme])
    found = quantized.quantize(stored(folder), SCHEMES[scheme])
    assert found.shape == whole.shape and found.dtype == whole.dtype
    ranges = QKV if axis == 2 else ((8, 16),)
    kept = [i for first, end in ranges for i in range(first, end)]

    def check(ours, along):
        pairs = {"array": (ours.array, whole.array), "scale": (ours.scale, whole.scale)}
        for (part, all_of_it), where in zip(pairs.values(), along, strict=True):
            wanted = all_of_it if where is None else np.take(all_of_it, kept, where)
            got = part.part(where, ranges if where is not None else ())
            np.testing.assert_array_equal(got.astype(np.float32), wanted.astype(np.float32))

    along = []
    found.by_axis(lambda _, where: along.append(where), axis)
    check(found, along)
    check(quantized.quantize(stored(folder), SCHEMES[scheme]), [None, None])
    fresh = quantized.quantize(stored(folder), SCHEMES[scheme])  # scales first
    np.testing.assert_array_equal(fresh.scale.part(), whole.scale)


def test_files_that_were_damaged_meanwhile(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "params")
    array = stored(tmp_path / "params")
    shutil.rmtree(tmp_path / "params" / "d")
    with pytest.raises(UserError, match="cannot read the parameters in"):
        array.part()
