"""Schemes: how matrices are held in 8 bits, how they are multiplied, and which devices do that.

    int8    int8 weights; products run in the type of activations
    w8a8    int8 weights and int8 activations
    fp8     weights and activations in float8_e4m3fn

Every output channel of a matrix has a float32 scale. Where activations are in 8 bits, too, each of
their rows gets one as it comes, and sums are float32 (or int32, which is exact).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels import chips, target
from pallas_kernels.chips import Chip
from varjax.errors import UserError

# Libraries of GPUs multiply rows of 8-bit numbers that are aligned to 16 bytes. Others would be
# copied into wider ones in every product.
WIDTHS = 16


@dataclass(frozen=True)
class Scheme:
    """A way to hold a matrix in 8 bits and to multiply with it.

    name: as users write it.
    dtype: of its numbers. largest: the magnitude that the largest of a channel is scaled to.
    activations: whether rows of activations are brought into 8 bits as well. The matrix then lies
      as [D_out, D_in], because libraries of GPUs sum along the contiguous axis of both operands.
    emulated: numbers and scales as on a chip, multiplied in float32, which holds their products
      exactly. It is slow: for tests and the lab, on devices without such products.
    """

    name: str
    dtype: np.dtype
    largest: float
    activations: bool
    emulated: bool = False

    def rounded(self, x, module=jnp):
        """Numbers in the range of the scheme, in its type. module: `numpy` or `jax.numpy`."""
        if self.dtype == np.int8:
            return module.clip(module.rint(x), -self.largest, self.largest).astype(self.dtype)
        return x.astype(self.dtype)  # the largest, a little above 448 perhaps, is rounded to it


# -128 is not used; 448 is the largest number of e4m3
INT8, W8A8, FP8 = "int8", "w8a8", "fp8"
SCHEMES: Mapping[str, Scheme] = {
    INT8: Scheme(INT8, np.dtype(np.int8), 127.0, activations=False),
    W8A8: Scheme(W8A8, np.dtype(np.int8), 127.0, activations=True),
    FP8: Scheme(FP8, np.dtype(jnp.float8_e4m3fn), 448.0, activations=True),
}
# compute capabilities from which a GPU's tensor cores multiply such numbers
_CAPABILITY = {W8A8: (8, 0), FP8: (8, 9)}
_NUMBERS = {W8A8: "int8", FP8: "fp8"}


def peak(scheme: Scheme, chip: Chip) -> float | None:
    """Operations per second of a chip's products in this scheme; None: it has none."""
    return {W8A8: chip.int8_flops, FP8: chip.fp8_flops}.get(scheme.name, chip.bf16_flops)


def why_not(scheme: Scheme, chip: Chip) -> str | None:
    """Why a chip does not multiply in this scheme, or None."""
    able = scheme.emulated or peak(scheme, chip) is not None
    return None if able else _reason(scheme, chip.name)


def why_not_here(scheme: Scheme) -> str | None:
    """Why the device that is traced for does not multiply in this scheme, or None."""
    if not scheme.activations or scheme.emulated:
        return None
    kind, capability = target.device_kind(), target.capability()
    if target.platform() == "gpu":  # also a card that the table does not list
        numbers = re.fullmatch(r"(\d+)\.(\d+)", capability or "")  # other vendors have names
        able = numbers is not None and tuple(map(int, numbers.groups())) >= _CAPABILITY[scheme.name]
    else:
        chip = chips.of_kind(kind)
        able = chip is not None and peak(scheme, chip) is not None
    return None if able else _reason(scheme, kind)


def _reason(scheme: Scheme, device: str) -> str:
    able = [chip.name for chip in chips.CHIPS.values() if peak(scheme, chip) is not None]
    return (
        f"{scheme.name} needs a chip that multiplies {_NUMBERS[scheme.name]} numbers faster than "
        f"bfloat16 ones ({', '.join(able)}), and {device} does not: choose int8, whose products "
        f"run in the type of activations on every device"
    )


def check_widths(scheme: Scheme, name: str, shape: Sequence[int], where: str = "") -> None:
    """Refuses a matrix [..., D_in, D_out] whose widths a chip cannot multiply in this scheme.

    where: which part of a matrix it is, for the message.

    Raises:
      UserError: the matrix, its widths, and what to do.
    """
    if scheme.activations and any(width % WIDTHS for width in shape[-2:]):
        raise UserError(
            f"{scheme.name} takes matrices whose widths are multiples of {WIDTHS}; {name}{where} "
            f"is {shape[-2]} x {shape[-1]}: choose int8, which takes any width"
        )
