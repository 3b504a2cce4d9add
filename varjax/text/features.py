"""Text features: what the text encoder makes of prompts, and all that a model sees of them.

They are a `varjax.conditions.Condition`: one entry per image, `take(index)` gives the arrays of
some images. On disk they are an npz file, whose arrays `load` describes.

Letters: P prompts, N images, B images of a batch, M tokens (padded), C width of the encoder.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from varjax.core import arguments
from varjax.core.errors import UserError, about
from varjax.storage import values
from varjax.text.prompt_condition import PromptCondition, read_arrays

MAX_LENGTH = 512  # tokens of the released models
LENGTH_STEP = 16  # lengths are padded to a multiple: few shapes, few programs
_OPTIONAL = ("negative_kv", "negative_lens", "unconditional", "prompts")


@dataclass(frozen=True, eq=False)
class TextFeatures(PromptCondition):
    """Features of P prompts for N images.

    Attributes:
      kv: features of all prompts, one after the other.
      lens: how many rows belong to each prompt.
      negative_kv, negative_lens: the same two arrays for the texts that guidance leads away from;
        None: the model's own unconditional text.
      unconditional: which prompts are empty. They stand for the model's own unconditional text, and
        their single row of `kv` is not used.
      prompts: the texts, where known.
      numbers: the prompt of every image; by default one image per prompt.
      text_maxlen: the most tokens that the model takes.

    Raises:
      UserError: arrays that do not fit each other.
    """

    kv: Float[np.ndarray, "rows C"]
    lens: Int[np.ndarray, " P"]
    negative_kv: Float[np.ndarray, "rows_negative C"] | None = None
    negative_lens: Int[np.ndarray, " P_negative"] | None = None
    unconditional: Bool[np.ndarray, " P"] | None = None
    prompts: tuple[str, ...] | None = None
    numbers: Int[np.ndarray, " N"] | None = None
    text_maxlen: int = MAX_LENGTH

    def __post_init__(self):
        self._check_rows("kv", "lens")
        if (self.negative_kv is None) != (self.negative_lens is None):
            raise UserError("negative_kv and negative_lens belong together: give both or none")
        if self.negative_kv is not None:  # a single text serves all prompts
            self._check_rows("negative_kv", "negative_lens")
            if self.negative_kv.shape[1] != self.kv.shape[1]:
                raise UserError(
                    f"negative_kv is not {self.kv.shape[1]} wide as kv: encode both alike"
                )
            if len(self.negative_lens) not in (1, len(self.lens)):
                raise UserError(
                    f"negative_lens has {len(self.negative_lens)} entries: give one for each of "
                    f"the {len(self.lens)} prompts, or one for all"
                )
        empty = np.zeros(len(self.lens), bool) if self.unconditional is None else self.unconditional
        flags = values.as_array("unconditional", empty)
        if flags.shape != self.lens.shape or flags.dtype != bool or (self.lens[flags] != 1).any():
            raise UserError(
                f"unconditional has shape {flags.shape} and type {flags.dtype}: give true or false"
                f" for each of the {len(self.lens)} prompts, true only for empty ones of 1 token"
            )
        object.__setattr__(self, "unconditional", flags)
        self._check_images()
        most = arguments.integer("text_maxlen", self.text_maxlen, 1)
        if self.longest > most:
            raise UserError(
                f"a text has {self.longest} tokens, the model takes {most}: encode it with"
                f" max_length={most}"
            )

    def _check_rows(self, kv_name: str, lens_name: str) -> None:
        """Checks features and lengths of texts, and gives them their types."""
        kv = self._array(kv_name, 2, np.floating, "floats [sum of lengths, C]")
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite
            kv = kv.astype(np.float32, copy=False)
        if not np.isfinite(kv).all():
            raise UserError(f"{kv_name} holds values that are NaN or infinite")
        object.__setattr__(self, kv_name, kv)
        self._check_lens(lens_name, kv_name)

    # --- images -----------------------------------------------------------------------------------

    def take(self, index: Sequence[int] | Int[np.ndarray, " B"]) -> dict[str, np.ndarray]:
        """Arrays of the images `index`: `kv` float32 [B, M, C] with zeros behind each text,
        `length` int32 [B], `unconditional` bool [B]. With negative texts also `negative_kv`
        [B, M, C] and `negative_length` [B]. Shapes depend on nothing but B."""
        prompts = self.numbers[np.asarray(index)]
        found = {
            "kv": self._padded(self.kv, self.lens, prompts),
            "length": self.lens[prompts],
            "unconditional": self.unconditional[prompts],
        }
        if self.negative_kv is not None:
            own = prompts % len(self.negative_lens)  # all 0 where one text serves all
            found["negative_kv"] = self._padded(self.negative_kv, self.negative_lens, own)
            found["negative_length"] = self.negative_lens[own]
        return found

    def _padded(self, kv: np.ndarray, lens: np.ndarray, which: np.ndarray) -> np.ndarray:
        starts = np.cumsum(lens) - lens
        result = np.zeros((len(which), self.padded_length, self.kv.shape[1]), np.float32)
        for row, i in zip(result, which, strict=True):
            row[: lens[i]] = kv[starts[i] : starts[i] + lens[i]]
        return result

    @property
    def longest(self) -> int:
        """Tokens of the longest text, negative ones included."""
        negative = () if self.negative_lens is None else self.negative_lens
        return int(max([*self.lens, *negative]))

    @cached_property
    def padded_length(self) -> int:
        """M: the same for all batches of the set."""
        return min(-(-self.longest // LENGTH_STEP) * LENGTH_STEP, self.text_maxlen)

    def describe(self) -> dict:
        negative = 0 if self.negative_lens is None else len(self.negative_lens)
        return self._described("text", negative_texts=negative)

    # --- fitting a model, files -------------------------------------------------------------------

    def fitted(self, text_channels: int, text_maxlen: int) -> "TextFeatures":
        """These features for a model that takes this width and at most so many tokens; `UserError`
        if they have another width or a text is too long."""
        if self.kv.shape[1] != text_channels:
            raise UserError(
                f"features are {self.kv.shape[1]} wide, the model takes {text_channels}: encode the"
                " prompts with the encoder that the model was trained with"
            )
        return replace(self, text_maxlen=text_maxlen)

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {name: getattr(self, name) for name in ("kv", "lens", *_OPTIONAL)}
        if self.prompts is not None:
            arrays["prompts"] = np.array(self.prompts, dtype=str)
        return {name: array for name, array in arrays.items() if array is not None}


def text_shapes(config, images: int, length: int | None) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of what `TextFeatures.take` gives, without negative texts: these double what is read
    and change nothing later. length: None: the most that the model takes."""
    length = config.text_maxlen if length is None else length
    return {
        "kv": jax.ShapeDtypeStruct((images, length, config.text_channels), np.float32),
        "length": jax.ShapeDtypeStruct((images,), np.int32),
        "unconditional": jax.ShapeDtypeStruct((images,), bool),
    }


def load(
    path: str | os.PathLike, text_channels: int | None = None, text_maxlen: int | None = None
) -> TextFeatures:
    """Reads text features that `save` or another program wrote.

    The file holds `kv` float [sum of lens, C], the features of all prompts one after the other, and
    `lens` int [P]; if need be `negative_kv` and `negative_lens` (P texts, or one for all),
    `unconditional` bool [P], `prompts` texts [P].

    text_channels, text_maxlen: width and most tokens that the model takes, if it is known.
    `UserError` if there is no such file, or its arrays do not fit each other or the model.
    """
    arrays = read_arrays("text features", path, ("kv", "lens"), _OPTIONAL)
    with about(f"text features {path}"):
        found = TextFeatures(**arrays, text_maxlen=2**31 - 1)
        channels = found.kv.shape[1] if text_channels is None else text_channels
        return found.fitted(channels, text_maxlen or max(MAX_LENGTH, found.longest))
