"""The convolutional encoder and decoder that image codecs share, channels last.

The layout is that of VQGAN's network: levels of residual blocks, attention at the levels
where a codec has it, stride-2 convolutions down, nearest-neighbour doubling plus convolution up.
Everything runs in the type of the input and the weights; normalisation statistics and the
attention softmax are float32.
"""

from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels import target
from varjax.codecs import arithmetic
from varjax.core.errors import UserError

# Generous limits: every block and level is traced on its own.
LARGEST_BLOCKS, LARGEST_LEVELS = 16, 10
TENSOR_CORE_CHANNELS = 32  # with 8 and 16 an H100 was as slow as with 3

_uniform_fan_in = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


@dataclass(frozen=True, kw_only=True)
class CoderSizes:
    """Sizes of an encoder or a decoder.

    num_resamplings: the finest levels are followed by a halving (encoder), and as many of the
      coarser ones by a doubling (decoder).
    """

    image_channels: int
    latent_channels: int  # of the map between encoder and decoder
    base: int  # width of the encoder's first convolution
    widths: tuple[int, ...]  # channels of each level, finest first
    num_blocks: int  # residual blocks per level
    num_resamplings: int
    group_choices: tuple[int, ...]  # normalisation groups: the first that divides a width
    epsilon: float = 1e-6  # of the normalisation
    attended_levels: tuple[int, ...] = ()  # attention after every block of these, finest is 0
    attend_middle: bool = False  # attention between the two middle blocks


def conv(c_in: int, c_out: int, size: int, rngs: nnx.Rngs, stride: int = 1) -> nnx.Conv:
    """A convolution that keeps height and width, or with stride 2 halves them; then it pads at the
    bottom and on the right only."""
    padding = ((0, 1), (0, 1)) if stride == 2 else ((size // 2, size // 2),) * 2
    return nnx.Conv(
        c_in, c_out, (size, size), stride, padding=padding, kernel_init=_uniform_fan_in, rngs=rngs
    )


def dense(c_in: int, c_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    """The published 1x1 convolutions: a matrix product over channels."""
    return nnx.Linear(c_in, c_out, kernel_init=_uniform_fan_in, rngs=rngs)


class GroupNorm(nnx.Module):
    """Group normalisation with learned `scale` and `bias` [C]; statistics in float32.

    Sums run over height and width first, then over the channels of a group. That avoids the grouped
    reshape of `nnx.GroupNorm` and makes the whole decoder about 15 % faster on CPU.

    Of bfloat16 the variance is E[x^2] - E[x]^2, so that numbers are read once, not twice: what
    float32 sums lose that way is less than bfloat16 has lost before.
    """

    def __init__(self, channels: int, sizes: CoderSizes):
        # configurations make sure that there is a choice
        self.groups = next(n for n in sizes.group_choices if channels % n == 0)
        self.epsilon = sizes.epsilon
        self.scale = nnx.Param(jnp.ones((channels,)))
        self.bias = nnx.Param(jnp.zeros((channels,)))

    def __call__(self, x: Float[Array, "B h w C"]) -> Float[Array, "B h w C"]:
        wide = x.astype(jnp.float32)
        mean = self._group_mean(wide)
        if x.dtype == jnp.bfloat16:
            variance = self._group_mean(jnp.square(wide)) - jnp.square(mean)
            factor = jax.lax.rsqrt(jnp.maximum(variance, 0) + self.epsilon) * self.scale[...]
            return (wide * factor + (self.bias[...] - mean * factor)).astype(x.dtype)
        centred = wide - mean
        variance = self._group_mean(jnp.square(centred))
        factor = jax.lax.rsqrt(variance + self.epsilon) * self.scale[...]
        return (centred * factor + self.bias[...]).astype(x.dtype)

    def _group_mean(self, x: Float[Array, "B h w C"]) -> Float[Array, "B 1 1 C"]:
        """Mean over positions and the channels of a group, repeated for each channel."""
        mean = x.mean(axis=(1, 2)).reshape(x.shape[0], self.groups, -1).mean(-1)
        return jnp.repeat(mean, x.shape[-1] // self.groups, axis=1)[:, None, None]


class ResidualBlock(nnx.Module):
    """Normalisation, SiLU and convolution, twice, plus the input. The input goes through a 1x1
    product where the width changes."""

    def __init__(self, c_in: int, c_out: int, sizes: CoderSizes, *, rngs: nnx.Rngs):
        self.norm1 = GroupNorm(c_in, sizes)
        self.conv1 = conv(c_in, c_out, 3, rngs)
        self.norm2 = GroupNorm(c_out, sizes)
        self.conv2 = conv(c_out, c_out, 3, rngs)
        self.nin_shortcut = dense(c_in, c_out, rngs) if c_in != c_out else None

    def __call__(self, x: Float[Array, "B h w C"]) -> Float[Array, "B h w D"]:
        h = self.conv1(nnx.silu(self.norm1(x)))
        h = self.conv2(nnx.silu(self.norm2(h)))
        return (x if self.nin_shortcut is None else self.nin_shortcut(x)) + h


class AttentionBlock(nnx.Module):
    """Single-head attention over all positions of the map, plus the input."""

    def __init__(self, channels: int, sizes: CoderSizes, *, rngs: nnx.Rngs):
        self.norm = GroupNorm(channels, sizes)
        self.qkv = dense(channels, 3 * channels, rngs)
        self.proj_out = dense(channels, channels, rngs)

    def __call__(self, x: Float[Array, "B h w C"]) -> Float[Array, "B h w C"]:
        batch, height, width, channels = x.shape
        qkv = self.qkv(self.norm(x)).reshape(batch, height * width, 3 * channels)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        scores = jnp.einsum("btc,bkc->btk", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores * channels**-0.5, axis=-1).astype(v.dtype)
        return x + self.proj_out(jnp.einsum("btk,bkc->btc", weights, v).reshape(x.shape))


class Middle(nnx.Module):
    """Residual block, attention, residual block at the coarsest size."""

    def __init__(self, channels: int, sizes: CoderSizes, *, rngs: nnx.Rngs):
        self.block_1 = ResidualBlock(channels, channels, sizes, rngs=rngs)
        self.attn_1 = AttentionBlock(channels, sizes, rngs=rngs) if sizes.attend_middle else None
        self.block_2 = ResidualBlock(channels, channels, sizes, rngs=rngs)

    def __call__(self, x):
        x = self.block_1(x)
        return self.block_2(x if self.attn_1 is None else self.attn_1(x))


class Level(nnx.Module):
    """Residual blocks of one size. `attn` is empty where the level has no attention."""

    def __init__(self, c_in, c_out, number: int, sizes: CoderSizes, *, rngs: nnx.Rngs):
        widths = pairwise([c_in] + [c_out] * sizes.num_blocks)
        self.block = nnx.List([ResidualBlock(a, b, sizes, rngs=rngs) for a, b in widths])
        attentions = sizes.num_blocks if number in sizes.attended_levels else 0
        self.attn = nnx.List([AttentionBlock(c_out, sizes, rngs=rngs) for _ in range(attentions)])

    def __call__(self, x):
        for i, block in enumerate(self.block):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        return x


class Encoder(nnx.Module):
    """Images [B, H, W, 3] to latents [B, H / 2**n, W / 2**n, C], n = `sizes.num_resamplings`."""

    def __init__(self, sizes: CoderSizes, *, rngs: nnx.Rngs):
        widths = [sizes.base, *sizes.widths]
        self.conv_in = conv(sizes.image_channels, sizes.base, 3, rngs)
        self.down = nnx.List([])
        for i in range(len(sizes.widths)):
            level = Level(widths[i], widths[i + 1], i, sizes, rngs=rngs)
            halve = i < sizes.num_resamplings
            level.downsample = conv(widths[i + 1], widths[i + 1], 3, rngs, 2) if halve else None
            self.down.append(level)
        self.mid = Middle(widths[-1], sizes, rngs=rngs)
        self.norm_out = GroupNorm(widths[-1], sizes)
        self.conv_out = conv(widths[-1], sizes.latent_channels, 3, rngs)

    def __call__(self, x: Float[Array, "B H W 3"]) -> Float[Array, "B h w C"]:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
            if level.downsample is not None:
                x = level.downsample(x)
        return self.conv_out(nnx.silu(self.norm_out(self.mid(x))))


class Decoder(nnx.Module):
    """Latents [B, h, w, C] to images [B, h * 2**n, w * 2**n, 3], not clipped.

    `up[0]` is the finest level, as in the published names; levels run from the last to the first.
    """

    def __init__(self, sizes: CoderSizes, *, rngs: nnx.Rngs):
        widths = [*sizes.widths, sizes.widths[-1]]  # the coarsest level follows the middle
        self.conv_in = conv(sizes.latent_channels, widths[-1], 3, rngs)
        self.mid = Middle(widths[-1], sizes, rngs=rngs)
        self.up = nnx.List([])
        for i in range(len(sizes.widths)):
            level = Level(widths[i + 1], widths[i], i, sizes, rngs=rngs)
            twice = 1 <= i <= sizes.num_resamplings
            level.upsample = conv(widths[i], widths[i], 3, rngs) if twice else None
            self.up.append(level)
        self.norm_out = GroupNorm(widths[0], sizes)
        self.conv_out = conv(widths[0], sizes.image_channels, 3, rngs)

    def __call__(self, z: Float[Array, "B h w C"]) -> Float[Array, "B H W 3"]:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
            if level.upsample is not None:
                x = level.upsample(double(x))
        return _few_channels(self.conv_out, nnx.silu(self.norm_out(x)))


def _few_channels(last: nnx.Conv, x: Float[Array, "B H W C"]) -> Float[Array, "B H W 3"]:
    """A convolution to the channels of an image. On a GPU in bfloat16 it has more of them, which
    are cut off: cuDNN would not use tensor cores, and take 20 times as long (docs/lab/h100.md)."""
    if target.platform() != "gpu" or x.dtype != jnp.bfloat16:
        return last(x)
    kernel, bias = last.kernel[...], last.bias[...]
    added = max(0, TENSOR_CORE_CHANNELS - kernel.shape[-1])
    kernel = jnp.pad(kernel, ((0, 0), (0, 0), (0, 0), (0, added)))
    layout = ("NHWC", "HWIO", "NHWC")
    found = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)
    return found[..., : len(bias)] + bias


def double(x: Float[Array, "B h w C"]) -> Float[Array, "B 2*h 2*w C"]:
    """Nearest-neighbour enlargement by two along height and width."""
    batch, height, width, channels = x.shape
    x = jnp.broadcast_to(x[:, :, None, :, None], (batch, height, 2, width, 2, channels))
    return x.reshape(batch, 2 * height, 2 * width, channels)


class ImageCodec(nnx.Module):
    """Images [B, H, W, 3] in [-1, 1] to latent maps [B, P, Q, C] and back.

    Both directions run in float32 with full-precision products, on accelerators too, unless another
    `dtype` is asked for: one of `arithmetic.DTYPES`, or a dtype. Subclasses have a `config`, an
    `encoder`, which is None where it only decodes, and a `decoder`; behind the one and before the
    other may come `quant_conv` and `post_quant_conv`.
    """

    quant_conv: nnx.Module | None = None
    post_quant_conv: nnx.Module | None = None

    def encode(self, images: Float[Array, "B H W 3"], dtype=jnp.float32) -> Float[Array, "B P Q C"]:
        """Latent map before quantisation, float32. `UserError` unless height and width are
        multiples of `config.downsample`, and where there is no encoder."""
        if self.encoder is None:
            raise UserError(
                f"this {self.config.what} tokenizer has no encoder (has_encoder is false): it turns"
                " tokens into pictures and cannot turn pictures into tokens"
            )
        downsample = self.config.downsample
        if images.ndim != 4 or any(side % downsample for side in images.shape[1:3]):
            raise UserError(
                f"images of shape {images.shape} given: [batch, height, width, channels] with"
                f" sides that are multiples of {downsample} are needed"
            )
        return _run((self.encoder, self.quant_conv), images, dtype)

    def decode(
        self, code_map: Float[Array, "B P Q C"], clip: bool = True, dtype=jnp.float32
    ) -> Float[Array, "B H W 3"]:
        """Images of a quantised latent map, float32; clipped to [-1, 1] unless `clip` is False."""
        images = _run((self.post_quant_conv, self.decoder), code_map, dtype)
        return jnp.clip(images, -1, 1) if clip else images


def _run(modules: tuple[nnx.Module | None, ...], x, dtype) -> Float[Array, "..."]:
    """Applies those modules that there are, in turn, in `dtype`; the result is float32."""
    arrays = arithmetic.arrays(dtype)
    x = x.astype(arrays)
    with arithmetic.products(dtype):
        for module in cast(modules, arrays):
            x = x if module is None else module(x)
    return x.astype(jnp.float32)


def cast(modules, dtype):
    """Modules with every parameter in `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), modules)
