"""Named arrays on disk as one Orbax tree, read only after their names and shapes were checked."""

import asyncio
import contextlib
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from varjax.core.errors import UserError, show, some
from varjax.fast import quantized
from varjax.fast.quantized import Quantized, quantize
from varjax.fast.schemes import Scheme
from varjax.fast.stored import WHOLE, Leaf, Ranges, Stored
from varjax.storage import ordinary, parameters

CHUNK_BYTES = 2**26  # of stored arrays
TOGETHER_BYTES = 2**24  # of arrays that are written at the same time


@contextlib.contextmanager
def failed_reading(
    folder: Path, advice: str = "convert or copy the checkpoint again"
) -> Iterator[None]:
    """Turns every error over damaged files into a `UserError` that names the folder."""
    try:
        yield
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):  # the last: device memory is full
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:300]
        raise UserError(
            f"cannot read the parameters in {folder}: the files are damaged or incomplete"
            f" ({reason}); {advice}"
        ) from error


@contextlib.contextmanager
def failed_writing(folder: Path) -> Iterator[None]:
    """Turns an error over a full disk and the like into an `OSError` that names the new `folder`,
    of which nothing is left then."""
    try:
        yield
    except BaseException as error:
        for _ in range(20):  # Orbax's threads may still be writing
            for path in (folder, *folder.parent.glob(f"{folder.name}.orbax-checkpoint-tmp*")):
                shutil.rmtree(path, ignore_errors=True)
            time.sleep(0.05)
        # TensorStore hides the system's number in the text of a ValueError
        code = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(code[1]) if code else getattr(error, "errno", None)
        if number is None or getattr(error, "filename", None):
            raise
        raise OSError(number, os.strerror(number), os.fspath(folder)) from error


def floating_dtype(dtype) -> np.dtype | None:
    """The NumPy type of a name; None for None. `UserError` if it is no floating type."""
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
        if quantized.is_one(leaf):
            raise UserError(
                f"{name} is in 8 bits, and checkpoints hold what models were trained with: write "
                f"the model that it was made from"
            )
        cast = wanted is not None and parameters.is_floating(leaf.dtype)
        arrays[name] = np.asarray(leaf.astype(wanted) if cast and leaf.dtype != wanted else leaf)
    return arrays


def totals(arrays: Mapping) -> dict:
    """The entries of a description that follow from {name: anything with a shape and a type}."""
    floating = {str(a.dtype) for a in arrays.values() if parameters.is_floating(a.dtype)}
    count = sum(math.prod(a.shape) for a in arrays.values())
    return {"dtype": ", ".join(sorted(floating)), "parameters": count}


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes {name: array} into a new `folder`; '/' in names makes branches of the tree. `OSError`:
    it cannot be written, for example because the disk is full. Nothing is left of it."""
    import orbax.checkpoint as ocp  # here: 0.2 to 0.4 s that commands without weights save

    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, _sparing_handler()),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # without it Orbax warns
    )
    alone = _alone()
    handler = ocp.PyTreeCheckpointHandler(
        type_handler_registry=registry, multiprocessing_options=alone
    )
    tree = unflatten_dict(arrays, sep="/")
    chunked = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    checkpointer = ocp.Checkpointer(handler, multiprocessing_options=alone)
    with failed_writing(folder), checkpointer:
        checkpointer.save(folder, tree, save_args=chunked)
    note = folder / "commit_success.txt"
    if note.exists():  # Orbax notes the path, which changes when the folder is renamed
        note.write_text("complete\n", encoding="utf-8")


def _alone():
    """Options of Orbax by which this process reads and writes by itself. Otherwise Orbax waits for
    all processes, which may not read at the same time, or not at all."""
    import orbax.checkpoint as ocp

    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process-{own}"
    )


def _sparing_handler():
    """Orbax's handler of NumPy arrays, with little memory beside them.

    Orbax copies all arrays, in case that they change meanwhile, and compresses all of them at once.
    Here nothing is copied, and arrays are compressed and written together up to `TOGETHER_BYTES`; a
    larger one alone. (Small arrays one after the other would each leave a version of the index:
    hundreds of files, and twice the bytes, of a small model.)
    """
    import orbax.checkpoint as ocp

    class Sparing(ocp.type_handlers.NumpyHandler):
        def __init__(self):
            super().__init__(deepcopy_host_arrays=False)
            self._free, self._changed = TOGETHER_BYTES, asyncio.Condition()

        async def _open_and_write(self, value, *arguments):
            size = min(value.nbytes, TOGETHER_BYTES)
            async with self._changed:
                await self._changed.wait_for(lambda: self._free >= size)
                self._free -= size
            await super()._open_and_write(value, *arguments)
            async with self._changed:
                self._free += size
                self._changed.notify_all()

    return Sparing()


def read_arrays(
    folder: Path,
    expected: Mapping,
    dtypes: Mapping,
    described_in: str,
    on_host: bool = False,
    in_8_bits: Mapping[str, Scheme] | None = None,
    on_disk: bool = False,
    said: Mapping | None = None,
) -> dict[str, Leaf | Quantized]:
    """{name: array} of some or all arrays of a tree. `UserError`: names, shapes or totals differ
    (one message lists all), or files are damaged.

    Args:
      folder: what `write_arrays` wrote.
      expected: {name: leaf with a shape and a type}: what has to be there; floating types vary.
      dtypes: {name: type, or None for the stored one} of the arrays to read. Floating ones are cast
        while they are read.
      described_in: name of the file that says what is expected, for messages.
      on_host: give NumPy arrays and put nothing on a device: the weights of a model for several
        devices may not fit one. Otherwise the arrays lie on the default device.
      in_8_bits: {name of a matrix that becomes `Quantized`: how}; it stands for one in its type of
        `dtypes`. That is done one after the other and on the host, from the stored numbers.
      on_disk: read nothing yet, and give `Stored` arrays.
      said: the description, whose `totals` have to be those of the tree.
    """
    import orbax.checkpoint as ocp

    wanted = {name: floating_dtype(dtype) for name, dtype in dtypes.items()}
    path, alone = os.path.abspath(folder), _alone()
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    checkpointer = ocp.Checkpointer(handler, multiprocessing_options=alone)
    with failed_reading(folder), checkpointer:
        ordinary.check_folder(folder)
        # {name: Orbax's description with shape and dtype} of the arrays on disk
        stored = flatten_dict(checkpointer.metadata(path).item_metadata.tree, sep="/")
        _check(folder, stored, expected, described_in, said)
        found, in_8_bits = {}, in_8_bits or {}
        device = None if on_host or on_disk else jnp.zeros(()).devices().pop()
        for name, dtype in wanted.items():
            own, scheme = stored[name].dtype, in_8_bits.get(name)
            kind = own if dtype is None or not parameters.is_floating(own) else dtype
            array = by_part(folder, name, expected[name].shape, own if scheme else kind)
            # only the matrices of one parameter are ever in memory as they are stored
            leaf = array if on_disk else array.part()
            leaf = quantize(leaf, scheme, kind) if scheme else leaf
            found[name] = leaf if device is None else jax.device_put(leaf, device)
        return found


def _check(
    folder: Path, stored: Mapping, expected: Mapping, described_in: str, said: Mapping | None
) -> None:
    """Raises one `UserError` that lists how a tree differs from what is expected and said of it."""
    problems = [f"missing: {name}" for name in sorted(expected.keys() - stored.keys())]
    problems += [f"surplus: {name}" for name in sorted(stored.keys() - expected.keys())]
    for name in sorted(stored.keys() & expected.keys()):
        found, wanted = tuple(stored[name].shape), tuple(expected[name].shape)
        if found != wanted:
            problems.append(f"wrong shape: {name} is {list(found)}, not {list(wanted)}")
        found, wanted = stored[name].dtype, expected[name].dtype
        if found != wanted and not all(map(parameters.is_floating, (found, wanted))):
            problems.append(f"wrong type: {name} is {found}, not {wanted}")
    for name, total in totals(stored).items() if said is not None else ():
        if said.get(name) != total:
            given = show(said.get(name))
            problems.append(f"{name}: {given} in the description, {total} in the files")
    if problems:
        listed = some(problems, 100, between="\n  ")
        first = "\n  " if len(problems) > 1 else " "
        raise UserError(
            f"{folder} does not hold the parameters that {described_in} describes:{first}{listed}"
        )


def by_part(folder: Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Stored:
    """An array of the tree in `folder` (`write_arrays`), floating numbers cast to `dtype` as they
    are read. `UserError` then if files are damaged.

    TensorStore, which is what Orbax reads with, gives ranges of an array: only chunks that a range
    touches are read and unpacked. Queries, keys and values side by side are shared section by
    section, which Orbax itself cannot give.
    """

    def read_ranges(axis: int | None, ranges: Ranges) -> np.ndarray:
        import tensorstore as ts  # here: commands without weights do not wait for it

        with failed_reading(folder):
            base, key = folder.absolute().as_posix(), name.replace("/", ".")
            place = {"driver": "ocdbt", "base": f"file://{base}/", "path": f"{key}/"}
            store = ts.open({"driver": "auto", "kvstore": place}, open=True, read=True).result()
            if store.dtype.numpy_dtype != dtype:
                store = ts.cast(store, dtype)
            if axis is WHOLE:
                return store.read().result()
            before = (slice(None),) * axis
            if len(ranges) == 1:
                return store[(*before, slice(*ranges[0]))].read().result()
            # filled section by section: beside the result only one of them is in memory
            size, start = sum(end - first for first, end in ranges), 0
            found = np.empty((*shape[:axis], size, *shape[axis + 1 :]), dtype)
            for first, end in ranges:
                section = store[(*before, slice(first, end))].read().result()
                found[(*before, slice(start, start := start + end - first))] = section
            return found

    return Stored(tuple(shape), np.dtype(dtype), read_ranges)
