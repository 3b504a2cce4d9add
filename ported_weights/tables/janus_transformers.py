"""The config.json of a Janus-Pro that was saved by the package transformers (its class
JanusForConditionalGeneration), in the names of the original's.

Such files leave out what has the default value of its class, and may leave out all sizes. What is
left out follows from the shapes of the weights, or is the default of transformers.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ported_weights.readers.sources import Source, Tensor
from ported_weights.tables.janus import TRANSFORMERS
from varjax.core.errors import about, show
from varjax.models.janus import OWN, PAD, JanusConfig
from varjax.storage.manifest import read_json

KIND = "janus"  # model_type of such a file; the original's is multi_modality
# Names of the language model's section that the original has, too.
LANGUAGE = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    " rms_norm_eps rope_theta rope_scaling max_position_embeddings vocab_size hidden_act"
    " attention_bias mlp_bias head_dim"
).split()
# What transformers takes where the file has nothing, and what no shape tells.
DEFAULTS = {"num_attention_heads": 32, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
DEFAULT_SIDES = {"image_size": 384, "patch_size": 16}
KINDS = {"hidden_act": "gelu", "num_hidden_layers": 2}  # of the aligner, as in all released models
VQ_NAMES = {  # in the section of the image tokenizer: the tokenizer's own
    "base_channels": "ch",
    "channel_multiplier": "ch_mult",
    "num_res_blocks": "num_res_blocks",
    "latent_channels": "z_channels",
}


def original(
    given: Mapping, file: Path, weights: Callable[[], Source], say: Callable[[str], None]
) -> Mapping:
    """Return what the configuration `file` holds in the original's names. A file that is not of
    this kind is returned as it is, and no weights are opened. `UserError` if a section is no
    section, or the model is none of Janus-Pro's kind."""
    if given.get("model_type") != KIND:
        return given
    tensors, inside = weights().tensors, JanusConfig.inside
    with about(file):
        text, vq = inside(given, "text_config"), inside(given, "vq_config")
        for name, wanted in KINDS.items():
            if vq.get(name, wanted) != wanted:
                raise JanusConfig.wrong(f"vq_config: {name} must be {wanted!r}")
        language = _language(text, tensors)
        own = _own(given, file, language.get("vocab_size"), say)
        if text.get("num_attention_heads") is None:
            heads = language["num_attention_heads"]
            say(f"{file} has no num_attention_heads: taking the default of transformers, {heads}")
        found = {"language_config": language, **_generation(vq, tensors), **own}
        return {**found, "vq_tiny": _tokenizer(vq, tensors) | inside(given, "vq_tiny")}


def _language(text: Mapping, tensors: Mapping[str, Tensor]) -> dict:
    """Return the configuration of the language model."""
    prefix = TRANSFORMERS.language
    layers = re.compile(rf"{re.escape(prefix)}layers\.([0-9]{{1,9}})\.")
    numbers = [int(match[1]) for match in map(layers.match, tensors) if match]
    table, gate = f"{prefix}embed_tokens.weight", f"{prefix}layers.0.mlp.gate_proj.weight"
    told = {
        "vocab_size": _size(tensors, table, 0),
        "hidden_size": _size(tensors, table, 1),
        "intermediate_size": _size(tensors, gate, 0),
        "num_hidden_layers": max(numbers) + 1 if numbers else None,
    }
    found = DEFAULTS | _stated(told) | _stated({name: text.get(name) for name in LANGUAGE})
    rope = JanusConfig.inside({"rope": text.get("rope_parameters") or {}}, "rope")
    if rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = rope  # refused, as in the original's file
    return found | _stated({"rope_theta": rope.get("rope_theta")})


def _generation(vq: Mapping, tensors: Mapping[str, Tensor]) -> dict:
    """Return the sections about image tokens: how many, how wide, and the head's width."""
    codes = f"{TRANSFORMERS.embedding}.weight"
    count = vq.get("num_embeddings", _size(tensors, codes, 0))
    width = vq.get("embed_dim", _size(tensors, codes, 1))
    inner = _size(tensors, f"{TRANSFORMERS.head[0]}.weight", 0)
    sections = {
        "gen_head_config": {"image_token_embed": inner, "image_token_size": count},
        "gen_vision_config": {"image_token_size": count, "n_embed": width},
        "gen_aligner_config": {"input_dim": width},
    }
    return {name: {"params": _stated(params)} for name, params in sections.items()}


def _tokenizer(vq: Mapping, tensors: Mapping[str, Tensor]) -> dict:
    """Return the sizes of the image tokenizer; widths of levels go from the finest up."""
    prefix, widths = TRANSFORMERS.codec, []
    level = prefix + "decoder.up.{}.block.{}.conv1.weight"
    while width := _size(tensors, level.format(len(widths), 0), 0):
        widths.insert(0, width)
    blocks = sum(level.format(0, number) in tensors for number in range(len(tensors)))
    told = {"z_channels": _size(tensors, f"{prefix}post_quant_conv.weight", 0)}
    told["num_res_blocks"] = blocks - 1 if blocks else None  # the decoder's levels have one more
    if widths and not {"base_channels", "channel_multiplier"} & vq.keys():
        told["ch"] = math.gcd(*widths)
        told["ch_mult"] = [width // told["ch"] for width in widths]
    return _stated(told) | _stated({ours: vq.get(name) for name, ours in VQ_NAMES.items()})


def _own(given: Mapping, file: Path, words: object, say: Callable[[str], None]) -> dict:
    """Return the entries with names of ours: the grid and the id of padding.

    words: number of token ids. A vocabulary without the released padding needs another one, which
    no file may name.
    """
    found = {}
    vision = {} if "grid" in given else JanusConfig.inside(given, "vision_config")
    if DEFAULT_SIDES.keys() & vision.keys():
        sides = {name: vision.get(name, default) for name, default in DEFAULT_SIDES.items()}
        for name, side in sides.items():
            if type(side) is not int or side < 1:
                problem = f"vision_config: {name} is {show(side)}, it must be one size"
                raise JanusConfig.wrong(problem)
        found["grid"] = [sides["image_size"] // sides["patch_size"]] * 2
    beside = file.parent / "generation_config.json"
    generation = read_json(beside) if beside.is_file() else {}
    for section in (given.get("text_config"), generation):
        if isinstance(section, Mapping) and section.get("pad_token_id") is not None:
            found["pad_id"] = section["pad_token_id"]
    found |= {name: given[name] for name in OWN if name in given}
    if "pad_id" not in found and isinstance(words, int) and words <= PAD:
        found["pad_id"] = 0
        say(f"{file} has no pad_token_id: padding of unconditional prompts is id 0")
    return _stated(found)


def _stated(values: Mapping) -> dict:
    """Return the entries that have a value."""
    return {name: value for name, value in values.items() if value is not None}


def _size(tensors: Mapping[str, Tensor], name: str, axis: int) -> int | None:
    """Return the size of an axis of a tensor; None if there is none."""
    shape = tensors[name].shape if name in tensors else ()
    return shape[axis] if axis < len(shape) else None
