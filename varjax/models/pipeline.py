"""A whole model, transformer and codec, as the generation engine sees it.

The engine knows schedules, segments, layers and the cache. Everything else is a part that the model
brings: conditioning, inputs of a scale, projections, head, choice of tokens, accumulation of codes,
pixels. A new family writes one subclass of `Pipeline`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from varjax.cache.geometry import Geometry
from varjax.engine.chunks import map_in_chunks
from varjax.engine.inputs import Resampling, ScaleMaps
from varjax.sampling import Sampling

LOGITS_BYTES = 2**30  # logits, and what choosing from them takes, that may exist at once
ARRAYS_PER_LOGIT = 6  # both rows of guidance, guided, filtered, ordered or probabilities, noise


def images_at_once(tokens: int, logits_per_token: int) -> int:
    """How many images' tokens are chosen at once."""
    return max(1, LOGITS_BYTES // (ARRAYS_PER_LOGIT * tokens * logits_per_token * 4))


@dataclass(frozen=True)
class Pipeline:
    """What all families share. Rows: conditional images first, then the same images unconditional
    (R = 2 B).

    A family adds `prepare`, `embed`, `logits`, `choose`, `accumulate`, and where it differs
    `scale_context`, `project`, `raw_queries`, `finish`. Subclasses are registered as pytrees.
    """

    transformer: Any
    codec: Any

    token_name: ClassVar[str] = "tokens"  # what a token is called in files

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
    def num_layers(self) -> int:
        return self.transformer.config.depth

    @property
    def resampling(self) -> Resampling:
        """How code maps change size."""
        return Resampling()

    def condition_shapes(self, images: int, text_tokens: int | None = None) -> Any:
        """Shapes and types of what `prepare` takes for so many images. text_tokens: padded length
        of texts; None: the most that the model takes."""
        raise NotImplementedError

    # --- what the engine calls --------------------------------------------------------------------

    def prepare(self, condition: Any) -> dict[str, Any]:
        """Everything that depends on the condition only, for all rows: `head` [R, 2, D] and
        `layers` (leading axis layers, scanned with the stacked blocks) are expected in it."""
        raise NotImplementedError

    def scale_context(self, context: dict, maps: ScaleMaps, sampling: Sampling) -> Any:
        """What all layers of a scale share beyond the condition."""
        return None

    def empty_code_map(self, batch: int) -> Float[Array, "B P Q C"]:
        return jnp.zeros((batch, *self.transformer.config.code_map), jnp.float32)

    def embed(
        self, context: dict, code_map: Float[Array, "B P Q C"], maps: ScaleMaps
    ) -> Float[Array, "R T D"]:
        """Inputs of a scale from what has been drawn so far."""
        raise NotImplementedError

    @property
    def blocks(self):
        return self.transformer.blocks

    def project(self, block, layer_context, shared, x):
        return self.transformer.project(block, layer_context, x)

    def raw_queries(self, block, layer_context, x):
        return self.transformer.raw_queries(block, layer_context, x)

    def finish(self, block, layer_context, shared, x, attended):
        return self.transformer.finish(block, layer_context, x, attended)

    def draw(
        self,
        context: dict,
        x: Float[Array, "R T D"],
        keys: Array,
        maps: ScaleMaps,
        sampling: Sampling,
        given: tuple[Array, Array] | None,
    ) -> dict[str, Array]:
        """Tokens, their code vectors and guided logits of a scale, as many images at a time as
        `LOGITS_BYTES` allow. `given` = (tokens, number of scales that take them) replaces the draw
        there."""
        images, tokens = keys.shape[0], x.shape[1]
        head, x = (a.reshape(2, images, *a.shape[1:]) for a in (context["head"], x))

        def some(index):
            rows = (a[:, index].reshape(-1, *a.shape[2:]) for a in (head, x))
            logits = self.logits(*rows, maps, sampling)
            forced = None if given is None else (given[0][index], given[1])
            chosen, codes = self.choose(logits, keys[index], maps, sampling, forced)
            return {"tokens": chosen, "codes": codes, "logits": logits}

        at_once = images_at_once(tokens, self.transformer.config.logits_per_token)
        return map_in_chunks(some, images, at_once)

    def logits(self, head: Float[Array, "R 2 D"], x, maps: ScaleMaps, sampling: Sampling) -> Array:
        """Guided logits [B, T, ...], float32, before filters."""
        raise NotImplementedError

    def choose(
        self, logits: Array, keys: Array, maps: ScaleMaps, sampling: Sampling, given
    ) -> tuple[Array, Float[Array, "B T C"]]:
        """Tokens and their code vectors."""
        raise NotImplementedError

    def accumulate(
        self, code_map, codes: Float[Array, "B T C"], maps: ScaleMaps
    ) -> Float[Array, "B P Q C"]:
        """Add a scale's codes to the latent map."""
        raise NotImplementedError

    def decode(self, code_map: Float[Array, "B P Q C"]) -> Float[Array, "B H W 3"]:
        """Pixels in [0, 1]."""
        return (self.codec.decode(code_map) + 1) / 2

    # --- tokens in files --------------------------------------------------------------------------

    def tokens_to_file(self, tokens: np.ndarray) -> np.ndarray:
        """Drawn tokens of N images as `arrays.npz` has them."""
        return np.asarray(tokens, np.int32)

    def no_tokens(self, images: int) -> np.ndarray:
        """Tokens as they are drawn, all 0, for programs that take given ones and get none."""
        return np.zeros((images, self.geometry.schedule.total_tokens), np.int32)

    def tokens_from_file(self, array: np.ndarray, num_images: int, scales: int) -> np.ndarray:
        """The inverse, for tokens that are given; `UserError` if the array does not fit.

        scales: how many scales take them; it may end there.
        """
        raise NotImplementedError
