import pytest

from experiments.evaluation.extractors import open_inception
from tests.experiments.evaluation import recipe


@pytest.fixture(scope="session")
def inception_folder():
    """The network of 1/8 width, converted."""
    return recipe.converted("inception-fid")


@pytest.fixture(scope="session")
def inception(inception_folder):
    return open_inception(str(inception_folder), recipe.PATHS["tf1"])
