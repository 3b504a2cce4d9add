"""Bits drawn between a picture's own and those of another text: editing without a mask.

After EditMod (arXiv 2608.09057), for models that draw bits scale by scale. The first scales take
the bits of the picture. The scales after them draw every bit from

    clip(Q + p(b | target) - p(b | source), 0, 1),  Q = p where the picture's bit is 1, else 1 - p

and the last scales draw freely. Both probabilities are the model's, with guidance and temperature,
after the scales that have been drawn; only the texts differ. So a batch holds every image twice:
its first half draws under the target texts, its second half follows it under the source texts.

Letters: B images of a batch, of which B / 2 are edited; T tokens of a scale, C bits per token.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from varjax.core.given import Given
from varjax.core.sampling import Scores
from varjax.core.sequence import Schedule
from varjax.core.step_inputs import AnyArray

MIXTURE_KEY = 2  # folded into a scale's key for the draws of a mixture


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mixture(Given):
    """Given tokens of an edit by text. `tokens` are the picture's, in both halves of a batch.

    mixed: which tokens are drawn from the mixture.
    probability: p, how firmly their bits stay those of the picture, float32.
    """

    mixed: Bool[AnyArray, "B L"]
    probability: Float[AnyArray, ""]

    @classmethod
    def of_scales(
        cls,
        tokens: Integer[np.ndarray, "B L C"],
        schedule: Schedule,
        keep_scales: int,
        mix_scales: int,
        probability: float,
    ) -> "Mixture":
        """The first `keep_scales` scales take the picture's bits, those up to `mix_scales` are
        mixed. tokens: of the pictures of a batch, whose second half repeats the first."""
        scale = np.broadcast_to(schedule.scale_of_token, tokens.shape[:2])
        # both halves of a batch have the same picture, so the same scales are kept in both
        kept = scale < keep_scales
        mixed = (scale < mix_scales) & ~kept
        p = jnp.float32(probability)
        return cls(jnp.asarray(tokens), jnp.asarray(kept), jnp.asarray(mixed), p)

    def noted(self, scores: Scores) -> dict[str, Array]:
        """Of every bit the chance that it is 1, from the logits that it is drawn from."""
        logits = scores.guided()
        return {"chances": jax.nn.sigmoid(logits[..., 1] - logits[..., 0])}

    def settled(self, drawn, codes, keys, place, greedy):
        chances = drawn.pop("chances")
        tokens = self.settle(drawn["tokens"], chances, keys, place, greedy)
        return drawn | {"tokens": tokens, "codes": codes(tokens)}

    def settle(
        self,
        drawn: Integer[Array, "B T C"],
        chances: Float[Array, "B T C"],
        keys: Array,
        place: Int[Array, " T"],
        greedy: bool,
    ) -> Integer[Array, "B T C"]:
        """The tokens of a scale, the same in both halves.

        drawn: tokens, with those that are given in their places.
        chances: of every bit that it is 1, under the texts of both halves.
        keys: of this scale, one per image. greedy: take the likelier bit.
        """
        half = len(drawn) // 2
        # Q: of every bit, how likely the picture alone makes it 1
        ones = self.tokens[:half, place] == 1
        source = jnp.where(ones, self.probability, 1 - self.probability)
        expected = chances[:half] - chances[half:] + source
        if greedy:
            found = expected > 0.5
        else:
            keys = jax.vmap(lambda key: jax.random.fold_in(key, MIXTURE_KEY))(keys[:half])
            # a number per bit that does not depend on the padded length, as in `sampling.gumbel`
            draw = jax.vmap(lambda key: jax.random.uniform(key, drawn.shape[1:], jnp.float32))
            found = draw(keys) < expected  # numbers in [0, 1): clipping would change nothing
        mixed = self.mixed[:half, place, None]
        tokens = jnp.where(mixed, found.astype(drawn.dtype), drawn[:half])
        return jnp.concatenate([tokens, tokens])
