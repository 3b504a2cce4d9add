"""Text features: what a batch gets, files there and back, what can be wrong with them."""

import chex
import numpy as np
import pytest

from varjax.core.errors import UserError
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


def test_there_and_back(tmp_path):
    found = _made(negative_kv=_rows(4), negative_lens=np.full(4, 1))
    found.save(tmp_path / "f.npz")
    again = features.load(tmp_path / "f.npz", 8, 512)
    assert again.describe() == found.describe() and again.text_maxlen == 512
    assert again.prompts == found.prompts


REFUSED = {
    "width": (dict(kv=_rows(27, 2048)), r"2048 wide, the model takes 8: encode"),
    "longest": (dict(kv=_rows(40), lens=[40]), "has 40 tokens, the model takes 32"),
    "no lens": (dict(lens=None), "lens missing; needed are kv"),
    "zero": (dict(lens=[27, 0]), r"lens\[1\] is 0"),
    "shape": (dict(kv=np.zeros((3, 3, 8))), r"kv has shape \(3, 3, 8\)"),
    "not finite": (dict(kv=np.full((27, 8), np.nan)), "kv holds values that are NaN"),
    "negative width": (dict(negative_kv=_rows(2, 9), negative_lens=[2]), "is not 8 wide as kv"),
    "flags": (dict(unconditional=[1, 0, 0, 0]), "unconditional has shape"),
    "long and empty": (dict(unconditional=[True] * 4), "true only for empty ones"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_refused(case, tmp_path):
    changes, message = REFUSED[case]
    entries = {"kv": _rows(27), "lens": LENS, **changes}
    np.savez(tmp_path / "f.npz", **{n: v for n, v in entries.items() if v is not None})
    with pytest.raises(UserError, match=f"text features .*f.npz: .*{message}"):
        features.load(tmp_path / "f.npz", 8, 32)
