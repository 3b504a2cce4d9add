"""`--mesh` as it is written and what it refuses."""

import pytest

from varjax.core.errors import UserError
from varjax.generation.mesh import MeshSpec


def test_parse():
    assert MeshSpec.parse("data=4,model=2") == MeshSpec(4, 2)
    assert MeshSpec.parse("model=2") == MeshSpec(1, 2)
    assert MeshSpec.parse(None) == MeshSpec.parse("") == MeshSpec()
    assert MeshSpec(4, 2).num_devices == 8
    assert MeshSpec.parse(str(MeshSpec(4, 2))) == MeshSpec(4, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", "key=value"),
        ("date=8", "did you mean 'data'"),
        ("data=8,data=4", "given twice"),
        ("data=0", "data=0 is no number"),
        ("data=-1", "is no number"),
        ("data=" + "9" * 5000, "is no number"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(UserError, match=message):
        MeshSpec.parse(text)


def test_what_is_left_over():
    assert MeshSpec.parse("data=-1,model=2", 8) == MeshSpec(4, 2)
    assert MeshSpec.parse("data=-1,model=16", 8) == MeshSpec(1, 16)  # refused by `check`
    with pytest.raises(UserError, match="model=-1: only one axis may be -1"):
        MeshSpec.parse("data=-1,model=-1", 8)
    for text, devices in (("data=-2", 8), ("data=-1", None)):
        with pytest.raises(UserError, match="is no number of devices"):
            MeshSpec.parse(text, devices)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (MeshSpec(512), "takes 512 devices, tpu-v5e has at most 256"),
        (MeshSpec(3), "multiple of 3"),
        (MeshSpec(1, 4), "30 heads cannot be split evenly over model=4"),
    ],
)
def test_check(mesh, message):
    sizes = dict(batch_size=8, num_heads=30, available=256, where="tpu-v5e")
    assert MeshSpec(4, 2).check(**sizes) == MeshSpec(4, 2)
    with pytest.raises(UserError, match=message):
        mesh.check(**sizes)
