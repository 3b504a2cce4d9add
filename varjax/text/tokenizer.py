"""The tokenizer of T5: the user's own `spiece.model`, read by the `sentencepiece` package.

A text becomes the pieces of the SentencePiece model and the end token. What looks like a special
token in a text, such as `</s>`, is ordinary text here.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from varjax.errors import UserError
from varjax.io.extras import require

FILE_NAME = "spiece.model"
END = 1  # id of the end token, counted in every length
# Entries of an encoder's vocabulary that are no pieces: 100 placeholders, and what fills up to a
# multiple of 128.
MOST_SPARE = 100 + 127
_ADVICE = f"take the {FILE_NAME} that is published beside the weights"


@dataclass(frozen=True)
class Tokens:
    """ids: of the text, the end token last. full_length: how many there were before cutting."""

    ids: list[int]
    full_length: int

    @property
    def is_cut(self) -> bool:
        return self.full_length > len(self.ids)


class Tokenizer:
    """Texts to token ids.

    Args:
      path: the SentencePiece model.
      vocab_size: of the encoder that the ids are for.

    Raises:
      MissingExtra: without the `sentencepiece` package.
      UserError: there is no such file, it is no model, or one of another vocabulary.
    """

    def __init__(self, path: str | os.PathLike, vocab_size: int):
        self._processor = _open(Path(path))
        pieces = self._processor.get_piece_size()
        if not vocab_size - MOST_SPARE <= pieces <= vocab_size:
            raise UserError(
                f"{path} has a vocabulary of {pieces} pieces, the encoder one of {vocab_size}: they"
                f" do not belong together; {_ADVICE}"
            )
        if (end := self._processor.eos_id()) != END:
            raise UserError(
                f"{path} is no tokenizer of T5: its end token has the id {end} instead of {END};"
                f" {_ADVICE}"
            )

    def encode(self, text: str, max_length: int) -> Tokens:
        """At most `max_length` ids (at least 1), of which the last is always the end token."""
        pieces = self._processor.encode(text)
        return Tokens([*pieces[: max_length - 1], END], len(pieces) + 1)


def _open(path: Path):
    module = require("sentencepiece", extra="text", purpose="turning prompts into tokens")
    if not path.is_file():
        raise UserError(f"there is no tokenizer file {path}: {_ADVICE}")
    try:
        return module.SentencePieceProcessor(model_file=os.fspath(path))
    except (RuntimeError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(
            f"cannot read {path} as a SentencePiece model ({reason}): {_ADVICE}"
        ) from None
