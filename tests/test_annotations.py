"""The checker of annotations that all tests run under: what passed once is no excuse for others."""

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from tests import annotations

decorator = jaxtyping.jaxtyped(typechecker=annotations.check)


@decorator
def scaled(x: Float[Array, "N D"], by: Float[Array, " D"] | None = None, *, shape=None):
    return x if by is None else x * by


@decorator
def summed(x: Float[Array, "N D"], answer: str = "") -> Float[Array, " N"]:
    wrong = {"shape": jnp.zeros(7), "kind": jnp.zeros(len(x), jnp.int32), "none": None}
    return wrong[answer] if answer else x.sum(1)


@decorator
def both(
    x: Float[Array, " N"], pair: tuple[Int[Array, " N"], int]
) -> tuple[Array, Float[Array, " N"]]:
    return pair[0], x[: pair[1]]


@decorator
def tiled(x: Float[Array, " N"], times: int) -> Float[Array, " {times}*N"]:
    return jnp.tile(x, min(times, 3))


@decorator
def stacked(parts: list[Float[Array, " N"]]) -> Float[Array, "L N"]:
    return jnp.stack(parts)


@decorator
@dataclasses.dataclass
class Line:
    start: Float[Array, " D"]
    end: Float[Array, " D"] | None = None
    name: str = ""


def wrong():
    return pytest.raises(jaxtyping.TypeCheckError)


def test_every_other_wrong_call_is_refused():
    x = jnp.ones((2, 3))
    for _ in range(2):  # the second time these are known
        scaled(x)
        scaled(x, jnp.ones(3))
        scaled(x, by=jnp.ones(3), shape=(1,))
        for by in (jnp.ones(2), jnp.ones(4), jnp.ones((1, 3)), jnp.ones(3, jnp.int32), np.ones(3)):
            with wrong():
                scaled(x, by)
            with wrong():
                scaled(x, by=by)
        for other in (x[0], x.astype(int), np.ones((2, 3)), None, 1.0):
            with wrong():
                scaled(other)
    assert scaled(jnp.ones((5, 3)), jnp.ones(3)).shape == (5, 3)


def test_under_jit():
    assert jax.jit(scaled)(jnp.ones((2, 3)), jnp.ones(3)).shape == (2, 3)
    for _ in range(2):
        with wrong():
            jax.jit(scaled)(jnp.ones((2, 3)), jnp.ones(2))


def test_a_wrong_result_is_refused_when_its_arguments_are_known():
    x = jnp.ones((2, 3))
    for _ in range(2):
        assert summed(x).shape == (2,)
        for answer in ("shape", "kind", "none"):
            with wrong():
                summed(x, answer)
            with wrong():
                summed(jnp.ones((4, 1)), answer=answer)


def test_parts_of_tuples():
    x, counts = jnp.ones(3), jnp.ones(3, int)
    for _ in range(2):
        both(x, (counts, 3))
        for pair in ((counts[1:], 3), (x, 3), (counts, 2), (counts, None), counts):
            with wrong():
                both(x, pair)


def test_numbers_in_braces_and_lists_are_looked_at_every_time():
    for _ in range(2):
        assert tiled(jnp.ones(2), 3).shape == (6,)
        with wrong():
            tiled(jnp.ones(2), 4)
        assert stacked([jnp.ones(2)]).shape == (1, 2)
        with wrong():
            stacked([jnp.ones((1, 2))])


def test_fields():
    for _ in range(2):
        Line(jnp.ones(2), jnp.ones(2))
        Line(jnp.ones(2), name="half")
        for start, end in ((jnp.ones(2), jnp.ones(3)), (jnp.ones((2, 2)), None), (None, None)):
            with wrong():
                Line(start, end)
            with wrong():
                Line(start=start, end=end, name="other")


def test_what_jax_rebuilds_may_hold_anything():
    jax.tree_util.register_dataclass(Line, ["start", "end"], ["name"])
    line = jax.tree.map(jnp.shape, Line(jnp.ones(2), jnp.ones(2)))
    assert line.start == (2,)


def test_nothing_is_checked_on_request(unchecked):
    assert summed(jnp.ones((2, 3)), "none") is None
    Line(None)


def test_code_is_under_the_checker_and_functions_without_arrays_are_as_they_were():
    from varjax.codecs import maps

    assert hasattr(maps.patchify, "__wrapped__")
    with wrong():
        maps.patchify(jnp.ones((2, 2)), 2)

    def plain(count: int) -> str:
        return str(count)

    assert decorator(plain) is plain
