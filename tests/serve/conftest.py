"""Servers of the tests draw no pictures by themselves."""

import pytest

from tests import models_under_test as models
from tests.serve import server


@pytest.fixture(scope="session", autouse=True)
def no_gallery():
    page = pytest.importorskip("experiments.serve.page", reason="needs the extra serve")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "MOST", 0)
        yield


@pytest.fixture(scope="package")
def programs():
    found = server.programs_of(models.fixture_model(server.MODEL), most=1)
    found.compile()
    return found


@pytest.fixture(scope="package")
def address(programs):
    with server.guarded(programs) as address:
        yield address
