"""The interface of transformers that draw images scale by scale.

The engine (`varjax.core.scales`) knows schedules, segments, layers and the cache; everything else
is a step that the transformer brings, in the order in which it is called:

    encode_condition(condition, *, guided, implementation)
        Once per image: a dictionary of all that depends on the condition only, for all rows. It has
        at least `head` [R, 2, D], for `logits`, and `layers`, arrays with a leading axis over
        layers that are scanned with the stacked blocks, or None. guided: with unconditional rows.
        implementation: name of the attention over a text.
    scale_context(context, step, sampling)
        Once per scale: what its layers share beyond the condition.
    embed(context, codes, step)
        [R, T, D] inputs of a scale from the code map so far [B, T, C], resized to the scale.
    stream(x, implementation)
        The residual stream before the first layer, a `ResidualStream`: it has the operations
        between a layer's products, and says in which form they take the layer's context.
    project(block, layer_context, shared, x)
        Queries, keys and values of a layer, a `Projection` (`scale` included), and the stream to go
        on with. The engine sets what blocks have of `q_bias`, `v_bias`, `log_scale`.
    post_attention(block, layer_context, shared, x, attended)
        The stream after the rest of the layer, given the attention output [R, T, N, H].
    logits(head, x, step, sampling)
        `Scores`: float32 logits before filters, with guidance.
    sample(scores, keys, sampling, implementation)
        Tokens [B, T, ...], as `varjax.core.sampling.sample` gives them.

Rows: first come the conditional rows of all images. With guidance their unconditional rows follow
(R = 2 B), without it there are none (R = B). Codes and what becomes of them belong to the codec
(`codes`, `accumulate`, `decode`). A new family writes one subclass.

Letters: B images, R rows, T tokens of a scale, C channels of a code, N heads, H head size, D width.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from varjax.core import layers
from varjax.core.layers import HEADS, HIDDEN, ResidualStream, Split
from varjax.core.sampling import Sampling
from varjax.core.sequence import Schedule
from varjax.core.step_inputs import Resampling, StepInputs
from varjax.core.transformer import Transformer


class NextScaleTransformer(Transformer):
    """Base of all families that draw scales. Its `config` has schedule, depth, num_heads, head_dim,
    code_map, logits_per_token; generators also ask for `check_sampling` and `is_guided`."""

    def sequence(self, one_slot: bool = True) -> Schedule:
        return self.config.schedule

    def code_map(self, codec) -> tuple[int, int, int]:
        return self.config.code_map

    # --- traced steps -----------------------------------------------------------------------------

    resampling: Resampling = ("area", "bicubic", 1)

    def scale_context(self, context: dict, step: StepInputs, sampling: Sampling) -> PyTree:
        return None

    def stream(
        self, x: Float[Array, "R T D"], implementation: str | None = "reference"
    ) -> ResidualStream:
        """The residual stream before the first layer. implementation: of its kernels."""
        return ResidualStream(x)

    # --- what families share ----------------------------------------------------------------------

    @staticmethod
    def splits() -> dict[str, Split]:
        return {
            "qkv.kernel": Split(2, HEADS, parts=(1, 1, 1)),
            "q_bias": Split(1, HEADS),
            "v_bias": Split(1, HEADS),
            "log_scale": Split(1, HEADS),
            "proj.kernel": Split(1, HEADS),
            "fc1.kernel": Split(2, HIDDEN),
            "fc1.bias": Split(1, HIDDEN),
            "fc2.kernel": Split(1, HIDDEN),
        }

    def attention_vectors(self) -> dict[str, Array]:
        """Biases and multipliers of all layers, fields of a `Projection`, that blocks have."""
        found, head_dim = {}, self.config.head_dim
        for name in ("q_bias", "v_bias"):
            if hasattr(self.blocks, name):
                bias = getattr(self.blocks, name)[...]
                found[name] = bias.reshape(len(bias), -1, head_dim)
        if hasattr(self.blocks, "log_scale"):
            found["multiplier"] = layers.attention_multiplier(self.blocks.log_scale[...])
        return found

    def words(self, rows: int, codes: Float[Array, "B T C"]) -> Float[Array, "R T D"]:
        """Embedded codes of all rows. Both rows of an image have the same codes."""
        words = self.word_embedding(codes.astype(self.dtype))
        return jnp.tile(words, (rows // words.shape[0], 1, 1))

    def plain_logits(
        self, modulation: Float[Array, "R 2 D"], x: Float[Array, "R T D"]
    ) -> Float[Array, "R T V"]:
        """Float32 logits of every row, before temperature and guidance: normalised and modulated
        (scale, shift), then the linear layer `head` in its own type."""
        scale, shift = (modulation[:, i].astype(jnp.float32) for i in (0, 1))
        normal = layers.layer_norm(x.astype(jnp.float32), self.config.norm_eps)
        h = layers.modulate(normal, scale, shift).astype(self.dtype)
        return self.head.product(h, jnp.float32) + self.head.bias[...]
