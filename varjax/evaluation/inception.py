"""The network of the Frechet inception distance: Inception v3 as TensorFlow published it in 2015.

It is torchvision's Inception v3 (Szegedy et al. 2016) with other pooling: at the edges, averages of
3x3 divide by the number of pixels inside the picture, and the last block pools by maximum. Names
are torchvision's. Widths are free, so that tests can have a network of an eighth of them.
Everything runs in float32 with full-precision products: in bfloat16 features are off by 0.14.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from varjax.evaluation.pooling import max_pool, max_pool_same, mean_pool_same
from varjax.nn import published

SIDE = 299  # pixels of what the network sees
EPSILON = 1e-3  # of the batch normalisation
SPATIAL_CHANNELS = 7  # of Mixed_6d.branch1x1, 17x17 positions: features of the spatial FID
SPATIAL_SIDE = 17


class Layer(NamedTuple):
    """A convolution: its name in the block, kernel, stride, whether the map keeps its size."""

    name: str
    size: tuple[int, int] = (1, 1)
    stride: int = 1
    same: bool = True


def _square(name: str, side: int, stride: int = 1, same: bool | None = None) -> Layer:
    return Layer(name, (side, side), stride, stride == 1 if same is None else same)


def _ways(name: str, *sizes: tuple[int, int]) -> tuple[Layer, ...]:
    """A 1x1 convolution and what follows it: NAME_1, NAME_2, ..."""
    return tuple(Layer(f"{name}_{i}", size) for i, size in enumerate(((1, 1), *sizes), 1))


_3, _5, _WIDE, _HIGH = (3, 3), (5, 5), (1, 7), (7, 1)
_ONE, _POOLED = (Layer("branch1x1"),), (Layer("branch_pool"),)
_FORK = ((1, 3), (3, 1))  # two convolutions side by side, at the end of a branch


def _forked(*layers: Layer) -> tuple:
    *first, last = layers
    stem, number = last.name.rsplit("_", 1)
    fork = (Layer(f"{stem}_{int(number) + 1}{x}", s) for x, s in zip("ab", _FORK, strict=True))
    return (*first, last, tuple(fork))


# Branches in the order in which they are joined; the pooling branch, if it has a convolution, last.
_A = (_ONE, _ways("branch5x5", _5), _ways("branch3x3dbl", _3, _3), _POOLED)
_B = (
    (_square("branch3x3", 3, 2),),
    (*_ways("branch3x3dbl", _3), _square("branch3x3dbl_3", 3, 2)),
)
_C = (
    _ONE,
    _ways("branch7x7", _WIDE, _HIGH),
    _ways("branch7x7dbl", _HIGH, _WIDE, _HIGH, _WIDE),
    _POOLED,
)
_D = (
    (*_ways("branch3x3"), _square("branch3x3_2", 3, 2)),
    (*_ways("branch7x7x3", _WIDE, _HIGH), _square("branch7x7x3_4", 3, 2)),
)
_E = (
    _ONE,
    _forked(*_ways("branch3x3")),
    _forked(*_ways("branch3x3dbl", _3)),
    _POOLED,
)
STEM = (
    (_square("Conv2d_1a_3x3", 3, 2), _square("Conv2d_2a_3x3", 3, same=False)),
    (_square("Conv2d_2b_3x3", 3), "maxpool1"),
    (Layer("Conv2d_3b_1x1"), _square("Conv2d_4a_3x3", 3, same=False), "maxpool2"),
)
_STEM = tuple(layer for group in STEM for layer in group)
# {block: (branches, how the last branch pools)}
BLOCKS = {
    "Mixed_5b": (_A, "mean"),
    "Mixed_5c": (_A, "mean"),
    "Mixed_5d": (_A, "mean"),
    "Mixed_6a": (_B, "shrink"),
    "Mixed_6b": (_C, "mean"),
    "Mixed_6c": (_C, "mean"),
    "Mixed_6d": (_C, "mean"),
    "Mixed_6e": (_C, "mean"),
    "Mixed_7a": (_D, "shrink"),
    "Mixed_7b": (_E, "mean"),
    "Mixed_7c": (_E, "max"),
}

_POOLING = {"mean": mean_pool_same, "max": max_pool_same, "shrink": lambda x: max_pool(x, 3)}


def _flat(branch: tuple) -> tuple[Layer, ...]:
    """All layers of a branch, including the two of a fork."""
    return sum((item if type(item) is tuple else (item,) for item in branch), ())


# Names of all convolutions, in the order of the configuration's widths.
CONVOLUTIONS = tuple(layer.name for layer in _STEM if isinstance(layer, Layer))
CONVOLUTIONS += tuple(
    f"{block}.{layer.name}"
    for block, (branches, _) in BLOCKS.items()
    for branch in branches
    for layer in _flat(branch)
)


@dataclass(frozen=True, kw_only=True)
class InceptionConfig(published.Configuration):
    """Widths: output channels of every convolution, in the order of `CONVOLUTIONS`."""

    what = "Inception"

    widths: tuple[int, ...]
    num_classes: int = 1008

    def __post_init__(self):
        self.check_sizes("num_classes")
        if len(self.widths) != len(CONVOLUTIONS):
            raise self.wrong(f"{len(self.widths)} widths for {len(CONVOLUTIONS)} convolutions")
        for name, width in zip(CONVOLUTIONS, self.widths, strict=True):
            self.check_size(f"width of {name}", width)
        spatial = self.width("Mixed_6d.branch1x1")
        self.check_size("width of Mixed_6d.branch1x1", spatial, SPATIAL_CHANNELS)

    @classmethod
    def from_published(cls, given: Mapping) -> Self:
        return cls(**cls.arguments(given, ()))

    def width(self, name: str) -> int:
        return self.widths[CONVOLUTIONS.index(name)]

    @property
    def features(self) -> int:
        """Numbers per picture before the classifier."""
        return self.block_width("Mixed_7c", 0)

    def block_width(self, block: str, incoming: int) -> int:
        """Channels of a block's output. incoming: channels of its input."""
        branches, pooling = BLOCKS[block]
        ends = [_flat((branch[-1],)) for branch in branches]
        widths = (self.width(f"{block}.{layer.name}") for end in ends for layer in end)
        return sum(widths) + (incoming if pooling == "shrink" else 0)


class Convolution(nnx.Module):
    """Convolution without bias, batch normalisation with stored statistics, ReLU."""

    def __init__(self, c_in: int, c_out: int, layer: Layer):
        self.stride, self.padding = layer.stride, "SAME" if layer.same else "VALID"
        self.kernel = nnx.Param(jnp.zeros((*layer.size, c_in, c_out)))
        self.scale = nnx.Param(jnp.ones((c_out,)))
        self.bias = nnx.Param(jnp.zeros((c_out,)))
        self.mean = nnx.Param(jnp.zeros((c_out,)))
        self.variance = nnx.Param(jnp.ones((c_out,)))

    def __call__(self, x: Float[Array, "B h w C"]) -> Float[Array, "B p q D"]:
        layout = ("NHWC", "HWIO", "NHWC")
        strides = (self.stride, self.stride)
        x = jax.lax.conv_general_dilated(
            x, self.kernel[...], strides, self.padding, dimension_numbers=layout
        )
        factor = self.scale[...] / jnp.sqrt(self.variance[...] + EPSILON)
        return jax.nn.relu(x * factor + (self.bias[...] - self.mean[...] * factor))


class Block(nnx.Module):
    """Branches over the same input, joined along the channels."""

    def __init__(self, name: str, c_in: int, config: InceptionConfig):
        self.branches, self.pooling = BLOCKS[name]
        for branch in self.branches:
            width = c_in
            for item in branch:
                layers = _flat((item,))
                for layer in layers:
                    c_out = config.width(f"{name}.{layer.name}")
                    setattr(self, layer.name, Convolution(width, c_out, layer))
                width = config.width(f"{name}.{layers[-1].name}")

    def __call__(self, x: Float[Array, "B h w C"]) -> Float[Array, "B p q D"]:
        pooled = _POOLING[self.pooling](x)
        joined: list = []
        for branch in self.branches:
            y = pooled if branch is _POOLED else x
            for item in branch:
                parts = [getattr(self, layer.name)(y) for layer in _flat((item,))]
                y = parts[0]
            joined += parts
        return jnp.concatenate([*joined, pooled] if self.pooling == "shrink" else joined, axis=-1)


class Dense(nnx.Module):
    """The last layer, which classifies; the published score leaves out its bias."""

    def __init__(self, c_in: int, c_out: int):
        self.kernel = nnx.Param(jnp.zeros((c_in, c_out)))
        self.bias = nnx.Param(jnp.zeros((c_out,)))


class Inception(nnx.Module):
    """Pictures, resized and normalised (`evaluation.resizing`), to features."""

    def __init__(self, config: InceptionConfig, *, rngs: nnx.Rngs | None = None):
        self.config, width = config, 3
        for layer in _STEM:
            if isinstance(layer, Layer):
                setattr(self, layer.name, Convolution(width, config.width(layer.name), layer))
                width = config.width(layer.name)
        for name in BLOCKS:
            setattr(self, name, Block(name, width, config))
            width = config.block_width(name, width)
        self.fc = Dense(width, config.num_classes)

    def activations(self, x: Float[Array, "B 299 299 3"]) -> dict[str, Float[Array, "B h w C"]]:
        """The output of every block and of everything before them, by name."""
        found = {}
        with jax.default_matmul_precision("highest"):
            for layer in _STEM:
                is_pool = isinstance(layer, str)
                x = max_pool(x, 3) if is_pool else getattr(self, layer.name)(x)
                found[layer if is_pool else layer.name] = x
            for name in BLOCKS:
                found[name] = x = getattr(self, name)(x)
        return found

    def __call__(self, x: Float[Array, "B 299 299 3"]) -> dict[str, Float[Array, "B _"]]:
        """Features by name. `pool` [B, F] is what FID compares. `spatial` [B, 2023], 17 x 17
        positions of 7 channels, is what sFID compares. `logits` [B, classes] have no bias; the
        Inception score is computed from them."""
        found = self.activations(x)
        with jax.default_matmul_precision("highest"):
            pool = found["Mixed_7c"].mean((1, 2))
            spatial = self.Mixed_6d.branch1x1(found["Mixed_6c"])[..., :SPATIAL_CHANNELS]
            logits = pool @ self.fc.kernel[...]
        return {"pool": pool, "spatial": spatial.reshape(len(x), -1), "logits": logits}
