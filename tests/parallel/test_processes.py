"""Which process this is, what is left over on a mesh, and one process, which exchanges nothing."""

import socket
import subprocess
import sys

import numpy as np
import pytest

from varjax.errors import UserError
from varjax.parallel import processes
from varjax.parallel.processes import Place
from varjax.parallel.split import MeshSpec


@pytest.mark.parametrize("text", ["", "x", "h:1", "h:1,2", "h:0,2,0", "h:99999,2,0", "h:1,2,2"])
def test_no_place(text):
    with pytest.raises(UserError, match="give auto or COORDINATOR"):
        Place.parse(text)


def test_place():
    assert Place.parse("10.0.0.1:1234,4,3") == Place("10.0.0.1:1234", 4, 3)


def test_what_is_left_over():
    assert MeshSpec.parse("data=-1,model=2", 8) == MeshSpec(4, 2)
    assert MeshSpec.parse("model=-1", 8) == MeshSpec(1, 8)
    assert MeshSpec.parse("data=-1,model=16", 8) == MeshSpec(1, 16)  # refused by `check`
    with pytest.raises(UserError, match="model=-1: only one axis may be -1"):
        MeshSpec.parse("data=-1,model=-1", 8)
    with pytest.raises(UserError, match="is no number of devices"):
        MeshSpec.parse("data=-2", 8)
    with pytest.raises(UserError, match="is no number of devices"):
        MeshSpec.parse("data=-1")


def test_alone_nothing_is_exchanged():
    assert processes.count() == 1 and processes.is_first() and processes.mine("abc") == list("abc")
    np.testing.assert_array_equal(processes.say_all(np.arange(2)), [[0, 1]])
    processes.agree({"flags": 1})
    with pytest.raises(UserError, match="^wrong$"), processes.together():
        raise UserError("wrong")


WAITS = """
from varjax.parallel import processes
processes.START_S = 1.0
processes.start("127.0.0.1:{port},2,{index}")
"""


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_whose_others_do_not_come(index):
    """JAX itself would end it by a signal, with a trace of C++."""
    code = WAITS.format(port=_free_port(), index=index)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 2 and "not all processes have come within 1 s" in found.stderr
    assert found.stderr.count("\n") == 1, found.stderr


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
