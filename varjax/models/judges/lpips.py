"""LPIPS: the perceptual distance of pictures (Zhang et al. 2018), version 0.1, on AlexNet or VGG16.

The activations of five layers are scaled to unit length over the channels. Squared differences are
weighted per channel, averaged over positions and summed. Pictures keep their size. Everything runs
in float32 with full-precision products.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from varjax.core.errors import UserError, choose
from varjax.storage import published

SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # of the channels of -1..1
UNIT_EPSILON = 1e-10  # added to a length; torchmetrics adds 1e-8 under the root, equal to 7e-11
BYTES_PER_CALL = 2**30  # of the activations of the largest layer


class Layer(NamedTuple):
    """A convolution: its number in torchvision's `features`, side of the kernel, stride."""

    number: int
    side: int = 3
    stride: int = 1
    padding: int = 1


# Layers up to each tap, by net; and the side of the max pooling (stride 2) before them, 0: none.
NETS = {
    "alex": ((Layer(0, 11, 4, 2),), (Layer(3, 5, 1, 2),), (Layer(6),), (Layer(8),), (Layer(10),)),
    "vgg": tuple(
        tuple(map(Layer, numbers))
        for numbers in ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28))
    ),
}
POOLS = {"alex": (0, 3, 3, 0, 0), "vgg": (0, 2, 2, 2, 2)}
SMALLEST = {"alex": 31, "vgg": 16}  # pixels of the shorter side that leave something to pool


def layers_of(net: str) -> tuple[Layer, ...]:
    return tuple(layer for group in NETS[net] for layer in group)


@dataclass(frozen=True, kw_only=True)
class LPIPSConfig(published.Configuration):
    """net: `alex` or `vgg`. widths: output channels of every convolution, first to last."""

    what = "LPIPS"

    net: object
    widths: tuple[int, ...]

    def __post_init__(self):
        choose("LPIPS network", self.net, NETS)
        if len(self.widths) != len(layers_of(self.net)):
            count = len(layers_of(self.net))
            raise self.wrong(f"{len(self.widths)} widths for {count} convolutions")
        for width in self.widths:
            self.check_size("width", width)


class LPIPS(nnx.Module):
    """Pairs of pictures in 0..1 to distances."""

    def __init__(self, config: LPIPSConfig, *, rngs: nnx.Rngs | None = None):
        self.config, width = config, 3
        for layer, c_out in zip(layers_of(config.net), config.widths, strict=True):
            found = nnx.Conv(
                width,
                c_out,
                (layer.side, layer.side),
                layer.stride,
                padding=layer.padding,
                kernel_init=nnx.initializers.zeros,
                rngs=rngs or nnx.Rngs(0),
            )
            setattr(self, f"features_{layer.number}", found)
            width = c_out
        widths = dict(zip(layers_of(config.net), config.widths, strict=True))
        for number, group in enumerate(NETS[config.net]):
            setattr(self, f"head_{number}", nnx.Param(jnp.zeros((widths[group[-1]],))))

    def activations(self, images: Float[Array, "B H W 3"]) -> list[Float[Array, "B h w C"]]:
        """Activations of the five taps for pictures in 0..1. `UserError`: pictures that are too
        small for the network."""
        check_size(self.config, *images.shape[1:3])
        x, taps = (2 * images - 1 - np.float32(SHIFT)) / np.float32(SCALE), []
        with jax.default_matmul_precision("highest"):
            for pool, group in zip(POOLS[self.config.net], NETS[self.config.net], strict=True):
                x = nnx.max_pool(x, (pool, pool), (2, 2)) if pool else x
                for layer in group:
                    x = jax.nn.relu(getattr(self, f"features_{layer.number}")(x))
                taps.append(x)
        return taps

    def layers(
        self, a: Float[Array, "B H W 3"], b: Float[Array, "B H W 3"]
    ) -> Float[Array, "B taps"]:
        """The distance of every pair at every tap; LPIPS is their sum."""
        found = []
        taps = zip(self.activations(a), self.activations(b), strict=True)
        for number, pair in enumerate(taps):
            lengths = (jnp.sqrt(jnp.square(x).sum(-1, keepdims=True)) for x in pair)
            # of unit length; zeros stay zeros
            x, y = (x / (length + UNIT_EPSILON) for x, length in zip(pair, lengths, strict=True))
            squares = jnp.square(x - y)
            head = getattr(self, f"head_{number}")[...]
            found.append((squares * head).sum(-1).mean((1, 2)))
        return jnp.stack(found, axis=1)


def check_size(config: LPIPSConfig, height: int, width: int) -> None:
    """`UserError` for pictures that are too small for the network."""
    least = SMALLEST[config.net]
    if min(height, width) < least:
        raise UserError(
            f"pictures of {height}x{width} pixels: LPIPS on {config.net} needs at least {least} on"
            " each side"
        )


def batch_size(config: LPIPSConfig, height: int, width: int) -> int:
    """Pairs at a time: the first layers of large pictures take much memory."""
    layer, channels = layers_of(config.net)[0], config.widths[0]
    one = 2 * 3 * 4 * channels * height * width / layer.stride**2  # a pair, and what is in flight
    return max(1, math.floor(BYTES_PER_CALL / one))
