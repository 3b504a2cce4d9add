import pytest

from tests.evaluation import recipe
from varjax.evaluation.extractors import open_inception


@pytest.fixture(scope="session")
def inception_folder():
    """The network of 1/8 width, converted."""
    return recipe.converted("inception-fid")


@pytest.fixture(scope="session")
def inception(inception_folder):
    return open_inception(str(inception_folder), "tf1")
