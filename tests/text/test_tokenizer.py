"""Texts to ids: the end token, cutting, files that are no tokenizer of this encoder."""

import sys

import pytest

from tests import text_encoder_under_test as small
from varjax.errors import MissingExtra, UserError
from varjax.text.t5 import END, Tokenizer


def test_ids_end_with_the_end_token(spiece):
    tokens = Tokenizer(spiece, 128).encode("a red apple", 512)
    assert tokens.ids[-1] == END and END not in tokens.ids[:-1]
    assert len(tokens.ids) == tokens.full_length > 3


def test_case_and_words_matter_and_outer_spaces_do_not(spiece):
    tokenizer = Tokenizer(spiece, 128)
    ids = [tokenizer.encode(text, 512).ids for text in ("red  apple ", "red apple", "apple red")]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_long_texts_are_cut_and_keep_the_end_token(spiece, limit):
    tokenizer = Tokenizer(spiece, 128)
    full, cut = (tokenizer.encode("a photo of a cat", n) for n in (512, limit))
    assert len(cut.ids) < cut.full_length == len(full.ids)
    assert cut.ids == [*full.ids[: limit - 1], END]


def test_text_of_exactly_the_limit_is_not_cut(spiece):
    tokenizer = Tokenizer(spiece, 128)
    full = tokenizer.encode("a photo of a cat", 512)
    assert tokenizer.encode("a photo of a cat", len(full.ids)) == full


@pytest.mark.parametrize("vocab_size", [64, 32128])
def test_another_vocabulary(spiece, vocab_size):
    with pytest.raises(UserError, match=f"pieces, the encoder one of {vocab_size}"):
        Tokenizer(spiece, vocab_size)


FILES = {
    "empty": b"",
    "web page": b"<!doctype html><html>not found</html>",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 791656\n",
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_model(spiece, tmp_path, case):
    (tmp_path / "spiece.model").write_bytes(FILES[case])
    with pytest.raises(UserError, match="spiece.model .*published beside the weights"):
        Tokenizer(tmp_path / "spiece.model", 128)


def test_truncated_model(spiece, tmp_path):
    (tmp_path / "spiece.model").write_bytes(spiece.read_bytes()[:-100])
    with pytest.raises(UserError, match="published beside the weights"):
        Tokenizer(tmp_path / "spiece.model", 128)


def test_no_file(spiece, tmp_path):
    with pytest.raises(UserError, match="there is no tokenizer file"):
        Tokenizer(tmp_path / "spiece.model", 128)


def test_other_special_ids(tmp_path):
    path = small.write_tokenizer(tmp_path / "other.model", bos_id=1, eos_id=2, unk_id=0)
    with pytest.raises(UserError, match="end token has the id 2 instead of 1"):
        Tokenizer(path, 128)


def test_missing_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingExtra, match=r"pip install -e '.\[text\]'"):
        Tokenizer(tmp_path / "spiece.model", 128)
