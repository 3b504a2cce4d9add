"""Which process this is, and one process, which exchanges nothing."""

import numpy as np
import pytest

from experiments import processes
from varjax.core.errors import UserError
from varjax.generation import hosts


@pytest.mark.parametrize("text", ["", "x", "h:1", "h:1,2", "h:0,2,0", "h:99999,2,0", "h:1,2,2"])
def test_no_place(text):
    with pytest.raises(UserError, match="give auto or COORDINATOR"):
        processes.place(text)


def test_place():
    found = processes.place("10.0.0.1:1234,4,3")
    assert found["coordinator_address"] == "10.0.0.1:1234"
    assert (found["num_processes"], found["process_id"]) == (4, 3)


def test_alone_nothing_is_exchanged():
    assert hosts.count() == 1 and hosts.is_first()
    np.testing.assert_array_equal(processes.say_all(np.arange(2)), [[0, 1]])
    assert processes.from_first("x") == hosts.gathered("x") == "x"
    processes.agree({"flags": 1})
    with pytest.raises(UserError, match="^wrong$"), processes.together():
        raise UserError("wrong")
