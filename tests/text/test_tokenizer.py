"""Texts to ids: the end token, cutting, files that are no tokenizer of this encoder."""

import pytest

from varjax.text.t5 import END, Tokenizer


def test_ids_end_with_the_end_token(spiece):
    tokens = Tokenizer(spiece, 128).encode("a red apple", 512)
    assert tokens.ids[-1] == END and END not in tokens.ids[:-1]
    assert len(tokens.ids) == tokens.full_length > 3


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_long_texts_are_cut_and_keep_the_end_token(spiece, limit):
    tokenizer = Tokenizer(spiece, 128)
    full, cut = (tokenizer.encode("a photo of a cat", n) for n in (512, limit))
    assert len(cut.ids) < cut.full_length == len(full.ids)
    assert cut.ids == [*full.ids[: limit - 1], END]
