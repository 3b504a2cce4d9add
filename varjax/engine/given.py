"""Tokens that are given and not drawn: any place of any image; and bits drawn between a picture's
own and those of another text (`Mixture`): editing without a mask.

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
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from varjax.arguments import integer
from varjax.models.step_inputs import AnyArray
from varjax.schedule import Schedule
from varjax.sequence import TokenSequence

MIXTURE_KEY = 2  # folded into a scale's key for the draws of a mixture


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Given:
    """Tokens that replace the draw where `where` is true.

    tokens: all tokens of every image, scale by scale or in raster order; bitwise models have an
      axis of bits behind them. Tokens outside `where` are not looked at.
    where: which of them are given. It is data, so one compiled program serves free, forced and
      partly forced runs.
    """

    tokens: Integer[AnyArray, "B L ..."]
    where: Bool[AnyArray, "B L"]

    @classmethod
    def of(
        cls, given: "np.ndarray | Given", order: Schedule | TokenSequence, steps: int | None = None
    ) -> "Given":
        """The first `steps` steps of an array as given (None: all of it); a `Given` as it is.
        `UserError` for more steps than there are. given: tokens of every image, all of them or as
        many as are given."""
        drawn = order.num_drawn
        if steps is not None:
            steps = integer(f"given {order.kind}", steps, 0, drawn)
        if isinstance(given, cls):
            return given
        tokens, length = np.asarray(given), order.first_tokens(drawn)
        count = min(order.first_tokens(drawn if steps is None else steps), tokens.shape[1])
        # Places beyond the array would be clamped to its last token, so it is filled up.
        missing = [(0, 0), (0, length - tokens.shape[1])] + [(0, 0)] * (tokens.ndim - 2)
        tokens = np.pad(tokens, missing)
        where = np.broadcast_to(np.arange(length) < count, tokens.shape[:2])
        return cls(jnp.asarray(tokens), jnp.asarray(where))

    def take(self, index: np.ndarray) -> "Given":
        """The given tokens of some images of a run."""
        return jax.tree.map(lambda a: a[index], self)

    def replace(
        self,
        drawn: Integer[Array, "b T ..."],
        place: Int[Array, " T"],
        images: slice | Int[Array, " b"] = slice(None),
    ) -> Integer[Array, "b T ..."]:
        """The tokens drawn at some places, with those that are given in their stead.

        place: numbers of the T tokens in the image. images: numbers of the b images in the batch.
        """
        # gathered in every run: which tokens are given is data, so that all runs share one program
        given = self.tokens[:, place][images].astype(drawn.dtype)
        return self.choose(given, drawn, place, images)

    def choose(
        self,
        given: Shaped[Array, "b T ..."],
        other: Shaped[Array, "b T ..."],
        place: Int[Array, " T"],
        images: slice | Int[Array, " b"] = slice(None),
    ) -> Shaped[Array, "b T ..."]:
        """`given` at given places and `other` elsewhere. place, images: as in `replace`."""
        where = self.where[:, place][images]
        return jnp.where(where.reshape(*where.shape, *(1,) * (other.ndim - 2)), given, other)


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
