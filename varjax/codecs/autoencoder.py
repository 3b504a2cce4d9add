"""The convolutional encoder and decoder of the VQVAE, channels last.

The layout is that of the published model (VQGAN's f16 network): levels of residual blocks,
attention at the coarsest level, stride-2 convolutions down, nearest-neighbour doubling plus
convolution up. Everything runs in the type of the input and the weights; normalisation statistics
and the attention softmax are float32.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from varjax.codecs.config import VQVAEConfig

_uniform_fan_in = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def conv(c_in: int, c_out: int, size: int, rngs: nnx.Rngs, stride: int = 1) -> nnx.Conv:
    """Convolution that keeps height and width; with stride 2 it pads bottom and right only."""
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
    """

    def __init__(self, channels: int, config: VQVAEConfig):
        self.groups, self.epsilon = config.group_norm_groups, config.group_norm_eps
        self.scale = nnx.Param(jnp.ones((channels,)))
        self.bias = nnx.Param(jnp.zeros((channels,)))

    def __call__(self, x: Float[Array, "B h w C"]) -> Float[Array, "B h w C"]:
        wide = x.astype(jnp.float32)
        centred = wide - self._group_mean(wide)
        inverse = jax.lax.rsqrt(self._group_mean(jnp.square(centred)) + self.epsilon)
        return (centred * (inverse * self.scale[...]) + self.bias[...]).astype(x.dtype)

    def _group_mean(self, x: Float[Array, "B h w C"]) -> Float[Array, "B 1 1 C"]:
        """Mean over positions and the channels of a group, repeated for each channel."""
        mean = x.mean(axis=(1, 2)).reshape(x.shape[0], self.groups, -1).mean(-1)
        return jnp.repeat(mean, x.shape[-1] // self.groups, axis=1)[:, None, None]


class ResidualBlock(nnx.Module):
    """norm, silu, conv, twice, plus the input (through a 1x1 product when the width changes)."""

    def __init__(self, c_in: int, c_out: int, config: VQVAEConfig, *, rngs: nnx.Rngs):
        self.norm1 = GroupNorm(c_in, config)
        self.conv1 = conv(c_in, c_out, 3, rngs)
        self.norm2 = GroupNorm(c_out, config)
        self.conv2 = conv(c_out, c_out, 3, rngs)
        self.nin_shortcut = dense(c_in, c_out, rngs) if c_in != c_out else None

    def __call__(self, x: Float[Array, "B h w C"]) -> Float[Array, "B h w D"]:
        h = self.conv1(nnx.silu(self.norm1(x)))
        h = self.conv2(nnx.silu(self.norm2(h)))
        return (x if self.nin_shortcut is None else self.nin_shortcut(x)) + h


class AttentionBlock(nnx.Module):
    """Single-head attention over all positions of the map, plus the input."""

    def __init__(self, channels: int, config: VQVAEConfig, *, rngs: nnx.Rngs):
        self.norm = GroupNorm(channels, config)
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

    def __init__(self, channels: int, config: VQVAEConfig, *, rngs: nnx.Rngs):
        self.block_1 = ResidualBlock(channels, channels, config, rngs=rngs)
        self.attn_1 = AttentionBlock(channels, config, rngs=rngs) if config.using_mid_sa else None
        self.block_2 = ResidualBlock(channels, channels, config, rngs=rngs)

    def __call__(self, x):
        x = self.block_1(x)
        return self.block_2(x if self.attn_1 is None else self.attn_1(x))


class Level(nnx.Module):
    """Residual blocks of one size. `attn` is empty except at the coarsest level."""

    def __init__(self, c_in, c_out, num_blocks, attend, config: VQVAEConfig, *, rngs: nnx.Rngs):
        widths = [c_in] + [c_out] * num_blocks
        pairs = zip(widths[:-1], widths[1:], strict=True)
        self.block = nnx.List([ResidualBlock(a, b, config, rngs=rngs) for a, b in pairs])
        attentions = num_blocks if attend else 0
        self.attn = nnx.List([AttentionBlock(c_out, config, rngs=rngs) for _ in range(attentions)])

    def __call__(self, x):
        for i, block in enumerate(self.block):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        return x


class Encoder(nnx.Module):
    """Images [B, H, W, 3] to latents [B, H / downsample, W / downsample, z_channels]."""

    def __init__(self, config: VQVAEConfig, *, rngs: nnx.Rngs):
        widths = [config.ch, *(config.ch * m for m in config.ch_mult)]
        last = len(config.ch_mult) - 1
        self.conv_in = conv(config.in_channels, config.ch, 3, rngs)
        self.down = nnx.List([])
        for i in range(last + 1):
            attend = i == last and config.using_sa
            level = Level(
                widths[i], widths[i + 1], config.num_res_blocks, attend, config, rngs=rngs
            )
            level.downsample = conv(widths[i + 1], widths[i + 1], 3, rngs, 2) if i < last else None
            self.down.append(level)
        self.mid = Middle(widths[-1], config, rngs=rngs)
        self.norm_out = GroupNorm(widths[-1], config)
        self.conv_out = conv(widths[-1], config.z_channels, 3, rngs)

    def __call__(self, x: Float[Array, "B H W 3"]) -> Float[Array, "B h w C"]:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
            if level.downsample is not None:
                x = level.downsample(x)
        return self.conv_out(nnx.silu(self.norm_out(self.mid(x))))


class Decoder(nnx.Module):
    """Latents [B, h, w, z_channels] to images [B, h * downsample, w * downsample, 3], not clipped.

    `up[0]` is the finest level, as in the published names; levels run from the last to the first.
    """

    def __init__(self, config: VQVAEConfig, *, rngs: nnx.Rngs):
        widths = [config.ch * m for m in config.ch_mult]
        widths.append(widths[-1])  # the coarsest level follows the middle, which has its width
        last = len(config.ch_mult) - 1
        self.conv_in = conv(config.z_channels, widths[-1], 3, rngs)
        self.mid = Middle(widths[-1], config, rngs=rngs)
        self.up = nnx.List([])
        for i in range(last + 1):
            attend = i == last and config.using_sa
            blocks = config.num_res_blocks + 1
            level = Level(widths[i + 1], widths[i], blocks, attend, config, rngs=rngs)
            level.upsample = conv(widths[i], widths[i], 3, rngs) if i > 0 else None
            self.up.append(level)
        self.norm_out = GroupNorm(widths[0], config)
        self.conv_out = conv(widths[0], config.in_channels, 3, rngs)

    def __call__(self, z: Float[Array, "B h w C"]) -> Float[Array, "B H W 3"]:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
            if level.upsample is not None:
                x = level.upsample(double(x))
        return self.conv_out(nnx.silu(self.norm_out(x)))


def double(x: Float[Array, "B h w C"]) -> Float[Array, "B 2*h 2*w C"]:
    """Nearest-neighbour enlargement by two along height and width."""
    batch, height, width, channels = x.shape
    x = jnp.broadcast_to(x[:, :, None, :, None], (batch, height, 2, width, 2, channels))
    return x.reshape(batch, 2 * height, 2 * width, channels)
