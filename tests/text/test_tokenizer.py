"""Texts to ids: the end token."""

from varjax.text.t5 import END, Tokenizer


def test_ids_end_with_the_end_token(spiece):
    ids = Tokenizer(spiece, 128).ids("a red apple")
    assert ids[-1] == END and END not in ids[:-1] and len(ids) > 3
