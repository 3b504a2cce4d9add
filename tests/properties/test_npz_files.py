"""Damaged files of arrays that users give: what NumPy reads, or `UserError`."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import mutations
from tests.storage.test_npz import ARRAYS
from varjax.core.errors import UserError
from varjax.storage import npz


@given(draw=st.data())
def test_damaged_files_are_read_or_refused(tmp_path, draw):
    path, packed = tmp_path / "f.npz", draw.draw(st.booleans())
    (np.savez_compressed if packed else np.savez)(path, **ARRAYS)
    path.write_bytes(draw.draw(mutations.damaged_zip(path.read_bytes())))
    try:
        found = npz.load(path, npz.names(path))
    except UserError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return
    assert all(isinstance(array, np.ndarray) for array in found.values())
