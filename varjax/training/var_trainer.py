"""Training of the VAR transformer: teacher forcing on the tokens of a finished codec.

All scales of a picture are predicted at once under the block-causal mask; the loss is the mean
cross entropy over all tokens. Labels are dropped at random, which teaches the null class that
guidance needs. Pictures and their mirror images are tokenised once, in float32, and the tokens are
kept in a file.
"""

import functools
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from varjax.codecs.vqvae.model import VQVAE, cast
from varjax.errors import UserError
from varjax.models import parameters
from varjax.models.var.transformer import VAR, VARConfig
from varjax.training import batches, optimizer
from varjax.training.data import Splits, to_float
from varjax.training.optimizer import OptimizerSettings
from varjax.training.run_folder import write_atomically


@dataclass(frozen=True, kw_only=True)
class VARTraining:
    """Everything about the run except model and tokens."""

    optimizer: OptimizerSettings
    batch_size: int = 32
    dtype: str = "float32"
    seed: int = 0
    max_validation: int = 512

    def __post_init__(self):
        if self.batch_size < 1 or self.max_validation < 1:
            raise UserError("VAR training: batch size and validation size must be at least 1")


@dataclass(frozen=True)
class TokenSet:
    """Tokens int32: [2, N, L] of training pictures and their mirror images, [M, L] to validate."""

    train: np.ndarray
    train_labels: np.ndarray
    val: np.ndarray
    val_labels: np.ndarray


def tokenise(codec: VQVAE, splits: Splits, batch_size: int, max_validation: int) -> TokenSet:
    """Tokens of all training pictures, plain and mirrored, and of some validation pictures."""
    encode = jax.jit(lambda codec, images: codec.images_to_tokens(images))

    def tokens_of(images: np.ndarray) -> np.ndarray:
        size, found = min(batch_size, len(images)), []
        for start in range(0, len(images), size):
            part = images[start : start + size]
            missing = size - len(part)  # fill the last batch, so that one program serves all
            part = np.concatenate([part, np.repeat(part[:1], missing, axis=0)])
            found.append(np.asarray(encode(codec, to_float(part)))[: size - missing])
        return np.concatenate(found)

    train, val = splits.train, splits.val
    both = np.stack([tokens_of(train.images), tokens_of(train.images[:, :, ::-1])])
    tokens = tokens_of(val.images[:max_validation])
    return TokenSet(both, train.labels, tokens, val.labels[:max_validation])


def cached_tokens(path: Path, make) -> TokenSet:
    """The token set in the file `path`, made by `make()` and written there if it does not exist."""
    if path.exists():
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return TokenSet(**arrays)
        except Exception as error:  # NumPy raises many kinds over damaged files
            raise UserError(f"{path} is damaged ({error}): delete it to make it again") from error
    tokens = make()
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **vars(tokens))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())
    return tokens


@dataclass(frozen=True)
class _Programs:
    """The compiled parts. Frozen, so that runs of the same settings in one process share them."""

    config: VARConfig
    training: VARTraining

    def transformer(self, params: Mapping) -> VAR:
        abstract = parameters.abstract(lambda: VAR(self.config, rngs=nnx.Rngs(0)))
        return parameters.fill(abstract, params)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def train(self, state: dict, quantizer, tokens, labels, key):
        drop = jax.random.bernoulli(key, self.config.cond_drop_rate, labels.shape)
        labels = jnp.where(drop, self.config.null_label, labels)

        def loss_of(params):
            loss, right = self._predict(params, quantizer, tokens, labels)
            return loss.mean(), right.mean()

        (loss, right), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        state, norm = optimizer.update(state, gradients, self.training.optimizer)
        return state, {"loss": loss, "accuracy": right, "gradient_norm": norm}

    @functools.partial(jax.jit, static_argnums=0)
    def evaluate(self, params: dict, quantizer, tokens, labels):
        return jnp.stack([x.mean(0) for x in self._predict(params, quantizer, tokens, labels)])

    def _predict(self, params: dict, quantizer, tokens, labels):
        """Cross entropy [B, L] and whether the likeliest token is right [B, L]."""
        model = cast(self.transformer(params), jnp.dtype(self.training.dtype))
        logits = model(labels, quantizer.teacher_inputs(tokens))
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return loss, (logits.argmax(-1) == tokens).astype(jnp.float32)


class VARStage:
    """A stage for `varjax.training.loop`."""

    name = "var"

    def __init__(
        self,
        config: VARConfig,
        training: VARTraining,
        codec: VQVAE,
        tokens: TokenSet,
        settings: Mapping,
    ):
        self.config, self.training, self.tokens, self.settings = config, training, tokens, settings
        self.steps, self.batch_size = training.optimizer.steps, training.batch_size
        self._quantizer = codec.quantizer
        self._programs = _Programs(config, training)

    def initial_state(self) -> dict:
        model = VAR(self.config, rngs=nnx.Rngs(self.training.seed))
        return optimizer.initial_state(parameters.named(model), self.training.optimizer)

    def transformer(self, state: Mapping) -> VAR:
        """The transformer with averaged weights."""
        return self._programs.transformer(state["ema"])

    def step(self, state: dict, n: int) -> tuple[dict, dict]:
        seed, labels = self.training.seed, self.tokens.train_labels
        chosen = batches.indices(len(labels), self.batch_size, seed, n)
        mirrored = batches.flips(self.batch_size, seed, n).astype(int)
        key = jax.random.fold_in(jax.random.key(seed), n)
        tokens = self.tokens.train[mirrored, chosen]
        return self._programs.train(state, self._quantizer, tokens, labels[chosen], key)

    def validate(self, state: dict) -> dict:
        """Cross entropy in nats per token: mean, and per scale; share of tokens guessed right."""
        tokens, labels = self.tokens.val, self.tokens.val_labels
        size = min(self.batch_size, len(labels))
        parts = []
        for start in range(0, len(labels) - size + 1, size):
            rows = slice(start, start + size)
            parts.append(
                self._programs.evaluate(state["ema"], self._quantizer, tokens[rows], labels[rows])
            )
        loss, right = np.mean(jax.device_get(parts), axis=0)  # [L] each
        schedule = self.config.schedule
        scales = [
            round(float(loss[a:b].mean()), 4)
            for a, b in zip(schedule.starts, schedule.ends, strict=True)
        ]
        return {"loss": float(loss.mean()), "accuracy": float(right.mean()), "per_scale": scales}
