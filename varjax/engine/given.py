"""Tokens that are given and not drawn: any place of any image."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer

from varjax.models.step_inputs import AnyArray
from varjax.schedule import Schedule
from varjax.sequence import TokenSequence


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
    def first(cls, tokens: np.ndarray, count: int) -> "Given":
        """The first `count` tokens of every image."""
        first = np.broadcast_to(np.arange(tokens.shape[1]) < count, tokens.shape[:2])
        return cls(jnp.asarray(tokens), jnp.asarray(first))

    @classmethod
    def of(
        cls, given: "np.ndarray | Given", order: Schedule | TokenSequence, steps: int | None
    ) -> "Given":
        """From an array of all tokens, whose first `steps` steps are given (None: all); what says
        itself where it is given stays as it is."""
        if isinstance(given, cls):
            return given
        return cls.first(given, order.first_tokens(order.num_drawn if steps is None else steps))

    def replace(
        self,
        drawn: Integer[Array, "b T ..."],
        place: Int[Array, " T"],
        images: slice | Int[Array, " b"] = slice(None),
    ) -> Integer[Array, "b T ..."]:
        """Return the tokens drawn at some places, with those that are given in their stead.

        place: numbers of the T tokens in the image. images: numbers of the b images in the batch.
        """
        given = self.tokens[:, place][images].astype(drawn.dtype)
        where = self.where[:, place][images]
        where = where.reshape(*where.shape, *(1,) * (drawn.ndim - where.ndim))
        return jnp.where(where, given, drawn)
