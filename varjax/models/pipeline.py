"""A whole model, transformer and codec, as the generation engine sees it.

The engine knows schedules, segments, layers and the cache. Everything else is a part that the model
brings: conditioning, inputs of a scale, projections, head, choice of tokens, accumulation of codes,
pixels. A new family writes one such class.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from varjax import sampling as sampling_lib
from varjax.codecs.vqvae import VQVAE
from varjax.geometry import Geometry
from varjax.models.var import VAR
from varjax.rounds import in_rounds
from varjax.sampling import Sampling
from varjax.scale_maps import ScaleMaps

LOGITS_BYTES = 2**30  # logits, and what choosing from them takes, that may exist at once
ARRAYS_PER_LOGIT = 6  # both rows of guidance, guided, filtered, ordered or probabilities, noise


def images_at_once(tokens: int, vocab_size: int) -> int:
    """How many images' tokens are chosen at once."""
    return max(1, LOGITS_BYTES // (ARRAYS_PER_LOGIT * tokens * vocab_size * 4))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class VARPipeline:
    """VAR with its VQVAE. Rows: conditional images first, then the same images unconditional (R = 2
    B)."""

    transformer: VAR
    codec: VQVAE

    @property
    def geometry(self) -> Geometry:
        config = self.transformer.config
        return Geometry(
            schedule=config.schedule,
            num_layers=config.depth,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
        )

    @property
    def vocab_size(self) -> int:
        return self.transformer.config.vocab_size

    @property
    def num_layers(self) -> int:
        return self.transformer.config.depth

    # --- what the engine calls --------------------------------------------------------------------

    def prepare(self, labels: Int[Array, " B"]) -> dict[str, Array]:
        """Everything that depends on the condition only, for all rows. `layers` is scanned with the
        stacked blocks."""
        null = jnp.full_like(labels, self.transformer.config.null_label)
        return self.transformer.prepare(jnp.concatenate([labels, null]))

    def empty_code_map(self, batch: int) -> Float[Array, "B P Q C"]:
        config = self.transformer.config
        return jnp.zeros((batch, *config.schedule.final_map, config.z_channels), jnp.float32)

    def embed(
        self, context, code_map: Float[Array, "B P Q C"], maps: ScaleMaps
    ) -> Float[Array, "R T D"]:
        """Inputs of a scale from what has been drawn so far."""
        codes = maps.shrink(code_map)
        return self.transformer.embed(context["start"], codes, maps.token_index, maps.scale)

    @property
    def blocks(self):
        return self.transformer.blocks

    def project(self, block, layer_context, x):
        return self.transformer.project(block, layer_context, x)

    def raw_queries(self, block, layer_context, x):
        return self.transformer.raw_queries(block, layer_context, x)

    def finish(self, block, layer_context, x, attended):
        return self.transformer.finish(block, layer_context, x, attended)

    def draw(
        self,
        context,
        x: Float[Array, "R T D"],
        keys: Array,
        maps: ScaleMaps,
        sampling: Sampling,
        given: tuple[Int[Array, "B T"], Array] | None,
    ) -> dict[str, Array]:
        """Tokens, their code vectors and guided logits of a scale, as many images at a time as
        `LOGITS_BYTES` allow. `given` = (tokens, number of scales that take them) replaces the draw
        there."""
        images, tokens = keys.shape[0], x.shape[1]
        head, x = (a.reshape(2, images, *a.shape[1:]) for a in (context["head"], x))

        def some(index):
            rows = (a[:, index].reshape(-1, *a.shape[2:]) for a in (head, x))
            with jax.named_scope("head"):
                logits = self._logits(*rows, maps, sampling)
            forced = None if given is None else (given[0][index], given[1])
            with jax.named_scope("choose"):
                chosen, codes = self._choose(logits, keys[index], maps, sampling, forced)
            return {"tokens": chosen, "codes": codes, "logits": logits}

        return in_rounds(some, images, images_at_once(tokens, self.vocab_size))

    def _logits(self, head, x, maps: ScaleMaps, sampling: Sampling) -> Float[Array, "B T V"]:
        """Guided logits, float32, before filters."""
        return sampling_lib.guide(self.transformer.logits(head, x), sampling.cfg * maps.ratio)

    def _choose(
        self, logits: Float[Array, "B T V"], keys: Array, maps: ScaleMaps, sampling: Sampling, given
    ) -> tuple[Int[Array, "B T"], Float[Array, "B T C"]]:
        """Tokens and their code vectors."""
        tokens, filtered = sampling_lib.sample(logits, keys, sampling)
        if given is not None:
            tokens = jnp.where(maps.scale < given[1], given[0], tokens)
        quantizer = self.codec.quantizer
        if not sampling.more_smooth:
            return tokens, quantizer.lookup(tokens)
        codebook = quantizer.embedding[...].astype(jnp.float32)
        return tokens, sampling_lib.smooth_codes(filtered, keys, maps.ratio, codebook)

    def accumulate(
        self, code_map, codes: Float[Array, "B T C"], maps: ScaleMaps
    ) -> Float[Array, "B P Q C"]:
        """Add a scale's codes to the latent map."""
        return code_map + self.codec.quantizer.phi(maps.enlarge(codes), maps.scale)

    def decode(self, code_map: Float[Array, "B P Q C"]) -> Float[Array, "B H W 3"]:
        """Pixels in [0, 1]."""
        return (self.codec.decode(code_map) + 1) / 2
