"""GPU memory that HeadKV and LineAR print for models that draw token by token, and the arithmetic
that takes it apart.

A printed total is keys and values, weights, and a rest. The first two are known: the keys and
values of the tokens that a cache holds in the end (all that are read again, or the papers' part of
the image tokens), and the parameters that the original loads in 16 bits. The rest is what decoding
and the framework take, and has to be about the same in all numbers of a table if the count is the
authors'.

Lumina-mGPT's own code caches keys in float32 and values in bfloat16, since its norm of queries and
keys gives float32 under autocast and nothing casts it back: 6 bytes for an element of both. Counted
so, the rest is 1.1 to 1.5 GiB in all nine numbers of the two papers; counted as 4 bytes it would be
2 to 17. Neither paper says how long its texts are. `text` is what makes the rest of a table even;
one token more of it is 0.009 to 0.05 GiB.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from varjax.cache.allocation import Geometry

GIB = 2**30
WEIGHT_BYTES = 2
LUMINA_PAIR = 6  # bytes of an element of K and one of V: float32, bfloat16


@dataclass(frozen=True, kw_only=True)
class Totals:
    """One model's row of a table: all memory on the GPU.

    table: whose it is. HeadKV: arXiv 2605.20600, tables 4 and 6, an A6000 of 48 GB; LineAR: the
      efficiency table of its repository (Zr2223/LineAR), GPU not named.
    sizes: layers, heads, size of a head. tokens: of an image, new lines included.
    batch: images; each has two rows.
    parameters: those that the original loads.
    text: slots of the condition of a row, on average.
    pair: bytes of an element of K and one of V.
    printed: {part of the cache: {method: GiB}}. Part 1.0 is the full cache.
    """

    table: str
    sizes: tuple[int, int, int]
    tokens: int
    batch: int
    parameters: float
    text: int
    pair: int = 4
    printed: Mapping[float, Mapping[str, float]]

    def serves(self, geometry: Geometry) -> bool:
        """Whether it is about a model of these sizes."""
        sizes = geometry.num_layers, geometry.num_heads, geometry.head_dim
        return (sizes, geometry.schedule.image_tokens) == (self.sizes, self.tokens)

    def nearest(self, budget: float) -> float:
        """The part that is nearest to a budget."""
        return min(self.printed, key=lambda part: abs(part - budget))

    @property
    def full(self) -> float:
        """GiB in all with the full cache."""
        (total,) = self.printed[1.0].values()
        return total

    @property
    def weights(self) -> float:
        """GiB of the parameters."""
        return self.parameters * WEIGHT_BYTES / GIB

    def keys_and_values(self, part: float, pair: int | None = None) -> float:
        """GiB of keys and values when a picture is done. The last token is never stored. pair: in
        place of the original's bytes."""
        layers, heads, size = self.sizes
        image = self.tokens - 1 if part == 1.0 else part * self.tokens
        elements = 2 * self.batch * layers * heads * size * (image + self.text)
        return elements * (self.pair if pair is None else pair) / GIB

    def rest(self, part: float, method: str, pair: int | None = None) -> float:
        """GiB of a printed total that are neither weights nor keys and values."""
        return self.printed[part][method] - self.weights - self.keys_and_values(part, pair)


FULL = "full cache"
PADDED = "HeadKV padded"  # the heads' caches made equally long, and masked
_XL = {"sizes": (36, 20, 64), "tokens": 576, "parameters": 775e6, "text": 1}
_XXL = {"sizes": (48, 24, 64), "tokens": 576, "parameters": 1411e6, "text": 1}
_JANUS_1B = {"sizes": (24, 16, 128), "tokens": 576, "parameters": 2.09e9, "text": 20}
_JANUS_7B = {"sizes": (30, 32, 128), "tokens": 576, "parameters": 7.42e9, "text": 20}
_LUMINA = {"sizes": (32, 32, 128), "parameters": 7.013e9, "pair": LUMINA_PAIR}
_LUMINA_768 = {**_LUMINA, "tokens": 48 * 49}
_LUMINA_1024 = {**_LUMINA, "tokens": 64 * 65}
TOTALS = (
    Totals(
        table="HeadKV",
        batch=128,
        **_XL,
        printed={
            1.0: {FULL: 33.91},
            1 / 4: {"HeadKV": 14.63, "LineAR": 14.88},
            1 / 6: {"HeadKV": 12.34, "LineAR": 12.62},
        },
    ),
    Totals(
        table="LineAR",
        batch=256,
        **_XL,
        printed={1.0: {FULL: 64.75}, 1 / 4: {"LineAR": 25.51}, 1 / 6: {"LineAR": 20.97}},
    ),
    Totals(
        table="LineAR",
        batch=128,
        **_XXL,
        printed={1.0: {FULL: 51.37}, 1 / 4: {"LineAR": 19.54}, 1 / 6: {"LineAR": 15.87}},
    ),
    Totals(
        table="LineAR",
        batch=128,
        **_JANUS_1B,
        printed={1.0: {FULL: 58.68}, 1 / 4: {"LineAR": 37.04}, 1 / 6: {"LineAR": 34.64}},
    ),
    Totals(
        table="HeadKV",
        batch=55,
        **_JANUS_7B,
        printed={
            1.0: {FULL: 45.04},
            1 / 6: {"HeadKV": 21.58, "LineAR": 22.03},
            1 / 8: {"HeadKV": 20.45, "LineAR": 20.66},
        },
    ),
    Totals(
        table="LineAR",
        batch=64,
        **_JANUS_7B,
        printed={1.0: {FULL: 74.01}, 1 / 4: {"LineAR": 47.59}, 1 / 6: {"LineAR": 44.66}},
    ),
    Totals(
        table="HeadKV",
        batch=6,
        **_LUMINA_768,
        text=48,
        printed={
            1.0: {FULL: 35.27},
            1 / 8: {"HeadKV": 17.21, PADDED: 17.59, "LineAR": 17.31},
        },
    ),
    # Totals so small that no room is left for a text.
    Totals(
        table="LineAR",
        batch=12,
        **_LUMINA_768,
        text=0,
        printed={1.0: {FULL: 55.48}, 1 / 6: {"LineAR": 21.43}, 1 / 8: {"LineAR": 19.64}},
    ),
    Totals(
        table="LineAR",
        batch=8,
        **_LUMINA_1024,
        text=0,
        printed={1.0: {FULL: 62.95}, 1 / 8: {"LineAR": 20.50}},
    ),
)


def rows_near(geometry: Geometry, budget: float, near: float) -> Iterable[tuple[Totals, float]]:
    """Yield the tables' rows for a model, each with its part of the cache that is within `near` of
    the budget."""
    for totals in TOTALS:
        if totals.serves(geometry) and abs(totals.nearest(budget) - budget) <= near:
            yield totals, totals.nearest(budget)
