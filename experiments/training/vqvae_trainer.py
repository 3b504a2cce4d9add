"""Training of the image codec, VQVAE or VQ: reconstruction (L1 + MSE) plus the quantiser's loss.

The recipe keeps the whole codebook alive (measured in `docs/lab/training.md`):
  1. The first steps train a plain autoencoder, without quantiser.
  2. Then k-means chooses the first codes from the vectors that they have to stand for. These are
     the residuals that the autoencoder leaves at each scale, or the latents if there is one map.
  3. From then on the quantised model is trained. Every `reseed_every` steps, up to the part
     `RESEED_UNTIL` of the run, codes that were seldom used since the last time are moved to vectors
     of the current pictures.

The quantiser runs in float32; encoder and decoder in `dtype`.

Letters: n vectors, V codes, C channels.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from experiments.training.data import to_float
from experiments.training.stage import TrainingStage, adamw, descend, learning_rate, whole_batches
from varjax.codecs.autoencoder import ImageCodec
from varjax.storage.pictures import to_uint8

CODES = "embedding"  # the end of the name of the codes among the parameters
VECTORS_PER_CODE, ROUNDS = 16, 12  # of k-means
RARE = 0.05  # a code is rare below this part of the mean usage
RESEED_UNTIL = 0.75  # part of the run
JITTER = 1e-3  # relative noise, so that repeated vectors do not make identical codes


@dataclass(frozen=True)
class VQVAEStage(TrainingStage):
    """`data` holds pictures."""

    name, part, ema = "vqvae", "codec", 0.995

    def optimizer(self) -> optax.GradientTransformation:
        rate = learning_rate(self.settings.vqvae_lr, self.steps, warm_up=20, flat_until=0.5)
        return adamw(rate, b2=0.99, clip=1.0)

    @property
    def phases(self) -> dict[int, str]:
        """Return {step: what is compiled for it and those after it}."""
        return {0: "the autoencoder", self.settings.autoencoder_steps: "the quantised codec"}

    def state_of(self, params: Mapping) -> dict:
        """Add `usage` [V], how often each code was used since codes were last moved."""
        return {**super().state_of(params), "usage": jnp.zeros(self.config.vocab_size)}

    def step(self, state: dict, n: int) -> tuple[dict, dict]:
        settings, images = self.settings, self._pixels(n)
        quantise = n >= settings.autoencoder_steps
        since = n - settings.autoencoder_steps
        if self.given:  # codes of a checkpoint are trained, and never moved
            return self._train(state, images, quantise)
        if since == 0:
            state = self._place_codes(state, n)
        elif quantise and since % settings.reseed_every == 0:
            if n <= RESEED_UNTIL * self.steps:
                state = self._reseed(state, images, self.everywhere(self.key(n)))
        return self._train(state, images, quantise)

    def validate(self, state: dict) -> dict:
        """Measure mean PSNR in dB, mean absolute error in [0, 1], and the use of the codebook."""
        pictures, codec = self.data.val[: self.settings.max_validation], self.model(state["ema"])
        errors, usage = [], 0
        for rows in whole_batches(len(pictures), self.batch_size):
            (images,) = self.spread(to_float(pictures[rows]))
            _, found, used = self._reconstruct(codec, images)
            errors.append(found)
            usage = usage + used
        errors, usage = jax.device_get((errors, usage))
        mse, mae = jnp.concatenate(errors, axis=1)
        return {
            "psnr": float((-10 * jnp.log10(mse)).mean()),
            "mae": float(mae.mean()),
            "codes_used": int((usage > 0).sum()),
            "perplexity": float(perplexity(jnp.asarray(usage))),
        }

    def reconstructed(self, state: dict) -> tuple[np.ndarray, np.ndarray]:
        """Return the first batch of validation and its reconstructions, both uint8 [B, S, S, 3]."""
        pictures = self.data.val[: self.settings.max_validation]
        pictures = pictures[next(iter(whole_batches(len(pictures), self.batch_size)))]
        made, *_ = self._reconstruct(self.model(state["ema"]), *self.spread(to_float(pictures)))
        return pictures, to_uint8((np.asarray(made) + 1) / 2)

    def _pixels(self, n: int) -> jax.Array | np.ndarray:
        return self.spread(to_float(self.images(n)[0]))[0]

    def _place_codes(self, state: dict, n: int) -> dict:
        """Put the first codes into the state: k-means of the vectors of some batches."""
        count = self.config.vocab_size
        wanted = VECTORS_PER_CODE * count
        vectors = [self._first_vectors(state, self._pixels(n))]
        for i in range(1, -(-wanted // len(vectors[0]))):
            vectors.append(self._first_vectors(state, self._pixels(n + i)))
        key, moved = self.everywhere((self.key(n), jnp.ones(count, bool)))
        codes = k_means(key, jnp.concatenate(vectors)[:wanted], count)
        state = _with_codes(state, codes, moved)
        return jax.device_put(state, self.places(state))

    @functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)
    def _train(self, state: dict, images, quantise: bool):
        loss_of = functools.partial(self._loss, quantise=quantise)
        new, (_, (metrics, used)), norm = descend(
            state, loss_of, (images,), self.optimizer(), self.ema, self.settings.accumulate
        )
        new = {**new, "usage": state["usage"] + used}
        return self.kept(new), {**metrics, "gradient_norm": norm}

    def _loss(self, params: dict, images, quantise: bool):
        codec, dtype = self.model(self.mesh.in_use(params)), jnp.dtype(self.settings.dtype)
        latents, extra, used = codec.encode(images, dtype), 0.0, 0
        if quantise:
            latents, tokens, extra = codec.quantize(latents)
            used = jnp.zeros(self.config.vocab_size).at[tokens.reshape(-1)].add(1)
        else:
            latents = codec.unquantized(latents)
        difference = codec.decode(latents, clip=False, dtype=dtype) - images
        l1, mse = jnp.abs(difference).mean(), jnp.square(difference).mean()
        loss = l1 + mse + extra
        metrics = {"loss": loss, "l1": l1, "mse": mse}
        return loss, ({**metrics, "quantizer": extra} if quantise else metrics, used)

    @functools.partial(jax.jit, static_argnums=0)
    def _first_vectors(self, state: dict, images):
        """Return the vectors that the first codes have to stand for, [B * L, C]."""
        codec = self.model(state["params"])
        vectors = codec.first_vectors(codec.encode(images))
        return vectors.reshape(-1, vectors.shape[-1])

    @functools.partial(jax.jit, static_argnums=0)
    def _reseed(self, state: dict, images, key) -> dict:
        codec = self.model(state["params"])
        vectors = codec.vectors(codec.encode(images))
        (codes,) = (a for name, a in state["params"].items() if name.endswith(CODES))
        codes, moved = reseed(key, codes, state["usage"], vectors.reshape(-1, vectors.shape[-1]))
        return self.kept(_with_codes(state, codes, moved))

    @functools.partial(jax.jit, static_argnums=0)
    def _reconstruct(self, codec: ImageCodec, images):
        """Return reconstructions [B, S, S, 3], mean squared and absolute error of pixels in [0, 1],
        [2, B], and the usage [V]."""
        tokens = codec.images_to_tokens(images)
        made = codec.tokens_to_images(tokens)
        difference = (made - images) / 2
        errors = jnp.stack([jnp.square(difference), jnp.abs(difference)]).mean((2, 3, 4))
        usage = jnp.zeros(self.config.vocab_size).at[tokens.reshape(-1)].add(1)
        return self.seen((made, errors, usage))


def _with_codes(state: Mapping, codes, moved) -> dict:
    """Return the state with new codes where `moved`, also in the average, and with usage zero."""
    name = next(name for name in state["params"] if name.endswith(CODES))
    average = jnp.where(moved[:, None], codes, state["ema"][name])
    return {
        **state,
        "params": {**state["params"], name: codes},
        "ema": {**state["ema"], name: average},
        "usage": jnp.zeros_like(state["usage"]),
    }


# --- a codebook that does not collapse: first codes from k-means, seldom used ones placed anew ----


def _samples(key: Array, vectors: Float[Array, "n C"], count: int) -> Float[Array, "V C"]:
    """Return `count` random vectors with a little noise, all different where there are enough."""
    pick, noise = jax.random.split(key)
    chosen = jax.random.choice(pick, len(vectors), (count,), replace=count > len(vectors))
    return vectors[chosen] + JITTER * vectors.std() * jax.random.normal(
        noise, (count, vectors.shape[1])
    )


@functools.partial(jax.jit, static_argnums=2)
def k_means(key: Array, vectors: Float[Array, "n C"], num_codes: int) -> Float[Array, "V C"]:
    """Run k-means. A code that loses all its vectors restarts at a random vector."""
    start, key = jax.random.split(key)

    def improve(codes, key):
        distances = jnp.square(codes).sum(-1) - 2 * vectors @ codes.T
        owner = jnp.argmin(distances, axis=-1)
        counts = jnp.zeros(num_codes).at[owner].add(1)
        sums = jnp.zeros_like(codes).at[owner].add(vectors)
        means = sums / jnp.maximum(counts, 1)[:, None]
        return jnp.where(counts[:, None] > 0, means, _samples(key, vectors, num_codes)), None

    codes, _ = jax.lax.scan(
        improve, _samples(start, vectors, num_codes), jax.random.split(key, ROUNDS)
    )
    return codes


def reseed(
    key: Array, codes: Float[Array, "V C"], usage: Float[Array, " V"], vectors: Float[Array, "n C"]
) -> tuple[Float[Array, "V C"], Array]:
    """Move codes used less than `RARE` times the mean usage to random vectors.

    Returns the codes and which of them moved, bool [V].
    """
    rare = usage < RARE * usage.mean()
    return jnp.where(rare[:, None], _samples(key, vectors, len(codes)), codes), rare


def perplexity(usage: Float[Array, " V"]) -> Float[Array, ""]:
    """Return exp(entropy) of the usage: the number of codes, if all were used equally often."""
    share = usage / jnp.maximum(usage.sum(), 1)
    return jnp.exp(-jnp.where(share > 0, share * jnp.log(jnp.maximum(share, 1e-12)), 0).sum())
