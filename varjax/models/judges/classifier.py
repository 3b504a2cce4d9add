"""A small convolutional classifier of pictures of one size, trained by `experiments.train
--stage=classifier`: which class a picture looks like, and features to compare pictures by.

It judges models of the classes that it knows. Distances of its features are no FID: they compare
with nothing outside the data that it was trained on. Everything runs in full float32.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from varjax.core.errors import UserError
from varjax.storage import published

WIDTHS = (32, 64, 96, 128)
GROUP = 8  # channels that are normalised together; single ones would lose their mean, a colour
EPSILON = 1e-5
LARGEST_SIDE = 1024
PIXELS_PER_CALL = 2**21


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(published.Configuration):
    """image_size: side of the pictures in pixels. widths: channels after every convolution; each
    convolution halves the map. class_names: names of all classes in order, or empty."""

    what = "classifier"

    num_classes: int
    image_size: int
    widths: tuple[int, ...] = WIDTHS
    class_names: object = ()

    def __post_init__(self):
        self.check_size("num_classes", self.num_classes)
        self.check_size("image_size", self.image_size, 2 ** len(self.widths), LARGEST_SIDE)
        for width in self.widths:
            self.check_size("width", width, least=GROUP)
            if width % GROUP:
                raise self.wrong(f"width is {width}, it must be a multiple of {GROUP}")
        names = self.class_names
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            raise self.wrong(f"class_names is {names!r:.60}, it must list texts")
        if names and len(names) != self.num_classes:
            raise self.wrong(f"{len(names)} class_names for {self.num_classes} classes")
        object.__setattr__(self, "class_names", tuple(names))


class ClassifierBlock(nnx.Module):
    """Convolution of 3x3 with stride 2, group normalisation, ReLU."""

    def __init__(self, c_in: int, c_out: int, *, rngs: nnx.Rngs):
        draw = nnx.initializers.he_normal()
        self.kernel = nnx.Param(draw(rngs.params(), (3, 3, c_in, c_out)))
        self.scale, self.bias = nnx.Param(jnp.ones(c_out)), nnx.Param(jnp.zeros(c_out))

    def __call__(self, x: Float[Array, "B h w C"]) -> Float[Array, "B p q D"]:
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, self.kernel[...], (2, 2), "SAME", dimension_numbers=layout
        )
        groups = x.reshape(*x.shape[:3], -1, GROUP)
        mean = groups.mean((1, 2, 4), keepdims=True)
        variance = jnp.square(groups - mean).mean((1, 2, 4), keepdims=True)
        normal = ((groups - mean) * jax.lax.rsqrt(variance + EPSILON)).reshape(x.shape)
        return jax.nn.relu(normal * self.scale[...] + self.bias[...])


class Classifier(nnx.Module):
    """Pictures in 0..1 to features and to logits of the classes."""

    def __init__(self, config: ClassifierConfig, *, rngs: nnx.Rngs):
        self.config, width = config, 3
        for number, c_out in enumerate(config.widths):
            setattr(self, f"block_{number}", ClassifierBlock(width, c_out, rngs=rngs))
            width = c_out
        draw = nnx.initializers.normal(0.01)
        self.kernel = nnx.Param(draw(rngs.params(), (width, config.num_classes)))
        self.bias = nnx.Param(jnp.zeros(config.num_classes))

    def features(self, images: Float[Array, "B S S 3"]) -> Float[Array, "B D"]:
        """The output of the last block, averaged over the map: D = widths[-1] numbers."""
        x = 2 * images - 1
        with jax.default_matmul_precision("highest"):
            for number in range(len(self.config.widths)):
                x = getattr(self, f"block_{number}")(x)
        return x.mean((1, 2))

    def logits(self, features: Float[Array, "B D"]) -> Float[Array, "B classes"]:
        return jnp.dot(features, self.kernel[...], precision="highest") + self.bias[...]

    def __call__(self, images: Float[Array, "B S S 3"]) -> Float[Array, "B classes"]:
        return self.logits(self.features(images))


def check_size(config: ClassifierConfig, height: int, width: int) -> None:
    """`UserError` for pictures of another size than the network was trained on."""
    if (height, width) != (config.image_size, config.image_size):
        raise UserError(
            f"pictures of {height}x{width} pixels: the classifier was trained on pictures of"
            f" {config.image_size}x{config.image_size}, and on others it means nothing"
        )


def batch_size(height: int, width: int) -> int:
    """Pictures at a time, so that the first map stays below 256 MiB."""
    return max(1, PIXELS_PER_CALL // (height * width))
