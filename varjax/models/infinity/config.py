"""Configuration of the Infinity transformer, in the published constructor's names."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from varjax.errors import UserError
from varjax.models.infinity import schedules
from varjax.nn import published
from varjax.sampling import Sampling
from varjax.schedule import Schedule

LEVELS = 15  # rows of the published level embedding
FFN_MULTIPLE = 256  # the feed-forward's width is rounded to a multiple of it
# Options of the published constructor with the one value that all released models have.
FIXED = {
    "cos_attn": True,
    "shared_aln": True,
    "head_aln": True,
    "use_bit_label": True,
    "rms_norm": False,
    "swiglu": False,
    "nm0": False,
    "cross_attn_layer_scale": -1,
    "rope2d_each_sa_layer": True,
    "add_lvl_embeding_only_first_block": True,
    "rope2d_normalized_by_hw": 2,
    "head_depth": 1,
    "lvl_embed_rows": LEVELS,
}
# Published arguments and notes that do not change the function computed, or follow from others.
IGNORED_NAMES = frozenset(
    "vae vae_local note drop_rate drop_path_rate cond_drop_rate rand_uncond tau top_p top_k"
    " customized_flash_attn fused_mlp fused_norm checkpointing pad_to_multiplier use_flex_attn"
    " batch_size pn train_h_div_w_list video_frames always_training_scales inference_mode"
    " raw_scale_schedule ffn_hidden text_pool_heads".split()
)
MAPS = ("aspect", "size", "patch_nums", "rope_map")
TEMPLATE = schedules.resolve("1.000", "1M")


@dataclass(frozen=True, kw_only=True)
class InfinityConfig(published.TransformerConfig):
    """Shape of an Infinity transformer.

    codebook_dim: bits of one code of the image tokenizer; with `apply_spatial_patchify` a token
      stands for 2 x 2 codes.
    schedule, rope_map: maps of tokens, and the map that rotary positions are stretched to: the
      template's last one at 1M (`schedules`). Weights do not depend on them.
    """

    what = "Infinity"
    condition: ClassVar[str] = "text"  # what images are made of

    depth: int = 32
    embed_dim: int = 2048
    num_heads: int = 16
    mlp_ratio: float = 4.0
    norm_eps: float = 1e-6
    text_channels: int = 2048
    text_maxlen: int = 512
    codebook_dim: int = 32
    apply_spatial_patchify: bool = False
    block_chunks: int = 8
    schedule: Schedule = TEMPLATE["schedule"]
    rope_map: tuple[int, int] = TEMPLATE["rope_map"]

    def __post_init__(self):
        self.check_numbers("mlp_ratio", depth=(1, published.LARGEST_DEPTH))
        self.check_size("embed_dim * mlp_ratio", self.hidden_dim)
        self.check_multiple("embed_dim", self.embed_dim, self.num_heads)
        # half of the rotated pairs for rows, half for columns
        self.check_multiple("head size", self.head_dim, 4)
        self.check_multiple("depth", self.depth, self.block_chunks)
        self.check_multiple("embed_dim", self.embed_dim, self.pool_heads)
        if self.schedule.num_scales > LEVELS:
            raise self.wrong(f"{self.schedule.num_scales} scales, the weights know {LEVELS} levels")
        height, width = self.rope_map
        for h, w in self.schedule.maps:
            if h > height or w > width:
                raise self.wrong(f"map {h}x{w} is larger than rope_map {height}x{width}")

    # --- published names --------------------------------------------------------------------------

    @classmethod
    def from_published(cls, arguments: Mapping) -> "InfinityConfig":
        """Reads the published constructor's names. Besides, `aspect` and `size` name a template, or
        `patch_nums` and `rope_map` give its maps. `UserError` for an unknown name, a value of the
        wrong type, an option that no released model has, or a value that contradicts others."""
        loose = (*FIXED, *MAPS, "apply_spatial_patchify", "schedule")
        found = cls.arguments(arguments, IGNORED_NAMES, **dict.fromkeys(loose, object))
        for name, value in FIXED.items():
            given = found.pop(name, value)
            if given != value:
                raise cls.wrong(f"{name}={given!r:.40} is not supported: models have {value}")
        patchify = found.pop("apply_spatial_patchify", False)
        if patchify not in (0, 1):
            raise cls.wrong(f"apply_spatial_patchify is {patchify!r:.40}, it must be true or false")
        maps = _maps(found)  # takes its entries out
        return cls(**found | maps, apply_spatial_patchify=bool(patchify))

    def with_template(
        self, aspect: float | str | None, size: str | None, cell: int = 16
    ) -> "InfinityConfig":
        if aspect is None and size is None:
            return self
        named = schedules.name_of(self.schedule, self.rope_map)
        if named is None and None in (aspect, size):
            raise UserError(
                "the checkpoint's schedule is none of the published ones: give both aspect and size"
            )
        aspect, size = named[0] if aspect is None else aspect, named[1] if size is None else size
        return replace(self, **schedules.resolve(aspect, size))

    # --- what follows -----------------------------------------------------------------------------

    @property
    def hidden_dim(self) -> int:
        return round(self.embed_dim * self.mlp_ratio / FFN_MULTIPLE) * FFN_MULTIPLE

    @property
    def pool_heads(self) -> int:
        """Heads of the text's attentive pool; their size is embed_dim / pool_heads."""
        return max(1, self.text_channels // (64 if self.embed_dim > 4096 else 128))

    @property
    def patch(self) -> int:
        """Side of the square of codes that one token stands for."""
        return 2 if self.apply_spatial_patchify else 1

    @property
    def bits(self) -> int:
        """Bits of one token."""
        return self.codebook_dim * self.patch**2

    @property
    def logits_per_token(self) -> int:
        return 2 * self.bits

    @property
    def code_map(self) -> tuple[int, int, int]:
        """Height, width and channels of the latent map."""
        height, width = self.schedule.final_map
        return height * self.patch, width * self.patch, self.codebook_dim

    def condition_bytes(self, rows: int, item_size: int, text_tokens: int | None = None) -> int:
        """Bytes that every layer holds of the condition while an image is drawn: modulation, keys
        and values of the text."""
        length = self.text_maxlen if text_tokens is None else text_tokens
        return self.depth * rows * (6 + 2 * length) * self.embed_dim * item_size

    def check_sampling(self, sampling: Sampling) -> Sampling:
        sampling.check(self.schedule.num_scales).check_no_interval(self.what)
        if sampling.more_smooth:
            raise UserError("more_smooth mixes codes of a codebook; Infinity draws bits: drop it")
        for place in sampling.cfg_insertion_layer:
            if not -self.depth < place <= 0:
                raise UserError(
                    f"cfg_insertion_layer={place}: choose 0 (on the logits) or -1 to "
                    f"{1 - self.depth} (after layer {self.depth} - k)"
                )
        return sampling

    def is_guided(self, sampling: Sampling) -> bool:
        """Whether unconditional rows have any weight: cfg * cond + (1 - cfg) * uncond."""
        return any(cfg != 1 for cfg in sampling.per_scale("cfg", self.schedule.num_scales))


def _maps(found: dict) -> dict:
    """`schedule` and `rope_map` from the entries that name them, which are taken out of `found`."""
    aspect, size, patch_nums, rope_map = (found.pop(name, None) for name in MAPS)
    found.pop("schedule", None)  # only repeats patch_nums, if at all
    if patch_nums is None:
        aspect, size = "1.000" if aspect is None else aspect, "1M" if size is None else size
        return schedules.resolve(aspect, size)
    if aspect is not None or size is not None:
        raise InfinityConfig.wrong("give either aspect and size, or patch_nums and rope_map")
    schedule = InfinityConfig.read_schedule(patch_nums)
    pair = schedule.final_map if rope_map is None else rope_map
    if not isinstance(pair, (list, tuple)) or [type(n) for n in pair] != [int, int]:
        raise InfinityConfig.wrong(f"rope_map is {pair!r:.40}, it must be [height, width]")
    return {"schedule": schedule, "rope_map": tuple(pair)}


# The released 2B and 8B, and the other sizes that the published inference script lists.
_OTHERS = {12: (768, 8), 16: (1152, 12), 24: (1536, 16)}
_OTHERS |= {32: (2080, 20), 40: (2688, 24), 48: (3360, 28)}  # by depth: width and heads
PRESETS = {
    "infinity-2b": InfinityConfig(),
    "infinity-8b": InfinityConfig(
        depth=40,
        embed_dim=3584,
        num_heads=28,
        block_chunks=8,
        codebook_dim=14,
        apply_spatial_patchify=True,
    ),
}
PRESETS |= {
    f"infinity-layer{n}": InfinityConfig(depth=n, embed_dim=d, num_heads=heads, block_chunks=4)
    for n, (d, heads) in _OTHERS.items()
}
