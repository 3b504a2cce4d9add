"""Files of statistics: ADM's and pytorch-fid's keys; what is wrong with others."""

import numpy as np
import pytest

from experiments.evaluation import references
from experiments.evaluation.statistics import Gaussian
from varjax.core.errors import UserError

SOUND = {"mu": np.zeros(4, np.float32), "sigma": np.eye(4)}
WRONG = {
    "alone": ({"mu": np.zeros(4)}, "has `mu` alone: `mu` and `sigma` belong together"),
    "shape": (SOUND | {"sigma": np.eye(5)}, r"`mu` is \[4\] and `sigma` \[5, 5\]"),
    "number": (SOUND | {"mu": np.zeros((4, 1))}, r"`mu` is \[4, 1\]"),
    "nan": (SOUND | {"mu": np.array([0, np.nan, 0, 0])}, "`mu` holds values that are NaN"),
    "infinite": (SOUND | {"sigma": np.full((4, 4), np.inf)}, "`sigma` holds values that are NaN"),
    "integers": (SOUND | {"mu": np.zeros(4, int)}, "`mu` holds .*int64"),
    "no covariance": (SOUND | {"sigma": -np.eye(4)}, "`sigma` is no covariance"),
    "crooked": (SOUND | {"sigma": np.eye(4) + np.triu(np.ones((4, 4)))}, "must be symmetric"),
    "spatial": (SOUND | {"mu_s": np.zeros(4)}, "has `mu_s` alone"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_files_are_refused(tmp_path, case):
    arrays, problem = WRONG[case]
    np.savez(tmp_path / "r.npz", **arrays)
    with pytest.raises(UserError, match=problem) as caught:
        references.read_statistics(tmp_path / "r.npz")
    assert "r.npz" in str(caught.value)


def test_other_extractors_are_told_apart(tmp_path):
    gaussian = Gaussian(np.zeros(4), np.diag([1.0, 1, 1, 0]))
    notes = {"extractor": "a" * 64, "protocol": "adm"}
    references.write_statistics(tmp_path / "r.npz", {"pool": gaussian}, notes)
    found = references.read_statistics(tmp_path / "r.npz")
    found.check("r.npz", {"pool": 4}, notes)
    with pytest.raises(UserError, match="`mu` has 4 numbers, the extractor gives 8 features"):
        found.check("r.npz", {"pool": 8}, notes)
    with pytest.raises(UserError, match="made with another protocol .adm, now clean-fid"):
        found.check("r.npz", {"pool": 4}, notes | {"protocol": "clean-fid"})
    (remark,) = found.remarks("r.npz")
    assert "`sigma` has rank 3 of 4" in remark
    np.savez(tmp_path / "r.npz", mu=gaussian.mean, sigma=np.eye(4), extractor=np.array("a" * 64))
    (remark,) = references.read_statistics(tmp_path / "r.npz").remarks("r.npz")
    assert "r.npz does not say which protocol made it" in remark
