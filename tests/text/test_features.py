"""Text features: what a batch gets, files there and back, what can be wrong with them."""

import chex
import numpy as np
import pytest

from varjax.errors import UserError
from varjax.text import features
from varjax.text.features import TextFeatures

LENS = (3, 1, 18, 5)


def _rows(count, width=8, seed=0):
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def _made(**changes) -> TextFeatures:
    entries = {"kv": _rows(sum(LENS)), "lens": np.array(LENS), "prompts": ("a", "", "b c", "ä d")}
    entries["unconditional"] = np.array([False, True, False, False])
    return TextFeatures(**{**entries, **changes})


def test_a_batch():
    found = _made()
    kv, starts = found.kv, np.cumsum(LENS) - LENS
    batch = found.take([2, 0, 1])
    chex.assert_shape(batch["kv"], (3, 32, 8))
    chex.assert_type(batch["kv"], np.float32)  # 18, in steps of 16
    assert batch["length"].tolist() == [18, 3, 1]
    chex.assert_type(batch["length"], np.int32)
    assert batch["unconditional"].tolist() == [False, False, True]
    for row, i in zip(batch["kv"], (2, 0, 1), strict=True):
        chex.assert_trees_all_equal(row[: LENS[i]], kv[starts[i] : starts[i] + LENS[i]])
        assert not row[LENS[i] :].any()
    assert set(batch) == {"kv", "length", "unconditional"}


def test_shapes_do_not_depend_on_the_images():
    found = _made(negative_kv=_rows(20), negative_lens=np.array([20]))
    shapes = [{k: v.shape for k, v in found.take([i]).items()} for i in range(4)]
    assert all(shape == shapes[0] for shape in shapes)
    assert shapes[0]["kv"] == shapes[0]["negative_kv"] == (1, 32, 8)


def test_padding_stops_at_what_the_model_takes():
    chex.assert_shape(_made(text_maxlen=20).take([0])["kv"], (1, 20, 8))


def test_negative_texts_of_every_prompt_or_one_for_all():
    own = np.array([1, 2, 3, 4])
    found = _made(negative_kv=_rows(10, seed=1), negative_lens=own)
    batch = found.take([3, 0])
    assert batch["negative_length"].tolist() == [4, 1]
    chex.assert_trees_all_equal(batch["negative_kv"][0, :4], found.negative_kv[6:])
    shared = _made(negative_kv=_rows(2, seed=1), negative_lens=np.array([2])).take([3, 0])
    assert shared["negative_length"].tolist() == [2, 2]
    chex.assert_trees_all_equal(shared["negative_kv"][0], shared["negative_kv"][1])


def test_repeat():
    found = _made().repeat(3)
    assert len(found) == 12 and found.numbers.tolist() == np.repeat(range(4), 3).tolist()
    assert found.captions[5:7] == ["", "b c"]
    chex.assert_trees_all_equal(found.take([7])["kv"], _made().take([2])["kv"])
    with pytest.raises(UserError, match="images per prompt=0"):
        _made().repeat(0)


def test_description_tells_texts_apart():
    found = _made()
    assert found.describe() == _made().describe()
    assert found.describe()["longest"] == 18 and found.describe()["tokens"] == sum(LENS)
    others = (
        found.repeat(2),
        _made(kv=found.kv * 2),
        _made(prompts=("a", "", "b c", "d")),
        _made(negative_kv=_rows(1), negative_lens=np.array([1])),
        _made(unconditional=None),
    )
    digests = {other.describe()["sha256"] for other in (found, *others)}
    assert len(digests) == 6


def test_there_and_back(tmp_path):
    found = _made(negative_kv=_rows(4), negative_lens=np.full(4, 1))
    found.save(tmp_path / "f.npz")
    again = features.load(tmp_path / "f.npz", 8, 512)
    assert again.describe() == found.describe() and again.text_maxlen == 512
    assert again.prompts == found.prompts


def test_files_from_elsewhere(tmp_path):
    """Two arrays are enough; half precision is widened."""
    kv = _rows(sum(LENS)).astype(np.float16)
    np.savez(tmp_path / "f.npz", kv=kv, lens=np.array(LENS, np.int64), more=np.ones(2))
    found = features.load(tmp_path / "f.npz")
    assert found.captions is None and found.negative_kv is None and not found.unconditional.any()
    chex.assert_trees_all_equal(found.kv, kv.astype(np.float32))


REFUSED = {
    "width": (dict(kv=_rows(27, 2048)), r"2048 wide \(flan-t5-xl\), the model takes 8: encode"),
    "longest": (dict(kv=_rows(40), lens=[40]), "has 40 tokens, the model takes 32"),
    "no lens": (dict(lens=None), "lens missing; needed are kv"),
    "sum": (dict(lens=[1, 2]), "lens sums up to 3, kv has 27 rows"),
    "zero": (dict(lens=[27, 0]), r"lens\[1\] is 0"),
    "types": (dict(lens=[13.0, 14.0]), "type float64: give a whole number"),
    "shape": (dict(kv=np.zeros((3, 3, 8))), r"kv has shape \(3, 3, 8\)"),
    "integers": (dict(kv=np.zeros((27, 8), int)), "type int64: give floats"),
    "not finite": (dict(kv=np.full((27, 8), np.nan)), "kv holds values that are NaN"),
    "half of a pair": (dict(negative_kv=_rows(2)), "belong together"),
    "negative width": (dict(negative_kv=_rows(2, 9), negative_lens=[2]), "is 9 wide, kv 8"),
    "negative count": (dict(negative_kv=_rows(3), negative_lens=[1, 2]), "each of the 4 prompts"),
    "prompts": (dict(prompts=["a"]), "prompts has 1 texts for 4 entries"),
    "flags": (dict(unconditional=[1, 0, 0, 0]), "unconditional has shape"),
    "long and empty": (dict(unconditional=[True] * 4), "prompt 0 is marked .* has 3 tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_refused(case, tmp_path):
    changes, message = REFUSED[case]
    entries = {"kv": _rows(27), "lens": LENS, **changes}
    np.savez(tmp_path / "f.npz", **{n: v for n, v in entries.items() if v is not None})
    with pytest.raises(UserError, match=f"text features .*f.npz: .*{message}"):
        features.load(tmp_path / "f.npz", 8, 32)


def test_no_file_and_no_archive(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        features.load(tmp_path / "f.npz")
    (tmp_path / "f.npz").write_bytes(b"PK\x03\x04 and nothing else")
    with pytest.raises(UserError, match="cannot read .* as an npz file"):
        features.load(tmp_path / "f.npz")
