"""Names and shapes of the published sizes: every name matches one rule, every parameter is filled
once. No weights, no arrays."""

import dataclasses

import pytest

from ported_weights.tables.janus import ORIGINAL, TRANSFORMERS
from ported_weights.tables.registry import RULE_TABLES
from tests import models_under_test as models
from tests import released_shapes
from tests.ported_weights.test_janus_transformers import READERS, renamed
from varjax.core.errors import UserError
from varjax.models import registry
from varjax.storage import parameters

# (name among the shapes, preset, part, options of its configuration, parameters)
NAMES = ("var-d16", "vqvae", "infinity_2b", "bsqvae_d14_f8_patchify", "GPT-B_c2i", "VQ-16")
NAMES += ("janus_pro_1b_generation_part", "lumina_mgpt_7b", "chameleon_vqgan")
RELEASED = [
    ("var-d16", "var-d16", "transformer", {}, 310_283_520),
    ("var-d36", "var-d36", "transformer", {}, 2_353_893_904),
    ("vqvae", "var-d16", "codec", {}, 108_948_355),
    ("infinity_2b", "infinity-2b", "transformer", {}, 2_204_564_032),
    ("infinity_8b", "infinity-8b", "transformer", {}, 8_375_791_824),
    ("bsqvae_d32_f16", "infinity-2b", "codec", {}, 110_118_051),
    ("bsqvae_d14_f8_patchify", "infinity-8b", "codec", {}, 81_624_209),
    ("GPT-B_c2i", "llamagen-b-256", "transformer", {}, 110_888_448),
    ("GPT-XXL_c2i", "llamagen-xxl-384", "transformer", {}, 1_410_972_672),
    ("GPT-3B_c2i", "llamagen-3b-384", "transformer", {}, 3_096_659_200),
    ("GPT-XL_t2i", "llamagen-t2i-xl-512", "transformer", {}, 777_923_840),
    ("VQ-16", "llamagen-b-256", "codec", {}, 71_883_403),
    ("VQ-8", "llamagen-b-256", "codec", {"ch_mult": (1, 2, 2, 4)}, 70_109_835),
    ("janus_pro_1b_generation_part", "janus-pro-1b", "transformer", {}, 1_485_053_952),
    ("janus_pro_7b_generation_part", "janus-pro-7b", "transformer", {}, 6_591_791_104),
    ("janus_pro_7b_generation_part", "janus-pro-7b", "codec", {}, 42_583_171),
    ("janus_pro_7b_generation_part", "janus-pro-7b", "codec", {"has_encoder": True}, 71_883_403),
    ("lumina_mgpt_7b", "lumina-mgpt-7b-768", "transformer", {}, 6_778_277_888),
    ("lumina_mgpt_34b", "lumina-mgpt-34b-512", "transformer", {}, 33_823_760_384),
    ("chameleon_vqgan", "lumina-mgpt-7b-768", "codec", {}, 41_457_795),
    ("chameleon_vqgan", "lumina-mgpt-7b-768", "codec", {"has_encoder": True}, 68_718_467),
]


def _check(name, preset, part, options, tensors=None) -> int:
    """Parameters of the module that these names fill. tensors: by default the published ones."""
    preset = registry.preset(preset)
    kind = registry.family(preset.family).parts[part]
    config = dataclasses.replace(preset.configs[part], **options)
    tensors = _published(preset.family, name) if tensors is None else tensors
    if part == "codec" and preset.family == "janus":
        own = (ORIGINAL.codec, TRANSFORMERS.codec)
        tensors = {n.removeprefix(o): t for n, t in tensors.items() for o in own if n.startswith(o)}
    if "lvl_1L" in tensors:
        tensors["lvl_1L"].value = lambda shape: config.schedule.scale_of_token[None]
    module = kind.abstract(config)
    released_shapes.check(RULE_TABLES[kind.name].rules(config, tensors), tensors, module)
    return parameters.count(module)


def _published(family: str, name: str) -> dict:
    path = models.FIXTURES.parent / family / "released_shapes.json.gz"
    return released_shapes.read_shapes(path, name)


# one transformer and one tokenizer of each family
OFTEN = [case for case in RELEASED if case[0] in NAMES and not case[3]]


@pytest.mark.parametrize(
    ("name", "preset", "part", "options", "count"),
    [case if case in OFTEN else pytest.param(*case, marks=pytest.mark.slow) for case in RELEASED],
)
def test_released_names_and_shapes(name, preset, part, options, count):
    assert _check(name, preset, part, options) == count


JANUS = [case for case in RELEASED if case[1].startswith("janus")]


@pytest.mark.parametrize("case", JANUS[::3], ids=str)
def test_names_of_the_package_transformers(case):
    *case, count = case
    tensors = {renamed(n): t for n, t in _published("janus", case[0]).items()}
    tensors |= {name: released_shapes.Shape((2, 2)) for name in READERS}
    assert _check(*case, tensors) == count


def test_tokenizers_without_wrappers():
    """Some releases have `encoder.conv_in.weight` for `encoder.conv_in.conv.weight`; not both."""
    name, preset, part, options, count = RELEASED[5]
    tensors = _published("infinity", name)
    bare = {n.replace(".conv.", ".").replace(".norm.", "."): t for n, t in tensors.items()}
    assert len(bare) == len(tensors) and set(bare) != set(tensors)
    assert _check(name, preset, part, options, bare) == count
    tensors["decoder.conv_in.bias"] = tensors["decoder.conv_in.conv.bias"]
    with pytest.raises(UserError, match="given twice: decoder/conv_in/bias by decoder.conv_in.bia"):
        _check(name, preset, part, options, tensors)
