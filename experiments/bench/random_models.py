"""Published models with random weights, and small ones of the same families for machines without a
chip: what programs cost does not depend on the weights."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from varjax.core.sequence import Schedule
from varjax.core.transformer import Transformer
from varjax.models import registry
from varjax.models.model import Model
from varjax.models.registry import Preset
from varjax.storage import parameters

PUBLISHED = {"var-d30": "var-d30", "infinity-2b": "infinity-2b", "llamagen-xl": "llamagen-xl-384"}
TEXT = 128  # tokens of a text
MADE_ON_HOST = 2**20  # numbers of an array at most: sooner made there than a program is compiled
SPREAD = 0.02  # of random weights, as large as trained ones
MAPS, LEVELS = Schedule.square((1, 2, 4)), {"ch": 32, "ch_mult": (1, 1), "num_res_blocks": 1}
WIDTHS = {"base_ch": 32, "encoder_ch_mult": (1, 1), "decoder_ch_mult": (1, 1), "num_res_blocks": 1}
VAR = {"schedule": MAPS, "vocab_size": 128, "z_channels": 8}
INFINITY = {"schedule": MAPS, "rope_map": MAPS.final_map, "text_channels": 64, "text_maxlen": TEXT}
# sizes of small models by part: two layers, two heads as wide as the published ones
SMALL = {
    "var-d30": {
        "transformer": {"depth": 2, "embed_dim": 128, "num_heads": 2, "num_classes": 8, **VAR},
        "codec": {**VAR, **LEVELS},
    },
    "infinity-2b": {
        "transformer": INFINITY
        | {"depth": 2, "embed_dim": 256, "num_heads": 2, "block_chunks": 1, "codebook_dim": 8},
        "codec": {"codebook_dim": 8, "patch_size": 2, **WIDTHS},
    },
    "llamagen-xl": {
        "transformer": {"dim": 128, "n_layer": 2, "n_head": 2, "multiple_of": 32}
        | {"vocab_size": 128, "num_classes": 8, "block_size": 64},
        "codec": {"codebook_size": 128, "z_channels": 32, **LEVELS},
    },
}


def abstract(name: str, small: bool) -> Model:
    """The model `name` of `PUBLISHED` without weights, or a small one of its family."""
    preset: Preset = registry.preset(PUBLISHED[name])
    configs, sampling = preset.configs, dict(preset.sampling)
    if small:
        configs = {n: replace(config, **SMALL[name][n]) for n, config in configs.items()}
        sampling["top_k"] = min(sampling["top_k"], 64)
    family = registry.family(preset.family)
    parts = {n: part.abstract(configs[n]) for n, part in family.tree.items()}
    metadata = {"family": preset.family, "sampling": sampling}
    return Model(f"small {name}" if small else name, parts, metadata)


def with_weights(model: Model, dtype: str) -> Model:
    """The model with random weights on the device: the transformer in `dtype`, the codec in
    float32."""
    types = {"transformer": dtype, "codec": "float32"}
    filled = {}
    for part, module in model.networks.items():
        shapes: Mapping = parameters.named(parameters.shapes(module, types[part]))
        arrays = {name: _numbers(a, number) for number, (name, a) in enumerate(shapes.items())}
        filled[part] = parameters.fill(module, arrays)
    return replace(model, parts=filled)


def _numbers(shape: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        return jnp.zeros(shape.shape, shape.dtype)
    if math.prod(shape.shape) > MADE_ON_HOST:
        return _normal(shape.shape, shape.dtype.name, seed)
    found = SPREAD * np.random.default_rng(seed).standard_normal(shape.shape, np.float32)
    return jnp.asarray(found, shape.dtype)


@partial(jax.jit, static_argnums=(0, 1))
def _normal(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    return (SPREAD * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)).astype(dtype)


def condition(transformer: Transformer, images: int) -> object:
    """Condition of a batch: class 0, or random features of texts of `TEXT` tokens."""
    shapes = transformer.condition_shapes(images, TEXT)
    if not isinstance(shapes, Mapping):
        return np.zeros(shapes.shape, shapes.dtype)
    rng = np.random.default_rng(0)
    return {
        "kv": rng.standard_normal(shapes["kv"].shape, np.float32),
        "length": np.full(shapes["length"].shape, TEXT, np.int32),
        "unconditional": np.zeros(shapes["unconditional"].shape, bool),
    }
