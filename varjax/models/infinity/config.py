"""Infinity's configuration in the published constructor's names, and its published resolutions:
aspect-ratio templates and sizes, and their rope positions.

One list of 13 token maps per template (height / width). The size says how many of them are used, so
the maps of a small image are the first maps of the large one. Rotary positions belong to the
template, not to the size: a cell's row and column are stretched to the template's last map at 1M.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from varjax.core.arguments import real
from varjax.core.errors import UserError, choose, show
from varjax.core.sampling import Sampling
from varjax.core.sequence import Schedule
from varjax.storage import published

# In the published order: the first of two equally near templates is taken.
_MAPS = {
    "1.000": "1x1;2x2;4x4;6x6;8x8;12x12;16x16;20x20;24x24;32x32;40x40;48x48;64x64",
    "1.250": "1x1;2x2;3x3;5x4;10x8;15x12;20x16;25x20;30x24;35x28;45x36;55x44;70x56",
    "0.800": "1x1;2x2;3x3;4x5;8x10;12x15;16x20;20x25;24x30;28x35;36x45;44x55;56x70",
    "1.333": "1x1;2x2;4x3;8x6;12x9;16x12;20x15;24x18;28x21;36x27;48x36;60x45;72x54",
    "0.750": "1x1;2x2;3x4;6x8;9x12;12x16;15x20;18x24;21x28;27x36;36x48;45x60;54x72",
    "1.500": "1x1;2x2;3x2;6x4;9x6;15x10;21x14;27x18;33x22;39x26;48x32;63x42;78x52",
    "0.666": "1x1;2x2;2x3;4x6;6x9;10x15;14x21;18x27;22x33;26x39;32x48;42x63;52x78",
    "1.750": "1x1;2x2;3x3;7x4;11x6;14x8;21x12;28x16;35x20;42x24;56x32;70x40;84x48",
    "0.571": "1x1;2x2;3x3;4x7;6x11;8x14;12x21;16x28;20x35;24x42;32x56;40x70;48x84",
    "2.000": "1x1;2x2;4x2;6x3;10x5;16x8;22x11;30x15;38x19;46x23;60x30;74x37;90x45",
    "0.500": "1x1;2x2;2x4;3x6;5x10;8x16;11x22;15x30;19x38;23x46;30x60;37x74;45x90",
    "2.500": "1x1;2x2;5x2;10x4;15x6;20x8;25x10;30x12;40x16;50x20;65x26;80x32;100x40",
    "0.400": "1x1;2x2;2x5;4x10;6x15;8x20;10x25;12x30;16x40;20x50;26x65;32x80;40x100",
    "3.000": "1x1;2x2;6x2;9x3;15x5;21x7;27x9;36x12;45x15;54x18;72x24;90x30;111x37",
    "0.333": "1x1;2x2;2x6;3x9;5x15;7x21;9x27;12x36;15x45;18x54;24x72;30x90;37x111",
}
TEMPLATES = tuple(_MAPS)
_SCALES = {"0.06M": 7, "0.25M": 10, "0.60M": 12, "1M": 13}
SIZES = tuple(_SCALES)
PIXELS = 16  # image pixels per transformer token along each axis, in every released model
FLATTEST, TALLEST = 0.25, 4.0  # height / width for which the nearest template still makes sense


def resolve(aspect: float | str, size: str) -> dict:
    """The template nearest to `aspect` = height / width, at `size`, as fields of `InfinityConfig`:
    `schedule`, maps of transformer tokens, and `rope_map` (`rope_positions`), the template's last
    map at 1M. `UserError` for an unknown size, and for an aspect outside 0.25 to 4."""
    try:  # a flag's text, or a number
        ratio = float(aspect) if isinstance(aspect, str) else real("aspect", aspect)
    except ValueError:  # a `UserError` is one
        ratio = math.nan
    if not FLATTEST <= ratio <= TALLEST:
        known = ", ".join(sorted(TEMPLATES, key=float))
        raise UserError(
            f"aspect {show(aspect)} is not supported: give height / width as a number from"
            f" {FLATTEST:g} to {TALLEST:g}; the nearest template is taken from {known}"
        )
    name = TEMPLATES[int(np.argmin([abs(float(t) - ratio) for t in TEMPLATES]))]
    maps = Schedule.parse(_MAPS[name]).maps
    return {
        "schedule": Schedule(maps[: _SCALES[choose("size", size, SIZES)]]),
        "rope_map": maps[-1],
    }


def name_of(schedule: Schedule, rope_map: tuple[int, int]) -> tuple[str, str] | None:
    """(aspect, size) of published maps; None for others."""
    for aspect, maps in _MAPS.items():
        for size, count in _SCALES.items():
            found = Schedule.parse(maps).maps
            if found[:count] == schedule.maps and found[-1] == tuple(rope_map):
                return aspect, size
    return None


def rope_positions(schedule: Schedule, rope_map: tuple[int, int]) -> np.ndarray:
    """int32 [L, 2]: (row, column) by which each token's keys and queries are rotated.

    Cell i of a map of height h sits at row round(i * H / h), ties to even, with H = `rope_map[0]`;
    columns follow the widths in the same way. This is integer arithmetic, because a float64 ratio
    gets two published entries wrong.
    """
    grids = []
    for sides in schedule.maps:
        places = []
        for cells, full in zip(sides, rope_map, strict=True):
            doubled = 2 * np.arange(cells) * full + cells  # floor(doubled / (2 * cells)) rounds up
            rounded, rest = np.divmod(doubled, 2 * cells)
            places.append(rounded - ((rest == 0) & (rounded % 2 == 1)))
        grids.append(np.stack(np.meshgrid(*places, indexing="ij"), axis=-1).reshape(-1, 2))
    return np.concatenate(grids).astype(np.int32)


LEVELS = 15  # rows of the published level embedding
FFN_MULTIPLE = 256  # the feed-forward's width is rounded to a multiple of it
MAPS = ("aspect", "size", "patch_nums", "rope_map")
TEMPLATE = resolve("1.000", "1M")


@dataclass(frozen=True, kw_only=True)
class InfinityConfig(published.TransformerConfig):
    """Shape of an Infinity transformer.

    codebook_dim: bits of one code of the image tokenizer; with `apply_spatial_patchify` a token
      stands for 2 x 2 codes.
    schedule, rope_map: maps of tokens, and the map that rotary positions are stretched to: the
      template's last one at 1M (`resolve`). Weights do not depend on them.
    """

    what = "Infinity"
    fixed = {
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
    ignored = frozenset(
        "vae vae_local note drop_rate drop_path_rate cond_drop_rate rand_uncond tau top_p top_k"
        " customized_flash_attn fused_mlp fused_norm checkpointing pad_to_multiplier use_flex_attn"
        " batch_size pn train_h_div_w_list video_frames always_training_scales inference_mode"
        " raw_scale_schedule ffn_hidden text_pool_heads".split()
    )
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
        loose = (*MAPS, "apply_spatial_patchify", "schedule")
        found = cls.arguments(arguments, **dict.fromkeys(loose, object))
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
        named = name_of(self.schedule, self.rope_map)
        if named is None and None in (aspect, size):
            raise UserError(
                "the checkpoint's schedule is none of the published ones: give both aspect and size"
            )
        aspect, size = named[0] if aspect is None else aspect, named[1] if size is None else size
        return replace(self, **resolve(aspect, size))

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
        """Bytes that layers hold of the condition: modulation, keys and values of the text."""
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
        return resolve(aspect, size)
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
