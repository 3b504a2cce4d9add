"""The rule engine on a toy module: placement, transforms, and all problems in one report."""

from dataclasses import dataclass

import chex
import numpy as np
import pytest
from flax import nnx

from ported_weights import rules
from ported_weights.rules import Ignore, Refuse, Take
from varjax.core.errors import UserError
from varjax.storage import parameters


class Toy(nnx.Module):
    """Two stacked layers, a projection and a convolution."""

    def __init__(self, config, rngs):
        self.layers = nnx.Dict(kernel=nnx.Param(np.zeros((2, 3, 4), "f4")))
        self.head = nnx.Linear(4, 5, rngs=rngs)
        self.conv = nnx.Conv(2, 3, (3, 3), use_bias=False, rngs=rngs)


@dataclass
class Lazy:
    """A tensor that counts how often it is read."""

    array: np.ndarray
    reads: int = 0

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        return self.array.dtype

    def read(self):
        self.reads += 1
        return self.array


TABLE = [
    Take(r"blocks\.(\d+)\.w", "layers/kernel", "linear", stack=1),
    Take(r"(head)\.weight", r"\1/kernel", "linear"),
    Take(r"(head)\.bias", r"\1/bias"),
    Take(r"conv\.weight", "conv/kernel", "conv"),
    Ignore(r"buffer", "not needed", lambda a: "must be zero" if a.any() else None),
    Refuse(r"old\..*", "an older layout"),
]
SHAPES = {
    "blocks.0.w": (4, 3),
    "blocks.1.w": (4, 3),
    "head.weight": (5, 4),
    "head.bias": (5,),
    "conv.weight": (3, 2, 3, 3),
    "buffer": (2,),
}


def _tensors(dtype="f4", **changes):
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}
    arrays["buffer"] = np.zeros(2, dtype)
    arrays |= {name.replace("__", "."): array for name, array in changes.items()}
    return {name: Lazy(array) for name, array in arrays.items() if array is not None}


def _apply(tensors, table=TABLE):
    return rules.apply(table, tensors, parameters.abstract(Toy, None))


def _problems(tensors, table=TABLE) -> list[str]:
    with pytest.raises(UserError) as caught:
        _apply(tensors, table)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_every_tensor_finds_its_place():
    tensors = _tensors()
    module, placement = _apply(tensors)
    found = parameters.named(module)
    for layer in (0, 1):
        chex.assert_trees_all_equal(
            found["layers/kernel"][layer], tensors[f"blocks.{layer}.w"].array.T
        )
    chex.assert_trees_all_equal(found["head/kernel"], tensors["head.weight"].array.T)
    chex.assert_trees_all_equal(found["head/bias"], tensors["head.bias"].array)
    chex.assert_trees_all_equal(
        found["conv/kernel"], tensors["conv.weight"].array.transpose(2, 3, 1, 0)
    )
    assert len(placement.moves) == 5 and placement.ignored == [("buffer", "not needed")]
    assert all(tensor.reads == 1 for tensor in tensors.values())


@pytest.mark.parametrize("dtype, expected", [("f2", "float16"), ("f8", "float32")])
def test_types_follow_the_source(dtype, expected):
    found = parameters.named(_apply(_tensors(dtype))[0])
    assert {str(leaf.dtype) for leaf in found.values()} == {expected}


def test_missing_surplus_and_misshapen_are_listed_together():
    tensors = _tensors(
        blocks__1__w=None,
        head__weight=np.ones((5, 3), "f4"),
        head__bias=np.ones((5, 1), "f4"),
        conv__weight=np.ones((3, 2), "f4"),
        blocks__7__w=np.ones((4, 3), "f4"),
        blocks__10__w=np.ones((4, 3), "f4"),
        extra=np.ones(3, "f4"),
        old__w=np.ones(3, "f4"),
        buffer=np.ones(2, "f4"),
    )
    assert _problems(tensors) == [
        "missing: blocks.1.w",
        "surplus: blocks.7.w [4, 3] (the configuration has no place for it)",
        "surplus: blocks.10.w [4, 3] (the configuration has no place for it)",
        "surplus: extra [3] (no rule for it)",
        "surplus: old.w (an older layout)",
        "wrong shape: conv.weight is [3, 2], but [3, 3, 2, 3] is expected after 'conv'",
        "wrong shape: head.bias is [5, 1], but [5] is expected",
        "wrong shape: head.weight is [5, 3], which becomes [3, 5] instead of [4, 5]",
        "wrong value: buffer must be zero",
    ]
    assert all(t.reads == 0 for name, t in tensors.items() if name != "buffer")


def test_integers_and_values_that_are_not_finite():
    assert _problems(_tensors(head__bias=np.ones(5, "i8"))) == [
        "wrong type: head.bias is int64, not float32"
    ]
    bad = np.array([1, np.nan, np.inf, 2, 3], "f4")
    assert _problems(_tensors(head__bias=bad)) == [
        "not finite: head.bias has 2 values that are NaN or infinite"
    ]


# --- released checkpoints -------------------------------------------------------------------------


def test_names_that_two_rules_match_or_none():
    two = [*TABLE, Take(r"head\..*", "head/bias")]
    problems = _problems(_tensors(), two)
    assert "surplus: head.bias [5] (2 rules match)" in problems
    assert "missing: head.bias" in problems
    twice = [*TABLE, Take(r"head\.other", "head/bias")]
    problems = _problems(_tensors(head__other=np.ones(5, "f4")), twice)
    assert problems == ["given twice: head/bias by head.bias and head.other"]
    none = [rule for rule in TABLE if "conv" not in rule.pattern]
    problems = _problems(_tensors(conv__weight=None), none)
    assert problems == ["missing: conv/kernel (no rule leads to it)"]


def test_long_reports():
    """Numbers are sorted as such; each kind of problem is shown, of many the first hundred."""
    given = ["missing: a", *(f"surplus: b.{i}" for i in range(10**4))]
    with pytest.raises(UserError, match=r"(?s)10001 problems:.*and 9900 more") as caught:
        rules._report(given)
    lines = str(caught.value).splitlines()
    assert lines[1].strip() == "missing: a" and lines[12].strip() == "surplus: b.10"
