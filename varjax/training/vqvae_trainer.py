"""Training of the VQVAE: reconstruction (L1 + MSE) plus the quantiser's loss.

The recipe keeps the whole codebook alive (measured in `docs/training.md`):
  1. some steps as a plain autoencoder, without quantiser;
  2. first codes by k-means of the residuals that the autoencoder leaves at each scale;
  3. from then on the quantised model; codes seldom used since the last look are moved to residuals
     of the current pictures every `reseed_every` steps, up to `reseed_until` of the run.

The quantiser runs in float32; encoder and decoder in `dtype`.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from varjax.codecs.vqvae.model import VQVAE, VQVAEConfig
from varjax.errors import UserError
from varjax.models import parameters
from varjax.training import batches, codebook, optimizer
from varjax.training.data import Pictures, Splits, to_float
from varjax.training.optimizer import OptimizerSettings

CODES = "quantizer/embedding"
VECTORS_PER_CODE = 16  # for k-means


@dataclass(frozen=True, kw_only=True)
class VQVAETraining:
    """Everything about the run except model and pictures."""

    optimizer: OptimizerSettings
    batch_size: int = 16
    autoencoder_steps: int = 250
    reseed_every: int = 100
    reseed_until: float = 0.75
    dtype: str = "float32"
    seed: int = 0
    max_validation: int = 512

    def __post_init__(self):
        if self.batch_size < 1 or self.reseed_every < 1 or self.max_validation < 1:
            raise UserError("VQVAE training: batch size and intervals must be at least 1")
        if not 0 <= self.autoencoder_steps < self.optimizer.steps:
            raise UserError(
                f"VQVAE training: {self.autoencoder_steps} autoencoder steps of"
                f" {self.optimizer.steps} steps: the quantiser would never be trained"
            )


@dataclass(frozen=True)
class _Programs:
    """The compiled parts. Frozen, so that runs of the same settings in one process share them."""

    config: VQVAEConfig
    training: VQVAETraining

    def codec(self, params: Mapping) -> VQVAE:
        abstract = parameters.abstract(lambda: VQVAE(self.config, rngs=nnx.Rngs(0)))
        return parameters.fill(abstract, params)

    @functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)
    def train(self, state: dict, images, quantise: bool):
        (_, (metrics, used)), gradients = jax.value_and_grad(self._loss, has_aux=True)(
            state["params"], images, quantise
        )
        state = {**state, "usage": state["usage"] + used}
        state, norm = optimizer.update(state, gradients, self.training.optimizer)
        return state, {**metrics, "gradient_norm": norm}

    def _loss(self, params: dict, images, quantise: bool):
        codec = self.codec(params)
        dtype = jnp.dtype(self.training.dtype)
        latents, extra, used = codec.encode(images, dtype), 0.0, 0
        if quantise:
            latents, tokens, extra = codec.quantizer.quantize(latents)
            used = jnp.zeros(self.config.vocab_size).at[tokens.reshape(-1)].add(1)
        difference = codec.decode(latents, clip=False, dtype=dtype) - images
        l1, mse = jnp.abs(difference).mean(), jnp.square(difference).mean()
        loss = l1 + mse + extra
        metrics = {"loss": loss, "l1": l1, "mse": mse}
        return loss, ({**metrics, "quantizer": extra} if quantise else metrics, used)

    @functools.partial(jax.jit, static_argnums=0)
    def ideal_residuals(self, state: dict, images):
        """[B * L, C] vectors that the first codes have to stand for."""
        codec = self.codec(state["params"])
        vectors = codec.quantizer.exact_residuals(codec.encode(images))
        return vectors.reshape(-1, vectors.shape[-1])

    @functools.partial(jax.jit, static_argnums=0)
    def reseed(self, state: dict, images, key) -> dict:
        codec = self.codec(state["params"])
        vectors = codec.quantizer.pooled_residuals(codec.encode(images))
        codes, moved = codebook.reseed(
            key, state["params"][CODES], state["usage"], vectors.reshape(-1, vectors.shape[-1])
        )
        return _with_codes(state, codes, moved)

    @functools.partial(jax.jit, static_argnums=0)
    def reconstruction_error(self, codec: VQVAE, images):
        """([2, B] mean squared and absolute error of pixels in [0, 1], [V] usage)."""
        tokens = codec.images_to_tokens(images)
        difference = (codec.tokens_to_images(tokens) - images) / 2
        errors = jnp.stack([jnp.square(difference), jnp.abs(difference)]).mean((2, 3, 4))
        return errors, jnp.zeros(self.config.vocab_size).at[tokens.reshape(-1)].add(1)


class VQVAEStage:
    """A stage for `varjax.training.loop`."""

    name = "vqvae"

    def __init__(
        self, config: VQVAEConfig, training: VQVAETraining, splits: Splits, settings: Mapping
    ):
        self.config, self.training, self.splits, self.settings = config, training, splits, settings
        self.steps, self.batch_size = training.optimizer.steps, training.batch_size
        self._programs = _Programs(config, training)

    def initial_state(self) -> dict:
        """Optimiser state plus `usage` [V], how often each code was used since the last look."""

        codec = VQVAE(self.config, rngs=nnx.Rngs(self.training.seed))
        state = optimizer.initial_state(parameters.named(codec), self.training.optimizer)
        return {**state, "usage": jnp.zeros(self.config.vocab_size)}

    def codec(self, state: Mapping) -> VQVAE:
        """The codec with averaged weights."""
        return self._programs.codec(state["ema"])

    def step(self, state: dict, n: int) -> tuple[dict, dict]:
        training, images = self.training, self._images(n)
        quantise = n >= training.autoencoder_steps
        since = n - training.autoencoder_steps
        if since == 0:
            state = self._place_codes(state, n)
        elif quantise and since % training.reseed_every == 0:
            if n <= training.reseed_until * self.steps:
                state = self._programs.reseed(state, images, self._key(n))
        return self._programs.train(state, images, quantise)

    def validate(self, state: dict) -> dict:
        """PSNR in dB (mean over pictures), mean absolute error in [0, 1], use of the codebook."""
        pictures, codec = self.splits.val, self.codec(state)
        count = min(len(pictures), self.training.max_validation)
        size = min(self.batch_size, count)
        errors, usage = [], 0
        for start in range(0, count - size + 1, size):
            images = jnp.asarray(to_float(pictures.images[start : start + size]))
            found, used = self._programs.reconstruction_error(codec, images)
            errors.append(found)
            usage = usage + used
        mse, mae = jnp.concatenate(errors, axis=1)
        return {
            "psnr": float((-10 * jnp.log10(mse)).mean()),
            "mae": float(mae.mean()),
            "codes_used": int((usage > 0).sum()),
            "perplexity": float(codebook.perplexity(usage)),
        }

    # --- host side ---

    def _key(self, n: int):
        return jax.random.fold_in(jax.random.key(self.training.seed), n)

    def _images(self, n: int) -> jax.Array:
        """[B, S, S, 3] pictures of step n in [-1, 1], half of them mirrored."""
        pictures: Pictures = self.splits.train
        chosen = batches.indices(len(pictures), self.batch_size, self.training.seed, n)
        images = to_float(pictures.images[chosen])
        mirrored = batches.flips(self.batch_size, self.training.seed, n)[:, None, None, None]
        return jnp.asarray(np.where(mirrored, images[:, :, ::-1], images))

    def _place_codes(self, state: dict, n: int) -> dict:
        """First codes: k-means of the residuals of some batches."""
        wanted = VECTORS_PER_CODE * self.config.vocab_size
        per_batch = self.batch_size * self.config.schedule.total_tokens
        rounds = max(1, -(-wanted // per_batch))
        vectors = [
            self._programs.ideal_residuals(state, self._images(n + i)) for i in range(rounds)
        ]
        codes = _k_means(self._key(n), jnp.concatenate(vectors)[:wanted], self.config.vocab_size)
        everywhere = jnp.ones(self.config.vocab_size, bool)
        return _with_codes(state, codes, everywhere)


_k_means = jax.jit(codebook.k_means, static_argnums=(2, 3))


def _with_codes(state: dict, codes, moved) -> dict:
    """State with new codes where `moved`, in the averaged weights too, and usage counted afresh."""
    average = jnp.where(moved[:, None], codes, state["ema"][CODES])
    return {
        **state,
        "params": {**state["params"], CODES: codes},
        "ema": {**state["ema"], CODES: average},
        "usage": jnp.zeros_like(state["usage"]),
    }
