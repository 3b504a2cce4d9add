"""Training of the LlamaGen transformer. As published, dropout acts on the inputs and on what
attention and feed-forward add (Sun et al. 2024, arXiv 2406.06525, appendix)."""

from dataclasses import dataclass

import jax

from varjax.training.var_trainer import TransformerStage


@dataclass(frozen=True)
class LlamaGenStage(TransformerStage):
    """Each token of a picture is predicted from the tokens before, row by row."""

    ema, clip = 0.999, 1.0

    def logits(self, model, quantizer, tokens, labels, key):
        context = model.encode_condition(labels, guided=False)
        if key is None:
            return model.teacher_forced(context, tokens[:, :-1])
        key = jax.random.fold_in(key, 1)  # `key` itself has decided which labels are dropped
        dropout = self.settings.dropout
        return model.teacher_forced(context, tokens[:, :-1], dropout=dropout, key=key)

    @property
    def token_ranges(self) -> tuple[str, list[tuple[int, int]]]:
        """Quarters from top to bottom."""
        edges = [i * self.config.image_tokens // 4 for i in range(5)]
        return "per_quarter", list(zip(edges, edges[1:], strict=False))
