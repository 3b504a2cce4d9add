"""Matrices in 8 bits with a scale for every output channel, made on the host, layer by layer."""

from collections.abc import Sequence

import numpy as np

from varjax.nn.schemes import Scheme
from varjax.nn.stored import WHOLE, Ranges, Stored, part_of


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
