"""VAR: class-conditional next-scale prediction (Tian et al. 2024, "Visual Autoregressive
Modeling").

Parameters live in Flax NNX modules whose layers are stacked; computation is split into the steps
that the generation engine and teacher forcing share:

    prepare(labels)            once per image: condition vectors and every layer's modulation
    embed(...)                 token inputs of one scale
    project(block, ...)        q, k, v of one layer
    finish(block, ...)         the rest of the layer, given the attention output
    logits(...)                head, float32

Letters: R rows, T tokens of a scale (padded), L layers (leading axis of stacked parameters), N
heads, H head size, D width, V vocabulary, C latent channels. Names of the original implementation
are in `ported_weights/var.py`.
"""

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from varjax.errors import UserError
from varjax.models import layers, published
from varjax.parallel import split
from varjax.parallel.split import Split
from varjax.sampling import Sampling
from varjax.schedule import Schedule

SIDES_256 = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
SIDES_512 = (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)
# Published constructor arguments and notes that do not change the function computed.
IGNORED_NAMES = (
    *("vae", "vae_local", "vae_kwargs", "L", "note"),
    *("drop_rate", "attn_drop_rate", "drop_path_rate", "flash_if_available", "fused_if_available"),
)


@dataclass(frozen=True, kw_only=True)
class VARConfig:
    """Shape of a VAR transformer; field names follow the published constructor, `schedule` replaces
    `patch_nums`."""

    num_classes: int = 1000
    depth: int = 16
    embed_dim: int = 1024
    num_heads: int = 16
    mlp_ratio: float = 4.0
    norm_eps: float = 1e-6
    shared_aln: bool = False
    attn_l2_norm: bool = True
    schedule: Schedule = Schedule.square(SIDES_256)
    vocab_size: int = 4096
    z_channels: int = 32
    cond_drop_rate: float = 0.1  # training: how often the label is replaced by the null class

    def __post_init__(self):
        published.check_size("VAR", "depth", self.depth, published.LARGEST_DEPTH)
        for name in ("num_classes", "embed_dim", "num_heads", "vocab_size", "z_channels"):
            published.check_size("VAR", name, getattr(self, name))
        published.check_real("VAR", "norm_eps", self.norm_eps)
        published.check_real("VAR", "mlp_ratio", self.mlp_ratio, positive=True)
        published.check_size("VAR", "embed_dim * mlp_ratio", self.hidden_dim)
        if self.embed_dim % self.num_heads:
            raise UserError(
                f"VAR configuration: embed_dim {self.embed_dim} is not a multiple of num_heads "
                f"{self.num_heads}"
            )
        if not 0 <= self.cond_drop_rate < 1:
            raise UserError(
                f"VAR configuration: cond_drop_rate {self.cond_drop_rate} is outside [0, 1)"
            )

    @classmethod
    def preset(cls, depth: int, sides=SIDES_256, shared_aln: bool = False) -> "VARConfig":
        """Published sizes: width 64 * depth and as many heads as layers."""
        return cls(
            depth=depth,
            embed_dim=64 * depth,
            num_heads=depth,
            schedule=Schedule.square(sides),
            shared_aln=shared_aln,
        )

    @classmethod
    def from_published(cls, arguments) -> "VARConfig":
        """Read the published constructor's names; `patch_nums` holds sides or [height, width].

        What is left out has the published default; hence `attn_l2_norm` is off unless given.

        Raises:
          UserError: for an unknown name or a value of the wrong type.
        """
        types = {f.name: f.type for f in dataclasses.fields(cls) if f.name != "schedule"}
        found = published.arguments(
            "VAR", arguments, {**types, "patch_nums": object}, IGNORED_NAMES
        )
        schedule = published.schedule("VAR", found.pop("patch_nums", SIDES_256))
        return cls(**{"attn_l2_norm": False, **found}, schedule=schedule)

    def to_published(self) -> dict:
        """The published constructor's names and JSON values: the inverse of `from_published`."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        schedule = values.pop("schedule")
        return {**values, "patch_nums": published.patch_nums(schedule)}

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def hidden_dim(self) -> int:
        return round(self.embed_dim * self.mlp_ratio)

    @property
    def logits_per_token(self) -> int:
        return self.vocab_size

    @property
    def code_map(self) -> tuple[int, int, int]:
        """Height, width and channels of the latent map."""
        return (*self.schedule.final_map, self.z_channels)

    def condition_bytes(self, rows: int, item_size: int, text_tokens: int | None = None) -> int:
        """Bytes that every layer holds of the condition while an image is drawn."""
        return self.depth * rows * 6 * self.embed_dim * item_size

    def check_sampling(self, sampling: Sampling) -> Sampling:
        """Return it, or raise `UserError` if this model cannot draw that way."""
        if sampling.cfg_insertion_layer != (0,):
            raise UserError(
                f"cfg_insertion_layer={sampling.cfg_insertion_layer!r:.60}: VAR mixes its rows on "
                f"the logits only, which is 0"
            )
        return sampling.check(self.schedule.num_scales, self.vocab_size)

    @property
    def null_label(self) -> int:
        """Index of the class embedding that stands for "no class"."""
        return self.num_classes


PRESETS = {
    "var-d16": VARConfig.preset(16),
    "var-d20": VARConfig.preset(20),
    "var-d24": VARConfig.preset(24),
    "var-d30": VARConfig.preset(30),
    "var-d36": VARConfig.preset(36, SIDES_512, shared_aln=True),
}


def _normal(std: float):
    return jax.nn.initializers.truncated_normal(
        std, lower=-2 / max(std, 1e-9), upper=2 / max(std, 1e-9)
    )


def _linear(d_in: int, d_out: int, std: float, rngs: nnx.Rngs, use_bias: bool = True) -> nnx.Linear:
    return nnx.Linear(d_in, d_out, use_bias=use_bias, kernel_init=_normal(std), rngs=rngs)


def _modulation_kernel(width: int, std: float, key) -> Array:
    """AdaLN weights [D, 6 D]: gates start at 1e-5 of the usual size, scales and shifts at half."""
    factor = jnp.repeat(jnp.array([1e-5, 1e-5, 0.5, 0.5, 0.5, 0.5]), width)
    return _normal(std)(key, (width, 6 * width)) * factor


class Block(nnx.Module):
    """One transformer layer (parameters only). Stacked over layers by `VAR`."""

    def __init__(self, config: VARConfig, *, rngs: nnx.Rngs):
        width, std = config.embed_dim, (1 / config.embed_dim / 3) ** 0.5
        residual_std = std / math.sqrt(2 * config.depth)
        self.qkv = _linear(width, 3 * width, std, rngs, use_bias=False)
        self.q_bias = nnx.Param(jnp.zeros((width,)))
        self.v_bias = nnx.Param(jnp.zeros((width,)))
        if config.attn_l2_norm:
            self.log_scale = nnx.Param(jnp.full((config.num_heads,), math.log(4.0)))
        self.proj = _linear(width, width, residual_std, rngs)
        self.fc1 = _linear(width, config.hidden_dim, std, rngs)
        self.fc2 = _linear(config.hidden_dim, width, residual_std, rngs)
        if config.shared_aln:
            gates = jnp.array([1e-5, 1e-5, 0.5, 0.5, 0.5, 0.5])[:, None]
            self.modulation_offset = nnx.Param(
                jax.random.normal(rngs.params(), (6, width)) / width**0.5 * gates
            )
        else:
            self.modulation = _linear(width, 6 * width, std, rngs)
            self.modulation.kernel.set_value(_modulation_kernel(width, std, rngs.params()))


class VAR(nnx.Module):
    """Parameters of the transformer and the per-step functions."""

    def __init__(self, config: VARConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, std = config.embed_dim, (1 / config.embed_dim / 3) ** 0.5
        schedule = config.schedule

        def table(rows):
            return nnx.Param(_normal(std)(rngs.params(), (rows, width)))

        self.class_embedding = table(config.num_classes + 1)
        self.start_embedding = table(schedule.tokens[0])
        self.position_embedding = table(schedule.total_tokens)
        self.level_embedding = table(schedule.num_scales)
        self.word_embedding = _linear(config.z_channels, width, std, rngs)
        if config.shared_aln:
            self.shared_modulation = _linear(width, 6 * width, std, rngs)
        self.blocks = layers.stack_layers(lambda r: Block(config, rngs=r), config.depth, rngs)
        self.head_modulation = _linear(width, 2 * width, 0.5 * std, rngs)
        self.head = _linear(width, config.vocab_size, 0.02 * std, rngs)

    @staticmethod
    def splits() -> dict[str, Split]:
        """Stacked parameters of the blocks that are divided over heads or the feed-forward's width;
        the others are whole on every device."""
        return {
            "qkv.kernel": Split(2, parts=3),
            "q_bias": Split(1),
            "v_bias": Split(1),
            "log_scale": Split(1),
            "proj.kernel": Split(1),
            "fc1.kernel": Split(2),
            "fc1.bias": Split(1),
            "fc2.kernel": Split(1),
            "modulation.kernel": Split(2),
            "modulation.bias": Split(1),
        }

    # --- once per image ---------------------------------------------------------------------------

    def prepare(self, labels: Int[Array, " R"]) -> dict[str, Array]:
        """Condition of every row: `start` [R, t_0, D], `head` [R, 2, D] and `layers` [L, R, 6, D]
        (gates, scales, shifts)."""
        config = self.config
        condition = self.class_embedding[labels]
        active = jax.nn.silu(condition)
        if config.shared_aln:
            shared = self.shared_modulation(active).reshape(-1, 6, config.embed_dim)
            per_layer = self.blocks.modulation_offset[:, None] + shared[None]
        else:
            kernel, bias = self.blocks.modulation.kernel[...], self.blocks.modulation.bias[...]
            # layer by layer: one product over all would first copy all these weights, transposed
            per_layer = jax.lax.map(lambda layer: active @ layer[0] + layer[1], (kernel, bias))
            per_layer = split.whole(per_layer).reshape(config.depth, -1, 6, config.embed_dim)
        return {
            "start": condition[:, None] + self.start_embedding[...],
            "head": self.head_modulation(active).reshape(-1, 2, config.embed_dim),
            "layers": per_layer,
        }

    def embed(
        self,
        start: Float[Array, "R t0 D"],
        codes: Float[Array, "B T C"],
        token_index: Int[Array, " T"],
        scale: Int[Array, ""],
    ) -> Float[Array, "R T D"]:
        """Inputs of one scale: the resized code map, or the start embedding at scale 0, plus
        position and level.

        `codes` holds one row per image; conditional and unconditional rows share it, so R is B or 2
        B. `token_index` are the global positions of the (padded) tokens.
        """
        words = self.word_embedding(codes.astype(self.dtype))
        words = jnp.tile(words, (start.shape[0] // words.shape[0], 1, 1))
        first = start[:, jnp.minimum(token_index, start.shape[1] - 1)]
        position = self.position_embedding[token_index] + self.level_embedding[scale]
        return jnp.where(scale == 0, first, words) + position

    # --- one layer --------------------------------------------------------------------------------

    def project(self, block: Block, modulation: Float[Array, "R 6 D"], x: Float[Array, "R T D"]):
        """Queries, keys and values [R, N, T, H] of one layer; queries carry the attention scale."""
        config = self.config
        h = self._attention_input(modulation, x)
        q, k, v = layers.fused_qkv(block, h, config.head_dim)
        if not config.attn_l2_norm:
            return q * (0.25 / math.sqrt(config.head_dim)), k, v
        multiplier = layers.attention_multiplier(block.log_scale[...])
        q = layers.l2_normalize(q) * multiplier.astype(q.dtype)
        return q, layers.l2_normalize(k), v

    def raw_queries(
        self, block: Block, modulation: Float[Array, "R 6 D"], x: Float[Array, "R T D"]
    ) -> Float[Array, "R N T H"]:
        """See `layers.plain_queries`."""
        return layers.plain_queries(
            block, self._attention_input(modulation, x), self.config.head_dim
        )

    def _attention_input(self, modulation, x: Float[Array, "R T D"]) -> Float[Array, "R T D"]:
        normal = layers.layer_norm(x, self.config.norm_eps)
        return layers.modulate(normal, modulation[:, 2], modulation[:, 4])

    def finish(
        self, block: Block, modulation, x, attended: Float[Array, "R N T H"]
    ) -> Float[Array, "R T D"]:
        """Output projection, gate, feed-forward and residuals of one layer."""
        x = x + split.contract(block.proj, layers.merge_heads(attended)) * modulation[:, None, 0]
        h = layers.modulate(
            layers.layer_norm(x, self.config.norm_eps), modulation[:, 3], modulation[:, 5]
        )
        wide = jax.nn.gelu(block.fc1(h), approximate=True)
        return x + split.contract(block.fc2, wide) * modulation[:, None, 1]

    def logits(
        self, modulation: Float[Array, "R 2 D"], x: Float[Array, "R T D"]
    ) -> Float[Array, "R T V"]:
        """Float32 logits, before guidance."""
        return layers.modulated_head(self.head, modulation, x, self.config.norm_eps)

    @property
    def dtype(self):
        """The type of the weights, which is the type that matrix products run in."""
        return self.head.kernel[...].dtype

    # --- all scales at once (training) ------------------------------------------------------------

    def __call__(
        self, labels: Int[Array, " B"], codes: Float[Array, "B M C"]
    ) -> Float[Array, "B L V"]:
        """Teacher-forced logits under the block-causal mask. `codes` are the inputs of scales 1..
        (`VQVAE.teacher_inputs`)."""
        schedule = self.config.schedule
        context = self.prepare(labels)
        x = jnp.concatenate(
            [context["start"], self.word_embedding(codes.astype(self.dtype))], axis=1
        )
        scale = schedule.scale_of_token
        x = x + self.position_embedding[...] + self.level_embedding[scale]
        mask = jnp.asarray(scale[:, None] >= scale[None, :])

        def layer(x, inputs):
            block, modulation = inputs
            q, k, v = self.project(block, modulation, x)
            return self.finish(block, modulation, x, layers.dense_attention(q, k, v, mask)), None

        x, _ = jax.lax.scan(layer, x, (self.blocks, context["layers"]))
        return self.logits(context["head"], x)
