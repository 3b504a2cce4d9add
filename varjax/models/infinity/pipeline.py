"""Infinity with its BSQ-VAE, as the generation engine sees it."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from varjax import sampling as sampling_lib
from varjax.codecs.bsq.model import codes as codes_of
from varjax.codecs.patchify import patchify, unpatchify
from varjax.engine.inputs import Resampling, ScaleMaps
from varjax.errors import UserError
from varjax.models.pipeline import Pipeline
from varjax.sampling import Sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InfinityPipeline(Pipeline):
    """Text-conditional. The condition is what `varjax.text.features.TextFeatures.take` gives: kv
    [B, M, E], length [B], unconditional [B], and for negative prompts negative_kv and
    negative_length. A token is a row of bits, uint8 [C]."""

    token_name: ClassVar[str] = "bits"

    @property
    def resampling(self) -> Resampling:
        return Resampling("bilinear", "bilinear", self.transformer.config.patch)

    def condition_shapes(self, images: int, text_tokens: int | None = None) -> dict:
        """Without negative prompts, which double what is read but change nothing later."""
        config = self.transformer.config
        length = config.text_maxlen if text_tokens is None else text_tokens
        return {
            "kv": jax.ShapeDtypeStruct((images, length, config.text_channels), jnp.float32),
            "length": jax.ShapeDtypeStruct((images,), jnp.int32),
            "unconditional": jax.ShapeDtypeStruct((images,), jnp.bool_),
        }

    def prepare(self, condition: dict[str, Array]) -> dict:
        """The second rows see the negative prompt, or else the unconditional text, cut to the
        length of the prompt. An image without a prompt sees the unconditional text in its first."""
        text, length = condition["kv"], condition["length"]
        empty = self._empty_text(text)
        text = jnp.where(condition["unconditional"][:, None, None], empty, text)
        other, other_length = empty, length
        if "negative_kv" in condition:
            other, other_length = condition["negative_kv"], condition["negative_length"]
        longest = max(text.shape[1], other.shape[1])
        text, other = (_extended(a, longest) for a in (text, other))
        return self.transformer.prepare(
            jnp.concatenate([text, other]), jnp.concatenate([length, other_length])
        )

    def _empty_text(self, like: Float[Array, "B M E"]) -> Float[Array, "B M E"]:
        stored = self.transformer.unconditional_text[: like.shape[1]]
        return jnp.broadcast_to(stored, like.shape).astype(like.dtype)

    def scale_context(self, context: dict, maps: ScaleMaps, sampling: Sampling) -> dict:
        """Rotation and visible text; `mix` [L], the guidance strength after every layer, if rows
        are mixed inside the network. 0 leaves both rows as they are."""
        config = self.transformer.config
        shared = {
            "rotation": self.transformer.rotation(maps.token_index),
            "visible": context["visible"],
        }
        inside = [config.depth + place for place in sampling.cfg_insertion_layer if place < 0]
        if inside:
            mixed = jnp.zeros(config.depth, bool).at[jnp.asarray(inside)].set(True)
            shared["mix"] = jnp.where(mixed, self._strength(maps, sampling), 0)
        return shared

    def _strength(self, maps: ScaleMaps, sampling: Sampling) -> Float[Array, ""]:
        """t in (1 + t) * cond - t * uncond."""
        return sampling.at("cfg", maps.scale, self.geometry.schedule.num_scales) - 1

    def embed(
        self, context, code_map: Float[Array, "B P Q C"], maps: ScaleMaps
    ) -> Float[Array, "R T D"]:
        return self.transformer.embed(context["start"], maps.shrink(code_map), maps.scale)

    def project(self, block, layer_context, shared, x):
        return self.transformer.project(block, layer_context["modulation"], shared["rotation"], x)

    def raw_queries(self, block, layer_context, x):
        return self.transformer.raw_queries(block, layer_context["modulation"], x)

    def finish(self, block, layer_context, shared, x, attended):
        x = self.transformer.finish(block, layer_context, shared["visible"], x, attended)
        if "mix" not in shared:
            return x
        strength = shared["mix"][layer_context["number"]]
        mixed = sampling_lib.guide(x.astype(jnp.float32), strength).astype(x.dtype)
        return jnp.where(strength == 0, x, jnp.tile(mixed, (2, 1, 1)))

    def logits(self, head, x, maps: ScaleMaps, sampling: Sampling) -> Float[Array, "B T C 2"]:
        """After temperature and guidance; of the conditional rows only where guidance is not on the
        logits."""
        images = x.shape[0] // 2
        on_logits = 0 in sampling.cfg_insertion_layer
        if not on_logits:
            head, x = head[:images], x[:images]
        with jax.named_scope("head"):
            logits = self.transformer.logits(head, x)
        logits = logits / sampling.at("tau", maps.scale, self.geometry.schedule.num_scales)
        if on_logits:
            logits = sampling_lib.guide(logits, self._strength(maps, sampling))
        return logits.reshape(*logits.shape[:2], -1, 2)

    def choose(
        self, logits: Float[Array, "B T C 2"], keys: Array, maps: ScaleMaps, sampling, given
    ) -> tuple[Int[Array, "B T C"], Float[Array, "B T C"]]:
        with jax.named_scope("choose"):
            images, tokens, bits = logits.shape[:3]
            flat = logits.reshape(images, tokens * bits, 2)
            bits, _ = sampling_lib.sample(flat, keys, sampling)
            bits = bits.reshape(images, tokens, -1).astype(jnp.uint8)
        if given is not None:
            bits = jnp.where(maps.scale < given[1], given[0].astype(jnp.uint8), bits)
        return bits, codes_of(bits, self.codec.config.codebook_dim)

    def accumulate(
        self, code_map, codes: Float[Array, "B T C"], maps: ScaleMaps
    ) -> Float[Array, "B P Q C"]:
        return code_map + maps.enlarge(codes)

    # --- bits in files ----------------------------------------------------------------------------

    def tokens_to_file(self, tokens: np.ndarray) -> np.ndarray:
        """uint8 [N, L, C] -> bits of the image tokenizer, uint8 [N, L_vae, d]: with patches, four
        times as many rows of a quarter of the bits, row-major on the finer maps."""
        config, schedule = self.transformer.config, self.geometry.schedule
        parts = []
        for (h, w), start in zip(schedule.maps, schedule.starts, strict=True):
            maps = np.asarray(tokens[:, start : start + h * w], np.uint8).reshape(
                -1, h, w, config.bits
            )
            parts.append(unpatchify(maps, config.patch).reshape(len(maps), -1, config.codebook_dim))
        return np.concatenate(parts, axis=1)

    def no_tokens(self, images: int) -> np.ndarray:
        bits = self.transformer.config.bits
        return np.zeros((images, self.geometry.schedule.total_tokens, bits), np.uint8)

    def tokens_from_file(self, array: np.ndarray, num_images: int, scales: int) -> np.ndarray:
        """uint8 [N, L, C] from bits of the image tokenizer that reach at least through the given
        scales; 0 beyond."""
        config, schedule = self.transformer.config, self.geometry.schedule
        patch, bits = config.patch, config.codebook_dim
        least, most = (
            schedule.ends[max(0, n - 1)] * patch**2 for n in (scales, schedule.num_scales)
        )
        fits = array.ndim == 3 and array.shape[::2] == (num_images, bits)
        if not fits or not (least if scales else 0) <= array.shape[1] <= most:
            raise UserError(
                f"bits have the shape {array.shape}, needed is ({num_images}, {least} to {most}, "
                f"{bits}): images, bits of at least the first {scales} scales, bits per code"
            )
        if (
            not (array.dtype == bool or np.issubdtype(array.dtype, np.integer))
            or not np.isin(array, (0, 1)).all()
        ):
            raise UserError(f"bits are {array.dtype}, needed are integers that are 0 or 1")
        padded = np.zeros((num_images, most, bits), np.uint8)
        padded[:, : array.shape[1]] = array
        parts = []
        for (h, w), start in zip(schedule.maps, schedule.starts, strict=True):
            rows = padded[:, start * patch**2 : (start + h * w) * patch**2]
            maps = rows.reshape(num_images, h * patch, w * patch, bits)
            parts.append(patchify(maps, patch).reshape(num_images, h * w, config.bits))
        return np.concatenate(parts, axis=1)


def _extended(text: Float[Array, "B M E"], length: int) -> Float[Array, "B Mx E"]:
    return jnp.pad(text, ((0, 0), (0, length - text.shape[1]), (0, 0)))
