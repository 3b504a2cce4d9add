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
from varjax.core.errors import UserError
from varjax.fast.stored import WHOLE, Ranges, Stored, part_of

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
    `UserError`: the matrix, its widths, and what to do.

    where: which part of a matrix it is, for the message.
    """
    if scheme.activations and any(width % WIDTHS for width in shape[-2:]):
        raise UserError(
            f"{scheme.name} takes matrices whose widths are multiples of {WIDTHS}; {name}{where} "
            f"is {shape[-2]} x {shape[-1]}: choose int8, which takes any width"
        )


def convert(
    matrices: np.ndarray, scheme: Scheme, scales: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers, as the scheme has them lie, and scales [..., D_out] of matrices [..., D_in, D_out].

    scales: of all rows of the channels, where the matrices have only some.
    """
    layers = matrices.shape[:-2]
    numbers = np.empty(shape_of_numbers(matrices.shape, scheme), scheme.dtype)
    found = _scales(matrices, scheme) if scales is None else scales
    for index in np.ndindex(*layers):
        rounded = scheme.rounded(np.asarray(matrices[index], np.float32) / found[index], np)
        numbers[index] = rounded.T if scheme.activations else rounded
    return numbers, found


def _scales(matrices: np.ndarray, scheme: Scheme) -> np.ndarray:
    *layers, _, d_out = matrices.shape
    found = np.empty((*layers, d_out), np.float32)
    for index in np.ndindex(*layers):
        largest = np.abs(np.asarray(matrices[index], np.float32)).max(0, initial=0)
        found[index] = largest / np.float32(scheme.largest)
    return np.where(found > 0, found, np.float32(1))  # a channel of zeros, or of tiny numbers


def shape_of_numbers(shape: Sequence[int], scheme: Scheme) -> tuple[int, ...]:
    """The shape in which the numbers of matrices lie."""
    *layers, d_in, d_out = shape
    return (*layers, d_out, d_in) if scheme.activations else (*layers, d_in, d_out)


def of_stored(matrices: Stored, scheme: Scheme) -> tuple[Stored, Stored]:
    """Numbers and scales of matrices in a file. Both are made of what is read for a part: its
    output channels, or all inputs of a channel once, for its scale, and then the part's."""
    *layers, _, d_out = matrices.shape
    outputs = len(layers) + 1
    known: dict[tuple, np.ndarray] = {}  # scales by ranges of outputs; (): all

    def read_scales(axis: int | None, ranges: Ranges) -> np.ndarray:
        if ranges not in known:
            where = WHOLE if axis is WHOLE else outputs
            known[ranges] = _scales(matrices.part(where, ranges), scheme)
        return known[ranges]

    def read_numbers(axis: int | None, ranges: Ranges) -> np.ndarray:
        if scheme.activations and axis is not WHOLE:
            axis = 2 * outputs - 1 - axis  # that of the matrix
        if axis is WHOLE or axis == outputs:
            numbers, known[ranges] = convert(matrices.part(axis, ranges), scheme)
            return numbers
        if () in known:
            values = matrices.part(axis, ranges)
        else:
            whole = matrices.part()
            known[()], values = _scales(whole, scheme), part_of(whole, axis, ranges)
        return convert(values, scheme, known[()])[0]

    numbers = Stored(shape_of_numbers(matrices.shape, scheme), scheme.dtype, read_numbers)
    return numbers, Stored((*layers, d_out), np.dtype(np.float32), read_scales)
