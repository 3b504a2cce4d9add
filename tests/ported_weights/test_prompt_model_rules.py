"""Rule tables of Janus-Pro, Lumina-mGPT and their image tokenizers, and the conversion of both."""

import dataclasses
import json
import shutil
from pathlib import Path

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ported_weights import rules
from ported_weights.configurations import PublishedModel
from ported_weights.convert import convert
from ported_weights.readers import sources
from ported_weights.tables.janus import ORIGINAL
from ported_weights.tables.registry import RULE_TABLES
from tests import models_under_test as models
from tests import released_shapes
from varjax.errors import UserError
from varjax.models import registry
from varjax.nn import parameters
from varjax.storage import checkpoint

CODEC = ORIGINAL.codec
JANUS, LUMINA = models.JANUS_FIXTURES, models.LUMINA_FIXTURES
WEIGHTS = {"janus_tiny": JANUS / "janus_tiny", "lumina_tiny": LUMINA / "lumina_tiny.safetensors"}
LUMINA_CONFIG = json.loads((LUMINA / "lumina_tiny_config.json").read_text())


def tensors(name: str) -> dict[str, np.ndarray]:
    """{published name: array} of a fixture."""
    return {n: np.array(t.read()) for n, t in sources.open_source(WEIGHTS[name]).tensors.items()}


def converted(tmp_path, published: PublishedModel) -> tuple[dict, dict, str]:
    """Parts and description of the checkpoint, read from disk, and what the command says."""
    lines = []
    convert(published, str(tmp_path / "out"), say=lines.append)
    return *checkpoint.load(tmp_path / "out", registry.CATALOGUE), "\n".join(lines)


def refused(tmp_path, published: PublishedModel, match: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=match):
        convert(published, str(tmp_path / "out"), say=lambda line: None)
    assert sorted(tmp_path.rglob("*")) == before


def janus(tmp_path, name: str = "janus", **arrays) -> PublishedModel:
    """Weights of one file in a folder of this name; None takes a tensor out, an array puts one in.
    `__` stands for a dot."""
    changed = {name.replace("__", "."): array for name, array in arrays.items()}
    found = {n: a for n, a in (tensors("janus_tiny") | changed).items() if a is not None}
    folder = tmp_path / name
    folder.mkdir()
    save_file(found, folder / "model.safetensors")
    return dataclasses.replace(models.janus_files(), source=str(folder))


def lumina(tmp_path, config: dict | None = None, **changes) -> PublishedModel:
    """With another configuration."""
    if config is not None:
        changes["config"] = str(tmp_path / "given.json")
        (tmp_path / "given.json").write_text(json.dumps(config))
    return dataclasses.replace(models.lumina_files(), **changes)


# --- names and shapes of the published sizes ------------------------------------------------------

# (file, its model, preset, part, tensors taken, parameters taken, parameters of the file); what the
# published counts have beside ours: Janus's head for words (102400 rows) and the encoder of VQ-16,
# Lumina's rows of the head for other tokens than those of images
RELEASED = [
    ("janus", "janus_pro_1b_generation_part", "janus-pro-1b", 227, 1_485_053_952, 1_766_652_555),
    ("janus", "janus_pro_7b_generation_part", "janus-pro-7b", 281, 6_591_791_104, 7_083_104_907),
    ("lumina", "lumina_mgpt_7b", "lumina-mgpt-7b-512", 419, 6_778_277_888, 7_013_158_912),
    ("lumina", "lumina_mgpt_7b", "lumina-mgpt-7b-768", 419, 6_778_277_888, 7_013_158_912),
    ("lumina", "lumina_mgpt_7b", "lumina-mgpt-7b-1024", 419, 6_778_277_888, 7_013_158_912),
    ("lumina", "lumina_mgpt_34b", "lumina-mgpt-34b", 627, 33_823_760_384, 34_293_522_432),
]


@pytest.mark.parametrize(
    ("family", "name", "preset", "taken", "count", "whole"), RELEASED, ids=[r[2] for r in RELEASED]
)
def test_released_transformers(family, name, preset, taken, count, whole):
    """Every released name matches one rule, and all full-size parameters are filled once."""
    preset = next(p for n, p in registry.PRESETS.items() if n.startswith(preset))
    part, config = registry.family(family).parts["transformer"], preset.configs["transformer"]
    shapes = models.FIXTURES.parent / family / "released_shapes.json.gz"
    given = released_shapes.read(shapes, name)
    module = part.abstract(config)
    table = RULE_TABLES[part.name].rules(config, given)
    assert released_shapes.check(table, given, module) == taken
    assert parameters.count(module) == count
    assert sum(int(np.prod(t.shape)) for t in given.values()) == whole
    width = config.hidden_size
    if family == "janus":
        assert whole == count + 102400 * width + 71_883_403  # of VQ-16
    else:
        assert whole == count + (65536 - 8192) * width


@pytest.mark.parametrize("has_encoder", [False, True])
@pytest.mark.parametrize("family", ["janus", "lumina"])
def test_released_tokenizers(family, has_encoder):
    """With their encoders, which generation does not need, and without."""
    name = {"janus": "janus_pro_7b_generation_part", "lumina": "chameleon_vqgan"}[family]
    given = released_shapes.read(models.FIXTURES.parent / family / "released_shapes.json.gz", name)
    if family == "janus":
        given = {n.removeprefix(CODEC): t for n, t in given.items() if n.startswith(CODEC)}
    preset = registry.preset({"janus": "janus-pro-7b", "lumina": "lumina-mgpt-7b-768"}[family])
    config = preset.configs["codec"]
    assert not config.has_encoder
    part = registry.family(family).parts["codec"]
    module = part.abstract(dataclasses.replace(config, has_encoder=has_encoder))
    table = RULE_TABLES[part.name].rules(module.config, given)
    taken = released_shapes.check(table, given, module)
    counts = {"janus": (42_583_171, 71_883_403), "lumina": (41_457_795, 68_718_467)}[family]
    assert parameters.count(module) == counts[has_encoder]
    assert taken == {"janus": (197, 343), "lumina": (167, 293)}[family][has_encoder]


# --- what goes where ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.PROMPT_MODELS)
def test_layers(name):
    """Queries, keys and values side by side, gates before what they let through."""
    given, found = tensors(name), parameters.named(models.fixture_model(name).transformer)
    prefix = {"janus_tiny": "language_model.model.", "lumina_tiny": "model."}[name]
    for i in range(3):
        own = {n.split(f"layers.{i}.")[1]: a for n, a in given.items() if f"layers.{i}." in n}
        qkv = [own[f"self_attn.{x}_proj.weight"].T for x in "qkv"]
        gate_up = [own[f"mlp.{x}_proj.weight"].T for x in ("gate", "up")]
        for target, parts in (("qkv", qkv), ("gate_up", gate_up)):
            expected = np.float32(np.concatenate(parts, axis=1))
            chex.assert_trees_all_equal(np.float32(found[f"blocks/{target}/kernel"][i]), expected)
    embedding = np.float32(given[f"{prefix}embed_tokens.weight"])
    chex.assert_trees_all_equal(np.float32(found["token_embedding"]), embedding)


def test_grouped_heads():
    """The 34B family's options: 8 query heads, 4 of keys and values, two sets of norm weights."""
    content = json.loads((LUMINA / "lumina_swin_config.json").read_text())
    own = {"units": [1, 1], "prompt_tokens": 8, "num_codes": 16, "first_image": 4}
    own |= {"image_start": 50, "new_line": 51, "size_zero": 52}
    part = registry.family("lumina").parts["transformer"]
    config = part.read({**content, **own})
    given = sources.open_source(LUMINA / "lumina_swin.safetensors").tensors
    table = RULE_TABLES[part.name].rules(config, given)
    module, placement = rules.apply(table, given, part.abstract(config))
    found = parameters.named(module)
    q, k, v = (given[f"model.layers.1.self_attn.{x}_proj.weight"].read().T for x in "qkv")
    chex.assert_shape([q, k], [(48, 48), (48, 24)])
    chex.assert_trees_all_equal(found["blocks/qkv/kernel"][1], np.concatenate([q, k, v], axis=1))
    norm = given["model.layers.1.self_attn.k_norm.bias"].read()
    chex.assert_trees_all_equal(found["blocks/k_norm/bias"][1], norm)
    assert placement.ignored == [("84 of 100 rows of lm_head.weight", "tokens that no image has")]


def test_columns_of_the_head_are_codes():
    """Column v is the row of the token whose name says v."""
    head = parameters.named(models.fixture_model("lumina_tiny").transformer)["head/kernel"]
    rows = np.float32(tensors("lumina_tiny")["lm_head.weight"])
    names = LUMINA_CONFIG["image_vocab"]
    for code, name in ((0, "IMGIMGAZ"), (7, "IMGIMGHZ"), (10, "IMGIMGBAZ"), (127, "IMGIMGBCHZ")):
        chex.assert_trees_all_equal(np.float32(head)[:, code], rows[names[name]])


# --- one folder, other files ----------------------------------------------------------------------


def test_one_folder_holds_a_whole_janus(tmp_path):
    """What reads pictures and what speaks is ignored and counted, and so is VQ-16's encoder."""
    ones = np.ones((2, 2), np.float32)
    extra = {f"vision_model__blocks__{i}__weight": ones for i in range(9)}
    extra |= {"aligner__layers__0__weight": ones, "gen_vision_model__encoder__conv_in__bias": ones}
    extra["language_model__model__layers__0__self_attn__rotary_emb__inv_freq"] = ones
    parts, described, said = converted(tmp_path, janus(tmp_path, **extra))
    expected = models.fixture_model("janus_tiny")
    for name, part in parts.items():
        ours, theirs = parameters.named(part), parameters.named(expected.parts[name])
        assert list(ours) == list(theirs)
        for leaf in ours:
            chex.assert_trees_all_equal(np.float32(ours[leaf]), np.float32(theirs[leaf]))
    assert "ignored 10 tensors, aligner.layers.0.weight to vision_model" in said
    assert "the network that reads pictures" in said and "the encoder: generation only" in said
    assert "ignored language_model.lm_head.weight: the head for words" in said
    assert [s["part"] for s in described["sources"]] == ["transformer", "codec"]
    assert "prompt_tokenizer" not in {path.name for path in (tmp_path / "out").iterdir()}


def test_a_tokenizer_of_its_own(tmp_path):
    """VQ-16 in a file of its own, with or without the prefix; the folder then need not have it."""
    whole = tensors("janus_tiny")
    arrays = {n.removeprefix(CODEC): a for n, a in whole.items() if n.startswith(CODEC)}
    save_file(arrays, tmp_path / "vq.safetensors")
    rest = {n.replace(".", "__"): None for n in whole if n.startswith(CODEC)}
    published = janus(tmp_path, **rest)
    refused(tmp_path, published, "has no image tokenizer .names that begin with gen_vision_model")
    separate = dataclasses.replace(published, tokenizer_source=str(tmp_path / "vq.safetensors"))
    parts, _, _ = converted(tmp_path, separate)
    expected = parameters.named(models.fixture_model("janus_tiny").codec)
    chex.assert_trees_all_equal(
        parameters.named(parts["codec"])["embedding"], expected["embedding"]
    )


def test_the_tokenizer_of_prompts_is_kept(tmp_path):
    published, content = janus(tmp_path), {"model": {"type": "BPE", "vocab": {}}}
    (tmp_path / "janus" / "tokenizer.json").write_text(json.dumps(content))
    _, described, said = converted(tmp_path, published)
    kept = tmp_path / "out" / "prompt_tokenizer" / "tokenizer.json"
    assert json.loads(kept.read_text()) == content and "tokenizer of prompts: " in said
    assert list(described["beside"]) == ["prompt_tokenizer/tokenizer.json"]
    assert described["sources"][-1]["part"] == "prompt_tokenizer"
    convert(published, str(tmp_path / "out"), overwrite=True, say=lambda line: None)
    assert kept.is_file()
    # another one, and one that is none
    (tmp_path / "mine.json").write_text(json.dumps(content | {"version": "1.0"}))
    mine = dataclasses.replace(published, prompt_tokenizer_source=str(tmp_path / "mine.json"))
    convert(mine, str(tmp_path / "out"), overwrite=True, say=lambda line: None)
    assert json.loads(kept.read_text())["version"] == "1.0"
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "mine.json").write_text("{}")
    refused(tmp_path, mine, "mine.json is no tokenizer.json")


# --- configurations -------------------------------------------------------------------------------


def test_sizes_follow_the_context():
    """Small models whose context has no room for the released size get the largest square."""
    assert models.fixture_model("janus_tiny").config.grid == (21, 21)  # 32 + 441 of 512
    assert models.fixture_model("lumina_tiny").config.units == (6, 6)  # 70 + 12 * 13 of 256
    described = models.fixture_model("lumina_tiny").metadata
    assert described["sampling"]["top_k"] == 128 and described["sampling"]["cfg"] == 4.0


def test_a_size_of_ones_own(tmp_path):
    parts, _, _ = converted(tmp_path, lumina(tmp_path, {**LUMINA_CONFIG, "units": [3, 2]}))
    assert parts["transformer"].config.grid == (6, 4)


# --- what does not fit ----------------------------------------------------------------------------


def test_checkpoints_that_do_not_draw(tmp_path):
    """A model that reads pictures, one of text alone, and an image tokenizer."""
    drawing = [n for n in tensors("janus_tiny") if n.startswith("gen_")]
    reader = janus(tmp_path, **{n.replace(".", "__"): None for n in drawing})
    match = r"lacks the embedding of image tokens \(gen_embed.weight\), the head.*only reads"
    refused(tmp_path, reader, match)
    save_file({"vision_model.a": np.ones(2, "f4")}, tmp_path / "vision.safetensors")
    vision = dataclasses.replace(reader, source=str(tmp_path / "vision.safetensors"))
    refused(tmp_path, vision, "lacks the language model .*it does not draw pictures")
    arrays = load_file(WEIGHTS["lumina_tiny"])
    text = {n: a for n, a in arrays.items() if "_norm." not in n}
    save_file(text, tmp_path / "llama.safetensors")
    llama = lumina(tmp_path, source=str(tmp_path / "llama.safetensors"))
    refused(tmp_path, llama, "lacks Chameleon's norm of queries and keys")
    codec = lumina(tmp_path, source=str(LUMINA / "lumina_tiny_vqgan.ckpt"))
    refused(tmp_path, codec, "looks like Chameleon tokenizer weights, not Lumina-mGPT transformer")
    # a language model and a tokenizer of images, and nothing that draws
    images = [n for n in drawing if not n.startswith(CODEC)]
    no_head = janus(tmp_path, "no_head", **{n.replace(".", "__"): None for n in images})
    refused(
        tmp_path, no_head, r"lacks the embedding of image tokens \(gen_embed.weight\), the head"
    )


def test_an_image_of_one_token(tmp_path):
    """Its default could never be drawn."""
    files, path = models.janus_files(), tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(Path(files.config).read_text()) | {"grid": [1, 1]}))
    one = dataclasses.replace(files, config=str(path))
    refused(tmp_path, one, "images of 1x1 tokens: at least 2")


def test_without_a_tokenizer(tmp_path):
    match = "--tokenizer_source is required.*published for Lumina: vqgan.ckpt of Meta's Chameleon"
    refused(tmp_path, lumina(tmp_path, tokenizer_source=None), match)


def test_files_of_other_families(tmp_path):
    given = str(tmp_path / "names.json")
    janus = dataclasses.replace(models.janus_files(), vocabulary=given)
    refused(tmp_path, janus, "--vocabulary: Janus has no names of image tokens: drop it")
    other = models.llamagen_files("gpt_c2i.pt")
    other = dataclasses.replace(other, prompt_tokenizer_source=given)
    refused(tmp_path, other, "--prompt_tokenizer_source: LlamaGen takes no token ids: drop it")
    encoder = dataclasses.replace(models.janus_files(), text_encoder_source=str(tmp_path))
    refused(tmp_path, encoder, "--text_encoder_source: Janus reads texts itself, as token ids")
    words = "looks like {} transformer weights, not {} transformer weights: choose its --model"
    swapped = dataclasses.replace(models.janus_files(), source=models.lumina_files().source)
    refused(tmp_path, swapped, words.format("Lumina-mGPT", "Janus-Pro"))
    swapped = dataclasses.replace(models.lumina_files(), source=models.janus_files().source)
    refused(tmp_path, swapped, words.format("Janus-Pro", "Lumina-mGPT"))


LUMINA_CASES = {
    "depth": ({"num_hidden_layers": 4}, "missing: model.layers.3.self_attn.q_proj.weight"),
    "words": ({"vocab_size": 280}, r"embed_tokens.weight is \[260, 64\], but \[280, 64\]"),
    "heads": ({"num_key_value_heads": 2}, r"k_proj.weight is \[64, 64\], .*instead of \[64, 32\]"),
    "sets of norms": ({"model_parallel_size": 2}, r"q_norm.weight is \[1, 16\], but \[2, 16\]"),
    "feed-forward": ({"intermediate_size": 96}, r"gate_proj.*instead of \[64, 96\]"),
}


@pytest.mark.parametrize("case", LUMINA_CASES)
def test_another_size(tmp_path, case):
    changes, match = LUMINA_CASES[case]
    config = {**LUMINA_CONFIG, "model": {**LUMINA_CONFIG["model"], **changes}}
    refused(tmp_path, lumina(tmp_path, config), match)


def test_other_codes(tmp_path):
    config = {**LUMINA_CONFIG, "vqgan": {**LUMINA_CONFIG["vqgan"], "n_embed": 64}}
    refused(tmp_path, lumina(tmp_path, config), r"128 .* and 64 for the codec.*\(\S+\.json\)$")


def test_a_tokenizer_that_is_no_configuration(tmp_path):
    """`vq_tiny`, or what describes the codes, of another type."""
    given = json.loads((WEIGHTS["janus_tiny"] / "config.json").read_text())
    (tmp_path / "given.json").write_text(json.dumps(given | {"vq_tiny": [1]}))
    published = dataclasses.replace(models.janus_files(), config=str(tmp_path / "given.json"))
    refused(tmp_path, published, r"vq_tiny is \[1\], it must hold names and values")
    refused(tmp_path, lumina(tmp_path, LUMINA_CONFIG | {"vqgan": [1]}), "expected names and values")


def test_absent_shards(tmp_path):
    folder = shutil.copytree(WEIGHTS["janus_tiny"], tmp_path / "janus")
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    published = dataclasses.replace(models.janus_files(), source=str(folder))
    refused(tmp_path, published, "shards that are not there: pytorch_model-00002-of-00002.bin")
