"""Named arrays on disk as one Orbax tree, read only after their names and shapes were checked."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from varjax.errors import UserError
from varjax.models import parameters


def floating_dtype(dtype) -> np.dtype | None:
    """numpy type of a name, or None. `UserError` if it is no floating type."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not parameters.is_floating(found):
        raise UserError(f"dtype {dtype!r} given: choose float32, bfloat16 or float16")
    return found


def host_arrays(module: nnx.Module, dtype=None) -> dict[str, np.ndarray]:
    """{name: array} of a module in host memory, floating ones in `dtype` if given."""
    wanted, arrays = floating_dtype(dtype), {}
    for name, leaf in parameters.named(module).items():
        cast = wanted is not None and parameters.is_floating(leaf.dtype)
        arrays[name] = np.asarray(leaf.astype(wanted) if cast else leaf)
    return arrays


def write(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write {name: array} into a new `folder`; '/' in names makes branches of the tree."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder, parameters.nested(arrays))
    note = folder / "commit_success.txt"
    if note.exists():  # Orbax notes the path, which changes when the folder is renamed
        note.write_text("complete\n", encoding="utf-8")


def read(
    folder: Path, expected: Mapping, described_in: str, dtype: Any = None
) -> dict[str, jax.Array]:
    """{name: array} on the default device.

    Args:
      folder: what `write` wrote.
      expected: {name: leaf with a shape}: the names and shapes that have to be there.
      described_in: name of the file that says so, for messages.
      dtype: type of the floating arrays, or a function from the name to it; Orbax casts while it
        reads. None keeps the stored ones.

    Raises:
      UserError: other names or shapes (all of them in one message), or damaged files.
    """
    of_name = dtype if callable(dtype) and not isinstance(dtype, type) else lambda name: dtype
    wanted = {name: floating_dtype(of_name(name)) for name in expected}
    stored = _stored(folder)
    _check(folder, stored, expected, described_in)
    return _restore(folder, stored, wanted)


def _stored(folder: Path) -> dict:
    """{name: Orbax's description with shape and dtype} of the arrays on disk."""
    with _explaining(folder), ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(os.path.abspath(folder)).item_metadata
        return parameters.flattened(tree.tree)


def _check(folder: Path, stored: Mapping, expected: Mapping, described_in: str) -> None:
    problems = [f"missing: {name}" for name in sorted(set(expected) - set(stored))]
    problems += [f"surplus: {name}" for name in sorted(set(stored) - set(expected))]
    for name in sorted(set(stored) & set(expected)):
        found, wanted = tuple(stored[name].shape), tuple(expected[name].shape)
        if found != wanted:
            problems.append(f"wrong shape: {name} is {list(found)}, not {list(wanted)}")
    if problems:
        listed = "\n  ".join(problems)
        raise UserError(
            f"{folder} does not hold the parameters that {described_in} describes:\n  {listed}"
        )


def _restore(folder: Path, stored: Mapping, wanted: Mapping) -> dict[str, jax.Array]:
    device = jax.sharding.SingleDeviceSharding(jnp.zeros(()).devices().pop())

    def argument(name, entry):
        cast = wanted[name] is not None and parameters.is_floating(entry.dtype)
        return ocp.ArrayRestoreArgs(dtype=wanted[name] if cast else entry.dtype, sharding=device)

    arguments = parameters.nested({name: argument(name, entry) for name, entry in stored.items()})
    with _explaining(folder), ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(os.path.abspath(folder), restore_args=arguments)
        return jax.block_until_ready(parameters.flattened(tree))


class _explaining:
    """Turns what Orbax raises over damaged files into a `UserError` that names the folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        innocent = (UserError, MemoryError, jax.errors.JaxRuntimeError)  # as out of device memory
        if isinstance(error, Exception) and not isinstance(error, innocent):
            reason = str(error).strip().split("\n")[0][:300]
            raise UserError(
                f"cannot read the parameters in {self.folder}: the files are damaged or incomplete"
                f" ({reason}); convert or copy the checkpoint again"
            ) from error
