"""Training of the LlamaGen transformer, with dropout as published: of the inputs, and of what
attention and feed-forward add (Sun et al. 2024, arXiv 2406.06525, appendix)."""

from dataclasses import dataclass

import jax

from varjax.training.var_trainer import TransformerStage


@dataclass(frozen=True)
class LlamaGenStage(TransformerStage):
    """Tokens of a picture are predicted row by row from those before."""

    ema, clip = 0.999, 1.0

    def logits(self, model, quantizer, tokens, labels, key):
        context = model.encode_condition(labels, guided=False)
        dropout = {}
        if key is not None:  # another one than that of the labels
            dropout = {"dropout": self.settings.dropout, "key": jax.random.fold_in(key, 1)}
        return model.teacher_forced(context, tokens[:, :-1], **dropout)

    @property
    def parts(self) -> tuple[str, list[tuple[int, int]]]:
        """Quarters from top to bottom."""
        edges = [i * self.config.image_tokens // 4 for i in range(5)]
        return "per_quarter", list(zip(edges, edges[1:], strict=False))
