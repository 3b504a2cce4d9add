"""The encoder of T5 version 1.1 (Raffel et al. 2020, Shazeer 2020). The flan-t5 models are
fine-tuned versions of it: gated GELU, root-mean-square norms, no biases in products, relative
positions.

Layers are stacked and scanned. The relative position bias is stored once and added to the scores of
every layer; scores carry no factor 1/sqrt(H). Products run in the type of the weights and sum up in
float32; float32 weights are multiplied in full precision on every device. The residual stream,
norms, softmax and position bias are always float32, so that bfloat16 weights lose little.

The tokenizer is the user's own `spiece.model`, read by the `sentencepiece` package. A text becomes
the pieces of the SentencePiece model and the end token. What looks like a special token in a text,
such as `</s>`, is ordinary text here.

Letters: B texts, T and K tokens, L layers, N heads, H head size, D width, F feed-forward width,
V vocabulary. Names of the published files are in `ported_weights/tables/transformers.py`.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from varjax.core import layers, stacked
from varjax.core.errors import UserError
from varjax.storage import ordinary, published
from varjax.storage.values import require
from varjax.text.prompt_condition import is_known

FEED_FORWARD = "gated-gelu"
SPIECE_FILE = "spiece.model"
LARGEST_FILE = 2**27  # bytes of it
END = 1  # id of the end token, counted in every length
# Entries of an encoder's vocabulary that are no pieces: 100 placeholders, and what fills up to a
# multiple of 128.
MOST_SPARE = 100 + 127
_ADVICE = f"take the {SPIECE_FILE} that is published beside the weights"
MASKED = -1e30  # score of padding: finite, so that a row without any token stays finite


@dataclass(frozen=True, kw_only=True)
class T5Config(published.Configuration):
    """Shape of the encoder; field names follow the published `config.json`, defaults are what the
    published configuration class assumes where a file leaves the entry out."""

    what = "T5"

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_heads: int
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6

    def __post_init__(self):
        self.check_numbers(
            num_layers=(1, published.LARGEST_DEPTH),
            relative_attention_num_buckets=(4, published.LARGEST_SIZE),
        )
        buckets = self.relative_attention_num_buckets
        if buckets % 4 or self.relative_attention_max_distance <= buckets // 4:
            raise self.wrong(
                f"relative_attention_num_buckets is {buckets}: it must be a multiple of 4, and"
                " relative_attention_max_distance more than a quarter of it"
            )

    @classmethod
    def from_published(cls, arguments: Mapping) -> "T5Config":
        """Reads the entries of a published `config.json`; entries without effect on the encoder's
        function are passed over. `UserError` for missing or malformed entries, and for another
        feed-forward than gated GELU, such as that of T5 version 1.0."""
        kind = arguments.get("feed_forward_proj", "relu")  # what a file without the entry means
        if kind != FEED_FORWARD:
            raise cls.wrong(
                f"feed_forward_proj is {kind!r:.60}, supported is {FEED_FORWARD!r} (T5 version 1.1"
                " and flan-t5)"
            )
        names = {field.name for field in fields(cls)}
        return super().from_published({n: v for n, v in arguments.items() if n in names})

    def to_published(self) -> dict:
        """Names and values as in `config.json`: the inverse of `from_published`."""
        return {**super().to_published(), "feed_forward_proj": FEED_FORWARD}


def _linear(d_in: int, d_out: int, std: float, rngs: nnx.Rngs) -> nnx.Linear:
    init = jax.nn.initializers.normal(std)
    return nnx.Linear(d_in, d_out, use_bias=False, kernel_init=init, rngs=rngs)


class T5Block(nnx.Module):
    """One layer (parameters only). Stacked over layers by `T5Encoder`."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        width, inner = config.d_model, config.num_heads * config.d_kv
        self.attention_norm = nnx.Param(jnp.ones((width,)))
        self.q = _linear(width, inner, (width * config.d_kv) ** -0.5, rngs)
        self.k = _linear(width, inner, width**-0.5, rngs)
        self.v = _linear(width, inner, width**-0.5, rngs)
        self.o = _linear(inner, width, inner**-0.5, rngs)
        self.feed_forward_norm = nnx.Param(jnp.ones((width,)))
        self.gate = _linear(width, config.d_ff, width**-0.5, rngs)
        self.up = _linear(width, config.d_ff, width**-0.5, rngs)
        self.down = _linear(config.d_ff, width, config.d_ff**-0.5, rngs)


class T5Encoder(nnx.Module):
    """Parameters of the encoder, and the function that it computes."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        buckets, width = config.relative_attention_num_buckets, config.d_model
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, width)))
        self.position_bias = nnx.Param(
            jax.random.normal(rngs.params(), (buckets, config.num_heads)) * width**-0.5
        )
        self.blocks = stacked.stack(lambda r: T5Block(config, rngs=r), config.num_layers, rngs)
        self.final_norm = nnx.Param(jnp.ones((width,)))

    @property
    def dtype(self):
        """The type of the weights, which is the type that matrix products run in."""
        return self.embedding[...].dtype

    def __call__(self, ids: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Float[Array, "B T D"]:
        """Float32 features. The first `lengths` tokens of a row are its text. The features of the
        tokens behind it are finite but mean nothing, and no text sees these tokens."""
        bias = self.score_bias(lengths, ids.shape[1])
        x = self.embedding[...][ids].astype(jnp.float32)
        x = stacked.scan(lambda x, block: self.layer(block, x, bias), x, self.blocks)
        return self._norm(x, self.final_norm)

    def score_bias(self, lengths: Int[Array, " B"], size: int) -> Float[Array, "B N T K"]:
        """The addition to the scores of every layer: the bias of relative positions, and the mask
        that hides all but the first `lengths` of `size` tokens.

        Half of the buckets are for keys before the query or at it, half for keys after it. In each
        half the first buckets stand for single distances, the others for ranges of distances that
        grow by a constant factor."""
        half = self.config.relative_attention_num_buckets // 2
        exact = half // 2
        offset = np.arange(size)[None, :] - np.arange(size)[:, None]
        distance = np.abs(offset)
        # float32 in the published order of operations: where the quotient is whole, it decides
        ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
        span = np.float32(math.log(self.config.relative_attention_max_distance / exact))
        far = exact + (ratio / span * np.float32(half - exact)).astype(np.int32)
        near = np.where(distance < exact, distance, np.minimum(far, half - 1))
        buckets = jnp.asarray((near + half * (offset > 0)).astype(np.int32))
        relative = self.position_bias[...].astype(jnp.float32)[buckets].transpose(2, 0, 1)
        is_text = jnp.arange(size) < lengths[:, None]
        return jnp.where(is_text[:, None, None], relative, MASKED)

    def layer(
        self, block: T5Block, x: Float[Array, "B T D"], bias: Float[Array, "B N T K"]
    ) -> Float[Array, "B T D"]:
        """Self attention and feed-forward of one layer with their residuals, float32."""
        h = self._norm(x, block.attention_norm)
        q, k, v = (
            layers.split_heads(self._product(h, p), self.config.d_kv)
            for p in (block.q, block.k, block.v)
        )
        scores = self._einsum("bnth,bnkh->bntk", q, k) + bias
        attended = self._einsum("bntk,bnkh->bnth", jax.nn.softmax(scores, axis=-1), v)
        x = x + self._product(layers.merge_heads(attended), block.o)
        h = self._norm(x, block.feed_forward_norm)
        gate = jax.nn.gelu(self._product(h, block.gate), approximate=True)
        return x + self._product(gate * self._product(h, block.up), block.down)

    def _norm(self, x: Float[Array, "B T D"], scale: nnx.Param) -> Float[Array, "B T D"]:
        return layers.rms_norm(x, scale[...], self.config.layer_norm_epsilon, jnp.float32)

    def _product(self, x: Array, projection: nnx.Linear) -> Float[Array, "B T _"]:
        factors = x.astype(self.dtype), projection.kernel[...].astype(self.dtype)
        return jnp.dot(*factors, precision=self._precision, preferred_element_type=jnp.float32)

    def _einsum(self, subscripts: str, *factors: Array) -> Array:
        """A product of factors in the type of the weights, with float32 sums."""
        cast = (a.astype(self.dtype) for a in factors)
        return jnp.einsum(
            subscripts, *cast, precision=self._precision, preferred_element_type=jnp.float32
        )

    @property
    def _precision(self) -> jax.lax.Precision | None:
        """Full where weights are float32: TPUs shorten float32 factors by default."""
        return jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else None


class Tokenizer:
    """Texts to token ids.

    Args:
      path: the SentencePiece model.
      vocab_size: entries of the encoder's embedding.

    Raises:
      MissingExtra: without the `sentencepiece` package.
      UserError: there is no such file, it is no model, or it has another vocabulary.
    """

    def __init__(self, path: str | os.PathLike, vocab_size: int):
        module = require("sentencepiece", extra="text", purpose="turning prompts into tokens")
        if not Path(path).is_file():
            raise UserError(f"there is no tokenizer file {path}: {_ADVICE}")
        self._processor = module.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(ordinary.read_file(path, LARGEST_FILE))
        except (RuntimeError, OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0][:200]
            raise UserError(
                f"cannot read {path} as a SentencePiece model ({reason}): {_ADVICE}"
            ) from None
        pieces = self._processor.get_piece_size()
        if not vocab_size - MOST_SPARE <= pieces <= vocab_size:
            raise UserError(
                f"{path} has a vocabulary of {pieces} pieces, the encoder one of {vocab_size}: they"
                f" do not belong together; {_ADVICE}"
            )
        if (end := self._processor.eos_id()) != END:
            raise UserError(
                f"{path} is no tokenizer of T5: its end token has the id {end} instead of {END};"
                f" {_ADVICE}"
            )

    def ids(self, text: str) -> list[int]:
        """Token ids of a text; the last one is always the end token."""
        return [*self._processor.encode(text), END]

    def knows(self, ids: Sequence[int]) -> bool:
        """Whether it knows a word of a text with these ids (`prompt_condition.is_known`)."""
        return is_known(ids[:-1], self._processor.unk_id(), self._processor.decode)
