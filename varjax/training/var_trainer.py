"""Training of the VAR transformer: teacher forcing on the tokens of a finished codec.

All scales of a picture are predicted at once under the block-causal mask; the loss is the mean
cross entropy over all tokens. Labels are dropped at random, which teaches the null class that
guidance needs.
"""

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import optax

from varjax.codecs.autoencoder import cast
from varjax.codecs.vqvae.quantizer import Quantizer
from varjax.models.var.transformer import VAR
from varjax.training import data_order
from varjax.training.optimizer import adamw, descend, learning_rate
from varjax.training.stage import Stage


@dataclass(frozen=True)
class VARStage(Stage):
    """`data` holds tokens (`varjax.training.tokens`)."""

    quantizer: Quantizer = field(compare=False, repr=False)

    name, network, ema = "var", VAR, 0.998

    def optimizer(self) -> optax.GradientTransformation:
        settings, warm_up = self.settings, min(150, self.steps // 10)
        rate = learning_rate(settings.var_lr, self.steps, warm_up)
        return adamw(rate, b2=0.95, clip=2.0, weight_decay=settings.weight_decay)

    def step(self, state: dict, n: int) -> tuple[dict, dict]:
        chosen, mirrored = self.drawn(n)
        tokens = self.data.train[mirrored.astype(int), chosen]
        labels = self.data.train_labels[chosen]
        return self._train(state, self.quantizer, tokens, labels, self.key(n))

    def validate(self, state: dict) -> dict:
        """Cross entropy in nats per token: mean, and per scale; share of tokens guessed right."""
        tokens, labels = self.data.val, self.data.val_labels
        parts = [
            self._evaluate(state["ema"], self.quantizer, tokens[rows], labels[rows])
            for rows in data_order.whole_batches(len(labels), self.batch_size)
        ]
        loss, right = np.mean(jax.device_get(parts), axis=0)  # [L] each
        schedule = self.config.schedule
        scales = [
            round(float(loss[a:b].mean()), 4)
            for a, b in zip(schedule.starts, schedule.ends, strict=True)
        ]
        return {"loss": float(loss.mean()), "accuracy": float(right.mean()), "per_scale": scales}

    # --- compiled ---

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def _train(self, state: dict, quantizer: Quantizer, tokens, labels, key):
        drop = jax.random.bernoulli(key, self.config.cond_drop_rate, labels.shape)
        labels = jnp.where(drop, self.config.null_label, labels)

        def loss_of(params):
            loss, right = self._predict(params, quantizer, tokens, labels)
            return loss.mean(), right.mean()

        state, (loss, right), norm = descend(state, loss_of, self.optimizer(), self.ema)
        return state, {"loss": loss, "accuracy": right, "gradient_norm": norm}

    @functools.partial(jax.jit, static_argnums=0)
    def _evaluate(self, params: dict, quantizer: Quantizer, tokens, labels):
        return jnp.stack([x.mean(0) for x in self._predict(params, quantizer, tokens, labels)])

    def _predict(self, params: dict, quantizer: Quantizer, tokens, labels):
        """Cross entropy [B, L] and whether the likeliest token is right [B, L]."""
        model = cast(self.model(params), jnp.dtype(self.settings.dtype))
        logits = model(labels, quantizer.teacher_inputs(tokens))
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return loss, (logits.argmax(-1) == tokens).astype(jnp.float32)
