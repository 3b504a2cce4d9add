"""VAR with its VQVAE, as the generation engine sees it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from varjax import sampling as sampling_lib
from varjax.engine.inputs import ScaleMaps
from varjax.errors import UserError
from varjax.models.pipeline import Pipeline
from varjax.sampling import Sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class VARPipeline(Pipeline):
    """Class-conditional: the condition is int32 labels [B]."""

    def condition_shapes(self, images: int, text_tokens: int | None = None):
        return jax.ShapeDtypeStruct((images,), jnp.int32)

    def prepare(self, labels: Int[Array, " B"]) -> dict[str, Array]:
        null = jnp.full_like(labels, self.transformer.config.null_label)
        return self.transformer.prepare(jnp.concatenate([labels, null]))

    def embed(
        self, context, code_map: Float[Array, "B P Q C"], maps: ScaleMaps
    ) -> Float[Array, "R T D"]:
        codes = maps.shrink(code_map)
        return self.transformer.embed(context["start"], codes, maps.token_index, maps.scale)

    def logits(self, head, x, maps: ScaleMaps, sampling: Sampling) -> Float[Array, "B T V"]:
        """Guidance grows with the scale: t = cfg * k / (K - 1)."""
        num_scales = self.geometry.schedule.num_scales
        with jax.named_scope("head"):
            logits = self.transformer.logits(head, x)
        if sampling.tau != 1:
            logits = logits / sampling.at("tau", maps.scale, num_scales)
        strength = sampling.at("cfg", maps.scale, num_scales) * maps.ratio
        return sampling_lib.guide(logits, strength)

    def choose(
        self, logits: Float[Array, "B T V"], keys: Array, maps: ScaleMaps, sampling: Sampling, given
    ) -> tuple[Int[Array, "B T"], Float[Array, "B T C"]]:
        with jax.named_scope("choose"):
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
        return code_map + self.codec.quantizer.phi(maps.enlarge(codes), maps.scale)

    def tokens_from_file(self, array: np.ndarray, num_images: int, scales: int) -> np.ndarray:
        """int32 [N, L]."""
        config = self.transformer.config
        wanted = (num_images, config.schedule.total_tokens)
        if array.shape != wanted or not np.issubdtype(array.dtype, np.integer):
            raise UserError(f"tokens are {array.dtype} {array.shape}, needed are integers {wanted}")
        if array.min() < 0 or array.max() >= config.vocab_size:
            raise UserError(
                f"tokens reach from {array.min()} to {array.max()}, allowed is 0 to "
                f"{config.vocab_size - 1}"
            )
        return array.astype(np.int32)
