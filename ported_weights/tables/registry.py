"""Register of the parts that can be converted: rule tables, and defaults of custom models."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ported_weights.readers.sources import Tensor
from ported_weights.rules import Entry
from ported_weights.tables import (
    codecs,
    evaluation,
    janus,
    janus_transformers,
    llamagen,
    lumina,
    transformers,
)
from varjax.models import registry


@dataclass(frozen=True)
class RuleTable:
    """Signature and rules of one part's weights.

    Attributes:
      what: the part in words.
      flag: the flag that names its weights.
      signature: names of tensors. The part's weights have some of them, those of other parts none.
      rules: function (configuration, names in the file) that returns the table's entries.
      storage_dtype: function of the tensors that returns the type to store them as, unless the user
        asks for one; None: types stay.
      ignored: what the ignored tensors are, in words. They are then counted; otherwise listed.
      needed: function (names in the file) that returns (name, what it belongs to) of tensors
        without which the weights draw no pictures, as those of a model that only reads.
    """

    what: str
    flag: str
    signature: Sequence[str]
    rules: Callable[[object, Collection[str]], Sequence[Entry]]
    storage_dtype: Callable[[Mapping[str, Tensor]], str] | None = None
    ignored: str = ""
    needed: Callable[[Collection[str]], Sequence[tuple[str, str]]] = lambda names: ()


# By the name of the `Part`. A file may look like two parts; messages name the first. Chameleon's
# tokenizer has all names that VAR's is known by, so it comes before that.
RULE_TABLES = {
    "VQ": RuleTable(
        "VQ tokenizer",
        "--tokenizer_source",
        (
            "encoder.conv_blocks.0.res.0.conv1.weight",
            "decoder.conv_blocks.0.res.0.conv1.weight",
            "decoder.up.0.upsample.conv.weight",  # in transformers; others end with level 0
        ),
        llamagen.tokenizer_rules,
    ),
    "VAR": RuleTable(
        "VAR transformer", "--source", ("pos_1LC", "class_emb.weight"), transformers.var_rules
    ),
    "ChameleonVQ": RuleTable(
        "Chameleon tokenizer",
        "--tokenizer_source",
        ("decoder.mid.attn_1.q.weight", "encoder.mid.attn_1.q.weight"),
        lambda config, names: codecs.vq_table(config, codecs.vq_rules),
    ),
    "VQVAE": RuleTable(
        "VQVAE tokenizer",
        "--tokenizer_source",
        ("quantize.embedding.weight", "quant_conv.weight", "post_quant_conv.weight"),
        codecs.vqvae_rules,
    ),
    "Infinity": RuleTable(
        "Infinity transformer",
        "--source",
        ("cfg_uncond", "text_norm.weight", "text_proj_for_ca.0.weight"),
        transformers.infinity_rules,
    ),
    "BSQVAE": RuleTable(
        "BSQ-VAE tokenizer",
        "--tokenizer_source",
        (
            "quantizer.lfq.mask",
            "quantize.lfq.mask",
            "encoder.conv_in.conv.weight",
            "decoder.conv_in.conv.weight",
        ),
        codecs.bsq_rules,
    ),
    "LlamaGen": RuleTable(
        "LlamaGen transformer",
        "--source",
        ("tok_embeddings.weight", "cls_embedding.embedding_table.weight"),
        llamagen.transformer_rules,
    ),
    "Janus": RuleTable(
        "Janus-Pro transformer",
        "--source",
        (
            "gen_head.vision_head.weight",
            "gen_embed.weight",
            "generation_head.vision_head.weight",
            "generation_embeddings.weight",
        ),
        janus.transformer_rules,
        needed=janus.needed,
    ),
    "Lumina": RuleTable(
        "Lumina-mGPT transformer",
        "--source",
        ("model.layers.0.self_attn.q_norm.weight",),
        lumina.transformer_rules,
        needed=lambda names: lumina.NEEDED,
    ),
    "T5": RuleTable(
        "text encoder",
        "--text_encoder_source",
        ("encoder.final_layer_norm.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"),
        lambda config, names: transformers.t5_rules(names),
        transformers.t5_storage_dtype,
        "of the decoder and repeated ones",
    ),
    "Inception": RuleTable(
        "Inception network of FID",
        "--source of --model=inception-fid",
        ("Mixed_7c.branch_pool.conv.weight", "Conv2d_1a_3x3.conv.weight"),
        evaluation.inception_rules,
        lambda tensors: "float32",
        "counters of training steps",
    ),
    "LPIPS": RuleTable(
        "LPIPS network",
        "--source of --model=lpips-alex or lpips-vgg",
        ("features.0.weight",),
        lambda config, names: evaluation.LPIPS_RULES,
        lambda tensors: "float32",
        "of the classifier",
    ),
}


@dataclass(frozen=True)
class CustomDefaults:
    """Defaults of a family's `*-custom` models, and what its published folders hold beside the
    transformer's weights.

    Attributes:
      tokenizer: function of the transformer's arguments that returns the arguments of the published
        tokenizer, and what that is in words.
      sampling: function of the transformer's configuration that returns recommended sampling.
      tokenizer_files: names of the published tokenizers, for messages.
      adapt: function (codec's configuration, transformer's, say) that returns the codec's
        configuration under the transformer's; `UserError` if that is impossible.
      is_whole: whether a configuration file describes the whole model, as a published config.json
        does, which is then read where none is given; otherwise it may hold several configurations,
        one of which is chosen.
      translate: function (what a configuration file of a whole model holds, its path, a function
        that opens the weights, say) that returns it in the original's names, with what is left out
        and must not have the released value.
      codec_prefixes: what may be before the names of the image tokenizer, if the transformer's
        files hold it.
      prompt_tokenizers: names under which tokenizers of prompts lie beside weights, best first.
      complete: function (transformer's configuration, file with the vocabulary or None, folders)
        that returns the configuration with what only other files say. None: nothing is elsewhere.
    """

    tokenizer: Callable[[Mapping], tuple[dict, str]]
    sampling: Callable[[object], Mapping]
    tokenizer_files: str = ""
    adapt: Callable = lambda codec, transformer, say: codec
    is_whole: bool = False
    translate: Callable = lambda given, file, weights, say: given
    codec_prefixes: Sequence[str] = ()
    prompt_tokenizers: Sequence[str] = ()
    complete: Callable | None = None


# By the name of the `Family`.
CUSTOM_DEFAULTS = {
    "var": CustomDefaults(
        tokenizer_files="vae_ch160v4096z32.pth",
        tokenizer=lambda given: ({}, "4096 codes, 32 channels"),
        # guidance as published, no filters
        sampling=lambda config: {"cfg": 1.5, "top_k": 0, "top_p": 0.0, "more_smooth": False},
        adapt=codecs.under_schedule,
    ),
    "infinity": CustomDefaults(
        tokenizer_files="infinity_vae_d32reg.pth or infinity_vae_d56_f8_14_patchify.pth",
        tokenizer=codecs.published_tokenizer,
        sampling=lambda config: (
            registry.INFINITY_8B if config.apply_spatial_patchify else registry.INFINITY_SAMPLING
        ),
    ),
    "llamagen": CustomDefaults(
        tokenizer_files="vq_ds16_c2i.pt or vq_ds16_t2i.pt",
        tokenizer=lambda given: ({}, "16384 codes of 8 channels, 16 pixels per token"),
        sampling=registry.llamagen_sampling,
    ),
    "janus": CustomDefaults(
        tokenizer=janus.codec_arguments,
        sampling=lambda config: registry.JANUS_SAMPLING,
        is_whole=True,
        translate=lambda *given: janus.with_grid(janus_transformers.original(*given)),
        codec_prefixes=janus.CODECS,
        prompt_tokenizers=("tokenizer.json",),
    ),
    "lumina": CustomDefaults(
        tokenizer_files="vqgan.ckpt of Meta's Chameleon, in its folder tokenizer",
        # a published config.json says nothing about it, a model of one's own has `vqgan`
        tokenizer=lambda given: (given.get("vqgan", {}), "Chameleon's"),
        sampling=registry.lumina_sampling,
        is_whole=True,
        translate=lambda given, *more: lumina.with_units(given),
        prompt_tokenizers=lumina.TOKENIZERS,
        complete=lumina.with_image_ids,
    ),
}
