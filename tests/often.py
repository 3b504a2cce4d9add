"""Cases that every run of the tests takes, among others that `--slow` adds."""

from collections.abc import Collection, Iterable

import pytest


def often(chosen: Collection, cases: Iterable) -> list:
    """All cases for `pytest.mark.parametrize`, those not `chosen` only with --slow. A case is a
    value, or a tuple of one for each name."""
    assert (cases := list(cases)) and not set(chosen) - set(cases), "chosen are cases, too"
    return [case if case in chosen else _slow(case) for case in cases]


def _slow(case):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
