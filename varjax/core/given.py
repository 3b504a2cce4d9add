"""Tokens that are given and not drawn: any place of any image."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer, Shaped

from varjax.core.arguments import integer
from varjax.core.sampling import Scores
from varjax.core.sequence import Schedule, TokenSequence
from varjax.core.step_inputs import AnyArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Given:
    """Tokens that replace the draw where `where` is true.

    tokens: all tokens of every image, scale by scale or in raster order; bitwise models have an
      axis of bits behind them. Tokens outside `where` are not looked at.
    where: which of them are given. It is data: one program serves free and forced runs.
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

    def noted(self, scores: Scores) -> dict[str, Array]:
        """What `settled` takes of the scores of some images, whose axis comes first."""
        return {}

    def settled(
        self,
        drawn: dict[str, Array],
        codes: Callable[[Array], Array],
        keys: Array,
        place: Int[Array, " T"],
        greedy: bool,
    ) -> dict[str, Array]:
        """What a scale has drawn of all images, after a last word on its tokens and their codes.

        drawn: `tokens`, `codes` and what is `noted`, which is taken out. codes: function of tokens.
        keys: of the scale, one per image. greedy: take what is likeliest.
        """
        return drawn
