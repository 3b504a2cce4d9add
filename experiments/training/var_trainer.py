"""Training of transformers, VAR and LlamaGen: teacher forcing on a finished codec's tokens.

Tokens, plain and mirrored, are made once, in float32, and kept in a file. All tokens of a picture
are predicted at once, in VAR under the block-causal mask. The loss is their mean cross entropy.
Labels are dropped at random, which teaches the null class that guidance needs.
"""

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import processes
from experiments.training.data import Dataset, to_float
from experiments.training.decoding import Ahead, InFiles
from experiments.training.settings import TrainingSettings
from experiments.training.stage import TrainingStage, adamw, descend, learning_rate, whole_batches
from varjax.codecs.autoencoder import ImageCodec, cast
from varjax.codecs.vqvae import Quantizer
from varjax.core.errors import UserError
from varjax.generation import hosts
from varjax.models import teacher_forcing
from varjax.models.llamagen import LlamaGenConfig
from varjax.models.var import VARConfig
from varjax.storage import npz
from varjax.storage.atomic import new_file

TOKENS = ("train", "train_labels", "val", "val_labels")  # what the file of tokens holds


@dataclass(frozen=True)
class TransformerStage(TrainingStage):
    """`data` holds tokens (`read_tokens`). Subclasses add

        logits(model, quantizer, tokens, labels, key) -> [B, L, V]    key: None in validation
        token_ranges -> (name, [(first, last + 1)])    validation reports a loss for each of them

    quantizer: the codec's, for transformers whose inputs are made of its codes.
    """

    quantizer: Quantizer | None = field(default=None, compare=False, repr=False)

    name, part = "var", "transformer"
    clip: ClassVar[float]  # norm of the gradients

    def optimizer(self) -> optax.GradientTransformation:
        settings, warm_up = self.settings, min(150, self.steps // 10)
        rate = learning_rate(settings.var_lr, self.steps, warm_up)
        return adamw(rate, b2=0.95, clip=self.clip, weight_decay=settings.weight_decay)

    def step(self, state: dict, n: int) -> tuple[dict, dict]:
        chosen, mirrored = self.pictures(n)
        tokens = self.data.train[mirrored.astype(int), chosen]
        batch = self.spread(tokens, self.data.train_labels[chosen])
        return self._train(state, self._quantizer, *batch, self.everywhere(self.key(n)))

    @functools.cached_property
    def _quantizer(self) -> Quantizer | None:
        return self.everywhere(self.quantizer)

    def validate(self, state: dict) -> dict:
        """Measure the cross entropy in nats per token, its mean and by range of tokens.

        The accuracy is the share of tokens that are guessed right.
        """
        tokens, labels = self.data.val, self.data.val_labels
        parts = [
            self._evaluate(state["ema"], self._quantizer, *self.spread(tokens[rows], labels[rows]))
            for rows in whole_batches(len(labels), self.batch_size)
        ]
        loss, right = np.mean(jax.device_get(parts), axis=0)  # [L] each
        name, ranges = self.token_ranges
        by_range = [round(float(loss[a:b].mean()), 4) for a, b in ranges]
        return {"loss": float(loss.mean()), "accuracy": float(right.mean()), name: by_range}

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def _train(self, state: dict, quantizer: Quantizer, tokens, labels, key):
        drop = jax.random.bernoulli(key, self.settings.label_drop, labels.shape)
        labels = jnp.where(drop, self.config.null_label, labels)
        parts = self.settings.accumulate

        def loss_of(params, tokens, labels, part=None):
            # dropout of the parts must not be the same; a part's pictures all have its number
            own = key if part is None else jax.random.fold_in(key, part[0])
            loss, right = self._predict(params, quantizer, tokens, labels, own)
            return loss.mean(), (right.mean(), ())

        batch = (tokens, labels)
        if parts > 1:
            batch += (jnp.arange(len(labels)) % parts,)
        state, (loss, (right, _)), norm = descend(
            state, loss_of, batch, self.optimizer(), self.ema, parts
        )
        return self.kept(state), {"loss": loss, "accuracy": right, "gradient_norm": norm}

    @functools.partial(jax.jit, static_argnums=0)
    def _evaluate(self, params: dict, quantizer: Quantizer, tokens, labels):
        found = self._predict(params, quantizer, tokens, labels)
        return self.seen(jnp.stack([x.mean(0) for x in found]))

    def _predict(self, params: dict, quantizer, tokens, labels, key=None):
        """Return cross entropy [B, L] and whether the likeliest token is right [B, L]."""
        model = cast(self.model(params), jnp.dtype(self.settings.dtype))
        model = self.mesh.in_use(model, ("blocks",))  # layers are gathered one by one
        model.differentiated = functools.partial(
            self.mesh.differentiated, once=model.once, again=self.settings.remat
        )
        logits = self.mesh.images(self.logits(model, quantizer, tokens, labels, key))
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return loss, (logits.argmax(-1) == tokens).astype(jnp.float32)


@dataclass(frozen=True)
class VARStage(TransformerStage):
    """Each scale of a picture is predicted from the codes of the scales before."""

    ema, clip = 0.998, 2.0

    def logits(self, model, quantizer, tokens, labels, key):
        return model(labels, quantizer.teacher_inputs(tokens))

    @property
    def token_ranges(self) -> tuple[str, list[tuple[int, int]]]:
        schedule = self.config.schedule
        return "per_scale", list(zip(schedule.starts, schedule.ends, strict=True))


@dataclass(frozen=True)
class LlamaGenStage(TransformerStage):
    """Each token of a picture is predicted from the tokens before, row by row. As published,
    dropout acts on the inputs and on what attention and feed-forward add (Sun et al. 2024, arXiv
    2406.06525, appendix)."""

    ema, clip = 0.999, 1.0

    def logits(self, model, quantizer, tokens, labels, key):
        context = model.encode_condition(labels, guided=False)
        if key is None:
            return teacher_forcing.of_tokens(model, context, tokens[:, :-1])
        key = jax.random.fold_in(key, 1)  # `key` itself has decided which labels are dropped
        dropout = self.settings.dropout
        return teacher_forcing.of_tokens(model, context, tokens[:, :-1], dropout=dropout, key=key)

    @property
    def token_ranges(self) -> tuple[str, list[tuple[int, int]]]:
        """Quarters from top to bottom."""
        edges = [i * self.config.image_tokens // 4 for i in range(5)]
        return "per_quarter", list(zip(edges, edges[1:], strict=False))


def write_tokens(
    path: Path, codec: ImageCodec, pictures: Dataset, settings: TrainingSettings
) -> None:
    """Write the tokens of all training pictures, plain and mirrored, and of some for validation."""
    most = settings.max_validation
    arrays = {
        "train": _tokens(codec, pictures.train, settings.var_batch_size, mirrored=True),
        "train_labels": pictures.train_labels,
        "val": _tokens(codec, pictures.val[:most], settings.var_batch_size)[0],
        "val_labels": pictures.val_labels[:most],
    }
    with processes.together():
        if hosts.is_first():
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path) as file:
                np.savez_compressed(file, **arrays)


def _tokens(
    codec: ImageCodec, images: np.ndarray | InFiles, batch_size: int, mirrored: bool = False
) -> np.ndarray:
    """Return tokens of pictures [1, N, L], or [2, N, L]: plain and mirrored."""
    size, found = min(batch_size, len(images)), []
    together = size * hosts.count()  # each process encodes a batch
    batches = -(-len(images) // together)

    def rows_of(batch: int) -> np.ndarray:
        # copies of the last picture fill up the last batch, so that one program serves all
        own = together * batch + size * hosts.index()
        return np.minimum(np.arange(own, own + size), len(images) - 1)

    encode = jax.jit(type(codec).images_to_tokens)
    ahead = Ahead(images, rows_of) if isinstance(images, InFiles) else None
    for batch in range(batches):
        pixels = to_float(ahead.batch(batch) if ahead else images[rows_of(batch)])
        views = (pixels, pixels[:, :, ::-1]) if mirrored else (pixels,)
        made = np.stack([encode(codec, view) for view in views], axis=1)
        found.append(processes.say_all(made).reshape(-1, *made.shape[1:]))
    return np.concatenate(found)[: len(images)].swapaxes(0, 1)


def read_tokens(path: Path, pictures: Dataset, config: VARConfig | LlamaGenConfig) -> Dataset:
    """Return `pictures` as int32 tokens: `train` [2, N, L], plain and mirrored; `val` [M, L].

    `UserError` if the file is damaged or holds tokens of other pictures.
    """
    most = 8 * 2 * len(pictures.train) * config.total_tokens  # bytes; they may pack well
    found = npz.load(path, TOKENS, max(most, npz.LARGEST))
    if not np.array_equal(found["train_labels"], pictures.train_labels):
        raise UserError(f"{path} holds tokens of other pictures: delete it to make it again")
    return replace(pictures, train=found["train"], val=found["val"], val_labels=found["val_labels"])
