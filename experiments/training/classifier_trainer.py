"""Training of the classifier that judges the samples of a model (`experiments.evaluation`).

The loss is cross entropy on pictures that are mirrored and shifted a little at random.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import UInt8

from experiments.training.decoding import moved
from experiments.training.stage import TrainingStage, adamw, descend, learning_rate, whole_batches
from varjax.models.judges.classifier import Classifier

SHIFT = 1 / 16  # the largest move in every direction, as a part of the side


@dataclass(frozen=True)
class ClassifierStage(TrainingStage):
    """`data` holds pictures."""

    name, network, ema = "classifier", Classifier, 0.998

    def optimizer(self) -> optax.GradientTransformation:
        rate = learning_rate(self.settings.classifier_lr, self.steps, warm_up=50)
        return adamw(rate, b2=0.99, clip=1.0, weight_decay=0.05)

    def step(self, state: dict, n: int) -> tuple[dict, dict]:
        images, labels = self.images(n)
        images = shifted(images, np.random.default_rng((self.settings.seed, n, 2)))
        return self._train(state, *self.spread(images, labels))

    def validate(self, state: dict) -> dict:
        """Measure the cross entropy in nats, and the share of pictures whose class is found."""
        most = self.settings.max_validation
        pictures, labels = self.data.val[:most], self.data.val_labels[:most]
        parts = [
            self._evaluate(state["ema"], *self.spread(pictures[rows], labels[rows]))
            for rows in whole_batches(len(labels), self.batch_size)
        ]
        loss, right = np.mean(jax.device_get(parts), axis=0)
        return {"loss": float(loss), "accuracy": float(right)}

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def _train(self, state: dict, images, labels):
        def loss_of(params, images, labels):
            loss, right = self._loss(params, images, labels)
            return loss, (right, ())

        state, (loss, (right, _)), norm = descend(
            state, loss_of, (images, labels), self.optimizer(), self.ema, self.settings.accumulate
        )
        return self.kept(state), {"loss": loss, "accuracy": right, "gradient_norm": norm}

    @functools.partial(jax.jit, static_argnums=0)
    def _evaluate(self, params: dict, images, labels):
        return self.seen(jnp.stack(self._loss(params, images, labels)))

    def _loss(self, params: dict, images, labels):
        network = self.model(self.mesh.in_use(params))
        logits = network(images.astype(jnp.float32) / 255)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return loss.mean(), (logits.argmax(-1) == labels).astype(jnp.float32).mean()


def shifted(
    images: UInt8[np.ndarray, "B S S 3"], random: np.random.Generator
) -> UInt8[np.ndarray, "B S S 3"]:
    """Move every picture by up to `SHIFT` of its side, and repeat its edges."""
    most = round(SHIFT * images.shape[1])
    places = random.integers(0, 2 * most + 1, (len(images), 2))
    return np.stack([moved(x, *place, most) for x, place in zip(images, places, strict=True)])
