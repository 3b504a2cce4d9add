"""Prompts as token ids: the condition, its file, the tokenizer, and the Python API on top."""

import dataclasses

import numpy as np
import pytest

import varjax
from tests import prompt_models_under_test as small
from tests.often import often
from varjax import Generator, conditions
from varjax.core.errors import UserError
from varjax.text import prompt_ids
from varjax.text.prompt_ids import PromptIds
from varjax.text.prompt_tokenizer import PromptTokenizer

RAGGED = [[5, 6, 8], [9], [1, 2, 3, 4]]


# --- the condition and its file -------------------------------------------------------------------


def test_padded_on_the_left():
    found = dataclasses.replace(PromptIds.of(RAGGED), slots=5).take(np.array([2, 0, 1, 1]))
    expected = [[0, 1, 2, 3, 4], [0, 0, 5, 6, 8], [0, 0, 0, 0, 9], [0, 0, 0, 0, 9]]
    np.testing.assert_array_equal(found["ids"], expected)
    np.testing.assert_array_equal(found["length"], [4, 3, 1, 1])
    assert found["ids"].dtype == found["length"].dtype == np.int32
    assert PromptIds.of(RAGGED).take([1])["ids"].shape == (1, 4)  # as many as the longest has


@pytest.mark.parametrize("prompts", [None, ["a", "ß", ""]])
def test_file_and_back(tmp_path, prompts):
    one = PromptIds.of(RAGGED, prompts)
    one.repeat(3).save(tmp_path / "ids.npz")
    found = prompt_ids.load(tmp_path / "ids.npz")
    assert found.describe() == one.describe() and found.captions == prompts


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"ids": [1, 2]}, "lens missing; needed are ids"),
        ({"other": [1]}, "ids and lens missing"),
        ({"ids": [1, 2], "lens": [3]}, "lens sums up to 3, ids has 2"),
        ({"ids": [[1, 2]], "lens": [2]}, "ids has shape"),
        ({"ids": [2**40, 2], "lens": [2]}, "more than 32 bits"),
        ({"ids": [1, 2], "lens": [1, 1], "prompts": ["a"]}, "prompts has 1 texts for 2"),
    ],
)
def test_files_that_cannot_be(tmp_path, arrays, message):
    np.savez(tmp_path / "ids.npz", **{name: np.array(a) for name, a in arrays.items()})
    with pytest.raises(UserError, match=f"ids.npz: .*{message}"):
        prompt_ids.load(tmp_path / "ids.npz")


# --- the tokenizer --------------------------------------------------------------------------------


def test_tokenizer(tmp_path):
    """Only what the text says: nothing in front, no padding, though the file asks for both."""
    found = small.tokenizer(tmp_path, "janus")
    assert found.ids("a red<|User|>") == [41, small.WORDS["␣"], 42, 10]
    assert found.id_of("<begin_of_image>") == 12


def test_no_tokenizer(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no tokenizer file .*tokenizer.json.*prompt_ids=FILE"):
        PromptTokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="janus-pro-1b is the name of a published model"):
        PromptTokenizer.of_checkpoint(None, "janus-pro-1b")
    pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra `text`)")
    for content in (b"{}", b"\xff", b"[1"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(UserError, match="cannot read .* as a file of the package tokenizers"):
            PromptTokenizer(tmp_path / "tokenizer.json")


# --- the Python API -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=often(("lumina",), small.CONFIGS))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return varjax.load(small.checkpoint_folder(family), "float32")


@pytest.mark.slow
def test_texts_and_their_ids_give_the_same_images(family, tmp_path):
    folder = small.with_tokenizer(family, tmp_path / "checkpoint")
    model, texts = varjax.load(folder, "float32"), ["a red apple", "two green pears. a"]
    tokenizer = PromptTokenizer.of_checkpoint(folder, "")
    ids = [model.config.encode_prompt(text, tokenizer) for text in texts]
    expected = varjax.generate(model, prompts=texts, seed=3)
    assert expected.shape == (2, *model.pixels, 3)
    np.testing.assert_array_equal(varjax.generate(model, prompt_ids=ids, seed=3), expected)


def test_prompts_of_unknown_words_are_named(family, tmp_path):
    model = varjax.load(small.with_tokenizer(family, tmp_path / "checkpoint"), "float32")
    prompts = ["一只猫", "a red apple", "", "一只 猫"]
    with pytest.warns(UserWarning) as caught:
        conditions.resolve(conditions.fitted(model, prompts=prompts), prompts=prompts)
    said = [str(warning.message).partition(" has no word")[0] for warning in caught]
    assert said == ["prompt 0 ('一只猫')", "prompt 3 ('一只 猫')"]


@pytest.mark.slow
def test_places_for_the_longest_prompt(family, model):
    """`generate` makes them, a `Generator` has the model's; the images are the same."""
    ids, longer = small.IDS[family], len(small.IDS[family]) + 1
    given = {"prompt_ids": [ids, ids[:1] + ids]}
    assert conditions.fitted(model, **given).config.prompt_tokens == longer
    expected = varjax.generate(model, **given, batch_size=1)
    few, many = (model.with_prompt_tokens(n) for n in (longer, longer + 3))
    assert many.geometry.schedule.condition == longer + 3
    found = Generator(many, batch_size=1)(**given)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert few.transformer.head.kernel[...] is model.transformer.head.kernel[...]


def test_too_few_places(family, model, monkeypatch):
    monkeypatch.setattr(Generator, "compile", lambda *_: pytest.fail("compiled"))
    ids = small.IDS[family]
    generator = Generator(model.with_prompt_tokens(len(ids) - 1), batch_size=1)
    message = (
        f"prompt 1 is the longest and has {len(ids)} token ids, the model is prepared for "
        f"{len(ids) - 1}: take model.with_prompt_tokens.{len(ids)}., or --prompt_tokens={len(ids)}"
    )
    with pytest.raises(UserError, match=message):
        generator(prompt_ids=[ids[:1] + ids[-3:], ids])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing given: .* draws from prompts or prompt_ids"),
        ({"prompts": ["a"], "prompt_ids": [[1, 2]]}, "prompts, prompt_ids given"),
        ({"prompts": "a"}, "give a list of texts"),
        ({"prompts": ["a"]}, "there is no tokenizer file"),
        ({"prompt_ids": []}, "give a list of lists of token ids"),
        ({"prompt_ids": [3]}, r"prompt_ids\[0\]=3: give a list of token ids"),
        ({"prompt_ids": [[0, 1], []]}, r"prompt_ids\[1\] is empty"),
        ({"prompt_ids": [[1.5, 2]]}, r"prompt_ids\[0\]\[0\]=1.5: it must be a whole number"),
        ({"prompt_ids": [[1, 80]]}, "prompt 0: prompt ids 80 are outside the vocabulary"),
        ({"prompt_ids": [[1] * 129]}, "prompt 0: .* takes at most 128"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_work_is_said_before_compiling(model, given, message, monkeypatch):
    monkeypatch.setattr(Generator, "compile", lambda *_: pytest.fail("compiled"))
    with pytest.raises(UserError, match=message):
        varjax.generate(model, **given)


def test_other_models_take_no_ids():
    with pytest.raises(UserError, match="prompt_tokens=9: VAR takes no token ids"):
        varjax.describe("var-d16", prompt_tokens=9)
    with pytest.raises(UserError, match="prompt_ids given: .* draws from labels"):
        conditions.check(varjax.describe("var-d16"), prompt_ids=[[1]])
    with pytest.raises(UserError, match="grid=3x2: the grid of VAR"):
        varjax.describe("var-d16", grid="3x2")
    with pytest.raises(UserError, match="grid='3x': write height x width, for example 3x2"):
        varjax.describe("lumina-mgpt-7b-512", grid="3x")
    with pytest.raises(UserError, match="grid and size .* exclude each other"):
        varjax.describe("lumina-mgpt-7b-512", grid=(3, 2), size="512")
