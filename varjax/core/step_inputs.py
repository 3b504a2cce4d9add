"""Inputs of a next-scale transformer for a scale: its place, its tokens, and the matrices that
resize the code map.

Scales that share one compiled program have different map sizes but one padded shape. Tokens lie in
a row of length T: the map row by row, then padding, which repeats the scale's last token. Resizing
works on a grid of Gh x Gw cells, the largest height and width among these scales. The padding of
the grid meets columns of zeros in the matrices. Neither padding reaches a result.
"""

from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from varjax.core.maps import MATRICES, patchify, resize, unpatchify
from varjax.core.sequence import Schedule

AnyArray = Array | np.ndarray  # made on the host, read on the device


# The resizing of a model's code map: names in `core.maps.MATRICES`, towards a scale and back, and
# the side of the square of codes that one token stands for.
Resampling = tuple[str, str, int]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """Inputs of a scale and its layers. On the host, arrays have a leading axis over the scales of
    a segment; a step sees one scale, because `lax.scan` takes this axis away.

    scale, length: index and real tokens of the scale.
    ratio: k / (K - 1).
    token_index: global position of every (padded) token.
    cell: grid cell of every token. token: token of every grid cell.
    down_*, up_*: matrices from the latent map to the grid and back; with patches of side p, the
      latent map and the grid have p x p cells per token. columns: None where they are the rows'
      (square maps): the same matrix would be read twice for every scale.
    window: the queries that a policy looks at more closely (`Rule.window_tokens`); None: the
      policy does not ask for them.
    neighbours, neighbour_weights: for every token four tokens of the previous scale and their
      bilinear weights; None: the policy does not ask for them.
    patch: p, static.
    """

    scale: Int[AnyArray, "..."]
    length: Int[AnyArray, "..."]
    ratio: Float[AnyArray, "..."]
    token_index: Int[AnyArray, "... T"]
    cell: Int[AnyArray, "... T"]
    token: Int[AnyArray, "... G"]
    down_rows: Float[AnyArray, "... Gh P"]
    up_rows: Float[AnyArray, "... P Gh"]
    down_columns: Float[AnyArray, "... Gw Q"] | None = None
    up_columns: Float[AnyArray, "... Q Gw"] | None = None
    window: Int[AnyArray, "... W"] | None = None
    neighbours: Int[AnyArray, "... 4 T"] | None = None
    neighbour_weights: Float[AnyArray, "... 4 T"] | None = None
    patch: int = field(default=1, metadata=dict(static=True))

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        scales: range,
        length: int,
        resampling: Resampling = ("area", "bicubic", 1),
        **observed: np.ndarray,
    ) -> "StepInputs":
        """Host arrays of consecutive scales, each padded to `length` tokens, which is at least what
        the longest has. observed: the fields that the policy asks for."""
        index = np.arange(scales.start, scales.stop)
        maps = np.array([schedule.maps[s] for s in scales])
        # Heights and widths may peak at different scales; the grid covers all of them.
        grid = tuple(int(n) for n in maps.max(0))
        starts, tokens = np.array(schedule.starts)[index], maps.prod(1)
        # padding repeats the last token: a valid number, so that gathers stay inside the array
        local = np.minimum(np.arange(length), tokens[:, None] - 1)
        row, column = np.divmod(local, maps[:, 1:])
        cells = (np.arange(n) for n in grid)
        turns = [np.minimum(n, maps[:, i, None] - 1) for i, n in enumerate(cells)]
        token = turns[0][:, :, None] * maps[:, 1, None, None] + turns[1][:, None]
        axes = [_resizing(maps[:, i], grid[i], schedule.final_map[i], resampling) for i in (0, 1)]
        (down_rows, up_rows), columns = axes
        # a square scale alone may belong to an oblong picture
        if np.array_equal(maps[:, 0], maps[:, 1]) and len(set(schedule.final_map)) == 1:
            columns = None, None
        return cls(
            scale=index.astype(np.int32),
            length=tokens.astype(np.int32),
            ratio=(index / max(1, schedule.num_scales - 1)).astype(np.float32),
            token_index=(starts[:, None] + local).astype(np.int32),
            cell=(row * grid[1] + column).astype(np.int32),
            token=token.reshape(len(index), -1).astype(np.int32),
            down_rows=down_rows,
            up_rows=up_rows,
            down_columns=columns[0],
            up_columns=columns[1],
            patch=resampling[2],
            **observed,
        )

    def shrink(self, code_map: Float[Array, "B P Q C"]) -> Float[Array, "B T codes"]:
        """The latent map resized to this scale, as a padded token row; with patches the channels of
        a token are those of `patchify`."""
        columns = self.down_rows if self.down_columns is None else self.down_columns
        grid = patchify(resize(code_map, self.down_rows, columns), self.patch)
        return grid.reshape(len(grid), -1, grid.shape[-1])[:, self.cell]  # pyright: ignore[reportReturnType]

    def enlarge(self, codes: Float[Array, "B T codes"]) -> Float[Array, "B P Q C"]:
        """A padded row of codes enlarged to the latent map."""
        columns = self.up_rows if self.up_columns is None else self.up_columns
        height, width = (a.shape[-1] // self.patch for a in (self.up_rows, columns))
        grid = codes[:, self.token].reshape(len(codes), height, width, -1)
        return resize(unpatchify(grid, self.patch), self.up_rows, columns)


def _resizing(
    sides: np.ndarray, grid: int, final: int, resampling: Resampling
) -> tuple[np.ndarray, np.ndarray]:
    """Matrices of all scales along one axis: from the latent map to the padded grid, and back."""
    shrink, enlarge, patch = resampling
    final, grid = final * patch, grid * patch
    # Resizing is linear and separable: two matrices per scale. Padded rows and columns are zero, so
    # the padding of the grid neither enters the latent map nor comes out of it.
    down, up = MATRICES[shrink], MATRICES[enlarge]
    all_sides = [int(side) * patch for side in sides]
    return (
        np.stack([np.pad(down(final, side), ((0, grid - side), (0, 0))) for side in all_sides]),
        np.stack([np.pad(up(side, final), ((0, 0), (0, grid - side))) for side in all_sides]),
    )
