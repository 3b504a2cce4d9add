"""Editing pictures: inside a mask, or by text.

    edited = varjax.edit(model, picture, mask, labels=[22], policy="headkv", budget=0.25)
    edited.images           the edit, float32 [N, H, W, 3] in [0, 1]
    edited.reconstruction   the picture as the codec reproduces it from its tokens

A mask keeps the picture's tokens where it is black (`varjax.editing.masks`), in every scale, and
the model draws the others: in-painting, out-painting and class-conditional editing as VAR's
notebook defines them. Models that draw token by token take masks whose white part is the end of the
picture. Infinity also edits by text without a mask (`varjax.core.given`).
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from varjax import conditions, jax_settings
from varjax.calibration.data import Calibration
from varjax.conditions import Condition
from varjax.core import arguments
from varjax.core.errors import UserError
from varjax.core.given import Given
from varjax.core.sampling import Sampling, check_seed
from varjax.editing import masks
from varjax.editing.mixture import Mixture
from varjax.generation.api import USUAL_BATCH
from varjax.generation.build import Build
from varjax.generation.generator import Generator
from varjax.generation.progress import reporter
from varjax.models.model import Model, check_model
from varjax.policies import Policy
from varjax.text.features import TextFeatures
from varjax.text.prompt_ids import PromptIds


@dataclass(frozen=True, eq=False)
class Edited:
    """Results of N edits.

    images: float32 [N, H, W, 3] in [0, 1].
    reconstruction: the pictures as the codec reproduces them from their tokens.
    tokens, source_tokens: as drawn, and those of the pictures, [N, L] or [N, L, bits].
    kept: which tokens stayed the picture's [N, L]; None where bits were mixed by text.
    """

    images: np.ndarray
    reconstruction: np.ndarray
    tokens: np.ndarray
    source_tokens: np.ndarray
    kept: np.ndarray | None


@dataclass(frozen=True, kw_only=True)
class ByText:
    """Settings of an edit by text: see `varjax.core.given`.

    probability: p, which is not published: near 1 the picture stays, at 0.5 it counts for nothing.
    keep_scales: K_c, the first scales, whose bits are the picture's. mix_scales: K_f, up to which
      bits are mixed; published pairs are 3, 8 and 2, 7.
    """

    probability: float
    keep_scales: int = 3
    mix_scales: int = 8

    def check(self, model: Model) -> "ByText":
        """Returns self. `UserError` for numbers that cannot be, or a model that draws no bits."""
        if model.transformer.token_name != "bits":
            raise UserError(
                f"{model.name} draws no bits: only Infinity edits by text alone; give a mask"
            )
        scales = model.config.schedule.num_scales
        arguments.integer("mix_scales", self.mix_scales, 0, scales)
        arguments.integer("keep_scales", self.keep_scales, 0, self.mix_scales)
        arguments.number("source_probability", self.probability, 0, 1)
        return self


@jax_settings.pinned()
def edit(
    model: Model,
    images: Array | np.ndarray,
    mask: Array | np.ndarray | None = None,
    labels: Sequence[int | str] | None = None,
    policy: str | Policy = "full",
    budget: float | None = None,
    *,
    prompts: Sequence[str] | None = None,
    text_features: TextFeatures | None = None,
    prompt_ids: PromptIds | Sequence[Sequence[int]] | None = None,
    source: Sequence[str] | TextFeatures | None = None,
    by_text: ByText | None = None,
    paste: bool = True,
    feather: float = 0.0,
    seed: int = 0,
    batch_size: int | None = None,
    sampling: Sampling | None = None,
    calibration: str | os.PathLike | Calibration | None = None,
    kv_dtype: str | None = None,
    decode_dtype: str = "auto",
    progress: bool | Callable[[int, int], None] = False,
) -> Edited:
    """Edit pictures inside a mask, or by text: one edit per label or prompt.

    Args:
      model: from `load`.
      images: pictures [N, H, W, 3], uint8 or floats in [0, 1], of the size that the model draws;
        a single one [H, W, 3] serves all edits.
      mask: what is to be drawn, [N, H, W] or [H, W], of any type of numbers: True, 1
        or 255; the rest, False or 0, is kept.
      source, by_text: instead of a mask, texts that describe the pictures as they are (prompts or
        `TextFeatures`, one for each edit) and how bits are mixed (`ByText`).
      paste: put the pictures' own pixels back outside the mask; an edit by text has none.
      feather: pixels outside the mask, 0 to 64, over which the edit fades into the pictures that
        are put back, which softens the seam; 0 is a hard edge.
      batch_size: edits per program call.
      labels, prompts, text_features, prompt_ids, policy, budget and the rest: as in `generate`.

    Raises:
      UserError: for anything that cannot work, before compiling.
    """
    check_model(model)
    check_seed(seed)
    feather = _check_feather(feather, paste, source)
    if batch_size is not None:
        arguments.integer("batch_size", batch_size, 1, arguments.LARGEST_BATCH)
    given = {"labels": labels, "prompts": prompts, "text_features": text_features}
    given["prompt_ids"] = prompt_ids
    count = conditions.check(model, **given)
    pictures = masks.check_pictures(model, images, count)
    drawn = _check_way(model, mask, source, by_text, count)
    model = conditions.fitted(model, **given)
    condition = conditions.resolve(model, **given)
    if by_text is not None:
        name = "text_features" if isinstance(source, TextFeatures) else "prompts"
        condition = both_texts(condition, conditions.resolve(model, **{name: source}))
    generator = Generator(
        model,
        policy,
        budget,
        sampling=sampling,
        batch_size=(1 if by_text is None else 2) * min(count, batch_size or USUAL_BATCH),
        calibration=calibration,
        kv_dtype=kv_dtype,
        build=Build(decode_dtype=decode_dtype),
    )
    editor = Editor(generator, progress=reporter(progress, "edit"))
    if by_text is not None:
        return editor.by_text(condition, pictures, by_text, seed=seed)
    return editor.in_masks(condition, pictures, drawn, seed=seed, paste=paste, feather=feather)


def _check_feather(feather: float, paste: bool, source: object) -> float:
    """The width of the seam. `UserError` if nothing is put back that it could soften."""
    arguments.flag("paste", paste)
    feather = arguments.number("feather", feather, 0, masks.LARGEST_FEATHER)
    if feather and not (paste and source is None):
        rule = "it belongs to paste=True and a mask, leave it out"
        raise arguments.wrong("feather", feather, rule)
    return feather


def _check_way(model, mask, source, by_text, count: int) -> Bool[np.ndarray, "N H W"] | None:
    """The masks; None for an edit by text."""
    if (mask is None) == (source is None) or (source is None) != (by_text is None):
        raise UserError(
            "give either a mask, or source (texts of the pictures as they are) with by_text=ByText("
            "probability=...)"
        )
    if by_text is None:
        drawn = masks.check_masks(model, mask, count)
        masks.kept_tokens(model, drawn)
        return drawn
    arguments.instance("by_text", by_text, ByText, "varjax.editing.edit.ByText(probability=0.9)")
    by_text.check(model)
    if len(source) != count:
        raise UserError(f"{len(source)} source texts for {count} edits: give one for each")
    return None


def both_texts(target: TextFeatures, source: TextFeatures) -> TextFeatures:
    """The conditions of an edit by text: those of all N edits, then the N texts of their pictures.
    `UserError` if guidance leads them away from different texts."""
    if (target.negative_kv is None) != (source.negative_kv is None):
        raise UserError("target and source texts need the same negative texts, or none")
    joined = {"kv": np.concatenate([target.kv, source.kv])}
    for name in ("lens", "unconditional"):
        joined[name] = np.concatenate([getattr(target, name), getattr(source, name)])
    if target.negative_kv is not None:
        one = len(target.negative_lens) == len(source.negative_lens) == 1
        if not one:
            kvs = (target.negative_kv, source.negative_kv)
            lens = (target.negative_lens, source.negative_lens)
            joined |= {"negative_kv": np.concatenate(kvs), "negative_lens": np.concatenate(lens)}
    numbers = np.concatenate([target.numbers, source.numbers + len(target.lens)])
    return replace(target, **joined, prompts=None, numbers=numbers)


class Editor:
    """Edits pictures with a generator, which is compiled at the first edit.

    progress: called with the edits that are done and all of them
    (`varjax.generation.progress.reporter`).
    """

    def __init__(self, generator: Generator, *, progress: Callable[[int, int], None]):
        self.generator, self.model, self._progress = generator, generator.model, progress

    def in_masks(
        self,
        condition: Condition,
        pictures: Float[np.ndarray, "N H W 3"],
        drawn: Bool[np.ndarray, "N H W"],
        *,
        seed: int,
        paste: bool,
        feather: float = 0.0,
    ) -> Edited:
        """Edit inside masks. pictures, drawn: as `masks.check_pictures` and `check_masks` return
        them. feather: of `masks.paste`."""
        self.generator.policy.check_images(len(condition))
        source = source_tokens(self.model, pictures)
        kept = masks.kept_tokens(self.model, drawn)
        count, images, tokens = len(condition), [], []
        self._progress(0, count)
        batches = self.generator.batches(condition, seed=seed, given=Given(source, kept))
        for index, results in batches:
            images.append(results["images"])
            tokens.append(results["tokens"])
            self._progress(int(index[-1]) + 1, count)
        # with the same program: what is decoded may depend on it in the last bit
        everything = Given(source, np.ones_like(kept))
        batches = self.generator.batches(condition, seed=seed, given=everything)
        same = np.concatenate([results["images"] for _, results in batches])
        found = np.concatenate(images)
        found = masks.paste(found, pictures, drawn, feather) if paste else found
        return Edited(found, same, np.concatenate(tokens), source, kept)

    def by_text(
        self,
        condition: TextFeatures,
        pictures: Float[np.ndarray, "N H W 3"],
        how: ByText,
        *,
        seed: int,
    ) -> Edited:
        """Edit by text. condition: from `both_texts`. The generator's batch holds every edit
        twice, so its size is even."""
        half, count = self.generator.batch_size // 2, len(pictures)
        self.generator.policy.check_images(len(condition))
        source = source_tokens(self.model, pictures)
        found, same, every = [], [], self.model.config.schedule.num_scales
        # all scales are kept: the pictures as the codec reproduces them
        nothing = replace(how, keep_scales=every, mix_scales=every)
        self._progress(0, count)
        for start in range(0, count, half):
            index = np.arange(start, min(start + half, count))
            padded = np.pad(index, (0, half - len(index)), mode="edge").astype(np.int32)
            twice = np.concatenate([padded, padded])  # the second half: under their own texts
            arrays = condition.take(np.concatenate([padded, padded + count]))
            for results, way in ((found, how), (same, nothing)):
                scales = (way.keep_scales, way.mix_scales, way.probability)
                given = Mixture.of_scales(source[twice], self.model.config.schedule, *scales)
                drawn, _ = self.generator.run_batch(
                    arrays, twice, seed=seed, given=given, keep_cache=False
                )
                results.append(
                    {n: np.asarray(drawn[n])[: len(index)] for n in ("images", "tokens")}
                )
            self._progress(int(index[-1]) + 1, count)
        images, tokens = (np.concatenate([part[n] for part in found]) for n in ("images", "tokens"))
        return Edited(images, np.concatenate([p["images"] for p in same]), tokens, source, None)


def source_tokens(model: Model, pictures: Float[np.ndarray, "N H W 3"]) -> np.ndarray:
    """Tokens of pictures in [0, 1] as the model draws them, [N, L] or [N, L, bits]. Pictures are
    encoded one by one, so that their tokens do not depend on others."""
    if len(pictures) > 1 and pictures.strides[0] == 0:  # one picture for all edits
        return np.repeat(source_tokens(model, pictures[:1]), len(pictures), axis=0)
    scaled = [jnp.asarray(2 * p[None] - 1, jnp.float32) for p in pictures]
    return np.concatenate([model.token_arrays.image_tokens(model.codec, p) for p in scaled])
