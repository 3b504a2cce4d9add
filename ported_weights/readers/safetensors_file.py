"""Reader of `.safetensors` files; tensors are read when asked for."""

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from varjax.errors import UserError, require

# Element types of the format that weights have; float8 and complex ones are refused.
DTYPES = {
    **{f"F{8 * n}": np.dtype(f"<f{n}") for n in (8, 4, 2)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    **{f"I{8 * n}": np.dtype(f"<i{n}") for n in (8, 4, 2, 1)},
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


@dataclass(frozen=True)
class SafeTensor:
    """A tensor of the file. `read()` gives its values."""

    file: object
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        return self.file.get_tensor(self.name)


def read_safetensors(path: Path) -> dict[str, SafeTensor]:
    """{name: tensor} of a file, nothing of it read yet. `UserError` for a damaged file or a type
    that no weights have, `MissingExtra` without the `safetensors` package."""
    safetensors = require("safetensors", extra="port", purpose=f"reading {path}")
    try:
        file = safetensors.safe_open(path, framework="np")
        return {name: _tensor(path, file, name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is damaged or incomplete ({error}): download it again") from error


def _tensor(path: Path, file, name: str) -> SafeTensor:
    entry = file.get_slice(name)
    dtype = DTYPES.get(entry.get_dtype())
    if dtype is None:
        raise UserError(
            f"{path}: tensor {name} has the element type {entry.get_dtype()}, which is not"
            f" supported; supported are {', '.join(DTYPES)}"
        )
    return SafeTensor(file, name, dtype, tuple(entry.get_shape()))
