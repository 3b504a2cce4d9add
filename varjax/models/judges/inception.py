"""The network of the Frechet inception distance: Inception v3 as TensorFlow published it in 2015.

It is torchvision's Inception v3 (Szegedy et al. 2016) with other pooling: at the edges, averages of
3x3 divide by the number of pixels inside the picture, and the last block pools by maximum. Names
are torchvision's. Widths are free, so that tests can have a network of an eighth of them.
Everything runs in float32 with full-precision products: in bfloat16 features are off by 0.14.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from varjax.storage import published

SIDE = 299  # pixels of what the network sees
EPSILON = 1e-3  # of the batch normalisation
SPATIAL_CHANNELS = 7  # of Mixed_6d.branch1x1, 17x17 positions: features of the spatial FID
SPATIAL_SIDE = 17


class InceptionLayer(NamedTuple):
    """A convolution: its name in the block, kernel, stride, whether the map keeps its size."""

    name: str
    size: tuple[int, int]
    stride: int
    same: bool


def _steps(text: str) -> tuple[tuple[InceptionLayer, ...], ...]:
    """Layers one after the other, those joined by & side by side: NAME, NAME:3x3 for other kernels
    than 1x1, NAME:3x3/2 for a stride and whole windows only. A layer of max pooling has no size."""

    def layer(word: str) -> InceptionLayer:
        name, _, rest = word.partition(":")
        size, _, stride = (rest or "1x1").partition("/")
        return InceptionLayer(name, tuple(map(int, size.split("x"))), int(stride or 1), not stride)

    return tuple(tuple(map(layer, word.split("&"))) for word in text.split())


_STEM = _steps(
    "Conv2d_1a_3x3:3x3/2 Conv2d_2a_3x3:3x3/1 Conv2d_2b_3x3:3x3 maxpool1"
    " Conv2d_3b_1x1 Conv2d_4a_3x3:3x3/1 maxpool2"
)
POOLS = ("maxpool1", "maxpool2")
# Branches in the order in which they are joined; the pooling branch, if it has a convolution, last.
_A = """branch1x1
    branch5x5_1 branch5x5_2:5x5
    branch3x3dbl_1 branch3x3dbl_2:3x3 branch3x3dbl_3:3x3
    branch_pool"""
_B = """branch3x3:3x3/2
    branch3x3dbl_1 branch3x3dbl_2:3x3 branch3x3dbl_3:3x3/2"""
_C = """branch1x1
    branch7x7_1 branch7x7_2:1x7 branch7x7_3:7x1
    branch7x7dbl_1 branch7x7dbl_2:7x1 branch7x7dbl_3:1x7 branch7x7dbl_4:7x1 branch7x7dbl_5:1x7
    branch_pool"""
_D = """branch3x3_1 branch3x3_2:3x3/2
    branch7x7x3_1 branch7x7x3_2:1x7 branch7x7x3_3:7x1 branch7x7x3_4:3x3/2"""
_E = """branch1x1
    branch3x3_1 branch3x3_2a:1x3&branch3x3_2b:3x1
    branch3x3dbl_1 branch3x3dbl_2:3x3 branch3x3dbl_3a:1x3&branch3x3dbl_3b:3x1
    branch_pool"""
# {block: (branches, how the last branch pools)}
BLOCKS = {
    f"Mixed_{name}": (tuple(map(_steps, branches.splitlines())), pooling)
    for names, branches, pooling in (
        ("5b 5c 5d", _A, "mean"),
        ("6a", _B, "shrink"),
        ("6b 6c 6d 6e", _C, "mean"),
        ("7a", _D, "shrink"),
        ("7b", _E, "mean"),
        ("7c", _E, "max"),
    )
    for name in names.split()
}


def _mean_of_neighbours(x: Float[Array, "B h w C"]) -> Float[Array, "B h w C"]:
    """Mean over the 3x3 neighbourhood, counting only pixels inside the map."""
    sums, counts = x, []
    for axis in (1, 2):
        size, pad = x.shape[axis], [(int(i == axis),) * 2 for i in range(4)]
        padded = jnp.pad(sums, pad)
        before, here, after = (jax.lax.slice_in_dim(padded, i, i + size, 1, axis) for i in range(3))
        sums = before + here + after
        # in closed form: the compiler would take seconds to fold them
        counts.append(np.minimum(np.arange(size) + 2, size) - np.maximum(np.arange(size) - 1, 0))
    return sums * (1 / np.outer(*counts)[:, :, None]).astype(np.float32)


_POOLING = {
    "mean": _mean_of_neighbours,
    "max": lambda x: nnx.max_pool(x, (3, 3), (1, 1), "SAME"),
    "shrink": lambda x: nnx.max_pool(x, (3, 3), (2, 2)),
}

# Names of all convolutions, in the order of the configuration's widths.
CONVOLUTIONS = tuple(layer.name for (layer,) in _STEM if layer.name not in POOLS)
CONVOLUTIONS += tuple(
    f"{block}.{layer.name}"
    for block, (branches, _) in BLOCKS.items()
    for branch in branches
    for step in branch
    for layer in step
)


@dataclass(frozen=True, kw_only=True)
class InceptionConfig(published.Configuration):
    """Widths: output channels of every convolution, in the order of `CONVOLUTIONS`."""

    what = "Inception"

    widths: tuple[int, ...]
    num_classes: int = 1008

    def __post_init__(self):
        self.check_size("num_classes", self.num_classes)
        if len(self.widths) != len(CONVOLUTIONS):
            raise self.wrong(f"{len(self.widths)} widths for {len(CONVOLUTIONS)} convolutions")
        for name, width in zip(CONVOLUTIONS, self.widths, strict=True):
            self.check_size(f"width of {name}", width)
        spatial = self.width("Mixed_6d.branch1x1")
        self.check_size("width of Mixed_6d.branch1x1", spatial, SPATIAL_CHANNELS)

    def width(self, name: str) -> int:
        return self.widths[CONVOLUTIONS.index(name)]

    def block_width(self, block: str, incoming: int) -> int:
        """Channels of a block's output. incoming: channels of its input."""
        branches, pooling = BLOCKS[block]
        ends = (layer for branch in branches for layer in branch[-1])
        widths = (self.width(f"{block}.{layer.name}") for layer in ends)
        return sum(widths) + (incoming if pooling == "shrink" else 0)


class Convolution(nnx.Module):
    """Convolution without bias, batch normalisation with stored statistics, ReLU."""

    def __init__(self, c_in: int, c_out: int, layer: InceptionLayer):
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


class InceptionBlock(nnx.Module):
    """Branches over the same input, joined along the channels."""

    def __init__(self, name: str, c_in: int, config: InceptionConfig):
        self.name = name
        for branch in BLOCKS[name][0]:
            width = c_in
            for step in branch:
                for layer in step:
                    c_out = config.width(f"{name}.{layer.name}")
                    setattr(self, layer.name, Convolution(width, c_out, layer))
                width = c_out

    def __call__(self, x: Float[Array, "B h w C"]) -> Float[Array, "B p q D"]:
        branches, pooling = BLOCKS[self.name]
        pooled = _POOLING[pooling](x)
        joined: list = []
        for branch in branches:
            y = pooled if branch[0][0].name == "branch_pool" else x
            for step in branch:
                parts = [getattr(self, layer.name)(y) for layer in step]
                y = parts[0]
            joined += parts
        return jnp.concatenate([*joined, pooled] if pooling == "shrink" else joined, axis=-1)


class Inception(nnx.Module):
    """Pictures, resized and normalised (`experiments.evaluation.protocols`), to features."""

    def __init__(self, config: InceptionConfig, *, rngs: nnx.Rngs | None = None):
        self.config, width = config, 3
        for (layer,) in _STEM:
            if layer.name not in POOLS:
                setattr(self, layer.name, Convolution(width, config.width(layer.name), layer))
                width = config.width(layer.name)
        for name in BLOCKS:
            setattr(self, name, InceptionBlock(name, width, config))
            width = config.block_width(name, width)
        zeros, rngs = nnx.initializers.zeros, rngs or nnx.Rngs(0)
        self.fc = nnx.Linear(width, config.num_classes, kernel_init=zeros, rngs=rngs)

    def activations(self, x: Float[Array, "B 299 299 3"]) -> dict[str, Float[Array, "B h w C"]]:
        """The output of every block and of everything before them, by name."""
        found = {}
        with jax.default_matmul_precision("highest"):
            for (layer,) in _STEM:
                is_pool = layer.name in POOLS
                x = _POOLING["shrink"](x) if is_pool else getattr(self, layer.name)(x)
                found[layer.name] = x
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
            logits = pool @ self.fc.kernel[...]  # the published score leaves out the bias
        return {"pool": pool, "spatial": spatial.reshape(len(x), -1), "logits": logits}
