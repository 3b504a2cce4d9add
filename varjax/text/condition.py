"""Texts, one per image: what text-conditional models draw from.

Callers give prompts, which the text encoder of the model's checkpoint encodes, or features that
were computed beforehand (`varjax.text.features`).
"""

from collections.abc import Sequence

from varjax import arguments
from varjax.conditions import ConditionKind, TakesCondition
from varjax.nn.parameters import default_dtype
from varjax.text.encoder import encode_texts
from varjax.text.features import TextFeatures

PROMPTS_WANTED = "give a list of texts, one for each image"
FEATURES_WANTED = "TextFeatures, as varjax.text.features.load reads"


class TextKind(ConditionKind):
    """The `ConditionKind` of texts. Exactly one of the two arguments is given."""

    name = "text"
    arguments = ("prompts", "text_features")

    def count(self, model: TakesCondition, *, prompts=None, text_features=None) -> int:
        if prompts is not None:
            return len(arguments.texts("prompts", prompts, PROMPTS_WANTED))
        found = arguments.instance("text_features", text_features, TextFeatures, FEATURES_WANTED)
        return len(found)

    def resolve(
        self,
        model: TakesCondition,
        *,
        prompts: Sequence[str] | None = None,
        text_features: TextFeatures | None = None,
    ) -> TextFeatures:
        """Features that fit the model. The text encoder is on the device only while this runs.
        `UserError` also if there is no encoder, or it is another model's."""
        self.count(model, prompts=prompts, text_features=text_features)
        config = model.config
        if prompts is not None:
            text_features, _ = encode_texts(
                model.directory or "", prompts, dtype=default_dtype(), max_length=config.text_maxlen
            )
        return text_features.fitted(config.text_channels, config.text_maxlen)


TEXT = TextKind()
