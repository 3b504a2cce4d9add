"""Servers of the tests draw no pictures by themselves."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_gallery():
    page = pytest.importorskip("experiments.serve.page", reason="needs the extra serve")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "MOST", 0)
        yield
