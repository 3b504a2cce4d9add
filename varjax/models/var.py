"""VAR: class-conditional next-scale prediction (Tian et al. 2024).

Letters: R rows, T tokens of a scale (padded), L layers (leading axis of stacked parameters), N
heads, H head size, D width, V vocabulary, C latent channels. Names of the original implementation
are in `ported_weights/tables/transformers.py`.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from pallas_kernels.projection import Projection
from varjax.core import stacked
from varjax.core.layers import MODULATION, Linear, ResidualStream, Split, attention_multiplier
from varjax.core.next_scale import NextScaleTransformer
from varjax.core.sampling import Sampling, Scores
from varjax.core.sequence import Schedule
from varjax.core.step_inputs import StepInputs
from varjax.fast.stream import stream_of
from varjax.models import teacher_forcing
from varjax.storage import published

SIDES_256 = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
SIDES_512 = (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)


@dataclass(frozen=True, kw_only=True)
class VARConfig(published.TransformerConfig):
    """Shape of a VAR transformer; names as published, but `schedule` replaces `patch_nums`."""

    what = "VAR"
    ignored = frozenset(
        "vae vae_local vae_kwargs L note drop_rate attn_drop_rate drop_path_rate flash_if_available"
        " fused_if_available".split()
    )
    condition: ClassVar[str] = "labels"  # what images are made of

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
    logits_per_token = property(attrgetter("vocab_size"))
    null_label = property(attrgetter("num_classes"))  # the class embedding that is "no class"

    def __post_init__(self):
        self.check_numbers("mlp_ratio", depth=(1, published.LARGEST_DEPTH))
        self.check_size("embed_dim * mlp_ratio", self.hidden_dim)
        self.check_multiple("embed_dim", self.embed_dim, self.num_heads, "num_heads ")
        if not 0 <= self.cond_drop_rate < 1:
            raise self.wrong(f"cond_drop_rate {self.cond_drop_rate} is outside [0, 1)")

    @classmethod
    def from_published(cls, arguments) -> "VARConfig":
        """Reads the published constructor's names; `patch_nums` holds sides or [height, width].
        What is left out has the published default; hence `attn_l2_norm` is off unless given.
        `UserError` for an unknown name or a value of the wrong type."""
        found = cls.arguments(arguments, patch_nums=object)
        found.setdefault("attn_l2_norm", False)
        schedule = cls.read_schedule(found.pop("patch_nums", SIDES_256))
        return cls(**found, schedule=schedule)

    @property
    def hidden_dim(self) -> int:
        return round(self.embed_dim * self.mlp_ratio)

    @property
    def code_map(self) -> tuple[int, int, int]:
        """Height, width and channels of the latent map."""
        return (*self.schedule.final_map, self.z_channels)

    def condition_bytes(self, rows: int, item_size: int, text_tokens: int | None = None) -> int:
        """Bytes that every layer holds of the condition while an image is drawn."""
        return self.depth * rows * 6 * self.embed_dim * item_size

    def check_sampling(self, sampling: Sampling) -> Sampling:
        sampling.check(self.schedule.num_scales, self.vocab_size).check_no_interval(self.what)
        self.check_mixing(sampling)
        return sampling

    def is_guided(self, sampling: Sampling) -> bool:
        """Whether unconditional rows have any weight: t = cfg * k / (K - 1) is not 0 everywhere."""
        return any(cfg != 0 for cfg in sampling.per_scale("cfg", self.schedule.num_scales))


# width 64 * depth and as many heads as layers
PRESETS = {f"var-d{n}": VARConfig(depth=n, embed_dim=64 * n, num_heads=n) for n in (16, 20, 24, 30)}
PRESETS["var-d36"] = VARConfig(
    depth=36, embed_dim=64 * 36, num_heads=36, schedule=Schedule.square(SIDES_512), shared_aln=True
)


def _normal(std: float):
    ends = 2 / max(std, 1e-9)
    return jax.nn.initializers.truncated_normal(std, lower=-ends, upper=ends)


class VARBlock(nnx.Module):
    """One transformer layer (parameters only). Stacked over layers by `VAR`."""

    def __init__(self, config: VARConfig, *, rngs: nnx.Rngs):
        width, std = config.embed_dim, (1 / config.embed_dim / 3) ** 0.5
        linear = partial(Linear, kernel_init=_normal(std), rngs=rngs)
        last = partial(Linear, kernel_init=_normal(std / math.sqrt(2 * config.depth)), rngs=rngs)
        self.qkv = linear(width, 3 * width, use_bias=False)
        self.q_bias = nnx.Param(jnp.zeros((width,)))
        self.v_bias = nnx.Param(jnp.zeros((width,)))
        if config.attn_l2_norm:
            self.log_scale = nnx.Param(jnp.full((config.num_heads,), math.log(4.0)))
        self.proj = last(width, width)
        self.fc1 = linear(width, config.hidden_dim)
        self.fc2 = last(config.hidden_dim, width)
        # gates start at 1e-5 of the usual size, scales and shifts at half
        gates = jnp.array([1e-5, 1e-5, 0.5, 0.5, 0.5, 0.5])
        if config.shared_aln:
            self.modulation_offset = nnx.Param(
                jax.random.normal(rngs.params(), (6, width)) / width**0.5 * gates[:, None]
            )
        else:
            self.modulation = linear(width, 6 * width)
            kernel = _normal(std)(rngs.params(), (width, 6 * width)) * jnp.repeat(gates, width)
            self.modulation.kernel.set_value(kernel)


class VAR(NextScaleTransformer):
    """Parameters of the transformer and the steps of generation. Class-conditional: the condition
    is int32 labels [B]."""

    once = ("modulation",)

    def __init__(self, config: VARConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, std, schedule = config.embed_dim, (1 / config.embed_dim / 3) ** 0.5, config.schedule
        linear = partial(Linear, rngs=rngs)
        for name, rows in (
            ("class_embedding", config.num_classes + 1),
            ("start_embedding", schedule.tokens[0]),
            ("position_embedding", schedule.total_tokens),
            ("level_embedding", schedule.num_scales),
        ):
            setattr(self, name, nnx.Param(_normal(std)(rngs.params(), (rows, width))))
        self.word_embedding = linear(config.z_channels, width, kernel_init=_normal(std))
        if config.shared_aln:
            self.shared_modulation = linear(width, 6 * width, kernel_init=_normal(std))
        self.blocks = stacked.stack(lambda r: VARBlock(config, rngs=r), config.depth, rngs)
        self.head_modulation = linear(width, 2 * width, kernel_init=_normal(0.5 * std))
        self.head = linear(width, config.vocab_size, kernel_init=_normal(0.02 * std))

    @staticmethod
    def splits() -> dict[str, Split]:
        modulation = {
            "modulation.kernel": Split(2, MODULATION),
            "modulation.bias": Split(1, MODULATION),
        }
        return NextScaleTransformer.splits() | modulation

    # --- once per image ---------------------------------------------------------------------------

    def condition_shapes(self, images: int, text_tokens: int | None = None):
        return jax.ShapeDtypeStruct((images,), jnp.int32)

    def encode_condition(
        self, condition: Int[Array, " B"], *, guided: bool, implementation: str | None = None
    ) -> dict[str, Array]:
        """Condition of every row: `start` [R, t_0, D], `head` [R, 2, D] and `layers` [L, R, 6, D]
        (gates, scales, shifts). The unconditional rows have the null class."""
        labels = condition
        if guided:
            labels = jnp.concatenate([labels, jnp.full_like(labels, self.config.null_label)])
        config = self.config
        condition = self.class_embedding[labels]
        active = jax.nn.silu(condition)
        if config.shared_aln:
            shared = self.shared_modulation(active).reshape(-1, 6, config.embed_dim)
            per_layer = self.blocks.modulation_offset[:, None] + shared[None]
        else:
            modulation = self.blocks.modulation
            per_layer = modulation.of_all_layers(active)
            per_layer = per_layer + modulation.bias[...][:, None]
            if self.model_axis is not None:  # every device has a part of the last axis
                per_layer = jax.lax.all_gather(per_layer, self.model_axis, axis=2, tiled=True)
            per_layer = per_layer.reshape(config.depth, -1, 6, config.embed_dim)
        return {
            "start": condition[:, None] + self.start_embedding[...],
            "head": self.head_modulation(active).reshape(-1, 2, config.embed_dim),
            "layers": per_layer,
        }

    # --- once per scale ---------------------------------------------------------------------------

    def embed(
        self, context: dict, codes: Float[Array, "B T C"], step: StepInputs
    ) -> Float[Array, "R T D"]:
        """The resized code map (at scale 0 the start embedding) plus position and level."""
        start = context["start"]
        words = self.words(len(start), codes)
        first = start[:, jnp.minimum(step.token_index, start.shape[1] - 1)]
        position = self.position_embedding[step.token_index] + self.level_embedding[step.scale]
        return jnp.where(step.scale == 0, first, words) + position

    # --- one layer --------------------------------------------------------------------------------

    def stream(
        self, x: Float[Array, "R T D"], implementation: str | None = "reference"
    ) -> ResidualStream:
        return stream_of(self, x, implementation)

    def project(
        self, block: VARBlock, modulation: PyTree[Array], shared: None, x: ResidualStream
    ) -> tuple[Projection, ResidualStream]:
        """Projects queries, keys and values. With the L2 norm, queries and keys are still to be
        normalised and queries to be multiplied by the learned multiplier; without it, queries are
        still to be scaled. modulation: [R, 6, D], in the form of `ResidualStream.vectors`."""
        config = self.config
        h, x = x.normalized(modulation, 2, 4, config.norm_eps)
        projection = x.qkv(block, h, config.head_dim)
        if not config.attn_l2_norm:
            return replace(projection, scale=0.25 / math.sqrt(config.head_dim)), x
        return replace(projection, multiplier=attention_multiplier(block.log_scale[...])), x

    def post_attention(
        self,
        block: VARBlock,
        modulation: PyTree[Array],
        shared: None,
        x: ResidualStream,
        attended: Float[Array, "R T N H"],
    ) -> ResidualStream:
        """Output projection, gate, feed-forward and residuals of one layer."""
        axis, gelu = self.model_axis, partial(jax.nn.gelu, approximate=True)
        attended = attended.reshape(*attended.shape[:2], -1)
        x = x.added(x.contracted(block.proj, attended, axis), modulation, 0)
        h, x = x.normalized(modulation, 3, 5, self.config.norm_eps)
        return x.added(x.feed_forward(block.fc1, block.fc2, h, axis, gelu), modulation, 1)

    # --- tokens -----------------------------------------------------------------------------------

    def logits(
        self,
        head: Float[Array, "R 2 D"],
        x: Float[Array, "R T D"],
        step: StepInputs,
        sampling: Sampling,
    ) -> Scores:
        """Guidance grows with the scale: t = cfg * k / (K - 1) in (1 + t) cond - t uncond."""
        config, tau, strength = self.config, None, None
        num_scales = config.schedule.num_scales
        with jax.named_scope("head"):
            logits = self.plain_logits(head, x)
        if sampling.tau != 1:
            tau = sampling.at("tau", step.scale, num_scales)
        if config.is_guided(sampling):
            strength = sampling.at("cfg", step.scale, num_scales) * step.ratio
        return Scores(logits, tau, strength)

    # --- all scales at once (training) ------------------------------------------------------------

    def __call__(
        self, labels: Int[Array, " B"], codes: Float[Array, "B M C"]
    ) -> Float[Array, "B L V"]:
        """Teacher-forced logits under the block-causal mask. `codes` are the inputs of scales 1..
        (`Quantizer.teacher_inputs`)."""
        context = self.encode_condition(labels, guided=False)
        x = jnp.concatenate([context["start"], self.words(len(codes), codes)], axis=1)
        scale = self.config.schedule.scale_of_token
        x = x + self.position_embedding[...] + self.level_embedding[scale]
        return teacher_forcing.of_scales(self, context, None, x)
