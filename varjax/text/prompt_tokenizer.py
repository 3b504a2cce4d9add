"""The tokenizer of models that read prompts as token ids (Janus-Pro, Lumina-mGPT).

It is the user's own `tokenizer.json`, which lies in a checkpoint's folder `prompt_tokenizer` and is
read by the package `tokenizers`. How a text becomes a prompt, with its turns and special tokens, is
said by the families (`encode_prompt` of their configurations). As in the published processors,
what looks like a special token in a text is that token.
"""

import json
import os
from pathlib import Path

from varjax.core.errors import UserError
from varjax.storage import ordinary
from varjax.storage.values import require
from varjax.text.prompt_condition import is_known

FOLDER, FILE = "prompt_tokenizer", "tokenizer.json"  # in a checkpoint
LARGEST_FILE = 2**27  # bytes; released ones have up to 10 MiB
INSTEAD = "or give token ids in place of texts: prompt_ids, --prompt_ids=FILE.npz"


class PromptTokenizer:
    """Texts to token ids.

    Args:
      path: a `tokenizer.json`.

    Raises:
      MissingExtra: without the `tokenizers` package.
      UserError: there is no such file, or it is no tokenizer.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(
                f"there is no tokenizer file {path}: copy the published model's {FILE} to it,"
                f" {INSTEAD}"
            )
        module = require("tokenizers", extra="text", purpose="turning prompts into token ids")
        try:
            text = ordinary.read_file(self.path, LARGEST_FILE).decode("utf-8")
            self._tokenizer = module.Tokenizer.from_str(text)
            model = json.loads(text)["model"]  # a Unigram names its unknown token by the id
            token = model.get("unk_token")
            named = None if token is None else self._tokenizer.token_to_id(token)
            self._unknown = model.get("unk_id", named)
        except Exception as error:  # the package raises `Exception` itself
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"cannot read {path} as a file of the package tokenizers ({reason}): give the"
                f" tokenizer.json of the published model, {INSTEAD}"
            ) from None
        self._tokenizer.no_truncation()  # a file may ask for both
        self._tokenizer.no_padding()

    @classmethod
    def of_checkpoint(cls, directory: str | os.PathLike | None, name: str) -> "PromptTokenizer":
        """The tokenizer of a checkpoint's folder; None: published model `name`, without one."""
        if directory is None:
            raise UserError(
                f"{name} is the name of a published model, which has no tokenizer here: convert it"
                f" with `python -m ported_weights` and give the folder, {INSTEAD}"
            )
        return cls(Path(directory) / FOLDER / FILE)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, without any that a file says to add in front or behind."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def knows(self, text: str) -> bool:
        """Whether it knows a word of a text (`prompt_condition.is_known`)."""
        return is_known(self.ids(text), self._unknown, self._tokenizer.decode)

    def id_of(self, token: str) -> int:
        """The id of a special token; `UserError` if the tokenizer does not have it."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise self._foreign(f"has no token {token}")
        return found

    def check_end(self, ids: list[int], token: str) -> None:
        """Raises `UserError` unless the last id is that of a special token: where it is not added
        as one, a text that ends with its name becomes other tokens."""
        if not ids or ids[-1] != self.id_of(token):
            raise self._foreign(f"takes {token} for ordinary text")

    def _foreign(self, what: str) -> UserError:
        return UserError(
            f"{self.path} {what}, which prompts of the model need: give the {FILE} that was"
            f" published with it, {INSTEAD}"
        )
