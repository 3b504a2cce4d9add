"""Class labels by number and by name."""

import numpy as np
import pytest

from varjax.core.errors import UserError
from varjax.models.labels import Labels

NAMES = ["tench, Tinca tinca", "crane", "Lemon  tree", "crane", "7"]


def test_names_stand_for_numbers():
    """Whatever their case and spaces, and each of ImageNet's synonyms; a name before a number."""
    found = Labels.of(["TINCA tinca", " lemon tree", 0, "3", "7", np.int32(1)], 5, NAMES)
    assert found.numbers.tolist() == [0, 2, 0, 3, 4, 1]


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        ([3, "crane"], NAMES, "'crane' is the name of classes 1, 3: give a number"),
        (["lemon"], NAMES, "no class is called 'lemon': .*did you mean 'lemon tree'?"),
        (["tensh"], NAMES, "did you mean 'tench'?"),
        ([""], NAMES, "no class is called '': give one of the names, or a number$"),
        (["5"], NAMES, "labels 5 are outside the model's 5 classes"),
        (["x"], None, "no class is called 'x': give a number, the model has no names"),
        ("crane", NAMES, "labels='crane': give a list of class numbers or names"),
    ],
)
def test_what_names_no_class(labels, names, message):
    with pytest.raises(UserError, match=message.replace("?", "[?]")):
        Labels.of(labels, 5, names)
