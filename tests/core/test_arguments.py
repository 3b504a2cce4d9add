"""The checks at the door: what each lets through, and that what it refuses is said in one line."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from varjax.core import arguments
from varjax.core.errors import UserError
from varjax.storage import values

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3)])
def test_whole_numbers(value):
    found = arguments.integer("n", value, 1, 3)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize("value", [1.0, True, np.True_, "1", None, [1], np.array([1, 2]), 1j, 0, 4])
def test_no_whole_numbers(value):
    with pytest.raises(UserError, match="^n="):
        arguments.integer("n", value, 1, 3)


def test_limits_are_named():
    with pytest.raises(UserError, match="^n=4: choose 1 to 3$"):
        arguments.integer("n", 4, 1, 3)
    with pytest.raises(UserError, match="^n=0: at least 1$"):
        arguments.integer("n", 0, 1)
    with pytest.raises(UserError, match=r"^x=2 is outside \(0, 1\]: why$"):
        arguments.number("x", 2, 0, 1, above=True, note=": why")


@pytest.mark.parametrize(
    "value", [NAN, INF, -INF, np.float32(NAN), 10**400, True, "1", None, 2, 1j]
)
def test_no_numbers(value):
    with pytest.raises(UserError, match="^x="):
        arguments.number("x", value, 0, 1)
    if value != 2:
        with pytest.raises(UserError, match="^x="):
            arguments.number("x", value)


@pytest.mark.parametrize(
    "values", [[1, 2], (1, 2), range(1, 3), np.array([1, 2], np.uint8), jnp.array([1, 2])]
)
def test_lists_of_whole_numbers(values):
    assert arguments.integers("n", values, "give a list", 2).tolist() == [1, 2]


@pytest.mark.parametrize(
    "values",
    [
        *([1.7], [1, True], [None], ["3"], [[1], [2]], "12", b"12", {1, 2}, {1: 2}, 3, None),
        *(np.array([1.7]), np.array([True]), np.array([[1]]), np.array(1), np.array([1, None])),
        *(range(10**12), range(10**30), pytest.param(iter([1]), id="iterator")),
    ],
    ids=repr,
)
def test_no_lists_of_whole_numbers(values):
    with pytest.raises(UserError):
        arguments.integers("n", values, "give a list", 2)


@pytest.mark.parametrize("value", ["bfloat16", jnp.bfloat16, np.dtype(jnp.bfloat16)])
def test_types_of_numbers(value):
    assert arguments.dtype("dtype", value, ("bfloat16", "int8")) == "bfloat16"


@pytest.mark.parametrize(
    "value",
    [None, "a", "", 7, "float64", float, [], object(), np.float16]
    + [np.int8(1), jnp.bfloat16(1), np.zeros(2, np.int8), True],
    ids=lambda value: repr(value)[:20],
)
def test_no_types_of_numbers(value):
    with pytest.raises(UserError, match="choose one of bfloat16, int8"):
        arguments.dtype("dtype", value, ("bfloat16", "int8"))


@pytest.mark.parametrize(
    "value",
    [3, None, "", "a\0b", b"x", ["x"], "\ud800", Path("a/\ud800")]
    + ["x" * 10**6, "x/" * 2048, "x" * 256, "a/" + "ä" * 128 + "/b"],
    ids=lambda value: repr(value)[:20],
)
def test_no_paths(value):
    assert values.path("file", Path("x")) == Path("x")
    with pytest.raises(UserError, match="^file=") as error:
        values.path("file", value)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("value", ["x/" * 2047, "x" * 255, "ä.json", "\udc80"])
def test_paths(value):
    assert values.path("file", value) == value


@pytest.mark.parametrize("value", ["a", [], ["a", 3], ["\ud800"], None])
def test_no_texts(value):
    assert values.texts("texts", ["a", ""], "give texts") == ("a", "")
    with pytest.raises(UserError, match="^texts"):
        values.texts("texts", value, "give texts")


def test_messages_stay_short():
    for value in ("x" * 10**6, 10**5000, np.zeros((40, 40)), ["\n"] * 50):
        with pytest.raises(UserError) as error:
            arguments.flag("flag", value)
        assert len(str(error.value)) < 150 and "\n" not in str(error.value)
