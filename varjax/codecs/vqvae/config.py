"""Configuration of the multi-scale VQVAE, readable and writable in the published argument names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from varjax.codecs.levels import Levels
from varjax.schedule import Schedule

SIDES_256 = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
# Names in published configurations that do not change the function computed.
IGNORED_NAMES = ("L", "note", "dropout", "test_mode")


@dataclass(frozen=True, kw_only=True)
class VQVAEConfig(Levels):
    """Shape of the image codec; `UserError` when a size is impossible. Field names are the
    published ones, `schedule` replaces `patch_nums`.
    """

    what = "VQVAE"

    vocab_size: int = 4096
    z_channels: int = 32
    ch: int = 160
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    in_channels: int = 3
    using_sa: bool = True  # attention after every block of the coarsest level
    using_mid_sa: bool = True  # attention between the two middle blocks
    quant_conv_ks: int = 3
    quant_resi: float = 0.5  # phi(x) = (1 - r) x + r conv(x); 0 switches phi off
    share_quant_resi: int = 4  # 0: one phi per scale, 1: one phi, n: n phis shared by all scales
    default_qresi_counts: int = 0  # with share_quant_resi 0: how many phis, 0 = as many as scales
    using_znorm: bool = False  # nearest code by angle instead of distance
    group_norm_groups: int = 32
    group_norm_eps: float = 1e-6
    beta: float = 0.25  # training: weight of the commitment loss
    schedule: Schedule = Schedule.square(SIDES_256)

    def __post_init__(self):
        self.check_levels(
            share_quant_resi=(0, 1024),
            default_qresi_counts=(0, 1024),
            quant_conv_ks=(1, 63),
            quant_resi=(-math.inf, math.inf),
        )
        if self.quant_conv_ks % 2 == 0:
            raise self.wrong(f"quant_conv_ks is {self.quant_conv_ks}, it must be odd (1, 3, ...)")
        final = self.schedule.final_map
        if any(h > final[0] or w > final[1] for h, w in self.schedule.maps):
            raise self.wrong(f"schedule {self.schedule}: the last map must be the largest")

    @property
    def attended_levels(self) -> tuple[int, ...]:
        return super().attended_levels if self.using_sa else ()

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of the images in pixels."""
        return tuple(side * self.downsample for side in self.schedule.final_map)

    @property
    def num_phi(self) -> int:
        """The number of phi convolutions; 0 when `quant_resi` is 0."""
        if abs(self.quant_resi) <= 1e-6:
            return 0
        return self.share_quant_resi or self.default_qresi_counts or self.schedule.num_scales

    @classmethod
    def from_published(cls, values: Mapping) -> "VQVAEConfig":
        """Reads published names; `patch_nums` (or `v_patch_nums`) holds ints or (h, w) pairs.
        `UserError` for unknown names, and if the two differ."""
        found = cls.arguments(values, IGNORED_NAMES, patch_nums=object, v_patch_nums=object)
        maps = [found.pop(name) for name in ("patch_nums", "v_patch_nums") if name in found]
        if len(maps) == 2 and maps[0] != maps[1]:
            raise cls.wrong("patch_nums and v_patch_nums differ: give one of them")
        if maps:
            found["schedule"] = cls.read_schedule(maps[0])
        return cls(**found)
